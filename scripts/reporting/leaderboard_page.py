"""Write leaderboard.md and leaderboard_<setup>.md, which compare attentions by fit, speed, state and recall."""

import statistics
from pathlib import Path

from omegaconf import DictConfig

from configs.cli import compose
from scripts.reporting import best_starts, figures, markdown, starts
from scripts.reporting.attention_map import state_grows
from scripts.reporting.figures import NO_FIGURE, shown
from scripts.reporting.leaderboard import SETUPS, Board, cell, command_of, gaps, read
from scripts.reporting.leaderboard_plots import Point, Scatter, draw
from scripts.reporting.plots import write_with_plot
from scripts.reporting.recall import HARD
from scripts.reporting.records import MissingRecord, label, of_two_units, without_token_shift, write_for_each
from scripts.reporting.variants import same_in_one_block, variants
from training.summaries import at

RULE = (
    "A lead is the log perplexity of the other row minus that of this one, the mean over the seeds that both have; "
    "0.01 is written as 1%. It is above 0 if this row has the lower perplexity. The perplexity is the one on the "
    "training text or, in a column that says held-out, the lowest on held-out text during training. Intervals are "
    "corrected by Holm's method over the rows of a column. By the rule (scripts/reporting/rule.py) a row is ahead if "
    "the interval is above 0 and the mean at least 0.5%, and behind if the same holds the other way round. Otherwise "
    "it is equivalent if the interval lies within ±1%, and undecided if not. The best row was chosen by these same "
    "figures, so that leads over it are a little too low."
)

NAMED = 8  # largest number of attentions that the first sentence names as not behind
LEAST_POINTS = 8  # a plot of fewer attentions would show no more than the table


def page_name(cfg: DictConfig) -> str:
    return "leaderboard" + f"_{cfg.setup}" * (cfg.setup != SETUPS[0])


def finding(board: Board) -> str:
    """Return sentences on which row is best on each text, and which are not shown to fit worse.

    The last full stop is left out. Rows that share no seed with the best one cannot be compared with it, and are named
    as such.
    """
    best, *others = board.rows
    words = {variant: gap.word for variant, gap in gaps(board.rows, best.variant).items()}
    level = [row.name for row in others if words.get(row.variant, "behind") != "behind"]
    apart = [row.name for row in others if row.variant not in words]
    named = f"these are not shown to be behind it: {'; '.join(level)}"
    if len(level) > NAMED:
        named = f"{len(level)} of {len(others)} others are not shown to be behind it"
    beside = f"; by the rule, {named}" if level else ""
    if apart:
        beside += f"; these have no seed in common with it, so that no lead is known: {'; '.join(apart)}"
    told = f"**{best.name}** fits best, with a perplexity of {best.fit().text} on the training text{beside}"
    held_out = {row.name: row.perplexities("heldout_best") for row in board.rows}
    means = {name: statistics.mean(values) for name, values in held_out.items() if values}
    if not means:
        return told
    lowest = min(means, key=means.get)
    return f"{told}. **{lowest}** has the lowest held-out perplexity during training, {means[lowest]:.2f}"


def board_table(cfg: DictConfig, board: Board) -> str:
    """Return the table: a row for each attention with finished runs, the best fit first."""
    to = label(board.ratio_to)
    heads = ["", "fit perplexity", "held-out", "best held-out", "held-out bits per byte", f"training speed over {to}'s"]
    heads += [f"streaming speed over {to}'s", "parameters of the block", "state, bytes"]
    with_recall = any(row.recall for row in board.rows)
    heads += ["recall, %"] * with_recall + ["learning rate", "seeds"]
    lines = []
    for row in board.rows:
        heldout = figures.with_interval(row.perplexities("heldout"))
        bits = [at(summary, "evaluation.heldout.bits_per_byte") for summary in row.summaries]
        per_byte = NO_FIGURE if None in bits else f"{statistics.mean(bits):.3f}"
        line = [row.name, row.fit().text, shown(heldout), figures.best_heldout(row.summaries), per_byte]
        line += [shown(board.speed(kind, row.variant)) for kind in ("training", "streaming")]
        state = NO_FIGURE if row.state() is None else f"{row.state():,}" + ", grows" * state_grows(row.variant)
        line += [f"{row.block:,}", state]
        line += [shown(figures.with_interval(row.accuracies(), "{:.1f}".format, figures.extremes))] * with_recall
        lines.append([*line, f"{row.rate:g}", row.seeds(cfg.seeds)])
    return markdown.table(lines, heads)


