"""Measure the speed of training and of streaming of attentions beside that of a reference attention.

In every round the attention and the reference do the same work one after the other, so that the ratio of their times
hardly depends on how busy the machine is. The record is written after each attention. An earlier record is continued if
its code, device and settings are the same. Otherwise all its attentions are measured again.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import DictConfig

from data.corpus import load
from data.files import write_json
from models.build import build_model
from scripts.benchmarking.attentions import open_record
from scripts.benchmarking.decode import count_timed, streaming
from scripts.benchmarking.timing import in_turn, training_step
from scripts.reporting.leaderboard import KINDS, costs_record
from scripts.reporting.records import composed, label, words_of
from scripts.reporting.variants import variants
from training.device import pick_compile, pick_device, pick_precision
from training.provenance import provenance

DIGITS = 7  # decimal places of the recorded seconds


def to_measure(chosen: list[str], path: Path, origin: dict) -> tuple[dict, list[str]]:
    """Return the record to fill, and the names of the attentions that it is to hold.

    These are the chosen ones, and those in the file at `path` that the repository still has. If that file was made by
    other code, on another device or with other settings, they are measured again, and the record is empty.
    """
    empty = {kind: {} for kind in KINDS}
    before, record = costs_record(path) or empty, empty | open_record(path, origin)
    known = [variant for kind in KINDS for variant in before[kind] if variant in variants()]
    return record, list(dict.fromkeys([*chosen, *known]))


def measure(cfg: DictConfig, chosen: list[str], path: Path, command: str) -> None:
    """Time the attentions of `to_measure` that the record lacks, each beside `cfg.ratio_to`.

    `cfg` is the config of study=leaderboard.
    """
    first = composed(words_of(cfg.ratio_to, cfg.setup))
    device = pick_device("auto")
    precision, _ = pick_precision(first.train.precision, device)
    settings = {key: cfg[key] for key in ("ratio_to", "repeats", "warm_up", "characters")}
    settings |= {"batch": first.train.batch, "context": first.model.context, "precision": precision}
    record, names = to_measure(chosen, path, provenance(device, command) | settings)
    vocabulary, compiled = len(load(first.data).vocabulary), pick_compile(None, device, hours=0)

    def step(variant: str) -> Callable[[], None]:
        return training_step(composed(words_of(variant, cfg.setup)), vocabulary, device, precision, compiled)

    def stream(variant: str) -> Callable[[], None]:
        model = build_model(composed(words_of(variant, cfg.setup)), vocabulary).to(device)
        ids = torch.randint(vocabulary, (first.model.context,), device=device)
        return streaming(model, ids, count_timed(cfg, first.model.context), cfg.characters)

    for kind, make in zip(KINDS, (step, stream), strict=True):
        for variant in names:
            if variant not in record[kind] and variant != cfg.ratio_to:
                functions = {name: make(name) for name in (cfg.ratio_to, variant)}
                seconds = in_turn(functions, device, cfg.warm_up, cfg.repeats)
                ours, theirs = ([round(s, DIGITS) for s in seconds[name]] for name in (variant, cfg.ratio_to))
                record[kind][variant] = {"seconds": ours, "reference": theirs}
                write_json(path, record)
                print(f"{kind}: {label(variant)} measured beside {label(cfg.ratio_to)}", flush=True)
