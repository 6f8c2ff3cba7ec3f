"""What a mixer is: forward(x, carry) -> (y, carry), step for one position, and terms(x), its unified form."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn import parts
from attn.streaming import Past
from attn.unified import Terms, unified


@dataclass
class Stream:
    """What a layer that streams keeps from position to position."""

    position: int  # of the next input
    before: Tensor  # the input before it, the half that the token shift moves, [B, 1, dim // 2]
    past: object  # what the variant keeps

    def shift(self, x: Tensor) -> Tensor:
        """The token shift of the next input, x [B, 1, dim] -> [B, 1, dim]; keeps what the one after it needs."""
        half = self.before.shape[-1]
        before, self.before = self.before, x[..., :half]
        return torch.cat([before, x[..., half:]], dim=-1)


class Attention(nn.Module):
    """A causal mixer of positions, [B, T, dim] -> [B, T, dim].

    A variant gives `terms(x)`, its equation, and `mix(x)`, the same values fast. Both take the
    layer's input after the token shift and stand for ATT [B, T, width]; the output projection
    back to dim is done here, y = out(ATT) = W ATT + b. With `gamma_scales_bias`, y[t] = W ATT[t] + gamma[t] b:
    since ATT has the factor gamma[t] already, this is gamma[t] times the whole projection.

    `carry` is whatever a layer hands to the next one (RealFormer's scores); most pass it on.

    `begin(batch)` and `step(x, stream, carry)` give the outputs of `forward` one position at a time.
    A variant gives `begin_mix()`, what it keeps of the past, and `mix_step(x, past, t)`, ATT at
    position t; without them all inputs are kept and mixed anew, right but slow. A variant with a
    forward of its own, for what it carries, needs a step of its own.

    Errors: ValueError when heads do not divide width, when impl is not one of `impls`, or when
    a sequence is longer than something that knows absolute positions allows.
    """

    impls = ("reference", "torch")

    def __init__(
        self,
        dim: int,
        heads: int,
        context: int,
        width: int,
        token_shift: bool,
        gamma: bool,
        impl: str,
        gamma_scales_bias: bool = False,
    ):
        super().__init__()
        if width % heads:
            raise ValueError(f"heads must divide the width: {heads} heads, width {width}")
        if impl not in self.impls:
            raise ValueError(f"impl must be one of {', '.join(self.impls)}: got {impl}")
        if gamma_scales_bias and not gamma:
            raise ValueError("gamma_scales_bias=true needs gamma=true")
        self.dim, self.heads, self.token_shift, self.impl = dim, heads, token_shift, impl
        self.gamma, self.gamma_scales_bias = nn.Parameter(torch.ones(context)) if gamma else None, gamma_scales_bias
        self.out = nn.Linear(width, dim)

    def terms(self, x: Tensor) -> Terms:
        raise NotImplementedError(f"{type(self).__name__} gives no terms")

    def mix(self, x: Tensor) -> Tensor:
        return unified(self.terms(x))  # right but slow: a variant's own mix is the fast path

    def forward(self, x: Tensor, carry=None):
        x = self.shifted(x)
        y = unified(self.terms(x)) if self.impl == "reference" else self.mix(x)
        return self.project(y), carry

    def way(self, T: int) -> str:
        """How impl=torch computes T positions, for the log, where a measured rule of attn/kernels chooses; else ""."""
        time = getattr(self, "time", None)
        return time.way(T) if hasattr(time, "way") else ""

    def shifted(self, x: Tensor) -> Tensor:
        return parts.token_shift(x) if self.token_shift else x

    @property
    def horizon(self) -> int | None:
        """How many positions the layer takes; None: any number."""
        own = None if self.gamma is None else len(self.gamma)
        return shortest([own, *(getattr(part, "horizon", None) for part in self.children())])

    def begin(self, batch: int) -> Stream:
        """The state of `step` before the first position of `batch` sequences."""
        return Stream(0, self.out.weight.new_zeros(batch, 1, self.dim // 2), self.begin_mix())

    def step(self, x: Tensor, stream: Stream, carry=None):
        """What `forward` gives at the next position, x [B, 1, dim] -> [B, 1, dim]; moves the stream on."""
        x, t = self.arrive(x, stream)
        return self.project(self.mix_step(x, stream.past, t), t), carry

    def arrive(self, x: Tensor, stream: Stream) -> tuple[Tensor, int]:
        """The next input after the token shift, and its position."""
        t, horizon = stream.position, self.horizon
        if horizon is not None and t >= horizon:
            raise ValueError(f"the attention has {horizon} positions and no rule beyond them: got {t + 1}")
        stream.position += 1
        return stream.shift(x) if self.token_shift else x, t

    def begin_mix(self) -> object:
        return Past()

    def mix_step(self, x: Tensor, past: object, t: int) -> Tensor:
        """ATT at position t, x [B, 1, dim] -> [B, 1, width]; moves the past on."""
        (x,) = past.add(x)
        return self.mix(x)[:, -1:]

    def project(self, y: Tensor, start: int = 0) -> Tensor:
        """The output projection of ATT at the positions from `start` on, [B, T, width] -> [B, T, dim]."""
        if not self.gamma_scales_bias:
            return self.out(y)
        gamma = self.time_gate(start + y.shape[1])[start:, None]
        return F.linear(y, self.out.weight) + gamma * self.out.bias

    def time_gate(self, T: int) -> Tensor | None:
        """gamma [T], or None where it is switched off."""
        if self.gamma is None:
            return None
        if T > len(self.gamma):
            raise ValueError(f"gamma has {len(self.gamma)} positions and no rule beyond them: got {T}")
        return self.gamma[:T]

    def receive(self, y: Tensor, R: Tensor | None = None, start: int = 0) -> Tensor:
        """gamma[t] * R[t,c] * y[t,c] at the positions from `start` on."""
        if R is not None:
            y = R * y
        gamma = self.time_gate(start + y.shape[1])
        return y if gamma is None else y * gamma[start:, None]


def shortest(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
