"""Directions for torch.compile. They do not import the compiler, because that takes as long as importing torch."""

import functools
import sys
from collections.abc import Callable

import torch


def not_compiled(function: Callable) -> Callable:
    """Do what torch.compiler.disable does: neither the function nor what it calls is compiled.

    torch.compile imports the compiler. Until then, there is nothing to disable.
    """
    disabled = []

    @functools.wraps(function)
    def call(*args, **kwargs):
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call


def constant_result(function: Callable) -> Callable:
    """Do what torch.compiler.assume_constant_result does: compiled code takes the result for a constant."""
    function._dynamo_marked_constant = True
    return function
