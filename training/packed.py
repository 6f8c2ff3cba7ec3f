"""Packed runs: the committed records of runs, in one file for each attention of an experiment, or one per experiment.

<runs>/<experiment>/<attention>.runs.json, or <runs>/<experiment>.runs.json, maps the name of each run to its parts:
`config`, `summary` and the files of OPTIONAL, each as an object, and `metrics` as tables of columns. Perplexities are
left out of the tables, because reading computes them from the losses again. If <runs> holds a run both packed and in
its own folder, the packed one is read.
"""

import copy
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import NoneType

from data.files import UserError, as_user_error
from data.reading import misfit, read_object
from training.metrics import perplexity
from training.record import CONFIG, Record

ENDING = ".runs.json"
PARTS = {"config": CONFIG, "summary": (dict,), "metrics": (list,)}
OPTIONAL = ("loss_by_position", "f", "position_weight", "lengths")  # files that not every run has
EXACT = ("fit_", "heldout_")  # prefixes of the columns that are not rounded, because pages show their numbers
LOSS, PERPLEXITY = "loss", "perplexity"  # ends of the names of columns


class PackedRecord(Record):
    """A run in a packed file. It can be read like the record in a folder, but not written."""

    def __init__(self, pack: Path, folder: Path):
        super().__init__(pack / folder.name)  # a path that does not exist, for messages
        self.place, self.experiment_folder, self.parts = pack, folder.parent, read_pack(pack)[folder.name]

    def has(self, path: Path) -> bool:
        return path.stem in self.parts

    def read_object(self, path: Path) -> dict:
        return copy.deepcopy(self.parts[path.stem])

    def read_config(self) -> dict:
        return self.read_object(self.config)

    def each_row(self) -> Iterator[dict]:
        yield from rows_of(self.parts["metrics"])

    def last_row(self) -> dict:
        return next(reversed(rows_of(self.parts["metrics"])), {})

    def lines(self) -> list[bytes]:
        return [json.dumps(row).encode() for row in self.each_row()]


def find(folder: Path) -> Record:
    """Return the record of the run <runs>/<experiment>/<run>: the packed one, or else that in the folder."""
    pack = pack_of(folder)
    return PackedRecord(pack, folder) if pack.is_file() and folder.name in read_pack(pack) else Record(folder)


def pack_of(folder: Path) -> Path:
    """Return the path of the packed file for a run: its experiment's, if that exists, or else its attention's."""
    whole = experiment_pack(folder.parent)
    return whole if whole.is_file() else folder.with_name(attention(folder.name) + ENDING)


def experiment_pack(folder: Path) -> Path:
    """Return the path of the one packed file for a whole experiment; `folder` is <runs>/<experiment>."""
    named = Path(os.path.abspath(folder)) if folder.name in ("", "..") else folder  # Path(".") has no name
    return named.with_name(named.name + ENDING)


def attention(run: str) -> str:
    """Return the attention of a run, which begins its name."""
    return run.split("-")[0]


def packed_folders(runs: Path) -> set[Path]:
    """Return the path <runs>/<experiment>/<run> of every packed run below the folder `runs`.

    `runs` may also be the folder of a single experiment, whose packed file may lie beside this folder.
    """
    beside = experiment_pack(runs)
    found = {runs / run for run in read_pack(beside)} if beside.is_file() else set()
    for pack in runs.rglob(f"*{ENDING}"):
        name = pack.name.removesuffix(ENDING)
        found |= {pack.parent / run if attention(run) == name else pack.parent / name / run for run in read_pack(pack)}
    return found


def read_pack(pack: Path) -> dict[str, dict]:
    """Return the parts of each run in a packed file. Callers must not change them.

    Raises UserError if the file cannot be read or is damaged.
    """
    with as_user_error(f"cannot read {pack}"):
        status = pack.stat()
    return parse_pack(pack, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=256)
