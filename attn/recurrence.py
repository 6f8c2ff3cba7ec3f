"""The base class of attentions whose state is a matrix, and the layers that several of them share."""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Attention
from attn.decays import decay_rate
from attn.kernels.recurrence import CHUNK, Recurrence, recurrent_step, recurrent_sum
from attn.parts import exponent_linear, merge_heads, per_channel, silu, split_heads
from attn.unified import Terms, unified


@dataclass
class State:
    """The state S of all heads, [B, H, K, D], for K dimensions of a key and D of a value; None before position 0."""

    S: Tensor | None = None


class Recurrent(Attention):
    """ATT[t,c] = R[t,c] N(sum_{u<=t} W[h,t,u] V[u,c])

    W[h,t,u] = s_u q_t . A_t A_{t-1} ... A_{u+1} k_u with A_j = diag(exp(g_j)) + b_j a_j^T, where each of s, q, k, g, a
    and b depends only on its position and on the input at this position. N is a norm per head: N(y) = scale[c] y[c] /
    sqrt(m + 0.00001), where m is the mean of y^2 over the channels of the head. R = silu(linear(C, width)).

    A variant must define `recurrence(x, start=0)`, which returns a `Recurrence`: q, k, v and g, and optionally a (by
    default 0), b (-k), s (1) and `least`, a lower bound of g.

    Args:
        width: width of ATT.
        key_width: number of outputs of the layer Q, and of the layer K.
        gate: whether R is as above. Otherwise R is 1, or what a variant's `receptance` returns.

    Streaming keeps one matrix per head (`State`), in constant memory.
    """

    def __init__(self, dim: int, heads: int, width: int, key_width: int, token_shift: bool, gate: bool, impl: str):
        super().__init__(dim, heads, width, token_shift, impl)
        self.Q, self.K = (nn.Linear(dim, key_width) for _ in range(2))
        self.V = nn.Linear(dim, width)
        self.R = nn.Linear(dim, width) if gate else None
        self.scale = nn.Parameter(torch.ones(heads, 1, width // heads))

    @abstractmethod
    def recurrence(self, x: Tensor, start: int = 0) -> Recurrence:
        """Return the inputs of the recurrence for x [B, T, dim], which holds the T positions from `start` on."""

    def receptance(self, x: Tensor) -> Tensor | None:
        """Return R [B, T, width], or None for 1."""
        return None if self.R is None else silu(self.R(x))

    def after_sum(self, y: Tensor, r: Recurrence) -> Tensor:
        """Apply N to y, the sum of W V: [B, H, T, D] -> [B, H, T, D]. A variant may have another N, or add terms."""
        return F.rms_norm(y, y.shape[-1:], eps=1e-5) * self.scale

    def heads_of(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """Apply one of the layers Q and K in float32 and split the result into heads, [B, H, T, key_width / H]."""
        return split_heads(exponent_linear(x, layer), self.heads)

    def terms(self, x: Tensor) -> Terms:
        return self.terms_of(self.recurrence(x), self.receptance(x))

    def terms_of(self, r: Recurrence, R: Tensor | None) -> Terms:
        V = merge_heads(r.v)
        return Terms(R, V, per_channel(weights(r), V.shape[-1]), normalised=False)

    def reference(self, x: Tensor) -> Tensor:
        r = self.recurrence(x)
        return self.finish(split_heads(unified(self.terms_of(r, R=None)), self.heads), r, x)

    def finish(self, y: Tensor, r: Recurrence, x: Tensor) -> Tensor:
        """Return ATT [B, T, width] for the sum y [B, H, T, D]: apply `after_sum`, and multiply by R."""
        return self.apply_gate(merge_heads(self.after_sum(y, r)), self.receptance(x))

    def algorithm(self, T: int) -> str:
        return f"chunks of {CHUNK} positions"

    def mix(self, x: Tensor) -> Tensor:
        r = self.recurrence(x)
        return self.finish(recurrent_sum(r), r, x)

    def new_cache(self) -> State:
        return State()

    def mix_step(self, x: Tensor, cache: State, t: int) -> Tensor:
        r = self.recurrence(x, start=t)
        y, cache.S = recurrent_step(r, cache.S)
        return self.finish(y, r, x)


def weights(r: Recurrence) -> Tensor:
    """Compute W[h,t,u] of `Recurrent` row by row, [B, H, T, T]; it is 0 where u > t."""
    B, H, T, _ = r.v.shape
    q, k = (z.expand(B, H, -1, -1) for z in (r.q, r.k))
    b = -k if r.b is None else r.b
    sent = k[:, :, :0]  # row u is A_t ... A_{u+1} k_u, [B, H, t + 1, K]
    rows = []
    for t in range(T):
        now = slice(t, t + 1)
        decayed = sent * r.g[:, :, now].exp()
        if r.a is not None:
            decayed = decayed + (sent @ r.a[:, :, now].mT) * b[:, :, now]
        sent = torch.cat([decayed, k[:, :, now]], 2)
        rows.append(F.pad(q[:, :, now] @ sent.mT, (0, T - t - 1)))
    W = torch.cat(rows, 2)
    return W if r.s is None else W * r.s.mT


def half_of_a_head(dim: int, heads: int) -> int:
    """Return half the number of dimensions of a head.

    With Q and K of this size, the layers Q, K, V, R and the output projection have as many parameters as MHA's four.
    """
    return max(dim // (2 * heads), 1)


def l2_normalize(x: Tensor) -> Tensor:
    """Divide x by its norm over the last dimension, or by about 0.001 if the norm is smaller, to bound gradients."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class ScalarDecay(nn.Module):
    """Compute Mamba-2's log decay g = -rate[h] dt, dt = softplus(linear(C, H) + bias[h]), both [B, H, T, 1].

    The rate is exp(log_rate[h]), but at most exp(9).

    At initialisation, g is about -0.001 in the first head and -1.6 in the last one, which forgets most of its state at
    each position.
    """

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.linear = nn.Linear(dim, heads, bias=False)
        self.bias = nn.Parameter(torch.logspace(-3, -1, heads).expm1().log())  # softplus of it is 0.001 to 0.1
        self.log_rate = nn.Parameter(torch.linspace(0, math.log(16), heads))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = split_heads(exponent_linear(x, self.linear, self.bias), len(self.bias))
        dt = torch.logaddexp(z, torch.zeros_like(z))  # equals F.softplus(z), on whose gradient torch.compile fails
        return -decay_rate(self.log_rate)[:, None, None] * dt, dt


class LowRankLinear(nn.Module):
    """Compute bias + linear(activation(linear(x))) in float32, x [B, T, C] -> [B, T, width].

    The inner layer has `rank` outputs. The argument `bias` [width] is the initial value of a learned bias.
    """

    def __init__(self, dim: int, rank: int, activation: Callable[[Tensor], Tensor], bias: Tensor):
        super().__init__()
        self.down, self.up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, len(bias), bias=False)
        self.activation, self.bias = activation, nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return exponent_linear(self.activation(exponent_linear(x, self.down)), self.up, self.bias)
