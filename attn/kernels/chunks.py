"""Attention within chunks, and linear attention to all chunks before. Tensors in, tensors out."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attn.kernels.products import at_least_float32


def chunked_attention(near: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """y_n = near_n v_n + q_n sum_{m<n} k_m^T v_m for the chunks n, in time and memory linear in their number.

    near [B, N, G, G], q and k [B, N, G, s], v [B, N, G, D] -> y like v.
    """
    return chunk_by_chunk(near, q, k, v) if one_by_one(v.device) else all_at_once(near, q, k, v)


def one_by_one(device: torch.device) -> bool:
    """Whether chunks come one after the other: faster on a CPU, whose cache holds one sum; a GPU would wait."""
    return device.type == "cpu"


def way(device: torch.device) -> str:
    """What that comes to, for the log."""
    return "chunk by chunk" if one_by_one(device) else "all chunks at once"


def all_at_once(near: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sent = k[:, :-1].mT @ v[:, :-1]  # [B, N - 1, s, D]: the last sends nothing
    far = q[:, 1:] @ sent.cumsum(1).to(v.dtype)
    y = near.to(v.dtype) @ v
    return torch.cat([y[:, :1], y[:, 1:] + far], dim=1)


@torch.compiler.disable  # it would unroll the loops
def chunk_by_chunk(near: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast(v.device.type, enabled=False):
        return _ChunkByChunk.apply(*map(at_least_float32, (near, q, k, v))).to(v.dtype)


class _ChunkByChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, near: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(near, q, k, v)
        y = near @ v
        sent = v.new_zeros(len(v), k.shape[-1], v.shape[-1])
        for n in range(1, v.shape[1]):
            sent.baddbmm_(k[:, n - 1].mT, v[:, n - 1])
            y[:, n].baddbmm_(q[:, n], sent)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.autocast(g.device.type, enabled=False):
            return _backward(*ctx.saved_tensors, g)


def _backward(near: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of near, q, k and v for that of y."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), near.mT @ g
    sent = v.new_zeros(len(v), k.shape[-1], v.shape[-1])
    for n in range(1, v.shape[1]):
        sent.baddbmm_(k[:, n - 1].mT, v[:, n - 1])
        dq[:, n] = g[:, n] @ sent.mT
    d_sent = torch.zeros_like(sent)
    for n in reversed(range(v.shape[1] - 1)):
        d_sent.baddbmm_(q[:, n + 1].mT, g[:, n + 1])
        dv[:, n].baddbmm_(k[:, n], d_sent)
        dk[:, n] = v[:, n] @ d_sent.mT
    return g @ v.mT, dq, dk, dv
