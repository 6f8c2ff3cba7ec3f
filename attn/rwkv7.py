"""RWKV-7: a delta rule with a decay for each key dimension. The removed key and the added key differ."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.kernels.recurrence import Recurrence
from attn.parts import split_heads
from attn.ranges import Size
from attn.recurrence import LowRankLinear, Recurrent, l2_normalize


class RWKV7(Recurrent):
    """ATT[t,c] = R[t,c] (N(sum_{u<=t} W[h,t,u] V[u,c]) + (Q_t . (p * L_t)) V[t,c])

    W[h,t,u] = Q_t . A_t A_{t-1} ... A_{u+1} L_u with A_j = diag(a_j) - (b_j * k_j) k_j^T, so that W depends on all keys
    between u and t. Equivalently, each head has a state S with S_t = A_t S_{t-1} + L_t V_t^T, and the sum is S_t^T Q_t.
    The names in the paper are given in brackets:

    - Q [r] and K [k] = linear(C, H key_size), V [v] = linear(C, C), R [g] = linear(sigmoid(linear(C, .)));
    - a [w] = exp(-sigmoid(z) / sqrt(e)) is the decay, where z = bias + linear(tanh(linear(C, .)));
    - b [a] = sigmoid(bias + linear(linear(C, .))) is, per key dimension, the share of the old value that is removed;
    - k [kappa hat] is the key that is removed: m * K, which the paper calls kappa, divided by its norm in each head;
    - L [k tilde] = K * (1 + (b - 1) * n) is the key that is added;
    - m [xi], n [alpha] and p [rho] are learned numbers for each key dimension;
    - N(y) = scale[c] (y[c] - mean) / sqrt(variance + 0.00064) + bias[c], where mean and variance are over the
      channels of the head.

    The layers linear(C, .) have `rank` outputs, or twice as many in R. Peng et al. 2025, arXiv 2503.14456.
    In the paper, the token shift is learned, and V of later layers is mixed with V of the first one.

    Args:
        key_size: dimensions of a head of Q and K; None means 7/8 of those of V, so that there are about as many
            parameters as in MHA.
        rank: number of outputs of the layers linear(C, .); None means dim / 32.
    """

    def __init__(self, dim: Size, heads: Size, token_shift: bool, key_size: Size | None, rank: Size | None, impl: str):
        key_size = max(7 * dim // (8 * heads), 1) if key_size is None else key_size
        rank = max(dim // 32, 1) if rank is None else rank
        keys = heads * key_size
        super().__init__(dim, heads, dim, keys, token_shift, gate=False, impl=impl)
        self.R = nn.Sequential(nn.Linear(dim, 2 * rank), nn.Sigmoid(), nn.Linear(2 * rank, dim))
        slow_to_fast = torch.linspace(-6.5, -1.5, keys)  # with these, a is 0.999 to 0.9 at initialisation
        self.a = LowRankLinear(dim, rank, torch.tanh, slow_to_fast)
        self.b = LowRankLinear(dim, rank, nn.Identity(), torch.zeros(keys))
        self.m, self.n, self.p = (nn.Parameter(torch.full((heads, 1, key_size), start)) for start in (0.85, 1.0, 0.0))
        self.norm_bias = nn.Parameter(torch.zeros_like(self.scale))

    def recurrence(self, x: Tensor, start: int = 0) -> Recurrence:
        Q, K = self.heads_of(x, self.Q), self.heads_of(x, self.K)
        least = -math.exp(-0.5)  # the lower bound of log a
        log_a = least * split_heads(self.a(x), self.heads).sigmoid()
        b = split_heads(self.b(x), self.heads).sigmoid()
        k = l2_normalize(self.m * K)
        L, V = K * (1 + (b - 1) * self.n), split_heads(self.V(x), self.heads)
        return Recurrence(Q, L, V, log_a, a=k, b=-b * k, least=least)

    def receptance(self, x: Tensor) -> Tensor:
        return self.R(x)

    def after_sum(self, y: Tensor, r: Recurrence) -> Tensor:
        y = F.layer_norm(y, y.shape[-1:], eps=64e-5) * self.scale + self.norm_bias
        return y + (r.q * self.p * r.k).sum(-1, keepdim=True) * r.v
