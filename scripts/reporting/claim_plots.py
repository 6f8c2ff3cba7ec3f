"""Draw the plot of each claim from its records."""

import math
import statistics
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker
from omegaconf import DictConfig

from scripts.reporting import claims, figures
from scripts.reporting.colours import OF_NO_ATTENTION, attention_of, colour_of, colours_of_rows
from scripts.reporting.plots import (
    BARS,
    PLAIN,
    band,
    by_length_axes,
    end,
    end_of_lead,
    logarithmic,
    mean_line,
    measured_on,
    name_lines,
)
from scripts.reporting.records import composed, curves_by_row, label
from scripts.reporting.rule import CONTRADICTED, EQUIVALENT, UNDECIDED

QUANTITIES = {
    "fit": "perplexity on the training text",
    "heldout": "perplexity on held-out text",
    "step": "seconds a step",
}

Names = dict[plt.Axes, tuple[dict[str, tuple[float, float]], dict[str, str]]]  # arguments of `name_lines`
LEAST_LEAD = -15.0  # lower limit of the plot of leads at unseen lengths; rows that fail there would flatten the others
MOST_F = 2.0  # upper limit of the plots of f; at small distances f can be many times larger


def draw(claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path) -> plt.Figure:
    """Draw the plot that a claim's yaml names.

    Its title has the verdict, and what was found in each comparison. A row that was expected to be no worse is called
    better if its interval is above 0. Claims about a learned w compare numbers such as "far, jump", which the claim's
    page explains.
    """
    kinds = (dots, positions, curves, depth, lengths, unseen, position_weight)
    figure, names = {kind.__name__: kind for kind in kinds}[claim.plot](claim, tier, measured, results)
    title = f"{tier} tier, {title_of(claim, claims.outcomes(claim, measured))}"
    if claim.measure == "position_weight":
        title += ". The claim's page explains these figures"
    figure.suptitle(textwrap.fill(title, int(11 * figure.get_figwidth())), fontsize=10)
    for axis, (points, colours) in names.items():  # after the title, which changes the size of the axes
        name_lines(axis, points, colours)
    return figure


def title_of(claim: DictConfig, judged: list[claims.Outcome]) -> str:
    """Return the verdict on a claim, and what was found in its comparisons, the undecided ones last."""
    decided, undecided = [], []
    for (a, _, b), outcome in zip(claim.expects, judged, strict=True):
        if outcome.verdict == UNDECIDED:
            undecided.append(f"{with_brackets(a)} or {with_brackets(b)}")
        elif outcome.verdict == EQUIVALENT:
            decided.append(f"{with_brackets(a)} equivalent to {with_brackets(b)}")
        elif outcome.verdict == CONTRADICTED:
            decided.append(order(claim, b, a))
        else:
            decided.append(order(claim, a, b, known=outcome.interval.low > 0))
    parts = {"Found": decided, "Not decided": undecided}
    found = ". ".join(f"{kind}: {'; '.join(outcomes)}" for kind, outcomes in parts.items() if outcomes)
    return f"claim {claims.verdict(claim, judged)}. {found}"


def order(claim: DictConfig, first: str | float, second: str | float, known: bool = True) -> str:
    """Return that the figure of `first` is lower than that of `second` or, if this is not known, no higher."""
    if not isinstance(first, str):
        return f"{second} above {first:g}"
    if not isinstance(second, str):
        return f"{first} below {second:g}"
    if claim.measure in claims.PERPLEXITY and " - " not in first:
        return f"{first} {'better' if known else 'no worse'} than {second}"
    return f"{with_brackets(first)} {'lower' if known else 'no higher'} than {with_brackets(second)}"


def with_brackets(operand: str | float) -> str:
    """Return one side of a comparison as text. The difference of two rows is put in brackets."""
    return f"({operand})" if " - " in str(operand) else str(operand)


def colours_of(claim: DictConfig) -> dict[str, str]:
    """Return the colour of each row of a claim."""
    shown = [attention_of(row, str(overrides)) for row, overrides in claim.rows.items()]
    return dict(zip(claim.rows, colours_of_rows(shown), strict=True))


