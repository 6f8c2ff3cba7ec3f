"""Give every attention one colour, the same in all plots, and other colours to what is no attention."""

import shlex
from collections.abc import Iterable
from functools import cache

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from scripts.reporting.variants import header, variants

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito
COMPARED = ("mha_plus", "gmlp", "aft", "mha", "mha_tw")  # attentions that have the first of these colours
OF_NO_ATTENTION = ["#000000", "#56B4E9", "#888888", "#8C564B"]
# The attentions that have the next colours, so that these stay theirs when an attention is added.
OTHERS = (
    "aft_conv", "aft_full", "aft_local", "aft_simple", "alibi", "deltanet", "flash_mixed_chunk", "fox",
    "gated_deltanet", "gated_mha", "gau", "gau_alpha", "gau_softmax", "gla", "gmlp_sgu", "linear_attention", "mamba2",
    "mha_key_size", "mha_log_n", "mha_rotary", "realformer", "realformer_qk", "retnet", "rwkv4", "rwkv7", "rwv",
    "talking_heads", "xsa",
)  # fmt: skip
DARKEST, LIGHTEST = 0.35, 0.8  # limits of the lightness of colours, so that they differ from black and from white
# Björn Ottosson's OKLab, in which the distance between two colours is about as large as the difference that one sees:
# the first matrix is applied to linear RGB, and the second to the cube roots of the result.
TO_CONES = np.array([[0.412221, 0.536333, 0.051446], [0.211903, 0.680700, 0.107397], [0.088302, 0.281719, 0.629979]])
TO_LAB = np.array([[0.210454, 0.793618, -0.004072], [1.977998, -2.428592, 0.450594], [0.025904, 0.782772, -0.808676]])


def colour_of(variant: str) -> str:
    """Return the colour of an attention in all plots where it has one row or line."""
    if variant in COMPARED:
        return COLOURS[COMPARED.index(variant)]
    others = [*OTHERS, *(name for name in variants() if name not in (*COMPARED, *OTHERS))]
    return distinct(len(others))[others.index(variant)]


def colours_of_rows(rows: Iterable[str]) -> list:
    """Return a different colour for each row, which is given as an attention and, after it, overrides.

    The first row of each attention has this attention's own colour. The others have colours of no attention.
    """
    names = [shlex.split(row)[0].removeprefix("attn=") for row in rows]
    own = {names.index(name): colour_of(name) for name in variants() if name in names}
    count = len(names) - len(own)
    others = iter(OF_NO_ATTENTION if count <= len(OF_NO_ATTENTION) else plt.cm.viridis(np.linspace(0, 1, count)))
    return [own[place] if place in own else next(others) for place in range(len(names))]


def attention_of(row: str, overrides: str) -> str:
    """Return the attention that a row of a claim shows, by its name if this says it, otherwise by its overrides.

    With its default settings RWV is AFT, so that its rows without the name of an attention count as AFT.
    """
    names = {variant: header(variant)["label"] for variant in variants()}
    named = [variant for variant, name in names.items() if row == name or row.startswith(f"{name}, ")]
    used = next(word for word in shlex.split(overrides) if "=" not in word or word.startswith("attn="))
    used = used.removeprefix("attn=")
    return max(named, key=lambda variant: len(names[variant]), default="aft" if used == "rwv" else used)


@cache
def distinct(count: int) -> list[str]:
    """Return `count` colours, each as far as possible from white, COLOURS, OF_NO_ATTENTION and those before it."""
    levels = np.linspace(0, 1, 12)
    candidates = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(-1, 3)
    light = lab(candidates)[:, 0]
    candidates = candidates[(light > DARKEST) & (light < LIGHTEST)]
    places = lab(candidates)
    taken = lab(np.array([matplotlib.colors.to_rgb(colour) for colour in (*COLOURS, *OF_NO_ATTENTION, "white")]))
    nearest = np.linalg.norm(places[:, None] - taken, axis=-1).min(1)
    chosen = []
    for _ in range(count):
        best = nearest.argmax()
        chosen.append(matplotlib.colors.to_hex(candidates[best]))
        nearest = np.minimum(nearest, np.linalg.norm(places - places[best], axis=-1))
    return chosen


def lab(colours: np.ndarray) -> np.ndarray:
    """Return the OKLab coordinates [..., 3] of colours in sRGB [..., 3], each between 0 and 1."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    return np.cbrt(linear @ TO_CONES.T) @ TO_LAB.T
