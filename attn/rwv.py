"""Any R, W and V: the unified form as something to search in (source article A's open question)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Attention
from attn.kernels.causal import exp_weighted_mean, running_sum
from attn.kernels.products import float32_product
from attn.kernels.rows import attend_by_rows, way
from attn.parts import causal_mask, causal_softmax, dense_w, exponent, merge_heads, per_channel, split_heads
from attn.streaming import Past, begin_mean, begin_sum, step_mean, step_sum
from attn.unified import Terms


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


class Weight(NamedTuple):
    """A part of W: a function of the sender's K or of the pair's S = Q . K / sqrt(D)."""

    function: Callable[[Tensor], Tensor]  # of S; of K, its log, so that it may be of any size
    bounded: bool = True  # else it needs the denominator
    positive: bool = True  # else it may be 0 for every u, and a denominator with it


RECEIVE = {"one": None, "sigmoid": torch.sigmoid, "gelu": F.gelu, "silu": F.silu, "relu2": relu2}
VALUE = {"linear": lambda x: x, "gelu": F.gelu, "silu": F.silu}
SENDER = {"exp_k": Weight(lambda K: K, bounded=False), "sigmoid_k": Weight(F.logsigmoid)}
PAIR = {"exp_qk": Weight(torch.exp, bounded=False), "relu2_qk": Weight(relu2, positive=False)}
DENOMINATOR = ("with_w", "without_w", "none")
WEIGHT = [prefix + kind for prefix in ("", "w_") for kind in (*SENDER, *PAIR)] + ["w"]


class RWV(Attention):
    """ATT[t,c] = gamma[t] R[t,c] sum_{u<=t} W[t,u,c] V[u,c] / sum_{u<=t} W[t,u,c], R, W, V by name

    R = one, sigmoid, gelu, silu or relu2 of linear(C, eC); V = linear, gelu or silu of linear(C, eC);
    W = w, a weighting of attn/weightings.py, or a function of K = linear(C, eC) or of
    S[h,t,u] = Q_t . K_u / sqrt(D), with w as a factor (w_exp_k, ...) or without (exp_k, ...).
    The denominator is that sum `with_w`; the same `without_w`, w left out of it, as in the source
    author's later code; or `none`, which needs a W that is bounded. The output goes through linear(eC, C);
    e is the `expansion`.

    Streaming: as AFT does where W depends on the sender, as MHA where it depends on the pair.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        context: int,
        token_shift: bool,
        R: str,
        W: str,
        V: str,
        denominator: str,
        expansion: int,
        time: Callable[[], nn.Module],
        gamma: bool,
        gamma_scales_bias: bool,
        impl: str,
    ):
        width = expansion * dim
        super().__init__(dim, heads, context, width, token_shift, gamma, impl, gamma_scales_bias)
        choices = {"R": (R, RECEIVE), "W": (W, WEIGHT), "V": (V, VALUE), "denominator": (denominator, DENOMINATOR)}
        for name, (value, known) in choices.items():
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}: got {value}")
        sender, pair = (kinds.get(W.removeprefix("w_")) for kinds in (SENDER, PAIR))
        weight = sender or pair
        if weight and not weight.bounded and denominator == "none":
            raise ValueError(f"W={W} overflows without a denominator: take denominator=with_w or another W")
        if weight and not weight.positive and denominator != "none":
            raise ValueError(f"W={W} can be 0 everywhere, and then has no denominator: take denominator=none")
        if denominator == "without_w" and not W.startswith("w"):
            raise ValueError(f"W={W} has no w to leave out: take denominator=with_w")
        self.denominator, self.receive_by, self.value_by = denominator, RECEIVE[R], VALUE[V]
        self.exponential = weight is not None and not weight.bounded
        self.send_by, self.pair_by = sender and sender.function, pair and pair.function
        self.R = nn.Linear(dim, width) if R != "one" else None
        self.V = nn.Linear(dim, width)
        self.K = nn.Linear(dim, width) if W != "w" else None
        self.Q = nn.Linear(dim, width) if self.pair_by else None
        self.time = time() if W.startswith("w") else None

    def received(self, x: Tensor) -> Tensor | None:
        return None if self.R is None else self.receive_by(self.R(x))

    def qk(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Q, scaled, and K by heads, [B, H, T, D]."""
        q, k = split_heads(exponent(x, self.Q), self.heads), split_heads(self.keys(x), self.heads)
        return q * q.shape[-1] ** -0.5, k

    def logits(self, x: Tensor) -> Tensor:
        """S [B, H, T, T]."""
        q, k = self.qk(x)
        return float32_product(q, k.mT)

    def terms(self, x: Tensor) -> Terms:
        V = self.value_by(self.V(x))
        width, gamma = V.shape[-1], self.time_gate(x.shape[1])
        w, exponent = per_channel(dense_w(self.time, x.shape[1], x), width), None
        if self.pair_by is torch.exp:
            exponent = per_channel(self.logits(x), width)
        elif self.pair_by is not None:
            w = w * per_channel(self.pair_by(self.logits(x)), width)
        elif self.send_by is not None:
            exponent = self.send_by(self.K(x))[:, None]
        if self.denominator == "with_w":
            return Terms(self.received(x), V, w, exponent, gamma)
        if self.denominator == "without_w":
            return Terms(self.received(x), V, w * over_sum(exponent, x), None, gamma, normalised=False)
        return Terms(self.received(x), V, w if exponent is None else w * exponent.exp(), None, gamma, normalised=False)

    def way(self, T: int) -> str:
        return super().way(T) if self.pair_by is None else way(T)

    def mix(self, x: Tensor) -> Tensor:
        V = self.value_by(self.V(x))
        y = self.sender_sum(x, V) if self.pair_by is None else self.pair_sum(x, V)
        return self.receive(y, self.received(x))

    def keys(self, x: Tensor) -> Tensor:
        """K; its bias has a gradient unless it cancels in the denominator."""
        return exponent(x, self.K, self.K.bias.detach() if self.exponential else None)

    def log_weight(self, x: Tensor) -> Tensor | None:
        """The log of what K adds to W, [B, T, C]; None where K is no part of it."""
        return None if self.send_by is None else self.send_by(self.keys(x))

    def sender_sum(self, x: Tensor, V: Tensor) -> Tensor:
        """The sum over V where W depends on the sender alone, divided by the denominator."""
        T, log_k = x.shape[1], self.log_weight(x)
        if self.denominator == "none":
            product = running_sum if self.time is None else self.time.product(T)
            return product(V if log_k is None else log_k.exp() * V)
        log_k = torch.zeros_like(V) if log_k is None else log_k
        if self.denominator == "without_w":
            return exp_weighted_mean(self.time.product(T), log_k, V, below=running_sum)
        if self.time is None:
            return exp_weighted_mean(running_sum, log_k, V)
        return exp_weighted_mean(self.time.relative_product(T), log_k, V, window=self.time.window)

    def pair_sum(self, x: Tensor, V: Tensor) -> Tensor:
        """The same where W depends on Q . K."""
        return merge_heads(attend_by_rows(self.pair_weights, *self.qk(x), split_heads(V, self.heads)))

    def pair_weights(self, q: Tensor, k: Tensor) -> Tensor:
        """The weights of V, [B, H, T, T], or the last rows of them, as many as q has."""
        S = float32_product(q, k.mT)
        n, T = S.shape[-2:]
        if self.pair_by is not torch.exp:
            return dense_w(self.time, T, S, T - n) * self.pair_by(S)
        return causal_softmax(S, self.time, w_below=self.denominator == "with_w")

    def begin_mix(self) -> Past:
        forgets = self.denominator != "without_w"  # that denominator holds what w forgets
        if self.pair_by is not None:
            return Past(self.time.window if forgets and self.time is not None else None)
        return begin_sum(self.time) if self.denominator == "none" else begin_mean(self.time, forgets)

    def mix_step(self, x: Tensor, past: Past, t: int) -> Tensor:
        step = self.sender_step if self.pair_by is None else self.pair_step
        return self.receive(step(x, self.value_by(self.V(x)), past), self.received(x), t)

    def sender_step(self, x: Tensor, V: Tensor, past: Past) -> Tensor:
        log_k = self.log_weight(x)
        log_k = torch.zeros_like(V) if log_k is None else log_k
        if self.denominator == "none":
            return step_sum(self.time, past, log_k.exp() * V)
        return step_mean(self.time, past, log_k, V, w_below=self.denominator == "with_w")

    def pair_step(self, x: Tensor, V: Tensor, past: Past) -> Tensor:
        q, k = self.qk(x)
        k, v = past.add(k, split_heads(V, self.heads))
        return merge_heads(self.pair_weights(q, k).to(v.dtype) @ v)


def over_sum(exponent: Tensor | None, x: Tensor) -> Tensor:
    """exp(exponent) over its sum over u <= t, [B, T, T, C]; the exponent [B, T or 1, T, C], or None for 0."""
    T = x.shape[1]
    causal = causal_mask(T, x.device)[None, :, :, None]
    exponent = x.new_zeros(1, T, T, 1) if exponent is None else exponent.expand(-1, T, -1, -1)
    return exponent.double().masked_fill(~causal, -torch.inf).softmax(2)
