"""Small runs that take a second: compare what two of them have written, and disturb one at a chosen moment."""

import inspect
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

from configs.cli import compose, main
from data.corpus import load
from data.files import UserError, write_bytes
from data.reading import read_json
from tests.conftest import TINY
from tests.helpers.runs import mirrors, rows_of, untimed
from tests.torture.forks import failed, in_a_fork, typed
from train import train
from training.evaluation import score
from training.metrics import append_row
from training.optimizer import update
from training.record import Record
from training.trainer import Trainer
from training.wandb_mirror import Mirror

SMALL = [*TINY, "train.steps=12", "train.checkpoint_seconds=0", "evaluation.every=3", "data=file"]
PLACES = {"data.path": "../text.txt", "data.cache": "cache", "runs": "runs", "wandb.dir": ""}
UNMIRRORED = "wandb.mode=disabled"
ENDED = 13  # what `promising` writes in place of a step number when the run has ended; it has 12 steps
TABLE = "the table"
PARTS = {  # functions of a task; it is disturbed when one of them begins, or before a system call inside one
    "the tokenised corpus": load,
    "the beginning of the record": Record.start,
    "the beginning of wandb": Mirror.__init__,
    "a step": update,
    "an evaluation": score,
    "metrics": append_row,
    "a checkpoint": Record.save_state,
    "the end": Trainer.finish,
    "the end of wandb": Mirror.finish,
    TABLE: write_bytes,
}

Task = Callable[[Path], object]  # called with the folder that it works in


def given(folder: Path, *more: str) -> list[str]:
    """Return the overrides of a small run with its files in `folder` and its text beside it, extended by `more`."""
    return [*SMALL, *(f"{key}={os.path.normpath(folder / name)}" for key, name in PLACES.items()), *more]


def fresh(place: Path) -> Path:
    """Empty a folder, write a text beside it, and return the folder."""
    shutil.rmtree(place, ignore_errors=True)  # the root of a mounted disk cannot be removed
    place.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    text = "".join(chr(0x4E00 + int(rng.expovariate(0.05)) % 200) for _ in range(5000))
    (place.parent / "text.txt").write_text(text, encoding="utf-8")
    return place


def one_run(place: Path, *more: str, on_step: Callable[[Trainer], object] | None = None) -> None:
    """Run train.py for a small run. on_step(trainer) is called before each step, when the last state is saved."""
    typed(main("config")(lambda cfg: train(cfg, on_step)), *given(place, *more))


def what_differs(place: Path, expected: dict[str, object]) -> list[str]:
    """Return how the results in `place` differ from the undisturbed ones, and which files are left over."""
    found = results(place)
    lost = [f"{name} differs or is missing" for name in expected if found.get(name, "") != expected[name]]
    return lost + [f"{name} is left over" for name in found if name not in expected]


def results(place: Path) -> dict[str, object]:
    """Return the contents of a folder's files, by name, without times and paths, to be compared between folders."""
    read = {
        "metrics.jsonl": lambda path: rows_of(path.parent),
        "summary.json": lambda path: untimed(read_json(path).get("evaluation", {})),
        "config.yaml": lambda path: None,
    }
    kinds = ("runs/*/*/*", "cache/????????????????/*", "table/table.*", "**/.*", "**/*.tmp", "**/*.work")
    files = sorted({path for kind in kinds for path in place.glob(kind)})
    figures = {str(path.relative_to(place)): read.get(path.name, content)(path) for path in files}
    return figures | {f"wandb of {mirror['name']}": mirror["steps"] for mirror in mirrors(place)}


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def watch(notices: dict[str, Callable[[], object]]) -> None:
    """Make this process call notices[part]() at each moment of a part: when it begins, and before its system calls."""
    codes = {inspect.unwrap(PARTS[part]).__code__: notice for part, notice in notices.items()}
    running = []  # the notices of the parts that this process is in

    def look(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and running and of_the_system(called):
            for notice in running:
                notice()
        elif event in ("call", "return") and (notice := codes.get(frame.f_code)):
            if event == "return":
                return running.remove(notice)
            running.append(notice)
            notice()

    sys.setprofile(look)


def of_the_system(called: object) -> bool:
    """Return whether a function is in posix, except fspath, or in io. Calls inside compiled libraries go unseen."""
    modules = {getattr(called, "__module__", None), type(getattr(called, "__self__", None)).__module__}
    return bool(modules & {"posix", "io", "_io"}) and called.__name__ != "fspath"


def at(part: str, moment: int, act: Callable[[], object]) -> None:
    """Make this process call act() at moment number `moment` of a part; see `watch`."""
    times = itertools.count(1)

    def notice() -> None:
        if next(times) == moment:
            sys.setprofile(None)
            act()

    watch({part: notice})


class Victim:
    """A task that is first done undisturbed, to measure how long it takes and count the moments of each part."""

    def __init__(self, task: Task, whole: Path, parts: list[str]):
        self.task, self.whole, self.parts = task, fresh(whole), parts
        calls = Counter()
        count = partial(watch, {part: partial(calls.update, [part]) for part in parts})
        start = time.monotonic()
        status, output = in_a_fork(count, partial(task, whole), lambda: print(f"\n{json.dumps(calls)}"))
        self.moments = {} if status else json.loads(output.splitlines()[-1])
        if not all(part in self.moments for part in parts):
            raise UserError(f"an undisturbed task failed, or never reached one of its parts: {output}")
        self.seconds = time.monotonic() - start
        self.results = results(whole)

    def when(self, part: str, rng: random.Random, act: Callable[[], object]) -> Callable[[], None]:
        """Return a function. The process that calls it will call act() at a random moment of a part."""
        return partial(at, part, rng.randint(1, self.moments[part]), act)

    def again(self, place: Path) -> list[str]:
        """Do the task again after a disturbance, and return what is wrong, if anything.

        That is: which saved state is lost, whether rows are lost, and how the task fails, or else how its results
        differ from the undisturbed ones.
        """
        promise = place.with_suffix(".promise")
        kept = int(promise.read_text(encoding="utf-8")) if promise.exists() else 0
        status, output = in_a_fork(partial(self.task, place))
        found = re.search(r"continuing .+ after step (\d+)|finished before", output)
        what = "the finished run" if kept == ENDED else f"the state after step {kept}"
        lost = [f"{what} is lost"] * (kept > (int(found[1] or ENDED) if found else 0))
        lost += ["rows are lost"] * ("has lost rows" in output)
        return lost + (failed(status, output) or what_differs(place, self.results))


def promising(place: Path) -> None:
    """Train a small run that writes a promise beside its folder: the step of the last state, which must not be lost."""
    promise = place.with_suffix(".promise")
    one_run(place, UNMIRRORED, on_step=lambda trainer: promise.write_text(str(trainer.step), encoding="utf-8"))
    promise.write_text(str(ENDED), encoding="utf-8")


def trained(place: Path, *more: str, steps: int = ENDED) -> Path:
    """Train a run of 12 steps, or kill it when it has saved its state after step `steps`. Return its folder."""

    def on_step(trainer: Trainer) -> None:
        if trainer.step == steps:
            signal.raise_signal(signal.SIGKILL)

    status, output = in_a_fork(partial(one_run, fresh(place), UNMIRRORED, *more, on_step=on_step))
    assert status == (0 if steps == ENDED else -signal.SIGKILL), output
    return Record.of(compose(given(place, UNMIRRORED, *more))).folder