def gaps_table(cfg: DictConfig, board: Board) -> str:
    """Return the table of leads over cfg.lead_over, on both texts, and over the best row."""
    best, over, name = board.rows[0], cfg.lead_over, f"lead over {label(cfg.lead_over)}"
    columns = {name: gaps(board.rows, over), f"held-out {name}": gaps(board.rows, over, "heldout_best")}
    if best.variant != over:
        columns[f"lead over the best, {best.name}"] = gaps(board.rows, best.variant)
    lines = []
    for row in board.rows:
        lines.append([row.name, *(cell(column.get(row.variant)) for column in columns.values())])
    return markdown.table(lines, ["", *columns])


def precisions(board: Board) -> str:
    """Return a note that names the rows trained in each precision; "" if all have the same precision."""
    rows_of = {}
    for row in board.rows:
        precision = markdown.each(sorted(s["precision"] for s in row.summaries), " and ")
        rows_of.setdefault(precision, []).append(row.name)
    named = (f"Trained in {precision}: {'; '.join(names)}." for precision, names in rows_of.items())
    return " ".join(named) if len(rows_of) > 1 else ""


def starts_of(cfg: DictConfig, board: Board) -> str:
    """Return sentences on which rows have a chosen start, and which the plain one."""
    started = [row.name for row in board.rows if starts.start_file(cfg.setup, row.variant).exists()]
    if not started:
        return "All attentions have the plain start."
    where = f"configs/starts/{cfg.setup}, whose files say how"
    chosen = f"A start (initialisation) was chosen for {'; '.join(started)} ({where})."
    if len(started) == len(board.rows):
        return chosen
    return (
        f"{chosen} The others have the plain start. A lead over a row with the plain start may come from the start "
        f"([starts]({starts.page_name(cfg.setup)}.md))."
    )


def notes(cfg: DictConfig, board: Board) -> list[str]:
    """Return sentences that say what the figures are, and where they come from."""
    summaries = [summary for row in board.rows for summary in row.summaries]
    first, to = summaries[0], label(board.ratio_to)
    context, command = compose([f"experiment={cfg.setup}"]).model.context, command_of(cfg)
    seeds = sorted({summary["seed"] for summary in summaries})
    attentions = sorted(row.variant for row in board.rows)
    found = [
        f"{cfg.setup}: {figures.budget(first)}, {figures.seeds_in_words(seeds)}; "
        f"{markdown.vocabulary(first)}; {markdown.trained_on(summaries)}.",
        precisions(board),
        f"`{command}` trains and measures what is missing. The record of each run holds its own command, such as "
        f"`{first['command']}`.",
        f"Learning rates are those of configs/rates/{cfg.setup}/adabelief, whose files say how they were "
        f"chosen. {starts_of(cfg, board)}",
        "Fit: perplexity on the whole training text. Held-out: on the end of the text, which is not trained on. Means "
        "over seeds with Student's 95% interval; one seed has none. Best held-out: the lowest held-out perplexity "
        "during training, measured on some windows of the held-out text, as mean ± standard deviation, and after how "
        "many passes over the training text it was reached, on average. The column held-out is measured after "
        "training on the whole held-out text. It is higher if a model overfits, but it can also be a little lower, "
        "because the windows are only a part of the text. Rates were chosen by fit: at another rate, the best held-out "
        "perplexity can be lower ([rates](rates.md)). In the plots, bars are 95% intervals.",
        without_token_shift(attentions, cfg.setup),
        of_two_units(attentions, cfg.setup),
        same_in_one_block(attentions),
        f"State: the bytes that our code keeps to stream one text, after {context} characters, and whether they grow "
        "with the text ([more](../models/README.md#streaming)). They include float64 sums and unused buffers, so that "
        "some attentions could be streamed with fewer.",
    ]
    if recalled := [summary for row in board.rows for summary in row.recall]:
        steps = recalled[0]["steps"]
        found.append(
            f"Recall: share of the queries that are answered correctly, with {HARD}, after {steps} steps; mean, and "
            "lowest to highest seed ([recall.md](recall.md)). These are other models. They have the plain start, the "
            "best rate for this task, and token shift, also where the models of the other columns have none."
        )
    if board.costs is None:
        return [*found, f"Speeds are not measured yet: `{command}` measures them."]
    origin = board.costs["provenance"]
    speeds = f"{origin['repeats']} rounds, each attention beside {to}; medians with quartiles"
    return [
        *found,
        f"Training speed: steps of {origin['batch']} x {origin['context']} characters. On a CPU, the steps are not "
        f"compiled. Streaming: in float32, on one thread. Each round streams {origin['characters']} "
        f"characters of a text, and the last round ends at character {origin['context']}, the length of the context. "
        f"Both: {speeds}. {markdown.origin(origin)}{not_timed(board)}",
    ]


