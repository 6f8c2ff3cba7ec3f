"""Multi-head attention, with options for MHATW, MHA+, RealFormer, talking heads, gated attention, XSA and others."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Attention
from attn.kernels import rows
from attn.kernels.products import at_least_float32, float32_product
from attn.parts import (
    apply_rotary,
    causal_mask,
    check_choice,
    check_scale,
    exponent_linear,
    head_mix,
    logit_scale,
    merge_heads,
    mix_heads,
    per_channel,
    rotary_dims,
    split_heads,
    stop_cancelling_gradient,
)
from attn.position_weights import PositionWeight, causal_softmax, is_positive_toeplitz, weight_matrix
from attn.ranges import Size
from attn.streaming import Cache, LayerState
from attn.unified import Terms, unified


class MHA(Attention):
    """ATT[t,c] = gamma[t] R[t,c] sum_{u<=t} w[h,t,u] exp(S[h,t,u]) V[u,c] / sum_{u<=t} w[h,t,u] exp(S[h,t,u])

    h is the head of channel c, and S[h,t,u] = scale * Q_t . K_u are the scores of that head. Without `gate`, R = 1.

    Args:
        position_weight: constructor of w; None means w = 1. With denominator=with_w, a factor of w that depends on t
            alone cancels, such as alpha in `Toeplitz` (attn/position_weights.py). alpha then gets a gradient only with
            impl=reference, and this gradient consists of rounding errors.
        key_size: dimensions of a head of Q and K; Bhojanapalli et al. 2020, arXiv 2002.07028. None means
            dim / logit_heads, or half of that with `gate`, so that a gate adds no parameters.
        rotary: fraction of each head's dimensions of Q and K that get rotary embeddings, 0 to 1.
        scale: `sqrt` is 1/sqrt(key_size); `log_n` is explained in `parts.logit_scale`.
        residual_attention: `scores` adds the scores of the previous layer (RealFormer, He et al. 2020, arXiv
            2012.11747); `qk` adds its Q and K instead (source article E); `none` adds nothing.
        denominator: `with_w` is the sum above. `without_w` is sum_{u<=t} exp(S[h,t,u]): the softmax of S is multiplied
            by w and not normalised again. Then alpha gets a gradient.
        talking_heads: `logits` replaces S[h] by sum_g M[h,g] S[g]; `weights` does the same with the weights after the
            softmax, including w; `both` does both; `none` mixes nothing. Shazeer et al. 2020, arXiv 2003.02436.
        heads, logit_heads, value_heads: number of heads of the softmax, of Q and K, and of V. None means `heads`.
        initial_head_mix: `identity` sets M[h,g] = 1 for g = h mod (number of columns) and 0 elsewhere, so that the
            heads are independent at first; `uniform` draws M[h,g] uniformly between +-1/sqrt(number of columns).
        head_mix_scale: factor on the initial M.
        gate: whether R = sigmoid(linear(C, C)). Qiu et al. 2025, arXiv 2505.06708.
        exclude_self: whether the weighted mean y_t of each head loses its component along the head's own V_t, so that
            it becomes y_t - (y_t . V_t) V_t / |V_t|^2. At t = 0 this is 0. Zhai 2026, arXiv 2603.09078.

    Streaming caches K and V of all positions, which takes O(T) memory. If w has a window and is part of the
    denominator, it caches only those in the window.
    """

    impls = ("reference", "torch", "triton")

    def __init__(
        self,
        dim: Size,
        heads: Size,
        context: Size,
        token_shift: bool,
        position_weight: Callable[[], PositionWeight] | None,
        key_size: Size | None,
        rotary: float,
        scale: str,
        residual_attention: str,
        denominator: str,
        talking_heads: str,
        logit_heads: Size | None,
        value_heads: Size | None,
        initial_head_mix: str,
        head_mix_scale: float,
        gate: bool,
        exclude_self: bool,
        gamma: bool,
        gamma_scales_bias: bool,
        impl: str,
    ):
        logit_heads = heads if logit_heads is None else logit_heads
        value_heads = heads if value_heads is None else value_heads
        if dim % value_heads and value_heads != heads:
            raise ValueError(f"value_heads must divide dim: value_heads={value_heads}, dim={dim}")
        super().__init__(dim, value_heads, dim, token_shift, impl, context if gamma else 0, gamma_scales_bias)
        check_scale(scale, context)
        check_choice("residual_attention", residual_attention, ("none", "scores", "qk"))
        check_choice("denominator", denominator, ("with_w", "without_w"))
        check_choice("talking_heads", talking_heads, ("none", "logits", "weights", "both"))
        check_choice("initial_head_mix", initial_head_mix, ("identity", "uniform"))
        self.context, self.scale, self.logit_heads = context, scale, logit_heads
        self.residual_attention = residual_attention
        self.w_in_denominator, self.exclude_self = denominator == "with_w", exclude_self
        key_size = max(dim // logit_heads // (2 if gate else 1), 1) if key_size is None else key_size
        self.rotary_dims = rotary_dims(rotary, key_size)
        self.Q, self.K = (nn.Linear(dim, logit_heads * key_size) for _ in range(2))
        self.V = nn.Linear(dim, dim)
        self.R = nn.Linear(dim, dim) if gate else None
        initial = initial_head_mix, head_mix_scale
        self.mix_logits = head_mix(heads, logit_heads, *initial) if talking_heads in ("logits", "both") else None
        self.mix_weights = head_mix(value_heads, heads, *initial) if talking_heads in ("weights", "both") else None
        if position_weight is not None:
            self.position_weight = position_weight()
        self.check_combination(heads, value_heads)

    def check_combination(self, heads: int, value_heads: int) -> None:
        """Raise ValueError if the options do not fit together."""
        if self.position_weight is None and not self.w_in_denominator:
            raise ValueError("denominator=without_w needs a w: with position_weight=null take denominator=with_w")
        if self.logit_heads != heads and self.mix_logits is None:
            raise ValueError(f"logit_heads={self.logit_heads} with heads={heads} needs talking_heads=logits or both")
        if value_heads != heads and self.mix_weights is None:
            raise ValueError(f"value_heads={value_heads} with heads={heads} needs talking_heads=weights or both")
        has_kernel = self.position_weight is None or is_positive_toeplitz(self.position_weight)
        if self.impl == "triton" and not (has_kernel and self.heads_are_independent and self.w_in_denominator):
            raise ValueError(
                "impl=triton needs talking_heads=none, denominator=with_w, residual_attention=none or qk, and "
                "position_weight=null or a Toeplitz w with position_weight.positive=true and "
                "position_weight.extrapolation=error or constant"
            )

    def forward(self, x: Tensor, carry=None):
        x = self.shift_tokens(x)
        q, k, carry = self.queries_and_keys(x, carry)
        v = split_heads(self.V(x), self.heads)
        if self.impl != "reference" and self.residual_attention != "scores":
            return self.project_heads(self.attend(q, k, v), x, v), carry
        S, carry = self.scores(q, k, carry)
        if self.impl == "reference":
            return self.project(unified(self.terms_of_scores(x, S))), carry
        return self.project_heads(float32_product(self.weights(S), v), x, v), carry

    def new_cache(self) -> Cache:
        return Cache(self.window)

    def step(self, x: Tensor, state: LayerState, carry=None):
        x, t = self.next_input(x, state)
        q, k, carry = self.queries_and_keys(x, carry, start=t)
        k, v = state.cache.append(k, split_heads(self.V(x), self.heads))
        S, carry = self.scores(q, k, carry, start=t)
        return self.project_heads(float32_product(self.weights(S), v), x, v[..., -1:, :], t), carry

    def project_heads(self, y: Tensor, x: Tensor, v: Tensor, start: int = 0) -> Tensor:
        """Compute the layer's output [B, T, dim] for the weighted means y and the values v [B, value_heads, T, D].

        y, v and the layer's input x [B, T, dim], after the token shift, hold the positions from `start` on.
        """
        if self.exclude_self:
            first = 1 if start == 0 else 0  # at t = 0 the result is 0; computing it would leave rounding errors
            y = F.pad(remove_component(y[:, :, first:], v[:, :, first:]), (0, 0, first, 0))
        return self.project(self.apply_gate(merge_heads(y), self.receptance(x), start), start)

    def receptance(self, x: Tensor) -> Tensor | None:
        """Return R [B, T, dim], or None for 1."""
        return None if self.R is None else self.R(x).sigmoid()

    def queries_and_keys(self, x: Tensor, carry, start: int = 0):
        """Return q, k [B, logit_heads, T, key_size] at the positions from `start` on, and the new carry."""
        bias = stop_cancelling_gradient(self.K.bias.unflatten(0, (self.logit_heads, -1)), self.rotary_dims).flatten()
        q, k = self.rotated_heads(exponent_linear(x, self.Q), exponent_linear(x, self.K, bias), start)
        if self.residual_attention == "qk":
            q, k = (q, k) if carry is None else (q + carry[0], k + carry[1])
            carry = q, k
        return q, k, carry

    def rotated_heads(self, Q: Tensor, K: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Split Q and K into heads and apply rotary embeddings, [B, T, H * key_size] -> [B, H, T, key_size]."""
        return tuple(apply_rotary(split_heads(y, self.logit_heads), self.rotary_dims, start=start) for y in (Q, K))

    def scores(self, q: Tensor, k: Tensor, carry, start: int = 0):
        """Return S [B, logit_heads, positions of q, positions of k], and the new carry."""
        S = float32_product(q * self.logit_scale(q, start), k.mT)
        if self.residual_attention == "scores":
            S = S if carry is None else S + carry
            carry = S
        return S, carry

    def logit_scale(self, q: Tensor, start: int = 0) -> Tensor | float:
        """Return the factor of q at the positions from `start` on; see `parts.logit_scale`."""
        return logit_scale(self.scale, q, self.context, start)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute the weights times v, [B, value_heads, T, D], without storing all scores if T is large."""
        scale = self.logit_scale(q)
        if self.impl == "torch" and self.uses_sdpa:
            if isinstance(scale, Tensor):
                q, scale = q * scale, 1.0
            with torch.autocast("cpu", enabled=False):  # on a CPU, bf16 is slower here than float32
                return F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True, scale=scale)
        if self.impl == "triton":
            from attn.kernels.flash import flash_attention  # imported here, since Triton is not installed everywhere

            w = self.position_weight
            f, _, beta = (None, None, None) if w is None else w.raw_factors(q.shape[-2])
            return flash_attention(q * scale, k, v, f, beta)
        return rows.attend_by_row_blocks(lambda q, k: self.weights(float32_product(q, k.mT)), q * scale, k, v)

    @property
    def window(self) -> int | None:
        """The number of positions that each position sees; None means all. A denominator without w needs all."""
        w = self.position_weight
        return w.window if w is not None and self.w_in_denominator else None

    @property
    def heads_are_independent(self) -> bool:
        """Whether the weights of each head depend only on its own Q, K and w, as SDPA and the Triton kernel need."""
        return self.residual_attention != "scores" and self.mix_logits is None and self.mix_weights is None

    @property
    def uses_sdpa(self) -> bool:
        """Whether impl=torch calls torch's scaled_dot_product_attention (SDPA).

        It does if SDPA computes the same values without storing all scores. On a CPU, SDPA stores them if Q and V
        differ in size.
        """
        stores_scores = self.V.weight.device.type == "cpu" and self.Q.out_features != self.V.out_features
        return self.heads_are_independent and self.position_weight is None and not stores_scores

    def algorithm(self, T: int) -> str:
        if self.residual_attention == "scores":
            return "all weights at once"
        return "torch's SDPA" if self.uses_sdpa else rows.algorithm(T)

    def weights(self, S: Tensor) -> Tensor:
        """Return the weights of V, [B, value_heads, T, T], for S [B, logit_heads, T, T] or its last rows."""
        P = self.softmax_weights(S)
        return P if self.mix_weights is None else mix_heads(self.mix_weights, P)

    def softmax_weights(self, S: Tensor) -> Tensor:
        """Return the weights before `mix_weights` is applied, [B, heads, T, T], for S as in `weights`."""
        S = S if self.mix_logits is None else mix_heads(self.mix_logits, S)
        return causal_softmax(S, self.position_weight, self.w_in_denominator)

    def terms(self, x: Tensor) -> Terms:
        """Return the terms of this layer alone, without what `residual_attention` takes from the previous layer.

        With impl=reference, `forward` computes the scores with that part and passes them to `terms_of_scores`.
        """
        q, k = self.rotated_heads(self.Q(x), self.K(x))
        return self.terms_of_scores(x, q * self.logit_scale(q) @ k.transpose(-1, -2))

    def terms_of_scores(self, x: Tensor, S: Tensor) -> Terms:
        """Return the terms for scores S [B, logit_heads, T, T], adding nothing of the previous layer to them."""
        T, R, V, S = x.shape[1], self.receptance(x), self.V(x), S.double()
        if self.mix_logits is not None:
            S = torch.einsum("hg,bgtu->bhtu", self.mix_logits.double(), S)
        w = weight_matrix(self.position_weight, T, x)
        if self.mix_weights is None and self.w_in_denominator and not self.exclude_self:
            factor, exponent = per_channel(w, V.shape[-1]), per_channel(S, V.shape[-1])
            return Terms(R=R, V=V, factor=factor, exponent=exponent, gamma=self.gamma_values(T))
        # P is divided by its denominator here, and returned as Terms without one, because talking heads and
        # exclude_self change the weights after this division, and denominator=without_w leaves w out of it.
        S = S.masked_fill(~causal_mask(T, x.device, self.window), -torch.inf)
        E = (S - S.amax(-1, keepdim=True)).exp()
        P = w * E / (w * E if self.w_in_denominator else E).sum(-1, keepdim=True)
        if self.mix_weights is not None:
            P = torch.einsum("hg,bgtu->bhtu", self.mix_weights.double(), P)
        if self.exclude_self:  # y_t loses a multiple of V_t, so only the diagonal of P changes
            v = split_heads(V.double(), self.heads)
            P = P - torch.diag_embed((P @ v * v).sum(-1) / v.square().sum(-1).clamp(min=1e-24))
            P = F.pad(P[:, :, 1:], (0, 0, 1, 0))
        return Terms(R=R, V=V, factor=per_channel(P, V.shape[-1]), gamma=self.gamma_values(T), normalised=False)


def remove_component(y: Tensor, v: Tensor) -> Tensor:
    """Compute y - (y . v) v / |v|^2, and y where v is 0: y, v [..., D] -> [..., D], in float32 or float64."""
    y, unit = at_least_float32(y), F.normalize(at_least_float32(v), dim=-1)
    return y - (y * unit).sum(-1, keepdim=True) * unit
