"""Several processes that train one model: those that torchrun started, with DDP or FSDP2; one is the plain case.

Each process takes its share of a step's batch, and gradients are averaged over the processes, so that the numbers are
those of one process to rounding. The first one alone prints and writes.
"""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

PATIENCE = timedelta(days=1)  # while the first one makes a corpus or evaluates; a dead one is noticed at once
GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # what gloo says of a dead one

T = TypeVar("T")


class PeerFailed(Exception):
    """Another process has failed; says what is known of it."""


class Processes:
    """This process and the others of its run: `rank` of `count`, `local_rank` on its machine."""

    def __init__(self):
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
        self.rank, self.count, self.local_rank = (int(os.environ.get(name, plain)) for name, plain in names.items())
        self.first = self.rank == 0
        if self.count > 1 and not dist.is_initialized():
            # What the processes agree on goes over gloo, between CPUs, and does not wait for a GPU.
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
        if not self.first:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, open until the process ends

    def agree(self, number: int) -> int:
        """The largest number that any of the processes gives; all of them wait for it."""
        if self.count == 1:
            return number
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def average(self, value: Tensor) -> Tensor:
        """The mean of a tensor over the processes."""
        if self.count == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total / self.count

    def share(self, batch: Tensor) -> Tensor:
        """This process's part of a batch [B, ...], [B / count, ...]."""
        return batch.chunk(self.count)[self.rank]

    @contextmanager
    def together(self):
        """What fails here in one process fails in all: with its own error, else with PeerFailed.

        Nothing inside may wait for the other processes.
        """
        error = None
        try:
            yield
        except Exception as caught:
            if self.count == 1:
                raise
            error = caught
        if self.count == 1:
            return
        messages: list[str | None] = [None] * self.count
        dist.all_gather_object(messages, None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise PeerFailed(f"process {rank} of {self.count} failed: {message}")

    def in_turn(self, make: Callable[[], T]) -> T:
        """make(), in the first process before the others, which find what it left on the disk."""
        with self.together():
            made = make() if self.first else None
        with self.together():
            return made if self.first else make()

    def whole(self, state: dict) -> dict:
        """A state dict whose sharded tensors are whole and on the CPU, as one process has it; in the others, None."""

        def gathered(tensor: Tensor) -> Tensor | None:
            if not is_sharded(tensor):
                return tensor
            full = tensor.full_tensor()
            return full.cpu() if self.first else None

        return tree_map_only(Tensor, gathered, state)


def leave() -> None:
    """What several processes do when they have come to their end together."""
    if dist.is_initialized():
        dist.destroy_process_group()


def peer_is_gone(error: BaseException) -> bool:
    """Whether an error is what a process gets whose peer has died."""
    return isinstance(error, dist.DistError) or any(words in str(error) for words in GONE)


class Loss(nn.Module):
    """The model's loss as a module, which is what DDP can wrap."""

    def __init__(self, model: nn.Module, compiled: bool):
        super().__init__()
        self.model = model
        self.loss = torch.compile(model.loss) if compiled else model.loss

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.loss(ids, targets)


def training_loss(
    model: nn.Module, kind: str, processes: Processes, device: torch.device, compiled: bool, context: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """loss(ids, targets) of texts of `context` characters, whose backward pass averages gradients over the processes.

    `ddp` gives every process the whole model; `fsdp` shards parameters, gradients and the optimiser's
    state, block by block (FSDP2), in place. With one process it is model.loss.
    """
    if processes.count == 1:
        return torch.compile(model.loss) if compiled else model.loss
    if kind == "ddp":
        unused = has_unused_parameters(model, torch.zeros(1, context, dtype=torch.long, device=device))
        whole = Loss(model, compiled)
        return DistributedDataParallel(whole, find_unused_parameters=unused, gradient_as_bucket_view=True)
    shard(model, processes, device, compiled)
    return model.loss


def has_unused_parameters(model: nn.Module, ids: Tensor) -> bool:
    """Whether some get no gradient, as alpha of a weighting beside a denominator: DDP must be told, but not in vain.

    The same for all ids of a length: no model chooses by what it reads.
    """
    gradients = torch.autograd.grad(model.loss(ids, ids), list(model.parameters()), allow_unused=True)
    return any(gradient is None for gradient in gradients)


def shard(model: nn.Module, processes: Processes, device: torch.device, compiled: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # takes a second, which not every start should pay

    mesh = init_device_mesh(device.type, (processes.count,))
    for block in model.blocks:
        if compiled:  # inside what FSDP does before and after a block
            block.forward = compiled_in_training(block.forward)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def compiled_in_training(forward: Callable) -> Callable:
    """Evaluation, whose batches are of other shapes, is not worth a minute of compiling."""
    compiled = torch.compile(forward)
    return lambda *inputs: (compiled if torch.is_grad_enabled() else forward)(*inputs)


def is_sharded(tensor) -> bool:
    """Whether it is FSDP2's DTensor."""
    return hasattr(tensor, "full_tensor")


def unsynchronised(loss: Callable) -> AbstractContextManager:
    """For the backward passes before a step's last, which need not wait for the other processes."""
    return loss.no_sync() if isinstance(loss, DistributedDataParallel) else nullcontext()


def load_model(model: nn.Module, state: dict) -> None:
    """Load what `Processes.whole` gave, into a model sharded or not."""
    own = model.state_dict()
    model.load_state_dict({name: like(own.get(name), value) for name, value in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Load what `Processes.whole` gave, into the optimiser of a model sharded or not."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {i: {k: like(params[i], v) for k, v in values.items()} for i, values in state["state"].items()}
    optimizer.load_state_dict(state | {"state": moments})


def like(own: Tensor | None, value):
    """A whole tensor, sharded as `own` is; anything else as it is."""
    if not (is_sharded(own) and isinstance(value, Tensor)):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Every process has the whole tensor: each takes its part, none is sent.
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
