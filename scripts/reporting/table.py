"""Write the table of source article A, which is "the source" here, in markdown, CSV and LaTeX.

Its columns are what was trained on this machine, what is committed, and the source's figures. A sentence says whether
this machine's figures agree with the committed ones. With runs=null, the first column and this sentence are left out.
"""

import csv
import io
import shlex
import statistics
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig
from tabulate import tabulate

from configs.cli import compose
from data.files import UserError, write_bytes
from scripts.reporting import figures, markdown
from scripts.reporting.figures import NO_FIGURE, Figure, shown
from scripts.reporting.records import (
    check_comparable,
    finished_runs,
    label,
    name_of,
    speed_record,
    steps_path,
    steps_record,
    summaries,
    words_of,
)
from scripts.reporting.starts import chosen_start
from scripts.reporting.variants import parameters

TOLERANCE = 2  # standard deviations over the committed seeds within which a loss agrees
ACCURACY = "held-out accuracy"  # shown only if there are runs on a synthetic text
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet reads a cell that begins like this as a formula
Summaries = dict[str, list[dict]]  # by row


def committed_summaries(cfg: DictConfig, experiment: str, rows: list[str], seeds: list[int]) -> Summaries:
    """Return, for each row, the summaries of its finished and committed runs with these seeds."""
    runs = Path(cfg.committed, "runs")
    groups = {row: finished_runs(runs, words_of(row, experiment), seeds) for row in rows}
    check_comparable([summary for group in groups.values() for summary in group])
    return groups


def row_of_timing(row: str) -> str:
    """Return the row whose timed steps stand for `row`.

    It is `row` without overrides that begin with train., optim., evaluation., data, starts= or rates=, and without the
    default `ffn=geglu`.
    """
    other = ("train.", "optim.", "evaluation.", "data", "ffn=geglu", "starts=", "rates=")
    return shlex.join(word for word in shlex.split(row) if not word.startswith(other))


class Column(NamedTuple):
    """The runs of this machine or of the repository, and the characters/s of each timed step by row."""

    head: str
    runs: Summaries
    speeds: dict[str, list[float]]
    timing: str  # how the steps were timed

    def timed(self, row: str) -> list[float] | None:
        return self.speeds.get(row, self.speeds.get(row_of_timing(row)))

    def speed(self, row: str) -> Figure | None:
        if not (speeds := self.timed(row)):
            return None
        median = statistics.median(speeds)
        return Figure(median, f"{median:,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})")

    def speed_ratio(self, row: str, reference: str) -> Figure | None:
        one, other = self.timed(row), self.timed(reference)
        ratio = figures.paired_ratio(one, other) if one and other else None
        return ratio and Figure(ratio, f"{ratio:.2f}")


def columns(cfg: DictConfig) -> list[Column]:
    """Return the columns of this machine, unless runs=null, and of the repository."""
    steps = steps_record(steps_path(Path(cfg.committed), "float32"))
    speeds = {row: [steps["tokens"] / s for s in seconds] for row, seconds in steps["seconds"].items()}
    runs = committed_summaries(cfg, cfg.setup, cfg.rows, cfg.committed_seeds)
    seeds = sorted({summary["seed"] for group in runs.values() for summary in group})
    timing = f"Committed speed: {how_timed(steps | steps['provenance'], steps['tokens'])}."
    committed = Column(f"committed, {figures.seeds_in_words(seeds)}", runs, speeds, timing)
    if cfg.runs is None:
        return [committed]
    speeds, timing = {}, ""
    if Path(cfg.speed).exists():
        record = speed_record(Path(cfg.speed))
        tokens = record["batch"] * record["context"]
        timing = f"Speed here: {how_timed(record, tokens)}."
        if record.get("setup", "source") == "source":
            speeds = {row: [tokens / s for s in rate["seconds"]] for row, rate in record["speed"].items()}
        else:
            timing = f"Speed here: not shown, because {cfg.speed} has the size of experiment={record['setup']}."
    here = summaries(Path(cfg.runs), cfg.setup, cfg.rows, cfg.seeds)
    return [Column(f"trained here, {figures.seeds_in_words(cfg.seeds)}", here, speeds, timing), committed]


