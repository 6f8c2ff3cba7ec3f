"""Two at once, and what killed ones have locked."""

import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from configs.cli import compose
from data.corpus import load
from data.files import UserError
from tests.torture.kills import OF_A_RUN, Task, fresh, one_run, one_sweep, struck, what_differs
from tests.torture.moments import ANYWHERE, CORPUS, at_call, undisturbed
from tests.torture.small import Fork, given, in_a_fork

HELD = r"is being trained by process \d+ on |was finished by another process a moment ago"


def rivals(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A run, a sweep or a tokenised corpus is begun twice at once, or after a killed one, whose lock is still there:
    one works, the other waits or says who does, and the record is that of one alone."""
    run, sweep, corpus = (fresh(folder / name) for name in ("run", "sweep", "corpus"))
    moments = undisturbed(partial(one_run, run), OF_A_RUN)
    in_a_fork(partial(one_sweep, sweep))
    in_a_fork(partial(tokenise, corpus))

    def killed(what: str) -> Callable[[], None]:
        return at_call(what, rng.randint(1, moments[what]), signal.SIGKILL)

    def pause() -> float:
        return rng.choice([0, rng.uniform(0, moments[ANYWHERE])])

    def after_a_killed_one(place: Path) -> list[str]:
        struck(one_run, place, rng.choice(OF_A_RUN), moments, signal.SIGKILL, rng)
        return two(one_run, place, run, pause())

    cases = {
        "two of a run": lambda place: two(one_run, fresh(place), run, pause()),
        "two sweeps": lambda place: two(one_sweep, fresh(place), sweep, pause()),
        "two of a corpus": lambda place: two(tokenise, fresh(place), corpus, pause() / 10),
        "two of a corpus, one of them killed": lambda place: two(
            tokenise, fresh(place), corpus, pause() / 10, killed(CORPUS)
        ),
        "two of a run after a killed one": after_a_killed_one,
    }
    fell = dict.fromkeys(cases, 0)
    for number in range(cfg.rivals):
        what = list(cases)[number % len(cases)]
        fell[what] += 1
        lost = cases[what](folder / str(number))
        yield f"rivals {number}, {what}: {'; '.join(lost)}" if lost else None
        shutil.rmtree(folder / str(number))
    return fell


def two(task: Task, place: Path, whole: Path, pause: float, kill: Callable[[], None] | None = None) -> list[str]:
    """Do a task in a folder, to be killed or not, and after a pause do it again beside: what is lost."""
    forks = [Fork(partial(task, place), kill or nothing)]
    time.sleep(pause)
    forks.append(Fork(partial(task, place)))
    ends = [fork.end() for fork in forks]
    if kill is not None and ends[0][0] == -signal.SIGKILL:
        del ends[0]
    lost = [f"exit status {status}: {said[-300:]}" for status, said in ends if status and not was_held(said)]
    return lost + what_differs(place, whole)


def nothing() -> None:
    """How a fork is prepared that nobody will kill."""


def was_held(said: str) -> bool:
    """Whether a command failed because another process worked, and said so, and for no other reason."""
    failures = [line for line in said.splitlines() if re.match(r"failed: |error: (?!\d+ of the sweep's jobs)", line)]
    return bool(failures) and all(re.search(HELD, line) for line in failures)


def tokenise(place: Path) -> None:
    """Make the corpus, or wait for who does, and see whether its ids are those of the text."""
    corpus = load(compose(given(place)).data)
    if "".join(corpus.vocabulary[i] for i in corpus.ids.tolist()) != (place / "text.txt").read_text(encoding="utf-8"):
        raise UserError("these are the ids of another text")
