"""Read what leaderboard.md shows: each attention's runs at its chosen learning rate, and its speeds."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from omegaconf import DictConfig

from configs.cli import compose
from data.files import UserError
from data.reading import OR_NULL, TEXT, WHOLE, misfit, read_object
from scripts.reporting import figures, recall
from scripts.reporting.figures import Figure
from scripts.reporting.rates import chosen_rate
from scripts.reporting.records import (
    ORIGIN,
    check_comparable,
    checked_record,
    composed,
    finished,
    has_ended,
    label,
    wrong_seconds,
)
from scripts.reporting.rule import CONTRADICTED, REPRODUCED, Comparison, Interval, compared, intervals, judge
from scripts.reporting.variants import parameters
from training.record import Record

# The experiments for which scripts.report writes a leaderboard. There is none for `source`: headline/source*.md and
# search.md show most of its committed runs.
SETUPS = ("small", "novel")
Key = TypeVar("Key")
COMMAND = "python -m scripts.reproduce study=leaderboard"
WORDS = {REPRODUCED: "ahead", CONTRADICTED: "behind"}  # the page's words for these verdicts, since no claim is judged
KINDS = ("training", "streaming")  # kinds of speed
# The types of the parts of costs.json, for `misfit`.
ROUNDS = dict.fromkeys(("repeats", "characters", "batch", "context"), WHOLE)
TIMED = ORIGIN | ROUNDS | {"precision": TEXT, "ratio_to": TEXT, "threads": WHOLE + OR_NULL, "versions": {"torch": TEXT}}
COSTS = {kind: {} for kind in KINDS} | {"provenance": TIMED}


class Row(NamedTuple):
    """An attention with finished runs at its chosen learning rate."""

    variant: str
    rate: float
    summaries: list[dict]  # of the finished runs
    diverged: int  # the number of runs that have diverged
    block: int  # number of parameters of a block
    recall: list[dict]  # summaries of runs of recall's hardest task

    @property
    def name(self) -> str:
        return label(self.variant)

    def perplexities(self, text: str) -> list[float]:
        """Return the perplexity of each seed; `text` is as in `figures.losses`."""
        return [math.exp(loss) for loss in figures.losses(self.summaries, text).values()]

    def fit(self) -> Figure:
        return figures.with_interval(self.perplexities("fit"))

    def state(self) -> int | None:
        return self.summaries[0].get("state_bytes")  # older records lack it

    def seeds(self, planned: Sequence[int]) -> str:
        """Return the number of seeds of finished runs, with "of 5" if it is below that of the `planned` ones."""
        count = len(self.summaries)
        some = f" of {len(planned)}" if count < len(planned) else ""
        return f"{count}{some}" + f", {self.diverged} diverged" * (self.diverged > 0)

    def accuracies(self) -> list[float]:
        """Return the accuracy of each seed at the hardest task of experiment=recall, in percent."""
        return [100 * summary["evaluation"]["heldout"]["accuracy"] for summary in self.recall]


class Board(NamedTuple):
    """What the page shows: the rows, the best fit first; the reason why others are not among them; and speeds."""

    rows: list[Row]
    not_run: dict[str, str]  # {attention: reason}
    costs: dict | None  # the record of scripts/benchmarking/side_by_side.py
    ratio_to: str  # the attention that speeds are divided by

    def row(self, variant: str) -> Row | None:
        return next((row for row in self.rows if row.variant == variant), None)

    def speed(self, kind: str, variant: str) -> Figure | None:
        """Return the speed of training or streaming divided by ratio_to's: median (quartiles). None if not measured."""
        if self.costs is not None and variant == self.ratio_to:
            return Figure(1.0, "1")
        if self.costs is None or variant not in self.costs[kind]:
            return None
        cell = self.costs[kind][variant]
        return figures.with_quartiles(cell["reference"], cell["seconds"])


def command_of(cfg: DictConfig) -> str:
    return COMMAND + f" setup={cfg.setup}" * (cfg.setup != SETUPS[0])


def costs_path(cfg: DictConfig) -> Path:
    return Path(cfg.results, "runs", cfg.setup, "costs.json")


def costs_record(path: Path) -> dict | None:
    """Return the record of speeds, or None if there is none. Raises UserError if it is damaged."""
    if not path.exists():
        return None
    record = read_object(path)
    if wrong := misfit(record, COSTS) or wrong_rounds(record):
        raise UserError(f"{path} is damaged: {wrong}")
    return record


def wrong_rounds(record: dict) -> str | None:
    """Return what is wrong with the timings of the first attention that has wrong ones, or None.

    Each attention has two lists of positive numbers, `seconds` and `reference`, of the same length.
    """
    for variant, cell in (item for kind in KINDS for item in record[kind].items()):
        lists = [cell.get(key) for key in ("seconds", "reference")] if isinstance(cell, dict) else [None]
        wrong = next(filter(None, (wrong_seconds({variant: seconds}) for seconds in lists)), None)
        if wrong or len(lists[0]) != len(lists[1]):
            return wrong or f"{variant} and its reference have different numbers of rounds"
    return None


