"""Read summaries of runs and check the ranges of their figures, so that tables and pages can rely on them."""

import reprlib

from data.files import UserError
from training.record import Record

LARGEST = 1e300  # more than any figure, and less than the largest float
LARGEST_LOSS = 700  # nats; exp(710) would overflow a float

TEXTS = ("fit", "heldout", "sliding", "heldout_best")  # the parts of the evaluation

# The lowest and the highest value of each figure.
SCORE = {"loss": (0, LARGEST_LOSS), "characters": (1, LARGEST), "accuracy": (0, 1), "answers": (1, LARGEST)}
RANGES = {
    **dict.fromkeys(("seed", "lr", "steps", "tokens", "parameters"), (0, LARGEST)),
    **dict.fromkeys(("flops_per_step", "state_bytes", "data.unique"), (0, LARGEST)),
    **dict.fromkeys(("data.characters", "data.vocabulary"), (1, LARGEST)),
    "data.holdout": (0, 0.999999),
    "evaluation.heldout_best.step": (0, LARGEST),
    **{f"evaluation.{text}.{figure}": limits for text in TEXTS for figure, limits in SCORE.items()},
}
FINISHED = dict.fromkeys(("steps", "tokens"), (1, LARGEST))  # for finished runs
# In older records these may be NaN or infinite, so floats are not checked. Integers are, because a huge one would
# overflow a float.
MEASURED = [
    *("training_seconds", "tokens_per_second", "evaluation.tokens_per_second"),
    *(f"evaluation.{text}.{each}" for text in TEXTS for each in ("perplexity", "bits_per_character", "bits_per_byte")),
]


def read_summary(record: Record, whole: bool = True) -> dict:
    """Return what `Record.read_summary` returns, after checking the ranges of its figures too."""
    summary = record.read_summary(whole)
    if wrong := wrong_figure(summary):
        raise UserError(f"{record.summary} is damaged: {wrong}")
    return summary


def wrong_figure(summary: dict) -> str | None:
    """Return what is wrong with the first figure of a summary that is out of its range, or None."""
    measured = {path: (-LARGEST, LARGEST) for path in MEASURED if isinstance(at(summary, path), int)}
    return out_of_range(summary, RANGES | (FINISHED if summary.get("status") == "finished" else {}) | measured)


def out_of_range(content: dict, ranges: dict[str, tuple[float, float]]) -> str | None:
    """Return what is wrong with the first number out of range, or None. `ranges` has paths as keys; see `at`."""
    for path, (low, high) in ranges.items():
        value = at(content, path)
        if isinstance(value, (int, float)) and not low <= value <= high:
            return f"{path} must be from {low:g} to {high:g}: it is {reprlib.repr(value)}"
    return None


def at(node: object, path: str) -> object:
    """Return the value at a path like evaluation.fit.perplexity, or None."""
    for key in path.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node
