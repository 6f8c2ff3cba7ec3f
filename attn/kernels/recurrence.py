"""Linear recurrences whose state is a matrix: linear attention with decay, and delta rules.

    S_t = diag(exp(g_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + s_t k_t v_t^T,    y_t = S_t^T q_t

Each head has a state S [K, D], which is 0 before the first position. At each position it decays, and s_t k_t v_t^T is
added to it, where s_t is a number. The delta rules also read the state with a_t and add the result along b_t.

`recurrent_sum` computes y by chunks of positions. Without a delta rule, y = W v + U S, where v are the values of a
chunk times s, W the weights between its positions, S the state before it, and U[t] is q_t times the decay from the
chunk's start to t. With a delta rule, terms for what is read are added, and what a_t reads depends on what was read at
earlier positions of the chunk. What all positions read is therefore the solution of a triangular system of linear
equations. Only the states, and what is read from them, are computed in a loop over the chunks (`_scan`).

The decay from position u to t is exp(g_{u+1} + ... + g_t). The exponent is at most 0, so that nothing overflows, and
nothing is divided by a decay. There is one exception, which is faster: if g has K columns and its sum over a chunk is
known to be at least LEAST_SUM, as in RWKV-7, the decay is the quotient of the decays from the start of the chunk to t
and to u.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attn.kernels import chunks
from attn.kernels.derivatives import kernel_backward
from attn.kernels.products import at_least_float32, float32_product

CHUNK = 32  # positions per chunk, a power of two

# Unless decays are quotients, g is clamped to at least this. In a cumulative sum, a g of much larger magnitude
# would make the other values of g lose precision. A number that is multiplied by exp(-80) is negligible.
LEAST = -80.0

# If no sum of g within a chunk is below this, float32 can hold the exponentials of these sums and of their negatives,
# also if they are multiplied by two inputs of usual size.
LEAST_SUM = -40.0


class Recurrence(NamedTuple):
    """The inputs of a recurrence at T positions."""

    q: Tensor  # [B, H, T, K]. If all heads share q and k, they are [B, 1, T, K], g is [..., T, 1], and a is None
    k: Tensor  # like q
    v: Tensor  # [B, H, T, D]
    g: Tensor  # the logarithm of the decay, at most 0, [B or 1, H or 1, T, K or 1]
    a: Tensor | None = None  # [B, H, T, K]; None means 0
    b: Tensor | None = None  # [B, H, T, K]; None means -k
    s: Tensor | None = None  # [B, H, T, 1]; None means 1
    # A lower bound of g. If it is LEAST_SUM / CHUNK or more, and g has K columns, y is computed by a faster method.
    least: float = -math.inf


def recurrent_step(r: Recurrence, S: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return y [B, H, 1, D] at one position and the state [B, H, K, D] after it, given the state S before it.

    S = None means 0. Both results are float32 or float64.
    """
    with torch.autocast(r.v.device.type, enabled=False):
        q, k, v, g, a, b = _inputs(r)
        if S is None:
            S = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
        new = g.exp().mT * S + k.mT @ v
        if a is not None:
            new = new + (-k if b is None else b).mT @ (a @ S)
        return q @ new, new


def recurrent_sum(r: Recurrence) -> Tensor:
    """Compute y [B, H, T, D] at all positions, in float32 or float64, in time and memory linear in T.

    Under autocast, only the backward pass computes in a lower precision, and there only products within chunks.
    """
    inputs = (None if x is None else chunks.split(x, CHUNK).movedim(-3, 0) for x in _inputs(r))
    y = _by_chunks(*inputs, fast=r.g.shape[-1] > 1 and r.least * CHUNK >= LEAST_SUM)
    return y.movedim(0, 2).flatten(2, 3)[:, :, : r.v.shape[-2]]


def _inputs(r: Recurrence) -> list[Tensor | None]:
    """Return q, k, s * v, g, a and b in float32 or float64."""
    q, k, v, g, a, b, s = (None if x is None else at_least_float32(x) for x in r[:-1])
    return [q, k, v if s is None else s * v, g, a, b]


