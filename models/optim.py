"""AdaBelief over two parameter groups, and the cosine decay of its learning rate."""

import contextlib
import io
import math

import torch
from adabelief_pytorch import AdaBelief
from torch import nn


def adabelief(
    model: nn.Module, lr: float, betas: list[float], eps: float, weight_decay: float, rectify: bool
) -> torch.optim.Optimizer:
    """adabelief-pytorch's AdaBelief with decoupled weight decay (Zhuang et al. 2020, arXiv 2010.07468).

    Only the weights of linear layers and embeddings decay: no bias, no norm, no time factor.
    """
    decayed = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if id(p) in decayed], "weight_decay": weight_decay},
        {"params": [p for p in parameters if id(p) not in decayed], "weight_decay": 0.0},
    ]
    with contextlib.redirect_stdout(io.StringIO()):  # the constructor prints its settings
        return AdaBelief(
            groups,
            lr=lr,
            betas=tuple(betas),
            eps=eps,
            weight_decouple=True,
            rectify=rectify,
            print_change_log=False,
        )


def cosine(step: int, steps: int, lr: float, min_lr: float) -> float:
    """The learning rate of 0-based `step`: lr at the first, min_lr at the last of `steps`."""
    progress = step / max(1, steps - 1)
    return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2
