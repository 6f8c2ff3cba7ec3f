"""The sources' claims: what configs/claim says of each, what the records say, and the verdict.

Two rows are compared pair by pair: the same seed, or the same round of a benchmark. Losses are in nats a
character and costs are logarithms, so that a difference of 0.01 is one percent. rule.py judges.
"""

import math
import shlex
import statistics
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from omegaconf import DictConfig, OmegaConf

from configs.cli import compose
from configs.folder import CONFIGS
from data.files import UserError
from data.reading import OR_NULL, TEXT, WHOLE, misfit, read_object
from scripts.reporting.records import SPEED, NotThere, finished
from scripts.reporting.rule import Comparison, Interval, all_hold, intervals, judge, one_holds, seeds_to_decide
from training.packed import find
from training.record import Record

TIERS = ("cpu", "novel", "full")
USUAL_TIERS = ("cpu", "full")  # of a claim that names none
SEEDS = (0, 1, 2)
TRAINED = ("fit", "heldout", "position_weight", "longest")  # measured in runs; the others in benchmarks
PERPLEXITY = ("fit", "heldout")
ORIGIN = {  # of a benchmark
    **SPEED["provenance"],
    "precision": TEXT,
    "tokens": WHOLE,
    "threads": WHOLE + OR_NULL,
    "versions": {"torch": TEXT + OR_NULL},
}


@cache
def all_claims() -> dict[str, DictConfig]:
    """The claims by the name of their file, in order."""
    loaded = {path.stem: OmegaConf.load(path) for path in sorted((CONFIGS / "claim").glob("*.yaml"))}
    return dict(sorted(loaded.items(), key=lambda item: item[1].number))


def tiers(claim: DictConfig) -> tuple[str, ...]:
    """The tiers at which a claim is tested."""
    return tuple(claim.get("tiers", USUAL_TIERS))


def choose(names: list[str] | None, tier: str) -> dict[str, DictConfig]:
    """The claims of these names or numbers that are tested at a tier, or all of them.

    Raises UserError for a name or a tier that is none, and for a name whose claim is not tested at the tier.
    """
    if tier not in TIERS:
        raise UserError(f"tier must be one of {', '.join(TIERS)}: got {tier}")
    known = all_claims()
    for name in names or []:
        if not any(name in (other, claim.number) for other, claim in known.items()):
            raise UserError(f"there is no claim {name}; there are {', '.join(known)}")
    chosen = {n: c for n, c in known.items() if names is None or n in names or c.number in names}
    for name, claim in chosen.items():
        if name in (names or []) and tier not in tiers(claim):
            raise UserError(f"claim {name} is tested at tier={', '.join(tiers(claim))}: got tier={tier}")
    return {n: c for n, c in chosen.items() if tier in tiers(c)}


def overrides(claim: DictConfig, row: str, tier: str) -> tuple[str, ...]:
    """What train.py is to be called with for a row, without the seed."""
    own = claim.get(tier) or {}
    words = f"{claim.rows[row]} {own.get('overrides', '')}".format(**own)
    return (f"experiment={tier}", *shlex.split(words))


def seeds(claim: DictConfig, tier: str) -> list[int]:
    return list((claim.get(tier) or {}).get("seeds", SEEDS))


@cache
def composed(overrides: tuple[str, ...]) -> DictConfig:
    return compose([*overrides, "seed=0"])


def run_name(overrides: tuple[str, ...], seed: int) -> str:
    return composed(overrides).job.name.removesuffix("0") + str(seed)


def record_of(runs: Path, claim: DictConfig, row: str, seed: int, tier: str) -> Record:
    return find(runs / tier / run_name(overrides(claim, row, tier), seed))


def extra(claim: DictConfig, record: Record) -> Path:
    """The file beside a run's record that a claim needs too."""
    return record.folder / f"{claim.also}.json"


def is_done(claim: DictConfig, record: Record) -> bool:
    """Whether the record of a run is all there; its weights may be elsewhere."""
    return finished(record) is not None and ("also" not in claim or record.has(extra(claim, record)))


def records_of(runs: Path, claim: DictConfig, row: str, tier: str) -> list[Record]:
    """The records of a row's seeds, whether they are there or not."""
    return [record_of(runs, claim, row, seed, tier) for seed in seeds(claim, tier)]


