"""The optimisers, the training step that uses them, and the schedule of the learning rate."""

import contextlib
import io
import math
from collections.abc import Callable

import numpy as np
import torch
from adabelief_pytorch import AdaBelief
from omegaconf import DictConfig
from torch import Tensor, nn

from training.device import autocast
from training.distributed import is_sharded, unsynchronised


def update(
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    device: torch.device,
    precision: str,
    accumulate: int = 1,
    clip: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Take one training step. The batch is computed in `accumulate` parts, one after the other.

    If `clip` is given, the gradient is clipped to this norm. Returns the mean loss and the norm of the gradient before
    clipping; without `clip`, the norm is None. Both are tensors on the device, which may not have computed them yet.
    """
    optimizer.zero_grad()
    parts = list(zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True))
    total = 0
    for number, part in enumerate(parts, start=1):
        with contextlib.nullcontext() if number == len(parts) else unsynchronised(loss):
            with autocast(device, precision):
                value = loss(*part) / accumulate
            value.backward()
        total = total + value.detach()
    norm = None
    if clip is not None:
        norm = nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
    optimizer.step()
    return total, norm


def optimizer_of(model: nn.Module, optim: DictConfig, compiled: bool = False) -> torch.optim.Optimizer:
    """Return the optimiser that `optim.impl` names, with the settings in `optim`, the part of the config that
    configs/optim fills.

    `fused` is `FusedAdaBelief`, `package` is AdaBelief of adabelief-pytorch, `adamw` is PyTorch's AdamW (Loshchilov and
    Hutter 2019, arXiv 1711.05101), and `muon` is `MuonWithAdamW`.

    Only the weights of linear layers and embeddings decay, not biases, norms and position weights.
    """
    decayed = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if id(p) in decayed], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if id(p) not in decayed], "weight_decay": 0.0},
    ]
    numbers = {"lr": optim.lr, "betas": tuple(optim.betas), "eps": optim.eps}
    if optim.impl == "adamw":
        return torch.optim.AdamW(groups, **numbers)
    if optim.impl == "muon":
        hidden = {id(m.weight) for m in model.blocks.modules() if isinstance(m, nn.Linear)}
        matrices = {"params": [p for p in parameters if id(p) in hidden], "weight_decay": optim.weight_decay}
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in hidden]
        return MuonWithAdamW(matrices, groups, **numbers)
    if optim.impl == "fused":
        return FusedAdaBelief(groups, **numbers, rectify=optim.rectify, compiled=compiled)
    with contextlib.redirect_stdout(io.StringIO()):  # the constructor prints its settings
        return AdaBelief(groups, **numbers, weight_decouple=True, rectify=optim.rectify, print_change_log=False)


class MuonWithAdamW(torch.optim.Optimizer):
    """PyTorch's Muon for the weights of the linear layers in the blocks, and its AdamW for all other parameters.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by an
    approximation of the nearest orthogonal matrix. Its step is scaled to the size of a step of AdamW (Liu et al. 2025,
    arXiv 2502.16982), so that one learning rate serves both.
    """

    def __init__(self, matrices: dict, others: list[dict], lr: float, betas: tuple[float, float], eps: float):
        muon = torch.optim.Muon([matrices], lr=lr, adjust_lr_fn="match_rms_adamw")
        self.parts = [muon, torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self.share()

    def share(self) -> None:
        """Make both parts use the groups and the state of this optimiser, which state_dict() returns."""
        self.parts[0].param_groups, self.parts[1].param_groups = self.param_groups[:1], self.param_groups[1:]
        for part in self.parts:
            part.state = self.state

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self.share()

    def step(self) -> None:
        for part in self.parts:
            part.step()


def learning_rate(step: int, steps: int, optim: DictConfig) -> float:
    """Return the learning rate of a step, counted from 0: a rise to lr in `warm_up` steps, then a cosine to min_lr.

    If min_lr is above lr, the rate stays at lr instead of falling.
    """
    if step < optim.warm_up:
        return optim.lr * (step + 1) / optim.warm_up
    progress = (step - optim.warm_up) / max(1, steps - 1 - optim.warm_up)
    last = min(optim.min_lr, optim.lr)
    return last + (optim.lr - last) * (1 + math.cos(math.pi * progress)) / 2


class FusedAdaBelief(torch.optim.Optimizer):
    """AdaBelief with decoupled weight decay (Zhuang et al. 2020, arXiv 2010.07468).

        m = b1 m + (1 - b1) g;   s = b2 s + (1 - b2) (g - m)^2 + eps
        p = p (1 - lr decay) - lr / (1 - b1^k) * m / (sqrt(s / (1 - b2^k)) + eps)     at step k

    `rectify` applies RAdam's rectification as adabelief-pytorch does: in the first steps, in which s comes from too few
    gradients, p = p (1 - lr decay) - lr / (1 - b1^k) m. Later steps are

        p = p (1 - lr decay) - lr / (1 - b1^k) * r m sqrt(1 - b2^k) / (sqrt(s) + eps)

    where r is RAdam's factor, which rises to 1. With torch.compile (`compiled`), a step makes one pass over memory
    instead of a dozen. Parameters without a gradient stay as they are. Each process updates its own
    part of a sharded parameter (a DTensor of FSDP2).
    """

    def __init__(
        self,
        params,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        rectify: bool,
        compiled: bool,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.rectify = rectify
        self.update = torch.compile(adabelief, dynamic=False) if compiled else adabelief

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p] |= {"exp_avg": torch.zeros_like(p), "exp_avg_var": torch.zeros_like(p)}
            group["step"] = group.get("step", 0) + 1
            # Numbers that change at every step are passed as a tensor. Floats would make torch compile at every step.
            numbers = torch.tensor(scalars(group, self.rectify), dtype=torch.float64)
            numbers = numbers.to(params[0].device, non_blocking=True)  # do not wait for the GPU
            moments = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_var")]
            lists = [list(map(local_part, tensors)) for tensors in (params, [p.grad for p in params], *moments)]
            self.update(*lists, numbers, *group["betas"], group["eps"])


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor


def scalars(group: dict, rectify: bool) -> list[float]:
    """Return [decay, step_size, a, b] of `adabelief`, which sets p to decay * p - step_size * m / (a * sqrt(s) + b)."""
    k, lr, eps, (beta1, beta2) = group["step"], group["lr"], group["eps"], group["betas"]
    decay, step_size = 1 - lr * group["weight_decay"], lr / (1 - beta1**k)
    if not rectify:
        return [decay, step_size, 1 / math.sqrt(1 - beta2**k), eps]
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * k * beta2**k / (1 - beta2**k)
    if length < 5:
        return [decay, step_size, 0.0, 1.0]
    share = (length - 4) / (longest - 4) * (length - 2) / length * longest / (longest - 2)
    return [decay, step_size * math.sqrt((1 - beta2**k) * share), 1.0, eps]


def adabelief(
    params: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    variances: list[Tensor],
    numbers: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    decay, step_size, a, b = numbers.to(params[0].dtype)
    for p, g, m, s in zip(params, grads, means, variances, strict=True):
        m.lerp_(g, 1 - beta1)
        residual = g - m
        s.mul_(beta2).addcmul_(residual, residual, value=1 - beta2).add_(eps)
        p.mul_(decay).sub_(m / s.sqrt().mul_(a).add_(b) * step_size)


def seed_step(cfg: DictConfig, step: int, rank: int) -> None:
    """Seed torch's random numbers for the next step. Dropout uses them, and a user's own attention may use them.

    The numbers depend on the seed, the step and the rank. A continued run therefore draws the same numbers as an
    uninterrupted one, and each process draws its own.
    """
    entropy = np.random.SeedSequence([cfg.seed, step, 1 + rank])
    torch.manual_seed(int(entropy.generate_state(1, np.uint64)[0]))
