"""Read and check the records that tables and plots are made from."""

import re
import reprlib
import shlex
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from configs.cli import compose
from data.files import UserError, write_bytes, write_json
from data.reading import NUMBER, OR_NULL, TEXT, WHOLE, misfit, read_object
from scripts.reporting.variants import header, variants
from training.loading import config_of
from training.packed import find
from training.record import Record, read_config
from training.settings import differing
from training.summaries import LARGEST, LARGEST_LOSS, out_of_range, read_summary

# What scripts.benchmark writes, as types that `misfit` checks: where a record comes from (ORIGIN), the record of
# measure=rows (SPEED) and each of its rows (RATE), and the record of training steps (STEPS).
ORIGIN = {"device": TEXT, "command": TEXT, "commit": TEXT + OR_NULL, "dirty": (bool,)}
SPEED = {
    "setup?": TEXT,
    "precision": TEXT,
    "batch": WHOLE,
    "context": WHOLE,
    "compiled?": (bool,),
    "provenance": ORIGIN,
}
RATE = {"tokens_per_second?": NUMBER, "seconds": (list,)}
STEPS = {"tokens": WHOLE, "compiled": (bool,), "seconds": {}, "provenance": ORIGIN | {"precision": TEXT}}
# The commands of scripts/ that write the records of the pages with these names.
COMMANDS = {
    "decode": "benchmark measure=decode",
    "large": "benchmark measure=memory",
    "precision": "reproduce study=precision",
    "samples": "reproduce study=samplers run=FOLDER",
}
SIZES = dict.fromkeys(("batch", "context", "tokens"), (1, 1e100))  # lowest and highest value, for `out_of_range`


class MissingRecord(UserError):
    """Raised if a record that a page needs does not exist, is incomplete, or is not that of a finished run."""


def label(row: str) -> str:
    """Replace the attention, which begins a row or a run's name, by its label: "AFT attn.gamma=false"."""
    attn, rest = re.match(r"(\w+)(.*)", row).groups()
    return header(attn)["label"] + rest


def not_measured(measured: Collection[str]) -> str:
    """Return a sentence that names the attentions that are not among `measured`; "" if all are."""
    absent = [label(variant) for variant in variants() if variant not in measured]
    return f"Not measured: {'; '.join(absent)}." if absent else ""


def name_of(row: str) -> str:
    """Return the name of a row in pages: "MHA+, initial_head_mix=uniform"."""
    attn, *overrides = shlex.split(row)
    return ", ".join([label(attn), *(override.removeprefix("attn.") for override in overrides)])


def words_of(row: str, experiment: str) -> tuple[str, ...]:
    """Return the overrides of train.py for a row like "aft attn.gamma=false train.steps=500", without the seed."""
    return (*shlex.split(f"attn={row}"), f"experiment={experiment}")


@cache
def composed(words: tuple[str, ...]) -> DictConfig:
    """Return the config of the run with these overrides of train.py and seed 0. It is cached, so do not modify it."""
    return compose([*words, "seed=0"])


def without_token_shift(shown: Iterable[str], experiment: str) -> str:
    """Return a sentence that names the attentions whose models have no token shift; "" if all have one."""
    names = [label(v) for v in shown if not composed(words_of(v, experiment)).attn.get("token_shift")]
    return f"Without token shift: {'; '.join(names)}." if names else ""


def of_two_units(shown: Iterable[str], experiment: str) -> str:
    """Return a sentence that names the attentions whose blocks have a second one as their feed-forward; "" if none."""
    names = [label(v) for v in shown if not composed(words_of(v, experiment)).ffn]
    return f"Two attention units and no feed-forward in a block: {'; '.join(names)}." if names else ""


def record_of(runs: Path, words: tuple[str, ...], seed: int) -> Record:
    """Return the record of the run with these overrides of train.py and a seed. The run may be missing."""
    job = composed(words).job
    return find(runs / job.experiment / f"{job.name.removesuffix('0')}{seed}")


def checked_record(runs: Path, words: tuple[str, ...], seed: int) -> Record:
    """Return what `record_of` returns. Raises UserError if a finished run has other settings than its name says."""
    record = record_of(runs, words, seed)
    if finished(record) is None:
        return record
    expected = composed(words).copy()
    expected.seed = seed
    if not differing(read_config(record), expected):
        return record
    if differs := differing(config_of(record), expected):  # with the defaults of keys that the record lacks
        raise UserError(
            f"{record.folder} was trained with another {differs[0]} than its name says: if a default has "
            "changed since, move this run away and train it again"
        )
    return record


