"""The plot of each claim, from the records alone."""

import math
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker
from omegaconf import DictConfig

from scripts.reporting.claims import (
    all_claims,
    benchmark_record,
    by_length,
    kept,
    outcomes,
    records_of,
    seeds,
    summaries,
    verdict,
)
from scripts.reporting.plots import COLOURS, PLAIN, band, by_length_axes, colours, end, measured_on
from scripts.reporting.records import NotThere, logged, speed_record


def draw(name: str, tier: str, measured: dict[str, list[float]], results: Path) -> plt.Figure:
    """The plot that a claim's yaml asks for, with the claim and its verdict as title."""
    claim = all_claims()[name]
    plots = {"dots": dots, "curves": curves, "lengths": lengths, "unseen": unseen, "position_weight": position_weight}
    figure = plots[claim.plot](name, tier, measured, results)
    figure.suptitle(f"{claim.says}\n{tier} tier: {verdict(claim, outcomes(claim, measured))}", fontsize=10, wrap=True)
    return figure


def dots(name: str, tier: str, measured: dict[str, list[float]], results: Path) -> plt.Figure:
    """A line per row: a dot per seed or round, and a bar at the mean."""
    claim = all_claims()[name]
    rows = list(claim.rows)
    figure, axis = plt.subplots(figsize=(7, 1.4 + 0.36 * len(rows)), layout="constrained")
    best = min(rows, key=lambda row: statistics.mean(measured[row]))
    for place, row in enumerate(rows):
        values = [math.exp(value) for value in measured[row]]
        colour = COLOURS[1] if row == best else COLOURS[0]
        axis.plot(values, [place] * len(values), "o", color=colour, alpha=0.6, markersize=5)
        axis.plot(statistics.mean(values), place, "|", color=colour, markersize=18, markeredgewidth=2)
    axis.set_yticks(range(len(rows)), rows)
    axis.invert_yaxis()
    axis.set_xlabel(f"{quantity(claim)}; lower is better")
    axis.grid(axis="x", alpha=0.25)
    return figure


def quantity(claim: DictConfig) -> str:
    names = {
        "fit": "perplexity on the training text",
        "heldout": "perplexity on held-out text",
        "step": "seconds a step",
    }
    return names[claim.measure]


