"""python -m scripts.dashboard: show every run on one HTML page that needs neither an account nor a network.

The page is scripts/dashboard.html, into which plotly and the data of all runs below `runs` are inserted, compressed.
Unfinished runs are shown as far as they have come. Damaged records in folders are left out, and the page and standard
error name them.
"""

import base64
import gzip
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import configs.startup

import numpy as np
from omegaconf import DictConfig
from plotly.offline import get_plotlyjs

from configs.cli import main
from configs.folder import flat
from configs.naming import not_part_of_identity
from configs.process import without_controls
from data.files import UserError, write_bytes
from scripts.reporting.colours import COLOURS
from training.metrics import damaged, parse
from training.packed import find
from training.record import Record
from training.runs import last_written, name_and_seed, run_folders, status_text
from training.summaries import at, read_summary

TEMPLATE = Path(__file__).with_suffix(".html")
POINTS = 100  # the largest number of points of a curve
# With many runs, the largest number of points is ALL / (number of runs), but at least FEWEST.
FEWEST, ALL = 20, 30_000
IDENTITY = ("experiment", "name", "attn", "seed")
METRICS = ("fit_perplexity", "heldout_perplexity", "perplexity", "fit_accuracy", "heldout_accuracy")
AXES = ("step", "tokens", "seconds")
FIGURES = {  # column header: (place in the summary, decimal places)
    "fit perplexity": ("evaluation.fit.perplexity", 2),
    "held-out perplexity": ("evaluation.heldout.perplexity", 2),
    "best held-out perplexity": ("evaluation.heldout_best.perplexity", 2),
    "at step": ("evaluation.heldout_best.step", 0),
    "fit accuracy": ("evaluation.fit.accuracy", 4),
    "held-out accuracy": ("evaluation.heldout.accuracy", 4),
    "tokens/s": ("tokens_per_second", 0),
    "parameters": ("parameters", 0),
    "sliding perplexity": ("evaluation.sliding.perplexity", 2),
    "fit bits per character": ("evaluation.fit.bits_per_character", 4),
    "held-out bits per character": ("evaluation.heldout.bits_per_character", 4),
    "fit bits per byte": ("evaluation.fit.bits_per_byte", 4),
    "held-out bits per byte": ("evaluation.heldout.bits_per_byte", 4),
    "training seconds": ("training_seconds", 1),
    "FLOPs/step": ("flops_per_step", 0),
    "streaming state, bytes": ("state_bytes", 0),
}
# The first columns. The other figures, and the settings that differ, come after them.
FIRST = ["experiment", "name", *list(FIGURES)[:8], "date", "status", "seed", "attn"]
ACCURACIES = ("fit accuracy", "held-out accuracy")  # columns that exist only if there are runs on a synthetic text


@dataclass
class Run:
    """The parts of a record. A part that does not exist is empty or None."""

    record: Record
    config: dict  # flattened
    summary: dict
    date: str | None  # when the record was last written; None for packed runs
    step: int | None  # the last logged step
    curves: dict[str, dict[str, list]]  # {metric: {axis or "value": one number for each point}}
    f: dict | None  # for each head, the factor f of the position weight w (attn/README.md), by distance; None: none


