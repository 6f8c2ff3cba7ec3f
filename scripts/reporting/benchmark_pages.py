"""Write the tables and plots of scripts.benchmark measure=attentions from its records."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from omegaconf import DictConfig

from configs.cli import compose
from data.files import UserError, write_bytes
from scripts.reporting import markdown
from scripts.reporting.colours import colours_of_rows
from scripts.reporting.figures import NO_FIGURE, paired_ratio
from scripts.reporting.plots import by_length_axes, name_lines, save
from scripts.reporting.records import MissingRecord, json_record, label, not_measured

COMMAND = "python -m scripts.benchmark"
KERNEL = " attn.impl=triton"  # how the names of layers with Triton kernels end
LIMIT = "matrix product"  # what records call the large matrix products whose speed stands for the machine's limit
# For each layer that is not ours, the attention of ours that is like it. These layers are public implementations, and a
# plain one that stores its scores. scripts/benchmarking/peers.py says how they differ from ours.
COUNTERPARTS = {
    "torch SDPA": "mha",
    "softmax, scores stored": "mha",
    "x-transformers": "mha",
    "FlexAttention": "mha",
    "FlexAttention, time-weighted": "mha_tw",
    "x-transformers, talking heads": "talking_heads",
    "aft-pytorch, full": "aft_full",
    "aft-pytorch, simple (not causal)": "aft_simple",
    "g-mlp-pytorch": "gmlp",
    "FLASH-pytorch, GAU": "gau",
    "FLASH-pytorch, FLASH": "flash_mixed_chunk",
    "fla-core, linear attention": "linear_attention",
    "fla-core, RetNet": "retnet",
    "fla-core, simple GLA": "mamba2",
    "fla-core, GLA": "gla",
    "fla-core, FoX": "fox",
    "fla-core, DeltaNet": "deltanet",
    "fla-core, Gated DeltaNet": "gated_deltanet",
    "fla-core, RWKV-7": "rwkv7",
}
# The lines of the plot.
ROWS = ("mha", "mha_plus", "gmlp", "aft", "gau", "flash_mixed_chunk", "torch SDPA", "rwkv4", "linear_attention", "gla")
ROWS += ("gated_deltanet", "rwkv7")


def write(results: Path) -> None:
    """Write a page for each device (cpu or gpu) and precision that has both steps.json and layers.json.

    Raises MissingRecord if there is none, or if a record is empty, and UserError if the record of steps lacks the
    matrix product before MHA+ or before another step.
    """
    if not (folders := complete(results)):
        raise MissingRecord(f"{results}/benchmark holds no records: {COMMAND} writes them")
    for folder in folders:
        steps = read(folder / "steps.json", "seconds")
        works = steps.get("floating_point_operations", {})
        needed = {limit_before(name) for name in works.keys() - {LIMIT} | {"mha_plus"}}
        if LIMIT not in works or not needed <= steps["seconds"].keys():
            raise UserError(
                f"{folder}/steps.json lacks mha_plus, or a matrix product before a step: {COMMAND} measures them"
            )
        layers = read(folder / "layers.json", "lengths")
        write_bytes(folder / "steps.md", page(steps, layers, compose([], "compare").source).encode())
        save(draw_layers(layers, ROWS, works[LIMIT]), folder, "layers", dpi=110)
        print(f"written to {folder}: steps.md, layers.png, layers.svg")


def complete(results: Path) -> list[Path]:
    """Return the folders that have both records. In others, no layer has been measured yet."""
    begun = sorted(path.parent for path in (results / "benchmark").glob("*/*/steps.json"))
    return [folder for folder in begun if (folder / "layers.json").exists()]


def read(path: Path, key: str) -> dict:
    """Return a record. Raises MissingRecord if it does not exist, or holds nothing under `key`."""
    record = json_record(path, COMMAND)
    if not record.get(key):
        raise MissingRecord(f"{path} holds no {key}: {COMMAND} measures them")
    return record


def limit_before(variant: str) -> str:
    """Return the name of the matrix product that is timed right before the step of a variant."""
    return f"{LIMIT} before {variant}"


def over_floor(seconds: list[float], matmuls: list[float], work: float, matmul_work: float) -> float:
    """Return the median over rounds of the time of a step divided by its floor.

    The floor is the time that `work` operations take at the speed of the matrix products before the step. `seconds` and
    `matmuls` are the times of the step and of these products in each round, and `matmul_work` is the number of
    operations of the products.
    """
    return statistics.median(s / (m * work / matmul_work) for s, m in zip(seconds, matmuls, strict=True))


def page(steps: dict, layers: dict, source: DictConfig) -> str:
    """Return the page of a device and a precision: training steps, layers by length, and layers beside others."""
    public = any(peer in cells for cells in layers["lengths"].values() for peer in COUNTERPARTS)
    heading = f"## Layers {'beside those of other implementations' if public else 'with and without Triton kernels'}"
    by_length = f"## Layers by length\n\n{layers_table(layers)}"
    return f"# Training steps\n\n{steps_table(steps, source)}\n{by_length}\n{heading}\n\n{peers_table(layers)}"


def steps_table(record: dict, source: DictConfig) -> str:
    """Return the table of training steps: speed over MHA+'s here and in the source, time over AFT's and the floor."""
    seconds, work = record["seconds"], record["floating_point_operations"]
    median = {name: statistics.median(seconds[name]) for name in work if name != LIMIT}
    limits = [limit for name in median for limit in seconds[limit_before(name)]]
    rows, ratios = [], {name: paired_ratio(seconds["mha_plus"], seconds[name]) for name in median}
    for name in sorted(median, key=ratios.get, reverse=True):
        source_ratio = f"{source[name].speed / source.mha_plus.speed:.2f}" if name in source else NO_FIGURE
        floor = over_floor(seconds[name], seconds[limit_before(name)], work[name], work[LIMIT])
        digits = 2 if median[name] > 0.1 else 4
        speed = f"{record['tokens'] / median[name]:,.0f}"
        spread = f"{min(seconds[name]):.{digits}f} to {max(seconds[name]):.{digits}f}"
        step = f"{median[name]:.{digits}f}"
        over_aft = f"{paired_ratio(seconds[name], seconds['aft']):.2f}" if "aft" in median else NO_FIGURE
        rows.append([label(name), f"{ratios[name]:.2f}", source_ratio, over_aft, speed, step, spread, f"{floor:.2f}"])
    heads = [
        "",
        "speed over MHA+'s",
        "the source's speed over MHA+'s",
        "time over AFT's",
        "tokens/s",
        "seconds a step",
        "from, to",
        "times the floor",
    ]
    slowest, usual, fastest = (work[LIMIT] / f(limits) / 1e9 for f in (max, statistics.median, min))
    return markdown.page(
        markdown.table(rows, heads),
        markdown.notes(
            f"One training step (forward, backward, optimiser) of {record['tokens']:,} characters, attentions in turn, "
            f"medians of {len(seconds['mha_plus'])} rounds, {'compiled' if record['compiled'] else 'not compiled'}. "
            "Rows are sorted by speed over MHA+'s. This and the time over AFT's are medians of the ratios in each "
            "round. The aim is that no step takes more than 1.3 of AFT's time. The speed of the machine "
            "changes between rounds, so that tokens/s can have another order. `from, to` are the shortest and the "
            "longest time. If they are far apart, other load disturbed the rounds, and the ratio is "
            f"rough.{launches(record, 'step')}",
            "The floor is the time that the step's multiplications by weight matrices alone would take (6 operations "
            "per weight and character) at the speed of large matrix products, which are timed right before the step "
            f"(median {usual:,.0f} GFLOP/s, lowest {slowest:,.0f}, highest {fastest:,.0f}). Products between "
            "positions, such as Q·K, are not counted.",
            markdown.origin(record["provenance"]),
        ),
    )


def launches(record: dict, timed: str) -> str:
    """Return a sentence on how a GPU's steps were timed, or "" for a CPU. `timed` is "step" or "pass"."""
    if record["provenance"]["threads"] is not None:  # records of a GPU have no number of threads
        return ""
    if record.get("in_a_row", 1) > 1:
        return f" {record['in_a_row']} steps in a row are timed together."
    training = " In training, a GPU computes a step while the next one is being launched." if timed == "step" else ""
    return (
        f" Each {timed} is timed alone and begins on an idle GPU. The processor's time for launching it is therefore "
        f"counted in full.{training}"
    )


