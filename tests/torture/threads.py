"""Runs that go on with another number of threads."""

import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig

from configs.cli import compose
from tests.torture.kills import fresh, killed_at_write, one_run
from tests.torture.small import given, in_a_fork
from training.record import Record

NUMBERS = (1, 2, 3)


def threads(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A killed run that goes on with as many threads ends with the same weights; with another number it says so."""
    wholes = {count: fresh(folder / f"whole{count}") for count in NUMBERS}
    for count, whole in wholes.items():
        in_a_fork(partial(one_run, whole, "wandb.mode=disabled"), partial(torch.set_num_threads, count))
    for number in range(cfg.threads):
        place = fresh(folder / str(number))
        before, after = (NUMBERS[number % 3], rng.choice(NUMBERS)) if number % 2 else (NUMBERS[number % 3],) * 2
        begin(place, before, rng)
        status, said = in_a_fork(partial(one_run, place, "wandb.mode=disabled"), partial(torch.set_num_threads, after))
        notice = f"it was trained with {before} threads and goes on with {after}"
        wrong = None
        if status:
            wrong = f"exit status {status}: {said[-300:]}"
        elif before != after and notice not in said:
            wrong = "nothing says so"
        elif before == after and weights(place).read_bytes() != weights(wholes[after]).read_bytes():
            wrong = "the weights differ"
        yield f"run {number}, {before} threads and then {after}: {wrong}" if wrong else None
        shutil.rmtree(place)


def weights(place: Path) -> Path:
    return Record.of(compose(given(place))).model


def begin(place: Path, count: int, rng: random.Random) -> None:
    """A run that is killed once it has a state."""
    state = Record.of(compose(given(place))).state
    while not state.exists():
        shutil.rmtree(place / "runs", ignore_errors=True)
        in_a_fork(partial(one_run, place, "wandb.mode=disabled"), both(count, killed_at_write(rng.randint(40, 140))))


def both(count: int, prepare: Callable[[], None]) -> Callable[[], None]:
    def prepared() -> None:
        torch.set_num_threads(count)
        prepare()

    return prepared
