"""gMLP's own spatial gating unit (Liu et al. 2021, arXiv 2105.08050), causal."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Attention
from attn.kernels.causal import weighted_sum
from attn.kernels.products import at_least_float32
from attn.parts import per_channel, spread
from attn.streaming import Past
from attn.unified import Terms


class SpatialGatingUnit(Attention):
    """ATT[t,c] = R[t,c] (b[h,t] + sum_{u<=t} w[h,t,u] LN(V)[u,c])

    R, V are the halves of gelu(linear(C, 2eC)); w [H, context, context], a free matrix, starts
    near 0 and b at 1, so that the unit starts as a plain gate; linear(eC, C) back.

    Streaming: all LN(V), and a row of w: O(T).
    """

    def __init__(self, dim: int, heads: int, context: int, token_shift: bool, expansion: int, impl: str):
        width = expansion * dim
        super().__init__(dim, heads, context, width, token_shift, gamma=False, impl=impl)
        self.RV = nn.Linear(dim, 2 * width)
        self.norm = nn.LayerNorm(width)
        self.w = nn.Parameter(torch.empty(heads, context, context).uniform_(-1, 1) * 1e-3 / context)
        self.b = nn.Parameter(torch.ones(heads, context))

    @property
    def horizon(self) -> int:
        return self.b.shape[-1]

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """R, LN(V) [B, T, width], w [H, T, T] and b [T, width]."""
        T = x.shape[1]
        if T > self.b.shape[-1]:
            raise ValueError(f"a free w has {self.b.shape[-1]} positions and no rule beyond them: got {T}")
        R, V = self.gate(x)
        return R, V, self.w[:, :T, :T].tril(), spread(self.b[:, :T], V.shape[-1])

    def gate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        R, V = F.gelu(self.RV(x)).chunk(2, dim=-1)
        return R, self.norm(at_least_float32(V))

    def terms(self, x: Tensor) -> Terms:
        R, V, w, b = self.parts(x)
        return Terms(R=R, V=V, factor=per_channel(w, V.shape[-1]), bias=b, normalised=False)

    def mix(self, x: Tensor) -> Tensor:
        R, V, w, b = self.parts(x)
        return self.receive(weighted_sum(w, V) + b, R)

    def mix_step(self, x: Tensor, past: Past, t: int) -> Tensor:
        R, V = self.gate(x)
        (V,) = past.add(V)
        y = weighted_sum(self.w[:, t : t + 1, : t + 1], V) + spread(self.b[:, t : t + 1], V.shape[-1])
        return self.receive(y, R)
