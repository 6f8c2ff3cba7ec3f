"""Records whose figures none can be, and metrics in which a power cut has left NULs."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from omegaconf import DictConfig

from scripts import list_runs
from tests.torture.folders import Case
from tests.torture.harm import finished, half_done
from tests.torture.small import fell

WILD = [None, True, -1, 0, 1, 1e5, float("nan"), float("inf"), 10**400, -(10**400), "x", "", [], [1], {}, {"fit": 1}]
CHANGED = ("summary.json", "metrics.jsonl", "config.yaml", "f.json")
READERS = ("compare", "dashboard", "list_runs", "evaluate")
LEFT = {  # what is left of a file's content, of which a power cut has made zeros
    "at its end": lambda whole, a, b: whole[:a] + bytes(len(whole) - a),
    "behind its end": lambda whole, a, b: whole + bytes(b - a),
    "in the midst": lambda whole, a, b: whole[:a] + bytes(b - a) + whole[b:],
    "alone": lambda whole, a, b: bytes(len(whole)),
}


def strangers(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A finished run with wild figures in its summary, metrics, config or f, and values that are no figures, is read
    by tables, plots, lists and pages, or refused in one line."""
    case = Case("whole", finished(folder / "whole"), folder / "whole")
    case.commands["list_runs"] = (list_runs.run, case.commands["compare"][1])
    where = dict.fromkeys(CHANGED, 0)
    for number in range(cfg.strangers):
        name, file = rng.choice(READERS), CHANGED[number % len(CHANGED)]
        where[file] += 1
        case.undisturbed(name)
        case.put_back()
        path, value = case.record.folder / file, rng.choice(WILD)
        key = changed(path, value, rng)
        (status, said), _ = case.outcome(name)
        wrong = fell(status, said)
        yield f"stranger {number}: {name}, {file} with {key}={value!r:.20}: {wrong}" if wrong else None
    return where


def changed(path: Path, value: object, rng: random.Random) -> str:
    """Put a value into a file in the place of another one: the name of that."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        lines = text.splitlines()
        at = rng.randrange(len(lines))
        content = json.loads(lines[at])
        key = put(content, value, rng)
        lines[at] = json.dumps(content)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return f"{key} of row {at}"
    content = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    key = put(content, value, rng)
    path.write_text(yaml.safe_dump(content) if path.suffix == ".yaml" else json.dumps(content), encoding="utf-8")
    return key


def put(content: dict | list, value: object, rng: random.Random) -> str:
    """Put a value into a tree in the place of a branch or leaf: its name."""
    key = rng.choice(list(content) if isinstance(content, dict) else range(len(content)))
    if isinstance(content[key], (dict, list)) and content[key] and rng.random() < 0.8:
        return f"{key}.{put(content[key], value, rng)}"
    content[key] = value
    return str(key)


def nuls(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A run's metrics in which a power cut has left NULs, at their end, behind it, in their midst or nothing else: the
    run goes on from its state and ends with the same weights, and a page shows it, or they are refused in one line."""
    case = Case("half", half_done(folder / "half"), folder / "half")
    where = dict.fromkeys(LEFT, 0)
    for number in range(cfg.nuls):
        how, name = list(LEFT)[number % len(LEFT)], "dashboard" if number % 5 == 4 else "train"
        where[how] += 1
        expected = case.undisturbed(name)
        case.put_back()
        whole = case.files["metrics.jsonl"]
        a, b = sorted(rng.sample(range(len(whole) + 1), 2))
        case.record.metrics.write_bytes(LEFT[how](whole, a, b))
        (status, said), got = case.outcome(name)
        wrong = fell(status, said)
        if not wrong and name == "train":
            refused = status and not (how == "in the midst" and re.search(r"metrics\.jsonl is damaged", said))
            wrong = f"it was refused: {said[-200:]}" if refused else None
            wrong = wrong or ("other weights, in silence" if status == 0 and got != expected else None)
        yield f"NULs {number}, {how}, {name}: {wrong}" if wrong else None
    return where
