"""Reading the records that tables and plots are made of."""

import re
import reprlib
import shlex
from pathlib import Path

from configs.cli import compose
from data.files import UserError
from data.reading import NUMBER, OR_NULL, TEXT, WHOLE, misfit, read_json, read_object
from scripts.reporting.variants import header
from training.packed import find
from training.record import Record
from training.summaries import LARGEST, LARGEST_LOSS, out_of_range, read_summary

# What scripts.benchmark measure=rows writes.
SPEED = {
    "speed": {},
    "precision": TEXT,
    **dict.fromkeys(("batch", "context"), WHOLE),
    "compiled?": (bool,),
    "provenance": {"device": TEXT, "command": TEXT, "commit": TEXT + OR_NULL, "dirty": (bool,)},
}
RATE = {"tokens_per_second?": NUMBER, "seconds": (list,)}
# What scripts.benchmark writes of training steps.
STEPS = {
    "tokens": WHOLE,
    "compiled": (bool,),
    "seconds": {},
    "provenance": SPEED["provenance"] | {"precision": TEXT},
}
SIZES = dict.fromkeys(("batch", "context", "tokens"), (1, 1e100))


class NotThere(UserError):
    """A record that is needed does not exist, or is not that of a finished run."""


def label(row: str) -> str:
    """How a variant is called in print; what differs from it, in a run's name or in overrides, follows its name."""
    attn, rest = re.match(r"(\w+)(.*)", row).groups()
    return header(attn)["label"] + rest


def name_of(row: str) -> str:
    """A row's attention as it is called in print, and what differs: "MHA+, initial_head_mix=uniform"."""
    attn, *switches = shlex.split(row)
    return ", ".join([label(attn), *(switch.removeprefix("attn.") for switch in switches)])


def run_name(row: str, experiment: str) -> str:
    """The name, without its seed, of the run that a row stands for.

    A row is an attention and what differs, as train.py takes it: "mha", "aft attn.gamma=false train.steps=500".
    """
    overrides = [*shlex.split(f"attn={row}"), f"experiment={experiment}", "seed=0"]
    return compose(overrides).job.name.removesuffix("-seed0")


def record_of(runs: Path, experiment: str, row: str, seed: int) -> Record:
    return find(runs / experiment / f"{run_name(row, experiment)}-seed{seed}")


def finished(record: Record) -> dict | None:
    """The summary of a run that came to its end, whether its weights are there or not; else None."""
    summary = read_summary(record) if record.has(record.summary) else {"status": "missing"}
    return summary if summary["status"] == "finished" else None


def state(record: Record) -> str:
    """How far the run of a record came: finished, diverged, not finished, or missing."""
    status = read_summary(record)["status"] if record.has(record.summary) else "not finished"
    if status in ("finished", "diverged"):
        return status
    return "not finished" if record.has(record.config) else "missing"


def commit(record: dict) -> str:
    """The commit that a figure comes from, as it is printed; those, in order, of a run that other code continued."""
    codes = [*record.get("earlier_code", []), record]
    names = [(code["commit"] or "unknown")[:12] + (" with changes" if code["dirty"] else "") for code in codes]
    return " then ".join(dict.fromkeys(names))


def summaries(runs: Path, experiment: str, rows: list[str], seeds: list[int]) -> dict[str, list[dict]]:
    """The summaries of each row's seeds.

    Raises UserError that names every run that is missing or not finished, or says in what the
    runs cannot be compared.
    """
    records = {row: [record_of(runs, experiment, row, seed) for seed in seeds] for row in rows}
    missing = [record for group in records.values() for record in group if finished(record) is None]
    if missing:
        named = ", ".join(f"{record.folder} ({state(record)})" for record in missing)
        raise NotThere(f"these runs are needed and not there: {named}")
    found = {row: [finished(record) for record in group] for row, group in records.items()}
    check_comparable([summary for group in found.values() for summary in group])
    return found


def check_comparable(found: list[dict]) -> None:
    """Raise UserError where runs saw different texts or amounts of them, or were evaluated on different amounts."""
    for what, key in (
        ("text", lambda s: s["data"]["sha256"]),
        ("number of characters trained on", lambda s: s["tokens"]),
    ):
        values = {key(s): s["name"] for s in found}
        if len(values) > 1:
            raise UserError(f"these runs differ in their {what}: {', '.join(values.values())}")
    for text in ("fit", "heldout"):
        check_measured(found, text)


