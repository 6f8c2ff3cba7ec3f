"""Make a table of every attention: its equation, its paper or article, and its parameters with experiment=source."""

import re
import shlex
from collections.abc import Iterable

import torch

from configs.cli import compose
from configs.folder import CONFIGS
from data.files import UserError
from models.build import instantiate_model
from models.lm import parameter_count
from scripts.reporting.markdown import table

VOCABULARY = 5744  # size of the source's vocabulary


def header(variant: str) -> dict[str, str]:
    """Return the comments at the top of a variant's yaml, {name: text}, always with label, equation and source."""
    path = CONFIGS / f"attn/{variant}.yaml"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    comments = re.findall(r"^# (label|equation|source|R|W|V|after): (.+)$", text, re.MULTILINE)
    return {"label": variant, "equation": "", "source": ""} | dict(comments)


def variants() -> list[str]:
    return sorted(path.stem for path in (CONFIGS / "attn").glob("*.yaml"))


def check_variants(names: Iterable[str]) -> None:
    """Raise UserError for the first name that is not that of an attention."""
    known = variants()
    for name in names:
        if name not in known:
            raise UserError(f"there is no attn={name}; there are {', '.join(known)}")


def parameters(row: str) -> tuple[int, int]:
    """Return how many parameters a row like "aft attn.gamma=false" has in experiment=source, and how many its block."""
    with torch.device("meta"):
        model = instantiate_model(compose([*shlex.split(f"attn={row}"), "experiment=source"]), VOCABULARY)
    return parameter_count(model), parameter_count(model.blocks[0])


def equations() -> str:
    """Return the table, which attn/README.md includes."""
    rows = []
    for variant in variants():
        head = header(variant)
        counts = [f"{count:,}" for count in parameters(variant)]
        rows.append([f"`{variant}`", head["label"], head["equation"], *counts, head["source"]])
    heads = ["`attn=`", "", "equation", "parameters", "parameters of the block", "source"]
    return f"{table(rows, heads, left=(0, 1, 2, 5))}\n"
