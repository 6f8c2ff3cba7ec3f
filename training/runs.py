"""List runs in the terminal, with one line for all runs that differ only in their seed."""

import math
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from data.files import UserError, as_user_error
from training.packed import packed_folders
from training.progress import duration
from training.record import Record
from training.summaries import at, read_summary

NO_FIGURE = "–"
ACCURACY = "held-out accuracy"  # a column that is shown only if a run has this figure, as runs on synthetic texts do
COLUMNS = {  # header: alignment
    **dict.fromkeys(("experiment", "name", "seeds", "status"), "left"),
    **dict.fromkeys(("fit perplexity", "held-out perplexity", ACCURACY, "tokens/s", "parameters", "age"), "right"),
}
SORTS = {  # name: the sort key of a group of runs, in ascending order with NaN last
    "newest": lambda group: min(run.age for run in group),
    "fit": lambda group: mean(run.fit for run in group),
    "heldout": lambda group: mean(run.heldout for run in group),
    "tokens_per_second": lambda group: -mean(run.tokens_per_second for run in group),
}


@dataclass
class Run:
    """The figures of a run that the list shows. A figure that the run does not have is None."""

    experiment: str
    name: str  # without the seed
    seed: int | None
    status: str
    fit: float | None  # perplexity
    heldout: float | None
    accuracy: float | None  # on held-out text
    tokens_per_second: float | None
    parameters: int | None
    age: float  # seconds since the last write to a file that holds its figures; infinite if it is packed


def all_folders(runs: Path) -> list[Path]:
    """Return the folders of all runs below `runs`, including packed runs."""
    return sorted(local_folders(runs) | packed_folders(runs))


def run_folders(runs: Path, packed: bool = True) -> list[Path]:
    """Return the folders of all runs, with or without packed ones. Raises UserError if there are none."""
    folders = all_folders(runs) if packed else sorted(local_folders(runs))
    if not folders:
        raise UserError(f"there are no runs in {runs}: python train.py makes one")
    return folders


def local_folders(runs: Path) -> set[Path]:
    """Return the folders below `runs` that hold the record of a run. Runs that are only packed are not included."""
    return {path.parent for name in ("metrics.jsonl", "summary.json") for path in runs.rglob(name)}


def matching(folders: list[Path], pattern: str) -> list[Path]:
    """Return the folders whose last parts match a glob, such as small/aft*, with or without the seed in their name.

    Raises UserError if no folder matches, or if `pattern` is no glob.
    """
    try:
        found = [f for f in folders if f.match(pattern) or (f.parent / name_and_seed(f.name)[0]).match(pattern)]
    except ValueError as error:
        raise UserError(f"match must be a glob over <experiment>/<name>, like small/aft*: got {pattern!r}") from error
    if not found:
        example = f"{folders[0].parent.name}/{folders[0].name}"
        raise UserError(f"none of the {len(folders)} runs matches {pattern}: one of them is {example}")
    return found


def print_runs(records: Iterable[Record], sort: str) -> None:
    """Print a table of these runs, sorted by one of SORTS, and print errors of damaged records to stderr.

    Raises UserError if no record can be read.
    """
    groups, damaged = {}, []
    for record in records:
        try:
            run = read_run(record)
        except UserError as error:
            damaged.append(str(error))
        else:
            groups.setdefault((record.experiment_folder, run.name), []).append(run)
    if not groups:
        raise UserError(f"none of these runs can be read: {damaged[0]}")
    for message in damaged:
        print(f"left out: {message}", file=sys.stderr)
    keys = {place: SORTS[sort](group) for place, group in groups.items()}
    rows = [line(groups[place]) for place in sorted(keys, key=lambda place: (math.isnan(keys[place]), keys[place]))]
    columns = dict(COLUMNS)
    if all(row[ACCURACY] == NO_FIGURE for row in rows):
        del columns[ACCURACY]
    cells = [[row[column] for column in columns] for row in rows]
    print(tabulate(cells, list(columns), "simple", colalign=list(columns.values()), disable_numparse=True), flush=True)


def read_run(record: Record) -> Run:
    """Return the figures of the run in a record. Raises UserError if the record is damaged."""
    summary = read_summary(record) if record.has(record.summary) else {}
    is_finished = summary.get("status") == "finished"
    last = record.last_row() if not is_finished and record.has(record.metrics) else {}
    status = status_text(summary, last.get("step", 0))
    evaluation = summary["evaluation"] if is_finished else {}
    fit, heldout = (evaluation[text]["perplexity"] if text in evaluation else None for text in ("fit", "heldout"))
    accuracy = at(evaluation, "heldout.accuracy")
    figures = (summary.get(key) for key in ("tokens_per_second", "parameters"))
    name, seed = name_and_seed(record.folder.name)
    packed = record.place.is_file()  # git clone writes packed files, so that their age would be that of the clone
    age = math.inf if packed else max(0.0, time.time() - (last_written(record) or time.time()))
    return Run(record.experiment, name, seed, status, fit, heldout, accuracy, *figures, age)


def last_written(record: Record) -> float | None:
    """Return the time, in seconds since 1970, at which a run last wrote metrics.jsonl or summary.json.

    Returns None if it has neither, or is packed.
    """
    with as_user_error(f"cannot read {record.folder}"):
        files = (path for path in (record.metrics, record.summary) if path.is_file())
        return max((path.stat().st_mtime for path in files), default=None)


def status_text(summary: dict, last_step: int) -> str:
    """Return the status in a run's summary, {} without one, and the step of an unfinished run: "diverged at step 40".

    `last_step` is that of the last row of metrics, which may be an earlier one than the step at which the run ended.
    """
    status, step = summary.get("status", "unfinished"), max(last_step, summary.get("steps", 0))
    return status if status == "finished" or not step else f"{status} at step {step:,}"


def name_and_seed(run: str) -> tuple[str, int | None]:
    """Return the name of a run without its seed, and the seed."""
    name, seed = re.fullmatch(r"(.*?)(?:-seed(\d+))?", run, re.DOTALL).groups()
    return name, None if seed is None else int(seed)


def line(group: list[Run]) -> dict[str, str]:
    """Return the table's row for runs that differ only in their seed. Its perplexities are means over finished runs."""
    first = group[0]
    counts = Counter(run.status for run in group)
    several = len(counts) > 1
    seeds = sorted(run.seed for run in group if run.seed is not None)
    cells = [
        first.experiment,
        first.name,
        ", ".join(map(str, seeds)),
        ", ".join(f"{count} {status}" if several else status for status, count in counts.items()),
        with_deviation(run.fit for run in group),
        with_deviation(run.heldout for run in group),
        with_deviation((run.accuracy for run in group), digits=4),
        whole(mean(run.tokens_per_second for run in group)),
        whole(mean(run.parameters for run in group)),
        duration(age) if math.isfinite(age := min(run.age for run in group)) else NO_FIGURE,
    ]
    return dict(zip(COLUMNS, cells, strict=True))


def mean(values: Iterable[float | None]) -> float:
    """Return the mean of the values that are not None; NaN if there are none."""
    there = [value for value in values if value is not None]
    return statistics.mean(there) if there else math.nan


def with_deviation(values: Iterable[float | None], digits: int = 2) -> str:
    """Return the mean ± the standard deviation of the values that are not None, without ± if there is one value."""
    there = [value for value in values if value is not None]
    centre = mean(there)
    if not there:
        return NO_FIGURE
    spread = len(there) > 1 and math.isfinite(centre)
    return f"{centre:.{digits}f}" + (f" ± {statistics.stdev(there):.{digits}f}" if spread else "")


def whole(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else NO_FIGURE
