"""The base class of all attentions."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn import parts
from attn.position_weights import PositionWeight
from attn.streaming import Streaming
from attn.unified import Terms, unified


class Attention(Streaming, ABC):
    """A causal layer that mixes positions, [B, T, dim] -> [B, T, dim].

    A variant is a subclass. It must define `terms(x)`, its equation, and may define `mix(x)`, which computes the same
    values fast. Both take the layer's input after the token shift and define ATT [B, T, width]. This class then applies
    the output projection, y = out(ATT). `Streaming` computes the same outputs one position at a time.

    Args:
        dim: width of input and output.
        heads: number of heads, which must divide `width`.
        width: width of ATT.
        token_shift: whether the first half of the input channels is taken from the previous position.
        impl: `reference` computes ATT from `terms` in float64, `torch` calls `mix`; some variants also have `triton`.
            Without autocast, `reference` always has second derivatives. With autocast, or with another value of
            `impl`, some second derivatives do not exist, and computing one of these raises a RuntimeError.
        gamma: number of positions of a learned factor gamma[t] of ATT, and so the largest number of positions that the
            layer accepts. With 0, there is no gamma.
        gamma_scales_bias: whether gamma also multiplies the bias b of the output projection,
            y[t] = out.weight ATT[t] + gamma[t] b. As ATT[t] contains gamma[t], gamma then multiplies all of y[t].

    Raises ValueError if `heads` does not divide `width`, if `impl` is unknown, if gamma_scales_bias is set without
    gamma, or for a sequence of length 0. For a sequence longer than `max_length`, gamma and w raise ValueError; a
    variant with other such parameters must do so itself.
    """

    impls = ("reference", "torch")

    def __init__(
        self,
        dim: int,
        heads: int,
        width: int,
        token_shift: bool,
        impl: str,
        gamma: int = 0,
        gamma_scales_bias: bool = False,
    ):
        super().__init__()
        if width % heads:
            raise ValueError(f"heads must divide the width: {heads} heads, width {width}")
        parts.check_choice("impl", impl, self.impls)
        if gamma_scales_bias and not gamma:
            raise ValueError("gamma_scales_bias=true needs gamma=true")
        self.dim, self.heads, self.token_shift, self.impl = dim, heads, token_shift, impl
        self.gamma, self.gamma_scales_bias = nn.Parameter(torch.ones(gamma)) if gamma else None, gamma_scales_bias
        self.out = nn.Linear(width, dim)
        self.position_weight: PositionWeight | None = None  # w, set by the variants that have one
        self.shift: nn.Module | None = None  # a learned token shift (attn/shifts.py), which variants may set

    @abstractmethod
    def terms(self, x: Tensor) -> Terms:
        """Return the terms of the unified form for x [B, T, dim], the input after the token shift."""

    def reference(self, x: Tensor) -> Tensor:
        """Compute ATT from `terms` in float64. Variants override this if something follows the sum, such as a norm."""
        return unified(self.terms(x))

    def mix(self, x: Tensor) -> Tensor:
        """Compute ATT, x [B, T, dim] -> [B, T, width]. Variants override this slow default.

        It switches autocast off, because bf16 has too few digits for exponents and scores.
        """
        with torch.autocast(x.device.type, enabled=False):
            return self.reference(x)

    def forward(self, x: Tensor, carry=None):
        """Return the output y [B, T, dim] and the carry, which a layer passes to the next one.

        A variant that does not use the carry returns it unchanged.
        """
        x = self.shift_tokens(x)
        y = self.reference(x) if self.impl == "reference" else self.mix(x)
        return self.project(y), carry

    def algorithm(self, T: int) -> str:
        """Return the name of the algorithm that impl=torch uses for T positions, for logging; "" if it has no name."""
        return "" if self.position_weight is None else self.position_weight.algorithm(T)

    @property
    def max_length(self) -> int | None:
        """The largest number of positions that the layer accepts; None means any number."""
        gamma = None if self.gamma is None else len(self.gamma)
        return smallest([gamma, None if self.position_weight is None else self.position_weight.max_length])

    def shift_tokens(self, x: Tensor) -> Tensor:
        """Apply the token shift if it is switched on. Raises ValueError if x has no positions."""
        if x.shape[1] == 0:
            raise ValueError(f"an attention needs at least one position: got an input of the shape {list(x.shape)}")
        if self.shift is not None:
            return self.shift(F.pad(x, (0, 0, self.shift.past, 0)))
        return parts.token_shift(x) if self.token_shift else x

    def gamma_values(self, T: int, start: int = 0) -> Tensor | None:
        """Return gamma at the positions from `start` to T-1, [T - start], or None without gamma."""
        if self.gamma is None:
            return None
        if T > len(self.gamma):
            raise ValueError(f"gamma is defined for {len(self.gamma)} positions: got {T}")
        return self.gamma[start:T]

    def apply_gate(self, y: Tensor, R: Tensor | None = None, start: int = 0) -> Tensor:
        """Compute gamma[t] * R[t,c] * y[t,c]. y and R [B, T, width] begin at position `start`; R may be None for 1."""
        if R is not None:
            y = R * y
        gamma = self.gamma_values(start + y.shape[1], start)
        return y if gamma is None else y * gamma[:, None]

    def project(self, y: Tensor, start: int = 0) -> Tensor:
        """Apply the output projection to ATT at the positions from `start` on, [B, T, width] -> [B, T, dim]."""
        if not self.gamma_scales_bias:
            return self.out(y)
        gamma = self.gamma_values(start + y.shape[1], start)[:, None]
        return F.linear(y, self.out.weight) + gamma * self.out.bias


def smallest(limits: Iterable[int | None]) -> int | None:
    """Return the smallest of the limits that are not None, or None if all are."""
    return min((limit for limit in limits if limit is not None), default=None)