def parse_pack(pack: Path, *version: int) -> dict[str, dict]:
    """Parse a packed file. Results are cached by `version`, the time of the last change and the size of the file."""
    runs = read_object(pack)
    for run, parts in runs.items():
        if wrong := wrong_part(parts):
            raise UserError(f"{pack} is damaged: in {run}, {wrong}")
    return runs


def wrong_part(parts: object) -> str | None:
    """Return what is wrong with the first invalid part of a packed run, or None."""
    if not isinstance(parts, dict):
        return "the run must be an object"
    optional = {f"{name}?": (dict,) for name in OPTIONAL}
    if wrong := misfit(parts, PARTS | optional):
        return wrong
    for table in parts["metrics"]:
        columns = table.values() if isinstance(table, dict) and isinstance(table.get("step"), list) else [None]
        if not all(isinstance(column, list) and len(column) == len(table["step"]) for column in columns):
            return "metrics must be tables with a column step, whose columns all have the same length"
        for name, column in table.items():
            types = {int} if name == "step" else {str} if name == "sample" else {int, float, NoneType}
            if not set(map(type, column)) <= types:
                kind = {"step": "whole numbers", "sample": "text"}.get(name, "numbers or null")
                return f"the column {name} of metrics must hold {kind} only"
    return None


def packed(record: Record) -> dict:
    """Return the parts of a run, for a packed file, from its record. Raises UserError if the record is damaged."""
    rows = record.rows()
    if any("step" not in row for row in rows) or len({row["step"] for row in rows}) < len(rows):
        raise UserError(f"{record.metrics} is damaged: every row must have a step of its own")
    parts = {"summary": record.read_summary(), "config": record.read_config(), "metrics": tables_of(rows)}
    paths = [record.folder / f"{name}.json" for name in OPTIONAL]
    return parts | {path.stem: record.read_object(path) for path in paths if record.has(path)}


def tables_of(rows: list[dict]) -> list[dict[str, list]]:
    """Return rows as tables of columns, without perplexities. Keys that occur in the same rows share a table."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        for key in row:
            if not key.endswith(PERPLEXITY):
                found.setdefault(key, []).append(row)
    steps = {key: tuple(row["step"] for row in having) for key, having in found.items()}
    tables: dict[tuple, dict[str, list]] = {at: {"step": list(at)} for at in steps.values()}
    for key, having in found.items():
        tables[steps[key]][key] = [row[key] if key.startswith(EXACT) else short(row[key]) for row in having]
    return list(tables.values())


def short(value: object) -> object:
    """Round a float to 7 significant digits, the precision of float32, in which losses are computed."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def rows_of(tables: list[dict[str, list]]) -> list[dict]:
    """Return the rows from which `tables_of` made these tables, with rounded values, in the order of their steps."""
    rows: dict[int, dict] = {}
    for table in tables:
        for values in zip(*table.values(), strict=True):
            row = dict(zip(table, values, strict=True))
            rows.setdefault(row["step"], {}).update(row)
    for row in rows.values():
        losses = {key.removesuffix(LOSS): loss for key, loss in row.items() if key.endswith(LOSS) and loss is not None}
        row |= {name + PERPLEXITY: perplexity(loss) for name, loss in losses.items()}
    return [rows[step] for step in sorted(rows)]


def layout(value: object, indent: str = "") -> str:
    """Return a value as JSON in which each scalar, and each list of scalars, has a line of its own."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        lines = [f"{inner}{json.dumps(key, ensure_ascii=False)}: {layout(part, inner)}" for key, part in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(part, (dict, list)) for part in value):
        return "[\n" + ",\n".join(inner + layout(part, inner) for part in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def file_of(runs: dict[str, dict]) -> bytes:
    """Return the content of a packed file. It has many lines, so that a diff shows only the runs that changed."""
    return f"{layout(dict(sorted(runs.items())))}\n".encode("utf-8", "backslashreplace")
