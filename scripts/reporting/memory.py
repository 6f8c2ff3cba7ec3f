"""Make the page large.md, the memory and time of a step of the large model, from its record."""

import statistics

from scripts.reporting import markdown
from scripts.reporting.figures import NO_FIGURE
from scripts.reporting.records import MissingRecord, label, not_measured

KINDS = ("plain", "checkpointed")
GPU = 80  # GiB of the GPU for which the page counts sequences


def figures(step: dict | None) -> str:
    """Return the median seconds and the peak memory of a measured step; a dash if it was not measured."""
    if step is None or "skipped" in step:
        return NO_FIGURE
    return f"{statistics.median(step['seconds']):.2f} s, {step['peak_bytes'] / 2**30:.2f} GiB"


def machine_rates(record: dict) -> str:
    """Return the range of the rates of the large matrix product that ran after each measurement."""
    steps = [cell.get(kind, {}) for size in record["sizes"].values() for cell in size.values() for kind in KINDS]
    rates = [step["machine_rate"] / 1e9 for step in steps if "machine_rate" in step]
    return f"{min(rates):,.0f} to {max(rates):,.0f} GFLOP/s" if rates else "an unknown rate"


def page(record: dict) -> str:
    """Return the page: a table of the large model by attention, and one of the measured steps by size.

    Raises MissingRecord if the large model, the only one with figures for bf16, lacks an attention of the record.
    """
    sizes = record["sizes"]
    *_, largest = sorted(sizes, key=lambda size: any("bf16_sequence_bytes" in cell for cell in sizes[size].values()))
    if not all("bf16_sequence_bytes" in sizes[largest].get(v, {}) for cells in sizes.values() for v in cells):
        raise MissingRecord(f"the record lacks the largest model: `{record['provenance']['command']}` completes it")
    layers, heads, dim, context = largest.split("x")
    rows = []
    for variant, cell in sizes[largest].items():
        state, sequence = cell["state_bytes"], cell["bf16_sequence_bytes"]
        row = [label(variant), f"{cell['parameters']:,}", f"{state / 2**30:.2f}"]
        row += [f"{sequence[kind] / 2**20:,.0f}" for kind in KINDS]
        row += [f"{max(0, GPU * 2**30 - state) // sequence[kind]:,}" for kind in KINDS]
        row += [f"{(state + cell['kept_bytes'][kind]) / 2**30:.2f}; {figures(cell.get(kind))}" for kind in KINDS]
        rows.append(row)
    columns = ["", "parameters", "state, GiB", "MiB a sequence", "the same, checkpointed"]
    columns += [f"sequences in {GPU} GiB", "the same, checkpointed"]
    columns += ["a step: computed; measured", "the same, checkpointed"]
    by_size = [
        [label(v), *(figures(cells.get(v, {}).get(kind)) for cells in sizes.values() for kind in KINDS)]
        for v in sizes[largest]
    ]
    size_columns = [f"{size.replace('x', ' x ')}{', c.' * (kind != 'plain')}" for size in sizes for kind in KINDS]
    step = f"{record['batch']} x {context}" if record["batch"] > 1 else context
    unmeasured = "–: not measured. " if any(NO_FIGURE in cell for row in [*rows, *by_size] for cell in row) else ""
    return markdown.page(
        f"The large model: {layers} layers, {heads} heads, {dim} dim, context {context}, a vocabulary of "
        f"{record['vocabulary']:,}. Checkpointed: the backward pass computes each block again.",
        markdown.table(rows, columns),
        markdown.notes(
            "State: weights, gradients and AdaBelief's two moments, 4 bytes each, for any batch; FSDP divides it by "
            "the number of processes. MiB a sequence: what the forward pass keeps for the backward pass of a sequence "
            "in bf16, extrapolated from two layers on a CPU; checkpointed, also what one block keeps while the "
            "backward pass computes it again. Each figure includes the copies of the weights in bf16. Further "
            "sequences share these copies, so that many more sequences fit than the columns for 80 GiB say. A GPU may "
            "keep more, as its autocast leaves more in float32.",
            f"A step: {step} characters. Computed: the state and what the forward pass keeps, in GiB, in the precision "
            "of the measured step. Measured: seconds and peak memory. The peak includes what the backward pass needs "
            "temporarily. It can still be below the computed memory, because gradients are allocated while activations "
            f"are freed. {unmeasured}The seconds of two rows cannot be compared, because a large step was timed only "
            "once, and the speed of the machine may change between measurements: a large matrix product, timed after "
            f"each of them, ran at {machine_rates(record)}.",
        ),
        "Seconds and peak memory of a step for each size, layers x heads x dim x context; c.: checkpointed:",
        markdown.table(by_size, ["", *size_columns]),
        markdown.notes(markdown.origin(record["provenance"]), not_measured(sizes[largest])),
    )