def dots(claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path) -> tuple[plt.Figure, Names]:
    """Draw each row at a height of its own: a dot for each seed, and a bar at the mean, in the attention's colour."""
    figure, axis = plt.subplots(figsize=(7, 1.4 + 0.36 * len(claim.rows)), layout="constrained")
    colours = {row: colour_of(attention_of(row, str(overrides))) for row, overrides in claim.rows.items()}
    draw_dots(axis, claim, measured, colours)
    return figure, {}


def positions(
    claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path
) -> tuple[plt.Figure, Names]:
    """Draw the same as `dots`, and beside it the lead of the first row over each other row by position.

    The lead is the difference of mean log perplexities, in percent, averaged over seeds and over neighbouring positions
    of the context.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 1.4 + 0.5 * len(claim.rows)), layout="constrained")
    first, *others = claim.rows
    # The other rows, which are often settings of the same attention, have no colours of attentions.
    colour_by_row = dict(zip(others, plt.cm.viridis(np.linspace(0, 0.9, len(others))), strict=True))
    draw_dots(left, claim, measured, colour_by_row | {first: colours_of(claim)[first]})
    by_row = {row: loss_by_position(claim, tier, row, results) for row in claim.rows}
    reference, ends = by_row[first], {}
    for row, colour in colour_by_row.items():
        # A single position has few targets. Later positions are therefore averaged with their neighbours.
        edges = np.unique(np.geomspace(1, len(reference) + 1, 13).astype(int)) - 1
        leads = 100 * np.add.reduceat(by_row[row] - reference, edges[:-1]) / np.diff(edges)
        places = (edges[:-1] + edges[1:] + 1) / 2
        right.plot(places, leads, "o-", color=colour, markersize=3)
        ends[row] = places[-1], leads[-1]
    right.axhline(0, color="black", linewidth=1)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter(PLAIN)
    right.set_xlabel("position in the context, characters")
    right.set_ylabel(f"lead of {first}, %, training text")
    right.grid(alpha=0.25)
    right.set_xticks([2**n for n in range(int(np.log2(len(reference))) + 1)])
    return figure, {right: (ends, colour_by_row)}


def loss_by_position(claim: DictConfig, tier: str, row: str, results: Path) -> np.ndarray:
    """Return the mean loss on the training text at each position, averaged over a row's seeds."""
    records = claims.records_of(results / "runs", claim, row, tier)
    return np.mean([record.read_object(record.loss_by_position)["fit"] for record in records], 0)


def draw_dots(axis: plt.Axes, claim: DictConfig, measured: dict[str, list[float]], colour_by_row: dict) -> None:
    rows = list(claim.rows)
    best = min(rows, key=lambda row: statistics.mean(map(math.exp, measured[row])))
    axis.set_yticks(range(len(rows)), rows)
    for place, (row, name) in enumerate(zip(rows, axis.get_yticklabels(), strict=True)):
        values = [math.exp(value) for value in measured[row]]
        colour = colour_by_row[row]
        axis.plot(values, [place] * len(values), "o", color=colour, alpha=0.6, markersize=5)
        axis.plot(statistics.mean(values), place, "|", color=colour, markersize=18, markeredgewidth=2)
        name.set_fontweight("bold" if row == best else "normal")
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlabel(f"{QUANTITIES[claim.measure]}, lower is better (bold: the best)")
    axis.grid(axis="x", alpha=0.25)


