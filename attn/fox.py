"""FoX, softmax attention with a forget gate (Lin et al. 2025, arXiv 2503.02130)."""

import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Attention
from attn.kernels import rows
from attn.kernels.products import float32_product
from attn.parts import exponent_linear, merge_heads, per_channel, split_heads
from attn.position_weights import causal_softmax
from attn.ranges import Size
from attn.streaming import Cache
from attn.unified import Terms


class FoX(Attention):
    """ATT[t,c] = sum_{u<=t} W[h,t,u] V[u,c] / sum_{u<=t} W[h,t,u]

    W[h,t,u] = exp(Q_t . K_u / sqrt(D) + sum_{u<j<=t} log a[j,h]), where h is the head of channel c, D = C/H is its
    size, and a = sigmoid(linear(C, H)) are the forget gates. The layer `f` computes their logits.

    The inner sum is g_t - g_u, where g_t is the sum over all j <= t. g is float64, because the difference of two large
    sums may be small.

    Streaming caches K, V and g of all positions, which takes O(T) memory.
    """

    def __init__(self, dim: Size, heads: Size, token_shift: bool, impl: str):
        super().__init__(dim, heads, dim, token_shift, impl)
        self.Q, self.K, self.V = (nn.Linear(dim, dim) for _ in range(3))
        self.f = nn.Linear(dim, heads)

    def terms(self, x: Tensor) -> Terms:
        q, k = (split_heads(linear(x), self.heads) for linear in (self.Q, self.K))
        g = F.logsigmoid(self.f(x)).double().cumsum(1).mT[..., None]  # [B, H, T, 1]
        S = q @ k.mT * q.shape[-1] ** -0.5 + (g - g.mT)
        return Terms(R=None, V=self.V(x), factor=x.new_ones(()), exponent=per_channel(S, x.shape[-1]))

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return Q / sqrt(D), K, V [B, H, T, D] and log a [B, H, T, 1], the last in float64."""
        # The bias of K cancels in the softmax, so it gets no gradient.
        Q, K = exponent_linear(x, self.Q), exponent_linear(x, self.K, self.K.bias.detach())
        log_a = F.logsigmoid(exponent_linear(x, self.f)).double()
        q, k, v, log_a = (split_heads(y, self.heads) for y in (Q, K, self.V(x), log_a))
        return q * q.shape[-1] ** -0.5, k, v, log_a

    def algorithm(self, T: int) -> str:
        return rows.algorithm(T)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v, log_a = self.inputs(x)
        return merge_heads(rows.attend_by_row_blocks(weights, q, k, v, log_a.cumsum(2)))

    def mix_step(self, x: Tensor, cache: Cache, t: int) -> Tensor:
        q, k, v, g = self.inputs(x)
        if t > 0:
            _, _, past = cache.rows()
            g = past[:, :, -1:] + g
        k, v, g = cache.append(k, v, g)
        return merge_heads(float32_product(weights(q, k, g), v))


def weights(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """Return n rows of W, divided by their sums: q [B, H, n, D], k [B, H, T, D], g [B, H, T, 1] -> [B, H, n, T]."""
    S = float32_product(q, k.mT)
    S = S + (g[:, :, -q.shape[2] :] - g.mT).to(S.dtype)
    return causal_softmax(S, None)
