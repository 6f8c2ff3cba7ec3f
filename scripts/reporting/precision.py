"""What bf16 changes: precision.md, from its record alone."""

import math
import statistics
from pathlib import Path

from tabulate import tabulate

from data.files import write_bytes
from scripts.reporting.records import commit, json_record, label
from scripts.reporting.rule import Comparison, intervals, judge

LOSS, COSINE = 3e-4, 0.99997  # the largest difference of losses, and the lowest cosine, that are wanted


def write(results: Path) -> None:
    """Write the page. Raises NotThere if there is no record."""
    record = json_record(results / "precision.json", "python -m scripts.reproduce study=precision")
    write_bytes(results / "precision.md", page(record).encode())


def page(record: dict) -> str:
    """results/precision.md, from the record."""
    scales = record["scales"]
    rows = [
        [label(variant), *(cell for scale in scales for cell in figures(cells[str(scale)]))]
        for variant, cells in record["variants"].items()
    ]
    heads = ["", *(f"{head}, x{scale:g}" for scale in scales for head in ("loss", "bf16 adds", "cosine"))]
    cells = [cell for found in record["variants"].values() for cell in found.values()]
    far = [cell for cell in cells if abs(cell["difference"]) > LOSS or round(cell["cosine"], 5) < COSINE]
    came = record["provenance"]
    return "\n".join(
        [
            "# bf16 beside float32",
            "",
            "Loss and gradient of the source's model at its start: in nats per character, and as the cosine between "
            "the gradients of all parameters. x6: the weights that make Q, K and Z are six times as large.",
            "",
            tabulate(rows, heads, "github", colalign=["left", *["right"] * (len(heads) - 1)], disable_numparse=True),
            "",
            f"- {len(cells) - len(far)} of {len(cells)} losses agree to {LOSS:g} with a cosine of {COSINE} or more.",
            f"- {record['characters']:,} characters of {record['data']}, seed {record['seed']}; {came['device']}, "
            f"torch {came['versions']['torch']}; commit {commit(came)}; `{came['command']}`.",
            "",
            *training(record["trained"], record["changed"]),
        ]
    )


def figures(cell: dict) -> list[str]:
    return [f"{cell['loss']:.4f}", f"{cell['difference']:+.0e}", f"{cell['cosine']:.6f}"]


def training(trained: dict[str, dict], changed: str) -> list[str]:
    """Whether training ends at the same place, by the rule."""
    if not trained:
        return []
    comparisons = []
    for group in trained.values():
        d = [b - a for a, b in zip(group["bf16"], group["float32"], strict=True)]
        comparisons.append(Comparison("<", statistics.mean(d), statistics.stdev(d), len(d)))
    rows = [
        [
            label(variant),
            str(comparison.n),
            *(f"{statistics.mean(map(math.exp, group[p])):.2f}" for p in ("float32", "bf16")),
            f"{100 * comparison.mean:+.2f}% ({100 * interval.low:+.2f} to {100 * interval.high:+.2f})",
            judge(comparison, interval),
        ]
        for (variant, group), comparison, interval in zip(
            trained.items(), comparisons, intervals(comparisons), strict=True
        )
    ]
    first = next(iter(trained.values()))
    heads = ["fit perplexity", "pairs", "float32", "bf16", "float32 above bf16", "verdict"]
    return [
        "Trained to the end of experiment=small:",
        "",
        tabulate(rows, heads, "github", colalign=["left", *["right"] * 4, "left"], disable_numparse=True),
        "",
        f"- Pairs of one seed, from 0 on; intervals by scripts/reporting/rule.py; commit {first['commit']}, "
        f"{first['bf16_device']}.",
        f"- {changed}.",
        "",
    ]