def _by_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor | None, b: Tensor | None, fast: bool) -> Tensor:
    """Compute y [N, B, H, G, D] for N chunks of G positions.

    If `fast`, q and a are multiplied once by their decays from the start of the chunk, and k and b are divided by
    theirs, so that products of pairs need no decay. `fast` may be true only if g has K columns and no sum of g within a
    chunk is below LEAST_SUM.
    """
    after = (g if fast else g.clamp(min=LEAST)).cumsum(-2)  # the sum of g from the start of the chunk to each position
    last = after[..., -1:, :]
    U = q * after.exp()
    if fast:
        q, k, b = U, *(None if x is None else x * (-after).exp() for x in (k, b))
        rest, sums = last.exp(), None
    else:
        rest, sums = (last - after).exp(), after
    M, W = last.exp().mT, _pairs(q, k, sums, sums)
    if a is None:
        return float32_product(W, v) + _scan(M, U, k * rest, v)[0]
    before = F.pad(after[..., :-1, :], (0, 0, 1, 0))  # the sum to position t - 1, since a[t] reads S_{t-1}
    U_a = a * before.exp()
    if fast:
        a, before = U_a, None
    W_a = _pairs(a, k, before, sums, diagonal=-1)
    if b is None:  # b = -k, so what is read is subtracted from v; the difference z then takes the place of v
        inverse = _Inverse.apply(W_a)
        y, z = _scan(M, U, k * rest, float32_product(inverse, v), -float32_product(inverse, U_a))
        return y + float32_product(W, z)
    inverse, W_b = _Inverse.apply(-_pairs(a, b, before, sums, diagonal=-1)), _pairs(q, b, sums, sums)
    read = float32_product(inverse, float32_product(W_a, v))
    y, z = _scan(M, U, b * rest, read, float32_product(inverse, U_a), k * rest, v)
    return y + float32_product(W_b, z) + float32_product(W, v)


def _pairs(x: Tensor, y: Tensor, to: Tensor | None, after: Tensor | None, diagonal: int = 0) -> Tensor:
    """Compute W[t,u] = sum_c x[t,c] y[u,c] exp(to[t,c] - after[u,c]) for u <= t + diagonal, else 0.

    x, y [..., G, K], to, after [..., G, K or 1] -> [..., G, G]. `to` is `after`, or `after` at the position before;
    None means 0.
    """
    if after is None:
        # The gradient of the decays is a small difference between terms that contain the gradients of x and of y, so
        # that these two gradients must not be rounded to bf16.
        with torch.autocast(x.device.type, enabled=False):
            return (x @ y.mT).tril(diagonal)
    if after.shape[-1] > 1:
        return _pairs_by_halves(x, y, to, after).tril(diagonal)
    causal = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).tril(diagonal)
    return float32_product(x, y.mT) * (to - after.mT).masked_fill(~causal, -torch.inf).exp()


def _pairs_by_halves(x: Tensor, y: Tensor, to: Tensor, after: Tensor) -> Tensor:
    """Compute what `_pairs` does for u < t, if G is a power of two. The result is x[t] . y[t] at u = t, and 0 at u > t.

    Blocks of 1, 2, 4, ... positions are joined in pairs. For u in the first block of a pair and t in the second,
    the decay from u to t is the decay from u to the end of the first block times the decay from there to t.
    """
    W = (x * y).sum(-1)[..., None, None]  # [..., blocks, size, size]
    while (size := W.shape[-1]) < x.shape[-2]:
        (_, x2), (y1, _), (_, to2), (after1, _) = (z.unflatten(-2, (-1, 2, size)).unbind(-3) for z in (x, y, to, after))
        middle = after1[..., -1:, :]
        across = float32_product(x2 * (to2 - middle).exp(), (y1 * (middle - after1).exp()).mT)
        W1, W2 = W.unflatten(-3, (-1, 2)).unbind(-3)
        W = torch.cat([F.pad(W1, (0, size)), torch.cat([across, W2], -1)], -2)
    return W.squeeze(-3)


class _Inverse(torch.autograd.Function):
    """The inverse of 1 + x, where x [..., G, G] is 0 on and above the diagonal.

    Its gradient takes two products. That of torch.linalg.solve_triangular solves another system, which is slower.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        one = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            inverse = torch.linalg.solve_triangular(x, one.expand_as(x), upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @kernel_backward
    def backward(ctx, g: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ g @ inverse.mT).tril(-1)


def _scan(
    M: Tensor,
    U: Tensor,
    b: Tensor,
    z: Tensor,
    U_a: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute what the state S before each of N chunks adds to y, and what the chunk adds to S along b.

        y_n = U_n S_n,    z'_n = z_n + U_a_n S_n,    S_{n+1} = M_n S_n + b_n^T z'_n + k_n^T v_n,    S_0 = 0

    M [N, B or 1, H or 1, K or 1, 1] holds diagonals of diagonal matrices. U, b, U_a, k [N, B or 1, H or 1, G, K],
    z, v [N, B, H, G, D] -> y and z' like z. U_a = None and k = None mean 0.
    """
    B, H = z.shape[1:3]
    inputs = (x if x is None else x.expand(-1, B, H, -1, -1).flatten(1, 2) for x in (M, U, b, z, U_a, k, v))
    y, z, _ = torch.ops.rwv_lab.scan(*inputs)
    return y.unflatten(1, (B, H)), z.unflatten(1, (B, H))


# An operator, because the compiler would unroll the loop. torch.library.custom_op would import the compiler.
torch.library.define(
    "rwv_lab::scan",
    "(Tensor M, Tensor U, Tensor b, Tensor z, Tensor? U_a, Tensor? k, Tensor? v) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "rwv_lab::scan_backward",
    "(Tensor dy, Tensor dz, Tensor S, Tensor M, Tensor U, Tensor b, Tensor z, Tensor? U_a, Tensor? k, Tensor? v)"
    " -> Tensor[]",
)


