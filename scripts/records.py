"""Reading the records that tables and plots are made of."""

import re
import shlex
from pathlib import Path

from configs.cli import compose
from data.files import UserError
from data.reading import NUMBER, OR_NULL, TEXT, WHOLE, misfit, read_object
from scripts.list_variants import header
from training.record import Record

# What scripts/time_steps.py writes.
SPEED = {
    "speed": {},
    "precision": TEXT,
    **dict.fromkeys(("batch", "context"), WHOLE),
    "compiled?": (bool,),
    "provenance": {"device": TEXT, "command": TEXT, "commit": TEXT + OR_NULL, "dirty": (bool,)},
}
RATE = {"tokens_per_second?": NUMBER, "seconds": (list,)}


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
    return Record(runs / experiment / f"{run_name(row, experiment)}-seed{seed}")


def finished(record: Record) -> dict | None:
    """The summary of a run that came to its end, whether its weights are there or not; else None."""
    summary = record.read_summary() if record.summary.exists() else {"status": "missing"}
    return summary if summary["status"] == "finished" else None


def state(record: Record) -> str:
    """How far the run of a record came: finished, diverged, not finished, or missing."""
    status = record.read_summary()["status"] if record.summary.exists() else "not finished"
    if status in ("finished", "diverged"):
        return status
    return "not finished" if record.config.exists() else "missing"


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
        raise UserError(f"these runs are needed and not there: {named}")
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
    """What scripts/time_steps.py measured. Raises UserError where the file is not there, or damaged."""
    if not path.exists():
        raise UserError(f"{path} is needed and not there: python scripts/time_steps.py out={path} writes it")
    record = read_object(path)
    rows = record["speed"].values() if isinstance(record.get("speed"), dict) else ()
    if wrong := misfit(record, SPEED) or next(filter(None, (misfit({"": row}, {"": RATE}) for row in rows)), None):
        raise UserError(f"{path} is damaged: {wrong}")
    return record


def curves(records: list[Record], key: str) -> tuple[list[int], list[list[float]]]:
    """Characters seen, and the values of a metric at them for each seed's record."""
    values, tokens = [], []
    for record in records:
        points = [point for point in record.rows() if key in point]
        tokens = [point["tokens"] for point in points]
        values.append([point[key] for point in points])
    return tokens, values
