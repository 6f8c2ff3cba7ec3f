"""Softmax attention by tiles, forward and backward, in Triton, with a time-weighting of log w = a + b.

    y[t] = sum_{u<=t} exp(S[t,u]) v[u] / sum_{u<=t} exp(S[t,u]),  S[t,u] = q[t] . k[u] + a[t-u] + b[u]

in each head of each batch. Nothing of size T x T is stored: a program takes a block of rows past the
tiles of S, each made where it is used, and keeps a running maximum per row; the backward makes the
tiles again. Memory is linear in T. Dao et al. 2022, arXiv 2205.14135.

A sequence is one head of one batch: rows lie at (sequence * T + t) in every tensor but a and b.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# Full float32 products: an exponent needs its digits.
PRECISION = "ieee"


@triton.jit
def _load(x, sequence, t, T, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows t of x [.., T, D] as [len(t), WIDTH], with zeros outside."""
    column = tl.arange(0, WIDTH)
    place = (sequence * T + t)[:, None] * D + column[None, :]
    return tl.load(x + place, mask=(t < T)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def _store(x, value, sequence, t, T, D: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    place = (sequence * T + t)[:, None] * D + column[None, :]
    tl.store(x + place, value, mask=(t < T)[:, None] & (column < D)[None, :])


@triton.jit
def _scores(left, right, a, b, head, t, u, T, DOT: tl.constexpr):
    """The tile of S at t and u, -inf where u > t: left @ right^T is q @ k^T with t [n, 1] and u [1, n], or k @ q^T."""
    distance = t - u
    # Masked before the bias comes: a bias right after the product would be its accumulator, and spill registers.
    S = tl.where(distance >= 0, tl.dot(left, tl.trans(right), input_precision=DOT), -float("inf"))
    if a is not None:
        S += tl.load(a + head * T + distance, mask=(distance >= 0) & (distance < T), other=0.0)
    if b is not None:
        S += tl.load(b + head * T + u, mask=u < T, other=0.0)
    return S


@triton.jit
def _forward(
    q, k, v, a, b, y, peak, total, H, T,
    DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """y[t], the row's largest S as peak[t], and the sum of its exp(S - peak[t]) as total[t]."""
    sequence, row = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS  # the longest rows first
    head, t = sequence % H, start + row
    query = _load(q, sequence, t, T, DK, KEY)
    m = tl.full([ROWS], -float("inf"), peak.dtype.element_ty)
    denominator = tl.zeros([ROWS], peak.dtype.element_ty)
    numerator = tl.zeros([ROWS, VALUE], peak.dtype.element_ty)
    for first in range(0, start + ROWS, ROWS):
        u = first + row
        key, value = _load(k, sequence, u, T, DK, KEY), _load(v, sequence, u, T, DV, VALUE)
        S = _scores(query, key, a, b, head, t[:, None], u[None, :], T, DOT)
        higher = tl.maximum(m, tl.max(S, axis=1))  # finite from the first tile on: every row sees u = 0
        scale, P = tl.exp(m - higher), tl.exp(S - higher[:, None])
        denominator = denominator * scale + tl.sum(P, axis=1)
        numerator = numerator * scale[:, None] + tl.dot(P.to(value.dtype), value, input_precision=DOT)
        m = higher
    _store(y, numerator / denominator[:, None], sequence, t, T, DV, VALUE)
    tl.store(peak + sequence * T + t, m, mask=t < T)
    tl.store(total + sequence * T + t, denominator, mask=t < T)


@triton.jit
def _gradient(left, right, left_value, right_value, a, b, peak, mean, sequence, head, t, u, T, DOT: tl.constexpr):
    """P = exp(S[t,u] - peak[t]), and the gradient of S, dS = P (g[t] . v[u] - mean[t]), of a tile.

    g is the gradient of y over the row's total, and mean is g . y: P is not divided by the total,
    whose logarithm, added to peak, would lose the digits that a large peak leaves it.
    """
    highest = tl.load(peak + sequence * T + t, mask=t < T, other=float("inf"))
    P = tl.exp(_scores(left, right, a, b, head, t, u, T, DOT) - highest)
    average = tl.load(mean + sequence * T + t, mask=t < T, other=0.0)
    return P, P * (tl.dot(left_value, tl.trans(right_value), input_precision=DOT) - average)


@triton.jit
def _backward_rows(
    q, k, v, a, b, g, peak, mean, dq, H, T,
    DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dq[t] = sum_u dS[t,u] k[u]."""
    sequence, row = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    head, t = sequence % H, start + row
    query, grad = _load(q, sequence, t, T, DK, KEY), _load(g, sequence, t, T, DV, VALUE)
    d_query = tl.zeros([ROWS, KEY], peak.dtype.element_ty)
    for first in range(0, start + ROWS, ROWS):
        u = first + row
        key, value = _load(k, sequence, u, T, DK, KEY), _load(v, sequence, u, T, DV, VALUE)
        _, dS = _gradient(query, key, grad, value, a, b, peak, mean, sequence, head, t[:, None], u[None, :], T, DOT)
        d_query += tl.dot(dS.to(key.dtype), key, input_precision=DOT)
    _store(dq, d_query, sequence, t, T, DK, KEY)


@triton.jit
def _backward_columns(
    q, k, v, a, b, g, peak, mean, dk, dv, db, H, T,
    DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dk[u] = sum_t dS[t,u] q[t], dv[u] = sum_t P[t,u] g[t], and each sequence's db[u] = sum_t dS[t,u]."""
    sequence, start, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS, tl.arange(0, ROWS)
    head, u = sequence % H, start + row
    key, value = _load(k, sequence, u, T, DK, KEY), _load(v, sequence, u, T, DV, VALUE)
    d_key = tl.zeros([ROWS, KEY], peak.dtype.element_ty)
    d_value = tl.zeros([ROWS, VALUE], peak.dtype.element_ty)
    d_bias = tl.zeros([ROWS], peak.dtype.element_ty)
    for first in range(start, T, ROWS):
        t = first + row
        query, grad = _load(q, sequence, t, T, DK, KEY), _load(g, sequence, t, T, DV, VALUE)
        P, dS = _gradient(key, query, value, grad, a, b, peak, mean, sequence, head, t[None, :], u[:, None], T, DOT)
        d_key += tl.dot(dS.to(query.dtype), query, input_precision=DOT)
        d_value += tl.dot(P.to(grad.dtype), grad, input_precision=DOT)
        d_bias += tl.sum(dS, axis=1)
    _store(dk, d_key, sequence, u, T, DK, KEY)
    _store(dv, d_value, sequence, u, T, DV, VALUE)
    if b is not None:
        tl.store(db + sequence * T + u, d_bias, mask=u < T)


@triton.jit
def _backward_diagonals(
    q, k, v, a, b, g, peak, mean, da, H, T,
    DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Each sequence's da[d,j], the sum of dS[u+d,u] over u = j mod ROWS: [.., T, ROWS].

    A program adds up the tiles of one diagonal, for they hold the same distances in the same places.
    A distance d crosses two such diagonals, each in columns j of its own, so that nothing is
    written twice, and no sum depends on which program comes first.
    """
    sequence, gap, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS, tl.arange(0, ROWS)
    head = sequence % H
    d_bias = tl.zeros([ROWS, ROWS], peak.dtype.element_ty)
    for first in range(gap, T, ROWS):
        t, u = first + row, first - gap + row
        query, grad = _load(q, sequence, t, T, DK, KEY), _load(g, sequence, t, T, DV, VALUE)
        key, value = _load(k, sequence, u, T, DK, KEY), _load(v, sequence, u, T, DV, VALUE)
        _, dS = _gradient(query, key, grad, value, a, b, peak, mean, sequence, head, t[:, None], u[None, :], T, DOT)
        d_bias += dS
    distance = gap + row[:, None] - row[None, :]
    place = (sequence * T + distance) * ROWS + row[None, :]
    tl.store(da + place, d_bias, mask=(distance >= 0) & (distance < T))


def _launch(q: Tensor, v: Tensor) -> tuple[tuple[int, int], dict]:
    """The grid, and what the kernels are compiled for: blocks that spill little up to 128 dims, by ptxas for sm_90."""
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
        peak, total = (torch.empty(q.shape[:3], dtype=sums, device=q.device) for _ in range(2))
        ctx.grid, ctx.sizes = _launch(q, v)
        _forward[ctx.grid](q, k, v, a, b, y, peak, total, **ctx.sizes)
        ctx.save_for_backward(q, k, v, a, b, y, peak, total)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):
        q, k, v, a, b, y, peak, total = ctx.saved_tensors
        g = (g / total[..., None]).to(v.dtype).contiguous()
        mean = (g.to(peak.dtype) * y).sum(-1)
        inputs, grid, sizes = (q, k, v, a, b, g, peak, mean), ctx.grid, ctx.sizes
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        db = None if b is None else torch.empty_like(peak)
        da = None if a is None else peak.new_zeros(*peak.shape, sizes["ROWS"])
        _backward_rows[grid](*inputs, dq, **sizes)
        _backward_columns[grid](*inputs, dk, dv, db, **sizes)
        if a is not None:
            _backward_diagonals[grid](*inputs, da, **sizes)
            da = da.sum((0, -1)).to(a.dtype)
        return dq, dk, dv, da, None if b is None else db.sum(0).to(b.dtype)


@torch.compiler.disable  # a compiled model calls it between two graphs
def flash_attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    """The attention above: q, k [B, H, T, DK], v [B, H, T, DV] -> y like v, with gradients of all that is given.

    q comes scaled, by one number or, as log n scaling does, by one per position. a [H or 1, T] and
    b [H, T] are log f and log beta of a Toeplitz w, finite, or None for 0; its alpha cancels. Sums are
    in float32, or float64 where q is. Needs a GPU, or TRITON_INTERPRET=1, which is wrong in bfloat16.
    """
    return _Attention.apply(q, k, v, None if a is None else a.expand(q.shape[1], -1), b)
