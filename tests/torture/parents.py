"""Kill the first process of commands that train in child processes."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
from omegaconf import DictConfig

from configs.cli import compose
from scripts.studies.runner import Job, end_with_failures, train_all
from tests.torture.forks import HANG, Fault, failed
from tests.torture.runs import UNMIRRORED, fresh, given, what_differs
from training.provenance import ROOT
from training.record import Record

LONGER = ["train.steps=60", "evaluation.every=15", UNMIRRORED]  # a run that is long enough to be killed midway
SOON = 20  # seconds within which the children must end after their parent was killed
MARK = "RWV_TORTURE"  # environment variable that marks all processes of a command
COMMANDS = {
    "joblib": ["train.py", "-m", "hydra/launcher=joblib", "seed=0,1"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"],
    "reproduce": ["-m", "tests.torture.parents"],
}


def parents(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[Fault]:
    """Runs are trained in child processes by joblib, by torchrun or as scripts.reproduce does, and the parent process
    is killed. Its children end within seconds, and the same command then completes the runs, with the results of
    undisturbed ones."""
    for number in range(cfg.parents):
        name, place = list(COMMANDS)[number % len(COMMANDS)], folder / str(number)
        if name == "joblib" and not has_joblib_launcher():
            yield Fault(
                f"parent {number}", ["hydra-joblib-launcher, of requirements-extra.txt, is not installed"], tried=False
            )
            continue
        whole = folder / name
        lost = [] if whole.exists() else complete(name, fresh(whole), whole)
        yield Fault(f"parent {number}, {name}", lost or killed(name, fresh(place), whole, rng.randint(2, 30)))


def has_joblib_launcher() -> bool:
    try:
        return find_spec("hydra_plugins.hydra_joblib_launcher") is not None
    except ModuleNotFoundError:  # there is no plugin of Hydra at all
        return False


def start(name: str, place: Path) -> subprocess.Popen:
    environment = os.environ | {MARK: str(place), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, *COMMANDS[name], *given(place, *LONGER)]
    with open(place / "output", "w", encoding="utf-8") as output:
        return subprocess.Popen(line, cwd=ROOT, env=environment, stdout=output, stderr=output)


def complete(name: str, place: Path, whole: Path) -> list[str]:
    """Run the command to its end. Return how it failed, or how its results differ from those in `whole`."""
    command = start(name, place)
    try:
        status = command.wait(timeout=HANG)
    except subprocess.TimeoutExpired:
        command.kill()
        return [f"the command did not end within {HANG} s"]
    return failed(status, (place / "output").read_text("utf-8", "replace")) or what_differs(place, whole)


def killed(name: str, place: Path, whole: Path, rows: int) -> list[str]:
    """Kill a command's first process once each run that it has begun has logged `rows` rows, then repeat the command.

    Returns what was lost, including how many child processes outlived their parent.
    """
    command, deadline = start(name, place), time.monotonic() + HANG
    while command.poll() is None and time.monotonic() < deadline:
        logged = [path.read_bytes().count(b"\n") for path in place.glob("runs/*/*/metrics.jsonl")]
        if min(logged, default=0) >= rows:
            break
        time.sleep(0.001)
    ended, hangs = command.poll() is not None, time.monotonic() >= deadline
    lost = [f"the command {'ended' if ended else 'hung'} before step {rows}, at which it was to be killed"]
    lost *= ended or hangs
    command.kill()
    command.wait()
    found = psutil.process_iter(["environ"])
    children = [process for process in found if (process.info["environ"] or {}).get(MARK) == str(place)]
    _, alive = psutil.wait_procs(children, timeout=SOON)
    for process in alive:
        process.kill()
    return lost + [f"{len(alive)} child processes outlived their parent"] * bool(alive) + complete(name, place, whole)


def reproduce(line: list[str]) -> None:
    """Train two small runs as scripts.reproduce trains its runs."""
    lines = [[*line, f"seed={seed}"] for seed in (0, 1)]
    jobs = [Job(tuple(one), Record.of(compose(one)), 1) for one in lines]
    cfg = SimpleNamespace(processes=2, results=str(Path(compose(line).runs).parent), wandb="disabled")
    end_with_failures(train_all(jobs, cfg, time.monotonic() + HANG))


if __name__ == "__main__":
    reproduce(sys.argv[1:])
