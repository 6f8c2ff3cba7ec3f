"""One block: a mixer of positions and a mixer of channels, each on a residual path."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attn.base import Stream

PLACEMENTS = ("pre", "post", "rezero")


class ResidualPath(nn.Module):
    """Where norm and residual stand around a layer f: x + f(LN(x)), LN(x + f(x)) or x + a f(x).

    `pre` and `post` as in Xiong et al. 2020, arXiv 2002.04745; `rezero`, where a is one number
    that starts at 0, as in Bachlechner et al. 2020, arXiv 2003.04887.
    """

    def __init__(self, dim: int, placement: str):
        super().__init__()
        self.placement = placement
        self.norm = None if placement == "rezero" else nn.LayerNorm(dim)
        self.a = nn.Parameter(torch.zeros(())) if placement == "rezero" else None

    def before(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.placement == "pre" else x

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        if self.placement == "rezero":
            return x + self.a * y
        return self.norm(x + y) if self.placement == "post" else x + y


class Block(nn.Module):
    """Two slots, `attn` and `ffn`, on a residual path of its own each.

    A slot holds forward(x, carry) -> (y, carry), and for streaming begin(batch) and step(x, stream, carry).
    """

    def __init__(self, dim: int, placement: str, attn: Callable[[], nn.Module], ffn: Callable[[], nn.Module]):
        super().__init__()
        self.attn_path, self.attn = ResidualPath(dim, placement), attn()
        self.ffn_path, self.ffn = ResidualPath(dim, placement), ffn()

    def forward(self, x: Tensor, carry=None):
        for path, layer in ((self.attn_path, self.attn), (self.ffn_path, self.ffn)):
            y, carry = layer(path.before(x), carry)
            x = path.after(x, y)
        return x, carry

    def begin(self, batch: int) -> list[Stream | None]:
        """The states of `step`, one for each slot; None for a layer that keeps nothing."""
        return [layer.begin(batch) for layer in (self.attn, self.ffn)]

    def step(self, x: Tensor, streams: list[Stream | None], carry=None):
        """`forward` at the next position, x [B, 1, dim]; moves the streams on."""
        slots = ((self.attn_path, self.attn), (self.ffn_path, self.ffn))
        for (path, layer), stream in zip(slots, streams, strict=True):
            y, carry = layer.step(path.before(x), stream, carry)
            x = path.after(x, y)
        return x, carry
