"""Causal products of a Toeplitz matrix with sequences, at any length. Tensors in, tensors out."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from attn.kernels.products import at_least_float32

# Measured on a CPU:
BLOCK = 256  # sequences of 4 BLOCK and more are halved down to blocks of BLOCK to 2 BLOCK
FFT = 1024  # what so many positions send on goes by FFT, what fewer do by a dense product
PIECE = 512  # a transposed copy of more positions at once misses the cache


def toeplitz(f: Tensor, t: int = 0) -> Tensor:
    """The causal Toeplitz matrix of each row: M[h,t,u] = f[h,t-u] for u <= t, else 0; its rows from t on.

    f [H, T] -> [H, T - t, T]. A sliding view of the reversed, padded row, so that the only large
    tensor is the result.
    """
    T = f.shape[-1]
    return F.pad(f.flip(-1), (0, T - t - 1)).unfold(-1, T, 1).flip(-2)


def is_long(T: int) -> bool:
    """Whether `toeplitz_product` is faster than a product with the dense matrix."""
    return T >= 4 * BLOCK


@torch.compiler.disable  # the compiler knows no complex numbers, and would copy what is added to in place
def toeplitz_product(f: Tensor, x: Tensor) -> Tensor:
    """y[b,t,c] = sum_{u<=t} f[h,t-u] x[b,u,c], h the head of c: f [H, T], x [B, T, C] -> y [B, T, C].

    By halves: what the first half of a stretch sends to its second half is one convolution, by
    FFT, and within each half the same again, down to blocks that are multiplied densely:
    O(T log^2 T). Nothing is ever transformed together with what comes after it, so that, other
    than with one FFT of the whole, rounding does not carry the future into the past either.
    Short convolutions are dense products too. T is BLOCK or more.
    """
    with torch.autocast(x.device.type, enabled=False):
        x = at_least_float32(x)
        return _Product.apply(f.to(x.dtype), x)


class _Product(torch.autograd.Function):
    """`toeplitz_product`. torch's own backward pass would fill up halves and half spectra with zeros, and keep both."""

    @staticmethod
    def forward(ctx, f: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(f, x)
        shape, (block, length) = x.shape, _halved(x.shape[1])
        f, x = F.pad(f, (0, length - f.shape[-1])), _lay_out(x, len(f), length)
        y = (x.view(len(f), -1, block) @ toeplitz(f[:, :block]).transpose(-1, -2)).view_as(x)
        for n in _doubled(block, length):
            _send(f[:, : 2 * n], _first(x, n), _second(y, n))
        return _lay_back(y, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(g.device.type, enabled=False):
            return _backward(*ctx.saved_tensors, g)


def _backward(f: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of f and of x for that of y."""
    shape, (block, length) = x.shape, _halved(x.shape[1])
    f = F.pad(f, (0, length - f.shape[-1]))
    x, g = _lay_out(x, len(f), length), _lay_out(g, len(f), length)
    blocks = g.view(len(f), -1, block)
    dx = (blocks @ toeplitz(f[:, :block])).view_as(x)
    df = torch.zeros_like(f)
    df[:, :block] = _sums_by_distance(blocks, x.view_as(blocks))[:, block - 1 :]
    for n in _doubled(block, length):
        df[:, 1 : 2 * n] += _send_back(f[:, : 2 * n], _first(x, n), _second(g, n), _first(dx, n))
    return df[:, : shape[1]], _lay_back(dx, shape)


def _halved(T: int) -> tuple[int, int]:
    """The size of the blocks, and the length that is cut into them: T or a little more."""
    halvings = (T // BLOCK).bit_length() - 1
    block = math.ceil(T / (32 << halvings)) * 32
    return block, block << halvings


def _doubled(block: int, length: int) -> Iterator[int]:
    """How many positions send to as many: block, 2 block, ... length / 2."""
    while block < length:
        yield block
        block *= 2


def _lay_out(x: Tensor, heads: int, length: int) -> Tensor:
    """[B, T, C] -> [H, B * C/H, length], with zeros at the end."""
    B, T, C = x.shape
    y = x.new_empty(heads, B, C // heads, length)
    for t in range(0, T, PIECE):
        piece = x[:, t : t + PIECE].unflatten(-1, (heads, -1))
        y[..., t : t + piece.shape[1]] = piece.permute(2, 0, 3, 1)
    y[..., T:] = 0
    return y.flatten(1, 2)


def _lay_back(y: Tensor, shape: torch.Size) -> Tensor:
    """[H, B * C/H, length] -> [B, T, C]."""
    B, T, _ = shape
    return y[..., :T].unflatten(1, (B, -1)).permute(1, 3, 0, 2).reshape(shape)


def _first(x: Tensor, n: int) -> Tensor:
    """The first halves of all stretches of 2n positions: a view [H, M, n] of x [H, N, length]."""
    return x.view(len(x), -1, 2, n)[:, :, 0]


def _second(x: Tensor, n: int) -> Tensor:
    return x.view(len(x), -1, 2, n)[:, :, 1]


def _send(f: Tensor, x: Tensor, y: Tensor) -> None:
    """y[t] += sum_u f[n+t-u] x[u]: f [H, 2n], x and y [H, M, n]."""
    n = x.shape[-1]
    if n >= FFT:
        y += torch.fft.irfft(torch.fft.rfft(x, 2 * n).mul_(_spectrum(f)), 2 * n)[..., n:]
    else:
        y.baddbmm_(x, _far(f).transpose(-1, -2))


def _send_back(f: Tensor, x: Tensor, g: Tensor, dx: Tensor) -> Tensor:
    """dx[u] += sum_t f[n+t-u] g[t]; returns df [H, 2n-1] but for df[0] = 0: df[n+d] sums g[t] x[u] over t-u = d."""
    n = x.shape[-1]
    if n >= FFT:
        spectrum = torch.fft.rfft(g, 2 * n)
        dx += torch.fft.irfft(spectrum * _spectrum(f).conj_physical(), 2 * n)[..., n:]
        sums = torch.fft.rfft(x, 2 * n).conj_physical_().mul_(spectrum).sum(1, keepdim=True)
        return torch.fft.irfft(sums, 2 * n).roll(n, -1)[:, 0, 1:]
    dx.baddbmm_(g, _far(f))
    return _sums_by_distance(g, x)


def _spectrum(f: Tensor) -> Tensor:
    return torch.fft.rfft(f)[:, None]


def _far(f: Tensor) -> Tensor:
    """M[h,t,u] = f[h,n+t-u]: f [H, 2n] -> [H, n, n]."""
    n = f.shape[-1] // 2
    return f.flip(-1).unfold(-1, n, 1)[:, :n].flip(-2)


def _sums_by_distance(g: Tensor, x: Tensor) -> Tensor:
    """s[h,n-1+d] = sum of g[h,m,t] x[h,m,u] over t-u = d and all m: g, x [H, M, n] -> s [H, 2n-1]."""
    n = x.shape[-1]
    products = g.transpose(-1, -2) @ x.flip(-1)  # of t and u in row t and column n-1-u
    # Rows of 2n numbers, cut anew into rows of 2n-1: each moves one to the right of the one before.
    return F.pad(products, (0, n)).flatten(1)[:, :-n].unflatten(1, (n, -1)).sum(1)


@torch.compiler.disable  # looks at values
def fft_is_safe(f: Tensor, scale: Tensor | None = None) -> bool:
    """Whether `toeplitz_product` of x >= 0, times `scale` by positions, is right to 1% of each of its values at worst.

    An FFT errs by eps log2(2T) |f| |x| in norms, in every value alike, also in one that is small,
    such as a denominator. With f > 0 no value is smaller than min f |x|. Values of `scale` may lie
    a factor of 1e12 apart, so that none makes an x of float32 vanish.
    """
    f = f.detach() / f.detach().amax(-1, keepdim=True)  # its squares would vanish, or be infinite
    error = torch.finfo(f.dtype).eps * math.log2(2 * f.shape[-1]) * f.norm(dim=-1) / f.amin(-1)
    safe = ((error >= 0) & (error < 0.01)).all()
    if scale is not None:
        safe &= (scale.amin(-1) > 1e-12 * scale.amax(-1)).all()
    return bool(safe)
