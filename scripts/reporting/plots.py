"""Colours that the colour-blind can tell apart, axes, and reproducible files, for all plots."""

import io
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker
from PIL import Image

from data.files import UserError, write_bytes
from training.record import Record
from training.summaries import at

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "rwv"  # the same figure gives the same file

PLAIN = ticker.StrMethodFormatter("{x:,.0f}")
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito


def colours(count: int) -> list:
    """Return `count` colours: the first of COLOURS, or a scale if there are too few."""
    return COLOURS[:count] if count <= len(COLOURS) else list(plt.cm.turbo(np.linspace(0, 1, count)))


def logarithmic(axes: plt.Axes, major: ticker.Formatter = PLAIN, minor: ticker.Formatter | None = None) -> None:
    """Give axes a logarithmic y scale with labels at 1, 2, 3, 5, ..., or at all ticks with `minor`, and a grid."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(major)
    axes.yaxis.set_minor_formatter(minor or ticker.NullFormatter())
    axes.grid(which="both", alpha=0.25)


def by_length_axes(axes: plt.Axes) -> None:
    """Make axes for costs against the length of the context, both logarithmic."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_xlabel("context, characters")
    logarithmic(axes)


def band(axes: plt.Axes, x, values: np.ndarray, colour: str) -> None:
    """Shade the range of values [seeds or rounds, points]."""
    axes.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)


def end(axes: plt.Axes, x: float, values: list[float], colour: str) -> None:
    """Draw a dot at the mean of the final evaluations, which cover more characters than the curves."""
    axes.plot(x, np.mean(values), "o", color=colour, markersize=5)


def measured_on(record: Record) -> str:
    """Return what a run's curves and dots are measured on. Raises UserError if its config does not hold it."""
    windows = at(record.read_config(), "evaluation.windows")
    if not isinstance(windows, int):
        raise UserError(f"{record.config} is damaged: evaluation.windows must be a whole number: it is {windows!r:.40}")
    return f"lines: {windows} windows of a text; dots: the final evaluation, as in tables"


def save(figure: plt.Figure, folder: Path, name: str, dpi: int) -> None:
    """Write a figure as <folder>/<name>.png, in 256 colours, and <name>.svg."""
    full, png, svg = io.BytesIO(), io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=dpi)
    Image.open(full).convert("RGB").quantize(256).save(png, "png", optimize=True)  # a third of the size
    figure.savefig(svg, format="svg", metadata={"Date": None})
    write_bytes(folder / f"{name}.png", png.getvalue())
    write_bytes(folder / f"{name}.svg", svg.getvalue())
    plt.close(figure)
