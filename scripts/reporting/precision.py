"""Write precision.md, which compares bf16 with float32, from its record."""

import math
import statistics

from scripts.reporting import markdown
from scripts.reporting.records import label, not_measured
from scripts.reporting.rule import compared, intervals, judge

# The largest difference of losses, and the lowest cosine, rounded to five decimals, that count as agreement.
LOSS, COSINE = 3e-4, 0.99997


def page(record: dict) -> str:
    """Return the page: each attention's loss and gradient in both precisions, and trained models if there are any."""
    scales, trained = record["scales"], record["trained"]
    rows = [
        [label(variant), *(figure for scale in scales for figure in figures(cells[str(scale)]))]
        for variant, cells in record["variants"].items()
    ]
    heads = ["", *(f"{head}, x{scale:g}" for scale in scales for head in ("loss", "bf16 - float32", "cosine"))]
    cells = {f"{label(v)} at x{s}": cell for v, by_scale in record["variants"].items() for s, cell in by_scale.items()}
    far = [name for name, cell in cells.items() if abs(cell["difference"]) > LOSS or round(cell["cosine"], 5) < COSINE]
    exceptions = f" Not so: {'; '.join(far)}." if far else ""
    sentences = [
        f"In {len(cells) - len(far)} of {len(cells)} comparisons (each attention at "
        f"{' and at '.join(f'x{scale:g}' for scale in scales)}) the losses differ by at most {LOSS:g} and the cosine "
        f"is at least {COSINE} when rounded to five decimals.{exceptions}",
        f"{record['characters']:,} characters of {record['data']}, seed {record['seed']}.",
        markdown.origin(record["provenance"]),
        not_measured(record["variants"]),
    ]
    return markdown.page(
        "# bf16 beside float32",
        "Before training, for a model of the source's size (experiment=novel from the plain start, starts=none): the "
        "loss in float32, in nats per character; what bf16 adds to it; and the cosine between the gradients of all "
        "parameters in the two precisions. In the columns xN the initial weights of Q and K, or of Z, from which GAU "
        "and FLASH make Q and K, are multiplied by N.",
        markdown.table(rows, heads),
        markdown.notes(*sentences),
        *(training(trained, record["changed"]) if trained else []),
    )


def figures(cell: dict) -> list[str]:
    return [f"{cell['loss']:.4f}", f"{cell['difference']:+.0e}", f"{cell['cosine']:.6f}"]


def training(trained: dict[str, dict], changed: str) -> list[str]:
    """Return the paragraphs that compare trained models by the rule; `changed` is a note on the number of pairs."""
    comparisons = [
        compared([b - a for a, b in zip(group["bf16"], group["float32"], strict=True)]) for group in trained.values()
    ]
    rows = []
    judged = zip(trained.items(), comparisons, intervals(comparisons), strict=True)
    for (variant, group), comparison, interval in judged:
        perplexities = [f"{statistics.mean(map(math.exp, group[p])):.2f}" for p in ("float32", "bf16")]
        gap = f"{100 * comparison.mean:+.2f}% ({100 * interval.low:+.2f} to {100 * interval.high:+.2f})"
        rows.append([label(variant), str(comparison.n), *perplexities, gap, judge(comparison, interval)])
    heads = ["", "pairs", "fit perplexity, float32", "bf16", "float32 above bf16", "verdict"]
    first = next(iter(trained.values()))
    origin = (
        "The two runs of a pair share a seed; seeds count from 0. Intervals are those of scripts/reporting/rule.py. "
        f"{label(next(iter(trained)))} in bf16 with seed 0 was trained at commit {first['commit']} on "
        f"{first['bf16_device']}; the runs' records name the origin of the others."
    )
    return [
        "After a whole run of experiment=small from the plain start (starts=none):",
        markdown.table(rows, heads, left=(0, -1)),
        markdown.notes(origin, f"{changed}. Pairs that are added after a look at a verdict make errors likelier."),
    ]
