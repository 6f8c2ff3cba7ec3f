"""Choose the start, or initialisation, of each attention: that which fits the training text best after `stop` steps.

The learning rate follows the schedule of an experiment, even if `stop` is before its last step. Each start of
configs/study/starts.yaml is trained with seeds that no verdict uses. The best start, unless it is the plain one, is
written to configs/starts/<setup>/<attention>.yaml, where train.py finds it. How the heads of MHA+ change in the first
steps is recorded too (heads.py). Runs that have ended are not trained again.
"""

import shlex

from omegaconf import DictConfig, OmegaConf

from configs.cli import compose
from data.files import UserError, write_bytes, write_json
from data.reading import read_object
from scripts.reporting.figures import seeds_in_words
from scripts.reporting.rates import cell
from scripts.reporting.starts import LOOKED_AT, Start, heads_path, last_step, start_file, starts, words, write
from scripts.reporting.variants import check_variants
from scripts.studies.heads import watched
from scripts.studies.rates import as_comment
from scripts.studies.runner import Job, missing, train_missing
from training.device import pick_device
from training.provenance import provenance


def jobs(cfg: DictConfig, variants: list[str]) -> list[Job]:
    """Return a job for each missing run. Raises UserError if a finished run has other settings than its name says."""
    rows = [words(cfg, variant, start) for variant in variants for start in cfg.starts[variant]]
    return missing([(row, seed) for row in rows for seed in cfg.seeds], cfg)


def measure_heads(cfg: DictConfig) -> None:
    """Measure the heads of LOOKED_AT and write their record, unless a record with the same settings exists."""
    path = heads_path(cfg)
    overrides = {start: list(words(cfg, LOOKED_AT, start)) for start in cfg.look}
    settings = {"starts": overrides, "steps": list(cfg.look_steps), "seed": cfg.seeds[0]}
    if path.exists() and {key: read_object(path).get(key) for key in settings} == settings:
        return
    rows = {}
    for start, given in overrides.items():
        print(f"measuring the heads of {LOOKED_AT}, {start}", flush=True)
        rows[start] = watched(compose([*given, f"seed={cfg.seeds[0]}"]), settings["steps"])
    origin = provenance(pick_device("auto"), f"python -m scripts.reproduce study=starts setup={cfg.setup}")
    write_json(path, settings | {"found": rows, "provenance": origin})


def check(cfg: DictConfig) -> list[str]:
    """Return the attentions to run. Raises UserError if one has no starts, or for other unusable settings."""
    if cfg.setup not in cfg.budgets:
        raise UserError(f"setup must be one of {', '.join(cfg.budgets)}: got {cfg.setup}")
    chosen = list(cfg.starts) if cfg.variants is None else list(cfg.variants)
    check_variants(chosen)
    for name in chosen:
        if name not in cfg.starts:
            raise UserError(
                f"there are no starts of attn={name}; there are those of {', '.join(cfg.starts)}; add the line "
                f"{name}: ${{usual}} to the starts in configs/study/starts.yaml"
            )
    for start in cfg.look:
        if start not in cfg.starts[LOOKED_AT]:
            raise UserError(f"{LOOKED_AT} has no start {start}; it has {', '.join(cfg.starts[LOOKED_AT])}")
    return chosen


def chosen(cfg: DictConfig, group: list[Start]) -> str | None:
    """Return the content of the file of the best start; None if this is the plain start, the first of `group`."""
    best = min(group, key=lambda start: start.loss)
    if best is group[0]:
        return None
    found = "; ".join(f"{start.name} {cell(start.loss)}" for start in group)
    comment = as_comment(
        f"From python -m scripts.reproduce study=starts setup={cfg.setup}. Perplexity on the training text after "
        f"{last_step(cfg)} steps from those starts of configs/study/starts.yaml that were tried, "
        f"{seeds_in_words(cfg.seeds)}: {found}"
    )
    given = OmegaConf.to_yaml(OmegaConf.from_dotlist(shlex.split(best.words)))
    return f"# @package _global_\n{comment}\n{given}"


def choose(cfg: DictConfig, variants: list[str]) -> None:
    """Write the best start of each of these attentions whose runs have all ended, unless every start has diverged.

    If the best start is the plain one, delete the attention's file.
    """
    for variant, group in starts(cfg).items():
        if variant not in variants or len(group) < len(cfg.starts[variant]):
            continue  # in the second case, some of its starts have not been tried
        path, content = start_file(cfg.setup, variant), chosen(cfg, group)
        if content is None:
            path.unlink(missing_ok=True)
        else:
            write_bytes(path, content.encode())


def compare(cfg: DictConfig) -> None:
    """Train the missing runs, choose the starts, and write the page. Raises UserError if runs have failed."""
    names = check(cfg)
    with train_missing(jobs(cfg, names), cfg):
        if LOOKED_AT in names:
            measure_heads(cfg)
        if cfg.choose:
            choose(cfg, names)
        write(cfg)
