"""RWKV-4: AFT with a learned exponential decay for each channel (Peng et al. 2023, arXiv 2305.13048)."""

import torch
from torch import Tensor, nn

from attn.base import Attention
from attn.decays import decay_rate, initial_bonus, initial_log_decay
from attn.kernels.means import merge_means, running_means
from attn.kernels.products import at_least_float32
from attn.parts import exponent_linear
from attn.ranges import Size
from attn.streaming import Past, new_past
from attn.unified import Terms


class RWKV4(Attention):
    """ATT[t,c] = sigmoid(R[t,c]) sum_{u<=t} W[t,u,c] V[u,c] / sum_{u<=t} W[t,u,c]

    W[t,u,c] = exp(K[u,c] - (t-1-u) lambda_c) for u < t, and exp(K[t,c] + b_c) for u = t. R, K, V = linear(C, C). The
    decays lambda_c > 0 and the bonuses b_c are learned. They are initialised as in the paper's first layer, where
    lambda_c rises from the first channel to the last. The paper learns a token shift each for R, K and V; here it is
    fixed.

    Streaming keeps one mean and its weight per channel, in constant memory.
    """

    def __init__(self, dim: Size, token_shift: bool, impl: str):
        super().__init__(dim, 1, dim, token_shift, impl)
        self.R, self.K, self.V = (nn.Linear(dim, dim) for _ in range(3))
        self.log_lambda = nn.Parameter(initial_log_decay(dim))
        self.bonus = nn.Parameter(initial_bonus(dim))

    def terms(self, x: Tensor) -> Terms:
        T, K = x.shape[1], self.K(x)
        position = torch.arange(T, device=x.device)
        distance = (position[:, None] - position)[..., None]  # t-u, [T, T, 1]
        log_w = torch.where(distance == 0, self.bonus, (1 - distance) * decay_rate(self.log_lambda))
        return Terms(R=self.R(x).sigmoid(), V=self.V(x), factor=x.new_ones(()), exponent=K[:, None] + log_w)

    def rkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return sigmoid(R), K and V, each [B, T, C]."""
        # The bias of K cancels between numerator and denominator, so it gets no gradient.
        R, K, V = self.R(x), exponent_linear(x, self.K, self.K.bias.detach()), self.V(x)
        return R.sigmoid(), K, at_least_float32(V)

    def mix(self, x: Tensor) -> Tensor:
        R, K, V = self.rkv(x)
        past, mean = (y[:, :-1] for y in running_means(K, V, decay_rate(self.log_lambda)))
        _, y = merge_means((past, mean), (K[:, 1:] + self.bonus, V[:, 1:]))
        return self.apply_gate(torch.cat([V[:, :1], y], dim=1), R)

    def new_cache(self) -> Past:
        return new_past(self.V.weight)

    def mix_step(self, x: Tensor, cache: Past, t: int) -> Tensor:
        R, K, V = self.rkv(x)
        past, mean = cache.mean
        _, y = merge_means(cache.mean, (K + self.bonus, V))
        cache.mean = merge_means((past - decay_rate(self.log_lambda), mean), (K.double(), V.double()))
        return self.apply_gate(y.to(V.dtype), R)
