"""Commands that start others, and are killed."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from omegaconf import DictConfig

from configs.cli import compose
from data.files import UserError
from scripts.studies.runner import Job, end_with_failures, train_all
from tests.torture.kills import LONGER, SOON, fresh, torchrun, what_differs
from tests.torture.small import HANG, Untried, given
from training.provenance import ROOT
from training.record import Record

MARK = "RWV_TORTURE"  # in the environment of all processes that a command starts
SEEDS = (0, 1)


def parents(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """The parent of runs, a sweep with joblib, torchrun or the trainer of reproduce.py, is killed in the midst of them:
    its children end soon, and the same command ends the runs as if nothing had been."""
    lines = {"joblib": joblib, "torchrun": torchrun, "reproduce": reproduce}
    wholes, fell = {}, dict.fromkeys(lines, 0)
    for number in range(cfg.parents):
        name = list(lines)[number % len(lines)]
        if name == "joblib" and find_spec("hydra_plugins.hydra_joblib_launcher") is None:
            yield Untried(f"parent {number}: requirements-extra.txt, and joblib with it, is not installed")
            continue
        if name not in wholes:
            wholes[name] = fresh(folder / name)
            if lost := finished(lines[name](wholes[name]), wholes[name], wholes[name]):
                raise UserError(f"{name} that nobody disturbs: {'; '.join(lost)}")
        fell[name] += 1
        place = fresh(folder / str(number))
        line = lines[name](place)
        lost = killed(line, place, rng) + finished(line, place, wholes[name])
        yield f"parent {number}, {name}: {'; '.join(lost)}" if lost else None
        shutil.rmtree(place)
    return fell


def joblib(place: Path) -> list[str]:
    line = [sys.executable, "train.py", "-m", "hydra/launcher=joblib", f"seed={','.join(map(str, SEEDS))}"]
    return [*line, *given(place, *LONGER)]


def reproduce(place: Path) -> list[str]:
    return [sys.executable, "-m", "tests.torture.parents", str(place)]


def killed(line: list[str], place: Path, rng: random.Random) -> list[str]:
    """Kill a command once its runs have logged some rows: which of its children live on, or hold a run."""
    command, rows = start(line, place), rng.randint(2, 30)
    deadline = time.monotonic() + HANG
    while fewest_rows(place) < rows and command.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    alive = command.poll() is None
    command.kill()
    command.wait()
    if not alive:
        return [f"it ended before it could be killed: {(place / 'said').read_text('utf-8', 'replace')[-300:]}"]
    deadline = time.monotonic() + SOON
    while (left := descendants(place)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return [f"{len(left)} of its children live on"] * bool(left)


def finished(line: list[str], place: Path, whole: Path) -> list[str]:
    """Do it once more: how it fails, or in what it differs from the one that was not disturbed."""
    try:
        status = start(line, place).wait(timeout=HANG)
    except subprocess.TimeoutExpired:
        return ["it hangs"]
    if status:
        return [f"exit status {status}: {(place / 'said').read_text('utf-8', 'replace')[-300:]}"]
    return [one for one in what_differs(place, whole) if "wandb" not in one]


def start(line: list[str], place: Path) -> subprocess.Popen:
    environment = os.environ | {MARK: str(place), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    with open(place / "said", "w", encoding="utf-8") as said:
        return subprocess.Popen(line, cwd=ROOT, env=environment, stdout=said, stderr=said)


def fewest_rows(place: Path) -> int:
    """Rows that each of a command's runs has logged."""
    logged = [path.read_bytes().count(b"\n") for path in place.glob("runs/*/*/metrics.jsonl")]
    return min(logged, default=0)


def descendants(place: Path) -> list[int]:
    """The processes that a command has started and that still do something."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={place}\0".encode() in (process / "environ").read_bytes() + b"\0":
                found.append(int(process.name))
    return found


def main(place: Path) -> None:
    """What scripts.reproduce does with its runs, with small ones."""
    lines = [given(place, *LONGER, f"seed={seed}") for seed in SEEDS]
    jobs = [Job(tuple(line), Record.of(compose(line)), 1) for line in lines]
    cfg = SimpleNamespace(processes=2, results=str(place), wandb="disabled")
    end_with_failures(train_all(jobs, cfg, time.monotonic() + HANG))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
