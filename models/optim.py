"""AdaBelief over two parameter groups, and the cosine decay of its learning rate."""

import contextlib
import io
import math

import torch
from adabelief_pytorch import AdaBelief
from omegaconf import DictConfig
from torch import nn

from models.adabelief import FusedAdaBelief


def adabelief(model: nn.Module, optim: DictConfig, compiled: bool = False) -> torch.optim.Optimizer:
    """The AdaBelief that configs/optim describes: ours, `fused`, or adabelief-pytorch's, `package`.

    Only the weights of linear layers and embeddings decay: no bias, no norm, no time factor.
    """
    decayed = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if id(p) in decayed], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if id(p) not in decayed], "weight_decay": 0.0},
    ]
    numbers = {"lr": optim.lr, "betas": tuple(optim.betas), "eps": optim.eps}
    if optim.impl == "fused":
        return FusedAdaBelief(groups, **numbers, weight_decay=0.0, rectify=optim.rectify, compiled=compiled)
    with contextlib.redirect_stdout(io.StringIO()):  # the constructor prints its settings
        return AdaBelief(groups, **numbers, weight_decouple=True, rectify=optim.rectify, print_change_log=False)


def cosine(step: int, steps: int, lr: float, min_lr: float) -> float:
    """The learning rate of 0-based `step`: lr at the first, min_lr at the last of `steps`."""
    progress = step / max(1, steps - 1)
    return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2
