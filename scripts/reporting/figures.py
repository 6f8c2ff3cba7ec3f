"""Figures that several pages show: perplexity, lead over another attention, passes over the text."""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

from omegaconf import DictConfig

from scripts.reporting.rule import compared, interval
from training.runs import NO_FIGURE, with_deviation


class Figure(NamedTuple):
    """A figure as a number, for CSV, and as text, for pages."""

    value: float
    text: str


def shown(figure: Figure | None) -> str:
    return figure.text if figure else NO_FIGURE


def losses(summaries: list[dict], text: str) -> dict[int, float]:
    """Return the log perplexity of each run on a text, by seed.

    `text` is `fit`, `heldout`, or `heldout_best`, which stands for the lowest held-out perplexity during training.
    """
    found = {s["seed"]: s["evaluation"][text] for s in summaries if text in s["evaluation"]}
    return {seed: part["loss"] if "loss" in part else math.log(part["perplexity"]) for seed, part in found.items()}


def mean_loss(summaries: list[dict]) -> float:
    """Return the mean log perplexity on the training text; infinity if there are no runs."""
    return statistics.mean(losses(summaries, "fit").values() or [math.inf])


def perplexity(summaries: list[dict], text: str) -> Figure | None:
    """Return the mean perplexity on a text ± its standard deviation over seeds; None if no run has it."""
    return mean_figure([math.exp(loss) for loss in losses(summaries, text).values()], 2)


def accuracy(summaries: list[dict], text: str) -> Figure | None:
    """Return the mean accuracy on a text ± its standard deviation over seeds; None if no run has it."""
    evaluated = [s["evaluation"].get(text, {}) for s in summaries]
    return mean_figure([found["accuracy"] for found in evaluated if "accuracy" in found], 4)


def mean_figure(values: list[float], digits: int) -> Figure | None:
    """Return the mean of several values, with their standard deviation in its text; None without values."""
    return Figure(statistics.mean(values), with_deviation(values, digits)) if values else None


def lead(summaries: list[dict], reference: list[dict], text: str = "fit") -> Figure | None:
    """Return the mean of the reference's log perplexity minus that of these runs, over the seeds that both have.

    `text` is as in `losses`. The figure's text is in percent, with Student's 95% interval if there are several seeds.
    Returns None if the two have no seed in common.
    """
    return with_interval(leads(summaries, reference, text), percent)


def leads(summaries: list[dict], reference: list[dict], text: str = "fit") -> list[float]:
    """Return what `lead` averages, for each seed, in the order of `summaries`; `text` is as in `losses`."""
    ours, theirs = losses(summaries, text), losses(reference, text)
    return [theirs[seed] - ours[seed] for seed in ours if seed in theirs]


def student_interval(values: list[float]) -> tuple[float, float]:
    """Return Student's 95% interval of the mean of several values; for one value, the value as both bounds."""
    return interval(compared(values), 0.95)[:2] if len(values) > 1 else (values[0], values[0])


def extremes(values: list[float]) -> tuple[float, float]:
    """Return the lowest and the highest value."""
    return min(values), max(values)


def with_interval(
    values: list[float],
    written: Callable[[float], str] = "{:.2f}".format,
    bounds: Callable[[list[float]], tuple[float, float]] = student_interval,
) -> Figure | None:
    """Return the mean of the values, with `bounds(values)` in its text if there are several; None without values."""
    if not values:
        return None
    mean, (low, high) = statistics.mean(values), bounds(values)
    return Figure(mean, f"{written(mean)} ({written(low)} to {written(high)})" if len(values) > 1 else written(mean))


def best_heldout(summaries: list[dict]) -> str:
    """Return the lowest held-out perplexity during training ± its standard deviation, and the passes until then.

    Both are means over runs.
    """
    values, after = [], []
    for summary in summaries:
        if point := summary["evaluation"].get("heldout_best"):
            values.append(point["perplexity"])
            after.append(passes(summary, point["step"] * summary["tokens"] / summary["steps"]))
    return f"{with_deviation(values)} after {statistics.mean(after):.1f} passes" if values else NO_FIGURE


def source_lead(source: DictConfig, row: str, reference: str) -> Figure | None:
    """Return the lead of `row` over `reference` by the perplexities that the source article states.

    Returns None if `row` is the reference, or if `source` lacks one of them.
    """
    if row == reference or row not in source or reference not in source:
        return None
    difference = math.log(source[reference].perplexity / source[row].perplexity)
    return Figure(difference, percent(difference))


def percent(difference: float) -> str:
    return f"{100 * difference:+.1f}%"


def passes(summary: dict, tokens: float) -> float:
    """Return how many passes over its training text a run has made after training on `tokens` characters."""
    return tokens / (summary["data"]["characters"] * (1 - summary["data"]["holdout"]))


def budget(summary: dict) -> str:
    """Return the steps of a run, the characters of each, and the passes over its text."""
    steps, tokens = summary["steps"], summary["tokens"]
    return (
        f"{steps:,} steps of {tokens // steps:,} characters, "
        f"{passes(summary, tokens):.1f} passes over {summary['data']['name']}"
    )


def seeds_in_words(seeds: list[int]) -> str:
    """Return "seeds 1, 2, 3", or "seeds 4 to 15" if there are more than three and none between them is left out."""
    if len(seeds) > 3 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if seeds else "none yet"


def with_quartiles(numerators: list[float], denominators: list[float]) -> Figure:
    """Return the median of the ratios of two times in each round of a benchmark, with the quartiles in its text."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
    return Figure(median, f"{median:.2f} ({low:.2f} to {high:.2f})")


def paired_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Return the median of the rounds' ratios. The machine's speed differs less within a round than between rounds.

    If one of the lists has fewer rounds, the last rounds of the other are left out.
    """
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=False))
