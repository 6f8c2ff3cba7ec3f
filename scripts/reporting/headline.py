"""The source's comparison at the source's size, from the records alone.

Every row at every learning rate that was trained; then each row at its best rate, with its lead over
MHA+ and the source's beside it; and the curves of these. The best rate is the one of the lowest mean log
perplexity on the training text.
"""

import math
import re
import statistics
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker
from omegaconf import DictConfig
from tabulate import tabulate

from configs.cli import compose
from data.files import write_bytes
from scripts.reporting.plots import band, colours, save
from scripts.reporting.records import NotThere, check_comparable, commit, curves, finished, name_of, record_of
from scripts.reporting.table import (
    NO_FIGURE,
    Figure,
    device,
    each,
    lead,
    passes,
    percent,
    perplexity,
    seeds_in_words,
    what_was_trained,
)
from training.record import Record

METRICS = {"fit_loss": "-", "heldout_loss": "--"}


class Trained(NamedTuple):
    """The runs of one row at one learning rate, a seed each."""

    records: list[Record]
    summaries: list[dict]

    @property
    def loss(self) -> float:
        """The mean log perplexity on the training text."""
        return statistics.mean(summary["evaluation"]["fit"]["loss"] for summary in self.summaries)


Rates = dict[float, Trained]


def trained(cfg: DictConfig, row: str, runs: Path) -> Rates:
    """The row's runs at each learning rate at which every seed is finished."""
    found = {}
    for rate in cfg.learning_rates:
        records = [record_of(runs, cfg.setup, f"{row} optim.lr={rate:g}", seed) for seed in cfg.seeds]
        summaries = [finished(record) for record in records]
        if None not in summaries:
            found[rate] = Trained(records, summaries)
    return found


def best(rates: Rates) -> float:
    return min(rates, key=lambda rate: rates[rate].loss)


def rate_rows(found: dict[str, Rates]) -> list[list[str]]:
    """A line per row and rate."""
    lines = []
    for row, rates in found.items():
        for rate, group in rates.items():
            mark = " (best)" if rate == best(rates) else ""
            lines.append(
                [
                    name_of(row),
                    f"{rate:g}{mark}",
                    text_of(perplexity(group.summaries, "fit")),
                    text_of(perplexity(group.summaries, "heldout")),
                    best_heldout(group.summaries),
                ]
            )
    return lines


def text_of(figure: Figure | None) -> str:
    return figure.text if figure else NO_FIGURE


def best_heldout(summaries: list[dict]) -> str:
    """The lowest held-out perplexity on the way, and after how many passes it was reached."""
    found = [s["evaluation"]["heldout_best"] | {"of": s} for s in summaries if "heldout_best" in s["evaluation"]]
    if not found:
        return NO_FIGURE
    value = statistics.mean(one["perplexity"] for one in found)
    after = statistics.mean(passes(one["of"], one["step"] * one["of"]["tokens"] / one["of"]["steps"]) for one in found)
    return f"{value:.2f} after {after:.1f} passes"


def table_rows(cfg: DictConfig, chosen: dict[str, Trained]) -> list[list[str]]:
    """A line per row at its best rate."""
    reference, source, lines = chosen.get(cfg.ratio_to), source_figures(), []
    for row, group in chosen.items():
        ahead = lead(group.summaries, reference.summaries) if reference and row != cfg.ratio_to else None
        lines.append(
            [
                name_of(row),
                text_of(perplexity(group.summaries, "fit")),
                text_of(ahead),
                f"{source[row].perplexity:.2f}" if row in source else NO_FIGURE,
                NO_FIGURE if (theirs := source_lead(cfg, row)) is None else percent(theirs),
                best_heldout(group.summaries),
                f"{group.loss / math.log(2):.3f}",
                f"{group.summaries[0]['parameters']:,}",
            ]
        )
    return lines


def source_figures() -> DictConfig:
    """The figures of source article A, on a corpus of its own."""
    return compose([], "compare").source


def source_lead(cfg: DictConfig, row: str) -> float | None:
    """The lead over the reference row that the source's perplexities give, if it has both."""
    source = source_figures()
    if row == cfg.ratio_to or row not in source or cfg.ratio_to not in source:
        return None
    return math.log(source[cfg.ratio_to].perplexity / source[row].perplexity)


def finding(cfg: DictConfig, chosen: dict[str, Trained]) -> str:
    """The order of the rows, in one sentence."""
    order = sorted(chosen, key=lambda row: chosen[row].loss)
    named = ", ".join(f"{name_of(row)} {text_of(perplexity(chosen[row].summaries, 'fit'))}" for row in order)
    first = chosen[order[0]].summaries[0]
    return f"Fit perplexity after {passes(first, first['tokens']):.1f} passes over {first['data']['name']}: {named}"