def pairs_of_layers(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of layers (ours, other).

    The first pairs are those of COUNTERPARTS; then follow the layers with a Triton kernel, each with the same layer
    without it.
    """
    yield from ((ours, peer) for peer, ours in COUNTERPARTS.items())
    yield from ((name, name.removesuffix(KERNEL)) for name in names if name.endswith(KERNEL))


def layers_table(record: dict) -> str:
    """Return the table of the time and peak memory of each attention's layer, by length."""
    by_length, rows, tokens = record["lengths"].values(), [], record["provenance"]["tokens"]
    names = dict.fromkeys(name for cells in by_length for name in cells if name not in (LIMIT, *COUNTERPARTS))
    for name in names:
        cells = [cells.get(name, {}) for cells in by_length]
        figures = (
            f"{statistics.median(c['seconds']) / tokens * 1e6:.3g}; {c['peak_bytes'] / 2**20:,.0f}"
            if "seconds" in c
            else NO_FIGURE
            for c in cells
        )
        rows.append([label(name), *figures])
    heads = ["microseconds a character; MiB", *(f"T = {int(T):,}" for T in record["lengths"])]
    note = (
        f"The forward and backward pass of a single layer on {tokens:,} characters, in sequences of T: the median time "
        "and the peak memory of tensors. Since the number of characters is the same, a layer whose time and memory are "
        "linear in T has the same figures at all lengths. Not compiled; a layer that was expected to take too long, or "
        "to need too much memory, has no figures at this length. Lengths that the command names and the table lacks "
        f"were not measured. {markdown.origin(record['provenance'])}"
    )
    return markdown.page(markdown.table(rows, heads), markdown.notes(note, not_measured(names)))


def peers_table(record: dict) -> str:
    """Return the table of the time and peak memory of our layers divided by those of other ones, by length.

    The others are those of COUNTERPARTS, and for our Triton kernels the same layers without these kernels.
    """
    rows, names = [], dict.fromkeys(name for cells in record["lengths"].values() for name in cells)
    for ours, peer in pairs_of_layers(names):
        ratios = []
        for cells in record["lengths"].values():
            if "seconds" in cells.get(ours, {}) and "seconds" in cells.get(peer, {}):
                times = [a / b for a, b in zip(cells[ours]["seconds"], cells[peer]["seconds"], strict=True)]
                memory = cells[ours]["peak_bytes"] / max(1, cells[peer]["peak_bytes"])
                ratios.append(f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f}); {memory:.2f}")
            else:
                ratios.append(NO_FIGURE)
        if set(ratios) != {NO_FIGURE}:
            rows.append([f"{label(ours)} / {peer if peer in COUNTERPARTS else label(peer)}", *ratios])
    heads = ["time (from, to); peak memory", *(f"T = {int(T):,}" for T in record["lengths"])]
    layers = [cell for cells in record["lengths"].values() for cell in cells.values()]
    rounds = max((len(layer["seconds"]) for layer in layers if "seconds" in layer), default=0)
    why = {name: cell.get("skipped", "") for cells in record["lengths"].values() for name, cell in cells.items()}
    failed = [f"{name} {reason}." for name, reason in why.items() if reason.startswith("fails")]
    in_bf16 = record["provenance"]["precision"] == "bf16"
    float32 = "The layers of this repository compute in float32 what goes into an exponent, such as Q and K. "
    exponents = float32 if in_bf16 else ""
    flex = " (FlexAttention is compiled)" if any("FlexAttention" in row[0] for row in rows) else ""
    note = (
        "Each figure is that of the first layer of its row, divided by that of the second. Below 1, the first is "
        f"faster or needs less memory. Times are divided within each of the {rounds} rounds: the figure is the median "
        "of these ratios, with the lowest and highest in brackets. What is timed is the forward and backward pass of a "
        f"single layer, not compiled{flex}; each round times every layer once. Our layers have their default "
        "initialisation and no token shift. Memory is the peak memory of tensors. T is the number of positions. "
        f"{exponents}{markdown.origin(record['provenance'])}{launches(record, 'pass')}"
    )
    return markdown.page(markdown.table(rows, heads), markdown.notes(note, *failed))


