"""Train the missing runs of a study in parallel, by default in one process per GPU or, without a GPU, per core."""

import contextlib
import io
import itertools
import math
import os
import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import DictConfig
from torch import multiprocessing

from configs.cli import compose
from configs.messages import explain
from configs.process import end_with_parent
from data.corpus import core_count
from data.files import UserError
from scripts.benchmarking.timing import matmul, step_flops, timed
from scripts.reporting.records import checked_record, has_ended
from scripts.reporting.variants import VOCABULARY
from scripts.studies.overview import Overview
from train import train
from training.device import pick_precision
from training.packed import find
from training.progress import duration
from training.record import Record
from training.settings import last_step
from training.trainer import Trainer

GRACE = 120.0  # seconds that a process may take to save the state of its run
DAY = 24 * 3600


class Job(NamedTuple):
    """A run to train: the overrides of train.py, its record, and its cost."""

    overrides: tuple[str, ...]
    record: Record
    work: float  # FLOPs of its products with weights; training time is about proportional to them
    keep: Callable[[Record, str], None] | None = None  # called after training with the record and the device


def job(overrides: tuple[str, ...], results: Path) -> Job:
    """Return the job that trains with these overrides of train.py and writes its record under <results>/runs."""
    cfg = compose(list(overrides))
    # If data.vocab_size is null, the size of the vocabulary is known only from the text, which is not read here. The
    # size in the source article is then taken as an estimate.
    work = step_flops(cfg, cfg.data.vocab_size or VOCABULARY) * last_step(cfg)
    return Job(overrides, find(results / "runs" / cfg.job.experiment / cfg.job.name), work)


def missing(runs: Iterable[tuple[tuple[str, ...], int]], cfg: DictConfig) -> list[Job]:
    """Return a job for each run that has not ended. A run is given by its overrides of train.py and its seed.

    Raises UserError if a finished run has other settings than its name says.
    """
    jobs: dict[Path, Job] = {}
    for words, seed in runs:
        record = checked_record(Path(cfg.results, "runs"), words, seed)
        if not has_ended(record):
            jobs[record.folder] = job((*words, f"seed={seed}"), Path(cfg.results))
    return list(jobs.values())


@contextlib.contextmanager
def train_missing(jobs: list[Job], cfg: DictConfig) -> Iterator[None]:
    """Train all jobs, run the body of the with statement, and raise UserError if some runs have not ended.

    If the body raises a UserError too, for example because a page lacks runs, both messages are in one line.
    """
    print(f"{len(jobs)} run{'s' * (len(jobs) != 1)} to do", flush=True)
    if jobs:
        train_all(jobs, cfg, deadline=math.inf)
    failed = [job.record.folder.name for job in jobs if not has_ended(job.record)]
    unfinished = f"these runs are not finished: {', '.join(failed)}"
    try:
        yield
    except UserError as error:
        if failed:
            raise UserError(f"{unfinished}; {error}") from error
        raise
    if failed:
        raise UserError(unfinished)


def end_with_failures(count: int) -> None:
    """Exit with status 1 if `count`, the number of failed runs, is not 0. `train_all` has printed their errors."""
    if count:
        sys.exit(f"error: {count} of the runs failed")


def refuse_days(jobs: list[Job]) -> None:
    """Raise UserError if the jobs would take more than a day even at the rate of large matrix products."""
    count = torch.cuda.device_count()
    device = torch.device("cuda" if count else "cpu")
    products, flops = matmul(device, pick_precision("auto", device)[0])
    timed(products, device)  # a warm-up
    seconds = sum(job.work for job in jobs) * timed(products, device) / flops / max(1, count)
    if seconds > DAY:
        raise UserError(f"these {len(jobs)} runs take at least {duration(seconds)} here: yes=true starts them")


def train_all(jobs: list[Job], cfg: DictConfig, deadline: float) -> int:
    """Train the jobs in parallel until the deadline, print the progress, and return the number of failed runs."""
    cores = core_count()
    gpu_names = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    count = min(cfg.processes or len(gpu_names) or cores, cores, len(jobs))
    devices = [name for name, _ in zip(itertools.cycle(gpu_names or ["cpu"]), range(count))]
    context = multiprocessing.get_context("spawn")
    waiting, done = context.Queue(), context.Queue()
    for job in jobs:
        waiting.put(job)
    shared = (max(1, cores // len(devices)), waiting, done, Path(cfg.results), cfg.wandb)
    workers = [context.Process(target=work_off, args=(device, *shared)) for device in devices]
    for process in workers:
        process.start()
    overview, failed = Overview({job.record.folder.name: job.work for job in jobs}), 0
    try:
        for job, seconds, error in as_they_end(done, workers, deadline, overview):
            overview.end(job.record.folder.name, seconds, error)
            failed += error is not None
        for process in workers:
            if process.exitcode:  # it ended without reporting its run, for example because the system killed it
                running = ", ".join(name for name, share in overview.shares.items() if share < 1) or "no run"
                print(f"a process died with exit status {process.exitcode}; in training: {running}", flush=True)
                failed += 1
    finally:
        stop(workers)
        overview.bar.close()
        waiting.cancel_join_thread()  # no process reads the rest of the queue
    return failed


def work_off(device: str, threads: int, jobs, done, results: Path, wandb: str) -> None:
    """Train one job after the other until none is left, a signal arrives, or the parent process has ended."""
    end_with_parent()
    os.setsid()  # so that Ctrl-C reaches only the parent, which then stops its workers
    torch.set_num_threads(threads)
    while multiprocessing.parent_process().is_alive():
        try:
            job = jobs.get(timeout=1)
        except queue.Empty:
            return
        began, error = time.monotonic(), None
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                do(job, device, results, wandb, report_steps(job, done))
        except Exception as failure:
            error = explain(failure, "config")
        done.put((job, time.monotonic() - began, error))


def report_steps(job: Job, done) -> Callable[[Trainer], None]:
    """Return a hook for `train` that puts the run's name and share of steps into `done`, at most once a second."""
    last = 0.0

    def on_step(trainer: Trainer) -> None:
        nonlocal last
        if time.monotonic() - last > 1:
            last = time.monotonic()
            done.put((job.record.folder.name, trainer.step / last_step(trainer.cfg)))

    return on_step


def do(job: Job, device: str, results: Path, wandb: str, on_step: Callable[[Trainer], None]) -> None:
    """Train one job, and write beside its record the files that the study needs."""
    cfg = compose(list(job.overrides))
    cfg.runs, cfg.train.device, cfg.wandb.mode, cfg.wandb.dir = str(results / "runs"), device, wandb, str(results)
    train(cfg, on_step)
    if job.keep:
        job.keep(Record.of(cfg), device)


def as_they_end(done, workers: list, deadline: float, overview: Overview) -> Iterator[tuple[Job, float, str | None]]:
    """Yield each job that has ended, its seconds and its error, until all workers have ended or the deadline passes."""
    while time.monotonic() < deadline:
        try:
            name_or_job, *rest = done.get(timeout=1)
            if isinstance(name_or_job, Job):
                yield name_or_job, *rest
            else:
                overview.at(name_or_job, *rest)
        except queue.Empty:
            if not any(process.is_alive() for process in workers):
                return


def stop(workers: list) -> None:
    """Tell the processes to save the states of their runs and end; kill those that take longer than GRACE."""
    for process in workers:
        process.terminate()
    deadline = time.monotonic() + GRACE
    for process in workers:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
