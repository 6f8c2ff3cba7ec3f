"""Where numbers first stop being finite."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def first_not_finite(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor
) -> str | None:
    """What is the first to hold an inf or a NaN in loss(inputs, targets) and its backward pass; None: nothing does.

    A parameter; the output of a layer, the innermost of the earliest; the loss; the gradient of a
    parameter. Clears the gradients.
    """
    if wrong := [name for name, p in model.named_parameters() if not p.isfinite().all()]:
        return wrong[0]
    reached: list[str] = []

    def watch(name: str) -> Callable:
        def look(_module, _inputs, output) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            if not all(y.isfinite().all() for y in tensors if isinstance(y, Tensor)):
                reached.append(name)

        return look

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        value = loss(inputs, targets)
    finally:
        for hook in hooks:
            hook.remove()
    if reached:
        return f"the output of {reached[0]}"
    if not value.isfinite():
        return "the loss"
    model.zero_grad()
    with torch.autocast(value.device.type, enabled=False):  # as in training, where it is over by then
        value.backward()
    wrong = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    model.zero_grad()
    return f"the gradient of {wrong[0]}" if wrong else None


def all_finite(model: nn.Module) -> bool:
    """Whether every parameter is."""
    with torch.no_grad():
        return all(bool(p.isfinite().all()) for p in model.parameters())
