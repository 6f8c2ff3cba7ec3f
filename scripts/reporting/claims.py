"""Read the sources' claims in configs/claim and their records, and judge them by rule.py.

Two rows are compared in pairs of runs with the same seed, or of timings in the same round of a benchmark. Losses are in
nats per character and costs are logarithms, so that a difference of 0.01 is one percent.
"""

import math
import shlex
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
from omegaconf import DictConfig, OmegaConf

from configs.arguments import quote
from configs.cli import compose
from configs.folder import CONFIGS
from data.files import UserError, write_json
from data.reading import OR_NULL, TEXT, WHOLE, misfit, read_object
from models.build import build_model
from scripts.reporting import rule
from scripts.reporting.figures import Figure, leads, with_interval
from scripts.reporting.records import ORIGIN, MissingRecord, composed, finished, record_of
from training.record import Record

TIERS = ("small", "novel", "source")  # experiments
USUAL_TIERS = ("small", "source")  # tiers of a claim that names none
SEEDS = {"small": 5, "novel": 3, "source": 3}  # number of seeds, counted from 0, of a claim that names none
TRAINED = ("fit", "heldout", "position_weight", "longer")  # measures of runs; the others are measures of benchmarks
PERPLEXITY = ("fit", "heldout")
# Types, for `misfit`, of the keys that the provenance of timings has beyond those of ORIGIN.
TIMED = {"precision": TEXT, "tokens": WHOLE, "threads": WHOLE + OR_NULL, "versions": {"torch": TEXT + OR_NULL}}


@cache
def all_claims() -> dict[str, DictConfig]:
    """Return the claims by file name, in the order of their numbers.

    Of claims with the same number, those with more tiers come first.
    """
    paths = sorted((CONFIGS / "claim").glob("*.yaml"))
    loaded = [OmegaConf.merge({"name": path.stem}, OmegaConf.load(path)) for path in paths]
    return {claim.name: claim for claim in sorted(loaded, key=lambda claim: (claim.number, -len(tiers(claim))))}


def tiers(claim: DictConfig) -> tuple[str, ...]:
    return tuple(claim.get("tiers", USUAL_TIERS))


def choose(names: list[str] | None, tier: str) -> dict[str, DictConfig]:
    """Return the claims with these names or numbers, or all claims if None, that are tested at a tier.

    Raises UserError if a name or a number does not exist, or if no claim with it is tested at the tier.
    """
    known = all_claims()
    for name in names or []:
        found = [claim for other, claim in known.items() if name in (other, claim.number)]
        if not found:
            raise UserError(f"there is no claim {name}; there are {', '.join(known)}")
        tested = [each for each in TIERS if any(each in tiers(claim) for claim in found)]
        if tier not in tested:
            raise UserError(f"claim {name} is tested at tier={', '.join(tested)}: got tier={tier}")
    chosen = {n: c for n, c in known.items() if names is None or n in names or c.number in names}
    return {n: c for n, c in chosen.items() if tier in tiers(c)}


def overrides(claim: DictConfig, row: str, tier: str) -> tuple[str, ...]:
    """Return the overrides of train.py for a row, without the seed."""
    own = claim.get(tier) or {}
    words = f"{claim.rows[row]} {own.get('overrides', '')}".format(**own)
    return (f"experiment={tier}", *shlex.split(words))


def seeds(claim: DictConfig, tier: str) -> list[int]:
    return list((claim.get(tier) or {}).get("seeds", range(SEEDS[tier])))


def extra_path(claim: DictConfig, record: Record) -> Path:
    """Return the path of the file that a claim needs in addition to a run's record."""
    return record.folder / f"{claim.also}.json"


def is_done(claim: DictConfig, record: Record) -> bool:
    """Return whether a run is finished and has the extra file that the claim needs; its weights may be missing."""
    return finished(record) is not None and ("also" not in claim or record.has(extra_path(claim, record)))


def records_of(runs: Path, claim: DictConfig, row: str, tier: str) -> list[Record]:
    """Return a record for each seed of a row; a run that was not trained has an empty one."""
    return [record_of(runs, overrides(claim, row, tier), seed) for seed in seeds(claim, tier)]


def extra_contents(runs: Path, claim: DictConfig, row: str, tier: str) -> list[dict]:
    """Return the content of the file at `extra_path` for each seed of a row. Raises UserError if one is damaged."""
    figures = figures_of_lengths if claim.also == "lengths" else figures_of_factors
    paths = [(record, extra_path(claim, record)) for record in records_of(runs, claim, row, tier)]
    return [checked(record.read_object(path), path, figures) for record, path in paths]