def words(cfg: DictConfig, variant: str) -> tuple[str, ...]:
    """Return the overrides of train.py for an attention at its chosen learning rate, without the seed."""
    return f"experiment={cfg.setup}", f"attn={variant}", f"optim.lr={chosen_rate(cfg.setup, variant):g}"


def records_of(cfg: DictConfig, words: tuple[str, ...]) -> dict[int, Record]:
    """Return a record for each seed of a run with these overrides of train.py, even if the run is missing.

    Raises UserError if a finished run was trained with other settings than its name says, or has no fit loss.
    """
    records = {seed: checked_record(Path(cfg.results, "runs"), words, seed) for seed in cfg.seeds}
    for record in records.values():
        if (summary := finished(record)) is not None and "fit" not in summary["evaluation"]:
            raise UserError(f"{record.summary} is damaged: it holds no evaluation of the training text")
    return records


def recall_of(results: Path, chosen: list[str]) -> dict[str, list[dict]]:
    """Return the summaries, by attention, of the runs of the hardest task in recall.md; {} without runs of recall."""
    if not any((results / "runs").glob("recall*")):  # a folder of runs, or their packed file
        return {}
    cfg = compose(["study=recall", f"results={results}", f"variants=[{','.join(chosen)}]"], "reproduce")
    return {variant: row.summaries for (variant, _), row in recall.read(cfg, [recall.HARD]).items()}


def read(cfg: DictConfig, chosen: list[str]) -> Board:
    """Read the records of the chosen attentions. Raises UserError if one is damaged, or if runs cannot be compared."""
    rows, not_run = [], {}
    rates = {variant: chosen_rate(cfg.setup, variant) for variant in chosen}
    with_rate = [variant for variant, rate in rates.items() if rate is not None]
    recalled = recall_of(Path(cfg.results), with_rate) if cfg.setup == "small" else {}  # recall's models are small
    for variant, rate in rates.items():
        if rate is None:
            not_run[variant] = "No learning rate is chosen"
            continue
        ended = [record for record in records_of(cfg, words(cfg, variant)).values() if has_ended(record)]
        summaries = [summary for summary in map(finished, ended) if summary is not None]
        diverged = len(ended) - len(summaries)
        if summaries:
            _, block = parameters(composed(words(cfg, variant)))
            rows.append(Row(variant, rate, summaries, diverged, block, recalled.get(variant, [])))
        else:
            none = f"No run at the chosen learning rate with {figures.seeds_in_words(cfg.seeds)} has ended"
            not_run[variant] = "All runs that have ended have diverged" if diverged else none
    check_comparable([summary for row in rows for summary in row.summaries])
    costs = costs_record(costs_path(cfg))
    ratio_to = cfg.ratio_to if costs is None else costs["provenance"]["ratio_to"]
    return Board(sorted(rows, key=lambda row: row.fit().value), not_run, costs, ratio_to)


class Gap(NamedTuple):
    """The lead of a row over another one, and the verdict on it."""

    comparison: Comparison
    interval: Interval
    word: str  # ahead, behind, equivalent or undecided


def cell(gap: Gap | None) -> str:
    if gap is None:
        return figures.NO_FIGURE
    mean, low, high = map(figures.percent, (gap.comparison.mean, *gap.interval[:2]))
    bounds = f" ({low} to {high})" if math.isfinite(gap.interval.low) else ""
    return f"{mean}{bounds}, {gap.word}"


def gaps(rows: list[Row], over: str, text: str = "fit") -> dict[str, Gap]:
    """Return the leads of the other rows over the row of the attention `over`, by attention; {} if `over` has no row.

    `text` is as in `figures.losses`. A lead is measured over the seeds that both rows have; rows without such seeds are
    left out.
    """
    reference = next((row for row in rows if row.variant == over), None)
    others = [row for row in rows if reference is not None and row is not reference]
    return judged({row.variant: figures.leads(row.summaries, reference.summaries, text) for row in others})


def judged(differences: dict[Key, list[float]]) -> dict[Key, Gap]:
    """Judge by the rule what each comparison has measured, and return its gap; comparisons without values are left out.

    Intervals are corrected by Holm's method over all comparisons.
    """
    comparisons, found = {key: compared(values) for key, values in differences.items() if values}, {}
    for (key, comparison), bounds in zip(comparisons.items(), intervals(list(comparisons.values())), strict=True):
        verdict = judge(comparison, bounds)
        found[key] = Gap(comparison, bounds, WORDS.get(verdict, verdict))
    return found
