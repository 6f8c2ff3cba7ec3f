"""Feed-forward layers, forward(x, carry) -> (y, carry), x and y [B, T, dim] (Shazeer 2020, arXiv 2002.05202)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {
    "identity": lambda x: x,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}


def named(activation: str) -> Callable[[Tensor], Tensor]:
    """The activation of a name. Raises ValueError for one that is not there."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}: got {activation}")
    return ACTIVATIONS[activation]


class MLP(nn.Module):
    """y = O act(L x). `hidden` is a number, or None: as many parameters as a GLU of 3 dim."""

    def __init__(self, dim: int, activation: str, hidden: int | None):
        super().__init__()
        size = hidden_size(hidden, dim, weights=2)
        self.activation = named(activation)
        self.L, self.O = nn.Linear(dim, size), nn.Linear(size, dim)

    def forward(self, x: Tensor, carry=None):
        return self.O(self.activation(self.L(x))), carry


class GLU(nn.Module):
    """y = O (act(G x) * (L x)). `hidden` is a number, or None: 3 dim, as in source article A."""

    def __init__(self, dim: int, activation: str, hidden: int | None):
        super().__init__()
        size = hidden_size(hidden, dim, weights=3)
        self.activation = named(activation)
        self.G, self.L, self.O = nn.Linear(dim, size), nn.Linear(dim, size), nn.Linear(size, dim)

    def forward(self, x: Tensor, carry=None):
        return self.O(self.activation(self.G(x)) * self.L(x)), carry


def hidden_size(hidden: int | None, dim: int, weights: int) -> int:
    """The hidden size itself, or what gives `weights` matrices the parameters of a GLU of hidden size 3 dim."""
    if hidden is None:
        glu = 3 * (3 * dim * dim) + 2 * (3 * dim)  # weights, and the biases that grow with the hidden size
        return round(glu / (weights * dim + weights - 1))
    return hidden
