"""Count the costs of a model without timing it: FLOPs of training, operations of a layer, streaming memory."""

import math

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from models.lm import LM

aten = torch.ops.aten


def formulas() -> dict:
    """Return {operator: function that counts its FLOPs}, also for operators that attentions have registered by now."""
    return flop_registry | {aten.baddbmm_: flop_registry[aten.baddbmm]}  # torch does not count baddbmm_


def training_flops(model: LM, context: int) -> int:
    """Count the FLOPs of a forward and a backward pass over one text of `context` characters, for a model on the CPU.

    Matrix products and convolutions count two FLOPs for each multiplication together with its addition. FFTs,
    element-wise operations, and the small triangular systems that delta rules solve are not counted. Pairs of positions
    that a mask excludes are counted, except those that attn/kernels/rows.py does not compute in long texts. What is
    computed again in the backward pass counts again.
    """
    ids = torch.zeros(1, context, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    counter.flop_registry = formulas()
    with sdpa_kernel(SDPBackend.MATH), counter:  # the counter does not see the products inside SDPA's other CPU kernel
        model.loss(ids, ids).backward()
    return counter.get_total_flops()


class OperationCounter(TorchDispatchMode):
    """Count the operations that are computed inside the `with` block, in the attribute `count`.

    Matrix products and convolutions count as in `training_flops`, an FFT as 5 n log2 n for each row of n numbers that
    it returns, and everything else, also the solution of a triangular system, as one operation for each number that it
    returns. Views of tensors are not counted.
    """

    def __init__(self):
        super().__init__()
        self.count, self.formulas = 0.0, formulas()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if func.overloadpacket in self.formulas:
            self.count += self.formulas[func.overloadpacket](*args, **kwargs, out_val=out)
        elif "fft" in func.name():
            self.count += sum(5 * x.numel() * math.log2(max(x.shape[-1], 2)) for x in tensors)
        elif not func.is_view and func.name() != "aten::_unsafe_view":
            self.count += sum(x.numel() for x in tensors)
        return out


@torch.no_grad()
def forward_operations(layer: nn.Module, x: Tensor) -> float:
    """Return the number of operations of layer(x)."""
    with sdpa_kernel(SDPBackend.MATH), OperationCounter() as counter:
        layer(x)
    return counter.count


@torch.no_grad()
def state_bytes(model: LM, context: int) -> int:
    """Return the size of the state of `LM.step` in bytes after `context` characters, for a model on the CPU.

    Rows of its buffers that are not used yet are counted too.
    """
    state, ids = model.begin(1), torch.zeros(1, dtype=torch.long)
    for _ in range(context):
        model.step(ids, state)
    return sum(memory(state).values())


def memory(thing: object) -> dict[int, int]:
    """Return {address: bytes} for the storages of all tensors that an object holds, except those of modules in it."""
    if isinstance(thing, Tensor):
        storage = thing.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    if isinstance(thing, nn.Module):
        return {}
    held = vars(thing) if hasattr(thing, "__dict__") else thing
    parts = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else ()
    return {address: size for part in parts for address, size in memory(part).items()}
