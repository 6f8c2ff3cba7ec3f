"""What plots share: colours that everybody can tell apart, and files that the same records give again."""

import io
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from data.files import write_bytes

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "rwv"  # the same figure gives the same file

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito


def band(axes: plt.Axes, x, values: np.ndarray, colour: str) -> None:
    """What lies between the lowest and the highest of values [seeds or rounds, points]."""
    axes.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)


def save(figure: plt.Figure, folder: Path, name: str, dpi: int) -> None:
    """Write a figure as <folder>/<name>.png and .svg."""
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, dpi=dpi, metadata=metadata)
        write_bytes(folder / f"{name}.{kind}", picture.getvalue())
    plt.close(figure)