def finished(record: Record) -> dict | None:
    """Return the summary of a run if it is finished, whether or not its weights were kept; otherwise None."""
    summary = read_summary(record) if record.has(record.summary) else {"status": "missing"}
    return summary if summary["status"] == "finished" else None


def finished_runs(runs: Path, words: tuple[str, ...], seeds: list[int]) -> list[dict]:
    """Return the summaries of the finished runs with these overrides of train.py and any of these seeds."""
    found = [finished(record_of(runs, words, seed)) for seed in seeds]
    return [summary for summary in found if summary is not None]


def state(record: Record) -> str:
    """Return whether a run is finished, diverged, not finished, or missing."""
    status = read_summary(record)["status"] if record.has(record.summary) else "not finished"
    if status in ("finished", "diverged"):
        return status
    return "not finished" if record.has(record.config) else "missing"


def has_ended(record: Record) -> bool:
    return state(record) in ("finished", "diverged")


def summaries(runs: Path, experiment: str, rows: list[str], seeds: list[int]) -> dict[str, list[dict]]:
    """Return the summaries of each row's seeds. Raises UserError if runs are missing or cannot be compared."""
    records = {row: [record_of(runs, words_of(row, experiment), seed) for seed in seeds] for row in rows}
    found = {row: list(map(finished, group)) for row, group in records.items()}
    if lacking := [row for row, group in found.items() if None in group]:
        tried = (pair for row in lacking for pair in zip(records[row], found[row], strict=True))
        named = ", ".join(f"{record.folder} ({state(record)})" for record, summary in tried if summary is None)
        start, seed = ["python", "train.py", *["-m"] * (len(seeds) > 1)], f"seed={','.join(map(str, seeds))}"
        commands = "; ".join(shlex.join([*start, *words_of(row, experiment), seed]) for row in lacking)
        raise MissingRecord(f"these runs are missing or not finished: {named}; this trains them: {commands}")
    check_comparable([summary for group in found.values() for summary in group])
    return found


def check_comparable(summaries: list[dict]) -> None:
    """Raise UserError if runs were trained or evaluated on different texts or numbers of characters."""
    texts = {s["data"]["sha256"]: s["name"] for s in summaries}
    tokens = {s["tokens"]: s["name"] for s in summaries}
    for what, runs in (("text", texts), ("number of characters trained on", tokens)):
        if len(runs) > 1:
            raise UserError(f"these runs differ in their {what}: {', '.join(runs.values())}")
    for text in ("fit", "heldout"):
        check_evaluated(summaries, text)


def check_evaluated(summaries: list[dict], text: str) -> None:
    """Raise UserError if runs were evaluated on different characters of a text, `fit` or `heldout`."""
    counts = {s["evaluation"][text]["characters"]: s["name"] for s in summaries if text in s["evaluation"]}
    if counts and max(counts) > 1.02 * min(counts):  # windows of different lengths leave out different remainders
        several = ", ".join(f"{name} ({count:,})" for count, name in counts.items())
        raise UserError(
            f"these runs were evaluated on different numbers of characters ({text}): {several}; "
            "a larger evaluation.final_windows covers the whole text in each"
        )
    # Each run saves the text that it was evaluated on. If windows cover only a part of the training text, their length
    # decides which part, so that runs with windows of different lengths save different texts.
    texts = {s["text_sha256"]: s["name"] for s in summaries if text == "fit" and "text_sha256" in s}
    if len(texts) > 1:
        raise UserError(
            f"these runs were evaluated on different characters ({text}): {', '.join(texts.values())}; give all "
            "the same data.vocab_size, and an evaluation.final_windows that is large enough for the whole text"
        )


def speed_record(path: Path) -> dict:
    """Return a record of measure=rows. Raises MissingRecord if it does not exist, and UserError if it is damaged."""
    record = json_record(path, "python -m scripts.benchmark measure=rows")
    rows = record["speed"] if isinstance(record.get("speed"), dict) else {}
    wrong = misfit(record, SPEED | {"speed": dict.fromkeys(rows, RATE)}) or out_of_range(record, SIZES)
    if wrong := wrong or wrong_seconds({name: row["seconds"] for name, row in rows.items()}):
        raise UserError(f"{path} is damaged: {wrong}")
    return record


