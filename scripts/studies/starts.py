"""Train each initialisation of configs/study/starts.yaml for the first steps of an experiment's schedule.

The seeds are used by no verdict. The heads of MHA+ are measured too. Finished runs are not trained again.
"""

from pathlib import Path

from omegaconf import DictConfig

from configs.cli import compose
from data.files import UserError, write_json
from data.reading import read_json
from scripts.reporting.records import finished
from scripts.reporting.starts import LOOKED_AT, summary_of, words, write
from scripts.studies.heads import watched
from scripts.studies.runner import Job, job, refuse_failed, train_missing
from training.device import pick_device
from training.provenance import provenance


def jobs(cfg: DictConfig, variants: list[str]) -> list[Job]:
    """Return the missing runs."""
    return [
        job((*words(cfg, variant, start), f"seed={seed}"), Path(cfg.results))
        for variant in variants
        for start in cfg.starts[variant]
        for seed in cfg.seeds
        if summary_of(cfg, variant, start, seed)[1] is None
    ]


def measure_heads(cfg: DictConfig) -> None:
    """Measure the heads and write their record, unless it exists for the same settings."""
    path = Path(cfg.results, "starts_heads.json")
    overrides = {start: words(cfg, LOOKED_AT, start) for start in cfg.look}
    settings = {"starts": overrides, "steps": list(cfg.look_steps), "seed": cfg.seeds[0]}
    if path.exists() and {key: read_json(path)[key] for key in settings} == settings:
        return
    rows = {}
    for start, given in overrides.items():
        print(f"measuring the heads of {LOOKED_AT}, {start}", flush=True)
        rows[start] = watched(compose([*given, f"seed={cfg.seeds[0]}"]), settings["steps"])
    origin = provenance(pick_device("auto"), "python -m scripts.reproduce study=starts")
    write_json(path, settings | {"found": rows, "provenance": origin})


def check(cfg: DictConfig) -> list[str]:
    """Return the chosen attentions. Raises UserError if one has no starts, or if a start does not exist."""
    chosen = list(cfg.starts) if cfg.variants is None else list(cfg.variants)
    for name in chosen:
        if name not in cfg.starts:
            raise UserError(f"there are no starts of attn={name}; there are those of {', '.join(cfg.starts)}")
    for start in cfg.look:
        if start not in cfg.starts[LOOKED_AT]:
            raise UserError(f"{LOOKED_AT} has no start {start}; it has {', '.join(cfg.starts[LOOKED_AT])}")
    if not cfg.seeds or not all(step >= 0 for step in cfg.look_steps):
        raise UserError(f"seeds must not be empty, and look_steps must be 0 or more: got {cfg.seeds}, {cfg.look_steps}")
    return chosen


def compare(cfg: DictConfig) -> None:
    """Train the missing runs, and write the page. Raises UserError if runs have failed."""
    chosen = check(cfg)
    failed = train_missing(jobs(cfg, chosen), cfg, lambda record: finished(record) is not None)
    if LOOKED_AT in chosen and cfg.look:
        measure_heads(cfg)
    write(cfg)
    refuse_failed(failed)
