"""Write search.md, every rung of the search over R, W and V, from the records of its runs."""

from pathlib import Path

from omegaconf import DictConfig

from configs.cli import compose
from data.files import write_bytes
from scripts.reporting import markdown
from scripts.reporting.records import MissingRecord, finished
from training.packed import find, packed_folders
from training.runs import local_folders


def write(cfg: DictConfig, results: Path) -> None:
    """Write the page. `cfg` is configs/search.yaml. Raises MissingRecord if no run of the first rung is finished."""
    if not rung(results / "runs", 0, cfg):
        raise MissingRecord(f"{results}/runs/search has no finished run: python -m scripts.search makes them")
    write_bytes(results / "search.md", page(results / "runs", cfg).encode())


def steps_of(number: int, cfg: DictConfig) -> int:
    return compose(["experiment=search"]).train.steps * cfg.longer**number


def rung(runs: Path, number: int, cfg: DictConfig) -> list[dict]:
    """Return the summaries of a rung's finished runs, the best first."""
    steps = steps_of(number, cfg)
    folders = sorted(local_folders(runs / "search") | packed_folders(runs / "search"))
    summaries = [summary for summary in map(finished, map(find, folders)) if summary and summary["steps"] == steps]
    return sorted(summaries, key=lambda summary: summary["evaluation"]["fit"]["loss"])


def page(runs: Path, cfg: DictConfig) -> str:
    """Return the page: a table for each rung."""
    parts = ["# The search over R, W and V"]
    for number in range(cfg.rungs):
        summaries = rung(runs, number, cfg)
        rows = []
        for summary in summaries:
            perplexities = [f"{summary['evaluation'][text]['perplexity']:.2f}" for text in ("fit", "heldout")]
            rows.append([form(summary), *perplexities, f"{summary['parameters']:,}"])
        table = markdown.table(rows, ["form", "fit perplexity", "held-out", "parameters"])
        parts += [f"## {steps_of(number, cfg)} steps: {len(summaries)} forms", table]
    tried = rung(runs, 0, cfg)
    first = tried[0]
    return markdown.page(
        *parts,
        f"One seed each; corpus {first['data']['name']}, {markdown.vocabulary(first)}; {markdown.trained_on(tried)}; "
        "`python -m scripts.search`. The best form is a candidate, not a result: one seed, at one learning rate.",
    )


def form(summary: dict) -> str:
    """Return what sets a form apart from the defaults of attn=rwv, which are AFT."""
    differences = summary["name"].removeprefix("rwv").removesuffix(f"-seed{summary['seed']}").split("-")
    return ", ".join(part for part in differences if part and not part.startswith("steps=")) or "AFT"