def checked(content: dict, path: Path, figures: Callable[[dict], Iterable[float]]) -> dict:
    """Return a file's content. Raises UserError if `figures(content)` fails or contains a number that is not finite."""
    try:
        if not all(map(math.isfinite, figures(content))):
            raise ValueError("a figure is not finite")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__}, {error}") from error
    return content


def figures_of_lengths(lengths: dict) -> list[float]:
    return [loss_increase(lengths), *map(math.exp, lengths["heldout_loss"].values())]


def figures_of_factors(factors: dict) -> list[float]:
    """Return the figures of learned factors that pages and plots show, to check whether they are finite.

    Whether they are finite does not depend on log |f| at initialisation, which is therefore taken to be 0.
    """
    alpha, beta = (np.array(factors[key], float).mean(0) for key in ("alpha", "beta"))
    start = [[0.0] * len(head) for head in factors["f"]]
    return [*position_weight_shape(factors, start).values(), *alpha, *beta]


def summaries(claim: DictConfig, row: str, tier: str, runs: Path) -> list[dict]:
    """Return the summaries of a row's seeds. If runs are missing, raise a MissingRecord that names them."""
    records = records_of(runs, claim, row, tier)
    missing = [str(record.folder) for record in records if not is_done(claim, record)]
    if missing:
        raise MissingRecord(f"these runs are missing, not finished or lack a file of the claim: {', '.join(missing)}")
    return [finished(record) for record in records]


def samples(claim: DictConfig, tier: str, results: Path) -> dict[str, list[float]]:
    """Return the measurements of each row, one for each seed or round.

    They are losses, their increases at longer lengths, figures of learned factors, or logarithms of costs.
    """
    if claim.measure not in TRAINED:
        return benchmarked(claim, benchmark_record(claim, tier, results))
    runs = results / "runs"
    groups = {row: summaries(claim, row, tier, runs) for row in claim.rows}
    if claim.measure in PERPLEXITY:
        return {row: [s["evaluation"][claim.measure]["loss"] for s in group] for row, group in groups.items()}
    extras = {row: extra_contents(runs, claim, row, tier) for row in claim.rows}
    if claim.measure == "longer":
        return {row: list(map(loss_increase, group)) for row, group in extras.items()}
    measured = {}
    for row, group in extras.items():
        start = log_f_at_start(overrides(claim, row, tier))
        shapes = [position_weight_shape(factors, start) for factors in group]
        measured |= {f"{row}, {key}": [shape[key] for shape in shapes] for key in shapes[0]}
    return measured


@cache
def log_f_at_start(overrides: tuple[str, ...]) -> list[list[float]]:
    """Return log |f| at initialisation, [heads][context]."""
    cfg = composed(overrides)
    f = build_model(cfg, vocabulary=2).blocks[0].attn.position_weight.f.detach()
    return (f if cfg.attn.position_weight.positive else f.abs().log()).tolist()


def timing_settings(claim: DictConfig) -> DictConfig:
    """Return the config of scripts.benchmark with which a claim's costs are timed."""
    names = ",".join(quote(key) for key in claim.rows.values())
    return compose([f"variants=[{names}]", "peers=false", *claim.timing], "benchmark")


def is_complete(claim: DictConfig, record: dict) -> bool:
    """Return whether the record of a claim's costs holds every row and, with measure=layers, each at every length."""
    settings = timing_settings(claim)
    if claim.measure == "step":
        return set(settings.variants) <= record.get("seconds", {}).keys()
    lengths = record.get("lengths", {})
    return all(set(settings.variants) <= lengths.get(str(T), {}).keys() for T in settings.layers.lengths)


def costs_path(tier: str, results: Path) -> Path:
    """Return the path of the file with a tier's timings."""
    return results / f"claims/{tier}.costs.json"


def all_costs(tier: str, results: Path) -> dict[str, dict]:
    """Return the timings of a tier, {claim: its record}."""
    path = costs_path(tier, results)
    return read_object(path) if path.exists() else {}


def costs_of(name: str, tier: str, results: Path) -> dict:
    """Return the timings for a claim, whether complete or not; {} if there are none."""
    return all_costs(tier, results).get(name, {})


def write_costs(name: str, tier: str, results: Path, record: dict) -> None:
    """Write the timings for a claim, and keep those of other claims."""
    costs = all_costs(tier, results) | {name: record}
    write_json(costs_path(tier, results), dict(sorted(costs.items())))


