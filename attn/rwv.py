"""The unified form with R, W and V chosen by name, as a space to search in (source article A's open question)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Attention
from attn.kernels import rows
from attn.kernels.causal import exp_weighted_mean, running_sum
from attn.kernels.products import float32_product
from attn.parts import causal_mask, check_choice, exponent_linear, merge_heads, per_channel, split_heads
from attn.position_weights import PositionWeight, causal_softmax, weight_matrix
from attn.ranges import Size
from attn.streaming import Cache, mean_step, new_mean_cache, new_sum_cache, sum_step
from attn.unified import Terms


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


class Weight(NamedTuple):
    """A factor of W that is a function of K[u] or of the scores S[t,u] = Q_t . K_u / sqrt(D)."""

    function: Callable[[Tensor], Tensor]  # of S; of K its logarithm, which cannot overflow
    bounded: bool = True  # if False, W needs a denominator
    positive: bool = True  # if False, a denominator could be 0, so W must have none


RECEPTANCES = {"one": None, "sigmoid": torch.sigmoid, "gelu": F.gelu, "silu": F.silu, "relu2": relu2}
VALUES = {"linear": lambda x: x, "gelu": F.gelu, "silu": F.silu}
KEY_WEIGHTS = {"exp_k": Weight(lambda K: K, bounded=False), "sigmoid_k": Weight(F.logsigmoid)}
SCORE_WEIGHTS = {"exp_qk": Weight(torch.exp, bounded=False), "relu2_qk": Weight(relu2, positive=False)}
DENOMINATORS = ("with_w", "without_w", "none")
WEIGHTS = [prefix + kind for prefix in ("", "w_") for kind in (*KEY_WEIGHTS, *SCORE_WEIGHTS)] + ["w"]


class RWV(Attention):
    """ATT[t,c] = gamma[t] R[t,c] sum_{u<=t} W[t,u,c] V[u,c] / sum_{u<=t} W[t,u,c]

    The output projection is linear(eC, C), where e is `expansion`. h is the head of channel c.

    Args:
        R: `one`, or `sigmoid`, `gelu`, `silu` or `relu2` of linear(C, eC).
        V: `linear`, `gelu` or `silu` of linear(C, eC).
        W: `w`, a `PositionWeight`; or a function of K = linear(C, eC) or of the scores S[h,t,u] = Q_t . K_u / sqrt(D),
            either multiplied by w (`w_exp_k`, ...) or not (`exp_k`, ...).
        denominator: `with_w` is the sum above; `without_w` leaves w out of it, as the source author's later code does;
            `none` is no denominator, and needs a W that is bounded.
        position_weight: constructor of w.

    Raises ValueError for other names and for a W that does not fit the denominator.

    Streaming works as in AFT if W depends on K alone, and as in MHA if it depends on the scores.
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
        gamma: bool,
        gamma_scales_bias: bool,
        impl: str,
    ):
        width = expansion * dim
        super().__init__(dim, heads, context, width, token_shift, gamma, impl, gamma_scales_bias)
        check_choice("R", R, RECEPTANCES)
        check_choice("W", W, WEIGHTS)
        check_choice("V", V, VALUES)
        check_choice("denominator", denominator, DENOMINATORS)
        key_weight, score_weight = (kinds.get(W.removeprefix("w_")) for kinds in (KEY_WEIGHTS, SCORE_WEIGHTS))
        weight = key_weight or score_weight
        check_denominator(W, weight, denominator)
        self.denominator, self.r_activation, self.v_activation = denominator, RECEPTANCES[R], VALUES[V]
        self.exponential = weight is not None and not weight.bounded
        self.log_key_weight = key_weight and key_weight.function
        self.score_weight = score_weight and score_weight.function
        self.R = nn.Linear(dim, width) if R != "one" else None
        self.V = nn.Linear(dim, width)
        self.K = nn.Linear(dim, width) if W != "w" else None
        self.Q = nn.Linear(dim, width) if self.score_weight else None
        if W.startswith("w"):
            self.position_weight = position_weight()

    def receptance(self, x: Tensor) -> Tensor | None:
        """Return R [B, T, width], or None for 1."""
        return None if self.R is None else self.r_activation(self.R(x))

    def values(self, x: Tensor) -> Tensor:
        """Return V [B, T, width]."""
        return self.v_activation(self.V(x))

    def keys(self, x: Tensor) -> Tensor:
        """Return K [B, T, width]. Its bias has no gradient if it cancels between numerator and denominator."""
        return exponent_linear(x, self.K, self.K.bias.detach() if self.exponential else None)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return scaled Q, and K, [B, H, T, D]."""
        q, k = split_heads(exponent_linear(x, self.Q), self.heads), split_heads(self.keys(x), self.heads)
        return q * q.shape[-1] ** -0.5, k

    def scores(self, x: Tensor) -> Tensor:
        """Return S [B, H, T, T]."""
        q, k = self.queries_and_keys(x)
        return float32_product(q, k.mT)

    def log_weight(self, x: Tensor, like: Tensor) -> Tensor:
        """Return the log of the factor of W that depends on K, [B, T, width]; zeros like `like` if there is none."""
        return torch.zeros_like(like) if self.log_key_weight is None else self.log_key_weight(self.keys(x))

    def terms(self, x: Tensor) -> Terms:
        V = self.values(x)
        width, gamma = V.shape[-1], self.gamma_values(x.shape[1])
        w, exponent = per_channel(weight_matrix(self.position_weight, x.shape[1], x), width), None
        if self.score_weight is torch.exp:
            exponent = per_channel(self.scores(x), width)
        elif self.score_weight is not None:
            w = w * per_channel(self.score_weight(self.scores(x)), width)
        elif self.log_key_weight is not None:
            exponent = self.log_key_weight(self.K(x))[:, None]
        if self.denominator == "with_w":
            return Terms(self.receptance(x), V, w, exponent, gamma)
        if self.denominator == "without_w":
            w = w * causal_softmax_over_u(exponent, x)
        elif exponent is not None:
            w = w * exponent.exp()
        return Terms(self.receptance(x), V, w, None, gamma, normalised=False)

    def algorithm(self, T: int) -> str:
        return super().algorithm(T) if self.score_weight is None else rows.algorithm(T)

    def mix(self, x: Tensor) -> Tensor:
        V = self.values(x)
        y = self.key_weighted_sum(x, V) if self.score_weight is None else self.score_weighted_sum(x, V)
        return self.apply_gate(y, self.receptance(x))

    def key_weighted_sum(self, x: Tensor, V: Tensor) -> Tensor:
        """Compute the sum over W V, divided by the denominator, for a W that does not depend on the scores."""
        T, w = x.shape[1], self.position_weight
        if self.denominator == "none":
            product = running_sum if w is None else w.product(T)
            return product(V if self.log_key_weight is None else self.log_weight(x, V).exp() * V)
        log_k = self.log_weight(x, V)
        if self.denominator == "without_w":
            return exp_weighted_mean(w.product(T), log_k, V, denominator_product=running_sum)
        if w is None:
            return exp_weighted_mean(running_sum, log_k, V)
        return exp_weighted_mean(w.relative_product(T), log_k, V, window=w.window)

    def score_weighted_sum(self, x: Tensor, V: Tensor) -> Tensor:
        """Compute what `key_weighted_sum` does, for a W that depends on the scores."""
        q, k = self.queries_and_keys(x)
        return merge_heads(rows.attend_by_row_blocks(self.weights, q, k, split_heads(V, self.heads)))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the last rows of the weights of V, [B, H, T, T], one for each position of q."""
        S = float32_product(q, k.mT)
        n, T = S.shape[-2:]
        if self.score_weight is not torch.exp:
            return weight_matrix(self.position_weight, T, S, T - n) * self.score_weight(S)
        return causal_softmax(S, self.position_weight, w_in_denominator=self.denominator == "with_w")

    def new_cache(self) -> Cache:
        if self.score_weight is not None:
            sees_window = self.position_weight is not None and self.denominator != "without_w"
            return Cache(self.position_weight.window if sees_window else None)
        if self.denominator == "none":
            return new_sum_cache(self.position_weight)
        return new_mean_cache(self.position_weight, w_in_denominator=self.denominator == "with_w")

    def mix_step(self, x: Tensor, cache: Cache, t: int) -> Tensor:
        step = self.key_weighted_step if self.score_weight is None else self.score_weighted_step
        return self.apply_gate(step(x, self.values(x), cache), self.receptance(x), t)

    def key_weighted_step(self, x: Tensor, V: Tensor, cache: Cache) -> Tensor:
        """Compute `key_weighted_sum` at the next position."""
        log_k = self.log_weight(x, V)
        if self.denominator == "none":
            return sum_step(self.position_weight, cache, log_k.exp() * V)
        return mean_step(self.position_weight, cache, log_k, V, w_in_denominator=self.denominator == "with_w")

    def score_weighted_step(self, x: Tensor, V: Tensor, cache: Cache) -> Tensor:
        """Compute `score_weighted_sum` at the next position."""
        q, k = self.queries_and_keys(x)
        k, v = cache.append(k, split_heads(V, self.heads))
        return merge_heads(self.weights(q, k).to(v.dtype) @ v)


def check_denominator(W: str, weight: Weight | None, denominator: str) -> None:
    """Raise ValueError if W, with its factor `weight`, cannot have this denominator."""
    if weight and not weight.bounded and denominator == "none":
        raise ValueError(f"W={W} overflows without a denominator: take denominator=with_w or another W")
    if weight and not weight.positive and denominator != "none":
        raise ValueError(f"W={W} can be 0 for all positions, and so can its sum: take denominator=none")
    if denominator == "without_w" and not W.startswith("w"):
        raise ValueError(f"W={W} has no w to leave out: take denominator=with_w")


def causal_softmax_over_u(exponent: Tensor | None, x: Tensor) -> Tensor:
    """Return exp(exponent) divided by its sum over u <= t, [B, T, T, C]; exponent [B, T or 1, T, C], or None for 0."""
    T = x.shape[1]
    causal = causal_mask(T, x.device)[None, :, :, None]
    exponent = x.new_zeros(1, T, T, 1) if exponent is None else exponent.expand(-1, T, -1, -1)
    return exponent.double().masked_fill(~causal, -torch.inf).softmax(2)
