"""Compute and measure the memory of a step of experiment=large, and measure its time.

The computed memory consists of the weights, the gradients and AdaBelief's two moments, at 4 bytes each, and of what the
forward pass keeps for the backward pass, extrapolated from at most two layers. With checkpointing, the forward
pass keeps only the input of each block and what lies outside the blocks; what the largest block keeps is added, because
the backward pass recomputes one block at a time. Whole steps are measured on growing models, up to the large one.
The record is continued if its provenance, apart from the command, and the precision, batch and vocabulary are the same.
"""

import gc
import itertools
import time
from collections import Counter
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from data.files import write_json
from models.build import build_model
from models.lm import parameter_count
from scripts.benchmarking.attentions import open_record
from scripts.benchmarking.memory import peak_of_process, total_memory
from scripts.benchmarking.timing import matmul, timed, training_step
from scripts.reporting import memory
from scripts.reporting.memory import KINDS, figures
from scripts.reporting.records import composed, words_of, write_page
from scripts.reporting.variants import variants
from training.device import autocast, pick_device, pick_precision
from training.provenance import provenance

STATE = 16  # bytes per parameter: itself, its gradient, two moments
MEMORY_SHARE = 0.4  # steps that need more than this share of the machine's memory are not measured


def config(variant: str, size: list[int], batch: int, kind: str = "plain") -> DictConfig:
    """Return the config of experiment=large at another size: layers, heads, dim, context."""
    cfg = composed(words_of(variant, "large")).copy()
    cfg.model.layers, cfg.model.heads, cfg.model.dim, cfg.model.context = size
    cfg.model.activation_checkpointing = kind == "checkpointed"
    cfg.train.batch, cfg.train.accumulate = batch, 1  # the whole batch at once
    return cfg


def kept_bytes(
    variant: str, size: list[int], batch: int, vocabulary: int, precision: str, counted: int = 2
) -> dict[str, int]:
    """Return the bytes that a step with `batch` sequences keeps for its backward pass, by kind of step (KINDS).

    With checkpointed blocks, these include what the largest block keeps while it is computed again. The bytes are
    counted in at most `counted` layers and extrapolated to all layers.
    """
    layers = min(size[0], counted)
    cfg = config(variant, [layers, *size[1:]], batch)
    torch.manual_seed(0)
    model = build_model(cfg, vocabulary)
    # Storages by their address. They are kept alive, so that no other storage gets the address of a freed one.
    seen = {p.untyped_storage()._cdata: p.untyped_storage() for p in model.parameters()}
    # Bytes kept by block (0: outside of blocks), and those of them that are the block's input; bytes of each input; the
    # storages of the current input; the current block.
    kept, own, entering, inputs, current = Counter(), Counter(), [], set(), 0

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        new = 0 if storage._cdata in seen else storage.nbytes()
        kept[current] += new
        own[current] += new if storage._cdata in inputs else 0
        seen[storage._cdata] = storage
        return tensor.detach()  # undetached, an output saved by its own node forms a cycle that is never freed

    def enter(block: nn.Module, given: tuple) -> None:
        nonlocal current, inputs
        current = len(entering) + 1
        storages = [t.untyped_storage() for t in tree_leaves(given) if isinstance(t, Tensor)]
        inputs = {storage._cdata for storage in storages}
        entering.append(sum(storage.nbytes() for storage in storages))

    def leave(*_) -> None:
        nonlocal current
        current = 0

    for block in model.blocks:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)
    ids = torch.randint(vocabulary, (batch, cfg.model.context))
    with saved_tensors_hooks(keep, lambda tensor: tensor), autocast(torch.device("cpu"), precision):
        model.loss(ids, ids)
    left_out = size[0] - layers  # layers not built, each assumed to keep as much as the last built one
    again = max((kept - own)[block] for block in range(1, layers + 1))  # without its input, which is kept already
    return {
        "plain": kept.total() + left_out * kept[layers],
        "checkpointed": kept[0] + sum(entering) + left_out * entering[-1] + again,
    }


