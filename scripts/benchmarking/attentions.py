"""Speed and memory of every attention, side by side, on this machine.

Two records in <results>/benchmark/<tier>/<precision>, kept and continued where code, device and settings are the same:

steps.json   one training step of the source's setup (batch 64 x 128) for every variant, compiled where
             that can be, and before each of them a large matrix product, the machine's limit; written
             once all are timed.
layers.json  one layer, forward and backward, at a constant number of tokens and growing length, for
             every variant and for the public implementations in peers.py; with peak memory;
             written after each length.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from configs.cli import compose
from data.files import UserError, write_json
from data.reading import read_json
from models.build import build_model
from models.costs import matrix_weights
from scripts.benchmarking.memory import peak_of_tensors, total_memory
from scripts.benchmarking.peers import peers
from scripts.benchmarking.timing import in_turn, layer_pass, matmul, timed, training_step
from scripts.reporting import benchmark_pages
from scripts.reporting.benchmark_pages import COUNTERPARTS, LIMIT, limit_before
from scripts.reporting.variants import variants
from training.device import bf16_instructions, pick_compile, pick_device, pick_precision, return_freed_memory
from training.provenance import provenance

KERNEL = "attn.impl=triton"
MEMORY_SHARE = 0.4  # of the machine's memory that one pass may be expected to need


def measure_steps(cfg: DictConfig, record: dict, device: torch.device, precision: str, deadline: float) -> dict:
    """Seconds of training steps, compiled one after the other and then timed in turn."""
    if "seconds" in record:
        return record
    compiled = pick_compile(None, device, hours=1.0)
    torch._dynamo.config.recompile_limit = 1000  # beyond it, many models in one process, torch goes on uncompiled
    limit, work = matmul(device, precision)
    functions, works = {}, {LIMIT: work}
    for variant in cfg.variants or everything(device):
        if time.monotonic() > deadline:
            raise UserError(f"budget={cfg.budget:.0f} ended while {variant} was compiled: a step needs a larger one")
        config = compose([*f"attn={variant}".split(), "experiment=source"])
        functions[limit_before(variant)] = limit
        functions[variant] = training_step(config, cfg.steps.vocabulary, device, precision, compiled)
        with torch.device("meta"):
            weights = matrix_weights(build_model(config, cfg.steps.vocabulary))
        works[variant] = 6.0 * weights * config.train.batch * config.model.context
        first = timed(functions[variant], device)
        print(f"{variant}: first step {first:.1f} s", flush=True)
    seconds = in_turn(functions, device, cfg.steps.warm_up, cfg.steps.repeats)
    memory = {name: peak_of_tensors(functions[name], device) for name in works if name != LIMIT}
    tokens = config.train.batch * config.model.context
    return record | {
        "compiled": compiled,
        "tokens": tokens,
        "floating_point_operations": works,
        "seconds": seconds,
        "peak_bytes": memory,
    }


def measure_layers(cfg: DictConfig, record: dict, device: torch.device, precision: str, deadline: float):
    """Yields the record after each length."""
    lengths = record.setdefault("lengths", {})
    model = compose(["experiment=source"]).model
    limit, _ = matmul(device, precision)
    for T in cfg.layers.lengths:
        if str(T) in lengths:
            continue
        if time.monotonic() > deadline:
            print(f"the budget is spent: the same command goes on at length {T}")
            return
        before = lengths.get(str(T // 2), {})
        makers = layers_to_measure(cfg, model, T, device)
        cells = {name: {"skipped": why} for name in makers if (why := too_much(before.get(name), cfg, device))}
        functions = {LIMIT: limit}
        for name in (name for name in makers if name not in cells):
            x = torch.randn(max(1, cfg.layers.tokens // T), T, model.dim, device=device, requires_grad=True)
            functions[name] = layer_pass(makers[name]().to(device), x, precision)
            cells[name] = {"peak_bytes": peak_of_tensors(functions[name], device)}
            return_freed_memory()  # a few layers store gigabytes of scores, each in a place of its own
        for name, seconds in in_turn(functions, device, cfg.layers.warm_up, cfg.layers.repeats).items():
            cells.setdefault(name, {})["seconds"] = seconds
        lengths[str(T)] = cells
        print(f"length {T}: {len(functions) - 1} layers", flush=True)
        yield record


def everything(device: torch.device) -> list[str]:
    """All of configs/attn, and on a GPU once more with our kernels what can run through them."""
    plain = variants()
    return [*plain, *(f"{v} {KERNEL}" for v in plain if has_kernel(v))] if device.type == "cuda" else plain


@functools.cache
def has_kernel(variant: str) -> bool:
    try:
        our_layer(f"{variant} {KERNEL}", 128)()
    except ValueError:  # refused
        return False
    return True


def layers_to_measure(
    cfg: DictConfig, model: DictConfig, T: int, device: torch.device
) -> dict[str, Callable[[], nn.Module]]:
    """The constructors of cfg.variants, and of the public implementations where cfg.peers says so.

    Each of these right after what it is compared with, as a machine's speed may drift within a round.
    """
    public = peers(model.dim, model.heads, T)
    names = list(cfg.variants or everything(device))
    for peer in reversed(public) if cfg.peers else ():
        ours = COUNTERPARTS[peer]
        names.insert(names.index(ours) + 1 if ours in names else len(names), peer)
    absent = [name for name in names if name in COUNTERPARTS and name not in public]
    if absent:
        raise UserError(f"{', '.join(absent)}: not installed, pip install -r requirements-dev.txt")
    return {name: public.get(name) or our_layer(name, T) for name in names}


def our_layer(variant: str, T: int) -> Callable[[], nn.Module]:
    """The constructor of a layer as the peers have it, without a token shift."""
    config = compose([*f"attn={variant}".split(), "experiment=source", f"model.context={T}"]).attn
    if "token_shift" in config:
        config.token_shift = False
    return instantiate(config)


def too_much(before: dict | None, cfg: DictConfig, device: torch.device) -> str | None:
    """Why a layer is not tried at twice the length at which it did `before`, or None."""
    if not before:
        return None
    if "skipped" in before:
        return before["skipped"]
    if 2 * min(before["seconds"]) > cfg.layers.limit:  # a quadratic cost doubles at constant tokens
        return f"slower than {cfg.layers.limit:.0f} s"
    needed, there = 4 * before["peak_bytes"], total_memory(device)  # as T x T numbers that the batch does not divide
    return f"more memory than {MEMORY_SHARE:.0%} of {there / 2**30:.0f} GiB" if needed > MEMORY_SHARE * there else None


def open_record(path: Path, origin: dict) -> dict:
    """The record of this code, device and settings that is there, or a new one."""
    record = read_json(path) if path.exists() else {}
    same = record.get("provenance", {}) | {"command": None} == origin | {"command": None}
    return record if same else {"provenance": origin}


def precisions_of(device: torch.device) -> list[str]:
    """float32, and bf16 where the device has instructions for it."""
    return ["float32", "bf16"] if bf16_instructions(device) else ["float32"]


def measure_precision(cfg: DictConfig, command: str, device: torch.device, precision: str, deadline: float) -> None:
    """Write both records of one precision."""
    folder = Path(cfg.results, "benchmark", "gpu" if device.type == "cuda" else "cpu", precision)
    origin = provenance(device, command) | {"precision": precision, "tokens": cfg.layers.tokens}
    settings = OmegaConf.to_container(OmegaConf.masked_copy(cfg, ["variants", "peers", "steps", "layers"]))
    path = folder / "steps.json"
    write_json(path, measure_steps(cfg, open_record(path, origin | settings), device, precision, deadline))
    print(f"written to {path}", flush=True)
    path = folder / "layers.json"
    earlier = open_record(path, origin | settings)
    for record in measure_layers(cfg, earlier, device, precision, deadline):
        write_json(path, record)
        print(f"written to {path}", flush=True)


def measure(cfg: DictConfig, command: str) -> None:
    """Measure what is missing within the budget, and write the records and their pages."""
    if cfg.tier not in (None, "cpu", "gpu"):
        raise UserError(f"tier must be cpu, gpu or null: got {cfg.tier}")
    device = pick_device({"cpu": "cpu", "gpu": "cuda", None: "auto"}[cfg.tier])
    deadline = time.monotonic() + cfg.budget
    for precision in cfg.precisions or precisions_of(device):
        measure_precision(cfg, command, device, pick_precision(precision, device)[0], deadline)
    benchmark_pages.write(Path(cfg.results))
