"""Feed-forward layers, forward(x, carry) -> (y, carry), x and y [B, T, dim] (Shazeer 2020, arXiv 2002.05202)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.base import Stream
from attn.parts import token_shift

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


class FeedForward(nn.Module):
    """A layer that mixes channels; at one position after the other too, without a state unless it says otherwise."""

    def begin(self, batch: int) -> Stream | None:
        """The state of `step` before the first position of `batch` sequences."""
        return None

    def step(self, x: Tensor, stream: Stream | None, carry=None):
        """What `forward` gives at the next position, x [B, 1, dim] -> [B, 1, dim]."""
        return self(x, carry)


class MLP(FeedForward):
    """y = O act(L x). `hidden` is a number, or None: as many parameters as a GLU of 3 dim."""

    def __init__(self, dim: int, activation: str, hidden: int | None):
        super().__init__()
        size = hidden_size(hidden, dim, weights=2)
        self.activation = named(activation)
        self.L, self.O = nn.Linear(dim, size), nn.Linear(size, dim)

    def forward(self, x: Tensor, carry=None):
        return self.O(self.activation(self.L(x))), carry


class GLU(FeedForward):
    """y = O (act(G x) * (L x)). `hidden` is a number, or None: 3 dim, as in source article A."""

    def __init__(self, dim: int, activation: str, hidden: int | None):
        super().__init__()
        size = hidden_size(hidden, dim, weights=3)
        self.activation = named(activation)
        self.G, self.L, self.O = nn.Linear(dim, size), nn.Linear(dim, size), nn.Linear(size, dim)

    def forward(self, x: Tensor, carry=None):
        return self.O(self.activation(self.G(x)) * self.L(x)), carry


class ChannelMix(GLU):
    """y = sigmoid(R s) * O (act(G s) * (L s)), s the token shift of x (`attn.parts.token_shift`).

    A GLU behind a token shift, whose output has a gate: the feed-forward of the source author's public code of
    August 2021. `hidden` is a number, or None: 3 dim, as there; R, linear(dim, dim), comes on top.
    """

    def __init__(self, dim: int, activation: str, hidden: int | None):
        super().__init__(dim, activation, hidden)
        self.R = nn.Linear(dim, dim)

    def forward(self, x: Tensor, carry=None):
        return self.gated(token_shift(x)), carry

    def gated(self, s: Tensor) -> Tensor:
        return self.R(s).sigmoid() * super().forward(s)[0]

    def begin(self, batch: int) -> Stream:
        return Stream(0, self.R.weight.new_zeros(batch, 1, self.R.in_features // 2), None)

    def step(self, x: Tensor, stream: Stream, carry=None):
        return self.gated(stream.shift(x)), carry


def hidden_size(hidden: int | None, dim: int, weights: int) -> int:
    """The hidden size itself, or what gives `weights` matrices the parameters of a GLU of hidden size 3 dim."""
    if hidden is None:
        glu = 3 * (3 * dim * dim) + 2 * (3 * dim)  # weights, and the biases that grow with the hidden size
        return round(glu / (weights * dim + weights - 1))
    return hidden
