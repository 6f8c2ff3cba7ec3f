"""What streaming layers keep of the past, and the last row of the sums that the forward pass makes of all rows.

A weighting `time` (attn/weightings.py), or None for w = 1, says how much has to be kept: every position
that has a weight of its own. What lies so far back that w is one number for all of it (`settled`) is kept
as a single position, what w forgets (`window`) not at all.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attn.kernels.causal import weighted_sum
from attn.kernels.products import at_least_float32
from attn.parts import dense_w

Rows = tuple[Tensor, ...]


class Past:
    """Tensors [..., n, D] that grow by a position at a time, oldest first; a row of each is a position.

    size None keeps every position, in memory that doubles when it is full. Otherwise the latest
    `size` are kept, in constant memory; what is older is forgotten or, with `merge`, kept as one
    position in front of them: merge(rows of what is older, rows of the next) -> rows, in float64,
    because an endless sum in float32 comes to a standstill.
    """

    def __init__(self, size: int | None = None, merge: Callable[[Rows, Rows], Rows] | None = None):
        self.size, self.merge = size, merge
        self.buffers: list[Tensor] = []
        self.start = self.end = 0
        self.older: Rows | None = None

    def add(self, *latest: Tensor) -> Rows:
        """Keep the rows [..., 1, D] of the next position; give all that is kept, [..., n, D]."""
        if not self.buffers or self.end == self.buffers[0].shape[-2]:
            self.move(latest)
        for buffer, row in zip(self.buffers, latest, strict=True):
            buffer[..., self.end, :] = row[..., 0, :]
        self.end += 1
        n = self.end - self.start
        if self.merge is None and self.size is not None and n > self.size:
            self.start += 1
        elif self.merge is not None and self.size is not None and n > self.size + 1:
            self.merge_oldest()
        return self.kept()

    def kept(self) -> Rows:
        return tuple(buffer[..., self.start : self.end, :] for buffer in self.buffers)

    def move(self, latest: Rows) -> None:
        """What is kept, to the front of new buffers: twice as large as it, so that this is rare."""
        kept = self.kept()
        n = self.end - self.start
        capacity = max(2 * n, 16) if self.size is None else 2 * (self.size + 1)
        self.buffers = [row.new_empty(*row.shape[:-2], capacity, row.shape[-1]) for row in latest]
        for buffer, rows in zip(self.buffers, kept, strict=False):  # at first nothing is kept
            buffer[..., :n, :] = rows
        self.start, self.end = 0, n

    def merge_oldest(self) -> None:
        """Let the two oldest positions be one."""
        oldest, following = (tuple(b[..., self.start + i, :].double() for b in self.buffers) for i in (0, 1))
        self.older = self.merge(self.older or oldest, following)
        self.start += 1
        for buffer, row in zip(self.buffers, self.older, strict=True):
            buffer[..., self.start, :] = row


# sum_{u<=t} w[h,t,u] x[u,c]


def begin_sum(time: nn.Module | None) -> Past:
    if time is None:
        return Past(0, added)
    return Past(time.settled, added) if time.window is None else Past(time.window)


def added(older: Rows, x: Rows) -> Rows:
    return (older[0] + x[0],)


def step_sum(time: nn.Module | None, past: Past, x: Tensor) -> Tensor:
    """The sum at the next position, x [B, 1, C] -> [B, 1, C]."""
    (x,) = past.add(x)
    n = x.shape[1]
    return weighted_sum(dense_w(time, n, x, n - 1), x)


# sum_{u<=t} w[h,t,u] exp(k[u,c]) v[u,c] / sum_{u<=t} w[h,t,u] exp(k[u,c])


def begin_mean(time: nn.Module | None, forget: bool = True) -> Past:
    """`forget` False keeps in the denominator what w forgets."""
    if time is None:
        return Past(0, averaged)
    return Past(time.window) if forget and time.window is not None else Past(time.settled, averaged)


def averaged(older: Rows, latest: Rows) -> Rows:
    """Two positions as one: K = log(exp(K) + exp(k)), V = (exp(K) V + exp(k) v) / (exp(K) + exp(k))."""
    (K, V), (k, v) = older, latest
    return torch.logaddexp(K, k), V + (v - V) * (k - K).sigmoid()


def step_mean(time: nn.Module | None, past: Past, k: Tensor, v: Tensor, w_below: bool = True) -> Tensor:
    """The mean at the next position, k, v [B, 1, C] -> [B, 1, C]; not `w_below`: no w in the denominator.

    Each exp(k) is taken relative to the largest there is in the row, so that any k is safe.
    """
    with torch.autocast(k.device.type, enabled=False):
        k, v = past.add(at_least_float32(k), at_least_float32(v))
        n = k.shape[1]
        if not w_below:
            return weighted_sum(dense_w(time, n, k, n - 1), k.softmax(1) * v)
        if time is None or time.positive:
            log_w = k.new_zeros(1, n) if time is None else time.log_relative(n, n - 1)[:, 0]
            k = (k.unflatten(-1, (len(log_w), -1)) + log_w.T[:, :, None]).flatten(2)
            return (k.softmax(1) * v).sum(1, keepdim=True)
        w, e = time.relative(n, n - 1), (k - k.amax(1, keepdim=True)).exp()
        return weighted_sum(w, e * v) / weighted_sum(w, e)
