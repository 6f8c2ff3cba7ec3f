"""The source's table in markdown, CSV and LaTeX, from the records alone.

Side by side: what was trained on this machine, what is committed, what the source has. Says whether
this machine's figures agree with the committed ones. With runs=null the table shows what is committed.
"""

import csv
import io
import math
import shlex
import statistics
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig
from tabulate import tabulate

from configs.cli import compose
from data.files import UserError, write_bytes
from scripts.reporting.records import (
    check_comparable,
    commit,
    finished,
    label,
    name_of,
    record_of,
    speed_record,
    steps_record,
    summaries,
)
from scripts.reporting.rule import Comparison, interval
from scripts.reporting.variants import parameters

TOLERANCE = 2  # standard deviations over the committed seeds, within which a loss agrees
NO_FIGURE = "–"
Summaries = dict[str, list[dict]]  # of each row


class Figure(NamedTuple):
    """A cell of the table: its number, for the CSV file, and as it is printed."""

    value: float
    text: str


def committed_summaries(cfg: DictConfig, experiment: str, rows: list[str]) -> Summaries:
    """The committed runs of each row that are there."""
    found = {}
    for row in rows:
        records = [record_of(Path(cfg.committed, "runs"), experiment, row, seed) for seed in cfg.committed_seeds]
        found[row] = [summary for summary in map(finished, records) if summary is not None]
    check_comparable([summary for group in found.values() for summary in group])
    return found


def losses(group: list[dict], text: str) -> dict[int, float]:
    """The log perplexity of each seed."""
    return {s["seed"]: s["evaluation"][text]["loss"] for s in group if text in s["evaluation"]}


