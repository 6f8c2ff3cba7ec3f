"""Functions that several attentions share: token shift, heads, causal mask, rotary embeddings, scales and phi."""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.kernels.compiler import constant_result, not_compiled
from attn.kernels.products import at_least_float32, float32_product


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError if the option `name` has a value that is not one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}: got {value}")


def token_shift(x: Tensor) -> Tensor:
    """Take the first half of the channels from position t-1 (zeros at t = 0) and the rest from t.

    x [B, T, C] -> [B, T, C]. Source article A ("time-mixing").
    """
    half = x.shape[-1] // 2
    return torch.cat([F.pad(x[..., :half], (0, 0, 1, -1)), x[..., half:]], dim=-1)


def exponent_linear(x: Tensor, layer: nn.Linear, bias: Tensor | None = None) -> Tensor:
    """Compute layer(x) in float32 under autocast, because the result goes into an exponent.

    bf16 has 8 bits of precision. If a number near 20 is rounded to it, exp of that number changes by up to 6%.

    `bias` replaces layer.bias. Pass layer.bias.detach() if exp(bias) cancels in a ratio. The gradient of such a bias
    consists of rounding errors, which an adaptive optimiser would scale up to full steps.
    """
    bias = layer.bias if bias is None else bias
    if not torch.is_autocast_enabled(x.device.type):
        return F.linear(x, layer.weight, bias)
    y = float32_product(x.flatten(0, -2), layer.weight.T).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


def stop_cancelling_gradient(bias: Tensor, rotary_dims: int) -> Tensor:
    """Stop the gradient of the key bias in the dimensions where the bias cancels in the softmax, [..., D] -> [..., D].

    Without rotary embeddings, the bias adds the same number Q_t . bias to all scores of a position t, which cancels.
    Only the first `rotary_dims` dimensions of the bias change the softmax and keep their gradient.
    """
    if not rotary_dims:
        return bias.detach()
    return torch.cat([bias[..., :rotary_dims], bias[..., rotary_dims:].detach()], dim=-1)


def silu(x: Tensor) -> Tensor:
    """Compute SiLU in float32 or float64, so that its result is not rounded to bf16 under autocast."""
    return F.silu(at_least_float32(x))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Split the channels into heads, [B, T, H*D] -> [B, H, T, D]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Concatenate the channels of all heads, [B, H, T, D] -> [B, T, H*D]."""
    return x.transpose(1, 2).flatten(2)


def per_channel(w: Tensor, width: int) -> Tensor:
    """Repeat the weights of each head for its channels: [..., H, T, T] -> [..., T, T, width]."""
    return w.movedim(-3, -1).repeat_interleave(width // w.shape[-3], dim=-1)


def heads_to_channels(a: Tensor, width: int) -> Tensor:
    """Repeat the values of each head for its channels: [H, T] -> [T, width]."""
    return a.T.repeat_interleave(width // len(a), dim=-1)


def causal_mask(T: int, device, window: int | None = None, start: int = 0) -> Tensor:
    """Return the mask [T - start, T] that is True where u <= t and, if there is a `window`, t-u < window.

    Its rows are the positions t from `start` to T-1.
    """
    mask = torch.ones(T - start, T, dtype=torch.bool, device=device).tril(start)
    return mask if window is None else mask.triu(start + 1 - window)


def apply_rotary(x: Tensor, dims: int, start: int = 0) -> Tensor:
    """Apply rotary embeddings to the first `dims` dimensions of each head; dimension i is paired with i + dims/2.

    x [..., T, D] -> [..., T, D]; the T positions begin at `start`. The angle of pair i at position t is
    t * 10000^(-2i/dims). The result is float32 or float64, unless `dims` is 0. Su et al. 2021, arXiv 2104.09864, pair
    neighbouring dimensions instead, which is the same up to the order of the dimensions.
    """
    if not dims:
        return x
    x = at_least_float32(x)  # in bf16, cos and sin would be too coarse at any position but 0
    cos, sin = rotary_table(start, start + x.shape[-2], dims, x.dtype, x.device)
    a, b, rest = x.split([dims // 2, dims // 2, x.shape[-1] - dims], dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)


@constant_result  # otherwise compiled code computes the table again for each head and sequence
def rotary_table(start: int, end: int, dims: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return cos and sin of the rotary angles at positions `start` to `end` - 1, each [end - start, dims/2].

    The angles are computed in float64, because float32 is too coarse for texts of millions of characters.
    """
    position = torch.arange(start, end, dtype=torch.float64, device=device)
    frequency = 10_000.0 ** (-torch.arange(0, dims, 2, dtype=torch.float64, device=device) / dims)
    angle = torch.outer(position, frequency)
    return [angle.cos().to(dtype), angle.sin().to(dtype)]


