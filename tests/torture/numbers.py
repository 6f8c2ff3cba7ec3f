"""Numbers that go wrong, and numbers that are to be the same again."""

import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn

import train
from configs.cli import compose
from data.reading import read_tensors
from scripts.reporting.variants import variants
from tests.torture.kills import untimed
from tests.torture.small import given, in_a_fork, write_text
from training.provenance import ROOT
from training.record import Record
from training.trainer import Trainer

STEPS = ["train.steps=200", "train.log_every=10", "evaluation.every=100", "train.checkpoint_seconds=60"]
STOPPED = (
    r"error: the loss is not finite after step \d+: .+ became inf or NaN at step \d+, "
    r"at a learning rate of \S+; .*try .+"
)
DIVERGED = r"error: the run has diverged: after step \d+ the loss is \S+, .+ at optim\.lr=\S+; try .+"
LAYER = r"(the output of|the gradient of|the loss|a weight|embed|blocks|norm|head)\S*.* became"


def blowing_up(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """An attention that trains 200 steps at 10 times its learning rate, at 1e30 times, or from Q and K 100 times as
    large stays finite, or stops with the step, the layer, the learning rate and what to try."""
    chosen = variants() if cfg.blowing_up >= len(variants()) else rng.sample(variants(), cfg.blowing_up)
    for variant in chosen:
        usual = compose([f"attn={variant}"]).optim
        for how, factor, scale in (("10 times", 10, 1), ("1e30 times", 1e30, 1), ("Q and K", 1, 100)):
            place = folder / f"{variant}-{factor}-{scale}"
            write_text(place)
            rates = [f"optim.lr={usual.lr * factor}", f"optim.min_lr={usual.min_lr * factor}"]
            line = [*given(place), *STEPS, *rates, f"attn={variant}", "wandb.mode=disabled"]
            status, said = in_a_fork(lambda line=line, s=scale: train.train(compose(line), enlarged(s)))
            wrong = what_is_wrong(status, said, Record.of(compose(line)))
            yield f"{variant}, {how}: {wrong}" if wrong else None


def enlarged(scale: float) -> Callable[[Trainer], None]:
    """What makes Q and K larger before a model's first step; where it has neither, the attention's projections."""

    def enlarge(trainer: Trainer) -> None:
        if trainer.step > 0:
            return
        modules = trainer.model.named_modules()
        linear = {name: module for name, module in modules if isinstance(module, nn.Linear) and ".attn." in name}
        keys = [module for name, module in linear.items() if name.rsplit(".", 1)[-1] in ("Q", "K", "Z")]
        with torch.no_grad():
            for module in keys or linear.values():
                module.weight *= scale

    return enlarge


def what_is_wrong(status: int, said: str, record: Record) -> str | None:
    if status == 2:
        last = said.rstrip().rsplit("\n", 1)[-1]
        said_where = re.fullmatch(STOPPED, last) and re.search(LAYER, last)
        return None if said_where or re.fullmatch(DIVERGED, last) else f"stopped with {last}"
    if status:
        return f"exit status {status}: {said[-300:]}"
    if not all(math.isfinite(value) for row in record.rows() for key, value in row.items() if key.endswith("loss")):
        return "a loss is not finite, in silence"
    if not all(tensor.isfinite().all() for tensor in read_tensors(record.model).values()):
        return "a weight is not finite, in silence"
    return None


def twice(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """The same seed gives the same weights and losses, bit for bit."""
    for variant in rng.sample(variants(), min(cfg.twice, len(variants()))):
        yield differs(variant, folder, "train.compile=false", in_a_copy)


def twice_compiled(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """So it does through torch.compile."""
    for variant in rng.sample(variants(), min(cfg.twice_compiled, len(variants()))):
        yield differs(variant, folder, "train.compile=true", in_a_process)


def differs(variant: str, folder: Path, how: str, run: Callable[[list[str]], tuple[int, str]]) -> str | None:
    """In what two runs from the same seed differ."""
    found = []
    for number in range(2):
        place = folder / f"{variant}{number}"
        write_text(place)
        line = [*given(place), f"attn={variant}", "wandb.mode=disabled", how]
        status, said = run(line)
        if status:
            return f"{variant}, {how}: exit status {status}: {said[-300:]}"
        record = Record.of(compose(line))
        found.append((record.model.read_bytes(), [untimed(row) for row in record.rows()]))
    return None if found[0] == found[1] else f"{variant}, {how}: the second run differs from the first"


def in_a_copy(line: list[str]) -> tuple[int, str]:
    return in_a_fork(lambda: train.train(compose(line)))


def in_a_process(line: list[str]) -> tuple[int, str]:
    """What train.py does with these arguments; torch.compile does not work in a fork."""
    options = {"cwd": ROOT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run([sys.executable, "train.py", *line], **options, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return done.returncode, done.stdout
