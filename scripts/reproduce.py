"""python scripts/reproduce.py: run what the sources' claims need, then write the verdicts.

They go to out/, which git ignores; with results=results they go to the committed ones instead.
Finished runs are not run again, of whatever commit they are; interrupted ones are continued. One
process works for each GPU, or for each core, and takes one run after the other. What claims about
costs compare is timed at the end, one after the other, when nothing else runs.
"""

import contextlib
import io
import math
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

import configs.startup

import torch
from omegaconf import DictConfig
from torch import multiprocessing

from configs.arguments import quote
from configs.cli import compose, main
from configs.messages import explain
from configs.process import end_with_parent, ending_with_this
from data.batches import plain_windows
from data.files import write_json
from data.reading import read_json, read_tensors
from scripts.benchmark import measure_layers, measure_steps, open_record
from scripts.claims import TRAINED, choose, composed, is_done, overrides, page, record_of, seeds
from scripts.make_claims import write
from train import train
from training.device import pick_device, pick_precision
from training.evaluation import score
from training.loading import load_run
from training.progress import duration
from training.provenance import ROOT, provenance
from training.record import Record, read_config
from training.settings import last_step

LENGTHS = (32, 64, 128, 256, 512, 1024)  # of the texts that claim 13 tests at
GRACE = 120.0  # seconds that a run may take to save its state


class Job(NamedTuple):
    """One run that is missing: what to call train.py with, and what to keep beside its record."""

    overrides: tuple[str, ...]
    also: frozenset[str]
    record: Record
    work: int  # characters x layers: what its time grows with


def plan(claims: dict[str, DictConfig], tier: str, results: Path) -> list[Job]:
    """The runs that are missing, each once, in the order of the claims, seed by seed."""
    jobs: dict[Path, Job] = {}
    for claim in claims.values():
        if claim.measure not in TRAINED:
            continue
        for seed in seeds(claim, tier):
            for row in claim.rows:
                record = record_of(results / "runs", claim, row, seed, tier)
                if is_done(claim, record):
                    continue
                given = overrides(claim, row, tier)
                also = frozenset([claim.also] if "also" in claim else [])
                if record.folder in jobs:
                    also |= jobs[record.folder].also
                jobs[record.folder] = Job((*given, f"seed={seed}"), also, record, work(composed(given)))
    return list(jobs.values())


def work(cfg: DictConfig) -> int:
    return last_step(cfg) * cfg.train.batch * cfg.model.context * cfg.model.layers


def do(job: Job, device: str, results: Path, wandb: str) -> None:
    """Train, and keep what the claim needs beside the record."""
    cfg = compose(list(job.overrides))
    cfg.runs, cfg.train.device, cfg.wandb.mode, cfg.wandb.dir = str(results / "runs"), device, wandb, str(results)
    train(cfg)
    record = Record.of(cfg)
    if "time" in job.also:
        keep_time(record)
    if "lengths" in job.also:
        keep_lengths(record, pick_device(device))


def keep_time(record: Record) -> None:
    """The learned f, alpha, beta and gamma of the first layer, to five digits, as time.json."""
    positive = read_config(record).attn.time.positive
    tensors, kept = read_tensors(record.model), {}
    for name in ("f", "alpha", "beta", "gamma"):
        tensor = tensors["blocks.0.attn." + ("gamma" if name == "gamma" else f"time.{name}")]
        values = tensor.exp() if positive and name != "gamma" else tensor
        kept[name] = torch.tensor([float(f"{x:.5g}") for x in values.flatten()]).view(values.shape).tolist()
    write_json(record.folder / "time.json", kept)


def keep_lengths(record: Record, device: torch.device) -> None:
    """The held-out loss at other lengths than the one trained at, as lengths.json."""
    cfg, model, text, _ = load_run(record.folder)
    heldout = text["heldout"]
    model.to(device)
    losses = {T: score(model, plain_windows(heldout, T), None, device)["loss"] for T in LENGTHS if T < len(heldout)}
    write_json(record.folder / "lengths.json", {"trained": cfg.model.context, "heldout_loss": losses})


def worker(device: str, threads: int, jobs, done, results: Path, wandb: str) -> None:
    """Take one run after the other until there are none left, a signal comes, or the parent is killed."""
    end_with_parent()
    os.setsid()  # Ctrl-C is for the parent, which then says when to stop
    torch.set_num_threads(threads)
    while multiprocessing.parent_process().is_alive():
        try:
            job = jobs.get(timeout=1)
        except queue.Empty:
            return
        began, error = time.monotonic(), None
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                do(job, device, results, wandb)
        except Exception as failure:
            error = explain(failure, "config")
        done.put((job, time.monotonic() - began, error))


