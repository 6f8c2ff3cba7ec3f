"""Causal sums and means with position weights."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn.kernels.compiler import not_compiled
from attn.kernels.means import log_weighted_mean
from attn.kernels.products import at_least_float32

Product = Callable[[Tensor], Tensor]
LogWeight = Callable[[int, int], Tensor]

# Multiples of STEP are subtracted from k before exp. STEP is a power of two, so the subtraction is exact for k near the
# multiple. The difference of k and its nearest multiple is between -32 and 32, and exp of it leaves room in float32 for
# sums, squares and gradients.
STEP = 64.0
# If a denominator is below SMALLEST, terms of its row may have underflowed in float32, and gradients of w, which are up
# to exp(STEP / 2) / denominator, may overflow. The plain formula, for |k| < STEP / 2 and a positive w, has no such
# denominators: exp(-STEP / 2) is 1.3e-14, and `toeplitz.fft_is_safe` and `PositionWeight.relative` keep the largest w
# of a row above 1e-8.
SMALLEST = 1e-22


def weighted_sum(w: Tensor, x: Tensor) -> Tensor:
    """Compute y[b,t,c] = sum_{u<=t} w[h,t,u] x[b,u,c], where h is the head of c, by one matrix product per head.

    w [H, rows, T] or [1, rows, T] holds all T rows or some of them, and must be 0 where u > t.
    x [B, T, C] -> y [B, rows, C].
    """
    B, T, C = x.shape
    H, rows = w.shape[:2]
    columns = x.view(B, T, H, C // H).permute(2, 1, 0, 3).reshape(H, T, -1)  # [H, T, B*D]
    return (w @ columns).view(H, rows, B, C // H).permute(2, 1, 0, 3).reshape(B, rows, C)


def running_sum(x: Tensor) -> Tensor:
    """Compute y[b,t,c] = sum_{u<=t} x[b,u,c] in float32 or float64; a long sum in bf16 would stop growing."""
    return at_least_float32(x).cumsum(dim=1)


def exp_weighted_mean(
    product: Product,
    k: Tensor,
    v: Tensor,
    denominator_product: Product | None = None,
    window: int | None = None,
    log_w: LogWeight | None = None,
) -> Tensor:
    """Compute y[t,c] = sum_{u<=t} w[t,u] exp(k[u,c]) v[u,c] / sum_{u<=t} w[t,u] exp(k[u,c]).

    The result is exactly causal: what later positions hold does not even change its rounding. It is finite for every
    finite k if the weights w of a row differ by less than a factor of exp(50), or for all weights if `log_w` is given.

    Args:
        product: the function x -> sum_{u<=t} w[t,u] x[u,c].
        k, v: tensors of the result's shape, [B, T, C].
        denominator_product: the function to use in place of `product` in the denominator; None means `product`.
        window: if given, w[t,u] is 0 for t-u >= window.
        log_w: if given, log_w(end, start) returns log w, up to a constant per row, for the rows `start` to `end` - 1
            and the columns 0 to `end` - 1: [H or 1, end - start, end].

    A reference is subtracted from k before exp: the running maximum of k, rounded to a multiple of STEP. Each time
    the reference rises, a new segment of positions begins. Each segment is summed on its own and scaled to the
    reference at t. If |k| < STEP / 2 everywhere, the reference is 0, and the computation is the plain formula.

    With a window, the largest k up to t may lie outside the window, and every exp inside could underflow. From each k,
    its own nearest multiple of STEP is then subtracted. The sums of positions with the same multiple are scaled to the
    largest multiple in the window.

    Where w falls quickly with the distance, the position that set the reference may have a tiny w. Its term is then
    tiny because of w, and the others because of the reference, so that all terms of the row may underflow. Such rows
    have a tiny denominator. If `log_w` is given, they are computed again, one by one, from log w + k.
    """
    denominator_product = denominator_product or product
    with torch.autocast(k.device.type, enabled=False):
        k, v = at_least_float32(k), at_least_float32(v)
        if _is_small(k):
            e = k.exp()
            return Ratio.apply(product(e * v), denominator_product(e))
        return _divide(*_sums(product, denominator_product, k, v, window), k, v, log_w)


class Ratio(torch.autograd.Function):
    """Compute a / b, and save a / b and b for the backward pass, so that a can be freed. `/` would save a and b."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        y = a / b
        ctx.save_for_backward(y, b)
        return y

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        y, b = ctx.saved_tensors
        g = g / b
        return g, -g * y


@not_compiled  # the compiler cannot trace a bool that depends on values
def _is_small(k: Tensor) -> bool:
    return k.numel() == 0 or bool(k.detach().abs().amax() < STEP / 2)


@not_compiled
def _sums(
    product: Product, denominator_product: Product, k: Tensor, v: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return the numerator and the denominator, both scaled to the reference at t."""
    numerator = denominator = 0.0
    for e, scale in _segments(k) if window is None or k.shape[1] <= window else _levels(k, window):
        numerator = numerator + scale * product(e * v)
        denominator = denominator + scale * denominator_product(e)
    return numerator, denominator


def _segments(k: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each segment, yield exp(k - reference) inside it and 0 elsewhere, and the segment's scale at each t."""
    reference = (k.detach().cummax(dim=1).values / STEP).round() * STEP  # [B, T, C], never decreases
    segment = F.pad((reference.diff(dim=1) > 0).cumsum(dim=1), (0, 0, 1, 0))
    e = (k - reference).exp()
    for s in range(int(segment.max()) + 1):
        inside = segment == s
        own = torch.where(inside, reference, -torch.inf).amax(dim=1, keepdim=True)
        # Positions before the segment do not see it, so their scale is 0.
        yield torch.where(inside, e, 0.0), torch.where(segment >= s, (own - reference).exp(), 0.0)


def _levels(k: Tensor, window: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each level, yield exp(k - level) where this level is the nearest to k, 0 elsewhere, and its scale at each t.

    The levels are multiples of STEP.
    """
    level = (k.detach() / STEP).round() * STEP
    padded = F.pad(level.transpose(1, 2), (window - 1, 0), value=-torch.inf)
    reference = F.max_pool1d(padded, window, stride=1).transpose(1, 2)  # [B, T, C], the highest level in the window
    e = (k - level).exp()
    for value in level.unique():
        scale = torch.where(value <= reference, (value - reference).exp(), 0.0)  # higher levels are outside the window
        yield torch.where(level == value, e, 0.0), scale


@not_compiled
def _divide(numerator: Tensor, denominator: Tensor, k: Tensor, v: Tensor, log_w: LogWeight | None) -> Tensor:
    """Return numerator / denominator; with `log_w`, computed from log w + k where the denominator is below SMALLEST."""
    if log_w is None or not (lost := denominator.detach() < SMALLEST).any():
        return numerator / denominator
    y = numerator.masked_fill(lost, 0.0) / denominator.masked_fill(lost, 1.0)

    def row(t: int, k: Tensor, v: Tensor) -> Tensor:
        return log_weighted_mean(log_w(t + 1, t)[:, 0], k[:, : t + 1], v[:, : t + 1])

    position = lost.any(2).any(0).nonzero()[:, 0]
    # Computing each row again in the backward pass keeps the memory from growing with the square of T.
    again = [checkpoint(row, t, k, v, use_reentrant=False, preserve_rng_state=False) for t in position.tolist()]
    return y.index_copy(1, position, torch.where(lost[:, position], torch.cat(again, dim=1), y[:, position]))