def measure_step(step_config: DictConfig, cfg: DictConfig, device: torch.device, precision: str) -> dict:
    """Return the peak memory of building and training a model, the seconds of its steps, and the machine's FLOP/s.

    The first step is not timed. The FLOP/s are those of large matrix products.
    """
    seconds = []

    def run() -> None:
        step = training_step(step_config, cfg.vocabulary, device, precision, compiled=False)
        step()  # allocates the gradients and moments, which exist when later steps begin
        while not seconds or sum(seconds) < cfg.seconds:
            seconds.append(timed(step, device))

    peak = peak_of_process(run, device)
    gc.collect()
    limit, work = matmul(device, precision)
    return {"peak_bytes": peak, "seconds": seconds, "machine_rate": work / timed(limit, device)}


def size_name(size: list[int]) -> str:
    return "x".join(map(str, size))


def measure_cells(cfg: DictConfig, record: dict, device: torch.device, precision: str, deadline: float):
    """Yield the record after each computed cell and each measurement. At each size, plain steps are measured first."""
    sizes, last = record.setdefault("sizes", {}), list(cfg.sizes[-1])
    measure_step(config("mha", [1, 1, 8, 8], 1), cfg, device, precision)  # a warm-up that loads libraries
    names = cfg.variants or variants()
    for size in map(list, cfg.sizes):
        row = sizes.setdefault(size_name(size), {})
        for variant in names:
            cell = row.setdefault(variant, {})
            known = len(cell)
            if "parameters" not in cell:
                with torch.device("meta"):
                    parameters = parameter_count(build_model(config(variant, size, 1), cfg.vocabulary))
                kept = kept_bytes(variant, size, cfg.batch, cfg.vocabulary, precision)
                cell |= {"parameters": parameters, "state_bytes": STATE * parameters, "kept_bytes": kept}
            if size == last and "bf16_sequence_bytes" not in cell:
                cell["bf16_sequence_bytes"] = kept_bytes(variant, size, 1, cfg.vocabulary, "bf16")
            if len(cell) > known:
                yield record
        for kind, variant in itertools.product(KINDS, names):
            cell = row[variant]
            if kind in cell:
                continue
            needed = cell["state_bytes"] + cell["kept_bytes"][kind]
            if needed > MEMORY_SHARE * total_memory(device):
                cell[kind] = {"skipped": f"{needed / 2**30:.0f} GiB computed"}
            elif time.monotonic() < deadline:
                cell[kind] = measure_step(config(variant, size, cfg.batch, kind), cfg, device, precision)
                print(f"{variant}, {' x '.join(map(str, size))}, {kind}: {figures(cell[kind])}", flush=True)
            if kind in cell:
                yield record


def measure(cfg: DictConfig, command: str) -> None:
    """Measure what is missing within the budget, and write the record and its page."""
    device = pick_device(cfg.device)
    precision, _ = pick_precision("auto", device)
    path = Path(cfg.results, "large.json")
    origin = provenance(device, command) | {"precision": precision}
    earlier, settings = open_record(path, origin), {"batch": cfg.batch, "vocabulary": cfg.vocabulary}
    if {k: earlier.get(k) for k in settings} != settings:
        earlier = {"provenance": origin} | settings
    for record in measure_cells(cfg, earlier, device, precision, time.monotonic() + cfg.budget):
        write_json(path, record)
    asked = [earlier["sizes"][size_name(size)][variant] for size in cfg.sizes for variant in cfg.variants or variants()]
    left = sum(kind not in cell for cell in asked for kind in KINDS)
    if left:
        print(f"the budget is spent: {left} measurements are left, which the same command continues")
    write_page(path.parent, "large", memory.page)
    print(f"written to {path.parent}: large.json, large.md")
