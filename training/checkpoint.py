"""Save the state of a run, and continue from it."""

from typing import TYPE_CHECKING

import torch

from data.files import UserError, out_of_memory
from training.distributed import load_model, load_optimizer
from training.loading import config_of
from training.optimizer import optimizer_of
from training.pretrained import initial_model
from training.settings import differing

if TYPE_CHECKING:
    from training.trainer import Trainer


def save(trainer: "Trainer") -> None:
    """Save the state of the run.

    The state does not depend on the number of processes, so that a run can continue with another number of them.
    """
    state = {
        "step": trainer.step,
        "seconds": trainer.seconds,
        "loss_sum": trainer.processes.average(trainer.loss_sum),
        "loss_count": trainer.loss_count,
        "model": trainer.processes.gather(trainer.model.state_dict()),
        "optimizer": trainer.processes.gather(trainer.optimizer.state_dict()),
        "data": trainer.corpus.sha256,
        "precision": trainer.precision,
        "devices_used": trainer.devices_used,
        "threads_used": trainer.threads_used,
        "trained_by": trainer.trained_by,
        **trainer.early_stopping.state(trainer.processes),
    }
    if trainer.processes.first:
        trainer.record.save_state(state)


def restore(trainer: "Trainer") -> None:
    """Load the state in the run's folder into the trainer.

    Rows of metrics.jsonl after the state's step are removed, and so are files that other commands measured on the run.
    Raises UserError if the state is damaged, or if it or the folder belongs to another run, model or text.
    """
    differs = differing(config_of(trainer.record), trainer.cfg)
    if differs:
        raise UserError(f"{trainer.record.folder} was begun with another {differs[0]}: resume=false starts it again")
    state = trainer.record.load_state()
    if state["data"] != trainer.corpus.sha256:
        raise UserError(f"{trainer.record.folder} was begun on another text: resume=false starts it again")
    if not 0 <= state["step"] <= trainer.cfg.train.steps:
        raise UserError(f"{trainer.record.state} is damaged, its step is {state['step']}: resume=false starts again")
    try:
        trainer.early_stopping.restore(state, trainer.model)
        load_model(trainer.model, state["model"])
        load_optimizer(trainer.optimizer, state["optimizer"])
        trainer.loss_sum.copy_(state["loss_sum"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        if out_of_memory(error):
            raise
        what = f"{trainer.record.state} is damaged or of another model"
        raise UserError(f"{what}: resume=false trains the run anew") from error
    trainer.step, trainer.seconds = state["step"], state["seconds"]
    begun_in = state.get("precision", trainer.precision)  # older versions saved no precision
    if begun_in != trainer.precision:  # train.precision=auto chose another precision on this machine
        print(f"this run was begun in {begun_in}, and continues in it", flush=True)
        trainer.precision = begun_in
    note_changes(trainer, state)
    trainer.loss_count = state["loss_count"]
    if trainer.processes.first:
        trainer.record.remove_measurements()


def note_changes(trainer: "Trainer", state: dict) -> None:
    """Print what has changed since a run was interrupted, and keep it for the summary: device, torch, threads or code.

    On a GPU, a change of the number of threads is neither printed nor written to the summary. On a CPU, it is written
    to the summary, but not printed if the device or torch has changed too.
    """
    here = trainer.devices_used[-1]
    places = [one for one in state.get("devices_used", []) if one["from_step"] < trainer.step]
    moved = bool(places) and places[-1] != here | {"from_step": places[-1]["from_step"]}
    if places:
        trainer.devices_used = [*places, here | {"from_step": trainer.step}] if moved else places
    if moved:
        before, now = (f"on {one['device']} with torch {one['torch']}" for one in (places[-1], here))
        print(f"this run was trained {before}, and continues {now}: the summary will say so", flush=True)
    threads = torch.get_num_threads()
    used = [one for one in state.get("threads_used", []) if one["from_step"] < trainer.step]
    changed = bool(used) and used[-1]["threads"] != threads
    if used:
        trainer.threads_used = [*used, {"from_step": trainer.step, "threads": threads}] if changed else used
    if changed and not moved and trainer.device.type == "cpu":
        until_now = " then ".join(str(one["threads"]) for one in used)
        advice = f"; stop it and set OMP_NUM_THREADS={until_now} to avoid this" if len(used) == 1 else ""
        print(
            f"the number of CPU threads was {until_now} and is now {threads}: the weights of this run will differ, "
            f"at first in their last bits alone, from those of an uninterrupted run{advice}",
            flush=True,
        )
    before = [one for one in state.get("trained_by", []) if one["from_step"] < trainer.step]
    now = trainer.trained_by[-1]
    if before and before[-1] == now | {"from_step": before[-1]["from_step"]}:
        trainer.trained_by = before
    elif before:
        commit = before[-1]["commit"]
        print(
            f"the code has changed since this run was trained at commit {commit}: the summary will say so", flush=True
        )
        trainer.trained_by = [*before, now | {"from_step": trainer.step}]


def rewind(trainer: "Trainer") -> None:
    """Go back to the last saved state or, if there is none, to the initial weights, a new optimiser and step 0."""
    if trainer.record.state.exists():
        return restore(trainer)
    trainer.model.load_state_dict(initial_model(trainer.cfg, len(trainer.corpus.vocabulary)).state_dict())
    trainer.optimizer = optimizer_of(trainer.model, trainer.cfg.optim, trainer.compiled)
    trainer.step = 0
