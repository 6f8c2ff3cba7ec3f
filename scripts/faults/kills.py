"""Runs that are killed, and go on."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from configs.cli import compose
from data.files import UserError
from data.record import Record
from scripts.faults.small import given, in_a_fork, write_text
from train import train

WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
TIMED = ("seconds", "tokens_per_second")


def kills(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A run killed at a random write, or moment, goes on, sometimes to be killed again, and ends as if it never was."""
    whole = folder / "whole"
    write_text(whole)
    status, said = in_a_fork(lambda: train(compose(given(whole))))
    if status:
        raise UserError(f"a run that nobody disturbs fails: {said}")
    for number in range(cfg.kills):
        place = folder / str(number)
        write_text(place)
        again = partial(lambda place: train(compose(given(place))), place)
        status = 0
        while status == 0:  # a run that comes to its end was not killed; a finished one is not run again
            early = rng.random() < 0.5
            end = killed_at_write(rng.randint(1, 90)) if early else killed_after(rng.uniform(0.05, 1.5))
            status, _ = in_a_fork(again, end)
            if status == 0:
                shutil.rmtree(place)
                write_text(place)
        if rng.random() < 0.3:
            in_a_fork(again, killed_at_write(rng.randint(1, 60)))
        status, said = in_a_fork(again)
        lost = [f"exit status {status}: {said[-300:]}"] if status else what_differs(place, whole)
        yield f"kill {number}: {'; '.join(lost)}" if lost else None
        shutil.rmtree(place)


def killed_at_write(number: int) -> Callable[[], None]:
    """SIGKILL before this process opens, renames or removes its `number`th file."""
    left = number

    def look(event: str, arguments: tuple) -> None:
        nonlocal left
        writes = event in WRITES or (
            event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wa+")
        )
        left -= bool(writes)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(look)


def killed_after(seconds: float) -> Callable[[], None]:
    """An end without warning, after so many seconds: SIGALRM that nobody handles."""

    def prepare() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    return prepare


def what_differs(folder: Path, whole: Path) -> list[str]:
    """In what a run differs from one that was never stopped, and what lies about."""
    record, reference = (Record.of(compose(given(place))) for place in (folder, whole))
    found = []
    for name in ("model.safetensors", "windows.safetensors", "vocabulary.json"):
        if (record.folder / name).read_bytes() != (reference.folder / name).read_bytes():
            found.append(f"{name} differs")
    rows, expected = (
        [{k: v for k, v in row.items() if k not in TIMED} for row in r.rows()] for r in (record, reference)
    )
    if rows != expected:
        found.append("metrics.jsonl differs")
    if steps_in_wandb(folder) != [row["step"] for row in expected]:
        found.append("wandb's history differs")
    names = {path.name for path in record.folder.iterdir()} - {path.name for path in reference.folder.iterdir()}
    left = [path.name for path in folder.rglob("*.tmp")] + [path.name for path in folder.rglob("*.work")]
    return found + [f"{name} is left behind" for name in sorted({*names, *left})]


def steps_in_wandb(folder: Path) -> list[int]:
    """The steps in the history of the one mirror there is."""
    (log,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    wandb = Path(sys.executable).with_name("wandb")
    printed = subprocess.run([wandb, "leet", "inspect", "--json", log], capture_output=True, text=True, check=True)
    records = [json.loads(line) for line in printed.stdout.splitlines()]
    return [r["history"]["item"]["_step"] for r in records if r["type"] == "history"]
