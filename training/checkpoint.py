"""Save the state of a run, and continue from it."""

from typing import TYPE_CHECKING

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
    places, moved = continued(state.get("devices_used", []), trainer.devices_used[-1], trainer.step)
    if moved:
        before, now = (f"on {one['device']} with torch {one['torch']}" for one in places[-2:])
        print(f"this run was trained {before}, and continues {now}: the summary will say so", flush=True)
    threads, changed = continued(state.get("threads_used", []), trainer.threads_used[-1], trainer.step)
    if changed and not moved and trainer.device.type == "cpu":
        until_now = " then ".join(str(one["threads"]) for one in threads[:-1])
        advice = f"; stop it and set OMP_NUM_THREADS={until_now} to avoid this" if len(threads) == 2 else ""
        print(
            f"the number of CPU threads was {until_now} and is now {threads[-1]['threads']}: the weights of this run "
            f"will differ, at first in their last bits alone, from those of an uninterrupted run{advice}",
            flush=True,
        )
    code, edited = continued(state.get("trained_by", []), trainer.trained_by[-1], trainer.step)
    if edited:
        commit = code[-2]["commit"]
        print(
            f"the code has changed since this run was trained at commit {commit}: the summary will say so", flush=True
        )
    trainer.devices_used, trainer.threads_used, trainer.trained_by = places, threads, code


def continued(saved: list[dict], now: dict, step: int) -> tuple[list[dict], bool]:
    """Return the history of a run that continues after `step`, and whether `now` differs from its last entry.

    `saved` is the history in the run's state. Each entry is a dict of, for example, the device, with `from_step`, the
    step after which it was in use. Entries under which no step was taken are removed. If `now` differs from the last
    remaining one, or none remains, it is appended.
    """
    before = [one for one in saved if one["from_step"] < step]
    changed = bool(before) and before[-1] | {"from_step": 0} != now | {"from_step": 0}
    return [*before, now | {"from_step": step}] if changed else before or [now], changed


def rewind(trainer: "Trainer") -> None:
    """Go back to the last saved state or, if there is none, to the initial weights, a new optimiser and step 0."""
    if trainer.record.state.exists():
        return restore(trainer)
    trainer.model.load_state_dict(initial_model(trainer.cfg, len(trainer.corpus.vocabulary)).state_dict())
    trainer.optimizer = optimizer_of(trainer.model, trainer.cfg.optim, trainer.compiled)
    trainer.step = 0
