"""Train every attention on multi-query associative recall, with and without token shift, for recall.md.

Each attention, with or without the shift, has the learning rate with the highest accuracy in earlier runs, which have
other seeds. Runs that have ended are not trained again.
"""

from pathlib import Path

from omegaconf import DictConfig

from data.files import UserError
from scripts.reporting.rates import has_ended
from scripts.reporting.recall import best_rate, record_of, row_words, rows
from scripts.reporting.recall_page import write
from scripts.reporting.variants import variants
from scripts.studies.runner import Job, job, refuse_failed, train_missing


def check(cfg: DictConfig) -> None:
    """Raise UserError if an attention does not exist, or if there are no rates or seeds."""
    for name in cfg.variants or ():
        if name not in variants():
            raise UserError(f"there is no attn={name}; there are {', '.join(variants())}")
    for key in ("learning_rates", "rate_seeds", "seeds"):
        if not cfg[key]:
            raise UserError(f"{key} must not be empty")
    if set(cfg.rate_seeds) & set(cfg.seeds):
        raise UserError(f"rate_seeds and seeds must not overlap: got {cfg.rate_seeds} and {cfg.seeds}")


def missing(cfg: DictConfig, runs: list[tuple[str, bool, float, int]]) -> list[Job]:
    """Return a job for each run, (attention, token shift, learning rate, seed), that has not ended."""
    records = {run: record_of(cfg, *run) for run in runs}
    return [
        job((*row_words(*run[:3]), f"seed={run[3]}"), Path(cfg.results))
        for run, record in records.items()
        if not has_ended(record)
    ]


def compare(cfg: DictConfig) -> None:
    """Train the runs that choose the rates, then those that are shown, and write the page."""
    check(cfg)
    tries = [(*row, rate, seed) for row in rows(cfg) for rate in cfg.learning_rates for seed in cfg.rate_seeds]
    refuse_failed(train_missing(missing(cfg, tries), cfg, has_ended))
    shown = [(*row, best_rate(cfg, *row), seed) for seed in cfg.seeds for row in rows(cfg)]
    failed = train_missing(missing(cfg, [run for run in shown if run[2] is not None]), cfg, has_ended)
    write(cfg)
    refuse_failed(failed)
