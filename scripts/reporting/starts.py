"""Write starts.md and starts_small.md, the perplexity from each initialisation, from the records of runs."""

import itertools
import math
import shlex
import statistics
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from omegaconf import DictConfig, OmegaConf

from configs.checking import shown
from configs.cli import compose
from configs.folder import CONFIGS, flat
from data.reading import read_json
from scripts.reporting import markdown
from scripts.reporting.colours import COLOURS
from scripts.reporting.figures import NO_FIGURE, mean_loss, seeds_in_words
from scripts.reporting.plots import write_with_plot
from scripts.reporting.rates import cell
from scripts.reporting.records import (
    MissingRecord,
    checked_record,
    composed,
    finished,
    has_ended,
    label,
    required_curves,
    write_for_each,
)
from training.record import Record
from training.runs import all_folders

LOOKED_AT = "mha_plus"  # the attention whose heads are measured
MARKERS = "osD"  # starts take all COLOURS with one marker, then with the next
MOST_STEPS = 5  # maximum number of columns `step N` in a table
HEADS = (
    "These figures are measured on 16 windows of the training text. `loss` is the loss of the model there; all others "
    "are of the first layer. `gradient of …`: norm of the gradient of these parameters, where M is the head mix; "
    "`logits`: root mean square of the scaled Q·K after its mean over the past is subtracted; `apart`: |P - U| / |U|, "
    "where P are the weights of all heads before M mixes them, and U uniform weights over the past; `alike`: mean "
    "|correlation| of P - U between two heads; `outputs alike`: mean linear CKA of two heads' outputs; `mean passed`: "
    "mean of |sum of a row of M|."
)


def words(cfg: DictConfig, variant: str, start: str) -> tuple[str, ...]:
    """Return the overrides of train.py for a start, without the seed."""
    common = [f"experiment={cfg.setup}", f"attn={variant}", f"optim.lr={rate_of(cfg.setup, variant):g}"]
    if cfg.stop is not None:
        common.append(f"train.stop={cfg.stop}")
    own = [word.split("=") for name in ("plain", start) for word in shlex.split(cfg.starts[variant][name])]
    return (*common, *(f"{key}={value}" for key, value in dict(own).items()))


def rate_of(setup: str, variant: str) -> float:
    """Return the learning rate of all starts of an attention: that of configs/rates, or else the experiment's own."""
    return composed((f"experiment={setup}", f"attn={variant}")).optim.lr


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
    """Return what the chosen start of an attention overrides.

    `row` is the attention, with or without overrides after it: "aft attn.gamma=false". Returns "" if no start was
    chosen, or if the row contains starts=none.
    """
    variant, *overrides = shlex.split(row)
    path = start_file(setup, variant)
    if "starts=none" in overrides or not path.exists():
        return ""
    return " ".join(f"{key}={shown(value)}" for key, value in flat(OmegaConf.load(path)).items())


def page_name(setup: str) -> str:
    """Return the name of the page and the plot of an experiment: starts for novel, otherwise starts_<setup>."""
    return "starts" if setup == "novel" else f"starts_{setup}"


def heads_path(cfg: DictConfig) -> Path:
    return Path(cfg.results, f"{page_name(cfg.setup)}_heads.json")


def starts(cfg: DictConfig) -> dict[str, list[Start]]:
    """Return those starts of each attention whose runs have all ended, the plain one first.

    An attention is left out if its plain start is not among them or is the only one, or if every start has diverged.
    Raises UserError if a finished run has other settings than its name says.
    """
    by_variant, folder = {}, Path(cfg.results, "runs")
    if not all_folders(folder / cfg.setup):  # then there is no need to compose a config for each start
        return {}
    for variant, own in cfg.starts.items():
        group = []
        for name in own:
            records = [checked_record(folder, words(cfg, variant, name), seed) for seed in cfg.seeds]
            if all(map(has_ended, records)):
                group.append(start_of(name, own[name], records))
            elif name == "plain":
                break  # the other starts cannot be compared with it
        if len(group) > 1 and any(start.curve for start in group):
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
    parts = [f"# Perplexity from each start (initialisation): {cfg.setup}"]
    parts += [f"![perplexity by start]({page_name(cfg.setup)}.png)", overview(cfg, by_variant)]
    for variant, group in by_variant.items():
        if cfg.starts[variant] != cfg.usual:
            parts += section(cfg, variant, group)
    if heads is not None:
        parts += heads_sections(heads)
    return markdown.page(*parts, notes(cfg, by_variant))


