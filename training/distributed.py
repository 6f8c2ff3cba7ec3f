"""Train one model with several processes that torchrun has started, using DDP or FSDP2, or with a single process.

Each process computes its share of a step's batch, and gradients are averaged over the processes. The results equal
those of a single process up to rounding, unless dropout is used. Only the first process writes to standard output and
to files of the run. There is one exception: when a run continues from its saved state, all processes remove the rows
from metrics.jsonl that were logged after this state.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from data.files import UserError
from training.device import pick_device
from training.interruption import PEER_DIED, ExitWithPeers, PeerFailed, exit_with_peers, peer_is_gone

# The other processes wait at most this long while the first one tokenises or evaluates. If a process dies, they notice
# this at once.
TIMEOUT = timedelta(days=1)

T = TypeVar("T")


class Processes:
    """This process and the others of its run.

    `rank` is the number of this process among all `count` of them, `local_rank` its number on its machine. `first` is
    True for rank 0. The standard output of all processes but the first is discarded.
    """

    def __init__(self):
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
        self.rank, self.count, self.local_rank = (int(os.environ.get(name, default)) for name, default in names.items())
        self.first = self.rank == 0
        if self.count > 1 and not dist.is_initialized():
            # Collectives on CPU tensors use gloo, so that processes can agree without waiting for a GPU.
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)
        if not self.first:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, open until the process ends

    def maximum(self, number: int) -> int:
        """Return the largest of the numbers that the processes pass. Each process waits for all others."""
        if self.count == 1:
            return number
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def average(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over the processes."""
        if self.count == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total / self.count

    def share(self, batch: Tensor) -> Tensor:
        """Return this process's part [B / count, ...] of a batch [B, ...]."""
        return batch.chunk(self.count)[self.rank]

    @contextmanager
    def together(self):
        """Run a block in all processes. If it fails in another process but not in this one, raise PeerFailed.

        An exception is raised at the end of the block, when all processes have reached it. SystemExit and
        KeyboardInterrupt are raised at once. Code in the block must not wait for other processes.
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
        """Call make() in the first process and then in the others. Return this process's result.

        The other processes can thus read the files that make() has written in the first one.
        """
        with self.together():
            made = make() if self.first else None
        with self.together():
            return made if self.first else make()

    def gather(self, state: dict) -> dict:
        """Return a state dict with its sharded tensors gathered to the CPU of the first process.

        In the other processes these tensors are None. Tensors that are not sharded are returned unchanged.
        """

        def gathered(tensor: Tensor) -> Tensor | None:
            if not is_sharded(tensor):
                return tensor
            full = tensor.full_tensor()
            return full.cpu() if self.first else None

        return tree_map_only(Tensor, gathered, state)


@contextmanager
def joined() -> Iterator[Processes]:
    """Join the other processes of this run for a block. If one of them fails in the block, raise ExitWithPeers.

    Raises UserError if the processes cannot reach one another.
    """
    try:
        processes = Processes()
    except dist.DistNetworkError as error:
        raise UserError(f"the processes of this run cannot connect to one another: {error}") from error
    try:
        yield processes
        return
    except PeerFailed as error:
        end = exit_with_peers(str(error), processes.first)
    except RuntimeError as error:
        if not (processes.count > 1 and peer_is_gone(error)):
            raise
        end = exit_with_peers(PEER_DIED, processes.first)
    except ExitWithPeers as error:
        end = error
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that torchrun can end this process
    raise end


def own_device(requested: str, processes: Processes) -> torch.device:
    """Return this process's device. If several processes use GPUs, each one has its own.

    Raises UserError if `requested` names one GPU for several processes.
    """
    device = pick_device(requested, "train.device")
    if processes.count == 1 or device.type == "cpu":
        return device
    if device.index is not None:
        raise UserError(f"train.device={requested} is one GPU for {processes.count} processes: take train.device=cuda")
    return pick_device(f"cuda:{processes.local_rank}", "train.device")


def leave() -> None:
    """Destroy the process group and end the process with status 0. Without a group, do nothing. Call this last.

    Threads of the group may still hold tensors after the group is destroyed. If the interpreter shuts down meanwhile,
    they abort the process (https://github.com/pytorch/pytorch/pull/179291), so this function calls os._exit.
    """
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Loss(nn.Module):
    """The model's loss as a module, so that DDP can wrap it."""

    def __init__(self, model: nn.Module, compiled: bool):
        super().__init__()
        self.model = model
        self.loss = torch.compile(model.loss) if compiled else model.loss

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.loss(ids, targets)


def training_loss(
    model: nn.Module, kind: str, processes: Processes, device: torch.device, compiled: bool, context: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function loss(ids, targets), whose backward pass averages gradients over the processes.

    With one process, this is model.loss. With several processes, each one has the whole model if `kind` is `ddp`; if
    it is `fsdp`, the parameters are sharded in place, block by block (FSDP2), and so are their gradients and the
    optimiser's state. The computation is compiled if `compiled`. ids and targets are [B, context].
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
    """Return whether some parameters get no gradient. DDP must then search for them in each step.

    An example is the factor alpha of `Toeplitz` (attn/position_weights.py), if an attention divides it out. The values
    of ids do not change the result: they may change how a kernel computes, but not which parameters it uses.
    """
    gradients = torch.autograd.grad(model.loss(ids, ids), list(model.parameters()), allow_unused=True)
    return any(gradient is None for gradient in gradients)


def shard(model: nn.Module, processes: Processes, device: torch.device, compiled: bool) -> None:
    """Shard a model over the processes in place, with FSDP2, block by block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # imported here because this takes a second

    mesh = init_device_mesh(device.type, (processes.count,))
    for block in model.blocks:
        if compiled:  # compile the block alone, without the hooks that FSDP adds
            block.forward = compiled_in_training(block.forward)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def compiled_in_training(forward: Callable) -> Callable:
    """Compile a forward pass for training only: evaluation has other shapes, and compiling them would take too long."""
    compiled = torch.compile(forward)
    return lambda *inputs: (compiled if torch.is_grad_enabled() else forward)(*inputs)


def is_sharded(tensor) -> bool:
    """Return whether a tensor is a DTensor, the type of parameters under FSDP2."""
    # Only a DTensor has this method. Importing DTensor for isinstance() would take a second.
    return hasattr(tensor, "full_tensor")


def unsynchronised(loss: Callable) -> AbstractContextManager:
    """Return a context in which DDP does not average gradients, for all but the last backward pass of a step."""
    return loss.no_sync() if isinstance(loss, DistributedDataParallel) else nullcontext()


def load_model(model: nn.Module, state: dict) -> None:
    """Load a state dict of whole tensors, as `Processes.gather` returns it, into a model that may be sharded."""
    own = model.state_dict()
    model.load_state_dict({name: sharded_like(own.get(name), value) for name, value in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Load a state dict of whole tensors, as `Processes.gather` returns it, into an optimiser that may be sharded."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {i: {k: sharded_like(params[i], v) for k, v in values.items()} for i, values in state["state"].items()}
    optimizer.load_state_dict(state | {"state": moments})


def sharded_like(own: Tensor | None, value):
    """Return the tensor `value` sharded like `own`, or `value` itself if it has another shape or `own` is not sharded.

    The optimiser's states have the shapes of their parameters, except for the number of steps in some optimisers.
    """
    if not (is_sharded(own) and isinstance(value, Tensor) and value.shape == own.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Every process has the whole tensor and takes its own shard, without communication.
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
