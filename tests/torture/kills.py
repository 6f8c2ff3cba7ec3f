"""Runs, sweeps and one of two processes that are killed or stopped, and go on."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

import train
from data.files import UserError
from scripts import compare
from tests.torture.moments import ANYWHERE, BETWEEN, PARTS, STRUCK, TABLE, blow, undisturbed
from tests.torture.small import HANG, given, in_a_fork, write_text
from training.provenance import ROOT
from training.record import Record

WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
TIMED = ("seconds", "tokens_per_second")
OF_A_RUN = [what for what in PARTS if what not in (TABLE, BETWEEN)]
LONGER = ["train.steps=60", "evaluation.every=15"]  # a run that can be watched
SOON = 20  # seconds in which a process ends when another one of its run is killed

Task = Callable[[Path], object]  # what is done in a folder


def kills(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A run killed in each of its parts, or anywhere, goes on, sometimes to be killed again, and ends as if it never
    was; so does the comparison table."""
    run, table = folder / "run", folder / "table"
    moments = undisturbed(partial(one_run, fresh(run)), OF_A_RUN)
    moments |= {TABLE: undisturbed(partial(write_table, fresh(table)), [TABLE])[TABLE]}
    fell = dict.fromkeys(moments, 0)
    for number in range(cfg.kills):
        what, place = list(moments)[number % len(moments)], folder / str(number)
        task, whole = (write_table, table) if what == TABLE else (one_run, run)
        status, said = struck(task, place, what, moments, signal.SIGKILL, rng)
        fell[what] += 1
        lost = [] if status == -signal.SIGKILL else [f"exit status {status}: {said[-300:]}"]
        lost += [f"{page.name} is half written" for page in tables(place) if not same(page, place, whole)]
        if rng.random() < 0.3:
            blow(partial(task, place), ANYWHERE, moments, signal.SIGKILL, rng)
        lost += again(task, place, whole)
        yield f"kill {number}, in {what}: {'; '.join(lost)}" if lost else None
        shutil.rmtree(place)
    return fell


