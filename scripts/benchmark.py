"""python scripts/benchmark.py: speed and memory of every attention, side by side, on this machine.

Two records in <out>/<tier>, each continued where it stopped if the commit and the device are the same:

steps.json   one training step of the source's setup (batch 64 x 128) for every variant, compiled where
             that can be, and in every round a large matrix product, the machine's limit.
layers.json  one layer, forward and backward, at a constant number of tokens and growing length, for
             every variant and for the public implementations of scripts/peers.py; with peak memory.
"""

import ctypes
import gc
import re
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from configs.cli import compose, main
from data.files import UserError, write_json
from data.record import provenance, read_json
from evaluate import build_model, pick_device, pick_precision, wait
from scripts.list_variants import variants
from scripts.peers import peers
from scripts.timing import in_turn, layer_pass, matmul, timed, training_step
from train import pick_compile

LIMIT = "matrix product"  # the name of the machine's limit among what is measured
MEMORY_SHARE = 0.6  # of the machine's memory that one pass may be expected to need


def measure_steps(cfg: DictConfig, record: dict, device: torch.device, precision: str, deadline: float) -> dict:
    """Seconds of training steps, compiled one after the other and then timed in turn."""
    if "seconds" in record:
        return record
    compiled = pick_compile(None, device, hours=1.0)
    torch._dynamo.config.recompile_limit = 1000  # beyond it, many models in one process, torch goes on uncompiled
    limit, work = matmul(device, precision)
    functions, works = {LIMIT: limit}, {LIMIT: work}
    for variant in cfg.variants or variants():
        if time.monotonic() > deadline:
            raise UserError(f"budget={cfg.budget:.0f} ended while {variant} was compiled: a step needs a larger one")
        config = compose([f"attn={variant}"])
        functions[variant] = training_step(config, cfg.steps.vocabulary, device, precision, compiled)
        works[variant] = 6.0 * matrix_weights(config, cfg.steps.vocabulary) * config.train.batch * config.model.context
        first = timed(functions[variant], device)
        print(f"{variant}: first step {first:.1f} s", flush=True)
    seconds = in_turn(functions, device, cfg.steps.warm_up, cfg.steps.repeats)
    memory = {variant: peak_memory(function, device) for variant, function in functions.items()}
    tokens = config.train.batch * config.model.context
    return record | {
        "compiled": compiled,
        "tokens": tokens,
        "floating_point_operations": works,
        "seconds": seconds,
        "peak_bytes": memory,
    }


def matrix_weights(config: DictConfig, vocabulary: int) -> int:
    """How many numbers a model multiplies each of its inputs with."""
    with torch.device("meta"):
        model = build_model(config, vocabulary)
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


def measure_layers(cfg: DictConfig, record: dict, device: torch.device, precision: str, deadline: float):
    """Yields the record after each length."""
    lengths = record.setdefault("lengths", {})
    model = compose([]).model
    limit, _ = matmul(device, precision)
    for T in cfg.layers.lengths:
        if str(T) in lengths:
            continue
        if time.monotonic() > deadline:
            print(f"the budget is spent: the same command goes on at length {T}")
            return
        before = lengths.get(str(T // 2), {})
        makers = layers_to_measure(cfg, model, T)
        cells = {name: {"skipped": why} for name in makers if (why := too_much(before.get(name), cfg, device))}
        functions = {LIMIT: limit}
        for name in (name for name in makers if name not in cells):
            x = torch.randn(max(1, cfg.layers.tokens // T), T, model.dim, device=device, requires_grad=True)
            functions[name] = layer_pass(makers[name]().to(device), x, precision)
            cells[name] = {"peak_bytes": peak_memory(functions[name], device)}
        for name, seconds in in_turn(functions, device, cfg.layers.warm_up, cfg.layers.repeats).items():
            cells.setdefault(name, {})["seconds"] = seconds
        lengths[str(T)] = cells
        print(f"length {T}: {len(functions) - 1} layers", flush=True)
        yield record


def layers_to_measure(cfg: DictConfig, model: DictConfig, T: int) -> dict[str, Callable[[], nn.Module]]:
    """The constructors of cfg.variants, and of the public implementations where cfg.peers says so."""
    public = peers(model.dim, model.heads, T)
    known = {v: partial(our_layer, v, T) for v in variants()} | public
    names = [*(cfg.variants or variants()), *(public if cfg.peers else ())]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"there is no layer {', '.join(unknown)}; there are {', '.join(known)}")
    return {name: known[name] for name in names}


def our_layer(variant: str, T: int) -> nn.Module:
    """A layer as the peers have it, without a token shift."""
    return instantiate(compose([f"attn={variant}", f"model.context={T}", "attn.token_shift=false"]).attn)()


def too_much(before: dict | None, cfg: DictConfig, device: torch.device) -> str | None:
    """Why a layer is not tried at twice the length at which it did `before`, or None."""
    if not before:
        return None
    if "skipped" in before:
        return before["skipped"]
    if 2 * min(before["seconds"]) > cfg.layers.limit:  # a quadratic cost doubles at constant tokens
        return f"slower than {cfg.layers.limit:.0f} s"
    needed, there = 2 * before["peak_bytes"], total_memory(device)
    return f"more memory than {MEMORY_SHARE:.0%} of {there / 2**30:.0f} GiB" if needed > MEMORY_SHARE * there else None


def total_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return int(re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024


def peak_memory(function, device: torch.device) -> int:
    """Bytes that one call needs beyond what is there before it."""
    gc.collect()
    if device.type == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    ctypes.CDLL(None).malloc_trim(0)  # give back what the allocator keeps
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    function()
    return max(0, resident("VmHWM") - before)


def resident(what: str) -> int:
    return int(re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def open_record(path: Path, origin: dict) -> dict:
    """The record of this commit and device that is there, or a new one."""
    record = read_json(path) if path.exists() else {}
    same = record.get("provenance", {}) | {"command": None} == origin | {"command": None}
    return record if same else {"provenance": origin}


@main("benchmark")
def run(cfg: DictConfig) -> None:
    if cfg.tier not in (None, "cpu", "gpu"):
        raise UserError(f"tier must be cpu, gpu or null: got {cfg.tier}")
    device = pick_device({"cpu": "cpu", "gpu": "cuda", None: "auto"}[cfg.tier])
    precision = pick_precision("auto", device)
    folder = Path(cfg.out, "gpu" if device.type == "cuda" else "cpu")
    deadline = time.monotonic() + cfg.budget
    command = shlex.join(["python", "scripts/benchmark.py", *sys.argv[1:]])
    origin = provenance(device, command) | {"precision": precision}
    path = folder / "steps.json"
    write_json(path, measure_steps(cfg, open_record(path, origin), device, precision, deadline))
    print(f"written to {path}", flush=True)
    path = folder / "layers.json"
    earlier = open_record(path, origin | {"tokens": cfg.layers.tokens})
    for record in measure_layers(cfg, earlier, device, precision, deadline):
        write_json(path, record)
        print(f"written to {path}", flush=True)


if __name__ == "__main__":
    run()