def benchmark_record(claim: DictConfig, tier: str, results: Path) -> dict:
    """Return the timings for a claim.

    Raises MissingRecord if they are missing or incomplete, and UserError if they are damaged.
    """
    path, found = costs_path(tier, results), costs_of(claim.name, tier, results)
    command = f"python -m scripts.reproduce claims=[{claim.name}] tier={tier}"

    def measured(record: dict) -> Iterable[float]:
        if not is_complete(claim, record):
            raise MissingRecord(f"{path}: the timings of {claim.name} are not complete: {command} continues them")
        return map(math.exp, chain(*zip(*benchmarked(claim, record).values(), strict=True)))

    if not found:
        raise MissingRecord(f"{path} has no timings of {claim.name}: {command} measures them")
    record = checked(found, path, measured)
    if wrong := misfit(record, {"provenance": ORIGIN | TIMED}):
        raise UserError(f"{path} is damaged: {wrong}")
    return record


def loss_increase(lengths: dict) -> float:
    """Return the mean held-out loss at lengths longer than that of training, minus that at the length of training."""
    losses = {int(T): loss for T, loss in lengths["heldout_loss"].items()}
    return mean(loss for T, loss in losses.items() if T > lengths["trained"]) - losses[lengths["trained"]]


def position_weight_shape(factors: dict, start: list[list[float]]) -> dict[str, float]:
    """Return the figures of learned factors that claim 5 is about. `start` is log |f| at initialisation.

    "near" and "far" are the mean |change| of log |f| from one distance to the next: "near" over the distances 1 to 16,
    "far" over the distances context / 2 to context - 8.
    "far, jump" is the mean |difference| between the means of log |f| over 4 far distances and over the next 4.
    "far left, jump" is the |difference| between the means of log |f| over the last 4 distances and over the 4 before.
    "far, learned" and "far left, learned" are the means of |d - m| over the far distances and over the last 4, where d
    is log |f| - `start` and m the mean of d over all distances. m is subtracted, in each head, because a factor that
    all f of a head share cancels in AFT.
    "beta" is the standard deviation of log |beta| over positions, averaged over heads.
    "gamma" is the standard deviation of gamma over positions, divided by its |mean|.
    """
    with np.errstate(divide="ignore"):  # `checked` refuses figures that are not finite
        logs = np.log(np.abs(np.array(factors["f"], float)))
    near, far, left = (logs[:, places] for places in places_of_claim_5(logs.shape[1]))
    change = logs - np.array(start)
    learned = np.abs(change - change.mean(1, keepdims=True))
    _, learned_far, learned_left = (learned[:, places] for places in places_of_claim_5(logs.shape[1]))
    fours = far[:, : far.shape[1] // 4 * 4].reshape(len(logs), -1, 4).mean(2)
    before_left = logs[:, -8:-4]
    figures = {
        "near": np.abs(np.diff(near)).mean(),
        "far": np.abs(np.diff(far)).mean(),
        "far, jump": np.abs(np.diff(fours)).mean(),
        "far left, jump": np.abs(left.mean(1) - before_left.mean(1)).mean(),
        "far, learned": learned_far.mean(),
        "far left, learned": learned_left.mean(),
        "beta": mean(stdev(math.log(abs(x)) for x in head) for head in factors["beta"]),
        "gamma": stdev(factors["gamma"]) / abs(mean(factors["gamma"])),
    }
    return {key: float(value) for key, value in figures.items()}


def places_of_claim_5(context: int) -> tuple[slice, slice, slice]:
    """Return the distances that claim 5 calls near, far, and far left."""
    return slice(1, 17), slice(context // 2, context - 7), slice(context - 4, context)


def benchmarked(claim: DictConfig, record: dict) -> dict[str, list[float]]:
    """Return the logarithms of costs, one for each round. Peak memory, which is measured once, is repeated.

    For measure=step, "<row>" is the seconds of a training step and "<row>, memory" its peak memory. For measure=layers,
    "<row>, seconds" and "<row>, memory" are those of a layer at the longest length at which every row ran, and
    "<row>, growth" and "<row>, memory growth" are their ratios to those at the shortest length. Raises MissingRecord
    if there are no two such lengths.
    """
    if claim.measure == "step":
        rounds = len(next(iter(record["seconds"].values())))
        seconds = {row: [math.log(s) for s in record["seconds"][key]] for row, key in claim.rows.items()}
        memory = {f"{row}, memory": [math.log(record["peak_bytes"][key])] * rounds for row, key in claim.rows.items()}
        return seconds | memory
    lengths = by_length(claim, record)
    if len(lengths) < 2:
        raise MissingRecord(f"the timings of claim {claim.name} have fewer than two lengths at which every row ran")
    first, last = lengths[min(lengths)], lengths[max(lengths)]
    costs = {}
    for row in claim.rows:
        short, long = first[row]["seconds"], last[row]["seconds"]
        memory = math.log(last[row]["peak_bytes"])
        costs[f"{row}, seconds"] = [math.log(s) for s in long]
        costs[f"{row}, growth"] = [math.log(b / a) for a, b in zip(short, long, strict=True)]
        costs[f"{row}, memory"] = [memory] * len(long)
        costs[f"{row}, memory growth"] = [memory - math.log(first[row]["peak_bytes"])] * len(long)
    return costs


def by_length(claim: DictConfig, record: dict) -> dict[int, dict[str, dict]]:
    """Return {length: {row: measurements}} for the lengths at which every row ran."""
    return {
        int(T): {row: cells[key] for row, key in claim.rows.items()}
        for T, cells in record["lengths"].items()
        if all("seconds" in cells[key] for key in claim.rows.values())
    }


class Outcome(NamedTuple):
    """The result of one comparison of a claim."""

    text: str  # "A < B"
    comparison: rule.Comparison
    interval: rule.Interval
    verdict: str


def outcomes(claim: DictConfig, measured: dict[str, list[float]]) -> list[Outcome]:
    """Return the results of a claim's comparisons, in the order of its yaml."""
    texts, comparisons = [], []
    for a, relation, b in claim.expects:
        pairs = zip(values(a, claim, measured), values(b, claim, measured), strict=True)
        texts.append(f"{a} {relation} {b}")
        comparisons.append(rule.compared([y - x for x, y in pairs], relation))
    judged = zip(texts, comparisons, rule.intervals(comparisons), strict=True)
    return [Outcome(*parts, rule.judge(*parts[1:])) for parts in judged]


def heldout_differences(claim: DictConfig, tier: str, results: Path) -> list[Figure | None]:
    """Return, for each comparison of a claim on fit, the mean of the same difference on held-out text.

    It is the difference of the log perplexities at which each run was best on held-out text. It is None if a row has no
    held-out text, or if the operands are not rows.
    """
    found = []
    for a, _, b in claim.expects:
        if claim.measure != "fit" or not {a, b} <= claim.rows.keys():
            found.append(None)
            continue
        one, other = (summaries(claim, row, tier, results / "runs") for row in (a, b))
        found.append(with_interval(leads(one, other, "heldout_best"), "{:+.2%}".format))
    return found


def values(operand: str | float, claim: DictConfig, measured: dict[str, list[float]]) -> list[float]:
    """Return the measurements of an operand of a comparison.

    An operand is a key of `measured`, the difference of two keys ("A - B"), or a number. A number, or its logarithm if
    the claim is about costs, is repeated for each seed or round.
    """
    if not isinstance(operand, str):
        return [operand if claim.measure in TRAINED else math.log(operand)] * len(next(iter(measured.values())))
    if operand in measured:
        return measured[operand]
    a, b = operand.split(" - ")
    return [x - y for x, y in zip(measured[a], measured[b], strict=True)]


def combined(claim: DictConfig, verdicts: list[str]) -> str:
    """Return the verdict on a claim, for which all its comparisons must hold.

    With `exists: true`, comparisons are grouped by their left row, and it is enough that all of one group hold.
    """
    if not claim.get("exists"):
        return rule.all_hold(verdicts)
    by_row: dict[str, list[str]] = {}
    for (row, _, _), verdict in zip(claim.expects, verdicts, strict=True):
        by_row.setdefault(row, []).append(verdict)
    return rule.one_holds([rule.all_hold(group) for group in by_row.values()])


def verdict(claim: DictConfig, outcomes: list[Outcome]) -> str:
    return combined(claim, [outcome.verdict for outcome in outcomes])


def without_one_seed(claim: DictConfig, tier: str, measured: dict[str, list[float]]) -> dict[int, str]:
    """Return {seed: verdict} for the seeds without which a claim would have another verdict, except undecided.

    Returns {} for claims on costs and for claims with two seeds or fewer.
    """
    numbers = seeds(claim, tier)
    if claim.measure not in TRAINED or len(numbers) < 3:  # two seeds less one decide nothing
        return {}
    found, known = {}, verdict(claim, outcomes(claim, measured))
    for i, seed in enumerate(numbers):
        others = {row: values[:i] + values[i + 1 :] for row, values in measured.items()}
        found[seed] = verdict(claim, outcomes(claim, others))
    return {seed: other for seed, other in found.items() if other not in (known, rule.UNDECIDED)}


def seeds_needed(claim: DictConfig, outcomes: list[Outcome]) -> tuple[int, str] | None:
    """Return the number of seeds or rounds that would decide a claim, and the verdict; None if unknown or too large."""
    return rule.seeds_to_decide([outcome.comparison for outcome in outcomes], partial(combined, claim))