def collect(runs: Path, start: Path) -> dict:
    """Return the data of the page for the runs below the folder `runs`, with links relative to the folder `start`.

    Raises UserError if there are no runs, only damaged ones, or a damaged packed file.
    """
    folders = run_folders(runs)
    found, unread, points = [], [], min(POINTS, max(FEWEST, ALL // len(folders)))
    for folder in folders:
        try:
            found.append(read(folder, points))
        except UserError as error:
            unread.append(str(error))
    if not found:
        raise UserError(f"no run in {runs} can be read: {unread[0]}")
    keys = differing([run.config for run in found])
    columns = dict.fromkeys([*FIRST, *FIGURES, *keys])
    rows = [shown(run, keys, start) for run in found]
    for label in ACCURACIES:
        if all(row["cells"][label] is None for row in rows):
            del columns[label]
    means = mean_rows(found, rows)
    for row in (*rows, *means):
        for part in ("cells", "deviations"):
            row[part] = [row[part].get(column) for column in columns] if part in row else None
    digits = {label: {"digits": number} for label, (_, number) in FIGURES.items()}
    described = [{"label": column} | digits.get(column, {}) for column in columns]
    return {"columns": described, "runs": rows, "means": means, "colours": COLOURS, "damaged": unread}


def mean_rows(runs: list[Run], rows: list[dict]) -> list[dict]:
    """Return a row for each group of several finished runs that differ only in their seed."""
    groups: dict[tuple, list[tuple[Run, dict]]] = {}
    for run, row in zip(runs, rows, strict=True):
        if run.summary.get("status") == "finished":
            name, _ = name_and_seed(run.record.folder.name)
            groups.setdefault((run.record.experiment_folder, name), []).append((run, row))
    return [mean_row(name, *zip(*group, strict=True)) for (_, name), group in groups.items() if len(group) > 1]


def mean_row(name: str, runs: tuple[Run, ...], group: tuple[dict, ...]) -> dict:
    """Return the row of a group: the means and standard deviations of the figures that all of its runs have.

    `group` are the rows of the runs.
    """
    rows = [row["cells"] for row in group]
    figures = {label: [at(run.summary, path) for run in runs] for label, (path, _) in FIGURES.items()}
    figures = {k: values for k, values in figures.items() if all(isinstance(value, (int, float)) for value in values)}
    date = max((row["date"] for row in rows if row["date"]), default=None)
    facts = {"name": name, "seed": None, "status": f"mean of {len(group)} seeds", "date": date}
    means = dict.fromkeys(FIGURES)
    means |= {label: rounded(sum(values) / len(values), FIGURES[label][1]) for label, values in figures.items()}
    return {
        "cells": rows[0] | facts | means,
        "deviations": {label: spread(values) for label, values in figures.items()},
        "folder": None,
        "origin": [],
        "curves": {metric: mean_curve([row["curves"][metric] for row in group]) for metric in METRICS},
        "f": None,
    }


def spread(values: list[float]) -> float | None:
    """Return the standard deviation; None if a value is not finite."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else None


def mean_curve(curves: list[dict[str, list]]) -> dict[str, list]:
    """Return the mean of curves at their steps; an empty curve if their steps differ.

    It also holds "loss", the mean of the logarithms, which is less than the logarithm of the mean.
    """
    if any(curve["step"] != curves[0]["step"] for curve in curves):
        return {key: [] for key in curves[0]}
    columns = {key: zip(*(curve[key] for curve in curves), strict=True) for key in ("seconds", "value")}
    if all(min(curve["value"], default=0) > 0 for curve in curves):
        columns["loss"] = zip(*(map(math.log, curve["value"]) for curve in curves), strict=True)
    return curves[0] | {key: short(sum(values) / len(values) for values in column) for key, column in columns.items()}


def read(folder: Path, points: int) -> Run:
    """Return a run with curves of at most `points` points. Raises UserError if a part that is read is damaged."""
    record = find(folder)
    config = flat(record.read_config()) if record.has(record.config) else {}
    summary = read_summary(record, whole=False) if record.has(record.summary) else {}
    lines = record.lines() if record.has(record.metrics) else []
    step = row_at(record, lines[-1])["step"] if lines else None
    if record.has(record.metrics):
        record.check_reached(step or 0)
    curves = {metric: curve(record, lines, metric, points) for metric in METRICS}
    return Run(record, config, summary, date(record), step, curves, heads(record))


def date(record: Record) -> str | None:
    """Return the local time of `last_written`, or None."""
    written = last_written(record)
    return None if written is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(written))


def row_at(record: Record, line: bytes) -> dict:
    """Parse a logged row. Raises UserError if it is damaged or lacks an axis."""
    row = parse(record.metrics, line)
    if any(row.get(axis) is None for axis in AXES):
        raise UserError(f"{record.metrics} is damaged: it is not the record of a run")
    return row


def curve(record: Record, lines: list[bytes], metric: str, points: int) -> dict[str, list]:
    """Return at most `points` values of a metric, and the values of each axis at these points.

    Lines without the metric are not parsed. Raises UserError if a line that is parsed is damaged.
    """
    name = json.dumps(metric).encode()
    having = [line for line in lines if name in line]
    rows = [row_at(record, having[i]) for i in thinned(len(having), points)]
    rows = [row for row in rows if row.get(metric) is not None]
    drawn = {axis: [row[axis] for row in rows] for axis in AXES} | {"value": [row[metric] for row in rows]}
    try:
        return drawn | {key: short(drawn[key]) for key in ("seconds", "value")}
    except OverflowError as error:
        raise damaged(record.metrics) from error


def shown(run: Run, keys: list[str], start: Path) -> dict:
    """Return the page's data of a run: its row of the table, the link to it, where it comes from, its curves and f."""
    place = run.record.place
    facts = {"experiment": run.record.experiment, "name": run.record.folder.name}
    facts |= {key.removeprefix("job."): value for key, value in run.config.items()} | run.summary
    settings = {key: cell(run.config[key]) if key in run.config else None for key in keys}
    figures = {label: rounded(at(run.summary, path), digits) for label, (path, digits) in FIGURES.items()}
    status = status_text(run.summary, run.step or 0)
    identity = {key: facts.get(key) for key in IDENTITY} | {"status": status, "date": run.date}
    return {
        "cells": identity | figures | settings,
        "folder": quote(os.fsencode(os.path.relpath(place, start))) + "/" * place.is_dir(),
        "origin": [facts.get(key) for key in ("command", "commit", "device")],
        "curves": run.curves,
        "f": run.f,
    }


def differing(configs: list[dict]) -> list[str]:
    """Return the keys that distinguish runs.

    Left out are keys that are not part of a run's identity (not_part_of_identity), keys of Hydra, those in IDENTITY,
    which have columns of their own, and those that repeat an earlier one, as attn.dim repeats model.dim.
    """
    found: list[str] = []
    for key in dict.fromkeys(key for config in configs for key in config):
        passed_over = not_part_of_identity(key) or key.endswith("_") or key in IDENTITY
        if not passed_over and varies(key, configs) and not any(repeats(key, other, configs) for other in found):
            found.append(key)
    return found


def varies(key: str, configs: list[dict]) -> bool:
    """Return whether runs differ in a key, or one lacks it while another run of the same attention has it."""
    having = [config for config in configs if key in config]
    attentions = {config.get("job.attn") for config in having}
    absent = any(key not in config and config.get("job.attn") in attentions for config in configs)
    return absent or any(config[key] != having[0][key] for config in having)


def repeats(key: str, other: str, configs: list[dict]) -> bool:
    """Return whether `key` has the same last part as `other` and, in every run that has `key`, the same value."""
    same_word = key.rsplit(".", 1)[-1] == other.rsplit(".", 1)[-1]
    return same_word and all(config.get(other) == config[key] for config in configs if key in config)


def cell(value: object) -> str | int | float:
    """Return a config's value for the table: a number or a word unchanged, anything else as JSON."""
    plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    return value if plain else json.dumps(value, ensure_ascii=False)


def heads(record: Record) -> dict | None:
    """Return, for each head, the learned factor f of the position weight w by distance, or None if there is none.

    Raises UserError if the file is damaged.
    """
    path = record.f if record.has(record.f) else record.folder / "position_weight.json"  # older runs lack f.json
    f = at(record.read_object(path), "f") if record.has(path) else None
    if f is None:
        return None
    try:
        distance = thinned(len(f[0]))
        return {"distance": distance, "heads": [short([head[i] for i in distance]) for head in f]}
    except (TypeError, LookupError, ValueError, OverflowError) as error:
        raise UserError(f"{path} is damaged: f is not a list of numbers per head") from error


def thinned(count: int, points: int = POINTS) -> list[int]:
    """Return the indices of at most `points` points to draw.

    Half of them are evenly spaced, and half are denser at the start, for logarithmic axes.
    """
    if count <= points:
        return list(range(count))
    even, dense = np.linspace(0, count - 1, points // 2), np.geomspace(1, count, points // 2) - 1
    return np.unique(np.rint([even, dense]).astype(int)).tolist()


def short(values: Iterable[float]) -> list[float]:
    """Round values to four significant digits, as many as a screen can show."""
    return [float(f"{value:.4g}") for value in values]


def rounded(value: object, digits: int) -> object:
    """Round a figure to its number of decimal places; return anything but a finite float unchanged."""
    return round(value, digits or None) if isinstance(value, float) and math.isfinite(value) else value


def page(data: dict) -> str:
    """Return the template with plotly and the data in it.

    Plotly and the data are one script, compressed and in base64, so that no text in the data can end the script.
    """
    names = ", ".join(data)
    # The data are written as JavaScript, because JSON has neither NaN nor Infinity.
    script = f"{get_plotlyjs()}\nconst {{ {names} }} = {json.dumps(data, separators=(',', ':'))};\n"
    packed = base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()
    return TEMPLATE.read_text(encoding="utf-8").replace("{{script}}", packed)


@main("dashboard")
def run(cfg: DictConfig) -> None:
    out = Path(cfg.out)
    if out.is_dir():
        raise UserError(f"out={out} is a folder: give a file, like {out / 'dashboard.html'}")
    data = collect(Path(cfg.runs), out.parent)
    write_bytes(out, page(data).encode())
    for message in data["damaged"]:
        print(f"left out: {without_controls(message)}", file=sys.stderr)
    print(f"written to {out}: {len(data['runs'])} runs, {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    run()
