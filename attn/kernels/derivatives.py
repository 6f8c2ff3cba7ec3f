"""Backward passes without a second derivative."""

import functools
from collections.abc import Callable

import torch


def first_derivative_only(backward: Callable) -> Callable:
    """Make the backward pass of a torch.autograd.Function raise a RuntimeError if it is itself to be differentiated.

    Without this, autograd would treat some of its results as constants, and second derivatives would silently be wrong.
    `torch.autograd.function.once_differentiable` raises an error in some of these cases only.
    """

    @functools.wraps(backward)
    def checked(ctx, *gradients):
        if torch.is_grad_enabled():  # in a backward pass, only if create_graph=True
            raise RuntimeError("fast attention has no second derivative; impl=reference has one without autocast")
        return backward(ctx, *gradients)

    return checked
