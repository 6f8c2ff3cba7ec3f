"""Read the runs of multi-query associative recall: each attention with and without token shift, at its best rate."""

import statistics
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from scripts.reporting.records import check_comparable, finished, record_of
from scripts.reporting.variants import variants

SHIFTS = (True, False)


class Row(NamedTuple):
    """The finished runs of an attention with or without token shift, at its best learning rate."""

    variant: str
    shift: bool
    rate: float
    summaries: list[dict]

    def accuracies(self) -> dict[int, float]:
        """Return the accuracy on the held-out sequences of data=recall in percent, by seed."""
        return {s["seed"]: 100 * s["evaluation"]["heldout"]["accuracy"] for s in self.summaries}


def rows(cfg: DictConfig) -> list[tuple[str, bool]]:
    """Return the attentions to train, each with and without token shift."""
    return [(variant, shift) for variant in cfg.variants or variants() for shift in SHIFTS]


def row_words(variant: str, shift: bool, rate: float) -> tuple[str, ...]:
    """Return the overrides of train.py without the seed."""
    return "experiment=recall", f"attn={variant}", f"attn.token_shift={str(shift).lower()}", f"optim.lr={rate:g}"


def summaries(cfg: DictConfig, variant: str, shift: bool, rate: float, seeds: list[int]) -> list[dict]:
    """Return the summaries of the finished runs."""
    runs, words = Path(cfg.results, "runs"), row_words(variant, shift, rate)
    found = (finished(record_of(runs, words, seed)) for seed in seeds)
    return [summary for summary in found if summary is not None]


def best_rate(cfg: DictConfig, variant: str, shift: bool) -> float | None:
    """Return the rate with the highest mean accuracy, of those with finished runs of all rate_seeds; None if none."""
    means = {}
    for rate in cfg.learning_rates:
        group = summaries(cfg, variant, shift, rate, cfg.rate_seeds)
        if len(group) == len(cfg.rate_seeds):
            means[rate] = statistics.mean(s["evaluation"]["heldout"]["accuracy"] for s in group)
    return max(means, key=means.get, default=None)


def read(cfg: DictConfig) -> dict[tuple[str, bool], Row]:
    """Return the rows that have finished runs. Raises UserError if they cannot be compared."""
    found = {}
    for variant, shift in rows(cfg):
        rate = best_rate(cfg, variant, shift)
        group = [] if rate is None else summaries(cfg, variant, shift, rate, cfg.seeds)
        if group:
            found[variant, shift] = Row(variant, shift, rate, group)
    check_comparable([summary for row in found.values() for summary in row.summaries])
    return found