def train_all(jobs: list[Job], cfg: DictConfig, tier: str, deadline: float) -> int:
    """Train side by side until `deadline`, and say how far it is; gives how many runs failed."""
    cores = os.cpu_count() or 1
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if tier != "cpu" else []
    devices = (gpus or ["cpu"] * cores)[: cfg.processes][: len(jobs)]
    context = multiprocessing.get_context("spawn")
    waiting, done = context.Queue(), context.Queue()
    for job in jobs:
        waiting.put(job)
    shared = (max(1, cores // len(devices)), waiting, done, Path(cfg.results), cfg.wandb)
    workers = [context.Process(target=worker, args=(device, *shared)) for device in devices]
    for process in workers:
        process.start()
    began, ready, total, failed = time.monotonic(), 0, sum(job.work for job in jobs), 0
    try:
        for count, (job, seconds, error) in enumerate(as_they_end(done, workers, deadline), 1):
            ready += job.work
            failed += error is not None
            left = (time.monotonic() - began) * (total / ready - 1)
            what = f"failed: {error}" if error else f"{seconds:.0f} s"
            print(f"{count}/{len(jobs)} {job.record.folder.name}: {what}; about {duration(left)} left", flush=True)
    finally:
        stop(workers)
        waiting.cancel_join_thread()  # nobody takes what is left
    return failed


def as_they_end(done, workers: list, deadline: float) -> Iterator[tuple[Job, float, str | None]]:
    while time.monotonic() < deadline:
        try:
            yield done.get(timeout=1)
        except queue.Empty:
            if not any(process.is_alive() for process in workers):
                return


def stop(workers: list) -> None:
    """Let every run save its state, and end it."""
    for process in workers:
        process.terminate()
    for process in workers:
        process.join(GRACE)
        process.kill()


def measure(name: str, claim: DictConfig, cfg: DictConfig, tier: str, deadline: float) -> None:
    """Time what a claim about costs compares, unless its record is complete."""
    path = page(name, tier, Path(cfg.results)).with_suffix(".json")
    names = ",".join(quote(key) for key in claim.rows.values())
    settings = compose([f"variants=[{names}]", "peers=false", *claim.timing], "benchmark")
    device = pick_device("cpu" if tier == "cpu" else "cuda")
    precision, _ = pick_precision("auto", device)
    command = f"python scripts/reproduce.py claims=[{name}] tier={tier}"
    origin = provenance(device, command) | {"precision": precision, "tokens": settings.layers.tokens}
    record = read_json(path) if path.exists() else {}
    if "seconds" in record or all(str(T) in record.get("lengths", {}) for T in settings.layers.lengths):
        return
    record = open_record(path, origin)  # what another commit or device began is begun anew
    if claim.measure == "step":
        write_json(path, measure_steps(settings, record, device, precision, deadline))
    else:
        for grown in measure_layers(settings, record, device, precision, deadline):
            write_json(path, grown)


def measure_speed(claim: DictConfig, cfg: DictConfig, tier: str) -> None:
    """The speed of a claim's rows, side by side, unless it is there; what was measured for other claims is again."""
    variants = [composed(overrides(claim, row, tier)).job.attn for row in claim.rows]
    out = Path(cfg.results, "runs", tier, "speed.json")
    known = read_json(out)["speed"] if out.exists() else {}
    if not set(variants) <= known.keys():
        variants = dict.fromkeys(["mha_plus", *variants, *known])
        given = [f"variants=[{','.join(quote(v) if ' ' in v else v for v in variants)}]", f"out={out}"]
        given += [f"setup={tier}", "vocabulary=null", "repeats=15", "warm_up=3"]
        subprocess.run(
            [sys.executable, str(ROOT / "scripts/time_steps.py"), *given], env=ending_with_this(), check=True
        )


@main("reproduce")
def run(cfg: DictConfig) -> None:
    tier = cfg.tier or ("full" if torch.cuda.is_available() else "cpu")
    claims = choose(cfg.claims, tier)
    deadline = time.monotonic() + (math.inf if cfg.budget is None else cfg.budget)
    jobs = plan(claims, tier, Path(cfg.results))
    print(f"{len(claims)} claims, tier {tier}: {len(jobs)} runs to do", flush=True)
    failed = train_all(jobs, cfg, tier, deadline) if jobs else 0
    for name, claim in claims.items():  # once nothing else runs
        if time.monotonic() < deadline and claim.plot == "curves":
            measure_speed(claim, cfg, tier)
        if time.monotonic() < deadline and claim.measure not in TRAINED:
            measure(name, claim, cfg, tier, deadline)
    missing = plan(claims, tier, Path(cfg.results))
    if missing:
        print(f"{len(missing)} runs are left, {missing[0].record.folder.name} first: the same command goes on")
    write(Path(cfg.results))
    end_with_failures(failed)


def end_with_failures(count: int) -> None:
    """Exit status 1 where runs failed, which were named as they did."""
    if count:
        sys.exit(f"error: {count} of the runs failed")


if __name__ == "__main__":
    run()