def curves(claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path) -> tuple[plt.Figure, Names]:
    """Draw perplexity on the training text against characters, and beside it the lead over the first row.

    The lead is the difference of log perplexities at the same seed, in percent; bands show the range over seeds. The
    dot at the end of a curve is the mean of the final evaluations; the dot of a lead also has its 95% interval.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    groups = {row: claims.records_of(results / "runs", claim, row, tier) for row in claim.rows}
    tokens, by_row = curves_by_row(groups, "fit_loss")
    first, reference = next(iter(by_row.items()))
    reference_runs = claims.summaries(claim, first, tier, results / "runs")
    ends, lead_ends, last = {}, {}, tokens[-1]
    colour_by_row = colours_of(claim)
    for row, own in by_row.items():
        runs, colour = claims.summaries(claim, row, tier, results / "runs"), colour_by_row[row]
        mean_line(left, tokens, np.exp(own), colour)
        ends[row] = end(left, last, [summary["evaluation"]["fit"]["perplexity"] for summary in runs], colour)
        if row != first:
            mean_line(right, tokens, 100 * (reference - own), colour)
            lead_ends[row] = end_of_lead(right, last, figures.leads(runs, reference_runs), colour)
    for axis in (left, right):
        axis.set_xlabel("characters trained on")
        axis.xaxis.set_major_formatter(ticker.EngFormatter())
    left.set_ylabel("perplexity on the training text")
    right.set_ylabel(f"lead over {first}, %")
    right.axhline(0, color=colour_by_row[first], linewidth=1)
    right.grid(alpha=0.25)
    figure.supxlabel(f"{measured_on(groups[first][0])}; {BARS}", fontsize=9)
    logarithmic(left, minor=PLAIN)
    return figure, {left: (ends, colour_by_row), right: (lead_ends, colour_by_row)}


def depth(claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path) -> tuple[plt.Figure, Names]:
    """Draw perplexity by the number of blocks: a line for each attention and number of steps, a dot for each seed."""
    figure, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
    lines: dict[tuple[int, str], dict[int, np.ndarray]] = {}
    for row, losses in measured.items():
        cfg = composed(claims.overrides(claim, row, tier))
        lines.setdefault((cfg.train.steps, cfg.job.attn), {})[cfg.model.layers] = np.exp(losses)
    most, ends, colour_by_line = max(steps for steps, _ in lines), {}, {}
    for (steps, variant), by_depth in sorted(lines.items()):
        colour, style = colour_of(variant), "o-" if steps == most else "o--"
        means = [values.mean() for values in by_depth.values()]
        axis.plot(list(by_depth), means, style, color=colour, markersize=6)
        name = f"{label(variant)}, {steps:,} steps"
        ends[name], colour_by_line[name] = (list(by_depth)[-1], means[-1]), colour
        for blocks, values in by_depth.items():
            axis.plot([blocks] * len(values), values, "o", color=colour, alpha=0.4, markersize=4)
    axis.set_xticks(sorted({blocks for by_depth in lines.values() for blocks in by_depth}))
    axis.set_xlabel("number of blocks")
    axis.set_ylabel(f"{QUANTITIES[claim.measure]}, lower is better")
    axis.grid(alpha=0.25)
    return figure, {axis: (ends, colour_by_line)}


def lengths(claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path) -> tuple[plt.Figure, Names]:
    """Draw the time and peak memory of a layer by length; bands show the range over rounds."""
    record = claims.benchmark_record(claim, tier, results)
    tokens = record["provenance"]["tokens"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    table = claims.by_length(claim, record)
    colour_by_row = colours_of(claim)
    ends: tuple[dict, dict] = ({}, {})
    for row, colour in colour_by_row.items():
        seconds = np.array([table[T][row]["seconds"] for T in table]).T / tokens * 1e6
        band(axes[0], list(table), seconds, colour)
        memory = [table[T][row]["peak_bytes"] / 2**20 for T in table]
        for axis, values, end_by_row in zip(axes, (np.median(seconds, axis=0), memory), ends, strict=True):
            axis.plot(list(table), values, "o-", color=colour, markersize=4)
            end_by_row[row] = (max(table), values[-1])
    axes[0].set_ylabel("forward and backward, microseconds a character")
    axes[1].set_ylabel(f"peak memory, MiB for {tokens:,} characters")
    for axis in axes:
        by_length_axes(axis)
    figure.supxlabel("lines: medians; bands: the range over rounds", fontsize=9)
    return figure, {axis: (end_by_row, colour_by_row) for axis, end_by_row in zip(axes, ends, strict=True)}


def unseen(claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path) -> tuple[plt.Figure, Names]:
    """Draw held-out perplexity by the length of the texts, and beside it the lead over the first row.

    Bands show the range over seeds. The plot of leads is cut at LEAST_LEAD.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    ends, lead_ends = {}, {}
    colour_by_row = colours_of(claim)
    runs_by_row = {row: claims.extra_contents(results / "runs", claim, row, tier) for row in claim.rows}
    losses = {row: np.array([list(run["heldout_loss"].values()) for run in runs]) for row, runs in runs_by_row.items()}
    first = next(iter(losses))
    trained, tested = runs_by_row[first][0]["trained"], [int(T) for T in runs_by_row[first][0]["heldout_loss"]]
    for row, colour in colour_by_row.items():
        mean_line(left, tested, np.exp(losses[row]), colour, "o-")
        ends[row] = (tested[-1], np.exp(losses[row]).mean(0)[-1])
        if row != first:
            leads = 100 * (losses[first] - losses[row])
            mean_line(right, tested, leads, colour, "o-")
            shown = [point for point in zip(tested, leads.mean(0), strict=True) if point[1] > LEAST_LEAD]
            lead_ends |= {row: shown[-1]} if shown else {}
    right.axhline(0, color=colour_by_row[first], linewidth=1)
    lowest = right.get_ylim()[0]
    right.set_ylim(bottom=max(LEAST_LEAD, lowest))
    for axis in (left, right):
        axis.axvline(trained, color="grey", linestyle=":")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(PLAIN)
        axis.set_xticks(tested)
        axis.set_xlabel("length of the test texts, characters; dotted: in training")
        axis.grid(alpha=0.25)
    left.set_ylabel("perplexity on held-out text")
    right.set_ylabel(f"lead over {first}, %" + f", cut at {LEAST_LEAD:g}" * bool(lowest < LEAST_LEAD))
    return figure, {left: (ends, colour_by_row), right: (lead_ends, colour_by_row)}