def curves(name: str, tier: str, measured: dict[str, list[float]], results: Path) -> plt.Figure:
    """Perplexity on the training text against characters and against time; bands from lowest to highest seed.

    The time is that of as many steps at the speed that scripts.benchmark measure=rows measured side by side.
    """
    claim = all_claims()[name]
    speed = speed_record(results / "runs" / tier / "speed.json")["speed"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained", sharey=True)
    for row, colour in zip(claim.rows, colours(len(claim.rows)), strict=True):
        records = records_of(results / "runs", claim, row, tier)
        places, perplexities = logged(records, "fit_perplexity")
        tokens, values = np.array(places), np.array(perplexities)
        found = summaries(claim, row, tier, results / "runs")
        ends = [summary["evaluation"]["fit"]["perplexity"] for summary in found]
        attn = found[0]["attn"]
        if not speed.get(attn, {}).get("tokens_per_second"):
            raise NotThere(f"the speed of {attn} is needed and not there: python -m scripts.reproduce claims=[{name}]")
        for axis, x in zip(axes, (tokens, tokens / speed[attn]["tokens_per_second"] / 60), strict=True):
            axis.plot(x, values.mean(0), color=colour, label=row)
            band(axis, x, values, colour)
            end(axis, x[-1], ends, colour)
    axes[0].set_xlabel("characters trained on")
    axes[0].xaxis.set_major_formatter(ticker.EngFormatter())
    axes[1].set_xlabel("minutes of training, at the speed measured side by side")
    axes[0].set_ylabel("perplexity on the training text")
    figure.supxlabel(measured_on(records[0]), fontsize=9)
    for axis in axes:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(PLAIN)
        axis.yaxis.set_minor_formatter(PLAIN)
        axis.grid(which="both", alpha=0.25)
    axes[0].legend()
    return figure


def lengths(name: str, tier: str, measured: dict[str, list[float]], results: Path) -> plt.Figure:
    """Time and peak memory of a layer by length; bands from the fastest to the slowest round."""
    claim = all_claims()[name]
    record = benchmark_record(name, tier, results)
    tokens = record["provenance"]["tokens"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    table = by_length(claim, record)
    for row, colour in zip(claim.rows, colours(len(claim.rows)), strict=True):
        seconds = np.array([table[T][row]["seconds"] for T in table]).T / tokens * 1e6
        axes[0].plot(list(table), np.median(seconds, axis=0), "o-", color=colour, label=row, markersize=4)
        band(axes[0], list(table), seconds, colour)
        memory = [table[T][row]["peak_bytes"] / 2**20 for T in table]
        axes[1].plot(list(table), memory, "o-", color=colour, label=row, markersize=4)
    axes[0].set_ylabel("forward and backward, microseconds a character")
    axes[1].set_ylabel(f"peak memory, MiB for {tokens:,} characters")
    for axis in axes:
        by_length_axes(axis)
    axes[0].legend()
    return figure


def unseen(name: str, tier: str, measured: dict[str, list[float]], results: Path) -> plt.Figure:
    """Held-out perplexity at lengths that were and were not trained at; bands from lowest to highest seed."""
    claim = all_claims()[name]
    figure, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for row, colour in zip(claim.rows, colours(len(claim.rows)), strict=True):
        found = kept(results / "runs", claim, row, tier)
        tested = [int(T) for T in found[0]["heldout_loss"]]
        values = np.exp([list(one["heldout_loss"].values()) for one in found])
        axis.plot(tested, values.mean(0), "o-", color=colour, label=row, markersize=4)
        band(axis, tested, values, colour)
    axis.axvline(found[0]["trained"], color="grey", linestyle=":", label="length trained at")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(PLAIN)
    axis.set_xlabel("length of the texts tested on, characters")
    axis.set_ylabel("perplexity on held-out text")
    axis.grid(alpha=0.25)
    axis.legend()
    return figure


def position_weight(name: str, tier: str, measured: dict[str, list[float]], results: Path) -> plt.Figure:
    """f of each head by distance, for seeds side by side, and alpha, beta and gamma by position below."""
    claim = all_claims()[name]
    (row,) = claim.rows
    found = dict(zip(seeds(claim, tier), kept(results / "runs", claim, row, tier), strict=True))
    figure, axes = plt.subplots(2, len(found), figsize=(4 * len(found), 6.5), layout="constrained", sharey="row")
    for (upper, lower), (seed, factors) in zip(np.transpose(axes), found.items(), strict=True):
        heads = len(factors["f"])
        for head, f in enumerate(factors["f"]):
            upper.plot(f, color=plt.cm.viridis(head / max(1, heads - 1)), linewidth=1, label=f"head {head}")
        upper.set_yscale("log")
        upper.set_title(f"seed {seed}", fontsize=9)
        upper.set_xlabel("distance t - u, characters")
        for key, colour in (("alpha", COLOURS[0]), ("beta", COLOURS[1])):
            values = np.array(factors[key])
            lower.plot(values.mean(0), color=colour, label=f"{key}, mean of the heads")
            lower.fill_between(range(values.shape[1]), values.min(0), values.max(0), color=colour, alpha=0.15)
        lower.plot(factors["gamma"], color=COLOURS[2], label="gamma")
        lower.set_xlabel("position, characters")
        for axis in (upper, lower):
            axis.grid(which="both", alpha=0.25)
    axes[0][0].set_ylabel("learned f, 1 at the start")
    axes[0][0].legend(fontsize=6, ncols=2)
    axes[1][0].set_ylabel("learned factors, 1 at the start")
    axes[1][0].legend(fontsize=7)
    return figure
