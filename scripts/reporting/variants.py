"""Every attention with its equation, its source, and the parameters of the model at the source's size."""

import re
import shlex
from pathlib import Path

import torch
from tabulate import tabulate

from configs.cli import compose
from configs.folder import CONFIGS
from data.files import write_bytes
from models.build import instantiate_model
from models.lm import parameter_count

VOCABULARY = 5744  # the source's


def header(variant: str) -> dict[str, str]:
    """The label, equation and source that a variant's yaml begins with; its name and nothing where it does not."""
    path = CONFIGS / f"attn/{variant}.yaml"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.findall(r"^# (label|equation|source): (.+)$", text, re.MULTILINE)
    return {"label": variant, "equation": "", "source": ""} | dict(found)


def variants() -> list[str]:
    return sorted(path.stem for path in (CONFIGS / "attn").glob("*.yaml"))


def parameters(variant: str) -> tuple[int, int]:
    """Of the whole model at the source's size, and of its block: attention and feed-forward.

    What differs from the attention's config may follow its name: "aft attn.gamma=false".
    """
    with torch.device("meta"):
        model = instantiate_model(compose([*shlex.split(f"attn={variant}"), "experiment=source"]), VOCABULARY)
    return parameter_count(model), parameter_count(model.blocks[0])


def table() -> str:
    rows = []
    for variant in variants():
        head = header(variant)
        counts = [f"{count:,}" for count in parameters(variant)]
        rows.append([f"`{variant}`", head["label"], head["equation"], *counts, head["source"]])
    heads = ["`attn=`", "", "equation", "parameters", "of them the block", "source"]
    align = ["left", "left", "left", "right", "right", "left"]
    return tabulate(rows, heads, "github", colalign=align, disable_numparse=True)


def write(results: Path) -> None:
    """Write variants.md."""
    write_bytes(results / "variants.md", f"{table()}\n".encode())
