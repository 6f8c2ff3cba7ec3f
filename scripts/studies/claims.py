"""Train and time what the sources' claims need, and write the verdicts.

Runs that have ended are not trained again, even if another commit trained them. Interrupted runs are continued. Costs
are timed at the end, when nothing else runs.
"""

import math
import time
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig

from data.batches import plain_windows
from data.files import write_json
from data.reading import read_tensors
from scripts.benchmarking.attentions import continued, measure_layers, measure_steps
from scripts.reporting import claim_pages
from scripts.reporting.claims import (
    TRAINED,
    choose,
    costs_of,
    is_complete,
    is_done,
    overrides,
    records_of,
    seeds,
    timing_settings,
    write_costs,
)
from scripts.reporting.records import checked_record, composed, state, words_of
from scripts.studies.runner import Job, end_with_failures, job, refuse_days, train_all
from training.device import pick_device, pick_precision
from training.evaluation import score
from training.loading import load_run
from training.provenance import provenance
from training.record import Record, read_config

LENGTHS = (32, 64, 128, 256, 512, 1024)  # lengths of the texts on which claim 13 tests models


def reproduce(cfg: DictConfig) -> None:
    """Train and time what is missing until the budget is spent, and write the verdicts."""
    tier = cfg.tier or ("source" if torch.cuda.is_available() else "small")
    claims, results = choose(cfg.claims, tier), Path(cfg.results)
    deadline = time.monotonic() + (math.inf if cfg.budget is None else cfg.budget)
    jobs = missing_runs(claims, tier, results)
    print(f"{len(claims)} claims, tier {tier}: {len(jobs)} run{'s' * (len(jobs) != 1)} to do", flush=True)
    if cfg.budget is None and not cfg.yes:
        refuse_days(jobs)
    failed = train_all(jobs, cfg, deadline) if jobs else 0
    costs = {name: claim for name, claim in claims.items() if claim.measure not in TRAINED}
    for name, claim in costs.items():  # after training, when nothing else runs
        if time.monotonic() < deadline:
            measure_cost(name, claim, results, tier, deadline)
    rows = ((claim, row) for claim in claims.values() if claim.measure in TRAINED for row in claim.rows)
    records = (record for claim, row in rows for record in records_of(results / "runs", claim, row, tier))
    if diverged := {record.folder.name for record in records if state(record) == "diverged"}:
        print(f"these runs have diverged, so that their claims have no verdict: {', '.join(sorted(diverged))}")
    left = [missing.record.folder.name for missing in missing_runs(claims, tier, results)]
    left += [f"the times of {name}" for name, claim in costs.items() if not is_timed(name, claim, results, tier)]
    if left:
        print(f"{len(left)} of the runs and timings are left, {left[0]} first: run the same command again to continue")
    claim_pages.write(results)
    end_with_failures(failed)


def missing_runs(claims: dict[str, DictConfig], tier: str, results: Path) -> list[Job]:
    """Return a job for each run that is missing or lacks a file of its claim. A run that has diverged is not missing.

    The jobs are in the order of the claims, seed by seed. Raises UserError if a finished run has other settings than
    its name says.
    """
    jobs: dict[Path, Job] = {}
    extras: dict[Path, set[str]] = {}
    for claim in claims.values():
        if claim.measure not in TRAINED:
            continue
        for seed in seeds(claim, tier):
            for row in claim.rows:
                words = overrides(claim, row, tier)
                record = checked_record(results / "runs", words, seed)
                if not is_done(claim, record) and state(record) != "diverged":
                    extras.setdefault(record.folder, set()).update([claim.also] if "also" in claim else [])
                    jobs[record.folder] = job((*words, f"seed={seed}"), results)
    return [planned._replace(keep=partial(keep, extras[folder])) for folder, planned in jobs.items()]


def keep(extras: set[str], record: Record, device: str) -> None:
    """Write the files named in `extras`, which claims need beside a run's record."""
    if "position_weight" in extras:
        keep_position_weight(record)
    if "lengths" in extras:
        keep_lengths(record, pick_device(device))


def keep_position_weight(record: Record) -> None:
    """Write position_weight.json: f, alpha, beta and gamma of the first layer, to five significant digits."""
    positive = read_config(record).attn.position_weight.positive
    tensors, factors = read_tensors(record.model), {}
    for name in ("f", "alpha", "beta", "gamma"):
        tensor = tensors["blocks.0.attn." + ("gamma" if name == "gamma" else f"position_weight.{name}")]
        values = tensor.exp() if positive and name != "gamma" else tensor
        factors[name] = shortened(values.tolist())
    write_json(record.folder / "position_weight.json", factors)


def shortened(values: list | float) -> list | float:
    """Round the numbers of nested lists to five significant digits."""
    return [shortened(value) for value in values] if isinstance(values, list) else float(f"{values:.5g}")


def keep_lengths(record: Record, device: torch.device) -> None:
    """Write lengths.json: the held-out loss on texts of each length."""
    cfg, model, text, _ = load_run(record.folder)
    heldout = text["heldout"]
    model.to(device)
    losses = {T: score(model, plain_windows(heldout, T), None, device)["loss"] for T in LENGTHS if T < len(heldout)}
    write_json(record.folder / "lengths.json", {"trained": cfg.model.context, "heldout_loss": losses})


def is_timed(name: str, claim: DictConfig, results: Path, tier: str) -> bool:
    """Return whether a claim has a complete record of costs."""
    return is_complete(claim, costs_of(name, tier, results))


def requested_precision(claim: DictConfig) -> str:
    """Return the train.precision of the rows, which is the same in all, or auto for layers, which have none."""
    if claim.measure != "step":
        return "auto"
    (precision,) = {composed(words_of(row, "source")).train.precision for row in claim.rows.values()}
    return precision


def measure_cost(name: str, claim: DictConfig, results: Path, tier: str, deadline: float) -> None:
    """Time the costs that a claim compares, unless its record is complete."""
    if is_timed(name, claim, results, tier):
        return
    settings = timing_settings(claim)
    device = pick_device("auto")
    precision, _ = pick_precision(requested_precision(claim), device)
    command = f"python -m scripts.reproduce claims=[{name}] tier={tier}"
    origin = provenance(device, command) | {"precision": precision, "tokens": settings.layers.tokens}
    record = continued(costs_of(name, tier, results), origin)  # starts again if another commit or device began it
    # Steps have no deadline: all rows are timed in turn, so none of them can be left for later.
    measured, until = (measure_steps, math.inf) if claim.measure == "step" else (measure_layers, deadline)
    for found in measured(settings, record, device, precision, until):
        write_costs(name, tier, results, found)
