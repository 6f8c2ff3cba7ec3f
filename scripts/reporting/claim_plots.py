"""Draw the plot of each claim from its records."""

import math
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker
from omegaconf import DictConfig

from scripts.reporting import claims
from scripts.reporting.plots import COLOURS, PLAIN, band, by_length_axes, colours, end, logarithmic, measured_on
from scripts.reporting.records import curves_by_row

QUANTITIES = {
    "fit": "perplexity on the training text",
    "heldout": "perplexity on held-out text",
    "step": "seconds a step",
}


def draw(claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path) -> plt.Figure:
    """Draw the plot that a claim's yaml names. The title is the claim and its verdict."""
    kinds = {"dots": dots, "curves": curves, "lengths": lengths, "unseen": unseen, "position_weight": position_weight}
    figure = kinds[claim.plot](claim, tier, measured, results)
    verdict = claims.verdict(claim, claims.outcomes(claim, measured))
    figure.suptitle(f"{claim.says}\n{tier} tier: {verdict}", fontsize=10, wrap=True)
    return figure


def dots(claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path) -> plt.Figure:
    """Draw a line for each row: a dot for each seed or round, and a bar at the mean."""
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
    axis.set_xlabel(f"{QUANTITIES[claim.measure]}; lower is better")
    axis.grid(axis="x", alpha=0.25)
    return figure


def curves(claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path) -> plt.Figure:
    """Draw perplexity on the training text against characters, and beside it the lead over the first row.

    The lead is the difference of log perplexities at the same seed, in percent; bands show the range over seeds.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    groups = {row: claims.records_of(results / "runs", claim, row, tier) for row in claim.rows}
    tokens, by_row = curves_by_row(groups, "fit_loss")
    first, reference = next(iter(by_row.items()))
    for (row, own), colour in zip(by_row.items(), colours(len(groups)), strict=True):
        runs = claims.summaries(claim, row, tier, results / "runs")
        left.plot(tokens, np.exp(own).mean(0), color=colour, label=row)
        band(left, tokens, np.exp(own), colour)
        end(left, tokens[-1], [summary["evaluation"]["fit"]["perplexity"] for summary in runs], colour)
        if row != first:
            leads = 100 * (reference - own)
            right.plot(tokens, leads.mean(0), color=colour, label=row)
            band(right, tokens, leads, colour)
    for axis in (left, right):
        axis.set_xlabel("characters trained on")
        axis.xaxis.set_major_formatter(ticker.EngFormatter())
    left.set_ylabel("perplexity on the training text")
    right.set_ylabel(f"lead over {first}, %")
    right.axhline(0, color=colours(len(groups))[0], linewidth=1)
    right.grid(alpha=0.25)
    figure.supxlabel(measured_on(groups[first][0]), fontsize=9)
    logarithmic(left, minor=PLAIN)
    left.legend()
    return figure


def lengths(claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path) -> plt.Figure:
    """Draw the time and peak memory of a layer by length; bands show the range over rounds."""
    record = claims.benchmark_record(claim, tier, results)
    tokens = record["provenance"]["tokens"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    table = claims.by_length(claim, record)
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


def unseen(claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path) -> plt.Figure:
    """Draw held-out perplexity by the length of the texts; bands show the range over seeds."""
    figure, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for row, colour in zip(claim.rows, colours(len(claim.rows)), strict=True):
        runs = claims.extra_contents(results / "runs", claim, row, tier)
        tested = [int(T) for T in runs[0]["heldout_loss"]]
        values = np.exp([list(run["heldout_loss"].values()) for run in runs])
        axis.plot(tested, values.mean(0), "o-", color=colour, label=row, markersize=4)
        band(axis, tested, values, colour)
    axis.axvline(runs[0]["trained"], color="grey", linestyle=":", label="length of training")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(PLAIN)
    axis.set_xlabel("length of the test texts, characters")
    axis.set_ylabel("perplexity on held-out text")
    axis.grid(alpha=0.25)
    axis.legend()
    return figure


def position_weight(claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path) -> plt.Figure:
    """Draw f of each head by distance above, and alpha, beta and gamma by position below; a column for each seed."""
    (row,) = claim.rows
    runs = dict(zip(claims.seeds(claim, tier), claims.extra_contents(results / "runs", claim, row, tier), strict=True))
    figure, axes = plt.subplots(2, len(runs), figsize=(4 * len(runs), 6.5), layout="constrained", sharey="row")
    for (upper, lower), (seed, factors) in zip(np.transpose(axes), runs.items(), strict=True):
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
