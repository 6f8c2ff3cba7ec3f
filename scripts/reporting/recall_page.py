"""Write recall.md, the accuracy of each attention at multi-query associative recall, from the records of its runs."""

import statistics
from pathlib import Path

from omegaconf import DictConfig

from configs.cli import compose
from data.files import write_bytes
from scripts.reporting import figures, leaderboard, markdown
from scripts.reporting.figures import NO_FIGURE
from scripts.reporting.leaderboard_plots import Point, Scatter, draw
from scripts.reporting.plots import save
from scripts.reporting.recall import SHIFTS, Row, read
from scripts.reporting.records import MissingRecord, label

COMMAND = "python -m scripts.reproduce study=recall"
WORTH = 0.05  # the finding names attentions whose accuracy token shift changes by more than this


def gain(found: dict[tuple[str, bool], Row], variant: str) -> figures.Figure | None:
    """Return the points of accuracy that token shift adds, over the common seeds; None if one row is missing."""
    if not {(variant, True), (variant, False)} <= found.keys():
        return None
    with_shift, without = (found[variant, shift].accuracies() for shift in SHIFTS)
    differences = [with_shift[seed] - without[seed] for seed in sorted(with_shift.keys() & without.keys())]
    return figures.with_interval(differences, "{:+.1f}".format)


def finding(found: dict[tuple[str, bool], Row]) -> str:
    """Return sentences on what token shift does to recall."""
    gains = {variant: value.value for variant, _ in found if (value := gain(found, variant)) is not None}
    helped = [label(variant) for variant, value in gains.items() if value > 100 * WORTH]
    harmed = [label(variant) for variant, value in gains.items() if value < -100 * WORTH]
    parts = [
        f"Token shift adds more than {100 * WORTH:.0f} points of accuracy to {len(helped)} of {len(gains)} attentions"
        + (f": {'; '.join(helped)}" if helped else "")
    ]
    parts += [f"It takes more than {100 * WORTH:.0f} points from {'; '.join(harmed)}"] if harmed else []
    return ". ".join(parts) + "."


def page(cfg: DictConfig, found: dict[tuple[str, bool], Row], plots: list[str]) -> str:
    """Return the contents of recall.md; `plots` are the names of its plots' files."""
    best = {variant: max(mean(row) for (v, _), row in found.items() if v == variant) for variant, _ in found}
    lines = []
    for variant in sorted(best, key=best.get, reverse=True):
        pair = [found.get((variant, shift)) for shift in SHIFTS]
        cells = [NO_FIGURE if row is None else shown(row) for row in pair]
        gained, state = gain(found, variant), next(row for row in pair if row).summaries[0].get("state_bytes")
        cells += [figures.shown(gained), NO_FIGURE if state is None else f"{state:,}"]
        lines.append([label(variant), *cells, ", ".join(NO_FIGURE if row is None else f"{row.rate:g}" for row in pair)])
    heads = ["", "with token shift, %", "without, %", "token shift adds, points", "state, bytes", "learning rates"]
    runs = [summary for row in found.values() for summary in row.summaries]
    return markdown.page(
        "# Recall: finding a value in the context",
        finding(found),
        *(f"![{name.replace('_', ' ')}]({name}.png)" for name in plots),
        markdown.table(lines, heads),
        markdown.notes(
            "Multi-query associative recall (data/README.md): the share of the queries in held-out rows whose value is "
            "predicted; mean over seeds, and lowest to highest. What token shift adds is shown with Student's 95% "
            "interval.",
            f"{figures.budget(runs[0])}, {figures.seeds_in_words(list(cfg.seeds))}. "
            "The models are trained to predict every character.",
            "With and without token shift, each attention has a learning rate of its own: the one of "
            f"{', '.join(f'{rate:g}' for rate in cfg.learning_rates)} with the highest accuracy in runs with "
            f"{figures.seeds_in_words(list(cfg.rate_seeds))}.",
            f"{markdown.trained_on(runs)}; `{COMMAND}`.",
        ),
    )


def mean(row: Row) -> float:
    return statistics.mean(row.accuracies().values())


def shown(row: Row) -> str:
    return figures.with_interval(list(row.accuracies().values()), "{:.1f}".format, figures.extremes).text


def scatters(cfg: DictConfig, found: dict[tuple[str, bool], Row]) -> dict[str, Scatter]:
    """Return the plots of accuracy with token shift, against the state and against the leaderboard's perplexity."""
    states, perplexities = [], []
    shifted = {variant: row for (variant, shift), row in found.items() if shift}
    settings = compose(["study=leaderboard", f"results={cfg.results}"], "reproduce")
    board = leaderboard.read(settings, list(shifted))
    for variant, row in shifted.items():
        quality = mean(row), *figures.extremes(list(row.accuracies().values()))
        if "state_bytes" in row.summaries[0]:
            states.append(Point(variant, row.summaries[0]["state_bytes"], *quality))
        if (beside := board.row(variant)) is not None:
            perplexities.append(Point(variant, beside.fit().value, *quality))
    recall = ("recall with token shift, %", 1)
    state = ("state of streaming, bytes", -1)
    novel = ("perplexity of small models on a novel", -1)
    plots = {
        "recall_state": Scatter(states, *state, *recall, "Best recall with their state or a smaller one"),
        "recall_perplexity": Scatter(perplexities, *novel, *recall, "Best recall at their perplexity or a lower one"),
    }
    return {name: scatter for name, scatter in plots.items() if scatter.points}


def write(cfg: DictConfig) -> None:
    """Write recall.md and its plots. Raises MissingRecord if there are no finished runs."""
    results, found = Path(cfg.results), read(cfg)
    if not found:
        raise MissingRecord(f"{results}/runs/recall has no finished runs: {COMMAND} trains them")
    plots = scatters(cfg, found)
    for name, scatter in plots.items():
        save(draw(scatter), results, name, dpi=110)
    write_bytes(results / "recall.md", page(cfg, found, list(plots)).encode())
    print(f"written to {results}: recall.md, {', '.join(f'{name}.png, {name}.svg' for name in plots)}")