def kept(runs: Path, claim: DictConfig, row: str, tier: str) -> list[dict]:
    """What was kept beside the records of a row's seeds. Raises UserError where it is damaged."""
    figures = figures_of_lengths if claim.also == "lengths" else figures_of_factors
    paths = [(record, extra(claim, record)) for record in records_of(runs, claim, row, tier)]
    return [checked(record.read_object(path), path, figures) for record, path in paths]


def checked(content: dict, path: Path, figures: Callable[[dict], Iterable[float]]) -> dict:
    """A file's content. Raises UserError where the figures computed from it cannot be, or are not finite."""
    try:
        if not all(map(math.isfinite, figures(content))):
            raise ValueError("a figure is not finite")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__}, {error}") from error
    return content


def figures_of_lengths(lengths: dict) -> list[float]:
    return [beyond(lengths), *map(math.exp, lengths["heldout_loss"].values())]


def figures_of_factors(factors: dict) -> list[float]:
    """What is said of learned factors, and the means over heads [heads, positions] that are drawn."""
    drawn = [np.array(factors[key], float).mean(0) for key in ("alpha", "beta")]
    return [*position_weight_shape(factors).values(), *drawn[0], *drawn[1]]


def summaries(claim: DictConfig, row: str, tier: str, runs: Path) -> list[dict]:
    """The summaries of a row's seeds. Raises UserError that names what is missing."""
    records = records_of(runs, claim, row, tier)
    missing = [str(record.folder) for record in records if not is_done(claim, record)]
    if missing:
        raise NotThere(f"these runs are needed and not there: {', '.join(missing)}")
    return [finished(record) for record in records]


def samples(name: str, tier: str, results: Path) -> dict[str, list[float]]:
    """What was measured of each row, once for each seed or round: losses, logarithms of costs, or of w."""
    claim = all_claims()[name]
    if claim.measure not in TRAINED:
        return benchmarked(claim, benchmark_record(name, tier, results))
    runs = results / "runs"
    found = {row: summaries(claim, row, tier, runs) for row in claim.rows}
    if claim.measure in PERPLEXITY:
        return {row: [s["evaluation"][claim.measure]["loss"] for s in group] for row, group in found.items()}
    if claim.measure == "longest":
        return {row: [beyond(lengths) for lengths in kept(runs, claim, row, tier)] for row in claim.rows}
    (row,) = claim.rows
    shapes = [position_weight_shape(factors) for factors in kept(runs, claim, row, tier)]
    return {key: [shape[key] for shape in shapes] for key in shapes[0]}


def page(name: str, tier: str, results: Path) -> Path:
    """Where a claim's files lie, without their suffix: .md, .png, .svg, and .json for what was timed."""
    return results / "claims" / tier / name


def benchmark_record(name: str, tier: str, results: Path) -> dict:
    path = page(name, tier, results).with_suffix(".json")
    if not path.exists():
        raise NotThere(f"{path} is needed and not there: python -m scripts.reproduce claims=[{name}] measures it")
    record = checked(read_object(path), path, partial(figures_of_rounds, all_claims()[name]))
    if wrong := misfit(record, {"provenance": ORIGIN}):
        raise UserError(f"{path} is damaged: {wrong}")
    return record


def figures_of_rounds(claim: DictConfig, record: dict) -> list[float]:
    found = list(benchmarked(claim, record).values())
    return [math.exp(value) for values in zip(*found, strict=True) for value in values]


def beyond(lengths: dict) -> float:
    """The loss at the longest length, less that at the length trained at."""
    losses = {int(T): loss for T, loss in lengths["heldout_loss"].items()}
    return losses[max(losses)] - losses[lengths["trained"]]