def notes(cfg: DictConfig, found: dict[str, Rates], summaries: list[dict]) -> list[str]:
    """What the figures come from, and how far they can be trusted."""
    first = summaries[0]
    ends = [
        f"{name_of(row)} at {best(rates):g}"
        for row, rates in found.items()
        if len(rates) > 1 and best(rates) in (min(rates), max(rates))
    ]
    missing = [name_of(row) for row in cfg.rows if row not in found]
    lines = [
        f"{cfg.setup}: {what_was_trained(first)}, {seeds_in_words(list(cfg.seeds))}; vocabulary "
        f"{first['data']['vocabulary']:,}, sha256 {first['data']['sha256'][:12]}; {each(map(device, summaries))}; "
        f"commit {each(map(commit, summaries))}.",
        "Lead: by how much the log perplexity on the training text is lower than MHA+'s at the same seed; below 0 it "
        "is behind. " + ("One seed gives no interval." if len(cfg.seeds) == 1 else "Mean and Student's 95% interval."),
        "The source trained on another corpus of 8.6 million characters with a vocabulary of 5,744, and states neither "
        "steps nor passes. Its figures can be compared with ours in their order and in the leads, not in their size.",
    ]
    if ends:
        lines.append(f"The best rate lies at an end of those that were tried: {'; '.join(ends)}.")
    if missing:
        lines.append(f"Not trained to the end yet: {', '.join(missing)}.")
    return lines


def page(cfg: DictConfig, found: dict[str, Rates]) -> str:
    """Contents of <setup>.md."""
    chosen = {row: rates[best(rates)] for row, rates in found.items()}
    summaries = [summary for rates in found.values() for group in rates.values() for summary in group.summaries]
    commands = [f"- `{summary['command']}` ({summary['training_seconds']:,.0f} s)" for summary in summaries]
    heads = ["", "fit perplexity", "lead over MHA+", "source", "source's lead", "best held-out perplexity"]
    heads += ["fit, bits per character", "parameters"]
    rate_heads = ["", "learning rate", "fit perplexity", "held-out perplexity at the end", "best held-out perplexity"]
    return "\n".join(
        [
            f"# The source's comparison at the source's size: {cfg.setup}",
            "",
            f"{finding(cfg, chosen)}.",
            "",
            f"![Perplexity against passes over the text]({cfg.setup}.png)",
            "",
            "Each row at the best of its learning rates:",
            "",
            table(table_rows(cfg, chosen), heads),
            "",
            *(f"- {note}" for note in notes(cfg, found, summaries)),
            "",
            "## Every learning rate",
            "",
            table(rate_rows(found), rate_heads),
            "",
            "## Commands, with the seconds that each run trained beside others",
            "",
            *commands,
            "",
        ]
    )


def table(rows: list[list[str]], heads: list[str]) -> str:
    align = ["left", *["right"] * (len(heads) - 1)]
    return tabulate(rows, heads, "github", colalign=align, disable_numparse=True)


def draw(cfg: DictConfig, found: dict[str, Rates]) -> plt.Figure:
    """Above, perplexity against passes, each row at its best rate; below, the lead over MHA+ on the training text."""
    chosen = {row: rates[best(rates)] for row, rates in found.items()}
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 8), layout="constrained", sharex=True, height_ratios=(3, 2))
    reference, source = chosen.get(cfg.ratio_to), source_figures()
    for (row, group), colour in zip(chosen.items(), colours(len(chosen)), strict=True):
        for metric, style in METRICS.items():
            tokens, values = curves(group.records, metric)
            x, y = [passes(group.summaries[0], n) for n in tokens], np.exp(values)
            upper.plot(x, y.mean(0), style, color=colour, label=name_of(row) if style == "-" else None)
            if len(y) > 1:
                band(upper, x, y, colour)
        if row in source:
            upper.axhline(source[row].perplexity, color=colour, linestyle=":", linewidth=1)
        if reference and row != cfg.ratio_to:
            tokens, losses = curves([*group.records, *reference.records], "fit_loss")
            ours, theirs = np.split(np.array(losses), [len(group.records)])
            gaps = 100 * (theirs - ours)
            x = [passes(group.summaries[0], n) for n in tokens]
            lower.plot(x, gaps.mean(0), color=colour, label=name_of(row))
            if len(gaps) > 1:
                band(lower, x, gaps, colour)
            if (theirs := source_lead(cfg, row)) is not None:
                lower.axhline(100 * theirs, color=colour, linestyle=":", linewidth=1)
    upper.set_yscale("log")
    upper.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5)))
    upper.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    upper.yaxis.set_minor_formatter(ticker.NullFormatter())
    upper.set_ylabel("perplexity: training text —, held-out text - -\ndotted: the source's, another corpus")
    upper.legend()
    lower.axhline(0, color="black", linewidth=0.8)
    lower.set_ylabel("lead over MHA+, %\n(log perplexity, training text)")
    lower.set_xlabel("passes over the training text")
    for axes in (upper, lower):
        axes.grid(which="both", alpha=0.25)
    upper.set_title(re.sub(r"(.{80}\S*) ", r"\1\n", finding(cfg, chosen)), fontsize=10)
    return figure


def write(cfg: DictConfig, results: Path) -> None:
    """Write <results>/headline/<setup>.md with its plot. `cfg` is one entry of configs/report.yaml's `headline`.

    Raises NotThere if no row has a finished run.
    """
    found = {row: rates for row in cfg.rows if (rates := trained(cfg, row, results / "runs"))}
    if not found:
        raise NotThere(f"{results}/runs/{cfg.setup} has no finished run of {', '.join(cfg.rows)}")
    check_comparable([s for rates in found.values() for group in rates.values() for s in group.summaries])
    out = results / "headline"
    write_bytes(out / f"{cfg.setup}.md", page(cfg, found).encode())
    save(draw(cfg, found), out, cfg.setup, dpi=130)
