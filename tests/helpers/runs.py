"""Train runs in tests, interrupt them, and compare their records."""

import itertools
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import ROOT
from train import train
from training.record import Record


def rows_of(folder: Path) -> list[dict]:
    """Return the logged rows without the figures that depend on the clock."""
    return [untimed(row) for row in Record(folder).rows()]


def untimed(figures: dict) -> dict:
    """Return figures without those that depend on the clock."""
    return {key: value for key, value in figures.items() if key not in ("seconds", "tokens_per_second")}


def flip(path: Path, place: int) -> None:
    """Flip the lowest bit of the byte at offset `place` of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def cut_off(path: Path, where: str) -> None:
    """Cut a text file off before the first occurrence of `where`."""
    path.write_text(path.read_text().partition(where)[0])


def torchrun(count: int, *arguments: str) -> subprocess.CompletedProcess:
    """Run a script, or -m and a module, in `count` processes. Return its exit status and output."""
    line = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)


def assert_refused(done: subprocess.CompletedProcess, words: str) -> None:
    """Assert that a command ended with exit status 2, and with one line that begins with "error: ", its last one.

    This line must contain `words`.
    """
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], done.stderr
    assert words in lines[-1]
    assert "Traceback" not in done.stderr


def in_a_new_process(function: Callable, *arguments):
    """Call a function in a new process, and return its result.

    Functions that fork need this: a fork of the tests' process would copy the locks of its threads, but no threads.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def folder_of(cfg) -> Path:
    return Record.of(cfg).folder


def assert_the_same(one: Path, other: Path) -> None:
    """Assert that two runs have the same weights, to the bit, and the same rows."""
    assert Record(one).model.read_bytes() == Record(other).model.read_bytes()
    assert rows_of(one) == rows_of(other)


class Cut(BaseException):
    """Raised to end a run without saving its state, as a crash would."""


def train_for(steps: int, cfg) -> None:
    """Take so many steps, from the beginning or from a saved state, and then end the run with Cut."""
    count = itertools.count()

    def dying(_trainer):
        if next(count) == steps:
            raise Cut

    with pytest.raises(Cut):
        train(cfg, dying)


def assert_mirrored(place: Path, rows: list[dict]) -> None:
    """Assert that wandb's offline log holds every row once, and exit status 0."""
    (mirror,) = mirrors(place)
    history = mirror["history"]
    assert mirror["steps"] == [r["step"] for r in rows]
    assert [h["train/loss"] for h in history] == pytest.approx([r["loss"] for r in rows])
    assert [h["tokens"] for h in history] == [r["tokens"] for r in rows]
    assert mirror["exits"] == [0]


def mirrors(place: Path) -> list[dict]:
    """Return the name, history, steps and exit statuses of each run in wandb's offline logs, sorted by name."""
    found = []
    for log in place.glob("wandb/offline-run-*/*.wandb"):
        wandb = Path(sys.executable).with_name("wandb")
        printed = subprocess.run([wandb, "leet", "inspect", "--json", log], capture_output=True, text=True, check=True)
        records = [json.loads(line) for line in printed.stdout.splitlines()]
        history = [r["history"]["item"] for r in records if r["type"] == "history"]
        exits = [r["exit"].get("exit_code", 0) for r in records if r["type"] == "exit"]
        (name,) = {r["run"]["display_name"] for r in records if r["type"] == "run"}
        found.append({"name": name, "history": history, "steps": [h["_step"] for h in history], "exits": exits})
    return sorted(found, key=lambda mirror: mirror["name"])
