"""Write starts.md and starts_small.md, the perplexity from each initialisation, from the records of runs."""

import itertools
import math
import shlex
import statistics
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from omegaconf import DictConfig, OmegaConf

from configs.cli import compose
from configs.folder import CONFIGS, flat
from data.reading import read_json
from scripts.reporting import markdown
from scripts.reporting.figures import NO_FIGURE, mean_loss, seeds_in_words
from scripts.reporting.plots import COLOURS, PLAIN, logarithmic, write_with_plot
from scripts.reporting.rates import cell, has_ended
from scripts.reporting.records import MissingRecord, checked_record, finished, label, required_curves, write_for_each
from training.record import Record

LOOKED_AT = "mha_plus"  # the attention whose heads are measured
LINES = ("-", "--", ":", "-.")  # line styles; an attention's starts take all COLOURS in one style, then in the next
MOST_STEPS = 5  # maximum number of columns `step N` in a table
HEADS = (
    "These figures are measured on 16 windows of the training text. `loss` is the loss of the model there; all others "
    "are of the first layer. `gradient of …`: norm of a gradient, where M is the head mix; `logits`: root mean square "
    "of the scaled Q·K after its mean over the past is subtracted; `apart`: |P - U| / |U|, where P are the weights of "
    "all heads before M mixes them, and U uniform weights over the past; `alike`: mean |correlation| of P - U between "
    "two heads; `outputs alike`: mean linear CKA of two heads' outputs; `mean passed`: mean of |sum of a row of M|."
)


def words(cfg: DictConfig, variant: str, start: str) -> tuple[str, ...]:
    """Return the overrides of train.py for a start, without the seed."""
    common = (f"experiment={cfg.setup}", f"attn={variant}", f"optim.lr={cfg.learning_rate:g}", f"train.stop={cfg.stop}")
    own = [word.split("=") for name in ("plain", start) for word in shlex.split(cfg.starts[variant][name])]
    return (*common, *(f"{key}={value}" for key, value in dict(own).items()))


class Start(NamedTuple):
    """The runs of a start, and the mean over their seeds of what was measured."""

    name: str
    words: str  # its overrides of train.py in configs/study/starts.yaml
    summaries: list[dict]  # without those of diverged runs
    loss: float  # log perplexity on the training text at the end; infinite if a run has diverged
    curve: dict[int, float]  # {step: perplexity on windows of the training text}; empty if a run has diverged


def start_file(setup: str, variant: str) -> Path:
    """Return the path at which train.py looks for the start that was chosen for an attention in an experiment."""
    return CONFIGS / "starts" / setup / f"{variant}.yaml"


def chosen_start(setup: str, row: str) -> str:
    """Return the overrides of the start chosen for a row's attention; "" if none was, or if the row has starts=none."""
    variant, *overrides = shlex.split(row)
    path = start_file(setup, variant)
    if "starts=none" in overrides or not path.exists():
        return ""
    return " ".join(f"{key}={value}" for key, value in flat(OmegaConf.load(path)).items())


def page_name(setup: str) -> str:
    """Return the name of the page and the plot of an experiment: starts for novel, otherwise starts_<setup>."""
    return "starts" if setup == "novel" else f"starts_{setup}"


def heads_path(cfg: DictConfig) -> Path:
    return Path(cfg.results, f"{page_name(cfg.setup)}_heads.json")


def starts(cfg: DictConfig) -> dict[str, list[Start]]:
    """Return the starts of each attention whose runs have all ended, unless every start has diverged.

    Raises UserError if a finished run has other settings than its name says.
    """
    by_variant, folder = {}, Path(cfg.results, "runs")
    for variant, own in cfg.starts.items():
        runs = {name: [checked_record(folder, words(cfg, variant, name), seed) for seed in cfg.seeds] for name in own}
        if all(has_ended(record) for records in runs.values() for record in records):
            group = [start_of(name, own[name], records) for name, records in runs.items()]
            if any(start.curve for start in group):
                by_variant[variant] = group
    return by_variant


def start_of(name: str, words: str, records: list[Record]) -> Start:
    """Return the start with these runs, which must all have ended."""
    summaries = [summary for record in records if (summary := finished(record)) is not None]
    if len(summaries) < len(records):
        return Start(name, words, summaries, math.inf, {})
    steps, losses = required_curves(records, "fit_loss", "step")
    curve = [math.exp(statistics.mean(at_step)) for at_step in zip(*losses, strict=True)]
    return Start(name, words, summaries, mean_loss(summaries), dict(zip(steps, curve, strict=True)))


def times_the_best(start: Start, group: list[Start]) -> str:
    """Return the perplexity of a start divided by that of the best start in `group`, or "diverged"."""
    if not start.curve:
        return "diverged"
    return f"{math.exp(start.loss - min(other.loss for other in group)):.2f}"


