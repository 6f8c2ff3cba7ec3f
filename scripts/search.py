"""python scripts/search.py: which R, W and V is best? Successive halving over attn=rwv (claim 17).

The first rung is a sweep of short runs that Optuna's TPE sampler chooses (configs/experiment/search.yaml).
The best of each rung by fit loss are trained again, longer, from the start. Every run is a record
like any other, and out/search.md lists them by rung. Continued where it stopped.
"""

import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import configs.startup

import torch
from omegaconf import DictConfig
from tabulate import tabulate

from configs.cli import compose, main
from configs.process import ending_with_this
from data.files import UserError, write_bytes
from scripts.records import commit, finished
from scripts.reproduce import Job, end_with_failures, train_all, work
from training.packed import find, packed_folders
from training.provenance import ROOT
from training.runs import local_folders


def sweep(cfg: DictConfig) -> int:
    """The first rung: sweepers side by side that share one study; gives how many of them failed."""
    count = cfg.processes or torch.cuda.device_count() or os.cpu_count() or 1
    runs = Path(cfg.results, "runs")
    Path(cfg.results).mkdir(parents=True, exist_ok=True)  # for the study's database
    left = cfg.trials - len(rung(runs, 0, cfg))
    study = f"hydra.sweeper.storage=sqlite:///{cfg.results}/search.db"
    given = [study, f"runs={runs}", f"wandb.mode={cfg.wandb}", f"wandb.dir={cfg.results}"]
    environment = ending_with_this() | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
    sweepers = []
    for i in range(count):
        trials = max(0, left) // count + (i < max(0, left) % count)
        if trials:
            line = [
                sys.executable,
                str(ROOT / "train.py"),
                "-m",
                "experiment=search",
                f"hydra.sweeper.n_trials={trials}",
                *given,
            ]
            sweepers.append(subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL))
    return sum(sweeper.wait() != 0 for sweeper in sweepers)


def steps_of(number: int, cfg: DictConfig) -> int:
    return compose(["experiment=search"]).train.steps * cfg.longer**number


def rung(runs: Path, number: int, cfg: DictConfig) -> list[dict]:
    """The finished runs of a rung, the best first."""
    steps = steps_of(number, cfg)
    folders = sorted(local_folders(runs / "search") | packed_folders(runs / "search"))
    found = [summary for summary in map(finished, map(find, folders)) if summary and summary["steps"] == steps]
    return sorted(found, key=lambda summary: summary["evaluation"]["fit"]["loss"])


def next_rung(best: list[dict], number: int, cfg: DictConfig) -> list[Job]:
    """The runs of these forms at the next rung's length."""
    jobs, steps = [], steps_of(number, cfg)
    for summary in best:
        words = [word for word in shlex.split(summary["command"])[2:] if word.startswith("attn.")]
        given = ("experiment=search", *words, f"train.steps={steps}")
        composed = compose(list(given))
        record = find(Path(cfg.results, "runs/search", composed.job.name))
        if finished(record) is None:
            jobs.append(Job(given, frozenset(), record, work(composed)))
    return jobs


def report(runs: Path, cfg: DictConfig) -> str:
    """Every rung as a table, the best first."""
    parts = ["# The search over R, W and V", ""]
    for number in range(cfg.rungs):
        found = rung(runs, number, cfg)
        rows = [
            [
                form(summary),
                *(f"{summary['evaluation'][text]['perplexity']:.2f}" for text in ("fit", "heldout")),
                f"{summary['parameters']:,}",
            ]
            for summary in found
        ]
        heads = ["form", "fit perplexity", "held-out", "parameters"]
        table = tabulate(rows, heads, "github", colalign=["left", *["right"] * 3], disable_numparse=True)
        parts += [f"## {steps_of(number, cfg)} steps: {len(found)} forms", "", table, ""]
    first = rung(runs, 0, cfg)[0]
    parts += [
        f"One seed each; corpus {first['data']['name']}, vocabulary {first['data']['vocabulary']:,}, sha256 "
        f"{first['data']['sha256'][:12]}; {first['device']}; commit {commit(first)}; `python scripts/search.py`. "
        "A form that led here is a candidate, not a result: claim best_form compares the first few with AFT.",
        "",
    ]
    return "\n".join(parts)


def form(summary: dict) -> str:
    """What sets a form apart from the named AFT, which is attn=rwv as it stands."""
    differences = summary["name"].removeprefix("rwv").removesuffix(f"-seed{summary['seed']}").split("-")
    return ", ".join(part for part in differences if part and not part.startswith("steps=")) or "AFT"


@main("search")
def run(cfg: DictConfig) -> None:
    runs = Path(cfg.results, "runs")
    failed = sweep(cfg)
    for number in range(1, cfg.rungs):
        last = rung(runs, number - 1, cfg)
        if not last:
            raise UserError(f"no run of {steps_of(number - 1, cfg)} steps came to its end: nothing to go on with")
        jobs = next_rung(last[: max(1, round(len(last) * cfg.keep))], number, cfg)
        if jobs:
            failed += train_all(jobs, cfg, "cpu" if not torch.cuda.is_available() else "full", math.inf)
    write_bytes(Path(cfg.results, "search.md"), report(runs, cfg).encode())
    print(f"written to {cfg.results}/search.md")
    end_with_failures(failed)


if __name__ == "__main__":
    run()
