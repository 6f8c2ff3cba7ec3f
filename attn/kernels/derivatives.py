"""What the backward passes of most kernels have in common: they cannot be differentiated."""

import functools
from collections.abc import Callable

import torch


def kernel_backward(backward: Callable) -> Callable:
    """Run the backward pass of a torch.autograd.Function outside autocast, and refuse to differentiate it.

    Raises RuntimeError if the backward pass is itself to be differentiated. Without this, autograd would treat some of
    its results as constants, and second derivatives would silently be wrong.
    `torch.autograd.function.once_differentiable` raises an error in some of these cases only.
    """

    @functools.wraps(backward)
    def checked(ctx, *gradients):
        if torch.is_grad_enabled():  # in a backward pass, only if create_graph=True
            raise RuntimeError("fast implementations have no second derivative: take impl=reference without autocast")
        with torch.autocast(gradients[0].device.type, enabled=False):
            return backward(ctx, *gradients)

    return checked