@torch.library.impl("rwv_lab::scan", "default")
def scan(
    M: Tensor, U: Tensor, b: Tensor, z: Tensor, U_a: Tensor | None, k: Tensor | None, v: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `_scan` with one dimension for B and H, and the states S [N, B H, K, D], which the gradient needs."""
    y, z = z.new_empty(z.shape), z.clone(memory_format=torch.contiguous_format)
    S = z.new_empty(len(z), z.shape[1], b.shape[-1], z.shape[-1])
    y[0], S[0] = 0, 0
    with torch.autocast(z.device.type, enabled=False):
        for n in range(1, len(z)):
            torch.mul(M[n - 1], S[n - 1], out=S[n])
            S[n].baddbmm_(b[n - 1].mT, z[n - 1])
            if k is not None:
                S[n].baddbmm_(k[n - 1].mT, v[n - 1])
            torch.bmm(U[n], S[n], out=y[n])
            if U_a is not None:
                z[n].baddbmm_(U_a[n], S[n])
    return y, z, S


@torch.library.impl("rwv_lab::scan_backward", "default")
def scan_backward(
    dy: Tensor,
    dz: Tensor,
    S: Tensor,
    M: Tensor,
    U: Tensor,
    b: Tensor,
    z: Tensor,
    U_a: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
) -> list[Tensor]:
    """Return the gradients of the inputs of `scan` that are not None.

    dy and dz are the gradients of the outputs y and z', and the argument z is the output z', not the input z.
    Of the gradients of the states, it keeps one at a time.
    """
    dM, dS = S.new_zeros(*S.shape[:-1], 1), torch.zeros_like(S[0])
    dz = dz.clone(memory_format=torch.contiguous_format)
    dU, dU_a = (_empty_with_zeros(x, 0) for x in (U, U_a))
    db, dk, dv = (_empty_with_zeros(x, -1) for x in (b, k, v))
    for n in reversed(range(1, len(z))):
        torch.bmm(dy[n], S[n].mT, out=dU[n])
        dS.baddbmm_(U[n].mT, dy[n])
        if U_a is not None:
            torch.bmm(dz[n], S[n].mT, out=dU_a[n])
            dS.baddbmm_(U_a[n].mT, dz[n])
        torch.bmm(z[n - 1], dS.mT, out=db[n - 1])
        dz[n - 1].baddbmm_(b[n - 1], dS)
        if k is not None:
            torch.bmm(v[n - 1], dS.mT, out=dk[n - 1])
            torch.bmm(k[n - 1], dS, out=dv[n - 1])
        dM[n - 1] = (dS * S[n - 1]).sum(-1, keepdim=True)
        dS *= M[n - 1]
    return [x for x in (dM.sum_to_size(M.shape), dU, db, dz, dU_a, dk, dv) if x is not None]


@torch.library.register_fake("rwv_lab::scan")
def _(M, U, b, z, U_a, k, v):
    return z.new_empty(z.shape), z.new_empty(z.shape), z.new_empty(*z.shape[:2], b.shape[-1], z.shape[-1])


@torch.library.register_fake("rwv_lab::scan_backward")
def _(dy, dz, S, M, U, b, z, U_a, k, v):
    return [M.new_empty(M.shape)] + [x.new_empty(x.shape) for x in (U, b, z, U_a, k, v) if x is not None]


def _save(ctx, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    M, U, b, _, U_a, k, v = inputs
    _, z, S = output
    ctx.save_for_backward(S, M, U, b, z, U_a, k, v)
    ctx.set_materialize_grads(False)  # zeros as the gradient of S would take as much memory as S


@kernel_backward
def _gradients(ctx, dy: Tensor, dz: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # under activation checkpointing, they can be read only once
    gradients = iter(torch.ops.rwv_lab.scan_backward(dy, torch.zeros_like(dy) if dz is None else dz, *saved))
    return tuple(None if x is None else next(gradients) for x in saved[1:])


torch.library.register_autograd("rwv_lab::scan", _gradients, setup_context=_save)


@register_flop_formula(torch.ops.rwv_lab.scan, get_raw=True)
def _flops(M, U, b, z, U_a, k, v, out_val=None) -> int:
    """Count the FLOPs of `scan`, which computes two to four matrix products for each chunk but the first."""
    products = 2 + (U_a is not None) + (k is not None)
    return 2 * products * (len(z) - 1) * U[0].numel() * z.shape[-1]


@register_flop_formula(torch.ops.rwv_lab.scan_backward, get_raw=True)
def _backward_flops(dy, dz, S, *inputs, out_val=None) -> int:
    """Count the FLOPs of `scan_backward`: each product of `scan` has two in the backward pass."""
    return 2 * _flops(*inputs)


def _empty_with_zeros(x: Tensor | None, n: int) -> Tensor | None:
    """Return an uninitialised tensor of the shape of x whose item n is 0, or None for None."""
    if x is not None:
        x = x.new_empty(x.shape)
        x[n] = 0
    return x
