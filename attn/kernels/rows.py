"""Compute with T x T matrices in blocks of rows, to save time and memory for long sequences."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn.kernels.products import float32_product

# The number of rows in a block. Sequences of at least 4 * ROWS positions are divided into blocks: from this length on,
# blocks are no slower on a CPU. This was not measured on a GPU.
ROWS = 256


def uses_blocks(T: int) -> bool:
    """Return whether T rows are divided into blocks."""
    return T >= 4 * ROWS


def algorithm(T: int) -> str:
    """Return the name of the algorithm that is used for T positions, for logging."""
    return f"weights by blocks of {ROWS} rows" if uses_blocks(T) else "all weights at once"


def by_row_blocks(block: Callable[..., Tensor], T: int, dim: int, *inputs: Tensor) -> Tensor:
    """Compute rows 0 to T-1 along `dim` in blocks; block(start, end, *inputs) returns rows `start` to `end` - 1.

    A causal block needs only the columns before `end`, which halves the work. The backward pass computes each block
    again instead of storing it, so that memory grows linearly with T. Blocks are computed from the last to the first,
    because the tensors of each block then fit into the memory that the longer block before it has freed.

    Pass all tensors that depend on the layer's input as `inputs`, so that `block` captures none of them. If the caller
    wraps this function in a checkpoint of its own, captured tensors would stay in memory until the backward pass.
    """
    if not uses_blocks(T):
        return block(0, T, *inputs)
    blocks = [
        checkpoint(block, start, min(start + ROWS, T), *inputs, use_reentrant=False, preserve_rng_state=False)
        for start in reversed(range(0, T, ROWS))
    ]
    return torch.cat(blocks[::-1], dim)


def attend_by_row_blocks(weights: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
    """Compute W v in blocks of rows: q, k [..., T, key dimensions], v [..., T, value dimensions] -> like v.

    `weights` gets the rows of q of a block, and the rows of k and of `more`, [..., T, any], up to the block's end. It
    must return the block's rows of W, with one column for each of these rows of k.
    """

    def block(start: int, end: int, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        W = weights(q[..., start:end, :], *(x[..., :end, :] for x in (k, *more)))
        return float32_product(W, v[..., :end, :])

    return by_row_blocks(block, q.shape[-2], -2, q, k, v, *more)
