"""Time functions in turn, and build the functions to time: training steps, passes of a layer, matrix products."""

import time
from collections.abc import Callable

import torch
from omegaconf import DictConfig
from torch import nn

from models.build import build_model
from training.device import autocast, keep_freed_memory, stop_keeping_freed_memory, wait
from training.optimizer import optimizer_of, update

MATMUL = 2048  # rows and columns of the matrices whose product shows the peak speed of a CPU; a GPU gets larger ones
PRODUCTS = 6  # number of products in a timed call


def in_turn(
    functions: dict[str, Callable[[], None]], device: torch.device, warm_up: int, repeats: int
) -> dict[str, list[float]]:
    """Call the functions in turn, and return the seconds of `repeats` calls of each after `warm_up` untimed ones."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warm_up + repeats):
        for name, function in functions.items():
            elapsed = timed(function, device)
            if turn >= warm_up:
                seconds[name].append(elapsed)
    return seconds


def in_turn_each_warmed_up(
    functions: dict[str, Callable[[], None]], device: torch.device, warm_up: int, repeats: int
) -> dict[str, list[float]]:
    """Call the functions in turn, and return the seconds of `repeats` calls of each.

    Right before each timed call, the function is called `warm_up` times untimed, so that the timed call uses the memory
    that they have freed. Then this memory is returned to the system. If it were kept, it would be split into pieces
    that are too small for the large tensors of the next function, and memory use would grow in every round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            keep_freed_memory(unlimited=True)
            for _ in range(warm_up):
                function()
            seconds[name].append(timed(function, device))
            stop_keeping_freed_memory()
    return seconds


def timed(function: Callable[[], None], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    function()
    wait(device)
    return time.perf_counter() - began


def training_step(
    cfg: DictConfig, vocabulary: int, device: torch.device, precision: str, compiled: bool
) -> Callable[[], None]:
    """Return a function that takes one whole training step on random characters."""
    keep_freed_memory()  # as train.py does
    torch.manual_seed(0)
    model = build_model(cfg, vocabulary).to(device)
    optimizer = optimizer_of(model, cfg.optim, compiled)
    loss = model.loss
    if compiled:
        # Beyond these limits torch stops compiling, and all timed models count together.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
        loss = torch.compile(loss, dynamic=False)  # as if no other model had been compiled before
    ids = torch.randint(vocabulary, (cfg.train.batch, cfg.model.context + 1), device=device)
    parts, clip = cfg.train.accumulate, cfg.optim.clip
    return lambda: update(loss, optimizer, ids[:, :-1], ids[:, 1:], device, precision, parts, clip)


def repeated(function: Callable[[], None], times: int) -> Callable[[], None]:
    """Return a function that calls `function` several times."""

    def run() -> None:
        for _ in range(times):
            function()

    return run


def layer_pass(layer: Callable, x: torch.Tensor, precision: str) -> Callable[[], None]:
    """Return a function that runs the forward and backward pass of a layer, and frees the gradients."""

    def run() -> None:
        with autocast(x.device, precision):
            y = layer(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
        for p in (x, *layer.parameters()):
            p.grad = None

    return run


def matmul(device: torch.device, precision: str) -> tuple[Callable[[], None], float]:
    """Return a function that computes PRODUCTS large matrix products, and the number of their FLOPs."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    size = MATMUL if device.type == "cpu" else 4 * MATMUL
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    return repeated(lambda: torch.mm(a, b), PRODUCTS), PRODUCTS * 2.0 * size**3


def step_flops(cfg: DictConfig, vocabulary: int) -> float:
    """Return the FLOPs of the products with weights in a training step, forward and backward."""
    with torch.device("meta"):
        model = build_model(cfg, vocabulary)
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    return 6.0 * weights * cfg.train.batch * cfg.model.context
