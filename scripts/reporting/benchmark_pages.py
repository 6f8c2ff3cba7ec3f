"""Tables and plots of a benchmark, from its records alone."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from omegaconf import DictConfig
from tabulate import tabulate

from configs.cli import compose
from data.files import UserError, write_bytes
from scripts.reporting.plots import by_length_axes, colours, save
from scripts.reporting.records import NotThere, commit, json_record, label

COMMAND = "python -m scripts.benchmark"
LIMIT = "matrix product"  # the name of the machine's limit among what is measured
# Each peer, and which variant of ours does the same.
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
}
ROWS = ("mha", "mha_plus", "gmlp", "aft", "gau", "flash_mixed_chunk", "torch SDPA")  # the lines of the plot


def write(results: Path) -> None:
    """Write the pages of every tier and precision. Raises NotThere if there is no record."""
    folders = sorted(path.parent for path in (results / "benchmark").glob("*/*/steps.json"))
    if not folders:
        raise NotThere(f"{results}/benchmark holds no records: {COMMAND} writes them")
    for folder in folders:
        write_folder(folder)


def read(path: Path, key: str) -> dict:
    record = json_record(path, COMMAND)
    if not record.get(key):
        raise NotThere(f"{path} holds no {key}: {COMMAND} measures them")
    return record


def origin(record: dict) -> str:
    came = record["provenance"]
    threads = f", {came['threads']} threads" if came["threads"] else ""
    what = f"{came['device']}{threads}, {came['precision']}, torch {came['versions']['torch']}"
    return f"{what}; commit {commit(came)}; `{came['command']}`."


def limit_before(variant: str) -> str:
    """The name of the limit's measurement right before the step of `variant`, when the machine is as fast as then."""
    return f"{LIMIT} before {variant}"


def over_floor(seconds: list[float], matmuls: list[float], work: float, matmul_work: float) -> float:
    """The median of seconds over what `work` takes at the rate of the product measured in the same round."""
    return statistics.median(s / (m * work / matmul_work) for s, m in zip(seconds, matmuls, strict=True))


def steps_table(record: dict, source: DictConfig) -> str:
    """Training speed of whole steps, its ratio to MHA+, the source's, and the time over the floor."""
    seconds, work = record["seconds"], record["floating_point_operations"]
    median = {name: statistics.median(seconds[name]) for name in work if name != LIMIT}
    limits = [limit for name in median for limit in seconds[limit_before(name)]]
    rows = []
    for name in sorted(median, key=median.get):
        theirs = f"{source[name].speed / source.mha_plus.speed:.2f}" if name in source else "–"
        floor = over_floor(seconds[name], seconds[limit_before(name)], work[name], work[LIMIT])
        ratio = median["mha_plus"] / median[name]
        spread = f"{min(seconds[name]):.2f} to {max(seconds[name]):.2f}"
        speed = f"{record['tokens'] / median[name]:,.0f}"
        rows.append([label(name), speed, f"{ratio:.2f}", theirs, f"{median[name]:.2f}", spread, f"{floor:.2f}"])
    heads = ["", "tokens/s", "ratio to MHA+", "source's", "seconds a step", "from, to", "times the floor"]
    table = tabulate(rows, heads, "github", colalign=["left"] + ["right"] * 6, disable_numparse=True)
    slowest, usual, fastest = (work[LIMIT] / f(limits) / 1e9 for f in (max, statistics.median, min))
    return "\n".join(
        [
            table,
            "",
            f"- One training step (forward, backward, optimiser) of {record['tokens']:,} characters, variants in turn, "
            f"medians of {len(seconds['mha_plus'])}, {'compiled' if record['compiled'] else 'not compiled'}.",
            "- The floor is what the step's products with weights (6 operations a weight and character) take at the "
            f"rate of a large matrix product measured right before it ({usual:,.0f} GFLOP/s, {slowest:,.0f} to "
            f"{fastest:,.0f}); products of positions with positions are not in it.",
            f"- {origin(record)}",
            "",
        ]
    )


def peers_table(record: dict) -> str:
    """Ours over each public implementation of the same layer, in time and in peak memory, by length."""
    rows = []
    for peer, ours in COUNTERPARTS.items():
        row = [f"{label(ours)} / {peer}"]
        for cells in record["lengths"].values():
            if "seconds" in cells.get(ours, {}) and "seconds" in cells.get(peer, {}):
                times = [a / b for a, b in zip(cells[ours]["seconds"], cells[peer]["seconds"], strict=True)]
                memory = cells[ours]["peak_bytes"] / max(1, cells[peer]["peak_bytes"])
                row.append(f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f}); {memory:.2f}")
            else:
                row.append("–")
        if set(row[1:]) != {"–"}:
            rows.append(row)
    heads = ["time (from, to); peak memory", *(f"T = {int(T):,}" for T in record["lengths"])]
    table = tabulate(rows, heads, "github", colalign=["left"] + ["right"] * (len(heads) - 1), disable_numparse=True)
    return (
        f"{table}\n\n- Below 1 ours is ahead. One layer, forward and backward, eager, in turn; memory is what tensors "
        f"take at their peak. {origin(record)}\n"
    )


def draw_layers(record: dict, rows: Sequence[str], limit_work: float) -> plt.Figure:
    """Time and peak memory of a layer by length, at a constant number of tokens; `limit_work` is the limit's."""
    tokens = record["provenance"]["tokens"]
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for axis, key, unit in ((axes[0], "seconds", 1e-6 * tokens), (axes[1], "peak_bytes", 2.0**20)):
        for row, colour in zip(rows, colours(len(rows)), strict=True):
            points = {int(T): cells[row][key] for T, cells in record["lengths"].items() if key in cells.get(row, {})}
            values = [(statistics.median(v) if isinstance(v, list) else v) / unit for v in points.values()]
            peer = row in COUNTERPARTS
            style = {"color": colour, "linestyle": "--" if peer else "-", "marker": "o"}
            axis.plot(list(points), values, **style, markersize=3.5, label=row if peer else label(row))
        by_length_axes(axis)
    floor = {int(T): c[LIMIT]["seconds"] for T, c in record["lengths"].items()}
    dim = compose(["experiment=source"]).model.dim
    limit = [6 * 4 * dim**2 * statistics.median(s) / limit_work * 1e6 for s in floor.values()]
    axes[0].plot(list(floor), limit, ":", color="grey", label="limit: four dim x dim products")
    axes[0].set_ylabel("forward and backward, microseconds a character")
    axes[1].set_ylabel(f"peak memory, MiB for {tokens:,} characters")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"One layer, {dim} dim, {tokens:,} characters a batch: {record['provenance']['device']}")
    return figure


def write_folder(folder: Path) -> None:
    steps = read(folder / "steps.json", "seconds")
    measured = steps["floating_point_operations"].keys() - {LIMIT} | {"mha_plus"}
    if not {limit_before(name) for name in measured} <= steps["seconds"].keys():
        raise UserError(f"{folder}/steps.json holds no mha_plus, or no limit before each step: {COMMAND} measures them")
    write_bytes(folder / "steps.md", steps_table(steps, compose([], "compare").source).encode())
    layers = read(folder / "layers.json", "lengths")
    write_bytes(folder / "peers.md", peers_table(layers).encode())
    save(draw_layers(layers, ROWS, steps["floating_point_operations"][LIMIT]), folder, "layers", dpi=110)
    print(f"written to {folder}: steps.md, peers.md, layers.png, layers.svg")
