"""Causal sums and means, weighted densely or by any product. Tensors in, tensors out."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from attn.kernels.products import at_least_float32

# A multiple of a power of two is subtracted from K without rounding, and exp(+-32) leaves room
# in float32 for sums, squares and gradients.
STEP = 64.0


def weighted_sum(w: Tensor, x: Tensor) -> Tensor:
    """y[b,t,c] = sum_{u<=t} w[h,t,u] x[b,u,c], h the head of c; one matrix product per head.

    w [H, T, T] or [1, T, T], zero where u > t, or some of its rows; x [B, T, C] -> y [B, rows, C].
    """
    B, T, C = x.shape
    H, rows = w.shape[:2]
    columns = x.view(B, T, H, C // H).permute(2, 1, 0, 3).reshape(H, T, -1)  # [H, T, B*D]
    return (w @ columns).view(H, rows, B, C // H).permute(2, 1, 0, 3).reshape(B, rows, C)


def running_sum(x: Tensor) -> Tensor:
    """y[b,t,c] = sum_{u<=t} x[b,u,c], in float32 or float64: a sum in bf16 would stop growing."""
    return at_least_float32(x).cumsum(dim=1)


def exp_weighted_mean(
    product: Callable[[Tensor], Tensor],
    k: Tensor,
    v: Tensor,
    below: Callable[[Tensor], Tensor] | None = None,
    window: int | None = None,
) -> Tensor:
    """y[t,c] = sum_{u<=t} w[t,u] exp(k[u,c]) v[u,c] / sum_{u<=t} w[t,u] exp(k[u,c]).

    k, v [B, T, C] -> y [B, T, C]; product(x) is sum_{u<=t} w[t,u] x[u,c]. `below` stands for
    `product` in the denominator where its weights are others. `window`: w[t,u] = 0 for t-u >= window.

    Finite for every finite k where the weights that a row sees lie less than a factor of exp(50)
    apart, and exactly causal. exp(k) is taken relative to a reference that only the past decides:
    the running maximum of k, rounded to a multiple of STEP. Where it rises, a new segment begins;
    each segment is summed on its own and scaled down to the reference of the row that receives it.
    While |k| < STEP / 2 there is one segment, with reference 0, and the work is that of the plain
    formula. A window may have left the largest k behind, and what is relative to that may have
    vanished: its reference is the largest in the window, and k is summed by levels, the multiples
    of STEP that it is nearest to.
    """
    below = below or product
    with torch.autocast(k.device.type, enabled=False):
        k, v = at_least_float32(k), at_least_float32(v)
        if _is_small(k):
            e = k.exp()
            return Ratio.apply(product(e * v), below(e))
        if window is not None and k.shape[1] > window:
            return _by_levels(product, below, k, v, window)
        return _by_segments(product, below, k, v)


class Ratio(torch.autograd.Function):
    """a / b; for the backward pass it keeps its result and b, where `/` would keep a too, which nothing else needs."""

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


@torch.compiler.disable  # looks at values: a compiled model calls it between two graphs
def _is_small(k: Tensor) -> bool:
    return k.numel() == 0 or bool(k.detach().abs().amax() < STEP / 2)


@torch.compiler.disable
def _by_segments(
    product: Callable[[Tensor], Tensor], below: Callable[[Tensor], Tensor], k: Tensor, v: Tensor
) -> Tensor:
    reference = (k.detach().cummax(dim=1).values / STEP).round() * STEP  # [B, T, C], never falls
    segment = F.pad((reference.diff(dim=1) > 0).cumsum(dim=1), (0, 0, 1, 0))
    e = (k - reference).exp()
    numerator = denominator = 0.0
    for s in range(int(segment.max()) + 1):
        inside = segment == s
        e_s = torch.where(inside, e, 0.0)
        # A row that the segment has not reached yet receives nothing from it.
        own = torch.where(inside, reference, -torch.inf).amax(dim=1, keepdim=True)
        scale = torch.where(segment >= s, (own - reference).exp(), 0.0)
        numerator = numerator + scale * product(e_s * v)
        denominator = denominator + scale * below(e_s)
    return numerator / denominator


@torch.compiler.disable
def _by_levels(
    product: Callable[[Tensor], Tensor], below: Callable[[Tensor], Tensor], k: Tensor, v: Tensor, window: int
) -> Tensor:
    level = (k.detach() / STEP).round() * STEP
    before = F.pad(level.transpose(1, 2), (window - 1, 0), value=-torch.inf)
    reference = F.max_pool1d(before, window, stride=1).transpose(1, 2)  # [B, T, C], the highest level in sight
    e = (k - level).exp()
    numerator = denominator = 0.0
    for one in level.unique():
        e_one = torch.where(level == one, e, 0.0)
        scale = torch.where(one <= reference, (one - reference).exp(), 0.0)  # a row sees no higher one
        numerator = numerator + scale * product(e_one * v)
        denominator = denominator + scale * below(e_one)
    return numerator / denominator
