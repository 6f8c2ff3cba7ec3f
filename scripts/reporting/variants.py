"""Make a table of every attention: its equation, its paper or article, and its parameters with experiment=source."""

import re
from collections.abc import Iterable

import torch
from omegaconf import DictConfig

from configs.cli import compose
from configs.folder import CONFIGS
from configs.messages import nearest
from data.files import UserError
from models.build import instantiate_model
from models.lm import parameter_count
from scripts.reporting.markdown import table

VOCABULARY = 5744  # that of source article A, and data.vocab_size in experiment=source


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
            raise UserError(f"there is no attn={name}{nearest(name, known)}; there are {', '.join(known)}")


def parameters(cfg: DictConfig) -> tuple[int, int]:
    """Return how many parameters a model has with the source's vocabulary, and how many its first block has."""
    with torch.device("meta"):
        model = instantiate_model(cfg, VOCABULARY)
    return parameter_count(model), parameter_count(model.blocks[0])


def same_in_one_block(shown: Iterable[str]) -> str:
    """Return a note for pages that show both forms of RealFormer with one block; "" if they do not."""
    if not {"realformer", "realformer_qk"} <= {*shown}:
        return ""
    return (
        "RealFormer and its QK form differ from the second block on. With one block they are the same model, MHA whose "
        "norms come after the residual sums, and their figures differ by rounding alone. Counts of attentions on this "
        "page include both."
    )


def equations() -> str:
    """Return the table, which attn/README.md includes."""
    rows = []
    for variant in variants():
        head = header(variant)
        counts = [f"{count:,}" for count in parameters(compose([f"attn={variant}", "experiment=source"]))]
        rows.append([f"`{variant}`", head["label"], head["equation"], *counts, head["source"]])
    heads = ["`attn=`", "", "equation", "parameters", "parameters of the block", "source"]
    return f"{table(rows, heads, left=(0, 1, 2, 5))}\n"
