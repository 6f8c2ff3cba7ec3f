"""Multi-head attention, with the switches that make it MHATW, MHA+ and the others' variants of it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Attention, Stream
from attn.kernels.products import float32_product
from attn.kernels.rows import attend_by_rows, way
from attn.parts import (
    causal_mask,
    causal_softmax,
    check_scale,
    dense_w,
    exponent,
    key_offset,
    logit_scale,
    merge_heads,
    per_channel,
    rotary,
    rotary_dims,
    split_heads,
)
from attn.streaming import Past
from attn.unified import Terms, unified
from attn.weightings import Toeplitz


class MHA(Attention):
    """ATT[t,c] = gamma[t] sum_{u<=t} w[h,t,u] exp(S[h,t,u]) V[u,c] / sum_{u<=t} w[h,t,u] exp(S[h,t,u])

    S[h,t,u] = scale * Q_t . K_u in the head h of channel c, with

    - Q, K = linear(C, H key_size), where key_size is C/H unless it is given, V = linear(C, C)
      (Bhojanapalli et al. 2020, arXiv 2002.07028);
    - rotary: the share of each head's dims of Q and K that rotary positions turn, 0 to 1;
    - scale: `sqrt`, 1/sqrt(key_size), or `log_n` (`parts.logit_scale`);
    - carry: `scores` adds the S of the layer before (RealFormer, He et al. 2020, arXiv 2012.11747),
      `qk` adds its Q and its K (source article E's other form of it), `none`;
    - time: w, a weighting of attn/weightings.py; without it, w = 1; what only depends on t, as alpha
      does, cancels and gets no gradient;
    - denominator: the sum above, `with_w`; or `without_w`, sum_{u<=t} exp(S[h,t,u]), so that w multiplies what the
      softmax gives, which is not normalised again; alpha then has a gradient;
    - talking_heads: `logits` replaces S by sum_g M[h,g] S[g]; `weights` replaces the
      weights P, w and the denominator in them, by sum_g M[h,g] P[g]; `both`; `none`. There are `logit_heads`
      heads of Q and K, `heads` softmaxes and `value_heads` heads of V (Shazeer et al. 2020, arXiv 2003.02436);
    - initial_head_mix: `identity`, M[h,g] = 1 where g = h mod the number of columns, else 0, so that the
      model starts with plain heads; `uniform`, M[h,g] uniform in +-1/sqrt(number of columns);
      head_mix_scale: what that start is multiplied by.

    Streaming: all K and V, O(T); where w forgets, a window of them.
    """

    impls = ("reference", "torch", "triton")

    def __init__(
        self,
        dim: int,
        heads: int,
        context: int,
        token_shift: bool,
        time: Callable[[], nn.Module] | None,
        key_size: int | None,
        rotary: float,
        scale: str,
        carry: str,
        denominator: str,
        talking_heads: str,
        logit_heads: int | None,
        value_heads: int | None,
        initial_head_mix: str,
        head_mix_scale: float,
        gamma: bool,
        gamma_scales_bias: bool,
        impl: str,
    ):
        logit_heads = heads if logit_heads is None else logit_heads
        value_heads = heads if value_heads is None else value_heads
        super().__init__(dim, value_heads, context, dim, token_shift, gamma, impl, gamma_scales_bias)
        key_size = dim // logit_heads if key_size is None else key_size
        check_scale(scale, context)
        if carry not in ("none", "scores", "qk"):
            raise ValueError(f"carry must be none, scores or qk: got {carry}")
        if denominator not in ("with_w", "without_w"):
            raise ValueError(f"denominator must be with_w or without_w: got {denominator}")
        if denominator == "without_w" and time is None:
            raise ValueError("with time=null there is no w to leave out: take denominator=with_w")
        if talking_heads not in ("none", "logits", "weights", "both"):
            raise ValueError(f"talking_heads must be none, logits, weights or both: got {talking_heads}")
        if initial_head_mix not in ("identity", "uniform"):
            raise ValueError(f"initial_head_mix must be identity or uniform: got {initial_head_mix}")
        mixes_logits, mixes_weights = talking_heads in ("logits", "both"), talking_heads in ("weights", "both")
        if logit_heads != heads and not mixes_logits:
            raise ValueError(f"logit_heads={logit_heads} beside heads={heads} needs talking_heads=logits or both")
        if value_heads != heads and not mixes_weights:
            raise ValueError(f"value_heads={value_heads} beside heads={heads} needs talking_heads=weights or both")
        self.context, self.scale, self.carry, self.logit_heads = context, scale, carry, logit_heads
        self.turned = rotary_dims(rotary, key_size)
        self.Q, self.K = (nn.Linear(dim, logit_heads * key_size) for _ in range(2))
        self.V = nn.Linear(dim, dim)
        initial = initial_head_mix, head_mix_scale
        self.mix_logits = head_mix(heads, logit_heads, *initial) if mixes_logits else None
        self.mix_weights = head_mix(value_heads, heads, *initial) if mixes_weights else None
        self.w_below = denominator == "with_w"
        self.time = None if time is None else time()
        toeplitz = isinstance(self.time, Toeplitz) and self.time.positive and not self.time.window
        if impl == "triton" and not (self.unmixed and self.w_below and (self.time is None or toeplitz)):
            raise ValueError(
                "impl=triton needs talking_heads=none, denominator=with_w, carry=none or qk, and time=null or a "
                "Toeplitz w with time.positive=true and not time.beyond=forget"
            )

    def forward(self, x: Tensor, carry=None):
        x = self.shifted(x)
        Q, K, V = exponent(x, self.Q), exponent(x, self.K, self.key_bias), self.V(x)
        q, k = self.qk(Q, K)
        if self.carry == "qk":
            q, k = (q, k) if carry is None else (q + carry[0], k + carry[1])
            carry = q, k
        if self.impl != "reference" and self.carry != "scores":
            return self.project(self.receive(merge_heads(self.attend(q, k, split_heads(V, self.heads))))), carry
        S = float32_product(q * self.logit_scale(q), k.mT)
        if self.carry == "scores":
            S = S if carry is None else S + carry
            carry = S
        if self.impl == "reference":
            return self.project(unified(self.read(x, S))), carry
        v = split_heads(V, self.heads)
        return self.project(self.receive(merge_heads(float32_product(self.weights(S), v)))), carry

    def begin_mix(self) -> Past:
        return Past(self.window)

    def step(self, x: Tensor, stream: Stream, carry=None):
        x, t = self.arrive(x, stream)
        Q, K, V = exponent(x, self.Q), exponent(x, self.K, self.key_bias), self.V(x)
        q, k = self.qk(Q, K, start=t)
        if self.carry == "qk":
            q, k = (q, k) if carry is None else (q + carry[0], k + carry[1])
            carry = q, k
        k, v = stream.past.add(k, split_heads(V, self.heads))
        S = float32_product(q * self.logit_scale(q, start=t), k.mT)  # [B, logit_heads, 1, positions kept]
        if self.carry == "scores":
            S = S if carry is None else S + carry
            carry = S
        y = merge_heads(float32_product(self.weights(S), v))
        return self.project(self.receive(y, start=t), t), carry

    @property
    def key_bias(self) -> Tensor:
        return key_offset(self.K.bias.unflatten(0, (self.logit_heads, -1)), self.turned).flatten()

    @property
    def window(self) -> int | None:
        """How many positions the layer sees; None: all. A denominator without w holds what w forgets too."""
        return self.time.window if self.time is not None and self.w_below else None

    @property
    def unmixed(self) -> bool:
        """Whether each head's weights come from its own Q, K and w alone, so that S need not be seen."""
        return self.carry != "scores" and self.mix_logits is None and self.mix_weights is None

    @property
    def plain(self) -> bool:
        """Whether torch's SDPA does the same without all of S in memory; on a CPU it has that for unequal sizes."""
        stores = self.V.weight.device.type == "cpu" and self.Q.out_features != self.V.out_features
        return self.unmixed and self.time is None and not stores

    def way(self, T: int) -> str:
        if self.carry == "scores":
            return "all weights at once"
        return "torch's SDPA" if self.plain else way(T)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The weights times v, [B, value_heads, T, D], where S need not be carried on."""
        scale = self.logit_scale(q)
        if self.impl == "torch" and self.plain:
            if isinstance(scale, Tensor):
                q, scale = q * scale, 1.0
            with torch.autocast("cpu", enabled=False):  # on a CPU it is slower in bf16 than in float32
                return F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True, scale=scale)
        if self.impl == "triton":
            return self.attend_by_kernel(q * scale, k, v)
        return attend_by_rows(lambda q, k: self.weights(float32_product(q, k.mT)), q * scale, k, v)

    def attend_by_kernel(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from attn.kernels.flash import flash_attention  # Triton is not everywhere

        f, _, beta = (None, None, None) if self.time is None else self.time.trained(q.shape[-2])
        return flash_attention(q, k, v, f, beta)

    def qk(self, Q: Tensor, K: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Q and K by heads and turned, [B, logit_heads, T, key_size], at the positions from `start` on."""
        return tuple(rotary(split_heads(y, self.logit_heads), self.turned, start=start) for y in (Q, K))

    def logit_scale(self, q: Tensor, start: int = 0) -> Tensor | float:
        """What q at the positions from `start` on is multiplied by."""
        return logit_scale(self.scale, q.shape[-1], self.context, q.shape[-2], q, start)

    def terms(self, x: Tensor) -> Terms:
        q, k = self.qk(self.Q(x), self.K(x))
        return self.read(x, q * self.logit_scale(q) @ k.transpose(-1, -2))

    def read(self, x: Tensor, S: Tensor) -> Terms:
        """The unified form's terms for logits S [B, logit_heads, T, T], those of earlier layers in them."""
        T, V, S = x.shape[1], self.V(x), S.double()
        if self.mix_logits is not None:
            S = torch.einsum("hg,bgtu->bhtu", self.mix_logits.double(), S)
        w = dense_w(self.time, T, x)
        if self.mix_weights is None and self.w_below:
            factor, exponent = per_channel(w, V.shape[-1]), per_channel(S, V.shape[-1])
            return Terms(R=None, V=V, factor=factor, exponent=exponent, gamma=self.time_gate(T))
        # Mixed weights have their denominators, one per head, inside; so have those that w multiplies afterwards.
        S = S.masked_fill(~causal_mask(T, x.device, self.window), -torch.inf)
        E = (S - S.amax(-1, keepdim=True)).exp()
        P = w * E / (w * E if self.w_below else E).sum(-1, keepdim=True)
        if self.mix_weights is not None:
            P = torch.einsum("hg,bgtu->bhtu", self.mix_weights.double(), P)
        return Terms(R=None, V=V, factor=per_channel(P, V.shape[-1]), gamma=self.time_gate(T), normalised=False)

    def weights(self, S: Tensor) -> Tensor:
        """The weights of V, [B, value_heads, T, T], for logits S [B, logit_heads, T, T]; or the last rows of them."""
        P = self.softmaxes(S)
        return P if self.mix_weights is None else mix_heads(self.mix_weights, P)

    def softmaxes(self, S: Tensor) -> Tensor:
        """P, those weights before the heads are mixed, [B, heads, T, T]; or the last rows of them."""
        S = S if self.mix_logits is None else mix_heads(self.mix_logits, S)
        return causal_softmax(S, self.time, self.w_below)


def head_mix(rows: int, columns: int, initial: str, scale: float) -> nn.Parameter:
    """M [rows, columns] at its start; see `initial_head_mix` and `head_mix_scale` of MHA."""
    if initial == "uniform":
        return nn.Parameter(scale * torch.empty(rows, columns).uniform_(-1, 1) / columns**0.5)
    return nn.Parameter(scale * torch.eye(columns)[torch.arange(rows) % columns])


def mix_heads(mix: Tensor, x: Tensor) -> Tensor:
    """y[b,h,t,u] = sum_g mix[h,g] x[b,g,t,u], in x's type under autocast too."""
    with torch.autocast(x.device.type, enabled=False):
        # As a product of batches: `@` would lay x out anew, a copy that takes longer than the product.
        mixed = torch.bmm(mix.to(x.dtype).expand(len(x), -1, -1), x.flatten(2))
    return mixed.unflatten(2, x.shape[2:])
