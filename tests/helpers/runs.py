"""Runs that tests train, cut short and compare."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from train import train
from training.record import Record


def rows_of(folder: Path) -> list[dict]:
    """The logged rows without what a clock put into them."""
    return [untimed(row) for row in Record(folder).rows()]


def untimed(figures: dict) -> dict:
    """Figures without what a clock put into them."""
    return {key: value for key, value in figures.items() if key not in ("seconds", "tokens_per_second")}


def flip(path: Path, place: int) -> None:
    """Turn one bit of a file over."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def cut_off(path: Path, where: str) -> None:
    """Leave what comes before `where`."""
    path.write_text(path.read_text().partition(where)[0])


def folder_of(cfg) -> Path:
    return Path(cfg.runs, cfg.job.experiment, cfg.job.name)


class Cut(BaseException):
    """The run ends here, as if the machine had."""


def train_until(step: int, cfg) -> None:
    """Train, and die after `step` steps."""
    count = itertools.count()

    def dying(_trainer):
        if next(count) == step:
            raise Cut

    with pytest.raises(Cut):
        train(cfg, dying)


def assert_mirrored(place: Path, rows: list[dict]) -> None:
    """wandb's offline log holds every row once, and the run came to its end there."""
    (mirror,) = mirrors(place)
    history = mirror["history"]
    assert mirror["steps"] == [r["step"] for r in rows]
    assert [h["train/loss"] for h in history] == pytest.approx([r["loss"] for r in rows])
    assert [h["tokens"] for h in history] == [r["tokens"] for r in rows]
    assert mirror["exits"] == [0]


def mirrors(place: Path) -> list[dict]:
    """Of each run that wandb's offline logs hold, by name: its history, the steps in it, and its exit statuses."""
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
