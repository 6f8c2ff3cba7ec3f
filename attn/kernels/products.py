"""Matrix products whose result stays in float32 under autocast."""

import torch
from torch import Tensor

from attn.kernels.derivatives import kernel_backward


def at_least_float32(x: Tensor) -> Tensor:
    """Convert x to float32 if its precision is lower; leave float32 and float64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b, in float32 under autocast: a [..., M, K], b [..., K, N] -> [..., M, N].

    Autocast would round the result, and bf16 is too coarse for an exponent, see `attn.parts.exponent_linear`. The
    backward pass computes its two products in autocast's dtype, since rounding a gradient is usually harmless; `_pairs`
    of attn/kernels/recurrence.py is an exception. If that dtype is float16, it computes them in float32, because a and
    b may be too large for float16.
    """
    kind = a.device.type
    if torch.float64 in (a.dtype, b.dtype) or not torch.is_autocast_enabled(kind):
        return a @ b
    dtype = torch.get_autocast_dtype(kind)
    return _Float32Product.apply(a, b, torch.float32 if dtype == torch.float16 else dtype)


class _Float32Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(a.to(dtype), b.to(dtype))
        with torch.autocast(a.device.type, enabled=False):
            return a.float() @ b.float()

    @staticmethod
    @kernel_backward
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        g = g.to(a.dtype)
        return g @ b.mT, a.mT @ g, None
