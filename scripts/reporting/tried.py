"""Find the runs that have given settings at any learning rate, from which rates are chosen."""

import math
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from configs.cli import compose
from data.files import UserError
from scripts.reporting.records import composed, has_ended
from training.packed import find
from training.runs import name_and_seed
from training.summaries import read_summary

# {learning rate: {seed: summary of the run, which has finished or diverged}}, the rates in ascending order.
Tried = dict[float, dict[int, dict]]


@cache
def rate_seeds() -> list[int]:
    """Return the seeds that choose learning rates, and that no verdict uses."""
    return list(compose(["study=rates", "variants=[aft]"], "reproduce").seeds)


def without_rate(name: str) -> str:
    """Return the name of a run without its learning rate.

    The hash at the end of a name that was cut depends on the rate and stays: such names differ at different rates.
    """
    return re.sub(r"-lr=[\d.]+(e[+-]?\d+)?", "", name)


def runs_by_rate(folders: Iterable[Path], words: tuple[str, ...], seeds: list[int]) -> Tried:
    """Return those runs in `folders` that have ended, have one of the seeds, and have the settings that `words` give.

    `words` are overrides of train.py. The learning rate that they give plays no part. Raises UserError for a record
    without a rate.
    """
    wanted, found = without_rate(composed(words).job.name.removesuffix("-seed0")), {}
    for folder in folders:
        name, seed = name_and_seed(folder.name)
        if seed in seeds and without_rate(name) == wanted and has_ended(record := find(folder)):
            summary = read_summary(record)
            if "lr" not in summary:
                raise UserError(f"{record.summary} is damaged: it holds no lr")
            found.setdefault(summary["lr"], {})[seed] = summary
    return dict(sorted(found.items()))


def at_an_end(names: list[str]) -> str:
    """Return the sentence on rows whose best rate is the lowest or the highest that was tried; "" if there are none."""
    return f"The best rate lies at an end of the range that was tried: {'; '.join(names)}." if names else ""


def perplexity(loss: float) -> str:
    """Return the perplexity with two digits, or "diverged" if the loss is infinite."""
    return f"{math.exp(loss):.2f}" if math.isfinite(loss) else "diverged"