def overview(cfg: DictConfig, by_variant: dict[str, list[Start]]) -> str:
    """Return a table with a row for each attention: its perplexities from the usual starts, and its best start."""
    rows = []
    for variant, group in by_variant.items():
        losses, best = {start.name: start.loss for start in group}, min(group, key=lambda start: start.loss)
        figures = [cell(losses.get(name), name == best.name) for name in cfg.usual]
        rate, used = f"{rate_of(cfg.setup, variant):g}", start_in_use(cfg, variant)
        row = [label(variant), rate, *figures, f"`{best.name}`", cell(best.loss), times_the_best(group[0], group)]
        rows.append([*row, by_seed(group[0], best), f"`{used}`", gain(group, used)])
    columns = ["", "learning rate", *cfg.usual, "best start", "its perplexity", "plain ÷ best", "by seed", "in use"]
    return markdown.table(rows, [*columns, "plain ÷ in use"], left=(0, 5, 9))


def start_in_use(cfg: DictConfig, variant: str) -> str:
    """Return the name of the start in configs/starts: the one that train.py uses in this experiment."""
    in_use = set(chosen_start(cfg.setup, variant).split())
    return next((name for name, words in cfg.starts[variant].items() if set(words.split()) == in_use), "plain")


def gain(group: list[Start], used: str) -> str:
    """Return the perplexity from the plain start, the first of `group`, divided by that from the start in use."""
    losses = {start.name: start.loss for start in group if start.curve}
    return f"{math.exp(losses['plain'] - losses[used]):.2f}" if {"plain", used} <= losses.keys() else NO_FIGURE


def by_seed(plain: Start, best: Start) -> str:
    """Return, for each seed, the perplexity from the plain start divided by that from the best one."""
    if not plain.curve:
        return "diverged"
    losses = [[summary["evaluation"]["fit"]["loss"] for summary in start.summaries] for start in (plain, best)]
    return ", ".join(f"{math.exp(one - other):.3f}" for one, other in zip(*losses, strict=True))


def section(cfg: DictConfig, variant: str, group: list[Start]) -> list[str]:
    """Return a heading, a sentence, and a table with a row for each start of an attention."""
    best, plain = min(group, key=lambda start: start.loss), group[0]
    cost = f"has {times_the_best(plain, group)} times its perplexity" if plain.curve else "has diverged"
    cost = "" if best is plain else f" The plain start {cost}."
    rows, steps = [], list(best.curve)[:: -math.ceil(len(best.curve) / MOST_STEPS)][::-1]
    for start in group:
        at_steps = [f"{start.curve[step]:.1f}" if start.curve else NO_FIGURE for step in steps]
        rows.append([start.name, *at_steps, cell(start.loss), times_the_best(start, group), f"`{start.words}`"])
    columns = ["start", *(f"step {step}" for step in steps), "whole text", "times the best", "sets"]
    sentence = f"Best on the whole text after {last_step(cfg)} steps: `{best.name}`.{cost}"
    return [f"## {label(variant)}", sentence, markdown.table(rows, columns, left=(0, -1))]


def last_step(cfg: DictConfig) -> int:
    return cfg.stop or composed((f"experiment={cfg.setup}",)).train.steps


def notes(cfg: DictConfig, by_variant: dict[str, list[Start]]) -> str:
    """Return the notes below the tables."""
    runs = [summary for group in by_variant.values() for start in group for summary in start.summaries]
    steps = composed((f"experiment={cfg.setup}",)).train.steps
    length = f"all {steps:,} steps" if last_step(cfg) == steps else f"the first {cfg.stop} of {steps} steps"
    sets = "; ".join(f"{name}: `{words}`" for name, words in cfg.usual.items())
    untried = [
        f"{label(variant)} `{name}`"
        for variant, group in by_variant.items()
        for name in cfg.starts[variant]
        if name not in {start.name for start in group}
    ]
    return markdown.notes(
        f"{cfg.setup}: {length}, {seeds_in_words(cfg.seeds)}, with which no claim is judged. All starts of an "
        "attention have the learning rate of configs/rates; another may suit a start better. Starts that differ by "
        "about a percent may do so by chance. The column `in use` names the start in "
        f"configs/starts/{cfg.setup} or, for an attention without a file there, the plain one. The runs of "
        f"experiment={cfg.setup} on all pages have this start, unless a page says otherwise.",
        f"A start overrides the settings of the plain one. Where no column `sets` says otherwise: {sets}. The "
        "[glossary](../attn/README.md#glossary) says what f and w are.",
        f"Not tried: {'; '.join(untried)}." if untried else "",
        in_bf16(by_variant),
        "Perplexity is measured on the training text: in the columns `step …` on some windows, and in all other "
        "columns on the whole text, after the last step. The best start has the lowest perplexity on the whole text. "
        f"Corpus {runs[0]['data']['name']}, {markdown.vocabulary(runs[0])}.",
        f"{markdown.trained_on(runs)}; `python -m scripts.reproduce study=starts setup={cfg.setup} choose=false`.",
    )


