"""What all plots share: axes, labels, bands and reproducible files. Their colours are those of colours.py."""

import io
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import patheffects, ticker
from PIL import Image
from scipy.optimize import isotonic_regression

from data.files import UserError, write_bytes
from scripts.reporting.figures import student_interval
from training.record import Record
from training.summaries import at

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "rwv"  # the same figure gives the same file

PLAIN = ticker.StrMethodFormatter("{x:,.0f}")
BARS = "bars: 95% intervals; bands: the range over seeds"  # what `end_of_lead` and `band` draw
# In points: the font size of labels, half the width of the square around a dot that labels keep free, and the least
# distance of a label from its dot.
LABEL_SIZE, DOT, NEAR = 7, 4, 5
DARKER = 0.75  # factor of the colours of names, since thin letters in light colours cannot be read
COLUMN = 20  # in points: the names of lines whose ends are nearer in x than this stand in one column
HALO = [patheffects.withStroke(linewidth=2, foreground="white")]


def label_points(axes: plt.Axes, points: dict[str, tuple[float, float]]) -> list[plt.Annotation]:
    """Write names beside their points (x, y), where possible without covering a point or a name. Return the texts.

    Call this function last, because it uses the limits and scales of the axes. Each name takes the nearest free place
    around its point. A line leads to the point if the name is farther away than NEAR. If no place is free, the name
    is written to the right of its point.
    """
    axes.figure.draw_without_rendering()  # to lay the axes out
    scale = 72 / axes.figure.dpi  # points per pixel
    centres = {name: scale * axes.transData.transform(point) for name, point in points.items()}
    taken = [(centre - DOT, centre + DOT) for centre in centres.values()]
    inside, texts = scale * axes.bbox.get_points(), []
    for name, centre in sorted(centres.items(), key=lambda item: tuple(-item[1])):
        half = scale * text_size(axes.figure, name) / 2 + 1
        boxes = [(distance, centre + offset - half, centre + offset + half) for distance, offset in around(half)]
        free = (box for box in boxes if is_free(*box[1:], inside, taken))
        distance, low, high = next(free, boxes[0])
        taken.append((low, high))
        line = {"arrowstyle": "-", "color": "grey", "linewidth": 0.5} if distance > NEAR else None
        offset = tuple((low + high) / 2 - centre)
        place = {"textcoords": "offset points", "ha": "center", "va": "center", "arrowprops": line}
        texts.append(axes.annotate(name, points[name], offset, fontsize=LABEL_SIZE, path_effects=HALO, **place))
        texts[-1].set_in_layout(False)
    return texts


def name_lines(axes: plt.Axes, ends: dict[str, tuple[float, float]], colours: dict[str, str]) -> None:
    """Write the names of lines to the right of their ends (x, y), in darker shades of their colours.

    Names that would overlap are moved up or down, and the x axis goes on as far as they need. Call this function last,
    because it uses the limits and scales of the axes.
    """
    make_room(axes, ends)
    axes.figure.draw_without_rendering()
    places = {name: 72 / axes.figure.dpi * axes.transData.transform(end) for name, end in ends.items()}  # in points
    columns: list[list[str]] = []  # of names whose ends are near each other in x
    for name in sorted(places, key=lambda name: places[name][0]):
        if not columns or places[name][0] - places[columns[-1][-1]][0] > COLUMN:
            columns.append([])
        columns[-1].append(name)
    for column in columns:
        column.sort(key=lambda name: places[name][1])
        right = max(places[name][0] for name in column) + NEAR + 1
        least = 1.1 * LABEL_SIZE * np.arange(len(column))  # the heights of names that stand as close as they may
        heights = isotonic_regression(np.array([places[name][1] for name in column]) - least).x + least
        for name, height in zip(column, heights, strict=True):
            style = {"color": DARKER * np.array(matplotlib.colors.to_rgb(colours[name])), "path_effects": HALO}
            offset = {"xytext": (right, height) - places[name], "textcoords": "offset points", "va": "center"}
            axes.annotate(name, ends[name], fontsize=LABEL_SIZE, **offset, **style).set_in_layout(False)


def make_room(axes: plt.Axes, ends: dict[str, tuple[float, float]]) -> None:
    """Let the x axis go on so far beyond the ends of lines that their names fit to the right of them."""
    axes.figure.draw_without_rendering()  # to lay the axes out
    scale, width = axes.xaxis.get_transform(), axes.bbox.width
    low, high = scale.transform(axes.get_xlim())
    for name, (x, _) in ends.items():
        room = text_size(axes.figure, name)[0] + (2 * NEAR + COLUMN) * axes.figure.dpi / 72
        (end,) = scale.transform([x])
        high = max(high, low + (end - low) * width / max(width - room, width / 3))
    axes.set_xlim(right=scale.inverted().transform([high])[0])


