"""The unified form with R, W and V chosen by name.

Source article A leaves open which choice is best; `python -m scripts.search` searches for it. Some choices are named
attentions, such as FoX, linear attention and RWKV-4, with the same parameters and outputs (tests/test_rwv.py), and
RetNet, whose decays are constants there and learned here. They have files of their own to be read and, where the
equation allows it, to compute in time linear in T. Here, each W that depends on Q takes T^2 operations, since the same
code has to serve them all.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Attention
from attn.contents import KEY_WEIGHTS, RECEPTANCES, SCORE_WEIGHTS, VALUES, check_options, log_phi_dot
from attn.decays import ChannelDecay
from attn.kernels import rows
from attn.kernels.causal import exp_weighted_mean, running_sum
from attn.kernels.means import merge_means, running_means
from attn.kernels.products import at_least_float32, float32_product
from attn.parts import (
    apply_rotary,
    causal_mask,
    check_choice,
    exponent_linear,
    head_mix,
    log_phi,
    merge_heads,
    mix_heads,
    per_channel,
    rotary_dims,
    split_heads,
    stop_cancelling_gradient,
)
from attn.position_weights import PositionWeight, causal_softmax, position_weighted_mean, weight_matrix
from attn.ranges import Size
from attn.shifts import SHIFTS
from attn.streaming import Cache, Past, cache_for, mean_step, merge_sums, new_past, sum_step
from attn.unified import Terms, unified


class RWV(Attention):
    """ATT[t,c] = gamma[t] R[t,c] sum_{u<=t} W[t,u,c] V[u,c] / sum_{u<=t} W[t,u,c]

    The output projection is linear(eC, C), where e is `expansion`.

    Args:
        R: `one`, or `sigmoid`, `gelu`, `silu` or `relu2` of linear(C, eC).
        V: `linear`, `gelu` or `silu` of linear(C, eC).
        W: `w` is the position weight w, a `PositionWeight`. `exp_k` and `sigmoid_k` are functions of K = linear(C, eC).
            The others are functions of Q_t and K_u of channel c's head h, with D dimensions each. With
            S[h,t,u] = Q_t . K_u / sqrt(D), `exp_qk` is exp(S), `qk` is S and `relu2_qk` is relu(S)^2. `phi_qk` is
            phi(Q_t) . phi(K_u), where phi(x) = elu(x) + 1. With the prefix `w_`, as in `w_exp_k`, the function is
            multiplied by w. D is eC / H or, if R is not 1, half of it, at least 1, so that R adds no parameters.
        denominator: `with_w` is the sum above; `without_w` leaves w out of it, as the source author's code does (see
            configs/claim/author_code.yaml); `none` means no denominator. exp_k and exp_qk need a denominator,
            because they could overflow; qk and relu2_qk must have none, because their sum could be 0.
        position_weight: constructor of w, used only if W contains w.
        forget: whether W is also multiplied by a[h,t] a[h,t-1] ... a[h,u+1] with a = sigmoid(linear(C, H)), as in FoX.
        rotary: fraction of each head's dimensions of Q and K that get rotary embeddings, 0 to 1; only for exp_qk and
            qk, with or without w.
        talking_heads: whether the weights of V are mixed over the heads, as in `MHA`. These weights are W divided by
            the denominator, or W itself if there is none. Allowed only if W depends on Q.
        norm: whether the sum is normalised per head before the product with R, as in `recurrence.Recurrent`; only
            without a denominator.
        shift: which token shift is used if `token_shift` is set: `half` (`parts.token_shift`), or `learned` or
            `convolution` (attn/shifts.py).

    Raises ValueError for other names, for combinations that are excluded above or by `check_options`, and for a
    `ChannelDecay` in a W that depends on Q.

    Streaming works as in MHA if W depends on Q. Otherwise it works as in AFT, or in constant memory with `forget`.
    """

    def __init__(
        self,
        dim: Size,
        heads: Size,
        context: Size,
        token_shift: bool,
        R: str,
        W: str,
        V: str,
        denominator: str,
        expansion: Size,
        position_weight: Callable[[], PositionWeight],
        forget: bool,
        rotary: float,
        talking_heads: bool,
        norm: bool,
        shift: str,
        gamma: bool,
        gamma_scales_bias: bool,
        impl: str,
    ):
        width = expansion * dim
        super().__init__(dim, heads, width, token_shift, impl, context if gamma else 0, gamma_scales_bias)
        for name, value, choices in (("R", R, RECEPTANCES), ("V", V, VALUES), ("shift", shift, ("half", *SHIFTS))):
            check_choice(name, value, choices)
        check_options(W, denominator, forget, rotary, talking_heads, norm)
        content = W.removeprefix("w_")
        self.key_weight, self.score_weight = KEY_WEIGHTS.get(content), SCORE_WEIGHTS.get(content)
        weight = self.key_weight or self.score_weight
        self.denominator, self.r_activation, self.v_activation = denominator, RECEPTANCES[R], VALUES[V]
        self.exponential = weight is not None and not weight.bounded
        key_size = width // heads
        if self.score_weight and R != "one":
            key_size = max(key_size // 2, 1)
        self.rotary_dims = rotary_dims(rotary, key_size)
        self.R = nn.Linear(dim, width) if R != "one" else None
        self.V = nn.Linear(dim, width)
        self.K = nn.Linear(dim, heads * key_size) if W != "w" else None
        self.Q = nn.Linear(dim, heads * key_size) if self.score_weight else None
        self.forget = nn.Linear(dim, heads) if forget else None
        self.mix_weights = head_mix(heads, heads, "identity", 1.0) if talking_heads else None
        self.scale = nn.Parameter(torch.ones(heads, 1, width // heads)) if norm else None
        self.shift = SHIFTS[shift](dim) if token_shift and shift != "half" else None
        if W.startswith("w"):
            if position_weight is None:
                raise ValueError(f"W={W} has the factor w, and needs a position_weight: got null")
            self.position_weight = position_weight()
            if self.score_weight and isinstance(self.position_weight, ChannelDecay):
                raise ValueError(f"a decay per channel needs a W that does not depend on Q: got W={W}")

    def receptance(self, x: Tensor) -> Tensor | None:
        """Return R [B, T, width], or None for 1."""
        return None if self.R is None else self.r_activation(self.R(x))

    def values(self, x: Tensor) -> Tensor:
        """Return V [B, T, width]."""
        return self.v_activation(self.V(x))

    def log_key_weight(self, x: Tensor, like: Tensor) -> Tensor:
        """Return the log of the factor of W that depends on K, [B, T, width]; zeros like `like` if there is none."""
        if self.key_weight is None:
            return torch.zeros_like(like)
        # A bias of K in exp(K) cancels between numerator and denominator, so it gets no gradient.
        bias = self.K.bias.detach() if self.exponential else None
        return self.key_weight.function(exponent_linear(x, self.K, bias))

    def queries_and_keys(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return Q and K at the positions from `start` on, [B, H, T, D]."""
        bias = self.K.bias
        if self.exponential:
            bias = stop_cancelling_gradient(bias.unflatten(0, (self.heads, -1)), self.rotary_dims).flatten()
        Q, K = exponent_linear(x, self.Q), exponent_linear(x, self.K, bias)
        return tuple(apply_rotary(split_heads(y, self.heads), self.rotary_dims, start=start) for y in (Q, K))

    def log_forget(self, x: Tensor) -> Tensor:
        """Return log a [B, H, T, 1] in float64, because sums over many positions are subtracted from each other."""
        return split_heads(F.logsigmoid(exponent_linear(x, self.forget)).double(), self.heads)

    def terms(self, x: Tensor) -> Terms:
        V, T = self.values(x), x.shape[1]
        R, gamma, width = self.receptance(x), self.gamma_values(T), V.shape[-1]
        g = None if self.forget is None else self.log_forget(x).cumsum(2)
        # [H or 1, T, T], and [B, H, T, T] or 0
        w, decay = weight_matrix(self.position_weight, T, x), 0.0 if g is None else g - g.mT
        if self.score_weight is not None and self.denominator == "with_w" and self.mix_weights is None:
            return Terms(R, V, per_channel(w, width), per_channel(self.scores(x).double() + decay, width), gamma)
        if self.score_weight is not None:
            positive, seen = self.score_weight.positive, causal_mask(T, x.device, self.window)
            P = final_weights(self.scores(x), w, decay, positive, self.denominator, seen)
            P = P if self.mix_weights is None else torch.einsum("hg,bgtu->bhtu", self.mix_weights.double(), P)
            return Terms(R, V, per_channel(P, width), None, gamma, normalised=False)
        w = per_channel(w, width)
        exponent = None if self.key_weight is None else self.key_weight.function(self.K(x))[:, None]
        if g is not None:
            exponent = exponent + per_channel(decay, width)
        if self.denominator == "with_w":
            return Terms(R, V, w, exponent, gamma)
        if self.denominator == "without_w":
            w = w * causal_softmax_over_u(exponent, x)
        elif exponent is not None:
            w = w * exponent.exp()
        return Terms(R, V, w, None, gamma, normalised=False)

    def scores(self, x: Tensor) -> Tensor:
        """Return the factor of W that depends on Q, or its log if `score_weight.positive`, [B, H, T, T]."""
        q, k = (apply_rotary(split_heads(layer(x), self.heads), self.rotary_dims) for layer in (self.Q, self.K))
        if self.score_weight.function is log_phi_dot:
            return torch.logsumexp(log_phi(q)[:, :, :, None] + log_phi(k)[:, :, None], -1)
        return self.score_weight.function(q, k)

    def reference(self, x: Tensor) -> Tensor:
        terms = self.terms(x)
        if self.scale is None:
            return unified(terms)
        return self.apply_gate(self.normalised(unified(terms._replace(R=None, gamma=None))), terms.R)

    def normalised(self, y: Tensor) -> Tensor:
        """Apply the norm per head to y, the sum of W V, if `norm` is set: [B, T, width] -> [B, T, width]."""
        if self.scale is None:
            return y
        y = split_heads(y, self.heads)
        return merge_heads(F.rms_norm(y, y.shape[-1:], eps=1e-5) * self.scale)

    def algorithm(self, T: int) -> str:
        return super().algorithm(T) if self.score_weight is None else rows.algorithm(T)

    def mix(self, x: Tensor) -> Tensor:
        V = self.values(x)
        y = self.key_weighted_sum(x, V) if self.score_weight is None else self.score_weighted_sum(x, V)
        return self.apply_gate(self.normalised(y), self.receptance(x))

    def key_weighted_sum(self, x: Tensor, V: Tensor) -> Tensor:
        """Compute the sum of W V, divided by the denominator if there is one, for a W that does not depend on Q."""
        T, w = x.shape[1], self.position_weight
        if self.denominator == "none":
            product = running_sum if w is None else w.product(T)
            return product(V if self.key_weight is None else self.log_key_weight(x, V).exp() * V)
        log_k = self.log_key_weight(x, V)
        if self.forget is not None:  # exp(g_t) cancels between numerator and denominator
            g = merge_heads(self.log_forget(x).cumsum(2)).repeat_interleave(V.shape[-1] // self.heads, -1)
            return running_means(log_k - g, at_least_float32(V))[1].to(log_k.dtype)
        if self.denominator == "without_w":
            return exp_weighted_mean(w.product(T), log_k, V, denominator_product=running_sum)
        return position_weighted_mean(w, log_k, V)

    def score_weighted_sum(self, x: Tensor, V: Tensor) -> Tensor:
        """Compute the sum of W V, divided by the denominator if there is one, for a W that depends on Q."""
        q, k = self.queries_and_keys(x)
        g = [] if self.forget is None else [self.log_forget(x).cumsum(2)]
        return merge_heads(rows.attend_by_row_blocks(self.weights, q, k, split_heads(V, self.heads), *g))

    def weights(self, q: Tensor, k: Tensor, g: Tensor | None = None) -> Tensor:
        """Return the weights with which the last n positions receive V from all T positions, [B, H, n, T].

        q [B, H, n, D], k [B, H, T, D]; with `forget`, g [B, H, T, 1] is the sum of log a up to each position.
        """
        S = self.score_weight.function(q, k)
        n, T = S.shape[-2:]
        start, w = T - n, self.position_weight
        decay = 0.0 if g is None else (g[:, :, start:] - g.mT).to(S.dtype)
        if self.denominator != "none":
            P = causal_softmax(S + decay, w, w_in_denominator=self.denominator == "with_w")
        else:
            unseen = ~causal_mask(T, S.device, start=start)
            if self.score_weight.positive:
                S, decay = (S + decay).masked_fill(unseen, -torch.inf).exp(), 0.0
            elif g is not None:
                S = S * decay.masked_fill(unseen, -torch.inf).exp()
            P = weight_matrix(w, T, S, start) * S
        return P if self.mix_weights is None else mix_heads(self.mix_weights, P)

    @property
    def window(self) -> int | None:
        """The number of positions that each position sees; None means all. A denominator without w needs all."""
        w = self.position_weight
        return None if w is None or self.denominator == "without_w" else w.window

    def new_cache(self) -> Cache | Past:
        if self.score_weight is not None:
            return Cache(self.window)
        if self.forget is not None:
            return new_past(self.V.weight)
        merge = merge_sums if self.denominator == "none" else merge_means
        return cache_for(self.position_weight, merge, w_in_denominator=self.denominator != "without_w")

    def mix_step(self, x: Tensor, cache: Cache | Past, t: int) -> Tensor:
        V, of_keys = self.values(x), self.score_weight is None
        y = self.key_weighted_step(x, V, cache) if of_keys else self.score_weighted_step(x, V, cache, t)
        return self.apply_gate(self.normalised(y), self.receptance(x), t)

    def key_weighted_step(self, x: Tensor, V: Tensor, cache: Cache | Past) -> Tensor:
        """Compute `key_weighted_sum` at the next position."""
        log_k = self.log_key_weight(x, V)
        if self.forget is not None:
            log_a = merge_heads(self.log_forget(x)).repeat_interleave(V.shape[-1] // self.heads, -1)
            past, mean = cache.mean
            cache.mean = merge_means((past + log_a, mean), (log_k.double(), V.double()))
            return cache.mean[1].to(log_k.dtype)
        if self.denominator == "none":
            return sum_step(self.position_weight, cache, log_k.exp() * V)
        return mean_step(self.position_weight, cache, log_k, V, w_in_denominator=self.denominator == "with_w")

    def score_weighted_step(self, x: Tensor, V: Tensor, cache: Cache, t: int) -> Tensor:
        """Compute `score_weighted_sum` at position t, which must be the next position of the stream."""
        q, k = self.queries_and_keys(x, start=t)
        g = [] if self.forget is None else [self.log_forget(x)]
        if g and t > 0:
            g = [cache.rows()[2][:, :, -1:] + g[0]]
        k, v, *g = cache.append(k, split_heads(V, self.heads), *g)
        return merge_heads(float32_product(self.weights(q, k, *g), v))


def final_weights(
    S: Tensor, w: Tensor, decay: Tensor | float, positive: bool, denominator: str, seen: Tensor
) -> Tensor:
    """Return the weights of V in `RWV.terms`: W, divided by the denominator if there is one, float64 [B, H, T, T].

    The mask `seen` [T, T] is True for the positions u that t sees. S is the factor of W that depends on Q, or its
    log if `positive`. exp(decay) is the product of the forget gates.
    """
    S = S.double()
    if denominator == "none":
        kept = torch.where(seen, decay, -torch.inf).exp()
        return w * kept * (S.masked_fill(~seen, -torch.inf).exp() if positive else S)
    S = (S + decay).masked_fill(~seen, -torch.inf)
    E = (S - S.amax(-1, keepdim=True)).exp()
    return w * E / (w * E if denominator == "with_w" else E).sum(-1, keepdim=True)


def causal_softmax_over_u(exponent: Tensor | None, x: Tensor) -> Tensor:
    """Return exp(exponent) divided by its sum over u <= t, broadcastable to [B, T, T, C]; the result is 0 at u > t.

    exponent [B, 1, T, C], or None for 0.
    """
    T = x.shape[1]
    causal = causal_mask(T, x.device)[None, :, :, None]
    exponent = x.new_zeros(1, T, T, 1) if exponent is None else exponent.expand(-1, T, -1, -1)
    return exponent.double().masked_fill(~causal, -torch.inf).softmax(2)
