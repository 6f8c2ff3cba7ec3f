"""Softmax attention with a position weight, log w[t,u] = a[t-u] + b[u], as Triton kernels, forward and backward.

    y[t] = sum_{u<=t} exp(S[t,u]) v[u] / sum_{u<=t} exp(S[t,u]),  S[t,u] = q[t] . k[u] + a[t-u] + b[u]

for each head of each batch element. As in FlashAttention (Dao et al. 2022, arXiv 2205.14135), S is never stored, so
that memory is linear in T. Each Triton program computes a block of rows of y from tiles of S, one after the other, with
a running maximum per row. The backward pass computes the tiles again.

A "sequence" is one head of one batch element. Its position t is the row with the index `sequence * T + t` of every
tensor but a, b and da, and its distance t-u is the row `sequence * T + (t-u)` of da. a and b are shared by all batch
elements: their rows are `head * T + (t-u)` and `head * T + u`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn.kernels.compiler import not_compiled
from attn.kernels.derivatives import kernel_backward

# Full float32 for products: TF32 is too coarse for an exponent.
PRECISION = "ieee"


@triton.jit
def _load(x, sequence, t, T, D: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows t of x [.., T, D] as [len(t), WIDTH], with zeros beyond T and D."""
    column = tl.arange(0, WIDTH)
    place = (sequence * T + t)[:, None] * D + column[None, :]
    return tl.load(x + place, mask=(t < T)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def _store(x, value, sequence, t, T, D: tl.constexpr, WIDTH: tl.constexpr):
    """Store value [len(t), WIDTH] as rows t of x [.., T, D]; entries beyond T and D are ignored."""
    column = tl.arange(0, WIDTH)
    place = (sequence * T + t)[:, None] * D + column[None, :]
    tl.store(x + place, value, mask=(t < T)[:, None] & (column < D)[None, :])


@triton.jit
def _scores(left, right, a, b, head, t, u, T, DOT: tl.constexpr):
    """Return the tile of S at t and u, with -inf where u > t.

    `left` and `right` are rows of q and k; t is [n, 1] and u is [1, n]. For the transposed tile, `left` and `right` are
    rows of k and q, t is [1, n] and u is [n, 1].
    """
    distance = t - u
    # Mask before adding a and b. Otherwise the compiler uses them as the product's accumulator, and registers spill.
    S = tl.where(distance >= 0, tl.dot(left, tl.trans(right), input_precision=DOT), -float("inf"))
    if a is not None:
        S += tl.load(a + head * T + distance, mask=(distance >= 0) & (distance < T), other=0.0)
    if b is not None:
        S += tl.load(b + head * T + u, mask=u < T, other=0.0)
    return S


@triton.jit
def _forward(
    q, k, v, a, b, y, row_max, row_sum, H, T,
    DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Compute y[t], row_max[t] = max_u S[t,u] and row_sum[t] = sum_u exp(S[t,u] - row_max[t])."""
    sequence, row = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS  # programs with the longest rows start first
    head, t = sequence % H, start + row
    query = _load(q, sequence, t, T, DK, KEY)
    m = tl.full([ROWS], -float("inf"), row_max.dtype.element_ty)
    denominator = tl.zeros([ROWS], row_max.dtype.element_ty)
    numerator = tl.zeros([ROWS, VALUE], row_max.dtype.element_ty)
    for first in range(0, start + ROWS, ROWS):
        u = first + row
        key, value = _load(k, sequence, u, T, DK, KEY), _load(v, sequence, u, T, DV, VALUE)
        S = _scores(query, key, a, b, head, t[:, None], u[None, :], T, DOT)
        new_max = tl.maximum(m, tl.max(S, axis=1))  # finite, because the first tile contains u = 0
        scale, P = tl.exp(m - new_max), tl.exp(S - new_max[:, None])
        denominator = denominator * scale + tl.sum(P, axis=1)
        numerator = numerator * scale[:, None] + tl.dot(P.to(value.dtype), value, input_precision=DOT)
        m = new_max
    _store(y, numerator / denominator[:, None], sequence, t, T, DV, VALUE)
    tl.store(row_max + sequence * T + t, m, mask=t < T)
    tl.store(row_sum + sequence * T + t, denominator, mask=t < T)


@triton.jit
def _gradient(left, right, left_value, right_value, a, b, row_max, mean, sequence, head, t, u, T, DOT: tl.constexpr):
    """Return P = exp(S[t,u] - row_max[t]) and the gradient of S, dS = P (g[t] . v[u] - mean[t]), for a tile.

    `left_value` and `right_value` are rows of g and v, or of v and g for the transposed tile. g[t] is the
    gradient of the loss with respect to y[t], already divided by row_sum[t], and mean[t] is g[t] . y[t]. Adding
    log(row_sum) to row_max would divide P by row_sum instead, but row_max + log(row_sum) loses digits if row_max is
    large.
    """
    maximum = tl.load(row_max + sequence * T + t, mask=t < T, other=float("inf"))
    P = tl.exp(_scores(left, right, a, b, head, t, u, T, DOT) - maximum)
    average = tl.load(mean + sequence * T + t, mask=t < T, other=0.0)
    return P, P * (tl.dot(left_value, tl.trans(right_value), input_precision=DOT) - average)


@triton.jit
def _backward_rows(
    q, k, v, a, b, g, row_max, mean, dq, H, T,
    DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Compute dq[t] = sum_u dS[t,u] k[u]."""
    sequence, row = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    head, t = sequence % H, start + row
    query, grad = _load(q, sequence, t, T, DK, KEY), _load(g, sequence, t, T, DV, VALUE)
    d_query = tl.zeros([ROWS, KEY], row_max.dtype.element_ty)
    for first in range(0, start + ROWS, ROWS):
        u = first + row
        key, value = _load(k, sequence, u, T, DK, KEY), _load(v, sequence, u, T, DV, VALUE)
        _, dS = _gradient(query, key, grad, value, a, b, row_max, mean, sequence, head, t[:, None], u[None, :], T, DOT)
        d_query += tl.dot(dS.to(key.dtype), key, input_precision=DOT)
    _store(dq, d_query, sequence, t, T, DK, KEY)


@triton.jit
def _backward_columns(
    q, k, v, a, b, g, row_max, mean, dk, dv, db, H, T,
    DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Compute dk[u] = sum_t dS[t,u] q[t], dv[u] = sum_t P[t,u] g[t], and db[u] = sum_t dS[t,u] of each sequence."""
    sequence, start, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS, tl.arange(0, ROWS)
    head, u = sequence % H, start + row
    key, value = _load(k, sequence, u, T, DK, KEY), _load(v, sequence, u, T, DV, VALUE)
    d_key = tl.zeros([ROWS, KEY], row_max.dtype.element_ty)
    d_value = tl.zeros([ROWS, VALUE], row_max.dtype.element_ty)
    d_bias = tl.zeros([ROWS], row_max.dtype.element_ty)
    for first in range(start, T, ROWS):
        t = first + row
        query, grad = _load(q, sequence, t, T, DK, KEY), _load(g, sequence, t, T, DV, VALUE)
        P, dS = _gradient(key, query, value, grad, a, b, row_max, mean, sequence, head, t[None, :], u[:, None], T, DOT)
        d_key += tl.dot(dS.to(query.dtype), query, input_precision=DOT)
        d_value += tl.dot(P.to(grad.dtype), grad, input_precision=DOT)
        d_bias += tl.sum(dS, axis=1)
    _store(dk, d_key, sequence, u, T, DK, KEY)
    _store(dv, d_value, sequence, u, T, DV, VALUE)
    if b is not None:
        tl.store(db + sequence * T + u, d_bias, mask=u < T)


@triton.jit
def _backward_diagonals(
    q, k, v, a, b, g, row_max, mean, da, H, T,
    DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Compute da [.., T, ROWS], whose sum over the last dimension is the gradient of a for each sequence.

    da[d,j] is the sum of dS[u+d,u] over all u with u mod ROWS = j. Each program sums the tiles along one diagonal of S.
    A distance d occurs in the tiles of at most two diagonals, with different j, so no entry is written twice, and no
    sum depends on the order in which programs run.
    """
    sequence, gap, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS, tl.arange(0, ROWS)
    head = sequence % H
    d_bias = tl.zeros([ROWS, ROWS], row_max.dtype.element_ty)
    for first in range(gap, T, ROWS):
        t, u = first + row, first - gap + row
        query, grad = _load(q, sequence, t, T, DK, KEY), _load(g, sequence, t, T, DV, VALUE)
        key, value = _load(k, sequence, u, T, DK, KEY), _load(v, sequence, u, T, DV, VALUE)
        _, dS = _gradient(query, key, grad, value, a, b, row_max, mean, sequence, head, t[:, None], u[None, :], T, DOT)
        d_bias += dS
    distance = gap + row[:, None] - row[None, :]
    place = (sequence * T + distance) * ROWS + row[None, :]
    tl.store(da + place, d_bias, mask=(distance >= 0) & (distance < T))


def _launch(q: Tensor, v: Tensor) -> tuple[tuple[int, int], dict]:
    """Return the grid, and the sizes and options that all kernels take as arguments.

    With these block sizes, ptxas reports few register spills on sm_90 for up to 128 dimensions.
    """
    (B, H, T, DK), DV = q.shape, v.shape[-1]
    KEY, VALUE = (max(16, triton.next_power_of_2(D)) for D in (DK, DV))
    sizes = {"H": H, "T": T, "DK": DK, "DV": DV, "KEY": KEY, "VALUE": VALUE, "DOT": PRECISION}
    if q.dtype.itemsize > 2:
        sizes |= {"ROWS": 32, "num_warps": 8, "num_stages": 1}
    else:
        sizes |= {"ROWS": 64, "num_warps": 4, "num_stages": 2 if max(KEY, VALUE) <= 64 else 1}
    return (B * H, triton.cdiv(T, sizes["ROWS"])), sizes


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
        q, k, v, a, b = (None if x is None else x.contiguous() for x in (q, k, v, a, b))
        sums = torch.promote_types(q.dtype, torch.float32)
        y = torch.empty_like(v)
        row_max, row_sum = (torch.empty(q.shape[:3], dtype=sums, device=q.device) for _ in range(2))
        ctx.grid, ctx.sizes = _launch(q, v)
        _forward[ctx.grid](q, k, v, a, b, y, row_max, row_sum, **ctx.sizes)
        ctx.save_for_backward(q, k, v, a, b, y, row_max, row_sum)
        return y

    @staticmethod
    @kernel_backward
    def backward(ctx, g: Tensor):
        q, k, v, a, b, y, row_max, row_sum = ctx.saved_tensors
        g = (g / row_sum[..., None]).to(v.dtype).contiguous()
        mean = (g.to(row_max.dtype) * y).sum(-1)
        inputs, grid, sizes = (q, k, v, a, b, g, row_max, mean), ctx.grid, ctx.sizes
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        db = None if b is None else torch.empty_like(row_max)
        da = None if a is None else row_max.new_zeros(*row_max.shape, sizes["ROWS"])
        _backward_rows[grid](*inputs, dq, **sizes)
        _backward_columns[grid](*inputs, dk, dv, db, **sizes)
        if a is not None:
            _backward_diagonals[grid](*inputs, da, **sizes)
            da = da.sum((0, -1)).to(a.dtype)
        return dq, dk, dv, da, None if b is None else db.sum(0).to(b.dtype)


@not_compiled  # a compiled model calls it between two graphs
def flash_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    """Compute the attention of the module's docstring, with gradients of all inputs.

    Args:
        q, k: [B, H, T, key dimensions]. q must already contain the scale.
        v: [B, H, T, value dimensions], like the result.
        a: [H or 1, T], finite; None means 0. For the position weight `Toeplitz` this is log f.
        b: [H, T], finite; None means 0. For `Toeplitz` this is log beta.

    The third factor of `Toeplitz`, alpha[h,t], cancels between numerator and denominator, so it is not an argument.
    Sums are computed in float32, or in float64 if q is float64. float16 inputs are converted to float32, because the
    range of float16 is too small for gradients that are divided by a row's sum. This function needs a GPU or
    TRITON_INTERPRET=1; the interpreter gives wrong results in bfloat16.
    """
    dtype = v.dtype
    if torch.float16 in (q.dtype, k.dtype, dtype):
        q, k, v = q.float(), k.float(), v.float()
    return _Attention.apply(q, k, v, None if a is None else a.expand(q.shape[1], -1), b).to(dtype)
