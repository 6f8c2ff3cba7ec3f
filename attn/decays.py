"""Learned rates of exponential decay, and position weights that use them, per head or per channel."""

import math

import torch
from torch import Tensor, nn

from attn.kernels.toeplitz import toeplitz
from attn.position_weights import PositionWeight
from attn.ranges import Size

# The largest log lambda, so that lambda cannot overflow. At a distance of 1, exp(-exp(9)) is already 0 in float64;
# where lambda is multiplied by a small number, as in `ScalarDecay`, the limit can matter.
LARGEST = 9.0


def decay_rate(log_lambda: Tensor) -> Tensor:
    """Return lambda = exp(log_lambda), but at most exp(LARGEST)."""
    return log_lambda.clamp(max=LARGEST).exp()


def log_decay(log_lambda: Tensor, distances: int) -> Tensor:
    """Return -lambda d, [H, distances], for log lambda [H] and the distances d = 0, 1, ..., distances - 1."""
    rate = decay_rate(log_lambda)
    return -torch.outer(rate, torch.arange(distances, dtype=rate.dtype, device=rate.device))


def initial_log_decay(channels: int) -> Tensor:
    """Return the initial log lambda [channels] of RWKV-4's first layer. It rises from the first channel to the last."""
    return 8 * torch.linspace(0, 1, channels) ** 0.7 - 5


def initial_bonus(channels: int) -> Tensor:
    """Return RWKV-4's initial bonus [channels], the same in every layer."""
    return math.log(0.3) + 0.5 * ((torch.arange(channels) + 1) % 3 - 1)


class HeadDecay(PositionWeight):
    """log w[h,t,u] = -lambda_h (t-u) with a learned lambda_h > 0 for each of the heads h = 1 ... H.

    At initialisation, lambda_h = context^(-h/H), so that each head sees further than the one before it. w is defined
    for any number of positions.
    """

    def __init__(self, heads: Size, context: Size):
        super().__init__()
        self.log_lambda = nn.Parameter(-math.log(context) * torch.arange(1, heads + 1) / heads)

    def log_relative(self, T: int, start: int = 0) -> Tensor:
        return toeplitz(log_decay(self.log_lambda, T), start)


class ChannelDecay(PositionWeight):
    """log w[c,t,u] = -lambda_c (t-1-u) for u < t and b_c for u = t, where each channel c is a head of its own.

    The decay lambda_c > 0 and the bonus b_c are learned, and start as in RWKV-4's first layer. w is defined for any
    number of positions. If an attention has n times as many channels, such as `attn=rwv` with expansion=n, every n
    neighbouring channels form a head. Peng et al. 2023, arXiv 2305.13048.
    """

    def __init__(self, channels: Size):
        super().__init__()
        self.log_lambda = nn.Parameter(initial_log_decay(channels))
        self.bonus = nn.Parameter(initial_bonus(channels))

    def log_relative(self, T: int, start: int = 0) -> Tensor:
        return toeplitz(torch.cat([self.bonus[:, None], log_decay(self.log_lambda, T - 1)], dim=1), start)
