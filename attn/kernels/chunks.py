"""Attention within chunks plus linear attention to all earlier chunks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attn.kernels.compiler import not_compiled
from attn.kernels.derivatives import kernel_backward
from attn.kernels.products import at_least_float32


def split(x: Tensor, size: int) -> Tensor:
    """Split positions into N chunks, [..., T, D] -> [..., N, size, D]; the last one is padded with zeros."""
    pad = -x.shape[-2] % size
    return (F.pad(x, (0, 0, 0, pad)) if pad else x).unflatten(-2, (-1, size))


def chunked_attention(local: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute y_n = local_n v_n + q_n sum_{m<n} k_m^T v_m for each chunk n, in time and memory linear in N.

    `local` holds the weights within each of the N chunks of G positions. local [B, N, G, G], q, k [B, N, G, s],
    v [B, N, G, D] -> like v.
    """
    return chunk_by_chunk(local, q, k, v) if runs_in_sequence(v.device) else all_at_once(local, q, k, v)


def runs_in_sequence(device: torch.device) -> bool:
    """Return whether chunks are computed one after the other, which is faster on a CPU and slower on a GPU.

    A CPU's cache can hold the one running sum, but not a sum for every chunk.
    """
    return device.type == "cpu"


def algorithm(device: torch.device) -> str:
    """Return the name of the algorithm that is used on this device, for logging."""
    return "chunk by chunk" if runs_in_sequence(device) else "all chunks at once"


def all_at_once(local: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute `chunked_attention` for all chunks in parallel."""
    sums = k[:, :-1].mT @ v[:, :-1]  # [B, N - 1, s, D]; no chunk needs the sum of the last one
    earlier = q[:, 1:] @ sums.cumsum(1).to(v.dtype)
    y = local.to(v.dtype) @ v
    return torch.cat([y[:, :1], y[:, 1:] + earlier], dim=1)


@not_compiled  # the compiler would unroll the loops
def chunk_by_chunk(local: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute `chunked_attention` in a loop over the chunks, with one running sum."""
    with torch.autocast(v.device.type, enabled=False):
        return _ChunkByChunk.apply(*map(at_least_float32, (local, q, k, v))).to(v.dtype)


class _ChunkByChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(local, q, k, v)
        y = local @ v
        state = v.new_zeros(len(v), k.shape[-1], v.shape[-1])
        for n in range(1, v.shape[1]):
            state.baddbmm_(k[:, n - 1].mT, v[:, n - 1])
            y[:, n].baddbmm_(q[:, n], state)
        return y

    @staticmethod
    @kernel_backward
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        local, q, k, v = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), local.mT @ g
        state = v.new_zeros(len(v), k.shape[-1], v.shape[-1])
        for n in range(1, v.shape[1]):
            state.baddbmm_(k[:, n - 1].mT, v[:, n - 1])
            dq[:, n] = g[:, n] @ state.mT
        d_state = torch.zeros_like(state)
        for n in reversed(range(v.shape[1] - 1)):
            d_state.baddbmm_(q[:, n + 1].mT, g[:, n + 1])
            dv[:, n].baddbmm_(k[:, n], d_state)
            dk[:, n] = v[:, n] @ d_state.mT
        return g @ v.mT, dq, dk, dv
