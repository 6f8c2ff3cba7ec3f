"""What needs T x T numbers, a block of rows at a time. Functions and tensors in, tensors out."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn.kernels.products import float32_product

# A block's; sequences of 4 ROWS and more are cut: from there on it is not slower on a CPU. On a GPU it is not measured.
ROWS = 256


def are_many(T: int) -> bool:
    """Whether T rows are cut into blocks."""
    return T >= 4 * ROWS


def way(T: int) -> str:
    """What that comes to, for the log."""
    return f"weights by blocks of {ROWS} rows" if are_many(T) else "all weights at once"


def by_rows(block: Callable[..., Tensor], T: int, dim: int, *inputs: Tensor) -> Tensor:
    """The rows 0 to T-1 along `dim`, where block(t, end, *inputs) computes those from t to end - 1.

    A causal block sees what is before `end` alone: half the work of all T x T. It is computed again in the
    backward pass instead of kept, so that memory grows as T, not T^2. Tensors between the parameters and
    the result come as `inputs`: what a block only closes over, a checkpoint around all this would keep.
    """
    if not are_many(T):
        return block(0, T, *inputs)
    blocks = [
        checkpoint(block, t, min(t + ROWS, T), *inputs, use_reentrant=False, preserve_rng_state=False)
        for t in range(0, T, ROWS)
    ]
    return torch.cat(blocks, dim)


def attend_by_rows(weights: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """y = W v, where weights(q, k) gives the last rows of W, as many as q has; q, k, v [..., T, D], each its D."""

    def rows(t: int, end: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return float32_product(weights(q[..., t:end, :], k[..., :end, :]), v[..., :end, :])

    return by_rows(rows, q.shape[-2], -2, q, k, v)