def position_weight_shape(factors: dict) -> dict[str, float]:
    """What claim 5 says of the learned factors, as numbers.

    f near, f far: the mean step of log f from one distance to the next, over the nearest 16
    distances but 0, and over those from half of the context to 8 before its end.
    f at the far left: how far the last 4 distances of log f are from the mean of those far ones.
    beta, gamma: the standard deviation over positions, of log beta and of gamma over its mean.
    """
    logs = [[math.log(abs(x)) for x in head] for head in factors["f"]]
    T = len(logs[0])
    far = range(T // 2, T - 8)

    def step(head: list[float], places) -> float:
        return statistics.mean(abs(head[i + 1] - head[i]) for i in places)

    gamma = factors["gamma"]
    return {
        "f near": statistics.mean(step(head, range(1, 16)) for head in logs),
        "f far": statistics.mean(step(head, far) for head in logs),
        "f at the far left": statistics.mean(
            abs(statistics.mean(head[-4:]) - statistics.mean(head[i] for i in far)) for head in logs
        ),
        "beta": statistics.mean(statistics.stdev(math.log(abs(x)) for x in head) for head in factors["beta"]),
        "gamma": statistics.stdev(gamma) / abs(statistics.mean(gamma)),
    }


def benchmarked(claim: DictConfig, record: dict) -> dict[str, list[float]]:
    """Logarithms of costs, round by round: of each row, and under names of their own.

    `step`: the seconds of a training step; "<row>, memory": its peak memory, measured once.
    `layers`: "<row>, seconds" and "<row>, memory" of a layer at the longest length at which every
    row ran, and "<row>, growth" and "<row>, memory growth" from the shortest length to that one.
    """
    if claim.measure == "step":
        rounds = len(next(iter(record["seconds"].values())))
        seconds = {row: [math.log(s) for s in record["seconds"][key]] for row, key in claim.rows.items()}
        memory = {f"{row}, memory": [math.log(record["peak_bytes"][key])] * rounds for row, key in claim.rows.items()}
        return seconds | memory
    lengths = by_length(claim, record)
    first, last = lengths[min(lengths)], lengths[max(lengths)]
    found = {}
    for row in claim.rows:
        short, long = first[row]["seconds"], last[row]["seconds"]
        memory = math.log(last[row]["peak_bytes"])
        found[f"{row}, seconds"] = [math.log(s) for s in long]
        found[f"{row}, growth"] = [math.log(b / a) for a, b in zip(short, long, strict=True)]
        found[f"{row}, memory"] = [memory] * len(long)
        found[f"{row}, memory growth"] = [memory - math.log(first[row]["peak_bytes"])] * len(long)
    return found


def by_length(claim: DictConfig, record: dict) -> dict[int, dict[str, dict]]:
    """{length: {row: what was measured}}, of the lengths at which every row ran."""
    return {
        int(T): {row: cells[key] for row, key in claim.rows.items()}
        for T, cells in record["lengths"].items()
        if all("seconds" in cells[key] for key in claim.rows.values())
    }


class Outcome(NamedTuple):
    """What became of one comparison that a claim makes."""

    text: str  # A < B
    comparison: Comparison
    interval: Interval
    verdict: str


def outcomes(claim: DictConfig, measured: dict[str, list[float]]) -> list[Outcome]:
    """What became of each of a claim's comparisons, in the order of its yaml."""
    comparisons = [compared(*expected, claim, measured) for expected in claim.expects]
    texts = [f"{a} {relation} {b}" for a, relation, b in claim.expects]
    found = intervals(comparisons)
    return [Outcome(*parts, judge(*parts[1:])) for parts in zip(texts, comparisons, found, strict=True)]


def compared(a, relation: str, b, claim: DictConfig, measured: dict[str, list[float]]) -> Comparison:
    n = len(next(iter(measured.values())))
    pairs = zip(values(a, claim, measured, n), values(b, claim, measured, n), strict=True)
    differences = [y - x for x, y in pairs]
    return Comparison(relation, statistics.mean(differences), statistics.stdev(differences) if n > 1 else math.inf, n)


def values(operand, claim: DictConfig, measured: dict[str, list[float]], n: int) -> list[float]:
    """A row's samples, the differences of two rows ("A - B"), or a number, n times."""
    if not isinstance(operand, str):
        return [operand if claim.measure in TRAINED else math.log(operand)] * n
    if operand in measured:
        return measured[operand]
    a, b = operand.split(" - ")
    return [x - y for x, y in zip(measured[a], measured[b], strict=True)]


def combined(claim: DictConfig, verdicts: list[str]) -> str:
    """One verdict on a claim, from those on its comparisons in the order of its yaml.

    All of them have to hold; of a claim that something `exists`, all those of one row.
    """
    if not claim.get("exists"):
        return all_hold(verdicts)
    by_row: dict[str, list[str]] = {}
    for (row, _, _), verdict in zip(claim.expects, verdicts, strict=True):
        by_row.setdefault(row, []).append(verdict)
    return one_holds([all_hold(group) for group in by_row.values()])


def verdict(claim: DictConfig, found: list[Outcome]) -> str:
    return combined(claim, [outcome.verdict for outcome in found])


def needed(claim: DictConfig, found: list[Outcome]) -> int | None:
    """The number of seeds, or rounds, that would decide an undecided claim; None: more than are looked for."""
    return seeds_to_decide([outcome.comparison for outcome in found], partial(combined, claim))
