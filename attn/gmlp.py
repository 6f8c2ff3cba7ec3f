"""gMLP used as an attention next to a feed-forward (source article A, after Liu et al. 2021, arXiv 2105.08050)."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Attention
from attn.kernels.products import at_least_float32
from attn.parts import per_channel
from attn.position_weights import PositionWeight
from attn.ranges import Size
from attn.streaming import Cache, cache_for, merge_sums, sum_step
from attn.unified import Terms


class GMLP(Attention):
    """ATT[t,c] = gamma[t] gelu(R[t,c]) sum_{u<=t} w[h,t,u] N(gelu(V[u]))[c]

    h is the head of channel c. R, V = linear(C, eC), and the output projection is linear(eC, C), where e is
    `expansion`. There is no denominator. `position_weight` constructs w.

    Args:
        value_norm: whether N is a layer norm, as in Liu et al.; otherwise N(y) = y.

    Streaming caches N(gelu(V)) of the past positions, which takes O(T) memory. If w has a `constant_after`, positions
    at this distance or more are merged into one sum, or dropped if w is 0 there.
    """

    def __init__(
        self,
        dim: Size,
        heads: Size,
        context: Size,
        token_shift: bool,
        position_weight: Callable[[], PositionWeight],
        expansion: Size,
        value_norm: bool,
        gamma: bool,
        gamma_scales_bias: bool,
        impl: str,
    ):
        super().__init__(dim, heads, expansion * dim, token_shift, impl, context if gamma else 0, gamma_scales_bias)
        if position_weight is None:
            raise ValueError("gMLP is a sum weighted by w, and needs a position_weight: got null")
        self.R, self.V = (nn.Linear(dim, expansion * dim) for _ in range(2))
        self.norm = nn.LayerNorm(expansion * dim) if value_norm else None
        self.position_weight = position_weight()

    def values(self, x: Tensor) -> Tensor:
        """Return N(gelu(V)) [B, T, eC]."""
        V = F.gelu(self.V(x))
        return V if self.norm is None else self.norm(at_least_float32(V))

    def terms(self, x: Tensor) -> Terms:
        T, V = x.shape[1], self.values(x)
        factor = per_channel(self.position_weight(T), V.shape[-1])
        return Terms(R=F.gelu(self.R(x)), V=V, factor=factor, gamma=self.gamma_values(T), normalised=False)

    def mix(self, x: Tensor) -> Tensor:
        R, V = F.gelu(self.R(x)), self.values(x)
        return self.apply_gate(self.position_weight.product(x.shape[1])(V), R)

    def new_cache(self) -> Cache:
        return cache_for(self.position_weight, merge_sums)

    def mix_step(self, x: Tensor, cache: Cache, t: int) -> Tensor:
        R, V = F.gelu(self.R(x)), self.values(x)
        return self.apply_gate(sum_step(self.position_weight, cache, V), R, t)
