"""Token shifts with learned parameters. At initialisation, each shift equals `parts.token_shift`."""

import torch
from torch import Tensor, nn


class LearnedShift(nn.Module):
    """y[t,c] = m[c] x[t,c] + (1 - m[c]) x[t-1,c] with a learned m. In the paper on RWKV-4, R, K and V have an m each;
    here they share one.

    At initialisation, m is 0 in the first half of the channels and 1 in the others.
    """

    past = 1  # number of earlier positions that an output depends on

    def __init__(self, dim: int):
        super().__init__()
        self.m = nn.Parameter((torch.arange(dim) >= dim // 2).float())

    def forward(self, x: Tensor) -> Tensor:
        """Compute y at the last T positions of x, [B, past + T, dim] -> [B, T, dim]."""
        return self.m * x[:, 1:] + (1 - self.m) * x[:, :-1]


class ShortConvolution(nn.Module):
    """y[t,c] = sum_{i<4} a[i,c] x[t-i,c]: a causal convolution within each channel.

    In the papers on Mamba and DeltaNet, such a convolution follows linear layers, and a SiLU follows it. Here it comes
    before the linear layers, without a SiLU.

    At initialisation, a[1] is 1 in the first half of the channels, a[0] is 1 in the others, and the rest of a is 0.
    """

    past = 3  # number of earlier positions that an output depends on

    def __init__(self, dim: int):
        super().__init__()
        first_half = torch.arange(dim) < dim // 2
        self.a = nn.Parameter(torch.stack([~first_half, first_half, *torch.zeros(2, dim).bool()]).float())

    def forward(self, x: Tensor) -> Tensor:
        """Compute y at the last T positions of x, [B, past + T, dim] -> [B, T, dim]."""
        T = x.shape[1] - self.past
        return sum(a * x[:, self.past - i : self.past - i + T] for i, a in enumerate(self.a))


SHIFTS = {"learned": LearnedShift, "convolution": ShortConvolution}
