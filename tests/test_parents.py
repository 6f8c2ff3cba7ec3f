"""Kill the first process of commands that train in child processes."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from configs.cli import compose
from scripts.studies.runner import Job, end_with_failures, train_all
from tests.conftest import ROOT
from tests.helpers.runs import assert_the_same
from train import train
from training.record import Record

pytestmark = pytest.mark.slow

HANG = 120  # seconds after which a command counts as hanging
SOON = 20  # seconds within which the children must end after their parent was killed
MARK = "RWV_PARENT"  # environment variable that marks all processes of a command
COMMANDS = {
    "joblib": ["train.py", "-m", "hydra/launcher=joblib", "seed=0,1"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"],
    "reproduce": ["-m", "tests.test_parents"],
}


@pytest.fixture
def processes(tmp_path):
    """Return a function that lists the processes of the commands of a test. At its end, kill those that are left."""

    def those() -> list[psutil.Process]:
        found = psutil.process_iter(["environ"])
        return [process for process in found if (process.info["environ"] or {}).get(MARK) == str(tmp_path)]

    yield those
    for process in those():
        process.kill()


@pytest.mark.parametrize(("name", "rows"), [("joblib", 20), ("torchrun", 2), ("reproduce", 30)])
def test_children_end_with_their_parent_and_the_same_command_completes_the_runs(tiny, tmp_path, processes, name, rows):
    """Runs are trained by joblib, by torchrun or as scripts.reproduce does.

    The parent is killed when each run that has begun has logged `rows` rows of 60.
    """
    if name == "joblib":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    runs, whole = tmp_path / "runs", tmp_path / "whole/runs"
    whole.parent.mkdir()
    longer = [*tiny, "train.steps=60", "train.checkpoint_seconds=0"]
    line = [*COMMANDS[name], *longer]
    if name == "torchrun":  # two processes that share a batch round differently from one
        assert start(tmp_path, whole, [*line, f"runs={whole}"]).wait(timeout=HANG) == 0, output(whole)
    else:
        for seed in (0, 1):
            train(compose([*longer, f"runs={whole}", f"seed={seed}"]))
    command, deadline = start(tmp_path, runs, line), time.monotonic() + HANG
    while min((written.count(b"\n") for written in logged(runs)), default=0) < rows:
        assert command.poll() is None, output(runs)
        if time.monotonic() > deadline:
            pytest.fail(f"the command hangs: {output(runs)}")
        time.sleep(0.001)
    command.kill()
    command.wait()
    _, alive = psutil.wait_procs(processes(), timeout=SOON)
    assert not alive
    assert start(tmp_path, runs, line).wait(timeout=HANG) == 0, output(runs)
    folders = sorted(path.parent for path in whole.glob("*/*/model.safetensors"))
    assert len(folders) == (1 if name == "torchrun" else 2)
    for folder in folders:
        assert_the_same(runs / folder.relative_to(whole), folder)
    assert not list(runs.rglob(".*"))  # nothing is left over


def start(tmp_path: Path, runs: Path, line: list[str]) -> subprocess.Popen:
    """Start a command that writes its runs into `runs`, and its output into a file beside this folder."""
    with open(runs.with_suffix(".output"), "w", encoding="utf-8") as written:
        environment = os.environ | {MARK: str(tmp_path)}
        return subprocess.Popen([sys.executable, *line], cwd=ROOT, env=environment, stdout=written, stderr=written)


def output(runs: Path) -> str:
    return runs.with_suffix(".output").read_text("utf-8", "replace")


def logged(runs: Path) -> list[bytes]:
    """Return metrics.jsonl of each run that has begun."""
    return [path.read_bytes() for path in runs.glob("*/*/metrics.jsonl")]


def reproduce(line: list[str]) -> None:
    """Train two small runs as scripts.reproduce trains its runs."""
    lines = [[*line, f"seed={seed}"] for seed in (0, 1)]
    jobs = [Job(tuple(one), Record.of(compose(one)), 1) for one in lines]
    cfg = SimpleNamespace(processes=2, results=str(Path(compose(line).runs).parent), wandb="disabled")
    end_with_failures(train_all(jobs, cfg, time.monotonic() + HANG))


if __name__ == "__main__":
    reproduce(sys.argv[1:])
