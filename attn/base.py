"""What a mixer is: forward(x, carry) -> (y, carry), and terms(x), its reading in the unified form."""

import torch
from torch import Tensor, nn

from attn import parts
from attn.unified import Terms, unified


class Attention(nn.Module):
    """A causal mixer of positions, [B, T, dim] -> [B, T, dim].

    A variant gives `terms(x)`, its equation, and `mix(x)`, the same values fast. Both take the
    layer's input after the token shift and stand for ATT [B, T, width]; the output projection
    back to dim is done here.

    `carry` is whatever a layer hands to the next one (RealFormer's scores); most pass it on.

    Errors: ValueError when heads do not divide width, when impl is not one of `impls`, or when
    a sequence is longer than something that knows absolute positions allows.
    """

    impls = ("reference", "torch")

    def __init__(self, dim: int, heads: int, context: int, width: int, token_shift: bool, gamma: bool, impl: str):
        super().__init__()
        if width % heads:
            raise ValueError(f"heads must divide the width: {heads} heads, width {width}")
        if impl not in self.impls:
            raise ValueError(f"impl must be one of {', '.join(self.impls)}: got {impl}")
        self.heads, self.token_shift, self.impl = heads, token_shift, impl
        self.gamma = nn.Parameter(torch.ones(context)) if gamma else None
        self.out = nn.Linear(width, dim)

    def terms(self, x: Tensor) -> Terms:
        raise NotImplementedError(f"{type(self).__name__} gives no terms")

    def mix(self, x: Tensor) -> Tensor:
        return unified(self.terms(x))  # right but slow: a variant's own mix is the fast path

    def forward(self, x: Tensor, carry=None):
        x = self.shifted(x)
        y = unified(self.terms(x)) if self.impl == "reference" else self.mix(x)
        return self.out(y), carry

    def shifted(self, x: Tensor) -> Tensor:
        return parts.token_shift(x) if self.token_shift else x

    def time_gate(self, T: int) -> Tensor | None:
        """gamma [T], or None where it is switched off."""
        if self.gamma is None:
            return None
        if T > len(self.gamma):
            raise ValueError(f"gamma has {len(self.gamma)} positions and no rule beyond them: got {T}")
        return self.gamma[:T]

    def receive(self, y: Tensor, R: Tensor | None = None) -> Tensor:
        """gamma[t] * R[t,c] * y[t,c]."""
        if R is not None:
            y = R * y
        gamma = self.time_gate(y.shape[1])
        return y if gamma is None else y * gamma[:, None]
