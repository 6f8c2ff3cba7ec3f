"""Make the page decode.md, the speed of streaming and of recomputing, from its record."""

import statistics

from scripts.reporting import markdown
from scripts.reporting.records import label, not_measured


def page(record: dict) -> str:
    """Return the page: characters/s of streaming, and its speed divided by that of recomputing, by context."""
    contexts = record["contexts"]
    rows = []
    for variant in next(iter(contexts.values())):
        row = [label(variant)]
        for cells in contexts.values():
            median = {kind: statistics.median(seconds) for kind, seconds in cells[variant].items()}
            row += [f"{1 / median['streaming']:,.0f}", f"{median['recomputing'] / median['streaming']:,.1f}"]
        rows.append(row)
    heads = ["characters/s", *(head for T in contexts for head in (f"context {int(T):,}", "× recomputing"))]
    timed = [cell for cells in contexts.values() for cell in cells.values()]
    streaming, recomputing = (max(max(c[k]) / min(c[k]) for c in timed) for k in ("streaming", "recomputing"))
    setting = (
        "Characters/s of streaming, and this speed divided by that of recomputing, for one text, "
        f"{record['dim']} dim, vocabulary {record['vocabulary']:,}. Streaming computes the last characters of a "
        "context one by one (on a CPU, with one thread); recomputing runs the forward pass over the whole context for "
        "each character (on a CPU, with all threads). The attentions are timed in turn; figures are medians of "
        f"{len(timed[0]['streaming'])} rounds. The slowest round took up to {streaming:.1f} times as long as the "
        f"fastest in streaming, and up to {recomputing:.1f} times in recomputing: small differences mean nothing."
    )
    origin = markdown.origin(record["provenance"] | {"precision": record["precision"]})
    return markdown.page(
        "# The speed of streaming, beside that of recomputing",
        markdown.table(rows, heads),
        markdown.notes(setting, origin, not_measured(next(iter(contexts.values())))),
    )
