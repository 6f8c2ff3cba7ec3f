"""AFT's weighted mean in Triton, forward and backward, in memory that is linear in T.

    y[t,c] = sum_{u<=t} exp(f[h,t-u] + k[u,c]) v[u,c] / sum_{u<=t} exp(f[h,t-u] + k[u,c])

The matrix of exp(f[h,t-u]) is never stored. In the forward pass, each program computes a block of rows for one head.
For each earlier block, it adds exp(f) @ (exp(k - m) v) to the numerator and exp(f) @ exp(k - m) to the denominator. m
is the maximum of k per channel over the blocks read so far. All rows can share it, because each of them sees all
positions of these blocks. In the program's own block, each row t has its own m for each channel, the maximum over
u <= t. If rows shared m there, later positions would change the rounding of earlier rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn.kernels.derivatives import kernel_backward

ROWS = 32  # rows per block
# Full float32 for products: TF32 is too coarse for the denominator.
PRECISION = "ieee"


@triton.jit
def _forward(
    f, k, v, y, row_max, row_sum, T, C, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr
):
    batch, head, start = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * ROWS
    C = tl.cast(C, tl.int64)  # T * C can be too large for int32
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = column < D
    t = start + row
    f += head * T
    base = batch * T * C + head * D + column

    m = tl.full([WIDTH], -float("inf"), tl.float32)
    numerator = tl.zeros([ROWS, WIDTH], tl.float32)
    denominator = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(0, start, ROWS):
        u = first + row
        place = base[None, :] + u[:, None] * C
        keys = tl.load(k + place, mask=inside[None, :], other=0.0)
        values = tl.load(v + place, mask=inside[None, :], other=0.0)
        distance = t[:, None] - u[None, :]
        w = tl.exp(tl.load(f + distance, mask=(distance >= 0) & (t < T)[:, None], other=0.0))
        new_max = tl.maximum(m, tl.max(keys, axis=0))
        scale, e = tl.exp(m - new_max)[None, :], tl.exp(keys - new_max[None, :])
        numerator = numerator * scale + tl.dot(w, e * values, input_precision=DOT)
        denominator = denominator * scale + tl.dot(w, e, input_precision=DOT)
        m = new_max

    own = tl.zeros([ROWS, WIDTH], tl.float32) + m[None, :]
    for u in range(start, min(start + ROWS, T)):
        key = tl.load(k + base + u * C, mask=inside, other=0.0)[None, :]
        value = tl.load(v + base + u * C, mask=inside, other=0.0)[None, :]
        sees = (t >= u)[:, None]
        w = tl.exp(tl.load(f + t - u, mask=(t >= u) & (t < T), other=0.0))[:, None]
        new_max = tl.where(sees, tl.maximum(own, key), own)
        scale, p = tl.exp(own - new_max), tl.where(sees, w * tl.exp(key - new_max), 0.0)
        numerator = numerator * scale + p * value
        denominator = denominator * scale + p
        own = new_max

    there = (t < T)[:, None] & inside[None, :]
    place = base[None, :] + t[:, None] * C
    tl.store(y + place, numerator / denominator, mask=there)
    tl.store(row_max + place, own, mask=there)
    tl.store(row_sum + place, denominator, mask=there)


@triton.jit
def _backward(
    f, k, v, y, row_max, g, df, dk, dv, T, C,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Compute dv[u] = sum_t P g[t] and dk[u] = sum_t P g[t] (v[u] - y[t]); P = exp(f[t-u] + k[u,c] - row_max[t,c]).

    The terms of dk, summed over the channels of the head, are also added to df[t-u]. row_max is the maximum that the
    forward pass used for the row. g is the gradient of the loss with respect to y, already divided by row_sum.
    If log(row_sum) were added to row_max, P would be divided by row_sum, and g would not need to be. This is not done,
    because row_max + log(row_sum) loses digits if k is large.
    """
    batch, head, start = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * ROWS
    C = tl.cast(C, tl.int64)  # T * C can be too large for int32
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = column < D
    u = start + row
    f += head * T
    df += head * T
    base = batch * T * C + head * D + column
    there = (u < T)[:, None] & inside[None, :]
    place = base[None, :] + u[:, None] * C
    keys = tl.load(k + place, mask=there, other=-float("inf"))
    values = tl.load(v + place, mask=there, other=0.0)

    d_value = tl.zeros([ROWS, WIDTH], tl.float32)
    d_mean = tl.zeros([ROWS, WIDTH], tl.float32)  # sum_t P g[t] y[t]
    for i in range(start, min(start + ROWS, T)):
        at = base + i * C
        gradient = tl.load(g + at, mask=inside, other=0.0)[None, :]
        mean = tl.load(y + at, mask=inside, other=0.0)[None, :]
        maximum = tl.load(row_max + at, mask=inside, other=0.0)[None, :]
        sends = u <= i
        bias = tl.load(f + i - u, mask=sends, other=0.0)[:, None]
        p = tl.where(sends[:, None] & inside[None, :], tl.exp(bias + (keys - maximum)), 0.0)
        d_value += p * gradient
        d_mean += p * gradient * mean
        tl.atomic_add(df + i - u, tl.sum(p * gradient * (values - mean), axis=1), mask=sends, sem="relaxed")

    m = tl.max(tl.where(there, keys, -float("inf")), axis=0)
    m = tl.where(inside, m, 0.0)
    e = tl.where(there, tl.exp(keys - m[None, :]), 0.0)
    late_value = tl.zeros([ROWS, WIDTH], tl.float32)
    late_mean = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(start + ROWS, T, ROWS):
        t = first + row
        here = (t < T)[:, None] & inside[None, :]
        at = base[None, :] + t[:, None] * C
        mean = tl.load(y + at, mask=here, other=0.0)
        maximum = tl.load(row_max + at, mask=here, other=float("inf"))
        gradient = tl.load(g + at, mask=here, other=0.0) * tl.exp(m[None, :] - maximum)
        distance = t[None, :] - u[:, None]
        w = tl.exp(tl.load(f + distance, mask=(t < T)[None, :], other=-float("inf")))  # [u, t]
        late_value += tl.dot(w, gradient, input_precision=DOT)
        late_mean += tl.dot(w, gradient * mean, input_precision=DOT)
        sent = tl.dot(e * values, tl.trans(gradient), input_precision=DOT)
        sent -= tl.dot(e, tl.trans(gradient * mean), input_precision=DOT)
        tl.atomic_add(df + distance, w * sent, mask=(t < T)[None, :] & (u < T)[:, None], sem="relaxed")
    d_value += e * late_value
    d_mean += e * late_mean
    tl.store(dv + place, d_value, mask=there)
    tl.store(dk + place, values * d_value - d_mean, mask=there)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f: Tensor, k: Tensor, v: Tensor) -> Tensor:
        f, k, v = (x.float().contiguous() for x in (f, k, v))
        (B, T, C), H = k.shape, len(f)
        y, row_max, row_sum = (torch.empty_like(v) for _ in range(3))
        D = C // H
        sizes = {"D": D, "ROWS": ROWS, "WIDTH": max(16, triton.next_power_of_2(D)), "DOT": PRECISION, "num_warps": 8}
        grid = (B, H, triton.cdiv(T, ROWS))
        _forward[grid](f, k, v, y, row_max, row_sum, T, C, **sizes)
        ctx.save_for_backward(f, k, v, y, row_max, row_sum)
        ctx.grid, ctx.sizes = grid, sizes
        return y

    @staticmethod
    @kernel_backward
    def backward(ctx, g: Tensor):
        f, k, v, y, row_max, row_sum = ctx.saved_tensors
        df, dk, dv = torch.zeros_like(f), torch.empty_like(k), torch.empty_like(v)
        g = (g / row_sum).contiguous()
        _backward[ctx.grid](f, k, v, y, row_max, g, df, dk, dv, *k.shape[1:], **ctx.sizes)
        return df, dk, dv


def exp_toeplitz_mean(f: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the mean of the module's docstring, with gradients: f [H, T], k, v [B, T, C] -> y [B, T, C] in float32.

    The maximum of f in each head is subtracted from f; it cancels between numerator and denominator. Let F be the
    maximum of f in the head, and M that of k over u <= t. The denominator of row t may underflow if f[t-u] + k[u] <
    F + M - 80 at each u <= t. Then y[t] and the gradients can be NaN. This function needs a GPU or TRITON_INTERPRET=1.
    """
    return _Mean.apply(f - f.detach().amax(-1, keepdim=True), k, v)
