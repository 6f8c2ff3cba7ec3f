"""The moments at which a blow falls: before a random call in a part of a run, or anywhere."""

import contextlib
import functools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import datasets  # noqa: F401, here and not in each of the forks
import wandb.sdk.launch  # noqa: F401

import train
from data.files import UserError
from scripts.reporting import table
from tests.torture.small import Fork, in_a_fork
from training import evaluation, trainer
from training.record import Record
from training.trainer import Trainer
from training.wandb_mirror import Mirror

ANYWHERE, CORPUS, TABLE, BETWEEN = "anywhere", "the tokenised corpus", "the table", "the time between runs"
STRUCK = "(here the blow falls)"


@dataclass(frozen=True)
class Part:
    """A function of ours; a blow falls before a call that it makes, or before one of those to the system alone."""

    owner: object
    name: str
    system: bool = False


PARTS = {
    CORPUS: Part(train, "load", system=True),
    "the beginning of the record": Part(Record, "start", system=True),
    "the beginning of wandb": Part(Mirror, "__init__", system=True),
    "a step": Part(trainer, "update"),
    "an evaluation": Part(evaluation, "score"),
    "metrics": Part(Record, "log", system=True),
    "a checkpoint": Part(Record, "save_state", system=True),
    "the end": Part(Trainer, "finish", system=True),
    "the end of wandb": Part(Mirror, "finish"),
    TABLE: Part(table, "write_bytes", system=True),
    BETWEEN: Part(train, "train"),
}


def watch(what: str, notice: Callable[[], None]) -> None:
    """From now on, notice() before each call in a part of a run; what is between runs is outside of its part."""
    part = PARTS[what]
    inner = getattr(part.owner, part.name)

    def look(_frame, event: str, called: object) -> None:
        if of_the_system(event, called) if part.system else event in ("call", "c_call"):
            notice()

    @functools.wraps(inner)
    def watched(*arguments, **options):
        around = look if what == BETWEEN else sys.getprofile()
        sys.setprofile(None if what == BETWEEN else look)
        try:
            return inner(*arguments, **options)
        finally:
            sys.setprofile(around)

    setattr(part.owner, part.name, watched)


def of_the_system(event: str, called: object) -> bool:
    """Whether a call may open, write, rename or remove a file."""
    if event != "c_call":
        return False
    modules = {getattr(called, "__module__", None), type(getattr(called, "__self__", None)).__module__}
    return bool(modules & {"posix", "io", "_io"}) and called.__name__ != "fspath"


def undisturbed(task: Callable[[], object], parts: list[str]) -> dict[str, float]:
    """Of a task that nobody disturbs: in each part the calls before which a blow can fall; and all the seconds."""
    counts = dict.fromkeys(parts, 0)

    def count(what: str) -> None:
        counts[what] += 1

    def counting() -> None:
        for what in parts:
            watch(what, functools.partial(count, what))
        with contextlib.suppress(SystemExit):
            task()
        sys.setprofile(None)
        print(json.dumps(counts))

    start = time.monotonic()
    status, said = in_a_fork(counting)
    if status:
        raise UserError(f"a run that nobody disturbs fails: {said}")
    counts = json.loads(said.splitlines()[-1])
    if never := [what for what, count in counts.items() if not count]:
        raise UserError(f"a run that nobody disturbs does not come to {', '.join(never)}: {said}")
    return counts | {ANYWHERE: time.monotonic() - start}


def blow(
    task: Callable[[], object], what: str, moments: dict[str, float], sent: signal.Signals, rng: random.Random
) -> tuple[int, str]:
    """Run a task in a fork that a signal strikes at a random moment of a part: its exit status, and what it printed."""
    if what != ANYWHERE:
        return in_a_fork(task, at_call(what, rng.randint(1, moments[what]), sent))
    fork = Fork(task)
    time.sleep(rng.uniform(0.1, moments[what]))
    os.kill(fork.child, sent)  # which waits to be asked for its end, if it has come to it
    return fork.end()


def at_call(what: str, number: int, sent: signal.Signals) -> Callable[[], None]:
    """A signal before this process makes its `number`th call in a part of a run."""
    left = number

    def notice() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.write(2, f"{STRUCK}\n".encode())
            os.kill(os.getpid(), sent)

    return lambda: watch(what, notice)