def rotary_dims(fraction: float, size: int) -> int:
    """Return how many of `size` dimensions get rotary embeddings: fraction * size, rounded down.

    Raises ValueError if `fraction` is not between 0 and 1, or if the result would be odd.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"rotary is a fraction of the dimensions, from 0 to 1: got {fraction}")
    dims = int(fraction * size + 1e-6)  # 0.58 * 50 is 28.999... in floating point
    if dims % 2:
        raise ValueError(
            f"rotary must select an even number of dimensions: {fraction} times {size} selects {dims}; "
            "change rotary, or the size of the heads of Q and K"
        )
    return dims


def logit_scale(kind: str, q: Tensor, context: int, start: int = 0) -> Tensor | float:
    """Return the factor of q . k for q [..., T, size]: a number or, for `log_n`, one factor for each position, [T, 1].

    - `sqrt`: 1 / sqrt(size).
    - `log_n`: log(n) / log(context) / sqrt(size) with n = t+1, the number of positions up to t. It is meant to keep the
      entropy of the attention constant at lengths beyond the trained ones, and equals `sqrt` at the end of the context.
      Source article C writes it as kappa log(n) / size, which is the same for kappa = sqrt(size) / log(context).

    The T positions begin at `start`. A tensor that is returned has the device of q, and is float32 or float64.
    """
    T, size = q.shape[-2:]
    if kind == "sqrt":
        return size**-0.5
    n = torch.arange(start + 1, start + T + 1, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    return (n.log() / math.log(context) * size**-0.5)[:, None]


def check_scale(kind: str, context: int) -> None:
    """Raise ValueError if `logit_scale` cannot compute the scale `kind`."""
    check_choice("scale", kind, ("sqrt", "log_n"))
    if kind == "log_n" and context < 2:
        raise ValueError(f"scale=log_n needs a context of 2 or more: got {context}")


def phi(x: Tensor) -> Tensor:
    """Compute phi(x) = elu(x) + 1 as exp(min(x, 0)) + relu(x). Adding 1 to elu(x) would round small results to 0."""
    return x.clamp(max=0).exp() + F.relu(x)


def log_phi(x: Tensor) -> Tensor:
    """Compute log(phi(x)), which is finite for every finite x."""
    return x.clamp(max=0) + F.relu(x).log1p()


def head_mix(rows: int, columns: int, initial: str, scale: float) -> nn.Parameter:
    """Return the initial head mix M [rows, columns]; see `initial_head_mix` and `head_mix_scale` of `MHA`."""
    if initial == "uniform":
        return nn.Parameter(scale * torch.empty(rows, columns).uniform_(-1, 1) / columns**0.5)
    return nn.Parameter(scale * torch.eye(columns)[torch.arange(rows) % columns])


def mix_heads(mix: Tensor, x: Tensor) -> Tensor:
    """Compute y[b,h,t,u] = sum_g mix[h,g] x[b,g,t,u] in the dtype of x, also under autocast."""
    with torch.autocast(x.device.type, enabled=False):
        # bmm, because `@` would first copy x into another layout, which takes longer than the product.
        mixed = torch.bmm(mix.to(x.dtype).expand(len(x), -1, -1), x.flatten(2))
    return mixed.unflatten(2, x.shape[2:])


@not_compiled  # the compiler cannot trace a bool that depends on values
def any_true(condition: Tensor) -> bool:
    """Return whether any element of `condition` is True."""
    return bool(condition.any())


class ScaleOffset(nn.Module):
    """Return `views` copies of z, each with a learned scale and offset per dimension: z [..., D] -> tuple of [..., D].

    Offsets are 0 at initialisation, and scales are 1 if `initial_scale` is `ones`. If it is `normal`, scales are drawn
    from a normal distribution with mean 0 and standard deviation 0.02, as in Hua et al. 2022, arXiv 2202.10447.
    """

    def __init__(self, dim: int, views: int, initial_scale: str):
        super().__init__()
        check_choice("initial_scale", initial_scale, ("ones", "normal"))
        scale = torch.ones(views, dim) if initial_scale == "ones" else 0.02 * torch.randn(views, dim)
        self.scale, self.offset = nn.Parameter(scale), nn.Parameter(torch.zeros(views, dim))

    def forward(self, z: Tensor, offset: Tensor | None = None) -> tuple[Tensor, ...]:
        """Compute the copies. If given, `offset` [views, D] replaces self.offset."""
        return (z[..., None, :] * self.scale + (self.offset if offset is None else offset)).unbind(-2)