def check_measured(found: list[dict], text: str) -> None:
    """Raise UserError where runs were not evaluated on the same characters of a text, `fit` or `heldout`."""
    counts = {s["evaluation"][text]["characters"]: s["name"] for s in found if text in s["evaluation"]}
    if counts and max(counts) > 1.02 * min(counts):  # windows of another length leave out another rest
        several = ", ".join(f"{name} ({count:,})" for count, name in counts.items())
        raise UserError(
            f"these runs were evaluated on different numbers of characters ({text}): {several}; "
            "a larger evaluation.final_windows covers the whole text in each"
        )
    # Of as many characters, windows of another length lie elsewhere in a training text of which not all is measured.
    texts = {s["text_sha256"]: s["name"] for s in found if text == "fit" and "text_sha256" in s}
    if len(texts) > 1:
        raise UserError(
            f"these runs were evaluated on different characters ({text}): {', '.join(texts.values())}; with the same "
            "data.vocab_size a larger evaluation.final_windows covers the whole text in each"
        )


def speed_record(path: Path) -> dict:
    """What scripts.benchmark measure=rows measured. Raises UserError where the file is not there, or damaged."""
    if not path.exists():
        raise NotThere(f"{path} is needed and not there: python -m scripts.benchmark measure=rows writes it")
    record = read_object(path)
    rows = record["speed"] if isinstance(record.get("speed"), dict) else {}
    wrong = misfit(record, SPEED) or next(filter(None, (misfit({"": row}, {"": RATE}) for row in rows.values())), None)
    wrong = wrong or out_of_range(record, SIZES) or wrong_seconds({name: row["seconds"] for name, row in rows.items()})
    if wrong:
        raise UserError(f"{path} is damaged: {wrong}")
    return record


def steps_record(path: Path) -> dict:
    """What scripts.benchmark measured of training steps. Raises UserError where it is not there, or damaged."""
    record = read_object(path)
    if wrong := misfit(record, STEPS) or out_of_range(record, SIZES) or wrong_seconds(record["seconds"]):
        raise UserError(f"{path} is damaged: {wrong}")
    return record


def wrong_seconds(rows: dict[str, list]) -> str | None:
    """What is wrong with the times of the first row that are not a list of numbers above 0."""
    for name, seconds in rows.items():
        numbers = isinstance(seconds, list) and all(type(s) in (int, float) and 0 < s < LARGEST for s in seconds)
        if not (numbers and seconds):
            return f"the seconds of {name} must be a list of numbers above 0: they are {reprlib.repr(seconds)}"
    return None


def json_record(path: Path, command: str) -> dict:
    """The content of a JSON file. Raises NotThere, which names the command that writes it, if it does not exist."""
    if not path.exists():
        raise NotThere(f"{path} is needed and not there: {command} writes it")
    return read_json(path)


def curves(records: list[Record], key: str, against: str = "tokens") -> tuple[list[int], list[list[float]]]:
    """Where a metric was logged, in characters seen or in steps, and its values there for each seed's record.

    Raises UserError where a value is none to compute with, or the seeds were measured at different places.
    """
    found = [points(record, key, against) for record in records]
    places = [[point[against] for point in one] for one in found]
    for record, other in zip(records, places, strict=True):
        if other != places[0]:
            raise UserError(f"{records[0].metrics} and {record.metrics} have {key} at different {against}")
    return places[0], [[point[key] for point in one] for one in found]


def logged(records: list[Record], key: str, against: str = "tokens") -> tuple[list[int], list[list[float]]]:
    """The same of a metric that is needed. Raises UserError where it was not logged at all."""
    places, values = curves(records, key, against)
    if not places:
        raise UserError(f"{records[0].metrics} is damaged: no {key} was logged")
    return places, values


def points(record: Record, key: str, against: str) -> list[dict]:
    """The rows of a record that have a metric. Raises UserError where a value is none to compute with."""
    rows = [row for row in record.rows() if key in row]
    for name, largest in ((key, LARGEST_LOSS if key.endswith("loss") else LARGEST), (against, LARGEST)):
        values = [row.get(name) for row in rows]
        wrong = [value for value in values if not isinstance(value, (int, float)) or abs(value) > largest]
        if wrong:
            given = reprlib.repr(wrong[0])
            raise UserError(f"{record.metrics} is damaged: {name} must be a number up to {largest:g}: it is {given}")
    return rows
