"""gMLP as a mixer beside a feed-forward (source article A; after Liu et al. 2021, arXiv 2105.08050)."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Attention
from attn.parts import per_channel
from attn.streaming import Past, begin_sum, step_sum
from attn.unified import Terms


class GMLP(Attention):
    """ATT[t,c] = gamma[t] gelu(R[t,c]) sum_{u<=t} w[h,t,u] gelu(V[u,c])

    R, V = linear(C, eC) and linear(eC, C) back, e the `expansion`; no denominator; w is a
    weighting of attn/weightings.py.

    Streaming: the gelu(V) that have a w of their own, O(T), and one sum of those before.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        context: int,
        token_shift: bool,
        time: Callable[[], nn.Module],
        expansion: int,
        gamma: bool,
        gamma_scales_bias: bool,
        impl: str,
    ):
        super().__init__(dim, heads, context, expansion * dim, token_shift, gamma, impl, gamma_scales_bias)
        self.R, self.V = (nn.Linear(dim, expansion * dim) for _ in range(2))
        self.time = time()

    def terms(self, x: Tensor) -> Terms:
        T, V = x.shape[1], F.gelu(self.V(x))
        return Terms(
            R=F.gelu(self.R(x)),
            V=V,
            factor=per_channel(self.time(T), V.shape[-1]),
            gamma=self.time_gate(T),
            normalised=False,
        )

    def mix(self, x: Tensor) -> Tensor:
        R, V = self.R(x), self.V(x)
        return self.receive(self.time.product(x.shape[1])(F.gelu(V)), F.gelu(R))

    def begin_mix(self) -> Past:
        return begin_sum(self.time)

    def mix_step(self, x: Tensor, past: Past, t: int) -> Tensor:
        R, V = self.R(x), self.V(x)
        return self.receive(step_sum(self.time, past, F.gelu(V)), F.gelu(R), t)
