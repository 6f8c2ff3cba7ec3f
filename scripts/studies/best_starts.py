"""Train each attention from its best start, with the seeds of the leaderboard.

The best start is the one that fits best in the runs of study=starts, which have other seeds. Runs that have ended are
not trained again. The figures are a section of leaderboard.md.
"""

from omegaconf import DictConfig

from configs.cli import compose
from data.files import UserError
from scripts.reporting import leaderboard_page
from scripts.reporting.best_starts import best_starts
from scripts.studies.runner import Job, missing, train_missing


def jobs(cfg: DictConfig) -> list[Job]:
    """Return a job for each missing run from a start that is not in use, seed by seed.

    Raises UserError if no attention has starts that were compared, or if one of `cfg.variants` has none.
    """
    found = best_starts(cfg)
    chosen = list(found) if cfg.variants is None else list(cfg.variants)
    without = [name for name in chosen if name not in found]
    if without or not found:
        raise UserError(
            f"no starts of {', '.join(without) or 'any attention'} were compared at experiment={cfg.setup}: python -m "
            f"scripts.reproduce study=starts setup={cfg.setup} choose=false results={cfg.results} compares them"
        )
    runs = [found[name].words for name in chosen if found[name].name != found[name].in_use]
    return missing([(words, seed) for seed in cfg.seeds for words in runs], cfg)


def reproduce(cfg: DictConfig) -> None:
    """Train the missing runs, and write the leaderboard. Raises UserError if runs have failed."""
    with train_missing(jobs(cfg), cfg):
        given = ["study=leaderboard", f"setup={cfg.setup}", f"results={cfg.results}"]
        leaderboard_page.write(compose(given, "reproduce"))
