"""Choose the learning rate of each attention: the one with the lowest mean log perplexity on the training text.

Each attention is trained at each rate, with seeds that no verdict uses. While the best rate is the lowest or the
highest, half or twice this rate is tried too. Runs that have ended are not trained again. The best rate is written
to configs/rates/<setup>/<optimiser>/<attention>.yaml, where train.py finds it.
"""

import math
import textwrap

from omegaconf import DictConfig

from configs.folder import CONFIGS
from data.files import UserError, write_bytes
from scripts.reporting.rates import cell, losses, rate_file
from scripts.reporting.variants import check_variants
from scripts.studies.runner import Job, missing, train_missing

LOWEST = 1e-6  # an attention that diverges at this rate would diverge at any


def rates_to_try(cfg: DictConfig, tried: dict[float, float]) -> list[float]:
    """Return those of cfg.learning_rates that have not been tried.

    If all have been tried, return twice the best rate if this is the highest, half of it if it is the lowest, and no
    rate otherwise. A single rate counts as the highest. If the best rate is below LOWEST, no lower one is tried.
    """
    # Rates are rounded to six digits, as in the names of runs.
    untried = [rate for rate in cfg.learning_rates if float(f"{rate:g}") not in tried]
    if untried:
        return untried
    best = min(tried, key=tried.get)
    if best == max(tried):
        return [2 * best]
    return [best / 2] if best == min(tried) and best >= LOWEST else []


def jobs(cfg: DictConfig) -> list[Job]:
    """Return a job for each missing run at the rates to try next."""
    same = (f"experiment={cfg.setup}", f"optim={cfg.optimizer}")
    runs = [
        ((*same, f"attn={variant}", f"optim.lr={rate:g}"), seed)
        for variant in cfg.variants
        for rate in rates_to_try(cfg, losses(cfg, variant))
        for seed in cfg.seeds
    ]
    return missing(runs, cfg)


def chosen(cfg: DictConfig, variant: str, tried: dict[float, float]) -> str:
    """Return the content of the file of the best rate. Raises UserError unless this rate lies between two others."""
    best = min(tried, key=tried.get, default=None)
    if not tried or best in (min(tried), max(tried)):
        rates = ", ".join(f"{rate:g}" for rate in tried) or "none"
        raise UserError(f"the best rate of {variant} does not lie between two others: the rates tried are {rates}")
    seeds = ", ".join(map(str, cfg.seeds))
    words = [f"{rate:g}: {f'{loss:.4f}' if math.isfinite(loss) else 'diverged'}" for rate, loss in tried.items()]
    comment = as_comment(
        f"From python -m scripts.reproduce study=rates variants=[{variant}] setup={cfg.setup} "
        f"optimizer={cfg.optimizer}. Log perplexity on the training text after training, the mean of seeds {seeds}, "
        f"for each learning rate: {'; '.join(words)}"
    )
    return f"# @package optim\n{comment}\nlr: {best:g}\n"


def as_comment(text: str) -> str:
    """Return text as the lines of a comment of a YAML file."""
    return textwrap.fill(text, 120, initial_indent="# ", subsequent_indent="# ")


def choose(cfg: DictConfig) -> None:
    """Train the missing runs, and write the best rates.

    Raises UserError for unknown attentions, for failed runs, and in the cases of `chosen`.
    """
    check_variants(cfg.variants)
    while planned := jobs(cfg):
        with train_missing(planned, cfg):
            pass
    for variant in cfg.variants:
        path = rate_file(cfg.setup, cfg.optimizer, variant)
        tried = losses(cfg, variant)
        write_bytes(path, chosen(cfg, variant, tried).encode())
        perplexities = "; ".join(f"{rate:g} {cell(loss)}" for rate, loss in tried.items())
        print(f"fit perplexity of {variant} by learning rate: {perplexities}")
        print(f"{path.relative_to(CONFIGS.parent)}: {path.read_text(encoding='utf-8').splitlines()[-1]}")
