"""python scripts/list_variants.py: every attention with its equation, its parameters and its source.

Reads the three comment lines at the head of each configs/attn/*.yaml, counts parameters of the
model at the source's size, and writes results/variants.md, the README's table.
"""

import argparse
import re
import shlex
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import configs.startup

import torch
from tabulate import tabulate

from configs.cli import compose
from configs.folder import CONFIGS
from configs.process import print_without_fail
from data.files import write_bytes
from models.build import instantiate_model
from models.lm import parameter_count

VOCABULARY = 5744  # the source's
OUT = Path(__file__).parents[1] / "results/variants.md"


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


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help, and nothing else
    print_without_fail()
    text = table()
    write_bytes(OUT, f"{text}\n".encode())
    print(text)
