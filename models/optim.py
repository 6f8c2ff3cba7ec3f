"""The optimiser over two parameter groups, and its learning rate."""

import contextlib
import io
import math

import torch
from adabelief_pytorch import AdaBelief
from omegaconf import DictConfig
from torch import nn

from models.adabelief import FusedAdaBelief


def optimizer_of(model: nn.Module, optim: DictConfig, compiled: bool = False) -> torch.optim.Optimizer:
    """The optimiser that configs/optim describes, by its `impl`.

    `fused` is our AdaBelief, `package` adabelief-pytorch's, `adamw` PyTorch's AdamW (Loshchilov and Hutter 2019,
    arXiv 1711.05101).

    Only the weights of linear layers and embeddings decay: no bias, no norm, no time factor.
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
    if optim.impl == "fused":
        return FusedAdaBelief(groups, **numbers, weight_decay=0.0, rectify=optim.rectify, compiled=compiled)
    with contextlib.redirect_stdout(io.StringIO()):  # the constructor prints its settings
        return AdaBelief(groups, **numbers, weight_decouple=True, rectify=optim.rectify, print_change_log=False)


def learning_rate(step: int, steps: int, optim: DictConfig) -> float:
    """The learning rate of 0-based `step`: up to lr in `warm_up` steps, then by a cosine down to min_lr."""
    if step < optim.warm_up:
        return optim.lr * (step + 1) / optim.warm_up
    progress = (step - optim.warm_up) / max(1, steps - 1 - optim.warm_up)
    return optim.min_lr + (optim.lr - optim.min_lr) * (1 + math.cos(math.pi * progress)) / 2
