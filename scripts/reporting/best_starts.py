"""Read the runs of each attention from its best start, and write the section of leaderboard.md that shows them."""

from typing import NamedTuple

from omegaconf import DictConfig

from configs.cli import compose
from scripts.reporting import figures, markdown
from scripts.reporting.leaderboard import Board, Gap, Row, cell, gaps, judged, records_of
from scripts.reporting.rates import chosen_rate
from scripts.reporting.records import check_comparable, finished, has_ended, label
from scripts.reporting.starts import page_name, start_in_use, starts, words

HEADING, ANCHOR = "From the best starts", "from-the-best-starts"
COMMAND = "python -m scripts.reproduce study=best_starts"
TEXTS = {"fit": "", "heldout_best": "held-out "}  # texts as in `figures.losses`, and how column names begin


class BestStart(NamedTuple):
    """The start of an attention that fits best on the page of starts."""

    name: str
    in_use: str  # the name of the start in configs/starts
    words: tuple[str, ...]  # the overrides of train.py, without the seed


def best_starts(cfg: DictConfig) -> dict[str, BestStart]:
    """Return the best start of each attention that has a chosen learning rate and whose starts were all compared.

    `cfg` is that of study=leaderboard. Raises UserError if a finished run of study=starts has other settings than its
    name says.
    """
    budgets = compose(["study=starts"], "reproduce").budgets
    if cfg.setup not in budgets or budgets[cfg.setup].stop is not None:
        return {}  # if starts were compared before the last step, it is not known which is best after it
    tried = compose(["study=starts", f"setup={cfg.setup}", f"results={cfg.results}"], "reproduce")
    found = {}
    for variant, group in starts(tried).items():
        if len(group) == len(tried.starts[variant]) and chosen_rate(cfg.setup, variant) is not None:
            best = min(group, key=lambda start: start.loss).name
            found[variant] = BestStart(best, start_in_use(tried, variant), words(tried, variant, best))
    return found


def rows_from(found: dict[str, BestStart], cfg: DictConfig, board: Board) -> list[Row]:
    """Return the row of each attention from its best start, the best fit first.

    If this start is in use, the row is that of the board. Attentions are left out if a run has not ended or all have
    diverged. Raises UserError if a run has other settings than its name says, or if runs cannot be compared.
    """
    rows = []
    for row in (row for row in board.rows if row.variant in found):
        best = found[row.variant]
        if best.name == best.in_use:
            rows.append(row)
            continue
        records = list(records_of(cfg, best.words).values())
        summaries = [summary for summary in map(finished, records) if summary is not None]
        if summaries and all(map(has_ended, records)):
            rows.append(row._replace(summaries=summaries, diverged=len(records) - len(summaries)))
    check_comparable([summary for row in rows for summary in row.summaries])
    return sorted(rows, key=lambda row: row.fit().value)


def gains(rows: list[Row], board: Board, text: str) -> dict[str, Gap]:
    """Return what each attention of `rows` gains over its row of the board, by attention.

    A gain is the log perplexity of the row of the board minus that of the other row, over the seeds of both; `text` is
    as in `figures.losses`.
    """
    return judged({row.variant: figures.leads(row.summaries, board.row(row.variant).summaries, text) for row in rows})


def section(cfg: DictConfig, board: Board) -> list[str]:
    """Return a heading, a table and notes; [] if no attention has finished runs from a start that is not in use."""
    found = best_starts(cfg)
    rows = rows_from(found, cfg, board)
    new = [row for row in rows if found[row.variant].name != found[row.variant].in_use]
    if not new:
        return []
    columns = {f"{begins}gain": gains(new, board, text) for text, begins in TEXTS.items()}
    over = label(cfg.lead_over)
    columns |= {f"{begins}lead over {over}": gaps(rows, cfg.lead_over, text) for text, begins in TEXTS.items()}
    lines = []
    for row in rows:
        heldout = figures.with_interval(row.perplexities("heldout"))
        line = [row.name, f"`{found[row.variant].name}`", row.fit().text, figures.shown(heldout)]
        line.append(figures.best_heldout(row.summaries))
        lines.append([*line, *(cell(column.get(row.variant)) for column in columns.values()), row.seeds(cfg.seeds)])
    heads = ["", "best start", "fit perplexity", "held-out", "best held-out", *columns, "seeds"]
    table = markdown.table(lines, heads, left=(0, 1))
    return [f"## {HEADING}", table, markdown.notes(*notes(cfg, board, rows, new))]


def notes(cfg: DictConfig, board: Board, rows: list[Row], new: list[Row]) -> list[str]:
    """Return sentences on the section's figures. `new` are the rows from starts that are not in use."""
    page, shown = page_name(cfg.setup), {row.variant for row in rows}
    left_out = [row.name for row in board.rows if row.variant not in shown]
    told = [
        f"Each attention has the start that fitted best on [{page}.md]({page}.md), with other seeds, and the learning "
        "rate of the first table, which was chosen with the start in use. Another rate may suit the best start better.",
        "A gain is the log perplexity from the start in use minus that from the best start, the mean over seeds. It is "
        "judged like a lead; a dash stands where the best start is the one in use. Held-out gains and leads compare "
        "the column best held-out, the lowest held-out perplexity during training.",
        *changes(cfg, board, rows),
        other_precisions(new, board),
    ]
    if left_out:
        told.append(
            "Not in this table, because not all starts were compared, not all runs from the best one have ended, or "
            f"all of them have diverged: {'; '.join(left_out)}."
        )
    trained = markdown.trained_on([summary for row in new for summary in row.summaries])
    return [*told, f"Runs from starts that are not in use: {trained}; `{COMMAND}`."]


def changes(cfg: DictConfig, board: Board, rows: list[Row]) -> list[str]:
    """Return a sentence for each text on the verdicts that are not those of the same attentions on the board."""
    same, told = [board.row(row.variant) for row in rows], []
    for text, begins in TEXTS.items():
        now, before = (gaps(group, cfg.lead_over, text) for group in (rows, same))
        changed = [
            f"{label(variant)} ({before[variant].word}, now {gap.word})"
            for variant, gap in now.items()
            if variant in before and gap.word != before[variant].word
        ]
        if now:
            change = f"{begins}leads over {label(cfg.lead_over)}: {'; '.join(changed) or 'none'}"
            told.append(f"The best starts change these verdicts on {change}.")
    return told


def other_precisions(new: list[Row], board: Board) -> str:
    """Return a note on attentions whose two starts have runs of different precisions; "" if none has."""

    def used(row: Row) -> set[str]:
        return {summary["precision"] for summary in row.summaries}

    named = [row.name for row in new if used(row) != used(board.row(row.variant))]
    if not named:
        return ""
    return (
        f"The two starts were trained in different precisions, which may be a part of the gain: {'; '.join(named)} "
        "([precision.md](precision.md) compares precisions)."
    )