def in_bf16(by_variant: dict[str, list[Start]]) -> str:
    """Return a note that names the starts trained in bf16; "" if all runs have the same precision."""
    precisions = {
        f"{label(variant)} `{start.name}`": {summary["precision"] for summary in start.summaries}
        for variant, group in by_variant.items()
        for start in group
    }
    named = markdown.in_bf16(precisions)
    return named and f"{named} [precision.md](precision.md) compares the two."


def heads_sections(heads: dict) -> list[str]:
    """Return paragraphs on what was measured of the heads, with a table for each start."""
    parts = [f"## The heads of {label(LOOKED_AT)}", HEADS]
    for start, rows in heads["found"].items():
        figures = [[f"{row['step']}", *(f"{v:.3g}" for key, v in row.items() if key != "step")] for row in rows]
        parts += [f"### {start}", markdown.table(figures, list(rows[0]), left=())]
    return [*parts, f"Seed {heads['seed']}; {markdown.origin(heads['provenance'])}"]


def draw(cfg: DictConfig, by_variant: dict[str, list[Start]]) -> plt.Figure:
    """Plot the change of perplexity against the plain start: a row for each attention, and a dot for each start.

    The attention that gains most is at the top. Attentions whose plain start has diverged are left out.
    """
    changes = {
        variant: {start.name: 100 * math.expm1(start.loss - group[0].loss) for start in group[1:] if start.curve}
        for variant, group in by_variant.items()
        if group[0].curve
    }
    order = sorted(changes, key=lambda variant: -min(changes[variant].values(), default=0))
    figure, axis = plt.subplots(figsize=(9, 2 + 0.24 * len(order)), layout="constrained")
    names = dict.fromkeys(name for own in cfg.starts.values() for name in own if name != "plain")
    styles = dict(zip(names, itertools.cycle(itertools.product(MARKERS, COLOURS)), strict=False))
    for name, (marker, colour) in styles.items():
        points = [(changes[variant][name], place) for place, variant in enumerate(order) if name in changes[variant]]
        if points:
            axis.plot(*zip(*points, strict=True), marker, color=colour, label=name, alpha=0.8)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(order)), [label(variant) for variant in order])
    axis.set_xlabel(f"perplexity on the training text after {last_step(cfg)} steps, against the plain start's, in %")
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    if order:
        gains = [max([0, *(-change for change in changes[variant].values())]) for variant in (order[0], order[-1])]
        title = f"{cfg.setup}: the best start lowers perplexity by {gains[0]:.1f}% to {gains[1]:.1f}%"
        figure.suptitle(title, fontsize=11)
    return figure


def write(cfg: DictConfig) -> None:
    """Write the page and its plot. Raises MissingRecord if there is no attention that `starts` returns."""
    results, name, heads = Path(cfg.results), page_name(cfg.setup), heads_path(cfg)
    by_variant = starts(cfg)
    if not by_variant:
        raise MissingRecord(
            f"{results}/runs/{cfg.setup} has no attention to show: for each one, the runs of its plain start or of all "
            "its other starts have not ended, or all of its starts have diverged"
        )
    content = page(cfg, by_variant, read_json(heads) if heads.exists() else None)
    write_with_plot(results, name, content, draw(cfg, by_variant))


def write_all(results: Path) -> None:
    """Write the page of each experiment that has starts to show. Raises MissingRecord if there is none."""
    write_for_each(compose(["study=starts"], "reproduce").budgets, "starts", results, write)
