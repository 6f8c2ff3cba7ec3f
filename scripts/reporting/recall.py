"""Read the runs of recall and induction: each attention at each task, at its best learning rate there."""

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from omegaconf import DictConfig

from scripts.reporting.records import check_comparable, finished_runs
from scripts.reporting.variants import variants
from training.packed import attention
from training.runs import all_folders

USUAL, NO_SHIFT, HARD = "8 pairs", "8 pairs, no token shift", "16 pairs"
INDUCTION, INDUCTION_NO_SHIFT = "induction", "induction, no token shift"
# A row of induction has one answer. With rows of 32 characters, four times as many answers are in as many characters.
ROWS_OF_32 = "data=induction", "data.sequences=51200", "model.context=32", "train.batch=128"
TASKS = {  # {task: overrides of experiment=recall}
    USUAL: ("attn.token_shift=true",),
    NO_SHIFT: ("attn.token_shift=false",),
    HARD: ("attn.token_shift=true", "data.keys=16", "data.values=16", "data.pairs=16"),
    INDUCTION: ("attn.token_shift=true", *ROWS_OF_32),
    INDUCTION_NO_SHIFT: ("attn.token_shift=false", *ROWS_OF_32),
}


def accuracy_by_counts(draws: int, symbols: int) -> float:
    """Return the accuracy, in percent, of a model that knows which symbols are in a row, but not which is asked for.

    The symbols of a row, which are the values of recall or the letters of induction, are `draws` draws with repetition
    from `symbols` different ones, and one of the draws is asked for. Such a model answers with the most frequent
    symbol, and is right with probability E[its count] / draws, where, for n draws from s symbols,
    Pr(count <= m) = n! / s^n * [x^n] (sum_{k<=m} x^k / k!)^s.
    """
    expected = 1.0  # the sum of Pr(count > m) over m, where Pr(count > 0) = 1
    for m in range(1, draws):
        power = np.polynomial.Polynomial([1 / math.factorial(k) for k in range(m + 1)]) ** symbols
        below = power.coef[draws] if draws < len(power.coef) else 0.0
        expected += 1 - math.factorial(draws) / symbols**draws * below
    return 100 * expected / draws


BY_VALUES = {USUAL: accuracy_by_counts(8, 8), HARD: accuracy_by_counts(16, 16)}


class Row(NamedTuple):
    """The finished runs of an attention at a task, at its best learning rate."""

    variant: str
    task: str
    rate: float
    summaries: list[dict]

    def accuracies(self) -> dict[int, float]:
        """Return the accuracy on held-out sequences in percent, by seed."""
        return {s["seed"]: 100 * s["evaluation"]["heldout"]["accuracy"] for s in self.summaries}


def rows(cfg: DictConfig, tasks: Iterable[str] = TASKS) -> list[tuple[str, str]]:
    """Return the attentions to train, each with every task. By default RWV, which then is AFT, is left out."""
    chosen = cfg.variants or [variant for variant in variants() if variant != "rwv"]
    return [(variant, task) for variant in chosen for task in tasks]


def row_words(variant: str, task: str, rate: float) -> tuple[str, ...]:
    """Return the overrides of train.py without the seed."""
    return "experiment=recall", f"attn={variant}", *TASKS[task], f"optim.lr={rate:g}"


def summaries(cfg: DictConfig, variant: str, task: str, rate: float, seeds: list[int]) -> list[dict]:
    """Return the summaries of the finished runs."""
    return finished_runs(Path(cfg.results, "runs"), row_words(variant, task, rate), seeds)


def best_rate(cfg: DictConfig, variant: str, task: str) -> float | None:
    """Return the rate with the highest mean accuracy, of those with finished runs of all rate_seeds; None if none."""
    means = {}
    for rate in cfg.learning_rates:
        group = summaries(cfg, variant, task, rate, cfg.rate_seeds)
        if len(group) == len(cfg.rate_seeds):
            means[rate] = statistics.mean(s["evaluation"]["heldout"]["accuracy"] for s in group)
    return max(means, key=means.get, default=None)


def read(cfg: DictConfig, tasks: Iterable[str] = TASKS) -> dict[tuple[str, str], Row]:
    """Return the rows of these tasks whose runs of all seeds have finished.

    Raises UserError if runs on the same text cannot be compared with each other. The two tasks with 8 pairs share one
    text, and so do the two of induction. The task with 16 pairs has its own.
    """
    found, begun = {}, {attention(folder.name) for folder in all_folders(Path(cfg.results, "runs/recall"))}
    for variant, task in rows(cfg, tasks):
        rate = best_rate(cfg, variant, task) if variant in begun else None
        group = [] if rate is None else summaries(cfg, variant, task, rate, cfg.seeds)
        if len(group) == len(cfg.seeds):
            found[variant, task] = Row(variant, task, rate, group)
    for same_text in ((USUAL, NO_SHIFT), (HARD,), (INDUCTION, INDUCTION_NO_SHIFT)):
        check_comparable([s for (_, task), row in found.items() if task in same_text for s in row.summaries])
    return found