def table_lines(cfg: DictConfig, columns: list[Column]) -> list[tuple[str, str, list[Figure | None]]]:
    """Return lines (quantity, row, figures), with a figure for each column and the source's figure at the end.

    Raises UserError if ratio_to is not a row.
    """
    if cfg.ratio_to not in cfg.rows:
        raise UserError(f"ratio_to={cfg.ratio_to} is not among the rows: {', '.join(cfg.rows)}")
    reference, to = cfg.source.get(cfg.ratio_to), label(cfg.ratio_to)
    lead, heldout_lead, speed_ratio = f"fit, lead over {to}", f"best held-out, lead over {to}", f"speed over {to}'s"
    cells = {}
    for row in cfg.rows:
        count, _ = parameters(compose(list(words_of(row_of_timing(row), "source"))))
        cells[row] = [
            {
                "fit perplexity": figures.perplexity(column.runs[row], "fit"),
                lead: figures.lead(column.runs[row], column.runs[cfg.ratio_to]),
                "held-out perplexity": figures.perplexity(column.runs[row], "heldout"),
                "best held-out perplexity": figures.perplexity(column.runs[row], "heldout_best"),
                heldout_lead: figures.lead(column.runs[row], column.runs[cfg.ratio_to], "heldout_best"),
                ACCURACY: figures.accuracy(column.runs[row], "heldout"),
                "parameters, source's size": Figure(count, f"{count:,}"),
                "tokens/s, source's size": column.speed(row),
                speed_ratio: column.speed_ratio(row, cfg.ratio_to),
            }
            for column in columns
        ]
        source, in_source = cfg.source.get(row), {}
        if source:
            in_source = {
                "fit perplexity": Figure(source.perplexity, f"{source.perplexity:.2f}"),
                "parameters, source's size": Figure(source.parameters, f"{source.parameters / 1e6:.1f}e6"),
            }
        if source and reference:
            faster = source.speed / reference.speed
            in_source[lead] = figures.source_lead(cfg.source, row, cfg.ratio_to)
            in_source[speed_ratio] = Figure(faster, f"{faster:.2f}")
        cells[row].append(in_source)
    lines = [
        (quantity, row, [column.get(quantity) for column in cells[row]])
        for quantity in cells[cfg.ratio_to][0]
        for row in cfg.rows
        if row != cfg.ratio_to or quantity not in (lead, heldout_lead, speed_ratio)
    ]
    measured = any(any(found) for quantity, _, found in lines if quantity == ACCURACY)
    return [line for line in lines if measured or line[0] != ACCURACY]


def agreement(cfg: DictConfig, here: Summaries, committed: Summaries) -> str:
    """Return a sentence that says whether this machine's losses agree with the committed ones."""
    apart, compared, skipped = [], 0, []
    for row in cfg.rows:
        known = figures.losses(committed[row], "fit")
        if len(known) < 2 or not known.keys() & figures.losses(here[row], "fit").keys():
            skipped.append(name_of(row))
            continue
        tolerance = TOLERANCE * statistics.stdev(known.values())
        for seed, loss in figures.losses(here[row], "fit").items():
            compared += seed in known
            if seed in known and not abs(loss - known[seed]) <= tolerance:
                gap = figures.percent(loss - known[seed])
                apart.append(f"{label(row)} by {gap}, where {100 * tolerance:.1f}% is allowed")
    if not compared:
        return (
            "This machine's figures cannot be compared: no row has two committed runs, one of them with a seed that "
            "was trained here."
        )
    rule = (
        "a row agrees if its log perplexity on the training text differs from that of the committed run of the same "
        f"seed by at most {TOLERANCE} standard deviations over the committed seeds"
    )
    rest = f" Not compared: {'; '.join(skipped)}." if skipped else ""
    if apart:
        return f"This machine's figures DO NOT AGREE with the committed ones: {'; '.join(apart)} ({rule}).{rest}"
    return f"This machine's figures agree with the committed ones ({rule}).{rest}"


def full_size(cfg: DictConfig) -> str:
    """Return a sentence on the committed runs at the source's size of those rows that are among the headline's.

    Each has its chosen learning rate. Returns "" if no row is among them.
    """
    headline = compose([], "report").headline[0]
    rates = {
        row: [f"{row} optim.lr={rate:g}" for rate in headline.learning_rates]
        for row in headline.rows
        if row in cfg.rows
    }
    if not rates:
        return ""
    every_row = [row for group in rates.values() for row in group]
    at_each = committed_summaries(cfg, headline.setup, every_row, headline.seeds)
    best = {row: min((at_each[at] for at in rates[row]), key=figures.mean_loss) for row in rates}
    reference, parts = best.get(cfg.ratio_to, []), []
    for row, group in best.items():
        ahead = figures.lead(group, reference) if row != cfg.ratio_to else None
        if group:
            text = f"{name_of(row)} {shown(figures.perplexity(group, 'fit'))}"
            parts.append(f"{text}, lead {ahead.text}" if ahead else text)
    if not parts:
        return f"There are no committed runs of the source's size yet (experiment={headline.setup})."
    runs = [summary for group in best.values() for summary in group]
    seeds = figures.seeds_in_words(sorted({summary["seed"] for summary in runs}))
    leads = f", with leads over {label(cfg.ratio_to)}," if reference else ""
    return (
        f"At the source's size (experiment={headline.setup}: {figures.budget(runs[0])}, {seeds}) the fit "
        f"perplexities at the learning rate that was chosen for each attention{leads} are: {'; '.join(parts)}. More: "
        f"results/headline/{headline.name}.md."
    )


