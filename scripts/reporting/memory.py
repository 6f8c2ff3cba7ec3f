"""Memory and time of a step of the large model: large.md, from its record alone."""

import statistics
from pathlib import Path

from tabulate import tabulate

from data.files import write_bytes
from scripts.reporting.benchmark_pages import origin
from scripts.reporting.records import json_record, label

KINDS = ("plain", "checkpointed")
GPU = 80  # GiB of the GPU that the table counts sequences for


def write(results: Path) -> None:
    """Write the page. Raises NotThere if there is no record."""
    record = json_record(results / "large.json", "python -m scripts.benchmark measure=memory")
    write_bytes(results / "large.md", table(record).encode())


def figures(measured: dict | None) -> str:
    """Seconds of a step and peak memory, as they are printed."""
    if measured is None or "skipped" in measured:
        return "–"
    return f"{statistics.median(measured['seconds']):.2f} s, {measured['peak_bytes'] / 2**30:.2f} GiB"


def rates(record: dict) -> str:
    """Between which rates the machine's limit was while all this was measured: seconds compare no better."""
    found = [
        cell[kind]["machine_rate"] / 1e9
        for size in record["sizes"].values()
        for cell in size.values()
        for kind in KINDS
        if "machine_rate" in cell.get(kind, {})
    ]
    return f"{min(found):,.0f} to {max(found):,.0f} GFLOP/s" if found else "an unknown rate"


def table(record: dict) -> str:
    """The large model, variant by variant; and by size what was measured."""
    sizes = record["sizes"]
    last = list(sizes)[-1]
    layers, heads, dim, context = last.split("x")
    rows = []
    for variant, cell in sizes[last].items():
        state, sequence = cell["state_bytes"], cell["bf16_sequence_bytes"]
        fits = [f"{max(0, GPU * 2**30 - state) // sequence[kind]:,}" for kind in KINDS]
        kept = [f"{sequence[kind] / 2**20:,.0f}" for kind in KINDS]
        paper = [f"{(state + cell['kept_bytes'][kind]) / 2**30:.2f}" for kind in KINDS]
        rows.append([label(variant), f"{cell['parameters']:,}", f"{state / 2**30:.2f}", *kept, *fits])
        rows[-1] += [f"{p}; {figures(cell.get(kind))}" for p, kind in zip(paper, KINDS, strict=True)]
    heads_of = ["", "parameters", "state, GiB", "MiB a sequence", "checkpointed", f"sequences in {GPU} GiB"]
    heads_of += ["checkpointed", "a step: on paper; measured", "checkpointed"]
    growth = [
        [label(v), *(figures(cells.get(v, {}).get(kind)) for cells in sizes.values() for kind in KINDS)]
        for v in sizes[last]
    ]
    growth_heads = [
        "",
        *(f"{size.replace('x', ' x ')}{', c.' * (kind != 'plain')}" for size in sizes for kind in KINDS),
    ]
    steps = f"{record['batch']} x {context}" if record["batch"] > 1 else context
    return "\n".join(
        [
            f"The large model: {layers} layers, {heads} heads, {dim} dim, context {context}.",
            "",
            tabulate(rows, heads_of, "github", colalign=["left"] + ["right"] * 8, disable_numparse=True),
            "",
            "- State: weights, gradients, AdaBelief's two moments, 4 bytes each, whatever the batch; FSDP divides it "
            "by the processes. MiB a sequence: what the forward pass keeps for the backward pass in bf16, counted on "
            "two layers on a CPU; a GPU, whose autocast leaves more in float32, may keep more.",
            f"- A step: {steps} characters, state and kept activations on paper, GiB; measured seconds and peak "
            "memory, which holds what the backward pass needs for a moment too. –: not measured. After each, the "
            f"machine's large matrix product ran at {rates(record)}.",
            "",
            "By layers x heads x dim x context, seconds a step and peak memory; c.: checkpointed:",
            "",
            tabulate(
                growth, growth_heads, "github", colalign=["left"] + ["right"] * (2 * len(sizes)), disable_numparse=True
            ),
            "",
            f"- {origin(record)}",
            "",
        ]
    )
