"""Every rung of the search over R, W and V: search.md, from the records alone."""

from pathlib import Path

from omegaconf import DictConfig
from tabulate import tabulate

from configs.cli import compose
from data.files import write_bytes
from scripts.reporting.records import NotThere, commit, finished
from training.packed import find, packed_folders
from training.runs import local_folders


def write(cfg: DictConfig, results: Path) -> None:
    """Write the page. `cfg` is configs/search.yaml. Raises NotThere if no run of the first rung is there."""
    if not rung(results / "runs", 0, cfg):
        raise NotThere(f"{results}/runs/search has no finished run: python -m scripts.search makes them")
    write_bytes(results / "search.md", page(results / "runs", cfg).encode())


def steps_of(number: int, cfg: DictConfig) -> int:
    return compose(["experiment=search"]).train.steps * cfg.longer**number


def rung(runs: Path, number: int, cfg: DictConfig) -> list[dict]:
    """The finished runs of a rung, the best first."""
    steps = steps_of(number, cfg)
    folders = sorted(local_folders(runs / "search") | packed_folders(runs / "search"))
    found = [summary for summary in map(finished, map(find, folders)) if summary and summary["steps"] == steps]
    return sorted(found, key=lambda summary: summary["evaluation"]["fit"]["loss"])


def page(runs: Path, cfg: DictConfig) -> str:
    """Every rung as a table, the best first."""
    parts = ["# The search over R, W and V", ""]
    for number in range(cfg.rungs):
        found = rung(runs, number, cfg)
        rows = [
            [
                form(summary),
                *(f"{summary['evaluation'][text]['perplexity']:.2f}" for text in ("fit", "heldout")),
                f"{summary['parameters']:,}",
            ]
            for summary in found
        ]
        heads = ["form", "fit perplexity", "held-out", "parameters"]
        table = tabulate(rows, heads, "github", colalign=["left", *["right"] * 3], disable_numparse=True)
        parts += [f"## {steps_of(number, cfg)} steps: {len(found)} forms", "", table, ""]
    first = rung(runs, 0, cfg)[0]
    parts += [
        f"One seed each; corpus {first['data']['name']}, vocabulary {first['data']['vocabulary']:,}, sha256 "
        f"{first['data']['sha256'][:12]}; {first['device']}; commit {commit(first)}; `python -m scripts.search`. "
        "A form that led here is a candidate, not a result: claim best_form compares the first few with AFT.",
        "",
    ]
    return "\n".join(parts)


def form(summary: dict) -> str:
    """What sets a form apart from the named AFT, which is attn=rwv as it stands."""
    differences = summary["name"].removeprefix("rwv").removesuffix(f"-seed{summary['seed']}").split("-")
    return ", ".join(part for part in differences if part and not part.startswith("steps=")) or "AFT"
