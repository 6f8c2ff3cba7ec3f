"""Draw attentions as points, for the leaderboard and recall.md: their perplexity or recall against a cost."""

import textwrap
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib import ticker

from scripts.reporting.colours import colour_of
from scripts.reporting.plots import PLAIN, label_points, logarithmic
from scripts.reporting.records import label

NO_BREAK = "\u00a0"  # a space at which a line is not broken


class Point(NamedTuple):
    """An attention: its place on the x axis, and its mean quality with a 95% interval or the range over seeds."""

    variant: str
    cost: float
    quality: float
    low: float
    high: float


class Scatter(NamedTuple):
    """What a plot shows. The factor of a quantity is 1 if larger values are better, and -1 if smaller values are."""

    points: list[Point]
    cost: str  # the label of the x axis
    cost_factor: int
    quality: str  # the label of the y axis
    quality_factor: int
    best: str  # what the title says of the points that `best_for_their_cost` returns, before their names
    dashed: tuple[float, str] | None = None  # a quality at which a dashed line is drawn, and what the line stands for


def best_for_their_cost(scatter: Scatter) -> list[Point]:
    """Return the Pareto-optimal points, the one of the best quality first.

    These are the points for which no other point is at least as good in both cost and quality, and better in one.
    """

    def merits(point: Point) -> tuple[float, float]:
        return scatter.cost_factor * point.cost, scatter.quality_factor * point.quality

    def is_best(point: Point) -> bool:
        own, others = merits(point), set(map(merits, scatter.points))
        return not any(other != own and other[0] >= own[0] and other[1] >= own[1] for other in others)

    found = filter(is_best, scatter.points)
    return sorted(found, key=lambda point: -scatter.quality_factor * point.quality)


def draw(scatters: list[Scatter]) -> plt.Figure:
    """Draw each plot in a panel of its own, one below the other."""
    size = (9, 6.5 * len(scatters))
    figure, axes = plt.subplots(len(scatters), figsize=size, layout="constrained", squeeze=False)
    for axis, scatter in zip(axes[:, 0], scatters, strict=True):
        draw_points(axis, scatter)
    # Labels come last, because they depend on the sizes of the panels, which change with every panel that is drawn.
    for axis, scatter in zip(axes[:, 0], scatters, strict=True):
        label_points(axis, names(scatter.points))
    return figure


def names(points: list[Point]) -> dict[str, tuple[float, float]]:
    """Return {name: place}, where points at the same place have one name, in several lines if it is long."""
    by_place: dict[tuple[float, float], list[str]] = {}
    for point in points:
        by_place.setdefault((point.cost, point.quality), []).append(label(point.variant).replace(" ", NO_BREAK))
    joined = {place: "; ".join(found) for place, found in by_place.items()}
    return {textwrap.fill(text, 40, break_on_hyphens=False): place for place, text in joined.items()}


def draw_points(axis: plt.Axes, scatter: Scatter) -> None:
    """Plot quality against cost, with lines from `low` to `high`. Points that are best for their cost have a ring."""
    best = best_for_their_cost(scatter)
    for point in scatter.points:
        axis.plot([point.cost] * 2, [point.low, point.high], color=colour_of(point.variant), linewidth=1, alpha=0.6)
        ring = {"markeredgecolor": "black", "markeredgewidth": 1.5, "zorder": 3} if point in best else {}
        axis.plot(point.cost, point.quality, "o", color=colour_of(point.variant), markersize=6, **ring)
    if scatter.cost_factor < 0:  # the cost is a number of bytes, which ranges over powers of 10, or a perplexity
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(ticker.EngFormatter())
        costs = [point.cost for point in scatter.points]
        if max(costs) < 5 * min(costs):  # a logarithmic axis would have few labels
            axis.xaxis.set_major_locator(ticker.MaxNLocator(8))
            axis.xaxis.set_minor_locator(ticker.NullLocator())
    if scatter.quality_factor < 0:
        logarithmic(axis, minor=PLAIN)
    axis.margins(0.15, 0.08)
    axis.grid(which="both", alpha=0.25)
    axis.set_xlabel(scatter.cost)
    axis.set_ylabel(scatter.quality)
    if scatter.dashed is not None:
        quality, meaning = scatter.dashed
        axis.axhline(quality, color="gray", linewidth=1, linestyle="--", zorder=0)
        axis.set_xlabel(f"{scatter.cost}\n(dashed: {meaning})")
    title = f"{scatter.best} (ringed): {'; '.join(label(point.variant) for point in best)}"
    axis.set_title("\n".join(textwrap.wrap(title, 100, break_on_hyphens=False)), fontsize=10)
