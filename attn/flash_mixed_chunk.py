"""FLASH's mixed chunk attention (Hua et al. 2022, arXiv 2202.10447; source article D): time and memory linear in T."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Attention
from attn.kernels.chunks import chunked_attention, way
from attn.kernels.products import float32_product
from attn.parts import ScaleOffset, causal_mask, exponent, rotary, rotary_dims, silu
from attn.streaming import Past
from attn.unified import Terms


@dataclass
class Chunks:
    """The last chunk's K, K', V, and sum_u K'_u V_u over those before it, [B, s, eC]."""

    near: Past = field(default_factory=Past)
    far: Tensor | None = None


class FlashMixedChunk(Attention):
    """ATT[t,c] = R[t,c] sum_{u<=t} W[t,u] V[u,c]

    with W[t,u] = relu(Q_t . K_u / sqrt(s))^2 / G inside t's chunk of G positions, and Q'_t . K'_u / G
    before it. One head. R, V = silu(linear(C, eC)), e the `expansion`, and linear(eC, C) back;
    Z = silu(linear(C, s)), s the `key_size`; Q, K, Q', K' are views of Z with a scale and an offset
    of their own, turned by rotary positions. What lies in earlier chunks is summed once, as
    sum_u K'_u V_u. Any T, also one that is no multiple of G.

    Streaming: that sum and the chunk's K and V, in constant memory.
    """

    def __init__(
        self,
        dim: int,
        token_shift: bool,
        expansion: int,
        key_size: int,
        chunk: int,
        rotary: float,
        impl: str,
    ):
        super().__init__(dim, 1, 0, expansion * dim, token_shift, gamma=False, impl=impl)
        self.chunk, self.turned = chunk, rotary_dims(rotary, key_size)
        self.R, self.V = (nn.Linear(dim, expansion * dim) for _ in range(2))
        self.Z = nn.Linear(dim, key_size)
        self.views = ScaleOffset(key_size, views=4)

    def qk(self, Z: Tensor, start: int = 0) -> tuple[Tensor, ...]:
        """Q / sqrt(s), K, Q', K', each [B, T, s], from Z before its silu, at the positions from `start` on."""
        q, k, q_lin, k_lin = (rotary(view[:, None], self.turned, start=start)[:, 0] for view in self.views(silu(Z)))
        return q * q.shape[-1] ** -0.5, k, q_lin, k_lin

    def terms(self, x: Tensor) -> Terms:
        q, k, q_lin, k_lin = self.qk(self.Z(x))
        chunk = torch.arange(x.shape[1], device=x.device) // self.chunk
        same, earlier = chunk[:, None] == chunk, chunk[:, None] > chunk
        near = (q @ k.transpose(-1, -2)).clamp(min=0) ** 2 * (same & causal_mask(x.shape[1], x.device))
        far = q_lin @ k_lin.transpose(-1, -2) * earlier
        W = (near + far) / self.chunk
        return Terms(R=silu(self.R(x)), V=silu(self.V(x)), factor=W[..., None], normalised=False)

    def way(self, T: int) -> str:
        return way(self.Z.weight.device)

    def mix(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        R, V, Z = silu(self.R(x)), silu(self.V(x)), exponent(x, self.Z)
        q, k, q_lin, k_lin, v = (self.chunks(y) for y in (*self.qk(Z), V))
        near = F.relu(float32_product(q, k.mT)).square().tril()
        y = chunked_attention(near / self.chunk, q_lin / self.chunk, k_lin, v)
        return self.receive(y.flatten(1, 2)[:, :T], R)

    def chunks(self, y: Tensor) -> Tensor:
        """[B, T, D] -> [B, chunks, G, D], the last one filled up with zeros."""
        pad = -y.shape[1] % self.chunk
        return (F.pad(y, (0, 0, 0, pad)) if pad else y).unflatten(1, (-1, self.chunk))

    def begin_mix(self) -> Chunks:
        return Chunks()

    def mix_step(self, x: Tensor, past: Chunks, t: int) -> Tensor:
        R, V, Z = silu(self.R(x)), silu(self.V(x)), exponent(x, self.Z)
        if t > 0 and t % self.chunk == 0:
            _, k_lin, v = past.near.kept()
            sent = float32_product(k_lin.mT, v)
            past.near, past.far = Past(), sent if past.far is None else past.far + sent
        q, k, q_lin, k_lin = self.qk(Z, start=t)
        k, _, v = past.near.add(k, k_lin, V)
        y = float32_product(F.relu(float32_product(q, k.mT)).square(), v)
        if past.far is not None:
            y = y + float32_product(q_lin, past.far)
        return self.receive(y / self.chunk, R)
