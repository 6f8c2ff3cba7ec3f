"""Linear attention with decay: RetNet, Mamba-2 and GLA.

The decay is constant in RetNet. It depends on the input in Mamba-2 (one decay per head) and GLA (per key dimension).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.kernels.recurrence import Recurrence
from attn.parts import apply_rotary, exponent_linear, rotary_dims, silu, split_heads
from attn.ranges import Size
from attn.recurrence import LowRankLinear, Recurrent, ScalarDecay, half_of_a_head


class RetNet(Recurrent):
    """ATT[t,c] = R[t,c] N(sum_{u<=t} W[h,t,u] V[u,c]), where W[h,t,u] = a[h]^(t-u) Q_t . K_u / sqrt(key_size)

    The decay a[h] = 1 - 2^(-5-h) of the heads h = 0, 1, ... is constant. R and N are those of `Recurrent`.
    Sun et al. 2023, arXiv 2307.08621. In the paper, V and R are twice as wide, and the feed-forward is smaller.

    Args:
        key_size: dimensions per head of Q and K; None means half as many as V has, so that Q, K, V, R and the output
            projection have as many parameters as MHA's four layers.
        rotary: fraction of the dimensions of Q and K that get rotary embeddings, 0 to 1.
    """

    def __init__(self, dim: Size, heads: Size, token_shift: bool, key_size: Size | None, rotary: float, impl: str):
        key_size = half_of_a_head(dim, heads) if key_size is None else key_size
        super().__init__(dim, heads, dim, heads * key_size, token_shift, gate=True, impl=impl)
        self.rotary_dims = rotary_dims(rotary, key_size)

    def recurrence(self, x: Tensor, start: int = 0) -> Recurrence:
        q, k = (apply_rotary(self.heads_of(x, layer), self.rotary_dims, start=start) for layer in (self.Q, self.K))
        h = torch.arange(self.heads, dtype=q.dtype, device=q.device)
        log_a = torch.log1p(-(2 ** (-5 - h)))[:, None, None].expand(1, -1, x.shape[1], 1)
        return Recurrence(q * q.shape[-1] ** -0.5, k, split_heads(self.V(x), self.heads), log_a)


class Mamba2(Recurrent):
    """ATT[t,c] = R[t,c] N(skip[h] V[t,c] + sum_{u<=t} W[h,t,u] V[u,c])

    W[h,t,u] = a[h,t] ... a[h,u+1] dt[h,u] Q_t . K_u with a = exp(-rate[h] dt) and dt = softplus(linear(C, H)), so that
    a large dt adds more of a position and forgets more of the past. The numbers skip[h] and rate[h] > 0 are learned.
    Q, K = silu(linear(C, key_size)) are the same for all heads, V = silu(linear(C, width)), and the output projection
    is linear(width, C). R and N are those of `Recurrent`. Dao and Gu 2024, arXiv 2405.21060. In the paper, N follows
    the multiplication by R and is over all channels instead of those of a head, and Q, K and V also pass through a
    short convolution, which the token shift replaces here.

    Args:
        width: width of R and V; None means 5/4 of dim, rounded down to a multiple of `heads`, but at least `heads`.
        key_size: dimensions of Q and K; None means dim / 8. If `width` is None too, the layer has about as many
            parameters as MHA.
    """

    def __init__(self, dim: Size, heads: Size, token_shift: bool, width: Size | None, key_size: Size | None, impl: str):
        width = max(5 * dim // (4 * heads), 1) * heads if width is None else width
        key_size = max(dim // 8, 1) if key_size is None else key_size
        super().__init__(dim, heads, width, key_size, token_shift, gate=True, impl=impl)
        self.decay = ScalarDecay(dim, heads)
        self.skip = nn.Parameter(torch.ones(heads, 1, 1))

    def recurrence(self, x: Tensor, start: int = 0) -> Recurrence:
        q, k = (silu(exponent_linear(x, layer))[:, None] for layer in (self.Q, self.K))
        log_a, dt = self.decay(x)
        return Recurrence(q, k, split_heads(silu(self.V(x)), self.heads), log_a, s=dt)

    def after_sum(self, y: Tensor, r: Recurrence) -> Tensor:
        return super().after_sum(y + self.skip * r.v, r)


class GLA(Recurrent):
    """ATT[t,c] = R[t,c] N(sum_{u<=t} W[h,t,u] V[u,c])

    W[h,t,u] = Q_t . (a_t * ... * a_{u+1} * K_u) / sqrt(key_size), where the decay a = sigmoid(z)^(1/16) has one value
    for each key dimension, and z is the output of two linear layers, the first with `rank` outputs. R and N are those
    of `Recurrent`. Yang et al. 2023, arXiv 2312.06635.

    Args:
        key_size: dimensions per head of Q and K; None means half as many as V has, as in RetNet.
        rank: number of outputs of the first of the two layers that compute z.
    """

    def __init__(self, dim: Size, heads: Size, token_shift: bool, key_size: Size | None, rank: Size, impl: str):
        key_size = half_of_a_head(dim, heads) if key_size is None else key_size
        super().__init__(dim, heads, dim, heads * key_size, token_shift, gate=True, impl=impl)
        self.decay = LowRankLinear(dim, rank, nn.Identity(), torch.zeros(heads * key_size))

    def recurrence(self, x: Tensor, start: int = 0) -> Recurrence:
        q, k = self.heads_of(x, self.Q), self.heads_of(x, self.K)
        log_a = split_heads(F.logsigmoid(self.decay(x)) / 16, self.heads)
        return Recurrence(q * q.shape[-1] ** -0.5, k, split_heads(self.V(x), self.heads), log_a)
