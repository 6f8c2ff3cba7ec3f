"""Products of causal Toeplitz matrices with sequences."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from attn.kernels.compiler import not_compiled
from attn.kernels.derivatives import kernel_backward
from attn.kernels.products import at_least_float32

# These lengths were chosen by measurements on a CPU.
BLOCK = 256  # Sequences are halved until the blocks have BLOCK to 2 * BLOCK positions.
FFT = 1024  # Use an FFT for halves of at least this length, and a dense product for shorter ones.
PIECE = 512  # Transpose this many positions at a time; more would not fit into the cache.


def toeplitz(f: Tensor, start: int = 0) -> Tensor:
    """Return the causal Toeplitz matrices M[h,t,u] = f[h,t-u] for u <= t, else 0: f [H, T] -> [H, T - start, T].

    The rows are the positions t from `start` on. The matrix is copied from a sliding view of the reversed and padded f,
    so that no other large tensor is needed.
    """
    T = f.shape[-1]
    return F.pad(f.flip(-1), (0, T - start - 1)).unfold(-1, T, 1).flip(-2)


def is_long(T: int) -> bool:
    """Return whether `toeplitz_product` is faster for T positions than a product with the dense matrix."""
    return T >= 4 * BLOCK


@not_compiled  # the compiler does not support complex numbers, and copies tensors instead of modifying them
def toeplitz_product(f: Tensor, x: Tensor) -> Tensor:
    """Compute y[b,t,c] = sum_{u<=t} f[h,t-u] x[b,u,c], h the head of c: f [H, T], x [B, T, C] -> y [B, T, C].

    T must be at least BLOCK. The algorithm is recursive and takes O(T log^2 T): the sequence is halved, the
    contribution of the first half to the second half is one convolution, and each half is treated in the same way.
    Blocks of BLOCK to 2 * BLOCK positions are multiplied by a dense matrix. Long convolutions use an FFT, short ones a
    dense product.

    No result depends on an FFT that contains later positions. With one FFT of the whole sequence, later positions would
    change the rounding errors of earlier results.
    """
    with torch.autocast(x.device.type, enabled=False):
        x = at_least_float32(x)
        return _Product.apply(f.to(x.dtype), x)


class _Product(torch.autograd.Function):
    """`toeplitz_product` with its own backward pass. Autograd would store all halves and their padded spectra."""

    @staticmethod
    def forward(ctx, f: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(f, x)
        shape, (block, length) = x.shape, _block_and_length(x.shape[1])
        f, x = F.pad(f, (0, length - f.shape[-1])), _transpose(x, len(f), length)
        y = (x.view(len(f), -1, block) @ toeplitz(f[:, :block]).transpose(-1, -2)).view_as(x)
        for n in _half_lengths(block, length):
            _add_convolution(f[:, : 2 * n], _halves(x, n)[0], _halves(y, n)[1])
        return _transpose_back(y, shape)

    @staticmethod
    @kernel_backward
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        f, x = ctx.saved_tensors
        shape, (block, length) = x.shape, _block_and_length(x.shape[1])
        f = F.pad(f, (0, length - f.shape[-1]))
        x, g = _transpose(x, len(f), length), _transpose(g, len(f), length)
        blocks = g.view(len(f), -1, block)
        dx = (blocks @ toeplitz(f[:, :block])).view_as(x)
        df = torch.zeros_like(f)
        df[:, :block] = _sums_by_distance(blocks, x.view_as(blocks))[:, block - 1 :]
        for n in _half_lengths(block, length):
            first, second, d_first = _halves(x, n)[0], _halves(g, n)[1], _halves(dx, n)[0]
            df[:, 1 : 2 * n] += _convolve_backward(f[:, : 2 * n], first, second, d_first)
        return df[:, : shape[1]], _transpose_back(dx, shape)


def _block_and_length(T: int) -> tuple[int, int]:
    """Return the length of a block, and the padded length of the sequence: a block times a power of two, at least T."""
    halvings = (T // BLOCK).bit_length() - 1
    block = math.ceil(T / (32 << halvings)) * 32
    return block, block << halvings


def _half_lengths(block: int, length: int) -> Iterator[int]:
    """Yield the lengths of halves, from the shortest: block, 2 * block, ..., length / 2."""
    while block < length:
        yield block
        block *= 2


def _transpose(x: Tensor, heads: int, length: int) -> Tensor:
    """Transpose and pad with zeros, [B, T, C] -> [H, B * C/H, length]."""
    B, T, C = x.shape
    y = x.new_empty(heads, B, C // heads, length)
    for t in range(0, T, PIECE):
        piece = x[:, t : t + PIECE].unflatten(-1, (heads, -1))
        y[..., t : t + piece.shape[1]] = piece.permute(2, 0, 3, 1)
    y[..., T:] = 0
    return y.flatten(1, 2)


def _transpose_back(y: Tensor, shape: torch.Size) -> Tensor:
    """Undo `_transpose`, [H, B * C/H, length] -> `shape`, which is [B, T, C]."""
    B, T, C = shape
    return y[..., :T].unflatten(1, (B, C // len(y))).permute(1, 3, 0, 2).reshape(shape)


def _halves(x: Tensor, n: int) -> tuple[Tensor, ...]:
    """Return the first and the second halves, each [H, M, n], of x [H, N, length] cut into parts of 2n positions."""
    return x.view(len(x), -1, 2, n).unbind(2)


def _add_convolution(f: Tensor, x: Tensor, y: Tensor) -> None:
    """Add the contribution of first halves x to second halves y, sum_u f[n+t-u] x[u]; f [H, 2n], x, y [H, M, n]."""
    n = x.shape[-1]
    if n >= FFT:
        y += torch.fft.irfft(torch.fft.rfft(x, 2 * n).mul_(torch.fft.rfft(f)[:, None]), 2 * n)[..., n:]
    else:
        y.baddbmm_(x, _cross_toeplitz(f).transpose(-1, -2))


def _convolve_backward(f: Tensor, x: Tensor, g: Tensor, dx: Tensor) -> Tensor:
    """Compute the backward pass of `_add_convolution`.

    Add sum_t f[n+t-u] g[t] to dx[u], and return df[1:] [H, 2n-1], where df[n+d] is the sum of g[t] x[u] over t-u = d
    and all M parts. df[0] is 0, because f[0] is not used.
    """
    n = x.shape[-1]
    if n >= FFT:
        spectrum = torch.fft.rfft(g, 2 * n)
        dx += torch.fft.irfft(spectrum * torch.fft.rfft(f)[:, None].conj_physical(), 2 * n)[..., n:]
        sums = torch.fft.rfft(x, 2 * n).conj_physical_().mul_(spectrum).sum(1, keepdim=True)
        return torch.fft.irfft(sums, 2 * n).roll(n, -1)[:, 0, 1:]
    dx.baddbmm_(g, _cross_toeplitz(f))
    return _sums_by_distance(g, x)


def _cross_toeplitz(f: Tensor) -> Tensor:
    """Return M[h,t,u] = f[h,n+t-u]: f [H, 2n] -> [H, n, n]."""
    n = f.shape[-1] // 2
    return f.flip(-1).unfold(-1, n, 1)[:, :n].flip(-2)


def _sums_by_distance(g: Tensor, x: Tensor) -> Tensor:
    """Return s[h,n-1+d], the sum of g[h,m,t] x[h,m,u] over t-u = d and all m: g, x [H, M, n] -> s [H, 2n-1]."""
    n = x.shape[-1]
    products = g.transpose(-1, -2) @ x.flip(-1)  # row t, column n-1-u: the sum of g[h,m,t] x[h,m,u] over m
    # Reading rows of 2n numbers as rows of 2n-1 moves row t by t columns, so that each column holds one distance t-u.
    return F.pad(products, (0, n)).flatten(1)[:, :-n].unflatten(1, (n, -1)).sum(1)


@not_compiled  # the compiler cannot trace a bool that depends on values
def fft_is_safe(f: Tensor, scale: Tensor | None = None) -> bool:
    """Return True only if `toeplitz_product` of any x >= 0 has a relative error below 1% in each of its values.

    The FFT of a first half x adds an error of up to eps log2(2T) |f| |x|, where |.| is the norm, to large and small
    values alike. Such an error may be too large where a small value is a denominator. If f > 0, each value to which
    this half contributes is at least min(f) |x|.

    If x is first multiplied by a `scale` [H, T], as in `scaled_toeplitz_product`, pass it too. The result is then True
    only if, in addition, the smallest scale of each head is more than 1e-4 times its largest, so that denominators
    cannot become tiny; see `causal.SMALLEST`.
    """
    f = f.detach() / f.detach().amax(-1, keepdim=True)  # without this, squares could underflow or overflow
    error = torch.finfo(f.dtype).eps * math.log2(2 * f.shape[-1]) * f.norm(dim=-1) / f.amin(-1)
    safe = ((error >= 0) & (error < 0.01)).all()
    if scale is not None:
        safe &= (scale.amin(-1) > 1e-4 * scale.amax(-1)).all()
    return bool(safe)