def origins(cfg: DictConfig, columns: list[Column]) -> list[str]:
    """Return sentences that say where the figures come from."""
    notes = []
    for column in columns:
        runs = [summary for group in column.runs.values() for summary in group]
        if not runs:
            continue
        first = {row: group[0] for row, group in column.runs.items() if group}
        rates = ", ".join(
            f"{label(row)} {format(summary['lr'], 'g') if 'lr' in summary else NO_FIGURE}"  # older records lack it
            for row, summary in first.items()
        )
        commands = "; ".join(f"`{summary['command']}`" for summary in first.values())
        notes.append(
            f"{column.head.capitalize()}: experiment {cfg.setup}, {figures.budget(runs[0])} "
            f"({markdown.vocabulary(runs[0])}); {markdown.trained_on(runs)}; learning rates {rates}. "
            f"Commands of the first seeds: {commands}."
        )
    notes.append(
        "Perplexity: mean ± standard deviation over seeds. Fit is measured on the training text, and best held-out is "
        f"the lowest during training. Lead: {label(cfg.ratio_to)}'s log perplexity minus the row's at the same seed, "
        "where 0.01 is called 1%, with Student's 95% interval of the mean; below 0 the row is behind."
    )
    notes += starts_of(cfg)
    measured = [
        s for column in columns for group in column.runs.values() for s in group if figures.accuracy([s], "heldout")
    ]
    if measured:
        notes.append(
            f"Accuracy: the share of the {measured[0]['evaluation']['heldout']['answers']:,} answers in the held-out "
            "text to which the model gives the largest logit; mean ± standard deviation over seeds."
        )
    notes += [column.timing for column in columns if column.timing]
    notes.append(
        "The source: 512 dimensions, its own corpus of 8.6 million characters, vocabulary 5,744; it states neither "
        "steps nor passes, so that its perplexities cannot be compared with ours. It gives speeds without a unit, so "
        "that only their ratios are shown."
    )
    return notes


def starts_of(cfg: DictConfig) -> list[str]:
    """Return a sentence on the starts of the rows, if one was chosen for some but not for all of them."""
    chosen = {label(row): chosen_start(cfg.setup, row) for row in cfg.rows}
    named = [f"{name} `{words}`" for name, words in chosen.items() if words]
    plain = [name for name, words in chosen.items() if not words]
    if not named or not plain:
        return []
    return [
        f"A start (initialisation) was chosen for {'; '.join(named)}. {'; '.join(plain)}: the plain start. A lead "
        "between rows with a chosen and with the plain start may come from the start."
    ]


def how_timed(record: dict, tokens: int) -> str:
    origin = record["provenance"]
    compiled = {True: "compiled, ", False: "not compiled, "}.get(record.get("compiled"), "")  # older records do not say
    return (
        f"steps of {tokens:,} characters, {compiled}{record['precision']}; speeds are medians (slowest to fastest) "
        "over rounds, each of which times every row once; a ratio is the median of the ratios in each round; "
        f"{origin['device']}; at commit {markdown.commit(origin)}: `{origin['command']}`"
    )


def render(cfg: DictConfig) -> dict[str, str]:
    """Return the contents of table.md, table.csv and table.tex."""
    sides = columns(cfg)
    lines = table_lines(cfg, sides)
    heads = ["", "", *(side.head for side in sides), "the source"]
    cells = []
    for quantity, row, found in lines:
        first = not cells or quantity != lines[len(cells) - 1][0]
        cells.append([quantity * first, label(row), *map(shown, found)])
    align = ["left", "left"] + ["right"] * (len(heads) - 2)
    latex = tabulate(cells, heads, "latex_booktabs", colalign=align, disable_numparse=True)
    sheet = io.StringIO()
    writer = csv.writer(sheet, lineterminator="\n")
    writer.writerow(["quantity", "variant", *heads[2:]])
    for quantity, row, found in lines:
        text = f"'{row}" if row.startswith(FORMULA) else row
        writer.writerow([quantity, text, *(figure.value if figure else "" for figure in found)])
    sentences = [full_size(cfg)]
    if cfg.runs is not None:
        sentences.insert(0, agreement(cfg, sides[0].runs, sides[-1].runs))
    found = (list(filter(None, sentences)), origins(cfg, sides))
    sentences, notes = ([" ".join(text.split()) for text in texts] for texts in found)
    comments = "".join(f"% {note}\n" for note in [*sentences, *notes])
    return {
        "table.md": markdown.page(markdown.table(cells, heads, left=(0, 1)), *sentences, markdown.notes(*notes)),
        "table.csv": sheet.getvalue(),
        "table.tex": comments + latex.replace("±", r"$\pm$").replace(NO_FIGURE, "--") + "\n",
    }


def write(cfg: DictConfig) -> str:
    """Write table.md, table.csv and table.tex, and return the contents of table.md. `cfg` is configs/compare.yaml."""
    contents = render(cfg)
    for name, content in contents.items():
        write_bytes(Path(cfg.out, name), content.encode("utf-8", "backslashreplace"))
    return contents["table.md"]
