"""The gated attention unit (Hua et al. 2022, arXiv 2202.10447; source articles C and D)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Attention
from attn.kernels.products import float32_product
from attn.kernels.rows import attend_by_rows, way
from attn.kernels.toeplitz import toeplitz
from attn.parts import (
    ScaleOffset,
    causal_mask,
    causal_softmax,
    check_scale,
    exponent,
    key_offset,
    logit_scale,
    rotary,
    rotary_dims,
    silu,
)
from attn.streaming import Past
from attn.unified import Terms


class GAU(Attention):
    """ATT[t,c] = R[t,c] sum_{u<=t} W[t,u] V[u,c]

    with the `kernel` W[t,u] = relu(S[t,u])^2 / n, `relu2`, or exp(S[t,u]) / sum_{u<=t} exp(S[t,u]), `softmax`.
    One head. R, V = silu(linear(C, eC)), e the `expansion`, and linear(eC, C) back; Z = silu(linear(C, key_size));
    Q and K are views of Z with a scale and an offset of their own, turned by rotary positions;
    S[t,u] = scale * Q_t . K_u + b[t-u], where b is learned if `relative_bias`, else 0. `scale` is
    that of `parts.logit_scale`; n is the number of `visible` positions, t+1, or the `context`, never
    the length of the input, on which an output at t must not depend.

    Streaming: all K and V: O(T).
    """

    def __init__(
        self,
        dim: int,
        context: int,
        token_shift: bool,
        expansion: int,
        key_size: int,
        kernel: str,
        scale: str,
        n: str,
        rotary: float,
        relative_bias: bool,
        impl: str,
    ):
        super().__init__(dim, 1, context, expansion * dim, token_shift, gamma=False, impl=impl)
        if kernel not in ("relu2", "softmax"):
            raise ValueError(f"kernel must be relu2 or softmax: got {kernel}")
        if n not in ("visible", "context"):
            raise ValueError(f"n must be visible or context: got {n}")
        if kernel == "relu2" and scale == "log_n":
            raise ValueError(
                "scale=log_n is made for kernel=softmax: with relu2 the first position, log 1, gets nothing"
            )
        check_scale(scale, context)
        self.context, self.kernel, self.scale, self.n = context, kernel, scale, n
        self.turned = rotary_dims(rotary, key_size)
        self.R, self.V = (nn.Linear(dim, expansion * dim) for _ in range(2))
        self.Z = nn.Linear(dim, key_size)
        self.views = ScaleOffset(key_size, views=2)
        self.b = nn.Parameter(torch.zeros(context)) if relative_bias else None

    @property
    def horizon(self) -> int | None:
        return None if self.b is None else self.context

    def qk(self, Z: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Q, scaled, and K, turned, [B, T, key_size], from Z before its silu, at the positions from `start` on."""
        q, k = (rotary(view[:, None], self.turned, start=start)[:, 0] for view in self.views(silu(Z), self.offsets))
        return q * logit_scale(self.scale, q.shape[-1], self.context, q.shape[1], q, start), k

    @property
    def offsets(self) -> Tensor:
        """Those of Q and K."""
        q, k = self.views.offset
        softmax = self.kernel == "softmax"
        return torch.stack([q, key_offset(k, self.turned)]) if softmax else self.views.offset

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """S [B, T, T], or its last rows, as many as q has."""
        (n, T), S = (q.shape[1], k.shape[1]), float32_product(q, k.mT)
        if self.b is None:
            return S
        if T > self.context:
            raise ValueError(f"the relative bias has {self.context} distances and no rule beyond them: got {T}")
        return S + toeplitz(self.b[None, :T], T - n)

    def visible(self, T: int, like: Tensor, t: int = 0) -> Tensor | int:
        """n at the positions from t to T - 1."""
        return self.context if self.n == "context" else torch.arange(t + 1, T + 1, device=like.device)[:, None]

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """W [B, T, T], or its last rows, as many as q has."""
        S = self.logits(q, k)
        if self.kernel == "softmax":
            return causal_softmax(S, None)
        n, T = S.shape[1:]
        return F.relu(S).square().tril(T - n) / self.visible(T, S, T - n)

    def terms(self, x: Tensor) -> Terms:
        R, V, S = silu(self.R(x)), silu(self.V(x)), self.logits(*self.qk(self.Z(x)))
        causal = causal_mask(x.shape[1], x.device)
        if self.kernel == "softmax":
            return Terms(R=R, V=V, factor=causal[None, :, :, None].to(x.dtype), exponent=S[..., None])
        W = S.clamp(min=0) ** 2 * causal / self.visible(x.shape[1], x)
        return Terms(R=R, V=V, factor=W[..., None], normalised=False)

    def way(self, T: int) -> str:
        return way(T)

    def mix(self, x: Tensor) -> Tensor:
        R, V, Z = silu(self.R(x)), silu(self.V(x)), exponent(x, self.Z)
        return self.receive(attend_by_rows(self.weights, *self.qk(Z), V), R)

    def mix_step(self, x: Tensor, past: Past, t: int) -> Tensor:
        R, V, Z = silu(self.R(x)), silu(self.V(x)), exponent(x, self.Z)
        q, k = self.qk(Z, start=t)
        k, V = past.add(k, V)
        return self.receive(float32_product(self.weights(q, k), V), R)
