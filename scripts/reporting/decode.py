"""Characters per second of streaming against recomputing: decode.md, from its record alone."""

import statistics
from pathlib import Path

from tabulate import tabulate

from data.files import write_bytes
from scripts.reporting.records import commit, json_record, label


def write(results: Path) -> None:
    """Write the page. Raises NotThere if there is no record."""
    record = json_record(results / "decode.json", "python -m scripts.benchmark measure=decode")
    write_bytes(results / "decode.md", table(record).encode())


def table(record: dict) -> str:
    """Characters/s of streaming, and how many times those of recomputing they are, by context."""
    contexts = record["contexts"]
    rows = []
    for variant in next(iter(contexts.values())):
        row = [label(variant)]
        for cells in contexts.values():
            median = {kind: statistics.median(seconds) for kind, seconds in cells[variant].items()}
            row += [f"{1 / median['streaming']:,.0f}", f"{median['recomputing'] / median['streaming']:,.1f}"]
        rows.append(row)
    heads = ["characters/s", *(head for context in contexts for head in (f"context {int(context):,}", "× recomputing"))]
    came = record["provenance"]
    threads = f", {came['threads']} threads" if came["threads"] else ""
    return "\n".join(
        [
            tabulate(rows, heads, "github", colalign=["left"] + ["right"] * (len(heads) - 1), disable_numparse=True),
            "",
            f"- One text, {record['dim']} dim, vocabulary {record['vocabulary']:,}: the steps at the end of a context, "
            "against the forward pass over the whole of it, head and all. Variants in turn; medians.",
            f"- {came['device']}{threads}, {record['precision']}, torch {came['versions']['torch']}; "
            f"commit {commit(came)}; `{came['command']}`.",
            "",
        ]
    )