def perplexity(group: list[dict], text: str) -> Figure | None:
    values = [math.exp(loss) for loss in losses(group, text).values()]
    if not values:
        return None
    mean = statistics.mean(values)
    return Figure(mean, f"{mean:.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""))


def lead(group: list[dict], reference: list[dict]) -> Figure | None:
    """By how much the log perplexity on the training text is below the reference's, over pairs of one seed."""
    ours, theirs = losses(group, "fit"), losses(reference, "fit")
    differences = [theirs[seed] - ours[seed] for seed in ours.keys() & theirs.keys()]
    if not differences:
        return None
    mean, n = statistics.mean(differences), len(differences)
    if n == 1:
        return Figure(mean, percent(mean))
    low, high, _ = interval(Comparison("<", mean, statistics.stdev(differences), n), 0.95)
    return Figure(mean, f"{percent(mean)} ({percent(low)} to {percent(high)})")


def percent(difference: float) -> str:
    return f"{100 * difference:+.1f}%"


def timed(row: str) -> str:
    """The row without what does not change the speed of its steps at the source's size."""
    apart = ("train.", "optim.", "evaluation.", "data", "ffn=geglu")
    return shlex.join(word for word in shlex.split(row) if not word.startswith(apart))


def speeds_here(path: Path) -> dict[str, list[float]]:
    """Tokens/s of each step that scripts.benchmark measure=rows timed; none if there is no record."""
    if not path.exists():
        return {}
    record = speed_record(path)
    tokens = record["batch"] * record["context"]
    return {row: [tokens / s for s in figures["seconds"]] for row, figures in record["speed"].items()}


def committed_speeds(path: Path) -> dict[str, list[float]]:
    """Tokens/s of each step that scripts.benchmark timed."""
    record = steps_record(path)
    return {row: [record["tokens"] / s for s in seconds] for row, seconds in record["seconds"].items()}


def speed(found: dict[str, list[float]], row: str) -> Figure | None:
    rates = found.get(timed(row))
    if rates is None:
        return None
    median = statistics.median(rates)
    return Figure(median, f"{median:,.0f} ({min(rates):,.0f} to {max(rates):,.0f})")


def speed_ratio(found: dict[str, list[float]], row: str, reference: str) -> Figure | None:
    rates, others = found.get(timed(row)), found.get(timed(reference))
    if rates is None or others is None:
        return None
    ratio = statistics.median(rates) / statistics.median(others)
    return Figure(ratio, f"{ratio:.2f}")


class Column(NamedTuple):
    """Who has the figures: this machine, or the repository."""

    head: str
    runs: Summaries
    speeds: dict[str, list[float]]


def columns(cfg: DictConfig) -> list[Column]:
    runs = committed_summaries(cfg, cfg.setup, cfg.rows)
    seeds = sorted({summary["seed"] for group in runs.values() for summary in group})
    speeds = committed_speeds(Path(cfg.committed, "benchmark/cpu/float32/steps.json"))
    committed = Column(f"committed, {seeds_in_words(seeds)}", runs, speeds)
    if cfg.runs is None:
        return [committed]
    here = summaries(Path(cfg.runs), cfg.setup, cfg.rows, cfg.seeds)
    return [Column(f"trained here, {seeds_in_words(cfg.seeds)}", here, speeds_here(Path(cfg.speed))), committed]


def figures(cfg: DictConfig, sides: list[Column]) -> list[tuple[str, str, list[Figure | None]]]:
    """The lines of the table: a quantity, a row, and its figure in each column, the source's last."""
    if cfg.ratio_to not in cfg.rows:
        raise UserError(f"ratio_to={cfg.ratio_to} is not among the rows: {', '.join(cfg.rows)}")
    reference, lines = cfg.source.get(cfg.ratio_to), []
    others = [row for row in cfg.rows if row != cfg.ratio_to]
    to = label(cfg.ratio_to)

    def add(quantity: str, rows: list[str], ours, theirs) -> None:
        for row in rows:
            source = theirs(cfg.source[row]) if row in cfg.source and reference else None
            lines.append((quantity, row, [*(ours(side, row) for side in sides), source]))

    def gap(source: DictConfig) -> Figure:
        difference = math.log(reference.perplexity / source.perplexity)
        return Figure(difference, percent(difference))

    add(
        "fit perplexity",
        cfg.rows,
        lambda side, row: perplexity(side.runs[row], "fit"),
        lambda source: Figure(source.perplexity, f"{source.perplexity:.2f}"),
    )
    add(f"fit, lead over {to}", others, lambda side, row: lead(side.runs[row], side.runs[cfg.ratio_to]), gap)
    add("held-out perplexity", cfg.rows, lambda side, row: perplexity(side.runs[row], "heldout"), lambda _: None)
    counts = {row: parameters(timed(row))[0] for row in cfg.rows}
    add(
        "parameters, source's size",
        cfg.rows,
        lambda _, row: Figure(counts[row], f"{counts[row]:,}"),
        lambda source: Figure(source.parameters, f"{source.parameters / 1e6:.1f}e6"),
    )
    add("tokens/s, source's size", cfg.rows, lambda side, row: speed(side.speeds, row), lambda _: None)
    add(
        f"speed over {to}'s",
        others,
        lambda side, row: speed_ratio(side.speeds, row, cfg.ratio_to),
        lambda source: Figure(source.speed / reference.speed, f"{source.speed / reference.speed:.2f}"),
    )
    return lines


def agreement(cfg: DictConfig, here: Summaries, committed: Summaries) -> str:
    """Whether the losses here are those that are committed, in a sentence."""
    apart, compared = [], 0
    for row in cfg.rows:
        known = losses(committed[row], "fit")
        if len(known) < 2:
            continue
        tolerance = TOLERANCE * statistics.stdev(known.values())
        for seed, loss in losses(here[row], "fit").items():
            if seed not in known:
                continue
            compared += 1
            if not abs(loss - known[seed]) <= tolerance:
                apart.append(f"{label(row)} by {percent(loss - known[seed])}, where {100 * tolerance:.1f}% is allowed")
    if not compared:
        return "There are no committed runs of these seeds that this machine's figures could be compared with."
    rule = (
        f"a fit agrees where its log perplexity is within {TOLERANCE} standard deviations, over the committed seeds, "
        "of the committed run of the same seed"
    )
    if apart:
        return f"This machine's figures DO NOT AGREE with the committed ones: {'; '.join(apart)} ({rule})."
    return f"This machine's figures agree with the committed ones ({rule})."


def full_size(cfg: DictConfig) -> str:
    """What the committed runs of the source's size say, each row at the best of its learning rates, in a line."""
    headline = compose([], "report").headline[0]
    rates = {row: [f"{row} optim.lr={rate:g}" for rate in headline.learning_rates] for row in headline.rows}
    at_each = committed_summaries(cfg, headline.setup, [row for group in rates.values() for row in group])
    found = {row: min((at_each[at] for at in rates[row]), key=mean_loss) for row in rates}
    reference, parts = found.get(cfg.ratio_to, []), []
    for row, group in found.items():
        figure = perplexity(group, "fit")
        ahead = lead(group, reference) if row != cfg.ratio_to else None
        if figure:
            parts.append(f"{name_of(row)} {figure.text}" + (f", lead {ahead.text}" if ahead else ""))
    if not parts:
        return f"Of the source's size there are no committed runs yet (experiment={headline.setup})."
    first = next(summary for group in found.values() for summary in group)
    seeds = sorted({summary["seed"] for group in found.values() for summary in group})
    return (
        f"At the source's size (experiment={headline.setup}: {what_was_trained(first)}, {seeds_in_words(seeds)}) the "
        f"fit perplexity is, each row at the best of its learning rates: {'; '.join(parts)}. "
        f"More: results/headline/{headline.setup}.md."
    )


def mean_loss(group: list[dict]) -> float:
    """The mean log perplexity on the training text; infinite where there are no runs."""
    found = losses(group, "fit").values()
    return statistics.mean(found) if found else math.inf


def what_was_trained(summary: dict) -> str:
    tokens = summary["tokens"]
    steps = f"{summary['steps']:,} steps of {tokens // summary['steps']:,} characters"
    return f"{steps}, {passes(summary, tokens):.1f} passes over {summary['data']['name']}"


def passes(summary: dict, tokens: float) -> float:
    """How often the training text was seen after so many characters."""
    return tokens / (summary["data"]["characters"] * (1 - summary["data"]["holdout"]))


def seeds_in_words(seeds: list[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if seeds else "none yet"


def origins(cfg: DictConfig, sides: list[Column]) -> list[str]:
    """What the figures come from, a sentence each."""
    notes = []
    for side in sides:
        runs = [summary for group in side.runs.values() for summary in group]
        if not runs:
            continue
        data, first = runs[0]["data"], {row: group[0] for row, group in side.runs.items() if group}
        rates = ", ".join(f"{label(row)} {learning_rate(summary)}" for row, summary in first.items())
        commands = "; ".join(f"`{summary['command']}`" for summary in first.values())
        notes.append(
            f"{side.head.capitalize()}: experiment {cfg.setup}, {what_was_trained(runs[0])} "
            f"(vocabulary {data['vocabulary']:,}, sha256 {data['sha256'][:12]}); {each(device(s) for s in runs)}; "
            f"commit {each(commit(s) for s in runs)}; learning rates {rates}. Commands, of the first seeds: {commands}."
        )
    notes.append(
        "Perplexity: mean ± standard deviation over seeds, where there are several. Lead: by how much the log "
        "perplexity is lower at the same seed, mean and Student's 95% interval; below 0 it is behind."
    )
    if cfg.runs is not None and Path(cfg.speed).exists():
        record = speed_record(Path(cfg.speed))
        notes.append(f"Speed here: {how_timed(record, record['batch'] * record['context'])}.")
    record = steps_record(Path(cfg.committed, "benchmark/cpu/float32/steps.json"))
    notes.append(f"Committed speed: {how_timed(record | record['provenance'], record['tokens'])}.")
    notes.append(
        "The source: its own corpus of 8.6 million characters, vocabulary 5,744; it states neither steps nor passes. "
        "Its speed has no unit."
    )
    return notes


def learning_rate(summary: dict) -> str:
    """The learning rate of a run, which older records do not have."""
    return f"{summary['lr']:g}" if "lr" in summary else NO_FIGURE


def cell_of_a_sheet(text: str) -> str:
    """Text as a spreadsheet shows it, which would take some for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def each(values) -> str:
    return ", ".join(dict.fromkeys(values))


def device(summary: dict) -> str:
    return f"{summary['device']}, {summary['precision']}, torch {summary['versions']['torch']}"


def how_timed(record: dict, tokens: int) -> str:
    origin = record["provenance"]
    compiled = {True: "compiled, ", False: "not compiled, "}.get(record.get("compiled"), "")  # older ones do not say
    return (
        f"steps of {tokens:,} characters, {compiled}"
        f"{record['precision']}, median (slowest to fastest); {origin['device']}; commit {commit(origin)}; "
        f"`{origin['command']}`"
    )


def render(cfg: DictConfig) -> dict[str, str]:
    """The contents of table.md, table.csv and table.tex."""
    sides = columns(cfg)
    lines = figures(cfg, sides)
    heads = ["", "", *(side.head for side in sides), "the source"]
    cells = []
    for quantity, row, found in lines:
        first = not cells or quantity != lines[len(cells) - 1][0]
        cells.append([quantity * first, label(row), *(figure.text if figure else NO_FIGURE for figure in found)])
    align = ["left", "left"] + ["right"] * (len(heads) - 2)
    markdown = tabulate(cells, heads, "github", colalign=align, disable_numparse=True)
    latex = tabulate(cells, heads, "latex_booktabs", colalign=align, disable_numparse=True)
    sheet = io.StringIO()
    writer = csv.writer(sheet, lineterminator="\n")
    writer.writerow(["quantity", "variant", *heads[2:]])
    writer.writerows(
        [q, cell_of_a_sheet(row), *(figure.value if figure else "" for figure in found)] for q, row, found in lines
    )
    said = [full_size(cfg)]
    if cfg.runs is not None:
        said.insert(0, agreement(cfg, sides[0].runs, sides[-1].runs))
    said, notes = ([" ".join(text.split()) for text in some] for some in (said, origins(cfg, sides)))
    below = [*(f"{sentence}\n" for sentence in said), *(f"- {note}" for note in notes)]
    return {
        "table.md": "\n".join([markdown, "", *below]) + "\n",
        "table.csv": sheet.getvalue(),
        "table.tex": "".join(f"% {note}\n" for note in [*said, *notes])
        + latex.replace("±", r"$\pm$").replace(NO_FIGURE, "--")
        + "\n",
    }


def write(cfg: DictConfig) -> str:
    """Write table.md, table.csv and table.tex, and return the first. `cfg` is configs/compare.yaml."""
    contents = render(cfg)
    for name, content in contents.items():
        write_bytes(Path(cfg.out, name), content.encode("utf-8", "backslashreplace"))
    return contents["table.md"]
