"""What each start of an attention brings in its first steps, and what it costs: starts.md, from the records alone."""

import math
import shlex
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
from omegaconf import DictConfig
from tabulate import tabulate

from configs.cli import compose
from data.files import UserError, write_bytes
from data.reading import read_json
from scripts.reporting.plots import PLAIN, colours, save
from scripts.reporting.records import NotThere, commit, finished, label, logged
from training.loading import config_of
from training.packed import find
from training.record import Record
from training.settings import differing

LOOKED_AT = "mha_plus"


def words(cfg: DictConfig, variant: str, start: str) -> list[str]:
    """What train.py is to be called with for a start, without the seed."""
    of_all = (f"experiment={cfg.setup}", f"attn={variant}", f"optim.lr={cfg.learning_rate:g}", f"train.stop={cfg.stop}")
    given = [word.split("=") for name in ("plain", start) for word in shlex.split(cfg.starts[variant][name])]
    return [*of_all, *(f"{key}={value}" for key, value in dict(given).items())]


def record_of(cfg: DictConfig, composed: DictConfig) -> Record:
    return find(Path(cfg.results, "runs", cfg.setup, composed.job.name))


def summary_of(cfg: DictConfig, variant: str, start: str, seed: int) -> tuple[Record, dict | None]:
    """The record of a run, and its summary where it came to its end.

    Errors: UserError where the run of that name had another start, as after a default has changed.
    """
    composed = compose([*words(cfg, variant, start), f"seed={seed}"])
    record = record_of(cfg, composed)
    summary = finished(record)
    if summary is not None and (differs := differing(config_of(record), composed)):
        raise UserError(f"{record.folder} was trained with another {differs[0]} than its name says")
    return record, summary


class Start:
    """What the records of a start say: all of it the mean over the seeds, of log perplexity."""

    def __init__(self, cfg: DictConfig, variant: str, name: str, found: list[tuple[Record, dict]]):
        self.name, self.words = name, cfg.starts[variant][name]
        self.summaries = [summary for _, summary in found]
        self.loss = statistics.mean(summary["evaluation"]["fit"]["loss"] for summary in self.summaries)
        self.steps, losses = logged([record for record, _ in found], "fit_loss", "step")
        self.curve = [math.exp(statistics.mean(at)) for at in zip(*losses, strict=True)]


def starts(cfg: DictConfig) -> dict[str, list[Start]]:
    """The starts of each attention all of whose runs are there."""
    known = {}
    for variant, names in cfg.starts.items():
        found = {name: [summary_of(cfg, variant, name, seed) for seed in cfg.seeds] for name in names}
        if all(summary is not None for group in found.values() for _, summary in group):
            known[variant] = [Start(cfg, variant, name, group) for name, group in found.items()]
    return known


def behind(start: Start, group: list[Start]) -> float:
    """Its perplexity over that of the best of its attention, on the whole training text."""
    return math.exp(start.loss - min(other.loss for other in group))


