"""Read the runs of each attention from its best start, and write the section of leaderboard.md that shows them."""

from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from configs.cli import compose
from scripts.reporting import figures, markdown
from scripts.reporting.figures import NO_FIGURE
from scripts.reporting.leaderboard import Board, Gap, Row, gaps, judged
from scripts.reporting.rates import chosen_rate
from scripts.reporting.records import finished_runs, label
from scripts.reporting.rule import compared
from scripts.reporting.starts import page_name, start_in_use, starts, words

HEADING = "From the best starts"
COMMAND = "python -m scripts.reproduce study=best_starts"
TEXTS = {"fit": "", "heldout_best": "held-out "}  # texts as in `figures.losses`, and how column names begin


class BestStart(NamedTuple):
    """The start of an attention that fits best on the page of starts."""

    name: str
    in_use: str  # the name of the start in configs/starts
    words: tuple[str, ...]  # the overrides of train.py, without the seed


def best_starts(cfg: DictConfig) -> dict[str, BestStart]:
    """Return the best start of each attention that has a chosen learning rate and whose starts were compared.

    `cfg` is that of study=leaderboard or study=best_starts. Raises UserError if a finished run of study=starts has
    other settings than its name says.
    """
    given = ["study=starts", f"results={cfg.results}"]
    if cfg.setup not in compose(given, "reproduce").budgets:
        return {}
    tried = compose([*given, f"setup={cfg.setup}"], "reproduce")
    if tried.stop is not None:
        return {}  # after some of the steps, no start is known to be the best
    found = {}
    for variant, group in starts(tried).items():
        if chosen_rate(cfg.setup, variant) is not None:
            best = min(group, key=lambda start: start.loss).name
            found[variant] = BestStart(best, start_in_use(tried, variant), words(tried, variant, best))
    return found


def rows_from(found: dict[str, BestStart], cfg: DictConfig, board: Board) -> list[Row]:
    """Return the row of each attention from its best start, the best fit first.

    If this start is in use, the row is that of the board. Attentions without finished runs are left out.
    """
    rows = [row for row in board.rows if row.variant in found]
    for place, row in enumerate(rows):
        best = found[row.variant]
        if best.name != best.in_use:
            rows[place] = row._replace(summaries=finished_runs(Path(cfg.results, "runs"), best.words, cfg.seeds))
    return sorted((row for row in rows if row.summaries), key=lambda row: row.fit().value)


def gains(rows: list[Row], board: Board, text: str) -> dict[str, Gap]:
    """Return what each attention gains by its best start, by attention; those from the start in use are left out.

    A gain is the log perplexity of the row of the board minus that of the row in `rows`, over the seeds of both.
    """
    before = {row.variant: row for row in board.rows}
    pairs = {row.variant: (row.summaries, before[row.variant].summaries) for row in rows}
    found = {variant: figures.leads(*pair, text) for variant, pair in pairs.items() if pair[0] is not pair[1]}
    return judged({variant: compared(leads) for variant, leads in found.items() if leads})


def changed(rows: list[Row], cfg: DictConfig, board: Board, text: str) -> list[str]:
    """Return which verdicts on leads over `cfg.lead_over` the best starts change, like "X (behind, now ahead)"."""
    references = [reference(group, cfg) for group in (rows, board.rows)]
    if None in references:
        return []
    ours, theirs = (gaps(group, row, text) for group, row in zip((rows, board.rows), references, strict=True))
    return [
        f"{label(variant)} ({theirs[variant].word}, now {gap.word})"
        for variant, gap in ours.items()
        if variant in theirs and gap.word != theirs[variant].word
    ]


def reference(rows: list[Row], cfg: DictConfig) -> Row | None:
    return next((row for row in rows if row.variant == cfg.lead_over), None)


def section(cfg: DictConfig, board: Board) -> list[str]:
    """Return a heading, a table and notes; [] if no attention has finished runs from a start that is not in use."""
    found = best_starts(cfg)
    rows = rows_from(found, cfg, board)
    if not any(found[row.variant].name != found[row.variant].in_use for row in rows):
        return []
    gained = {text: gains(rows, board, text) for text in TEXTS}
    over = reference(rows, cfg)
    ahead = {text: gaps(rows, over, text) if over else {} for text in TEXTS}
    lines = []
    for row in rows:
        heldout = figures.with_interval(row.perplexities("heldout"))
        line = [row.name, f"`{found[row.variant].name}`", row.fit().text, figures.shown(heldout)]
        line += [cell(column.get(row.variant)) for column in (*gained.values(), *ahead.values())]
        lines.append([*line, str(len(row.summaries))])
    heads = ["", "best start", "fit perplexity", "held-out"]
    heads += [f"{begins}gain" for begins in TEXTS.values()]
    heads += [f"{begins}lead over {label(cfg.lead_over)}" for begins in TEXTS.values()]
    table = markdown.table(lines, [*heads, "seeds"], left=(0, 1))
    return [f"## {HEADING}", table, markdown.notes(*notes(cfg, board, rows))]


def cell(gap: Gap | None) -> str:
    return NO_FIGURE if gap is None else f"{gap.text()}, {gap.word}"


def notes(cfg: DictConfig, board: Board, rows: list[Row]) -> list[str]:
    """Return sentences that say what the section's figures are, and which verdicts the best starts change."""
    page, over = page_name(cfg.setup), label(cfg.lead_over)
    changes = "; ".join(
        f"{where} those of {', '.join(names)}"
        for text, where in (("fit", "on the training text"), ("heldout_best", "on held-out text"))
        if (names := changed(rows, cfg, board, text))
    )
    shown = {row.variant for row in rows}
    left_out = [row.name for row in board.rows if row.variant not in shown]
    return [
        f"Each attention has the start that fits best on [{page}.md]({page}.md), where starts were compared with other "
        "seeds, and the learning rate of the table above, which was chosen from the start in use. Another rate may "
        "suit the best start better.",
        "A gain is the log perplexity from the start in use minus that from the best start, the mean over seeds; it "
        f"is judged like a lead, and is {NO_FIGURE} where the best start is in use. Held-out gains and leads compare "
        "the lowest held-out perplexity during training.",
        f"The best starts change these verdicts on leads over {over}: {changes or 'none'}.",
        *([f"No run from the best start has finished: {'; '.join(left_out)}."] if left_out else []),
        f"{markdown.trained_on([summary for row in rows for summary in row.summaries])}; `{COMMAND}`.",
    ]
