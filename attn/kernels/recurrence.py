"""Linear recurrences whose state is a matrix: linear attention with decay, and delta rules.

    S_t = diag(exp(g_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + s_t k_t v_t^T,    y_t = S_t^T q_t

Each head has a state S [K, D], which is 0 before the first position. At each position it decays, and s_t k_t v_t^T is
added to it, where s_t is a number. The delta rules also read the state with a_t and add the result along b_t.

`recurrent_sum` computes y by chunks of positions: y = W v + U S for the values v of a chunk and the state S before it.
The matrices W and U follow from the other inputs. With a delta rule, what a_t reads depends on what was read at earlier
positions of the chunk, so that W and U are found by solving a triangular system of linear equations. The state after
the chunk is P v + M S with two more such matrices; without a delta rule, M is diagonal.

The decay from position u to t is the exponential of the sum of g between them. This sum is at most 0, so that nothing
overflows, and there are no divisions by small numbers. If g has K columns and is known to be near 0, the decay is
computed faster, as a quotient of the decays from the start of the chunk to t and to u.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attn.kernels import chunks
from attn.kernels.products import at_least_float32

CHUNK = 32  # positions per chunk, a power of two

# Unless g is known to be near 0, it is clamped to at least this. In a cumulative sum, a g of much larger magnitude
# would make the other values of g lose precision. A number that is multiplied by exp(-80) is negligible.
LEAST = -80.0

# If no sum of g within a chunk is below this, float32 can hold the exponentials of these sums and of their negatives,
# also times two inputs of usual size.
LEAST_SUM = -40.0


class Recurrence(NamedTuple):
    """The inputs of a recurrence at T positions."""

    q: Tensor  # [B, H, T, K]; or [B, 1, T, K] if all heads share q and k; g is then [..., T, 1], and a is None
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
    """Compute y [B, H, T, D] at all positions, in float32 or float64, in time and memory linear in T."""
    with torch.autocast(r.v.device.type, enabled=False):
        inputs = (None if x is None else chunks.split(x, CHUNK) for x in _inputs(r))
        y = _by_chunks(*inputs, fast=r.least * CHUNK >= LEAST_SUM)
    return y.flatten(2, 3)[:, :, : r.v.shape[-2]]


def _inputs(r: Recurrence) -> list[Tensor | None]:
    """Return q, k, s * v, g, a and b in float32 or float64."""
    q, k, v, g, a, b, s = (None if x is None else at_least_float32(x) for x in r[:-1])
    return [q, k, v if s is None else s * v, g, a, b]


def _by_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor | None, b: Tensor | None, fast: bool) -> Tensor:
    """Compute y [B, H, N, G, D] for N chunks of G positions.

    `fast` may be true if no sum of g within a chunk is below LEAST_SUM.
    """
    after = (g if fast else g.clamp(min=LEAST)).cumsum(-2)  # the sum of g from the start of the chunk to each position
    W = _pairs(q, k, after, after, 0, fast)
    U = q * after.exp()
    last = after[..., -1:, :]
    rest = (last - after).exp()
    P, M = (k * rest).mT, last.exp().mT  # M is the diagonal of a matrix
    if a is not None:
        before = F.pad(after[..., :-1, :], (0, 0, 1, 0))  # the sum to the position before, whose state a reads
        W_a, U_a = _pairs(a, k, before, after, -1, fast), a * before.exp()
        if b is None:
            b, qb, ab = -k, -W, -W_a
        else:
            qb, ab = _pairs(q, b, after, after, 0, fast), _pairs(a, b, before, after, -1, fast)
        read = torch.linalg.solve_triangular(-ab, torch.cat([W_a, U_a], -1), upper=False, unitriangular=True)
        W_a, U_a = read.split([W_a.shape[-1], U_a.shape[-1]], -1)
        W, U = W + qb @ W_a, U + qb @ U_a
        added = (b * rest).mT
        P, M = P + added @ W_a, M * torch.eye(k.shape[-1], dtype=M.dtype, device=M.device) + added @ U_a
    return W @ v + U @ _states(M, P @ v)


def _pairs(x: Tensor, y: Tensor, to: Tensor, after: Tensor, diagonal: int, fast: bool) -> Tensor:
    """Compute W[t,u] = sum_c x[t,c] y[u,c] exp(to[t,c] - after[u,c]) for u <= t + diagonal, else 0.

    x, y [..., G, K], to, after [..., G, K or 1] -> [..., G, G]. `to` is `after`, or `after` at the position before.
    """
    if to.shape[-1] == 1:
        causal = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).tril(diagonal)
        return x @ y.mT * (to - after.mT).masked_fill(~causal, -torch.inf).exp()
    W = (x * to.exp()) @ (y * (-after).exp()).mT if fast else _pairs_by_halves(x, y, to, after)
    return W.tril(diagonal)


def _pairs_by_halves(x: Tensor, y: Tensor, to: Tensor, after: Tensor) -> Tensor:
    """Compute what `_pairs` does for u < t, if G is a power of two. The result is x[t] . y[t] at u = t, and 0 at u > t.

    Blocks of 1, 2, 4, ... positions are joined in pairs. For the links from the first block of a pair to the second
    one, the decay from u to t is the decay from u to the end of the first block times the decay from there to t.
    """
    W = (x * y).sum(-1)[..., None, None]  # [..., blocks, size, size]
    while (size := W.shape[-1]) < x.shape[-2]:
        (_, x2), (y1, _), (_, to2), (after1, _) = (z.unflatten(-2, (-1, 2, size)).unbind(-3) for z in (x, y, to, after))
        middle = after1[..., -1:, :]
        across = (x2 * (to2 - middle).exp()) @ (y1 * (middle - after1).exp()).mT
        W1, W2 = W.unflatten(-3, (-1, 2)).unbind(-3)
        W = torch.cat([F.pad(W1, (0, size)), torch.cat([across, W2], -1)], -2)
    return W.squeeze(-3)


@torch.compiler.disable  # the compiler would unroll the loop
def _states(M: Tensor, X: Tensor) -> Tensor:
    """Compute the state before each of the N chunks, S_0 = 0 and S_{n+1} = M_n S_n + X_n.

    M [B, H, N, K, K], or [B or 1, H or 1, N, K or 1, 1] with the diagonals of diagonal matrices; X [B, H, N, K, D] ->
    like X.
    """
    S = [torch.zeros_like(X[:, :, 0])]
    for M_n, X_n in zip(M.unbind(2)[:-1], X.unbind(2)[:-1], strict=True):
        S.append((M_n * S[-1] if M.shape[-1] == 1 else M_n @ S[-1]) + X_n)
    return torch.stack(S, 2)
