"""A block: an attention, and a feed-forward or a second attention, each on a residual path."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.parts import check_choice
from attn.streaming import LayerState

PLACEMENTS = ("pre", "post", "rezero")


class ResidualPath(nn.Module):
    """The norm and the residual connection around a layer f, x [B, T, dim] -> [B, T, dim].

    - `pre`: x + f(LN(x)), and `post`: LN(x + f(x)); Xiong et al. 2020, arXiv 2002.04745.
    - `rezero`: x + a f(x) with a learned number a, 0 at initialisation; Bachlechner et al. 2020, arXiv 2003.04887.

    In training, `dropout` is the probability with which each element of f's output is set to zero; the others are
    divided by 1 - dropout (Srivastava et al. 2014, JMLR 15).

    Raises ValueError for another placement.
    """

    def __init__(self, dim: int, placement: str, dropout: float):
        super().__init__()
        check_choice("model.norm", placement, PLACEMENTS)
        self.placement, self.dropout = placement, dropout
        self.norm = None if placement == "rezero" else nn.LayerNorm(dim)
        self.a = nn.Parameter(torch.zeros(())) if placement == "rezero" else None

    def before(self, x: Tensor) -> Tensor:
        """Return the input of the layer."""
        return self.norm(x) if self.placement == "pre" else x

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the output of the path for its input x and the layer's output y."""
        y = F.dropout(y, self.dropout, self.training)
        if self.placement == "rezero":
            return x + self.a * y
        return self.norm(x + y) if self.placement == "post" else x + y


class Block(nn.Module):
    """Two layers, `attn` and `ffn`, each on its own residual path.

    A layer has forward(x, carry) -> (y, carry) and, for streaming, begin(batch) and step(x, state, carry).
    `carry` is what a layer passes to the next one; see `attn.base.Attention.forward`.
    """

    def __init__(
        self,
        dim: int,
        placement: str,
        dropout: float,
        attn: Callable[[], nn.Module],
        ffn: Callable[[], nn.Module],
    ):
        super().__init__()
        self.attn_path, self.attn = ResidualPath(dim, placement, dropout), attn()
        self.ffn_path, self.ffn = ResidualPath(dim, placement, dropout), ffn()

    def forward(self, x: Tensor, carry=None):
        for path, layer in ((self.attn_path, self.attn), (self.ffn_path, self.ffn)):
            y, carry = layer(path.before(x), carry)
            x = path.after(x, y)
        return x, carry

    def begin(self, batch: int) -> list[LayerState | None]:
        """Return the layers' states before the first position; None for a layer without a state."""
        return [layer.begin(batch) for layer in (self.attn, self.ffn)]

    def step(self, x: Tensor, states: list[LayerState | None], carry=None):
        """Return what `forward` returns at the next position, x [B, 1, dim] -> [B, 1, dim], and update the states.

        Call it in eval mode.
        """
        layers = ((self.attn_path, self.attn), (self.ffn_path, self.ffn))
        for (path, layer), state in zip(layers, states, strict=True):
            y, carry = layer.step(path.before(x), state, carry)
            x = path.after(x, y)
        return x, carry
