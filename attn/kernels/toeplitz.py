"""Causal products of a Toeplitz matrix with sequences, at any length. Tensors in, tensors out."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 512  # sequences of 2 BLOCK and more are halved down to blocks of BLOCK to 2 BLOCK; measured on a CPU


def toeplitz(f: Tensor, t: int = 0) -> Tensor:
    """The causal Toeplitz matrix of each row: M[h,t,u] = f[h,t-u] for u <= t, else 0; its rows from t on.

    f [H, T] -> [H, T - t, T]. A sliding view of the reversed, padded row, so that the only large
    tensor is the result.
    """
    T = f.shape[-1]
    return F.pad(f.flip(-1), (0, T - t - 1)).unfold(-1, T, 1).flip(-2)


def is_long(T: int) -> bool:
    """Whether `toeplitz_product` is faster than a product with the dense matrix."""
    return T >= 2 * BLOCK


def toeplitz_product(f: Tensor, x: Tensor, fft: bool = True) -> Tensor:
    """y[b,t,c] = sum_{u<=t} f[h,t-u] x[b,u,c], h the head of c: f [H, T], x [B, T, C] -> y [B, T, C].

    By halves: what the first half of a stretch sends to its second half is one convolution, by
    FFT, and within each half the same again, down to blocks that are multiplied densely:
    O(T log^2 T). Nothing is ever transformed together with what comes after it, so that, other
    than with one FFT of the whole, rounding does not carry the future into the past either.
    Without `fft` the convolutions are dense products too, half the work of the whole matrix.
    """
    (B, T, C), H = x.shape, len(f)
    halvings = (T // BLOCK).bit_length() - 1
    block = math.ceil(T / (32 << halvings)) * 32
    length = block << halvings
    with torch.autocast(x.device.type, enabled=False):
        x = x if x.dtype == torch.float64 else x.float()
        f = F.pad(f.to(x.dtype), (0, length - T))
        x = F.pad(x.view(B, T, H, C // H).permute(2, 0, 3, 1), (0, length - T))  # [H, B, D, length]
        diagonal = toeplitz(f[:, :block]).transpose(-1, -2)
        y = (x.reshape(H, -1, block) @ diagonal).view_as(x)
        n = block
        while n < length:
            sender = x.unflatten(-1, (-1, 2, n))[..., 0, :]
            received = _send_by_fft(f[:, : 2 * n], sender) if fft else _send_densely(f[:, : 2 * n], sender)
            y.unflatten(-1, (-1, 2, n))[..., 1, :] += received
            n *= 2
        return y[..., :T].permute(1, 3, 0, 2).reshape(B, T, C)


def _send_by_fft(f: Tensor, x: Tensor) -> Tensor:
    """y[t] = sum_u f[n+t-u] x[u]: f [H, 2n], x [H, ..., n] -> y [H, ..., n]."""
    n = x.shape[-1]
    spectrum = torch.fft.rfft(f).view(len(f), *[1] * (x.dim() - 2), -1)
    return torch.fft.irfft(torch.fft.rfft(x, 2 * n) * spectrum, 2 * n)[..., n:]


def _send_densely(f: Tensor, x: Tensor) -> Tensor:
    n = x.shape[-1]
    matrix = f.flip(-1).unfold(-1, n, 1)[:, :n].flip(-2)  # M[h,t,u] = f[h,n+t-u]
    return (x.reshape(len(f), -1, n) @ matrix.transpose(-1, -2)).view(x.shape)


def fft_is_safe(f: Tensor) -> bool:
    """Whether `toeplitz_product` by FFT of x >= 0 is right to 1% of each of its values at worst.

    An FFT errs by eps log2(2T) |f| |x| in norms, in every value alike, also in one that is small,
    such as a denominator. With f > 0 no value is smaller than min f |x|.
    """
    f = f.detach()
    error = torch.finfo(f.dtype).eps * math.log2(2 * f.shape[-1]) * f.norm(dim=-1) / f.amin(-1)
    return bool(((error >= 0) & (error < 0.01)).all())