def text_size(figure: plt.Figure, name: str) -> np.ndarray:
    """Return the width and height of a label in pixels."""
    text = figure.text(0, 0, name, fontsize=LABEL_SIZE)
    size = text.get_window_extent().size
    text.remove()
    return size


def around(half: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    """Yield places for a label, each as a distance and the offset of the label's centre from the point.

    `half` is half the width and half the height of the label.
    If the label is straight to the right or left of the point, or straight above or below it, the distance is the width
    of the gap between them; in other directions the gap can be narrower. The smallest distances come first, and at each
    distance the place to the right.
    """
    for distance in range(NEAR, 160, 6):
        for angle in np.linspace(0, 2 * np.pi, 16, endpoint=False):
            yield distance, np.array([np.cos(angle), np.sin(angle)]) * (half + distance)


def is_free(low: np.ndarray, high: np.ndarray, inside: np.ndarray, taken: list[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Return whether the box from `low` to `high` lies within `inside` and overlaps none of the boxes `taken`."""
    within = (inside[0] < low).all() and (high < inside[1]).all()
    return within and not any((low < other_high).all() and (other_low < high).all() for other_low, other_high in taken)


def logarithmic(axes: plt.Axes, major: ticker.Formatter = PLAIN, minor: ticker.Formatter | None = None) -> None:
    """Give axes a grid and a logarithmic y scale, with labels at 1, 2, 3, 5, 10, ...; `minor` labels other ticks."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(major)
    axes.yaxis.set_minor_formatter(minor or ticker.NullFormatter())
    axes.grid(which="both", alpha=0.25)


def by_length_axes(axes: plt.Axes) -> None:
    """Give axes logarithmic scales for costs (y) against the length of the context (x).

    Call this function after the costs are drawn: if the limits of y differ by less than a factor of 4, there are more
    ticks, all with labels.
    """
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_xlabel("context, characters")
    low, high = axes.get_ylim()
    plain = ticker.FuncFormatter(lambda value, _place: f"{value:,.10g}")
    is_narrow = 0 < low < high < 4 * low
    logarithmic(axes, plain, minor=plain if is_narrow else None)
    if is_narrow:
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5)))


def band(axes: plt.Axes, x, values: np.ndarray, colour: str) -> None:
    """Shade the range of values [seeds or rounds, points]."""
    axes.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)


def mean_line(axes: plt.Axes, x, values: np.ndarray, colour: str, style: str = "-") -> None:
    """Plot the mean of values [seeds, points]; if there are several seeds, shade their range."""
    axes.plot(x, values.mean(0), style, color=colour, markersize=4)
    if len(values) > 1:
        band(axes, x, values, colour)


def end(axes: plt.Axes, x: float, values: list[float], colour: str) -> tuple[float, float]:
    """Draw and return a dot at the mean of the final evaluations, which cover more characters than the curves."""
    axes.plot(x, np.mean(values), "o", color=colour, markersize=5)
    return x, np.mean(values)


def end_of_lead(axes: plt.Axes, x: float, leads: list[float], colour: str) -> tuple[float, float]:
    """Draw and return a dot at the mean lead in the final evaluations, in percent, with Student's 95% interval.

    Each call for the same axes draws further to the right, so that intervals do not hide one another.
    """
    low, high = student_interval(leads)
    mean, place = 100 * np.mean(leads), x * (1 + 0.01 * len(axes.containers))
    axes.errorbar(
        place, mean, [[mean - 100 * low], [100 * high - mean]], fmt="o", color=colour, markersize=5, capsize=3
    )
    return place, mean


def measured_on(record: Record) -> str:
    """Return what a run's curves and dots are measured on. Raises UserError if its config has no number of windows."""
    windows = at(record.read_config(), "evaluation.windows")
    if not isinstance(windows, int):
        raise UserError(f"{record.config} is damaged: evaluation.windows must be a whole number: it is {windows!r:.40}")
    return f"lines: {windows} windows of a text; dots: the final evaluation, as in tables"


def save(figure: plt.Figure, folder: Path, name: str, dpi: int) -> None:
    """Write a figure as <folder>/<name>.png, in 256 colours, and <name>.svg."""
    full, png, svg = io.BytesIO(), io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=dpi)
    few = Image.open(full).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)  # keeps the colours of thin lines
    few.save(png, "png", optimize=True)  # a third of the size of `full`
    figure.savefig(svg, format="svg", metadata={"Date": None})
    write_bytes(folder / f"{name}.png", png.getvalue())
    write_bytes(folder / f"{name}.svg", svg.getvalue())
    plt.close(figure)


def write_with_plot(results: Path, name: str, page: str, figure: plt.Figure | None, dpi: int = 110) -> None:
    """Write <name>.md and, if there is one, its plot, and print what was written."""
    write_bytes(results / f"{name}.md", page.encode())
    if figure is not None:
        save(figure, results, name, dpi)
    print(f"written to {results}: {name}.md" + f", {name}.png, {name}.svg" * (figure is not None))
