"""The gated attention unit (Hua et al. 2022, arXiv 2202.10447; source articles C and D)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Attention
from attn.kernels import rows
from attn.kernels.products import float32_product
from attn.kernels.toeplitz import toeplitz
from attn.parts import (
    ScaleOffset,
    apply_rotary,
    check_choice,
    check_scale,
    exponent_linear,
    logit_scale,
    rotary_dims,
    silu,
    stop_cancelling_gradient,
)
from attn.position_weights import causal_softmax
from attn.ranges import Size
from attn.streaming import Cache
from attn.unified import Terms


class GAU(Attention):
    """ATT[t,c] = R[t,c] sum_{u<=t} W[t,u] V[u,c]

    There is one head. R, V = silu(linear(C, eC)), and the output projection is linear(eC, C), where e is `expansion`.
    Q and K are copies of Z = silu(linear(C, key_size)), each with its own scale and offset, and rotary embeddings.
    The scores are S[t,u] = scale * Q_t . K_u + b[t-u].

    Args:
        kernel: `relu2` is W[t,u] = relu(S[t,u])^2 / n; `softmax` is W[t,u] = exp(S[t,u]) / sum_{u<=t} exp(S[t,u]).
        divisor: n of `relu2`: `visible` is t+1, the number of visible positions, and `context` is the context length.
            n is never the length of the input, because an output must not depend on later inputs.
        scale: the factor of Q_t . K_u, see `parts.logit_scale`; `log_n` needs kernel=softmax.
        rotary: fraction of the dimensions of Q and K that get rotary embeddings, 0 to 1.
        initial_scale: the scales of Q and K at initialisation, see `parts.ScaleOffset`.
        relative_bias: whether b [context] is learned. Otherwise it is 0.

    Streaming caches K and V of all positions, which takes O(T) memory.
    """

    def __init__(
        self,
        dim: Size,
        context: Size,
        token_shift: bool,
        expansion: Size,
        key_size: Size,
        kernel: str,
        scale: str,
        divisor: str,
        rotary: float,
        initial_scale: str,
        relative_bias: bool,
        impl: str,
    ):
        super().__init__(dim, 1, expansion * dim, token_shift, impl)
        check_choice("kernel", kernel, ("relu2", "softmax"))
        check_choice("divisor", divisor, ("visible", "context"))
        if kernel == "relu2" and scale == "log_n":
            raise ValueError("scale=log_n needs kernel=softmax: relu2 of the first Q . K, times log(1) = 0, would be 0")
        check_scale(scale, context)
        self.context, self.kernel, self.scale, self.divisor = context, kernel, scale, divisor
        self.rotary_dims = rotary_dims(rotary, key_size)
        self.R, self.V = (nn.Linear(dim, expansion * dim) for _ in range(2))
        self.Z = nn.Linear(dim, key_size)
        self.views = ScaleOffset(key_size, 2, initial_scale)
        self.b = nn.Parameter(torch.zeros(context)) if relative_bias else None

    @property
    def max_length(self) -> int | None:
        return None if self.b is None else self.context

    def queries_and_keys(self, z: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return scale * Q, and K, [B, T, key_size], at the positions from `start` on. z is Z before its silu."""
        offset = self.views.offset
        if self.kernel == "softmax":
            offset = torch.stack([offset[0], stop_cancelling_gradient(offset[1], self.rotary_dims)])
        q, k = (apply_rotary(y, self.rotary_dims, start=start) for y in self.views(silu(z), offset))
        return q * logit_scale(self.scale, q, self.context, start), k

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the last rows of S [B, T, T], one for each position of q."""
        (n, T), S = (q.shape[1], k.shape[1]), float32_product(q, k.mT)
        if self.b is None:
            return S
        if T > self.context:
            raise ValueError(f"the relative bias is defined for {self.context} positions: got {T}")
        return S + toeplitz(self.b[None, :T], T - n)

    def divisors(self, T: int, device: torch.device, start: int = 0) -> Tensor | int:
        """Return n at the positions from `start` to T-1."""
        return self.context if self.divisor == "context" else torch.arange(start + 1, T + 1, device=device)[:, None]

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the last rows of W [B, T, T], one for each position of q."""
        S = self.scores(q, k)
        if self.kernel == "softmax":
            return causal_softmax(S, None)
        n, T = S.shape[1:]
        return F.relu(S).square().tril(T - n) / self.divisors(T, S.device, T - n)

    def terms(self, x: Tensor) -> Terms:
        R, V, S = silu(self.R(x)), silu(self.V(x)), self.scores(*self.queries_and_keys(self.Z(x)))
        if self.kernel == "softmax":
            return Terms(R=R, V=V, factor=x.new_ones(()), exponent=S[..., None])
        W = S.clamp(min=0) ** 2 / self.divisors(x.shape[1], x.device)
        return Terms(R=R, V=V, factor=W[..., None], normalised=False)

    def algorithm(self, T: int) -> str:
        return rows.algorithm(T)

    def mix(self, x: Tensor) -> Tensor:
        R, V, Z = silu(self.R(x)), silu(self.V(x)), exponent_linear(x, self.Z)
        return self.apply_gate(rows.attend_by_row_blocks(self.weights, *self.queries_and_keys(Z), V), R)

    def mix_step(self, x: Tensor, cache: Cache, t: int) -> Tensor:
        R, V, Z = silu(self.R(x)), silu(self.V(x)), exponent_linear(x, self.Z)
        q, k = self.queries_and_keys(Z, start=t)
        k, V = cache.append(k, V)
        return self.apply_gate(float32_product(self.weights(q, k), V), R)