def draw_layers(record: dict, rows: Sequence[str], limit_work: float) -> plt.Figure:
    """Plot time and peak memory of a layer by length; `limit_work` is the number of operations of LIMIT."""
    tokens = record["provenance"]["tokens"]
    figure, axes = plt.subplots(1, 2, figsize=(12, 6), layout="constrained")
    longest, colours, ends = max(map(int, record["lengths"])), {}, ({}, {})
    for axis, own_ends, key, unit in zip(axes, ends, ("seconds", "peak_bytes"), (1e-6 * tokens, 2.0**20), strict=True):
        for row, colour in zip(rows, colours_of_rows(rows), strict=True):
            points = {int(T): cells[row][key] for T, cells in record["lengths"].items() if key in cells.get(row, {})}
            if not points:
                continue
            values = [(statistics.median(v) if isinstance(v, list) else v) / unit for v in points.values()]
            name, style = (row, "o--") if row in COUNTERPARTS else (label(row), "o-")
            axis.plot(list(points), values, style, color=colour, markersize=3.5)
            own_ends[name], colours[name] = (max(points), values[-1]), colour
        by_length_axes(axis)
    products = {int(T): cells[LIMIT]["seconds"] for T, cells in record["lengths"].items()}
    dim = compose(["experiment=source"]).model.dim
    limit = [6 * 4 * dim**2 * statistics.median(s) / limit_work * 1e6 for s in products.values()]
    axes[0].plot(list(products), limit, ":", color="grey")
    axes[0].set_ylabel("forward and backward, microseconds a character")
    axes[1].set_ylabel(f"peak memory, MiB for {tokens:,} characters")
    lowest = [min(((y, name) for name, (x, y) in own.items() if x == longest), default=(0, "none"))[1] for own in ends]
    found = f"Of the layers shown at {longest:,} characters, {lowest[0]} is the fastest, and {lowest[1]} needs the "
    found += "least memory"
    figure.suptitle(f"{found}\n(one layer, {dim} dim, {tokens:,} characters a batch, {record['provenance']['device']})")
    figure.supxlabel("a line ends at the longest length that was measured", fontsize=9)
    limit_name = "limit: four\ndim x dim products"
    ends[0][limit_name], colours[limit_name] = (max(products), limit[-1]), "grey"
    for axis, points in zip(axes, ends, strict=True):
        name_lines(axis, points, colours)
    return figure
