"""Measure the speed and memory of every attention on this machine.

Two records are written to <results>/benchmark/<cpu or gpu>/<precision>. A record that was made with the same code,
device and settings is continued.

steps.json   The time and peak memory of a training step of the source's setup (64 sequences of 128 characters) for
             every attention, compiled if possible. Before each step, large matrix products are timed, whose speed
             stands for the machine's limit.
layers.json  The time and peak memory of the forward and backward pass of one layer, for every attention and for the
             public implementations in peers.py, at growing lengths and with the same number of tokens at each length.
             The record is written after each length.
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
from data.files import UserError, first_line, write_json
from data.reading import read_object
from scripts.benchmarking.memory import peak_of_tensors, total_memory
from scripts.benchmarking.peers import peers
from scripts.benchmarking.timing import (
    in_turn,
    in_turn_each_warmed_up,
    layer_pass,
    matmul,
    repeated,
    step_flops,
    timed,
    training_step,
)
from scripts.reporting import benchmark_pages
from scripts.reporting.benchmark_pages import COUNTERPARTS, KERNEL, LIMIT, limit_before
from scripts.reporting.records import words_of
from scripts.reporting.variants import variants
from training.device import bf16_instructions, pick_compile, pick_device, pick_precision, stop_keeping_freed_memory
from training.provenance import provenance

# Steps that are timed together, by device: a GPU computes a step while the next one is being launched.
IN_A_ROW = {"cpu": 1, "cuda": 10}
# Passes whose tensors are expected to need more than this share of the machine's memory are skipped: the process may
# need three times as much as its tensors, and the expectation may be half of what they need.
MEMORY_SHARE = 0.22


def measure_steps(cfg: DictConfig, record: dict, device: torch.device, precision: str, deadline: float):
    """Yield the record with the seconds and the peak memory of a training step of each attention.

    The operations of a step are recorded too; only those of multiplications by weight matrices are counted.

    Raises UserError if the budget ends before every attention has begun its first step.
    """
    names = list(cfg.variants or everything(device))
    if set(names) <= record.get("seconds", {}).keys():
        return
    compiled, in_a_row = pick_compile(None, device, hours=1.0), IN_A_ROW[device.type]
    limit, work = matmul(device, precision)
    functions, works = {}, {LIMIT: work}
    for variant in names:
        if time.monotonic() > deadline:
            raise UserError(f"budget={cfg.budget:.0f} ended before the first step of {variant}: give a larger one")
        config = compose(list(words_of(variant, "source")))
        functions[limit_before(variant)] = limit
        step = training_step(config, cfg.steps.vocabulary, device, precision, compiled)
        functions[variant] = repeated(step, in_a_row)
        works[variant] = step_flops(config, cfg.steps.vocabulary)
        first = timed(step, device)
        print(f"{variant}: first step {first:.1f} s", flush=True)
    seconds = in_turn(functions, device, cfg.steps.warm_up, cfg.steps.repeats)
    seconds |= {variant: [s / in_a_row for s in seconds[variant]] for variant in names}
    memory = {name: peak_of_tensors(functions[name], device) for name in works if name != LIMIT}
    measured = {"compiled": compiled, "in_a_row": in_a_row, "tokens": config.train.batch * config.model.context}
    yield record | measured | {"floating_point_operations": works, "seconds": seconds, "peak_bytes": memory}


def measure_layers(cfg: DictConfig, record: dict, device: torch.device, precision: str, deadline: float):
    """Yield the record after each length, with the seconds and peak memory of every layer, until the deadline."""
    lengths = record.setdefault("lengths", {})
    model = compose(["experiment=source"]).model
    limit, _ = matmul(device, precision)
    # Training steps, timed before, keep freed memory. Kept, it would be split by the tensors that layers hold on to.
    stop_keeping_freed_memory()
    for T in cfg.layers.lengths:
        if str(T) in lengths:
            continue
        if time.monotonic() > deadline:
            print(f"the budget is spent: the same command continues at length {T}")
            return
        constructors = layers_to_measure(cfg, model, T, device)
        shorter = {int(n): cells for n, cells in lengths.items() if int(n) < T}
        before = {name: {n: cells[name] for n, cells in shorter.items() if name in cells} for name in constructors}
        why = {name: too_much(before[name], T, cfg, device) for name in constructors}
        cells = {name: {"skipped": reason} for name, reason in why.items() if reason}
        functions = {LIMIT: limit}
        for name in (name for name in constructors if name not in cells):
            x = torch.randn(cfg.layers.tokens // T, T, model.dim, device=device, requires_grad=True)
            run = layer_pass(constructors[name]().to(device), x, precision)
            try:
                cells[name] = {"peak_bytes": peak_of_tensors(run, device)}
                functions[name] = run
            except RuntimeError as error:  # torch's FlexAttention, for one, asks some GPUs for too much memory
                if name not in COUNTERPARTS:
                    raise
                cells[name] = {"skipped": f"fails: {first_line(error)}"}
                print(f"{name} {cells[name]['skipped']}", flush=True)
        measured = in_turn_each_warmed_up(functions, device, cfg.layers.warm_up, cfg.layers.repeats)
        for name, seconds in measured.items():
            cells.setdefault(name, {})["seconds"] = seconds
        lengths[str(T)] = cells
        print(f"length {T}: {len(functions) - 1} layers", flush=True)
        yield record


def everything(device: torch.device) -> list[str]:
    """Return the names of all attentions, and on a GPU also "<name> attn.impl=triton" for those with Triton kernels."""
    plain = variants()
    return [*plain, *(f"{v}{KERNEL}" for v in plain if has_kernel(v))] if device.type == "cuda" else plain


@functools.cache
def has_kernel(variant: str) -> bool:
    try:
        our_layer(f"{variant}{KERNEL}", 128)()
    except ValueError:
        return False
    return True


def layers_to_measure(
    cfg: DictConfig, model: DictConfig, T: int, device: torch.device
) -> dict[str, Callable[[], nn.Module]]:
    """Return {name: constructor} of the layers to measure.

    These are the ones that cfg.variants names, or all attentions if it is null, and with cfg.peers also all available
    public implementations. Each of the latter follows its counterpart if that is measured too, so that the two are
    timed one after the other: the machine's speed may drift within a round. Raises UserError if cfg.variants names a
    public implementation that is not available.
    """
    names = list(cfg.variants or everything(device))
    wanted = cfg.peers or any(name in COUNTERPARTS for name in names)
    public = peers(model.dim, model.heads, T) if wanted else {}
    for peer in reversed(public) if cfg.peers else ():
        ours = COUNTERPARTS[peer]
        names.insert(names.index(ours) + 1 if ours in names else len(names), peer)
    absent = [name for name in names if name in COUNTERPARTS and name not in public]
    if absent:
        raise UserError(
            f"these public implementations are not available: {', '.join(absent)}; FlexAttention needs a GPU, and "
            "pip install -r requirements-dev.txt installs the others"
        )
    return {name: public.get(name) or our_layer(name, T) for name in names}


def our_layer(variant: str, T: int) -> Callable[[], nn.Module]:
    """Return the constructor of an attention layer.

    It has no token shift and no chosen start (starts=none), because public implementations have neither.
    """
    config = compose([*words_of(variant, "source"), "starts=none", f"model.context={T}"]).attn
    if "token_shift" in config:
        config.token_shift = False
    return instantiate(config)


def too_much(before: dict[int, dict], T: int, cfg: DictConfig, device: torch.device) -> str | None:
    """Return the reason to skip a layer at length T, or None if it is to be measured.

    `before` is {length: measurement} of the layer at shorter lengths. If it is empty, the layer is to be measured.
    """
    if not before:
        return None
    last = before[max(before)]
    if "skipped" in last:
        return last["skipped"]
    if expected({n: min(cell["seconds"]) for n, cell in before.items()}, T) > cfg.layers.limit:
        return f"expected to take more than {cfg.layers.limit:.0f} s"
    needed, total = expected({n: cell["peak_bytes"] for n, cell in before.items()}, T), total_memory(device)
    if needed > MEMORY_SHARE * total:
        return f"expected to need more memory than {MEMORY_SHARE:.0%} of {total / 2**30:.0f} GiB"
    return None


def expected(measured: dict[int, float], T: int) -> float:
    """Return the time or memory to expect at length T, given `measured`, {length: value} of shorter lengths.

    It lies on the straight line through the two longest lengths, but is never less than the value at the longest. A
    single value is taken to grow in proportion to T. This suits costs that are quadratic in T for a single sequence,
    because there are fewer sequences at longer lengths. Memory of parameters of size T x T grows faster.
    """
    *earlier, last = sorted(measured)
    if not earlier:
        return measured[last] * T / last
    slope = (measured[last] - measured[earlier[-1]]) / (last - earlier[-1])
    return measured[last] + max(0.0, slope) * (T - last)


def open_record(path: Path, origin: dict) -> dict:
    """Return what `continued` returns for the record at `path`, or for an empty record if there is none."""
    return continued(read_object(path) if path.exists() else {}, origin)


def continued(record: dict, origin: dict) -> dict:
    """Return the record if it was made with the same code, device and settings; otherwise a new one."""
    same = record.get("provenance", {}) | {"command": None} == origin | {"command": None}
    return record if same else {"provenance": origin}


def measure_precision(cfg: DictConfig, command: str, device: torch.device, precision: str, deadline: float) -> None:
    """Write both records of one precision. Raises UserError if a length does not divide the number of tokens."""
    if uneven := [T for T in cfg.layers.lengths if cfg.layers.tokens % T]:
        raise UserError(f"layers.tokens={cfg.layers.tokens} must be a multiple of every length: got {uneven}")
    folder = Path(cfg.results, "benchmark", "gpu" if device.type == "cuda" else "cpu", precision)
    origin = provenance(device, command) | {"precision": precision, "tokens": cfg.layers.tokens}
    settings = OmegaConf.to_container(OmegaConf.masked_copy(cfg, ["variants", "peers", "steps", "layers"]))
    for name, measured in (("steps", measure_steps), ("layers", measure_layers)):
        path = folder / f"{name}.json"
        for record in measured(cfg, open_record(path, origin | settings), device, precision, deadline):
            write_json(path, record)
            print(f"written to {path}", flush=True)


def measure(cfg: DictConfig, command: str) -> None:
    """Within the budget, measure what is missing; write the records and their pages."""
    if cfg.tier == "gpu" and not torch.cuda.is_available():
        raise UserError("tier=gpu needs a CUDA device, and this machine has none")
    if cfg.variants is not None and "mha_plus" not in cfg.variants:
        raise UserError("variants must contain mha_plus, with which the pages compare the others")
    device = pick_device({"cpu": "cpu", "gpu": "cuda", None: "auto"}[cfg.tier])
    deadline = time.monotonic() + cfg.budget
    usual = ["float32", "bf16"] if bf16_instructions(device) else ["float32"]
    for place, precision in enumerate(cfg.precisions or usual):
        if place and time.monotonic() > deadline:
            print(f"the budget is spent: the same command continues in {precision}")
            break
        measure_precision(cfg, command, device, pick_precision(precision, device)[0], deadline)
        if benchmark_pages.complete(Path(cfg.results)):  # pages now, because the budget may end in the next precision
            benchmark_pages.write(Path(cfg.results))