def signals(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A run stopped by SIGTERM or Ctrl-C in each of its parts, or anywhere, says so and finishes wandb; it goes on,
    and ends as if nobody had stopped it."""
    whole = fresh(folder / "whole")
    moments = undisturbed(partial(one_run, whole), OF_A_RUN)
    fell = dict.fromkeys(moments, 0)
    for number in range(cfg.signals):
        what, place = list(moments)[number % len(moments)], folder / str(number)
        sent = rng.choice([signal.SIGTERM, signal.SIGINT])
        status, said = struck(one_run, place, what, moments, sent, rng)
        fell[what] += 1
        lost = []
        if status != 128 + sent or "Traceback" in said:
            lost.append(f"exit status {status}: {said[-300:]}")
        exits = [0 if "the run is finished" in said else 128 + sent]
        lost += [f"wandb's exit status is {m['exits']}" for m in mirrors(place) if m["exits"] != exits]
        lost += again(one_run, place, whole)
        yield f"{sent.name} {number}, in {what}: {'; '.join(lost)}" if lost else None
        shutil.rmtree(place)
    return fell


def sweeps(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A sweep killed between its runs, in each part of a run, or anywhere, is finished by the same command, and each
    run ends as if it never was."""
    whole = fresh(folder / "whole")
    moments = undisturbed(partial(one_sweep, whole), [BETWEEN, *OF_A_RUN])
    fell = dict.fromkeys(moments, 0)
    for number in range(cfg.sweeps):
        what, place = list(moments)[number % len(moments)], folder / str(number)
        status, said = struck(one_sweep, place, what, moments, signal.SIGKILL, rng)
        fell[what] += 1
        lost = [] if status == -signal.SIGKILL else [f"exit status {status}: {said[-300:]}"]
        lost += again(one_sweep, place, whole)
        yield f"sweep {number}, killed in {what}: {'; '.join(lost)}" if lost else None
        shutil.rmtree(place)
    return fell


def ranks(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """Of a run's two processes, over gloo and started by torchrun, one is killed at a random step: the other ends
    soon, torchrun fails, and the same command ends the run as if neither was."""
    whole = fresh(folder / "whole")
    lost = again(two_processes, whole, whole)
    if lost:
        raise UserError(f"a run of two processes that nobody disturbs fails: {'; '.join(lost)}")
    for number in range(cfg.ranks):
        place, rank, rows = fresh(folder / str(number)), rng.randrange(2), rng.randint(1, 50)
        lost = [*one_killed(place, rank, rows), *again(two_processes, place, whole)]
        yield f"process {rank}, killed after step {rows}: {'; '.join(lost)}" if lost else None
        shutil.rmtree(place)


def one_killed(place: Path, rank: int, rows: int) -> list[str]:
    """Kill one of two processes once the first has logged so many rows: what is wrong with how the other ends."""
    with open(place / "said", "w", encoding="utf-8") as said:
        run = subprocess.Popen(torchrun(place), cwd=ROOT, stdout=said, stderr=said)
    try:
        deadline = time.monotonic() + HANG
        while logged(place) < rows:
            if run.poll() is not None or time.monotonic() > deadline:
                return [f"it does not come to step {rows}: {(place / 'said').read_text(errors='replace')[-300:]}"]
            time.sleep(0.001)
        os.kill(processes(place)[rank], signal.SIGKILL)
        status = run.wait(timeout=SOON)
        left = [f"process {rank} lives on" for rank in processes(place)]
        return left if status else [*left, "torchrun tells of no failure"]
    except subprocess.TimeoutExpired:
        return [f"it has not ended after {SOON} seconds"]
    finally:
        for process in (*processes(place).values(), run.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        run.wait()


# What is done in a folder


def one_run(place: Path, *more: str) -> None:
    typed(train, *given(place, *more))


def one_sweep(place: Path) -> None:
    typed(train, "-m", "attn=aft,mha", *given(place))


def write_table(place: Path) -> None:
    typed(compare, "runs=null", f"out={place}/table")


def two_processes(place: Path) -> None:
    sys.exit(subprocess.run(torchrun(place), cwd=ROOT).returncode)


def torchrun(place: Path) -> list[str]:
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"]
    return [*line, *given(place, *LONGER)]


def typed(script: ModuleType, *arguments: str) -> None:
    """What a command line does, in a process that has imported all it needs."""
    GlobalHydra.instance().clear()
    sys.argv[1:] = arguments
    script.run()


def fresh(place: Path) -> Path:
    """A folder with nothing but a text."""
    shutil.rmtree(place, ignore_errors=True)
    write_text(place)
    return place


def struck(
    task: Task, place: Path, what: str, moments: dict[str, float], sent: signal.Signals, rng: random.Random
) -> tuple[int, str]:
    """Begin a task anew until a signal strikes it before its end: its exit status, and what it printed."""
    while True:
        status, said = blow(partial(task, fresh(place)), what, moments, sent, rng)
        if status or STRUCK in said:
            return status, said


# What came of it


def again(task: Task, place: Path, whole: Path) -> list[str]:
    """Do a task once more: how it fails, or in what it differs from the one that was not disturbed."""
    status, said = in_a_fork(partial(task, place))
    return [f"then exit status {status}: {said[-300:]}"] if status else what_differs(place, whole)


def what_differs(folder: Path, whole: Path) -> list[str]:
    """In what runs and tables differ from those that were never stopped, and what lies about."""
    files = [*tables(whole), *(path.relative_to(whole) for path in whole.glob("cache/*/*.bin"))]
    found = [f"{file.name} differs" for file in files if not same(file, folder, whole)]
    records, references = ([Record(run) for run in sorted(place.glob("runs/*/*/"))] for place in (folder, whole))
    if len(records) != len(references):
        return [f"{len(records)} runs have a record"]
    steps = []
    for record, reference in zip(records, references, strict=True):
        for name in ("model.safetensors", "text.safetensors", "vocabulary.json"):
            if not same(name, record.folder, reference.folder):
                found.append(f"{name} differs")
        rows, expected = ([untimed(row) for row in r.rows()] for r in (record, reference))
        if rows != expected:
            found.append("metrics.jsonl differs")
        results = (untimed((r.finished() or {"evaluation": {}})["evaluation"]) for r in (record, reference))
        if next(results) != next(results):
            found.append("the final evaluation differs")
        steps.append((record.folder.name, [row["step"] for row in expected]))
        names = {path.name for path in record.folder.iterdir()} - {path.name for path in reference.folder.iterdir()}
        found += [f"{name} is left behind" for name in sorted(names)]
    if [(mirror["name"], mirror["steps"]) for mirror in mirrors(folder)] != steps:
        found.append("wandb's history differs")
    left = {path.name for kind in (".*", "*.tmp", "*.work") for path in folder.rglob(kind)}
    return found + [f"{name} is left behind" for name in sorted(left)]


def untimed(figures: dict) -> dict:
    """Without what a clock put into them."""
    return {key: value for key, value in figures.items() if key not in TIMED}


def same(name: Path, folder: Path, other: Path) -> bool:
    """Whether a file is there, and the same, in both folders."""
    one, two = (place / name for place in (folder, other))
    return one.exists() and two.exists() and one.read_bytes() == two.read_bytes()


def tables(folder: Path) -> list[Path]:
    """The files of the comparison table, within a folder."""
    return [path.relative_to(folder) for path in sorted(folder.glob("table/table.*"))]


def logged(folder: Path) -> int:
    """How many rows a run has logged."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("runs/*/*/metrics.jsonl"))


def processes(folder: Path) -> dict[int, int]:
    """Those that torchrun has started for the run in a folder, by rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            rank = re.search(rb"\0RANK=(\d+)", (process / "environ").read_bytes())
            if rank and f"runs={folder}/runs".encode() in (process / "cmdline").read_bytes():
                found[int(rank[1])] = int(process.name)
    return found


def mirrors(folder: Path) -> list[dict]:
    """Of each run that wandb knows of, by name: the steps in its history, and its exit statuses."""
    found = []
    for log in folder.glob("wandb/offline-run-*/*.wandb"):
        wandb = Path(sys.executable).with_name("wandb")
        printed = subprocess.run([wandb, "leet", "inspect", "--json", log], capture_output=True, text=True, check=True)
        records = [json.loads(line) for line in printed.stdout.splitlines()]
        steps = [r["history"]["item"]["_step"] for r in records if r["type"] == "history"]
        exits = [r["exit"].get("exit_code", 0) for r in records if r["type"] == "exit"]
        names = [r["run"]["display_name"] for r in records if r["type"] == "run"]
        found.append({"name": names[0], "steps": steps, "exits": exits})
    return sorted(found, key=lambda mirror: mirror["name"])


def opens_to_write(event: str, arguments: tuple) -> bool:
    """Whether an event of an audit hook is that of a file that is opened to be written to."""
    return event == "open" and isinstance(arguments[1], str) and bool(set(arguments[1]) & set("wxa+"))


def killed_at_write(number: int) -> Callable[[], None]:
    """SIGKILL before this process opens, renames or removes its `number`th file."""
    left = number

    def look(event: str, arguments: tuple) -> None:
        nonlocal left
        left -= event in WRITES or opens_to_write(event, arguments)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(look)
