"""What each start of an attention brings in its first steps, and what it costs.

Trains each start of configs/study/starts.yaml for the first steps of an experiment's schedule, with seeds that no
verdict uses, and measures the heads of MHA+ on the way. Runs that are there already are not trained again.
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
    """The runs that are missing."""
    planned = []
    for variant in variants:
        for start in cfg.starts[variant]:
            for seed in cfg.seeds:
                _, summary = summary_of(cfg, variant, start, seed)
                if summary is None:
                    planned.append(job((*words(cfg, variant, start), f"seed={seed}"), Path(cfg.results)))
    return planned


def look(cfg: DictConfig) -> None:
    """Keep what the heads do, unless that is there."""
    path = Path(cfg.results, "starts_heads.json")
    asked = {
        "starts": {start: words(cfg, LOOKED_AT, start) for start in cfg.look},
        "steps": list(cfg.look_steps),
        "seed": cfg.seeds[0],
    }
    if path.exists() and {key: read_json(path)[key] for key in asked} == asked:
        return
    found = {}
    for start, given in asked["starts"].items():
        print(f"looking at the heads of {LOOKED_AT}, {start}", flush=True)
        found[start] = watched(compose([*given, f"seed={cfg.seeds[0]}"]), asked["steps"])
    origin = provenance(pick_device("auto"), "python -m scripts.reproduce study=starts")
    write_json(path, asked | {"found": found, "provenance": origin})


def check(cfg: DictConfig) -> list[str]:
    """The attentions that are asked for. Raises UserError for one that has no starts, and for a start that is none."""
    chosen = list(cfg.starts) if cfg.variants is None else list(cfg.variants)
    for name in chosen:
        if name not in cfg.starts:
            raise UserError(f"there are no starts of attn={name}; there are those of {', '.join(cfg.starts)}")
    for start in cfg.look:
        if start not in cfg.starts[LOOKED_AT]:
            raise UserError(f"{LOOKED_AT} has no start {start}; it has {', '.join(cfg.starts[LOOKED_AT])}")
    if not cfg.seeds or not all(step >= 0 for step in cfg.look_steps):
        raise UserError(f"seeds must not be empty, and look_steps 0 or more: got {cfg.seeds}, {cfg.look_steps}")
    return chosen


def compare(cfg: DictConfig) -> None:
    """Train what is missing, and write the page. Raises UserError that names the runs that failed."""
    chosen = check(cfg)
    failed = train_missing(jobs(cfg, chosen), cfg, lambda record: finished(record) is not None)
    if LOOKED_AT in chosen and cfg.look:
        look(cfg)
    write(cfg)
    refuse_failed(failed)