def position_weight(
    claim: DictConfig, tier: str, measured: dict[str, list[float]], results: Path
) -> tuple[plt.Figure, Names]:
    """Draw f of each head by distance (upper plots), and alpha, beta and gamma by position (lower plots).

    Each row of the claim has a column of plots, from its run with the first seed. Distance grows to the left, as in the
    source's figure. The shaded ranges of alpha and beta are over heads.
    """
    figure, axes = plt.subplots(2, len(claim.rows), figsize=(4.2 * len(claim.rows), 6.5), layout="constrained")
    names, colour_by_factor = {}, dict(zip(("alpha", "beta", "gamma"), OF_NO_ATTENTION, strict=False))
    for (upper, lower), row in zip(np.atleast_2d(axes.T), claim.rows, strict=True):
        factors = claims.extra_contents(results / "runs", claim, row, tier)[0]
        draw_f(upper, np.array(factors["f"]), np.exp(claims.log_f_at_start(claims.overrides(claim, row, tier))))
        upper.set_title(f"{row}, seed {claims.seeds(claim, tier)[0]}", fontsize=9)
        ends = {}
        for factor, colour in colour_by_factor.items():
            values = np.atleast_2d(factors[factor])  # [heads, positions], but gamma is [positions]
            mean_line(lower, range(values.shape[1]), values, colour)
            ends[factor] = (values.shape[1] - 1, values.mean(0)[-1])
        lower.set_xlabel("position; lines: the mean of the heads; bands: their range", fontsize=8)
        lower.set_ylabel("factors; alpha is not trained")
        lower.grid(alpha=0.25)
        names[lower] = (ends, colour_by_factor)
    return figure, names


def draw_f(axis: plt.Axes, f: np.ndarray, start: np.ndarray) -> None:
    """Draw f [heads, context], with a dotted line for f at the start, and shade the distances that claim 5 names."""
    colours_of_heads = plt.cm.viridis(np.linspace(0, 1, len(f)))
    for head, (learned, initial, colour) in enumerate(zip(f, start, colours_of_heads, strict=True)):
        axis.plot(learned, color=colour, linewidth=1, label=f"head {head}")
        axis.plot(initial, color=colour, linewidth=0.7, linestyle=":")
    for place, name in zip(claims.places_of_claim_5(f.shape[1]), ("near", "far", "far left"), strict=True):
        axis.axvspan(place.start, place.stop - 1, color="grey", alpha=0.12)
        middle = (place.start + place.stop - 1) / 2
        axis.text(middle, 0.03, name, transform=axis.get_xaxis_transform(), ha="center", fontsize=6, rotation=90)
    axis.invert_xaxis()
    axis.set_ylim(0, MOST_F)
    axis.set_xlabel("distance t - u, characters")
    axis.set_ylabel(f"f, cut at {MOST_F}; dotted: at the start")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=6, ncols=2)