def not_timed(board: Board) -> str:
    """Return a space and a sentence that names the rows without a speed; "" if all have one."""
    names = [row.name for row in board.rows if board.speed("training", row.variant) is None]
    return f" Not timed: {'; '.join(names)}." if names else ""


def page(cfg: DictConfig, board: Board, with_plot: bool) -> str:
    """Return the contents of the page."""
    reasons = {why: [label(v) for v in board.not_run if board.not_run[v] == why] for why in board.not_run.values()}
    left_out = [f"{why}: {'; '.join(names)}." for why, names in reasons.items()]
    if left_out:
        left_out.append("[rates.md](rates.md) has the runs by which rates were chosen.")
    section = best_starts.section(cfg, board)
    also = f" In [the third table](#{best_starts.ANCHOR}), each has the best start that was tried."
    return markdown.page(
        f"# Leaderboard: {cfg.setup}",
        f"{finding(board)}. Rows are sorted by fit; by held-out perplexity, the order can differ."
        f"{also * bool(section)}",
        f"![Fit and held-out perplexity against speed, and fit against state]({page_name(cfg)}.png)" * with_plot,
        board_table(cfg, board),
        markdown.notes(*notes(cfg, board)),
        "## Leads",
        gaps_table(cfg, board),
        markdown.notes(RULE),
        *section,
        *(["## Not in the table", markdown.notes(*left_out)] if left_out else []),
    )


def scatters(board: Board) -> list[Scatter]:
    """Return the plots of fit against speed, of held-out perplexity against speed, and of fit against state.

    Plots of fewer than LEAST_POINTS points are left out.
    """
    timed = [(row, speed.value) for row in board.rows if (speed := board.speed("training", row.variant))]
    fast = [point(row.variant, x, row.perplexities("fit")) for row, x in timed]
    general = [point(row.variant, x, heldout) for row, x in timed if (heldout := row.perplexities("heldout_best"))]
    small = [
        point(row.variant, state, row.perplexities("fit")) for row in board.rows if (state := row.state()) is not None
    ]
    faster, smaller = (speed_axis(board), 1), ("state of streaming after a full context, bytes", -1)
    fitting, held_out = ("perplexity on the training text", -1), ("lowest held-out perplexity in training", -1)
    found = [
        Scatter(fast, *faster, *fitting, "No other beats these in both speed and fit"),
        Scatter(general, *faster, *held_out, "No other beats these in both speed and held-out perplexity"),
        Scatter(small, *smaller, *fitting, "No other beats these in both state and fit"),
    ]
    return [scatter for scatter in found if len(scatter.points) >= LEAST_POINTS]


def speed_axis(board: Board) -> str:
    """Return the label of the axis of training speeds, with the device on which they were measured."""
    axis = f"training speed over {label(board.ratio_to)}'s"
    if board.costs is None:
        return axis
    origin = board.costs["provenance"]
    on_cpu = origin["threads"] is not None  # there, the steps are not compiled
    return f"{axis}, {origin['device']}{', not compiled' * on_cpu}"


def point(variant: str, cost: float, perplexities: list[float]) -> Point:
    """Return the point of an attention, with Student's interval."""
    return Point(variant, cost, statistics.mean(perplexities), *figures.student_interval(perplexities))


def write(cfg: DictConfig) -> None:
    """Write the page and its plot. Raises MissingRecord if no attention has a finished run at its chosen rate."""
    results, name, board = Path(cfg.results), page_name(cfg), read(cfg, variants())
    if not board.rows:
        raise MissingRecord(
            f"{results}/runs/{cfg.setup} has no finished run at a chosen rate: {command_of(cfg)} trains them"
        )
    plots = scatters(board)
    write_with_plot(results, name, page(cfg, board, bool(plots)), draw(plots) if plots else None, dpi=120)


def write_all(results: Path) -> None:
    """Write the page of each experiment with finished runs at chosen rates. Raises MissingRecord if there is none."""
    write_for_each(SETUPS, "leaderboard", results, write)
