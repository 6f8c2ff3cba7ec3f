"""The costs of a model, counted and not timed: FLOPs of training, and memory of the state of streaming."""

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.lm import LM


def training_flops(model: LM, context: int) -> int:
    """Count the FLOPs of a forward and a backward pass over one text of `context` characters. The model is on the CPU.

    Matrix products and convolutions count two FLOPs for each multiplication and addition. FFTs and element-wise
    operations are not counted. Pairs of positions that a mask excludes are counted.
    """
    ids = torch.zeros(1, context, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:  # the counter does not see the products inside SDPA's other CPU kernel
        model.loss(ids, ids).backward()
    return counter.get_total_flops()


def matrix_weights(model: LM) -> int:
    """Return how many weights each position is multiplied by: those of all linear layers."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


@torch.no_grad()
def state_bytes(model: LM, context: int) -> int:
    """Return the size of the state of `LM.step` in bytes after `context` characters, for a model on the CPU."""
    state, ids = model.initial_state(1), torch.zeros(1, dtype=torch.long)
    for _ in range(context):
        model.step(ids, state)
    return sum(memory(state).values())


def memory(thing: object) -> dict[int, int]:
    """Return the storages of all tensors that an object holds, {address: bytes}, without those of its modules."""
    if isinstance(thing, Tensor):
        storage = thing.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    if isinstance(thing, nn.Module):
        return {}
    held = vars(thing) if hasattr(thing, "__dict__") else thing
    parts = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else ()
    return {address: size for part in parts for address, size in memory(part).items()}
