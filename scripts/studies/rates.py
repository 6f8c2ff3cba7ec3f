"""The best learning rate of each attention: the one of the lowest mean log perplexity on the training text.

Trains each attention at each rate, with seeds that no verdict uses. While the best rate is the lowest or the highest
one, half or twice as much is tried too. Runs that are there already are not trained again. The rate is then written to
configs/rates/<setup>/<attention>.yaml, where train.py finds it.
"""

import math
import re
import statistics
from pathlib import Path

from omegaconf import DictConfig

from configs.folder import CONFIGS
from data.files import UserError, write_bytes
from scripts.reporting.records import state
from scripts.reporting.variants import variants
from scripts.studies.runner import Job, job, refuse_failed, train_missing
from training.packed import find, packed_folders
from training.record import Record
from training.runs import local_folders
from training.summaries import read_summary

RATES = CONFIGS / "rates"


def losses(cfg: DictConfig, variant: str) -> dict[float, float]:
    """The mean fit loss over the seeds of each rate at which all seeds were trained, by rising rate.

    It is infinite where a seed diverged.
    """
    by_rate: dict[float, list[float]] = {}
    runs = Path(cfg.results, "runs", cfg.setup)
    for seed in cfg.seeds:
        for folder in sorted(local_folders(runs) | packed_folders(runs)):
            if not re.fullmatch(rf"{variant}(-lr=[\de.+-]+)?-seed{seed}", folder.name):
                continue  # it differs in something else too
            record = find(folder)
            if has_ended(record):
                summary = read_summary(record)
                if "lr" not in summary:
                    raise UserError(f"{record.summary} is damaged: it holds no lr")
                loss = summary["evaluation"]["fit"]["loss"] if summary["status"] == "finished" else math.inf
                by_rate.setdefault(summary["lr"], []).append(loss)
    return {rate: statistics.mean(found) for rate, found in sorted(by_rate.items()) if len(found) == len(cfg.seeds)}


def has_ended(record: Record) -> bool:
    return state(record) in ("finished", "diverged")


def rates_to_try(cfg: DictConfig, found: dict[float, float]) -> list[float]:
    """The rates that are missing: those asked for, then the one beyond the end at which the best is."""
    missing = [rate for rate in cfg.learning_rates if rate not in found]
    if missing:
        return missing
    best = min(found, key=found.get)
    if best == max(found):
        return [2 * best]
    return [best / 2] if best == min(found) else []


def jobs(cfg: DictConfig) -> list[Job]:
    """The runs that are missing."""
    planned = []
    for variant in cfg.variants:
        for rate in rates_to_try(cfg, losses(cfg, variant)):
            for seed in cfg.seeds:
                given = (f"experiment={cfg.setup}", f"attn={variant}", f"optim.lr={rate:g}", f"seed={seed}")
                planned.append(job(given, Path(cfg.results)))
    return [job for job in planned if not has_ended(job.record)]


def chosen(cfg: DictConfig, variant: str) -> str:
    """The file that holds the best rate, and says how it was chosen.

    Errors: UserError where the best rate lies at an end of those that were tried.
    """
    found = losses(cfg, variant)
    best = min(found, key=found.get) if found else None
    if best in (None, *list(found)[:1], *list(found)[-1:]):
        tried = ", ".join(f"{rate:g}" for rate in found) or "none"
        raise UserError(f"the best rate of {variant} does not lie between two others: finished are {tried}")
    seeds = ", ".join(map(str, cfg.seeds))
    return "\n".join(
        [
            "# @package optim",
            "# From python -m scripts.reproduce study=rates. Log perplexity on the training text after each rate, the",
            f"# mean of seeds {seeds}: {'; '.join(f'{rate:g} {in_print(loss)}' for rate, loss in found.items())}",
            f"lr: {best:g}",
            "",
        ]
    )


def in_print(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"


def choose(cfg: DictConfig) -> None:
    """Train what is missing, and write the best rate of each attention.

    Raises UserError for an attention that does not exist, and where runs did not come to their end.
    """
    unknown = [name for name in cfg.variants if name not in variants()]
    if unknown:
        raise UserError(f"there is no attn={unknown[0]}; there are {', '.join(variants())}")
    while planned := jobs(cfg):
        refuse_failed(train_missing(planned, cfg, has_ended))
    for variant in cfg.variants:
        path = RATES / cfg.setup / f"{variant}.yaml"
        write_bytes(path, chosen(cfg, variant).encode())
        print(f"{path.relative_to(CONFIGS.parent)}: {path.read_text(encoding='utf-8').splitlines()[-1]}")
