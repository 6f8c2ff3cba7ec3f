"""python scripts/torture.py: kill runs, flip their bits, feed them rubbish, and say what was lost.

What is done stands in scripts/faults: functions that yield, fault by fault, what was lost by it, or None.
Writes out/torture.json, where each kind has the commit that it was tried at, and from it alone
out/torture.md; only=[starve] tries some kinds anew. Ends with an error where something was lost.
"""

import multiprocessing
import random
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import configs.startup

import datasets  # noqa: F401, here once and not in every fork
import torch
import wandb  # noqa: F401
from omegaconf import DictConfig
from tabulate import tabulate

from configs.arguments import command_line
from configs.cli import main
from data.files import UserError, write_bytes, write_json
from data.record import provenance, read_object
from scripts.faults.caches import caches
from scripts.faults.folders import folders
from scripts.faults.harm import cuts, states, weights
from scripts.faults.kills import kills, ranks, signals, sweeps
from scripts.faults.links import links
from scripts.faults.locales import locales
from scripts.faults.numbers import blowing_up, twice, twice_compiled
from scripts.faults.parents import parents
from scripts.faults.power import power_cuts
from scripts.faults.rivals import rivals
from scripts.faults.rubbish import corpora, overrides
from scripts.faults.small import Untried
from scripts.faults.starve import disks, starve
from scripts.faults.threads import threads
from scripts.records import commit

KINDS = {
    f.__name__: f
    for f in (
        kills,
        signals,
        sweeps,
        ranks,
        parents,
        rivals,
        power_cuts,
        links,
        locales,
        caches,
        threads,
        disks,
        starve,
        states,
        weights,
        cuts,
        folders,
        corpora,
        overrides,
        blowing_up,
        twice,
        twice_compiled,
    )
}


ALIGNED = ("left", "left", "right", "right", "left")


def page(record: dict) -> str:
    """results/torture.md, from the record."""
    rows, origins = [], []
    for kind, found in sorted(record["kinds"].items(), key=lambda item: list(KINDS).index(item[0])):
        origin = found["provenance"]
        what = " ".join(KINDS[kind].__doc__.split())
        lost = str(len(found["lost"])) if found["lost"] else "nothing"
        rows.append([kind, what, f"{found['tried']:,}", lost, commit(origin)])
        origins.append(
            f"- {commit(origin)}: {origin['device']}, torch {origin['versions']['torch']}; seed {found['seed']}; "
            f"`{origin['command']}`."
        )
    lost = [f"- {one}" for found in record["kinds"].values() for one in found["lost"]]
    where = [
        f"- Where the {kind} fell: {', '.join(f'{what} {count:,}' for what, count in found['where'].items() if count)}."
        for kind, found in record["kinds"].items()
        if found["where"]
    ]
    untried = [f"- {one}" for found in record["kinds"].values() for one in found["untried"]]
    return "\n".join(
        [
            "# Faults, and what they cost",
            "",
            tabulate(rows, ["", "", "tried", "lost", "commit"], "github", colalign=ALIGNED, disable_numparse=True),
            "",
            *lost,
            *where,
            *untried,
            *dict.fromkeys(origins),
            "",
        ]
    )


def outcome(faults: Iterator[str | None]) -> dict:
    """How many faults were tried, what was lost, what could not be tried; and where they fell, if their kind tells."""
    tried, lost, untried = 0, [], []
    while True:
        try:
            one = next(faults)
        except StopIteration as end:
            return {"tried": tried, "lost": lost, "untried": untried, "where": end.value or {}}
        if isinstance(one, Untried):
            untried.append(one)
            continue
        tried += 1
        lost += [one] * bool(one)


def suffer(cfg: DictConfig, name: str) -> dict:
    """What comes of one kind of faults, of which the config says how many; none of them is run for 0."""
    with tempfile.TemporaryDirectory() as folder:
        return outcome(KINDS[name](cfg, Path(folder), random.Random(cfg.seed)) if cfg[name] else iter(()))


@main("torture")
def run(cfg: DictConfig) -> None:
    torch.set_num_threads(1)  # a fork has but one thread
    unknown = [name for name in cfg.only or () if name not in KINDS]
    if unknown:
        raise UserError(f"only is a list of {', '.join(KINDS)}: got {unknown[0]}")
    command = command_line("python scripts/torture.py", sys.argv[1:])
    origin = {"seed": cfg.seed, "provenance": provenance(torch.device("cpu"), command)}
    path, chosen = Path(cfg.out).with_suffix(".json"), cfg.only or KINDS
    record = read_object(path) if cfg.only and path.exists() else {"kinds": {}}
    with ProcessPoolExecutor(cfg.jobs, multiprocessing.get_context("fork")) as pool:
        for name, found in zip(chosen, pool.map(partial(suffer, cfg), chosen), strict=True):
            record["kinds"][name] = found | origin
            print(f"{name}: {found['tried']:,} tried, {len(found['lost'])} lost", flush=True)
    write_json(path, record)
    write_bytes(path.with_suffix(".md"), page(record).encode())
    print(f"written to {cfg.out}.md")
    if any(record["kinds"][name]["lost"] for name in chosen):
        raise UserError("something was lost")


if __name__ == "__main__":
    run()
