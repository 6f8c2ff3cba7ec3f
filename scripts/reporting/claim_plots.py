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
from scripts.reporting.records import MissingRecord, required_curves, speed_record

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
    """Draw perplexity on the training text against characters and against time; bands show the range over seeds."""
    speed = speed_record(results / "runs" / tier / "speed.json")["speed"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained", sharey=True)
    for row, colour in zip(claim.rows, colours(len(claim.rows)), strict=True):
        records = claims.records_of(results / "runs", claim, row, tier)
        tokens, values = map(np.array, required_curves(records, "fit_perplexity"))
        runs = claims.summaries(claim, row, tier, results / "runs")
        ends = [summary["evaluation"]["fit"]["perplexity"] for summary in runs]
        attn = runs[0]["attn"]
        if not speed.get(attn, {}).get("tokens_per_second"):
            raise MissingRecord(f"the speed of {attn} is missing: python -m scripts.reproduce claims=[{claim.name}]")
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
        logarithmic(axis, minor=PLAIN)
    axes[0].legend()
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
