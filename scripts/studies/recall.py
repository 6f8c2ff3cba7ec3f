"""Train every attention on multi-query associative recall and on induction, for recall.md.

There are five tasks: 8 pairs and induction, with and without token shift, and 16 pairs. For each, an attention is first
trained at several learning rates with `rate_seeds`; the page does not show these runs. The rate with the highest mean
accuracy is then used for `seeds`. Runs that have ended are not trained again.
"""

import itertools

from omegaconf import DictConfig

from data.files import UserError
from scripts.reporting.recall import best_rate, row_words, rows
from scripts.reporting.recall_page import write
from scripts.reporting.variants import check_variants
from scripts.studies.runner import missing, train_missing


def check(cfg: DictConfig) -> None:
    """Raise UserError for unknown attentions, or if rate_seeds and seeds overlap."""
    check_variants(cfg.variants or ())
    if set(cfg.rate_seeds) & set(cfg.seeds):
        raise UserError(f"rate_seeds and seeds must not overlap: got {cfg.rate_seeds} and {cfg.seeds}")


def compare(cfg: DictConfig) -> None:
    """Train the runs that choose the rates, then the runs that the page shows. Raises UserError if runs have failed."""
    check(cfg)
    tried = itertools.product(rows(cfg), cfg.learning_rates, cfg.rate_seeds)
    tries = [(row_words(*row, rate), seed) for row, rate, seed in tried]
    with train_missing(missing(tries, cfg), cfg):
        best = {row: rate for row in rows(cfg) if (rate := best_rate(cfg, *row)) is not None}
    shown = [(row_words(*row, rate), seed) for seed in cfg.seeds for row, rate in best.items()]
    with train_missing(missing(shown, cfg), cfg):
        write(cfg)
