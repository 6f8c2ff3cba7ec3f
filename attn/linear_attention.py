"""Linear attention (Katharopoulos et al. 2020, arXiv 2006.16236), in time and memory linear in T."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn.base import Attention
from attn.kernels import chunks
from attn.kernels.means import merge_means, running_means
from attn.kernels.products import at_least_float32
from attn.parts import any_true, exponent_linear, log_phi, merge_heads, per_channel, phi, split_heads
from attn.ranges import Size
from attn.streaming import Cache, cache_for
from attn.unified import Terms

CHUNK = 64  # positions per chunk
LEAST = 1e-20  # If a denominator is smaller, its terms may have underflowed: `mean_by_dimensions` is used instead.


class LinearAttention(Attention):
    """ATT[t,c] = sum_{u<=t} W[h,t,u] V[u,c] / sum_{u<=t} W[h,t,u]

    W[h,t,u] = phi(Q_t) . phi(K_u), phi(x) = elu(x) + 1, where h is the head of channel c. Positions are divided into
    chunks. All t of a chunk share one sum over the earlier chunks: sum_u W[h,t,u] V_u^T = phi(Q_t)^T S with
    S = sum_u phi(K_u) V_u^T.

    Streaming keeps, for each dimension of K, the mean of V with the weights phi(K), in constant memory.
    """

    def __init__(self, dim: Size, heads: Size, token_shift: bool, impl: str):
        super().__init__(dim, heads, dim, token_shift, impl)
        self.Q, self.K, self.V = (nn.Linear(dim, dim) for _ in range(3))

    def terms(self, x: Tensor) -> Terms:
        q, k = (log_phi(split_heads(linear(x), self.heads)) for linear in (self.Q, self.K))
        log_w = torch.logsumexp(q[:, :, :, None] + k[:, :, None], -1)  # [B, H, T, T]
        return Terms(R=None, V=self.V(x), factor=x.new_ones(()), exponent=per_channel(log_w, x.shape[-1]))

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return Q, K and V [B, H, T, D] in float32 or float64."""
        Q, K, V = exponent_linear(x, self.Q), exponent_linear(x, self.K), self.V(x)
        return tuple(split_heads(at_least_float32(y), self.heads) for y in (Q, K, V))

    def algorithm(self, T: int) -> str:
        return chunks.algorithm(self.V.weight.device)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        with torch.autocast(x.device.type, enabled=False):
            y = linear_mean(*(z.flatten(0, 1) for z in (q, k, v)))
        return merge_heads(y.unflatten(0, q.shape[:2]))

    def new_cache(self) -> Cache:
        return cache_for(None, merge_means)

    def mix_step(self, x: Tensor, cache: Cache, t: int) -> Tensor:
        q, k, v = self.qkv(x)
        each = v[:, :, None].expand(-1, -1, k.shape[-1], -1, -1)  # [B, H, dimensions of K, 1, D]
        log_sum, mean = cache.append(log_phi(k).mT[..., None], each)
        share = (log_phi(q).mT[..., None] + log_sum).softmax(2)
        return merge_heads((share * mean).sum(2))


def linear_mean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the mean of v with the weights phi(q[t]) . phi(k[u]) over u <= t: q, k, v [B, T, D] -> [B, T, D]."""
    T = v.shape[1]
    q_n, k_n, v_n = (chunks.split(y, CHUNK) for y in (phi(q), phi(k), F.pad(v, (0, 1), value=1.0)))
    sums = chunks.chunked_attention((q_n @ k_n.mT).tril(), q_n, k_n, v_n).flatten(1, 2)[:, :T]
    denominator = sums[..., -1:]  # from the column of ones beside v
    lost = denominator < LEAST
    y = sums[..., :-1] / torch.where(lost, 1.0, denominator)
    return torch.where(lost, mean_by_dimensions(q, k, v), y) if any_true(lost) else y


def mean_by_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute `linear_mean` without underflow for any q and k, but slowly.

    Each dimension i gives a mean of v with the weights phi(k[u,i]). The result is the mean of these, with the weights
    phi(q[t,i]) sum_{u<=t} phi(k[u,i]).
    """

    def one(q: Tensor, k: Tensor, v: Tensor, log_denominator: Tensor) -> Tensor:
        log_sum, mean = running_means(k, v)
        return (q + log_sum - log_denominator).exp() * mean

    q, k = log_phi(q), log_phi(k)
    log_denominator = torch.logsumexp(q + running_means(k, k)[0], -1, keepdim=True)
    return sum(
        checkpoint(one, *each, v, log_denominator, use_reentrant=False, preserve_rng_state=False)
        for each in zip(q.split(1, -1), k.split(1, -1), strict=True)
    )
