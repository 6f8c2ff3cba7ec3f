"""What a model costs, counted rather than timed: FLOPs of training, bytes of memory that streaming keeps."""

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.lm import LM


def training_flops(model: LM, context: int) -> int:
    """FLOPs of the forward and the backward pass over one text of `context` characters, for a model on the CPU.

    Matrix products and convolutions are counted, with two FLOPs for a multiplication and an addition;
    FFTs and element-wise operations are not. Pairs of positions that a mask leaves out count too.
    """
    ids = torch.zeros(1, context, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:  # the products inside torch's other CPU kernel are not seen
        model.loss(ids, ids).backward()
    return counter.get_total_flops()


@torch.no_grad()
def state_bytes(model: LM, context: int) -> int:
    """Bytes of memory that `LM.step` holds after `context` characters of one text, for a model on the CPU."""
    state, ids = model.begin(1), torch.zeros(1, dtype=torch.long)
    for _ in range(context):
        model.step(ids, state)
    return sum(memory(state).values())


def memory(thing: object) -> dict[int, int]:
    """The memory behind all tensors that an object holds, {address: bytes}, without those of modules."""
    if isinstance(thing, Tensor):
        storage = thing.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    if isinstance(thing, nn.Module):
        return {}
    held = vars(thing) if hasattr(thing, "__dict__") else thing
    parts = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else ()
    return {address: size for part in parts for address, size in memory(part).items()}
