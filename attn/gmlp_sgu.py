"""The spatial gating unit of gMLP (Liu et al. 2021, arXiv 2105.08050), made causal."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Attention
from attn.kernels.causal import weighted_sum
from attn.kernels.products import at_least_float32
from attn.parts import heads_to_channels, per_channel
from attn.ranges import Size
from attn.streaming import Cache
from attn.unified import Terms


class SpatialGatingUnit(Attention):
    """ATT[t,c] = R[t,c] (b[h,t] + sum_{u<=t} w[h,t,u] LN(V)[u,c])

    h is the head of channel c. R and V are the halves of gelu(linear(C, 2eC)), and the output projection is
    linear(eC, C), where e is `expansion`. Each entry of w [H, context, context] is a parameter. At initialisation w
    is close to 0 and b is 1, so that ATT is close to R.

    Streaming caches LN(V) of all positions, which takes O(T) memory, and uses one row of w per step.
    """

    def __init__(self, dim: Size, heads: Size, context: Size, token_shift: bool, expansion: Size, impl: str):
        width = expansion * dim
        super().__init__(dim, heads, width, token_shift, impl)
        self.RV = nn.Linear(dim, 2 * width)
        self.norm = nn.LayerNorm(width)
        self.w = nn.Parameter(torch.empty(heads, context, context).uniform_(-1, 1) * 1e-3 / context)
        self.b = nn.Parameter(torch.ones(heads, context))

    @property
    def max_length(self) -> int:
        return self.b.shape[-1]

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return R and LN(V) [B, T, width], w [H, T, T] and b [T, width]."""
        T = x.shape[1]
        if T > self.max_length:
            raise ValueError(f"w is defined for {self.max_length} positions: got {T}")
        R, V = self.gate_and_values(x)
        return R, V, self.w[:, :T, :T].tril(), heads_to_channels(self.b[:, :T], V.shape[-1])

    def gate_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return R and LN(V), each [B, T, width]."""
        R, V = F.gelu(self.RV(x)).chunk(2, dim=-1)
        return R, self.norm(at_least_float32(V))

    def terms(self, x: Tensor) -> Terms:
        R, V, w, b = self.factors(x)
        return Terms(R=R, V=V, factor=per_channel(w, V.shape[-1]), bias=b, normalised=False)

    def mix(self, x: Tensor) -> Tensor:
        R, V, w, b = self.factors(x)
        return self.apply_gate(weighted_sum(w, V) + b, R)

    def mix_step(self, x: Tensor, cache: Cache, t: int) -> Tensor:
        R, V = self.gate_and_values(x)
        (V,) = cache.append(V)
        y = weighted_sum(self.w[:, t : t + 1, : t + 1], V) + heads_to_channels(self.b[:, t : t + 1], V.shape[-1])
        return self.apply_gate(y, R)