def page(cfg: DictConfig, by_variant: dict[str, list[Start]], heads: dict | None) -> str:
    """Return the contents of the page; `heads` is the record of the heads, if there is one."""
    parts = [f"# What a start costs: {cfg.setup}", f"![perplexity by start]({page_name(cfg.setup)}.png)"]
    for variant, group in by_variant.items():
        best, plain = min(group, key=lambda start: start.loss), group[0]
        cost = f"has {times_the_best(plain, group)} times its perplexity" if plain.curve else "has diverged"
        cost = "" if best is plain else f" The plain start {cost}."
        rows, steps = [], list(best.curve)[:: -math.ceil(len(best.curve) / MOST_STEPS)][::-1]
        for start in group:
            at_steps = [f"{start.curve[step]:.1f}" if start.curve else NO_FIGURE for step in steps]
            rows.append([start.name, *at_steps, cell(start.loss), times_the_best(start, group), f"`{start.words}`"])
        columns = ["start", *(f"step {step}" for step in steps), "whole text", "times the best", "sets"]
        parts += [f"## {label(variant)}", f"Best on the whole text after {cfg.stop} steps: `{best.name}`.{cost}"]
        parts.append(markdown.table(rows, columns, left=(0, -1)))
    if heads is not None:
        parts += heads_sections(heads)
    runs = [summary for group in by_variant.values() for start in group for summary in start.summaries]
    steps = compose([f"experiment={cfg.setup}"]).train.steps
    length = f"all {steps}" if cfg.stop == steps else f"the first {cfg.stop} of {steps}"
    notes = markdown.notes(
        f"{cfg.setup}: {length} steps, learning rate {cfg.learning_rate:g} for all, "
        f"{seeds_in_words(cfg.seeds)}, which no verdict uses. Another rate may suit a start better, and starts that "
        "differ by about a percent may do so by chance. A start overrides the settings of the plain one. The "
        "[glossary](../attn/README.md#glossary) says what f and w are.",
        "Perplexity is measured on the training text: in the columns `step …` and the plot's curves on some windows, "
        "and in the column `whole text` on all of it, after the last step. The best start has the lowest perplexity on "
        "the whole text. "
        f"Corpus {runs[0]['data']['name']}, {markdown.vocabulary(runs[0])}.",
        f"{markdown.trained_on(runs)}; `python -m scripts.reproduce study=starts setup={cfg.setup}`.",
    )
    return markdown.page(*parts, notes)


def heads_sections(heads: dict) -> list[str]:
    """Return paragraphs on what was measured of the heads, with a table for each start."""
    parts = [f"## The heads of {label(LOOKED_AT)}", HEADS]
    for start, rows in heads["found"].items():
        figures = [[f"{row['step']}", *(f"{v:.3g}" for key, v in row.items() if key != "step")] for row in rows]
        parts += [f"### {start}", markdown.table(figures, list(rows[0]), left=())]
    return [*parts, f"Seed {heads['seed']}; {markdown.origin(heads['provenance'])}"]


def draw(cfg: DictConfig, by_variant: dict[str, list[Start]]) -> plt.Figure:
    """Plot perplexity by step: a panel for each attention, a line for each start, the worst first in the legend."""
    size = (4.2 * len(by_variant), 7)
    figure, axes = plt.subplots(1, len(by_variant), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axis, (variant, group) in zip(axes[0], by_variant.items(), strict=True):
        styled = zip(group, itertools.cycle(itertools.product(LINES, COLOURS)), strict=False)
        for start, (line, colour) in sorted(styled, key=lambda each: -each[0].loss):
            width = 2.5 if start is group[0] else 1.2
            name = f"{start.name} {cell(start.loss)}"
            steps, curve = list(start.curve), list(start.curve.values())
            axis.plot(steps, curve, f"o{line}", color=colour, linewidth=width, markersize=3, label=name)
        times = " times the best" if group[0].curve else ""
        axis.set_title(f"{label(variant)}: plain {times_the_best(group[0], group)}{times}", fontsize=10)
        axis.set_xlabel("steps")
        logarithmic(axis, minor=PLAIN)
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.1))  # below, so that it covers no line
    axes[0][0].set_ylabel("perplexity on the training text")
    title = f"{cfg.setup}: {cfg.stop} steps from each start; thick: plain; in the legends: perplexity on the whole text"
    figure.suptitle(title, fontsize=11)
    return figure


def write(cfg: DictConfig) -> None:
    """Write the page and its plot. Raises MissingRecord if there is no attention that `starts` returns."""
    results, name, heads = Path(cfg.results), page_name(cfg.setup), heads_path(cfg)
    by_variant = starts(cfg)
    if not by_variant:
        raise MissingRecord(
            f"{results}/runs/{cfg.setup} has no attention to show: for each one, some runs of its starts have not "
            "ended, or all of its starts have diverged"
        )
    content = page(cfg, by_variant, read_json(heads) if heads.exists() else None)
    write_with_plot(results, name, content, draw(cfg, by_variant))


def write_all(results: Path) -> None:
    """Write the page of each experiment that has starts to show. Raises MissingRecord if there is none."""
    write_for_each(compose(["study=starts"], "reproduce").budgets, "starts", results, write)
