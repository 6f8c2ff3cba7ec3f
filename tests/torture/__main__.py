"""python -m tests.torture: interrupt runs, damage their files and give them bad input, and report what was lost.

Each kind of fault is a generator in tests/torture that yields each fault and a list of what was lost because of it.
Anything else that went wrong, such as a traceback in the output, is in this list too and counts as lost.
The results are written to out/torture.json, with the commit at which each kind was tried, and out/torture.md shows them
as a page. only=[lacks] tries the faults of the kind `lacks` again and keeps the results of the other kinds. The command
ends with an error if something was lost.
"""

import multiprocessing
import random
import sys
import tempfile
import traceback
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import configs.startup

import torch
from omegaconf import DictConfig
from tabulate import tabulate

from configs.arguments import command_line
from configs.cli import main
from data.files import UserError, write_bytes, write_json
from data.reading import read_object
from scripts.reporting.markdown import commit
from tests.torture.forks import Fault
from tests.torture.harm import harms
from tests.torture.interrupts import interrupts
from tests.torture.lacks import lacks
from tests.torture.parents import parents
from tests.torture.rubbish import corpora, numbers, overrides
from training.provenance import provenance

KINDS = {f.__name__: f for f in (interrupts, parents, harms, corpora, overrides, lacks, numbers)}
MENDED = Path(__file__).parent / "mended.md"


def page(record: dict) -> str:
    """Return the page of the record."""
    rows, below = [], {}
    for kind, found in record["kinds"].items():
        origin, what = found["provenance"], " ".join(KINDS[kind].__doc__.split())
        rows.append([kind, what, f"{found['tried']:,}", len(found["lost"]) or "nothing", commit(origin)])
        below |= dict.fromkeys(f"- Lost: {one}" for one in found["lost"])
        below |= dict.fromkeys(f"- Not tried: {one}" for one in found["untried"])
        below[f"- {commit(origin)}: {origin['device']}, seed {found['seed']}; `{origin['command']}`."] = None
    head = ["", "", "tried", "lost", "commit"]
    table = tabulate(rows, head, "github", colalign=("left", "left", "right", "right", "left"), disable_numparse=True)
    mended = ["## Defects that such faults uncovered, and how they were mended", "", MENDED.read_text(encoding="utf-8")]
    return "\n".join(["# Faults, and what was lost", "", table, "", *below, "", *mended])


def outcome(faults: Iterable[Fault]) -> dict:
    """Try the faults. Return how many were tried, what was lost, and what could not be tried."""
    tried, lost, untried = 0, [], []
    try:
        for fault in faults:
            line = f"{fault.name}: {'; '.join(fault.lost)}"
            tried += fault.tried
            if fault.lost:
                (lost if fault.tried else untried).append(line)
                print(line, flush=True)
    except Exception as error:  # the other faults of this kind are then not tried
        traceback.print_exc()
        lost.append(f"after {tried} faults: {type(error).__name__}: {error}")
    return {"tried": tried, "lost": lost, "untried": untried}


def try_kind(cfg: DictConfig, name: str) -> dict:
    """Try as many faults of one kind as the config says, and return their outcome."""
    with tempfile.TemporaryDirectory() as folder:
        return outcome(KINDS[name](cfg, Path(folder), random.Random(cfg.seed)) if cfg[name] else ())


@main("torture")
def run(cfg: DictConfig) -> None:
    torch.set_num_threads(1)  # forks copy only one thread
    if unknown := [name for name in cfg.only or () if name not in KINDS]:
        raise UserError(f"only must be a list of some of {', '.join(KINDS)}: got {unknown[0]}")
    command = command_line("python -m tests.torture", sys.argv[1:])
    origin = {"seed": cfg.seed, "provenance": provenance(torch.device("cpu"), command)}
    path, chosen = Path(cfg.out).with_suffix(".json"), cfg.only or KINDS
    record = read_object(path) if cfg.only and path.exists() else {"kinds": {}}
    if not isinstance(record.get("kinds"), dict) or not record["kinds"].keys() <= KINDS.keys():
        raise UserError(f"{path} is damaged, or has kinds of fault that no longer exist: remove it")
    with ProcessPoolExecutor(cfg.jobs, multiprocessing.get_context("fork")) as pool:
        for name, found in zip(chosen, pool.map(partial(try_kind, cfg), chosen), strict=True):
            record["kinds"][name] = found | origin
            print(f"{name}: {found['tried']:,} tried, {len(found['lost'])} lost", flush=True)
    write_json(path, record)
    write_bytes(path.with_suffix(".md"), page(record).encode())
    print(f"written to {path.with_suffix('.md')}")
    if any(record["kinds"][name]["lost"] for name in chosen):
        raise UserError("something was lost")


if __name__ == "__main__":
    run()
