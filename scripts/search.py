"""python -m scripts.search: search for the best R, W and V by successive halving over attn=rwv (claim 17).

The first rung is a sweep of short runs that Optuna's TPE sampler chooses (configs/experiment/search.yaml). The best
runs of each rung by fit loss are trained again from scratch with more steps. out/search.md lists all runs by rung.
The same command continues a search that was stopped.
"""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import configs.startup

import torch
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from configs.cli import main
from configs.folder import CONFIGS
from configs.process import ending_with_this
from data.files import UserError
from scripts.reporting import search
from scripts.reporting.records import finished, state
from scripts.reporting.search import rung, steps_of
from scripts.studies.runner import Job, end_with_failures, job, train_all
from training.packed import find
from training.provenance import ROOT
from training.record import read_config
from training.runs import local_folders

POLL = 2.0  # seconds between two looks at the runs of the first rung


def sweep(cfg: DictConfig) -> int:
    """Train the first rung with parallel sweepers that share one study. Return how many of them failed."""
    count = cfg.processes or torch.cuda.device_count() or os.cpu_count() or 1
    runs = Path(cfg.results, "runs")
    Path(cfg.results).mkdir(parents=True, exist_ok=True)  # for the study's database
    left = cfg.trials - len(rung(runs, 0, cfg))
    study = f"hydra.sweeper.storage=sqlite:///{cfg.results}/search.db"
    given = [study, f"runs={runs}", f"wandb.mode={cfg.wandb}", f"wandb.dir={cfg.results}"]
    threads = str(max(1, (os.cpu_count() or 1) // count))
    environment = ending_with_this() | {"OMP_NUM_THREADS": threads, "TQDM_DISABLE": "1"}  # one bar here for all
    sweepers = []
    for i in range(count):
        trials = max(0, left) // count + (i < max(0, left) % count)
        if trials:
            line = [sys.executable, str(ROOT / "train.py"), "-m", "experiment=search", *given]
            line.append(f"hydra.sweeper.n_trials={trials}")
            sweepers.append(subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL))
    with tqdm(total=cfg.trials, unit="run", disable=None) as bar:
        while any(sweeper.poll() is None for sweeper in sweepers):
            folders = sorted(local_folders(runs / "search"))
            running = [folder.name for folder in folders if state(find(folder)) == "not finished"]
            bar.set_description_str(", ".join(running), refresh=False)
            bar.update(len(rung(runs, 0, cfg)) - bar.n)
            time.sleep(POLL)
    return sum(sweeper.wait() != 0 for sweeper in sweepers)


def next_rung(best: list[dict], number: int, cfg: DictConfig) -> list[Job]:
    """Return the missing runs of the next rung, which train these forms for more steps."""
    jobs, steps = [], steps_of(number, cfg)
    searched = OmegaConf.load(CONFIGS / "experiment/search.yaml").hydra.sweeper.params
    for summary in best:
        config = read_config(find(Path(cfg.results, "runs/search", summary["name"])))
        words = [f"{key}={OmegaConf.select(config, key)}" for key in searched]
        jobs.append(job(("experiment=search", *words, f"train.steps={steps}"), Path(cfg.results)))
    return [job for job in jobs if finished(job.record) is None]


@main("search")
def run(cfg: DictConfig) -> None:
    runs = Path(cfg.results, "runs")
    failed = sweep(cfg)
    for number in range(1, cfg.rungs):
        last = rung(runs, number - 1, cfg)
        if not last:
            raise UserError(f"no run of {steps_of(number - 1, cfg)} steps is finished: the search cannot continue")
        jobs = next_rung(last[: max(1, round(len(last) * cfg.keep))], number, cfg)
        if jobs:
            failed += train_all(jobs, cfg, deadline=math.inf)
    search.write(cfg, Path(cfg.results))
    print(f"written to {cfg.results}/search.md")
    end_with_failures(failed)


if __name__ == "__main__":
    run()
