"""Train each attention from its best start, with the seeds of the leaderboard.

The best start is the one that fits best in the runs of study=starts, which have other seeds. Runs that have ended are
not trained again. The figures are a section of leaderboard.md.
"""

from omegaconf import DictConfig

from configs.cli import compose
from data.files import UserError
from scripts.reporting import leaderboard_page
from scripts.reporting.best_starts import best_starts
from scripts.reporting.leaderboard import records_of
from scripts.reporting.rates import check_rates
from scripts.reporting.variants import check_variants
from scripts.studies.runner import Job, missing, train_missing


def jobs(cfg: DictConfig) -> list[Job]:
    """Return a job for each missing run of an attention whose best start is not the one in configs/starts.

    Raises UserError if no attention has had all its starts compared, if one of `cfg.variants` has not or has no chosen
    learning rate, or if a finished run has other settings than its name says.
    """
    board = board_config(cfg)
    found = best_starts(board)
    chosen = list(found) if cfg.variants is None else list(cfg.variants)
    check_variants(chosen)
    check_rates(chosen, board.setup, cfg.results)
    without = [name for name in chosen if name not in found]
    if without or not found:
        only = f" variants=[{','.join(without)}]" * bool(without)
        which = f"the starts of {', '.join(without)} were not all compared" if without else "no starts are compared yet"
        raise UserError(
            f"{which}: python -m "
            f"scripts.reproduce study=starts setup={board.setup} choose=false results={cfg.results}{only} compares them"
        )
    better = [found[name].words for name in chosen if found[name].name != found[name].in_use]
    for words in better:
        records_of(board, words)
    return missing([(words, seed) for seed in board.seeds for words in better], cfg)


def board_config(cfg: DictConfig) -> DictConfig:
    """Return the config of the leaderboard whose attentions this study trains."""
    return compose(["study=leaderboard", f"results={cfg.results}"], "reproduce")


def reproduce(cfg: DictConfig) -> None:
    """Train the missing runs, and write the leaderboard. Raises UserError if runs have failed."""
    with train_missing(jobs(cfg), cfg):
        leaderboard_page.write(board_config(cfg))
