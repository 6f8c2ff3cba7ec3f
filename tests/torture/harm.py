"""States and weights that are cut, or have a bit turned over."""

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from omegaconf import DictConfig

from configs.cli import compose
from data.files import UserError
from data.reading import read_tensors
from tests.torture.kills import killed_at_write
from tests.torture.small import given, harmed, in_a_fork, refused, write_text
from train import train
from training.loading import load_run, load_weights
from training.record import Record


def states(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A state that is cut or has a bit turned over is refused in one line, or it is the same state."""
    record = half_done(folder / "states")
    whole, rows = record.state.read_bytes(), record.metrics.read_bytes()
    good = record.load_state()
    for number in range(cfg.states):
        record.state.write_bytes(harmed(whole, rng))
        try:
            if not same(record.load_state(), good):
                yield f"state {number}: another state was loaded"
                continue
        except Exception as error:
            if not refused(error):
                yield f"state {number}: {type(error).__name__}: {error}"
                continue
        record.metrics.write_bytes(rows)
        yield None


def weights(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """Weights that are cut or have a bit turned over are refused in one line."""
    record = finished(folder / "weights")
    whole = record.model.read_bytes()
    for number in range(cfg.weights):
        record.model.write_bytes(harmed(whole, rng))
        try:
            load_run(record.folder)
            yield f"weights {number}: they were loaded"
        except Exception as error:
            yield None if refused(error) else f"weights {number}: {type(error).__name__}: {error}"


def cuts(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """The state and the weights of a tiny model, cut at every length, or at one in so many, are refused in one line."""
    tiny = ["model.dim=2", "model.heads=1", "data.vocab_size=5", "attn=aft_simple"]
    half, whole = half_done(folder / "half", *tiny), finished(folder / "whole", *tiny)
    model = load_run(whole.folder).model
    for path, read in (
        (half.state, half.load_state),
        (whole.model, lambda: load_weights(model, read_tensors(whole.model), whole.model)),
    ):
        content = path.read_bytes()
        for length in range(0, len(content), cfg.cuts):
            path.write_bytes(content[:length])
            try:
                read()
                yield f"{path.name} cut to {length} of {len(content)} bytes: it was loaded"
            except Exception as error:
                cut = f"{path.name} cut to {length} of {len(content)} bytes"
                yield None if refused(error) else f"{cut}: {type(error).__name__}: {error}"


def finished(place: Path, *overrides: str) -> Record:
    """A run that came to its end."""
    write_text(place)
    line = given(place, "wandb.mode=disabled", *overrides)
    in_a_fork(lambda: train(compose(line)))
    return Record.of(compose(line))


def half_done(place: Path, *overrides: str) -> Record:
    """A run that was killed in its middle."""
    write_text(place)
    cfg = compose(given(place, "wandb.mode=disabled", *overrides))
    record = Record.of(cfg)
    for writes in range(40, 200, 4):
        in_a_fork(lambda: train(cfg), killed_at_write(writes))
        if record.state.exists():
            return record
    raise UserError("no kill left a state behind")


def same(one: object, other: object) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