def page(cfg: DictConfig, known: dict[str, list[Start]], heads: dict | None) -> str:
    lines = ["# What a start costs", "", "![perplexity by start](starts.png)", ""]
    for variant, group in known.items():
        best, plain = min(group, key=lambda start: start.loss), group[0]
        cost = "" if best is plain else f" The plain start has {behind(plain, group):.2f} times its perplexity."
        lines += [f"## {label(variant)}", "", f"Best after {cfg.stop} steps: {best.name}.{cost}", ""]
        rows = [
            [
                start.name,
                *(f"{perplexity:.1f}" for perplexity in start.curve),
                f"{math.exp(start.loss):.2f}",
                f"{behind(start, group):.2f}",
                f"`{start.words}`",
            ]
            for start in group
        ]
        heading = ["start", *(f"step {step}" for step in group[0].steps), "whole text", "times the best", "sets"]
        align = ["left", *["right"] * (len(heading) - 2), "left"]
        lines += [tabulate(rows, heading, "github", colalign=align, disable_numparse=True), ""]
    if heads is not None:
        lines += looked_at(heads)
    runs = [summary for group in known.values() for start in group for summary in start.summaries]
    first = runs[0]
    steps = compose([f"experiment={cfg.setup}"]).train.steps
    lines += [
        f"- {cfg.setup}: the first {cfg.stop} of {steps} steps, learning rate {cfg.learning_rate:g} for all, seeds "
        f"{', '.join(map(str, cfg.seeds))}, which judge nothing. A start has what the plain one sets, but for what it "
        "sets itself.",
        f"- Perplexity on the training text: at the steps on the windows of the curves, in the end on the whole text. "
        f"Corpus {first['data']['name']}, vocabulary {first['data']['vocabulary']:,}, sha256 "
        f"{first['data']['sha256'][:12]}.",
        f"- {', '.join(dict.fromkeys(s['device'] for s in runs))}, {first['precision']}; commit "
        f"{', '.join(dict.fromkeys(map(commit, runs)))}; `python -m scripts.reproduce study=starts`.",
        "",
    ]
    return "\n".join(lines)


def looked_at(heads: dict) -> list[str]:
    """What was measured of the heads, a table for each start."""
    lines = [
        f"## The heads of {label(LOOKED_AT)}",
        "",
        "Of the first layer, on 16 windows of the training text: norms of gradients, M the head mix; `logits`, how far "
        "Q·K lies from its mean over the past; `apart`, how far the heads' weights are from the mean of the past, "
        "over that mean; `alike`, how far two heads lie apart from it in the same direction, the mean |correlation|; "
        "`outputs alike`, two heads' outputs' linear CKA; `mean passed`, the mean of |sum of a row of M|.",
        "",
    ]
    for start, rows in heads["found"].items():
        table = [[f"{row['step']}", *(f"{value:.3g}" for key, value in row.items() if key != "step")] for row in rows]
        lines += [f"### {start}", "", tabulate(table, rows[0].keys(), "github", disable_numparse=True), ""]
    origin = heads["provenance"]
    return [*lines, f"Seed {heads['seed']}; {origin['device']}; commit {commit(origin)}.", ""]


def draw(cfg: DictConfig, known: dict[str, list[Start]]) -> plt.Figure:
    """A panel for each attention: perplexity by step, a line for each start, the worst first."""
    figure, axes = plt.subplots(
        1, len(known), figsize=(4.2 * len(known), 5.6), layout="constrained", sharey=True, squeeze=False
    )
    for axis, (variant, group) in zip(axes[0], known.items(), strict=True):
        shown = dict(zip([start.name for start in group], colours(len(group)), strict=True))
        for start in sorted(group, key=lambda start: -start.loss):
            width = 2.5 if start is group[0] else 1.2
            axis.plot(start.steps, start.curve, "o-", color=shown[start.name], linewidth=width, markersize=3,
                      label=f"{start.name} {math.exp(start.loss):.1f}")  # fmt: skip
        axis.set_title(f"{label(variant)}: plain {behind(group[0], group):.2f} times the best", fontsize=10)
        axis.set_xlabel("steps")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(PLAIN)
        axis.yaxis.set_minor_formatter(PLAIN)
        axis.grid(which="both", alpha=0.25)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("perplexity on the training text")
    figure.suptitle(f"{cfg.setup}: the first {cfg.stop} steps from each start", fontsize=11)
    return figure


def write(cfg: DictConfig) -> None:
    """Write the page and its plot from the records."""
    known, path = starts(cfg), Path(cfg.results, "starts_heads.json")
    if not known:
        raise NotThere(f"no attention's starts are all there in {cfg.results}/runs/{cfg.setup}")
    write_bytes(Path(cfg.results, "starts.md"), page(cfg, known, read_json(path) if path.exists() else None).encode())
    save(draw(cfg, known), Path(cfg.results), "starts", dpi=110)
    print(f"written to {cfg.results}: starts.md, starts.png, starts.svg")
