"""Report that a run has diverged, and find the first inf or NaN.

A run has diverged if a loss, a weight or, with optim.clip, the norm of the gradient is inf or NaN, if a loss reaches
700 nats, or if the final fit loss is at least MARGIN above that of uniform guessing.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from data.files import UserError
from training.checkpoint import rewind
from training.device import autocast
from training.metrics import perplexity
from training.optimizer import learning_rate, seed_step
from training.summary import write_summary

if TYPE_CHECKING:
    from training.trainer import Trainer

NOT_FINITE = "the loss, the gradient or a weight is not finite"
MARGIN = 1.0  # a run has diverged if its final loss is not below `uniform_loss` plus this many nats


def diverged(trainer: "Trainer", *losses: float) -> UserError:
    """Write the summary of a run that has diverged, and return the error to raise.

    `losses` are the losses that show it; NaN stands for a gradient or a weight that is not finite. The last saved state
    is kept. If one of `losses` is not finite and there is one process, the steps since that state, or since the start
    if there is none, are repeated to find the first inf or NaN. A signal ends this search. If there is a saved state,
    the search first removes the rows of metrics.jsonl that were logged after it, as when a run continues.
    """
    write_summary(trainer, "diverged")
    advice = "try a lower optim.lr, optim.warm_up=500 or optim.clip=1.0"
    reached, where, wrong = trainer.step, "", None
    if reached == 1:  # the learning rate has had no effect on the first loss
        advice += "; if these do not help, look for an overflow or a denominator of 0 in the attention"
    if all(map(math.isfinite, losses)):
        return UserError(
            f"the run has diverged: after step {reached} the loss is {max(losses):.4g}, where guessing gives "
            f"{uniform_loss(trainer):.4g}, at optim.lr={trainer.cfg.optim.lr:g}; {advice}"
        )
    if trainer.processes.count == 1:
        print(f"{NOT_FINITE} after step {reached}: looking for the first inf or NaN", flush=True)
        rewind(trainer)
        start, wrong = trainer.step, first_wrong_step(trainer, reached)
        good = trainer.step if trainer.received_signals else start  # a signal ended the search after this good step
        if wrong is not None:
            where = f": {wrong} became inf or NaN at step {trainer.step + 1}"
        elif good < reached:
            where = f": one of these became inf or NaN between steps {good} and {reached}"
    if reached <= 1 or (wrong is not None and trainer.step == 0):  # before the weights were changed
        advice = (
            "the weights were still the initial ones, so look for an overflow, or a logarithm or denominator of 0, in "
            f"the attention: python -m pytest -k {trainer.cfg.job.attn}"
        )
    lr = learning_rate(min(trainer.step, reached - 1), trainer.cfg.train.steps, trainer.cfg.optim)
    last = f"the run's last good state stays in {trainer.record.folder}; " if trainer.record.state.exists() else ""
    return UserError(f"{NOT_FINITE} after step {reached}{where}, at a learning rate of {lr:.2g}; {last}{advice}")


def check_final(trainer: "Trainer", result: dict) -> None:
    """Raise what `diverged` returns if the final evaluation shows that the run has diverged."""
    losses = [result[text]["loss"] for text in ("fit", "heldout", "sliding") if text in result]
    if not all(math.isfinite(perplexity(loss)) for loss in losses):
        raise diverged(trainer, *losses)
    if losses[0] >= uniform_loss(trainer) + MARGIN:
        raise diverged(trainer, losses[0])


def first_wrong_step(trainer: "Trainer", reached: int) -> str | None:
    """Repeat the steps up to `reached`, and return the name of what first becomes inf or NaN.

    The weights are left as they were before the step in which this happens. Returns None if everything stays finite, or
    if a signal has ended the search.
    """
    while trainer.step < reached and not trainer.received_signals:
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        loss, _ = trainer.take_step()
        if not (loss.isfinite() and all_finite(trainer.model)):
            trainer.model.load_state_dict(before)
            seed_step(trainer.cfg, trainer.step, trainer.processes.rank)
            parts = zip(*(ids.chunk(trainer.cfg.train.accumulate) for ids in trainer.batch()), strict=True)
            with autocast(trainer.device, trainer.precision):
                found = (first_not_finite(trainer.model, trainer.model.loss, *part) for part in parts)
                return next(filter(None, found), "a weight" if loss.isfinite() else "the loss")
        trainer.step += 1
    return None


def first_not_finite(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor
) -> str | None:
    """Return the name of what first holds an inf or a NaN in loss(inputs, targets) and its backward pass, or None.

    The order is: parameters, outputs of modules as they are computed, the loss, and gradients of parameters. If
    the backward pass is reached, the gradients are cleared.
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
    # Autocast is off here, as in training without torch.compile. Compiled training runs this pass under autocast.
    with torch.autocast(value.device.type, enabled=False):
        value.backward()
    wrong = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    model.zero_grad()
    return f"the gradient of {wrong[0]}" if wrong else None


def all_finite(model: nn.Module) -> bool:
    """Return whether every parameter is finite."""
    with torch.no_grad():
        return all(bool(p.isfinite().all()) for p in model.parameters())


def uniform_loss(trainer: "Trainer") -> float:
    """Return the loss, in nats, of a model that gives all symbols the same probability."""
    return math.log(len(trainer.corpus.vocabulary))
