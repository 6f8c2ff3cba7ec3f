"""Reading the records that tables and plots are made of."""

import re
from pathlib import Path

from data.files import UserError
from data.record import NUMBER, OR_NULL, TEXT, WHOLE, Record, misfit, read_object
from scripts.list_variants import header

# What scripts/time_steps.py writes.
SPEED = {
    "speed": {},
    **dict.fromkeys(("what", "precision"), TEXT),
    **dict.fromkeys(("batch", "context", "vocabulary"), WHOLE),
    "provenance": {"device": TEXT, "command": TEXT, "commit": TEXT + OR_NULL, "dirty": (bool,)},
}
RATE = {"tokens_per_second": NUMBER, "run?": TEXT}


def label(row: str) -> str:
    """How a variant is called in print; what differs from it, in a run's name or in overrides, follows its name."""
    attn, rest = re.match(r"(\w+)(.*)", row).groups()
    return header(attn)["label"] + rest


def commit(record: dict) -> str:
    """The commit that a figure comes from, as it is printed; those, in order, of a run that other code continued."""
    codes = [*record.get("earlier_code", []), record]
    names = [(code["commit"] or "unknown")[:12] + (" with changes" if code["dirty"] else "") for code in codes]
    return " then ".join(dict.fromkeys(names))


def summaries(runs: Path, rows: list[str], seeds: list[int]) -> dict[str, list[dict]]:
    """The summaries of each row's seeds.

    Raises UserError that names every run that is missing or not finished, or says in what the
    runs cannot be compared.
    """
    found, missing = {}, []
    for row in rows:
        found[row] = []
        for seed in seeds:
            record = Record(runs / f"{row}-seed{seed}")
            summary = record.read_summary() if record.summary.exists() else {"status": "missing"}
            if summary["status"] != "finished":
                missing.append(f"{record.folder} ({summary['status']})")
            found[row].append(summary)
    if missing:
        raise UserError(f"these runs are needed and not there: {', '.join(missing)}")
    for what, key in (
        ("text", lambda s: s["data"]["sha256"]),
        ("number of characters trained on", lambda s: s["tokens"]),
    ):
        values = {key(s): s["name"] for group in found.values() for s in group}
        if len(values) > 1:
            raise UserError(f"these runs differ in their {what}: {', '.join(values.values())}")
    return found


def speed_record(runs: Path) -> dict:
    """What scripts/time_steps.py measured in the experiment whose runs these are."""
    path = runs / "speed.json"
    if not path.exists():
        raise UserError(
            f"{path} is needed and not there: python scripts/time_steps.py writes it, with setup={runs.name}"
        )
    record = read_object(path)
    rows = record["speed"].values() if isinstance(record.get("speed"), dict) else ()
    if wrong := misfit(record, SPEED) or next(filter(None, (misfit({"": row}, {"": RATE}) for row in rows)), None):
        raise UserError(f"{path} is damaged: {wrong}")
    return record


def curves(runs: Path, row: str, seeds: list[int], key: str) -> tuple[list[int], list[list[float]]]:
    """Characters seen, and the values of a metric at them for each seed."""
    values, tokens = [], []
    for seed in seeds:
        points = [point for point in Record(runs / f"{row}-seed{seed}").rows() if key in point]
        tokens = [point["tokens"] for point in points]
        values.append([point[key] for point in points])
    return tokens, values
