"""Feed-forward layers: forward(x, carry) -> (y, carry) with x, y [B, T, dim] (Shazeer 2020, arXiv 2002.05202).

`carry` is what a layer passes to the next one; see `attn.base.Attention.forward`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.parts import check_choice, token_shift
from attn.ranges import Size
from attn.streaming import LayerState

ACTIVATIONS = {
    "identity": lambda x: x,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation of this name. Raises ValueError if there is none."""
    check_choice("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


class FeedForward(nn.Module):
    """A layer that mixes channels. It streams without a state, unless a subclass has one. It passes `carry` on."""

    def begin(self, batch: int) -> LayerState | None:
        """Return the state before the first position of `batch` sequences."""
        return None

    def step(self, x: Tensor, state: LayerState | None, carry=None):
        """Return what `forward` returns, at the next position; x is [B, 1, dim]."""
        return self(x, carry)


class MLP(FeedForward):
    """y = O act(L x). If `hidden` is None, the layer has about as many parameters as a GLU of hidden size 3 dim."""

    def __init__(self, dim: Size, activation: str, hidden: Size | None):
        super().__init__()
        parameters = 9 * dim**2 + 6 * dim  # of such a GLU, without the output's biases
        size = round(parameters / (2 * dim + 1)) if hidden is None else hidden
        self.activation = activation_function(activation)
        self.L, self.O = nn.Linear(dim, size), nn.Linear(size, dim)

    def forward(self, x: Tensor, carry=None):
        return self.O(self.activation(self.L(x))), carry


class GLU(FeedForward):
    """y = O (act(G x) * (L x)). If `hidden` is None, it is 3 dim, as in source article A."""

    def __init__(self, dim: Size, activation: str, hidden: Size | None):
        super().__init__()
        size = 3 * dim if hidden is None else hidden
        self.activation = activation_function(activation)
        self.G, self.L, self.O = nn.Linear(dim, size), nn.Linear(dim, size), nn.Linear(size, dim)

    def forward(self, x: Tensor, carry=None):
        return self.O(self.activation(self.G(x)) * self.L(x)), carry


class ChannelMix(GLU):
    """y = sigmoid(R s) * O (act(G s) * (L s)), where s is the token shift of x (`attn.parts.token_shift`).

    The feed-forward of the source author's public code of August 2021: a GLU after a token shift, with the gate
    sigmoid(R s) on its output, where R is a linear layer. If `hidden` is None, it is 3 dim.
    """

    def __init__(self, dim: Size, activation: str, hidden: Size | None):
        super().__init__(dim, activation, hidden)
        self.R = nn.Linear(dim, dim)

    def forward(self, x: Tensor, carry=None):
        return self.gated(token_shift(x)), carry

    def gated(self, s: Tensor) -> Tensor:
        """Compute y from s."""
        return self.R(s).sigmoid() * super().forward(s)[0]

    def begin(self, batch: int) -> LayerState:
        return LayerState(0, self.R.weight.new_zeros(batch, 1, self.R.in_features // 2), None)

    def step(self, x: Tensor, state: LayerState, carry=None):
        return self.gated(state.token_shift(x)), carry
