"""What variants share: token shift, heads, masks, rotary positions, logit scales."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.kernels.products import at_least_float32, float32_linear


def token_shift(x: Tensor) -> Tensor:
    """Take the first half of the channels from t-1 (zeros at t = 0), the rest from t.

    x [B, T, C] -> [B, T, C]. Source article A ("time-mixing").
    """
    half = x.shape[-1] // 2
    return torch.cat([F.pad(x[..., :half], (0, 0, 1, -1)), x[..., half:]], dim=-1)


def exponent(x: Tensor, layer: nn.Linear, bias: Tensor | None = None) -> Tensor:
    """layer(x) for an exponent, in float32 under autocast: exp(20) would be off by 6% with the 8 bits of bf16.

    `bias` stands for layer.bias. Give layer.bias.detach() where exp(bias) cancels in a ratio: its gradient would be
    nothing but rounding errors, which an adaptive optimiser scales up to full steps.
    """
    return float32_linear(x, layer.weight, layer.bias if bias is None else bias)


def key_offset(b: Tensor, turned: int) -> Tensor:
    """b [..., D], added to the K of a softmax, with a gradient in the `turned` dims, those of rotary positions, alone.

    In the others it adds the same to the logits of all u, which cancels: see `exponent`.
    """
    return torch.cat([b[..., :turned], b[..., turned:].detach()], dim=-1) if turned else b.detach()


def silu(x: Tensor) -> Tensor:
    """silu, not rounded to bf16 once more where autocast has rounded x."""
    return F.silu(at_least_float32(x))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, H*D] -> [B, H, T, D]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H*D]."""
    return x.transpose(1, 2).flatten(2)


def per_channel(w: Tensor, width: int) -> Tensor:
    """Give each channel its head's weights: [..., H, T, T] -> [..., T, T, width]."""
    return w.movedim(-3, -1).repeat_interleave(width // w.shape[-3], dim=-1)


def spread(a: Tensor, width: int) -> Tensor:
    """Give each channel its head's values: a [H, T] -> [T, width]."""
    return a.T.repeat_interleave(width // len(a), dim=-1)


def causal_mask(T: int, device, window: int | None = None, t: int = 0) -> Tensor:
    """The rows from t on of [T, T], True where u <= t and, with a `window`, t-u < window."""
    mask = torch.ones(T - t, T, dtype=torch.bool, device=device).tril(t)
    return mask if window is None else mask.triu(t + 1 - window)


def dense_w(time: nn.Module | None, T: int, like: Tensor, t: int = 0) -> Tensor:
    """The matrix w of a weighting, [H or 1, T, T], or its rows from t on; 1 for u <= t without `time`."""
    return causal_mask(T, like.device, t=t).to(like.dtype)[None] if time is None else time(T, t)


def over_largest(S: Tensor, window: int | None = None) -> Tensor:
    """exp(S) for u <= t, in the `window`, over the largest of its row; 0 elsewhere. S [..., T, T], or its last rows."""
    n, T = S.shape[-2:]
    S = S.masked_fill(~causal_mask(T, S.device, window, T - n), -torch.inf)
    return (S - S.detach().amax(-1, keepdim=True)).exp()


def causal_softmax(S: Tensor, time: nn.Module | None, w_below: bool = True) -> Tensor:
    """w[h,t,u] exp(S[h,t,u]) over its sum over u <= t; S [B, H, T, T], or its last rows; w = 1 without `time`.

    Not `w_below`: w is left out of that sum.
    """
    n, T = S.shape[-2:]
    if not w_below:
        return dense_w(time, T, S, T - n) * causal_softmax(S, None)
    if time is not None and not time.positive:
        W = time.relative(T, T - n) * over_largest(S, time.window)
        return W / W.sum(-1, keepdim=True)
    if time is not None:
        S = S + time.log_relative(T, T - n)
    if n == 1:  # all of it is the past
        return S.softmax(-1)
    return S.masked_fill(~causal_mask(T, S.device, t=T - n), -torch.inf).softmax(-1)


def rotary(x: Tensor, dims: int, base: float = 10_000.0, start: int = 0) -> Tensor:
    """Rotate the first `dims` of each head at position t by t * base^(-2i/dims), pairing i with i + dims/2.

    x [B, H, T, D] -> same shape, at any T, in float32 or float64; its first position is `start`.
    Su et al. 2021, arXiv 2104.09864.
    """
    if not dims:
        return x
    x = at_least_float32(x)  # cos and sin in bf16 would move far positions
    cos, sin = turns(start, start + x.shape[-2], dims, base, x.dtype, x.device)
    a, b, rest = x.split([dims // 2, dims // 2, x.shape[-1] - dims], dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)


@torch.compiler.assume_constant_result  # else it is computed within the rotation, once for each head and sequence
def turns(start: int, end: int, dims: int, base: float, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """cos and sin of t * base^(-2i/dims), [end - start, dims/2] each.

    Angles are float64: in float32 those of a text of millions of characters would be wrong.
    """
    position = torch.arange(start, end, dtype=torch.float64, device=device)
    frequency = base ** (-torch.arange(0, dims, 2, dtype=torch.float64, device=device) / dims)
    angle = torch.outer(position, frequency)
    return [angle.cos().to(dtype), angle.sin().to(dtype)]


def rotary_dims(share: float, size: int) -> int:
    """How many of `size` dims a share of 0 to 1 turns. Raises ValueError for an odd number or another share."""
    if not 0 <= share <= 1:
        raise ValueError(f"rotary is the share of dims to turn, 0 to 1: got {share}")
    if int(share * size) % 2:
        raise ValueError(f"rotary positions turn pairs of dims: {int(share * size)} is odd")
    return int(share * size)


def logit_scale(kind: str, size: int, context: int, T: int, like: Tensor, start: int = 0) -> Tensor | float:
    """What q . k is multiplied by: a number, or one for each of T positions from `start` on, [T, 1].

    `sqrt`: 1 / sqrt(size). `log_n`: log(n) / log(context) / sqrt(size), where n = t+1 positions are
    visible at t, so that attention keeps its entropy at lengths it was not trained at, and is
    as sharp as with `sqrt` at the context's end (source article C's kappa log(n) / size).
    """
    if kind == "sqrt":
        return size**-0.5
    n = torch.arange(start + 1, start + T + 1, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    return (n.log() / math.log(context) * size**-0.5)[:, None]


def check_scale(kind: str, context: int) -> None:
    """Raise ValueError for a scale that `logit_scale` does not know."""
    if kind not in ("sqrt", "log_n"):
        raise ValueError(f"scale must be sqrt or log_n: got {kind}")
    if kind == "log_n" and context < 2:
        raise ValueError("scale=log_n needs a context of 2 or more")


class ScaleOffset(nn.Module):
    """`views` of one z, each with its own scale and offset per dim: z [..., D] -> views x [..., D].

    Hua et al. 2022, arXiv 2202.10447.
    """

    def __init__(self, dim: int, views: int):
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.ones(views, dim)), nn.Parameter(torch.zeros(views, dim))

    def forward(self, z: Tensor, offset: Tensor | None = None) -> tuple[Tensor, ...]:
        """`offset` [views, D] stands for self.offset."""
        return (z[..., None, :] * self.scale + (self.offset if offset is None else offset)).unbind(-2)