def steps_path(results: Path, precision: str) -> Path:
    """Return the path of the benchmark's record of training steps on a CPU."""
    return results / f"benchmark/cpu/{precision}/steps.json"


def steps_record(path: Path) -> dict:
    """Return a record of training steps. Raises MissingRecord if it does not exist, and UserError if it is damaged."""
    record = json_record(path, "python -m scripts.benchmark")
    if wrong := misfit(record, STEPS) or out_of_range(record, SIZES) or wrong_seconds(record["seconds"]):
        raise UserError(f"{path} is damaged: {wrong}")
    return record


def wrong_seconds(rows: dict[str, list]) -> str | None:
    """Return what is wrong with the first row whose times are not a list of positive numbers, or None."""
    for name, seconds in rows.items():
        numbers = isinstance(seconds, list) and all(type(s) in (int, float) and 0 < s < LARGEST for s in seconds)
        if not (numbers and seconds):
            return f"the seconds of {name} must be a list of numbers above 0: they are {reprlib.repr(seconds)}"
    return None


def json_record(path: Path, command: str) -> dict:
    """Return the object in a JSON file. Raise a MissingRecord that names the command to run if there is no file."""
    if not path.exists():
        raise MissingRecord(f"{path} does not exist: {command} writes it")
    return read_object(path)


def write_for_each(setups: Collection[str], study: str, results: Path, write: Callable[[DictConfig], None]) -> None:
    """Write a study's page for each experiment that has finished runs. Raises MissingRecord if none has."""
    missing = []
    for setup in setups:
        try:
            write(compose([f"study={study}", f"setup={setup}", f"results={results}"], "reproduce"))
        except MissingRecord as error:
            missing.append(error)
    if len(missing) == len(setups):
        raise missing[0]


def write_page(results: Path, name: str, page: Callable[[dict], str]) -> None:
    """Write <results>/<name>.md from <name>.json. Raise a MissingRecord that names the command if there is no file."""
    record = json_record(results / f"{name}.json", f"python -m scripts.{COMMANDS[name]}")
    write_bytes(results / f"{name}.md", page(record).encode())


def write_record(results: Path, name: str, record: dict, page: Callable[[dict], str]) -> None:
    """Write <results>/<name>.json and its page, and print what was written."""
    write_json(results / f"{name}.json", record)
    write_page(results, name, page)
    print(f"written to {results}: {name}.json, {name}.md")


def curves(records: list[Record], key: str, against: str = "tokens") -> tuple[list[int], list[list[float]]]:
    """Return the places (characters seen, or steps) at which a metric was logged, and its values [records][places].

    Raises UserError if a value is not a number or too large, or if the records have the metric at different places.
    """
    logged = [points(record, key, against) for record in records]
    places = [[point[against] for point in rows] for rows in logged]
    for record, other in zip(records, places, strict=True):
        if other != places[0]:
            raise UserError(f"{records[0].metrics} and {record.metrics} have {key} at different {against}")
    return places[0], [[point[key] for point in rows] for rows in logged]


def required_curves(records: list[Record], key: str, against: str = "tokens") -> tuple[list[int], list[list[float]]]:
    """Return what `curves` returns. Raises UserError if the metric was not logged at all."""
    places, values = curves(records, key, against)
    if not places:
        raise UserError(f"{records[0].metrics} is damaged: no {key} was logged")
    return places, values


def curves_by_row(groups: dict[str, list[Record]], key: str) -> tuple[list[int], dict[str, np.ndarray]]:
    """Return the numbers of characters seen when a metric was logged, and its values [records, places] for each row.

    Raises UserError if the metric was not logged, or if the records have it at different places.
    """
    places, values = required_curves([record for group in groups.values() for record in group], key)
    ends = np.cumsum([len(group) for group in groups.values()])[:-1]
    return places, dict(zip(groups, np.split(np.array(values), ends), strict=True))


def points(record: Record, key: str, against: str) -> list[dict]:
    """Return the logged rows that have a metric. Raises UserError if a value is not a number or too large."""
    rows = [row for row in record.rows() if key in row]
    for name, largest in ((key, LARGEST_LOSS if key.endswith("loss") else LARGEST), (against, LARGEST)):
        values = [row.get(name) for row in rows]
        wrong = [value for value in values if not isinstance(value, (int, float)) or not abs(value) <= largest]
        if wrong:
            given = reprlib.repr(wrong[0])
            raise UserError(f"{record.metrics} is damaged: {name} must be a number up to {largest:g}: it is {given}")
    return rows
