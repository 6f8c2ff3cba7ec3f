"""Plot perplexity against the characters trained on."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker
from omegaconf import DictConfig

from scripts.reporting.colours import colours_of_rows
from scripts.reporting.plots import end, logarithmic, mean_line, measured_on, name_lines
from scripts.reporting.records import curves, label, record_of, summaries, words_of

STYLES = {"fit_perplexity": ("training text", "-"), "heldout_perplexity": ("held-out text", "--")}


def draw(cfg: DictConfig) -> plt.Figure:
    """Draw perplexity against characters: a line per row and text, a band over seeds, a dot at the final result."""
    runs = Path(cfg.runs)
    runs_of = summaries(runs, cfg.setup, cfg.rows, cfg.seeds)
    summary = runs_of[cfg.rows[0]][0]
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    ends, colours = {}, {}
    for row, colour in zip(cfg.rows, colours_of_rows(cfg.rows), strict=True):
        records = [record_of(runs, words_of(row, cfg.setup), seed) for seed in cfg.seeds]
        for key, (text, style) in STYLES.items():
            tokens, values = curves(records, key)
            if not tokens:
                continue
            values = np.array(values)
            mean_line(axes, tokens, values, colour, style)
            name = f"{label(row)}, {text}"
            ends[name], colours[name] = (tokens[-1], values.mean(0)[-1]), colour
            evaluations = [one["evaluation"].get(key.removesuffix("_perplexity")) for one in runs_of[row]]
            if None not in evaluations:
                end(axes, tokens[-1], [evaluation["perplexity"] for evaluation in evaluations], colour)
    logarithmic(axes)
    axes.xaxis.set_major_formatter(ticker.EngFormatter())
    axes.set_xlabel("characters trained on")
    axes.set_ylabel("perplexity per character")
    axes.set_title(
        f"{summary['experiment']}: {summary['data']['name']}, {summary['steps']:,} steps, {len(cfg.seeds)} seed(s)"
    )
    figure.supxlabel(measured_on(records[0]), fontsize=9)
    name_lines(axes, ends, colours)
    return figure
