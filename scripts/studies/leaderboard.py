"""Train each attention that has a chosen learning rate, with several seeds, and measure its speed.

The page is leaderboard.md or, with setup=novel, leaderboard_novel.md. Runs that have ended are not trained again. Speed
is measured after training, when nothing else runs.
"""

from omegaconf import DictConfig

from configs.cli import compose
from data.files import UserError
from scripts.benchmarking import decode, side_by_side
from scripts.reporting.leaderboard import command_of, costs_path, records_of, words
from scripts.reporting.leaderboard_page import write
from scripts.reporting.rates import check_rates, chosen_rate
from scripts.reporting.variants import check_variants, variants
from scripts.studies.runner import Job, missing, train_missing


def check(cfg: DictConfig) -> list[str]:
    """Return the attentions to run. Raises UserError if one has no chosen learning rate, or for unusable settings."""
    setup = compose([f"experiment={cfg.setup}"])  # raises Hydra's error if there is no such experiment
    with_rate = [name for name in variants() if chosen_rate(cfg.setup, name) is not None]
    chosen = with_rate if cfg.variants is None else list(cfg.variants)
    if not chosen:
        raise UserError(f"no learning rate is chosen for any attention at experiment={cfg.setup}")
    check_variants([*chosen, cfg.lead_over, cfg.ratio_to])
    check_rates(chosen, cfg.setup, cfg.results)
    decode.count_timed(cfg, setup.model.context)
    return chosen


def jobs(cfg: DictConfig, chosen: list[str]) -> list[Job]:
    """Return a job for each missing run, seed by seed.

    Raises UserError if a finished run was trained with other settings than its name says, or lacks a fit loss.
    """
    for variant in chosen:
        records_of(cfg, words(cfg, variant))
    runs = [(words(cfg, variant), seed) for seed in cfg.seeds for variant in chosen]
    return missing(runs, cfg)


def reproduce(cfg: DictConfig) -> None:
    """Train the missing runs, measure speeds, and write the page. Raises UserError if runs have failed."""
    chosen = check(cfg)
    with train_missing(jobs(cfg, chosen), cfg):
        side_by_side.measure(cfg, chosen, costs_path(cfg), command_of(cfg))
        write(cfg)
