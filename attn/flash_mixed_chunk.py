"""The mixed chunk attention of FLASH (Hua et al. 2022, arXiv 2202.10447; source article D)."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Attention
from attn.kernels import chunks
from attn.kernels.products import float32_product
from attn.parts import ScaleOffset, apply_rotary, exponent_linear, rotary_dims, silu
from attn.ranges import Size
from attn.streaming import Cache
from attn.unified import Terms


@dataclass
class ChunkCache:
    """The cache of `FlashMixedChunk`.

    `chunk` holds K, K' and V of the current chunk. `earlier` [B, s, eC] is sum_u K'_u V_u^T over the earlier chunks, or
    None if there are none.
    """

    chunk: Cache = field(default_factory=Cache)
    earlier: Tensor | None = None


class FlashMixedChunk(Attention):
    """ATT[t,c] = R[t,c] sum_{u<=t} W[t,u] V[u,c]

    W[t,u] = relu(Q_t . K_u / sqrt(s))^2 / G if u is in the same chunk of G positions as t, and Q'_t . K'_u / G if it is
    in an earlier one. All t of a chunk share one sum_u K'_u V_u^T over the earlier chunks, so that time and memory are
    linear in T.

    There is one head. R, V = silu(linear(C, eC)), and the output projection is linear(eC, C), where e is `expansion`.
    Q, K, Q' and K' are copies of Z = silu(linear(C, s)). Each has its own scale and offset, and rotary embeddings in
    a fraction `rotary` of its dimensions. `initial_scale` sets the scales at initialisation, see `parts.ScaleOffset`.
    s is `key_size` and G is `chunk_size`. T need not be a multiple of G.

    Streaming keeps K, K' and V of one chunk, and one sum_u K'_u V_u^T, in constant memory.
    """

    def __init__(
        self,
        dim: Size,
        token_shift: bool,
        expansion: Size,
        key_size: Size,
        chunk_size: Size,
        rotary: float,
        initial_scale: str,
        impl: str,
    ):
        super().__init__(dim, 1, expansion * dim, token_shift, impl)
        self.chunk_size, self.rotary_dims = chunk_size, rotary_dims(rotary, key_size)
        self.R, self.V = (nn.Linear(dim, expansion * dim) for _ in range(2))
        self.Z = nn.Linear(dim, key_size)
        self.views = ScaleOffset(key_size, 4, initial_scale)

    def queries_and_keys(self, z: Tensor, start: int = 0) -> tuple[Tensor, ...]:
        """Return Q / sqrt(s), K, Q', K', [B, T, s], at the positions from `start` on. z is Z before its silu."""
        q, k, q_lin, k_lin = (apply_rotary(y, self.rotary_dims, start=start) for y in self.views(silu(z)))
        return q * q.shape[-1] ** -0.5, k, q_lin, k_lin

    def terms(self, x: Tensor) -> Terms:
        q, k, q_lin, k_lin = self.queries_and_keys(self.Z(x))
        chunk = torch.arange(x.shape[1], device=x.device) // self.chunk_size
        same, earlier = chunk[:, None] == chunk, chunk[:, None] > chunk
        local = (q @ k.transpose(-1, -2)).clamp(min=0) ** 2 * same
        linear = q_lin @ k_lin.transpose(-1, -2) * earlier
        W = (local + linear) / self.chunk_size
        return Terms(R=silu(self.R(x)), V=silu(self.V(x)), factor=W[..., None], normalised=False)

    def algorithm(self, T: int) -> str:
        return chunks.algorithm(self.Z.weight.device)

    def mix(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        R, V, Z = silu(self.R(x)), silu(self.V(x)), exponent_linear(x, self.Z)
        q, k, q_lin, k_lin, v = (chunks.split(y, self.chunk_size) for y in (*self.queries_and_keys(Z), V))
        local = F.relu(float32_product(q, k.mT)).square().tril()
        y = chunks.chunked_attention(local / self.chunk_size, q_lin / self.chunk_size, k_lin, v)
        return self.apply_gate(y.flatten(1, 2)[:, :T], R)

    def new_cache(self) -> ChunkCache:
        return ChunkCache()

    def mix_step(self, x: Tensor, cache: ChunkCache, t: int) -> Tensor:
        R, V, Z = silu(self.R(x)), silu(self.V(x)), exponent_linear(x, self.Z)
        if t > 0 and t % self.chunk_size == 0:
            _, k_lin, v = cache.chunk.rows()
            total = float32_product(k_lin.mT, v)
            cache.chunk, cache.earlier = Cache(), total if cache.earlier is None else cache.earlier + total
        q, k, q_lin, k_lin = self.queries_and_keys(Z, start=t)
        k, _, v = cache.chunk.append(k, k_lin, V)
        y = float32_product(F.relu(float32_product(q, k.mT)).square(), v)
        if cache.earlier is not None:
            y = y + float32_product(q_lin, cache.earlier)
        return self.apply_gate(y / self.chunk_size, R)
