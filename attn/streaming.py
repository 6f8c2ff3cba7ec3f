"""Streaming: computing an attention one position at a time, from a cache of the past.

For sums and means, the position weight w (attn/position_weights.py; None for w = 1) decides what the cache holds. The
cache has one entry for each recent position. Positions so far back that w is constant are merged into one more entry.
Positions outside the window of w are dropped, unless a denominator without w needs them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attn.kernels.causal import weighted_sum
from attn.kernels.means import Mean, log_weighted_mean
from attn.kernels.products import at_least_float32
from attn.position_weights import PositionWeight, weight_matrix

Rows = tuple[Tensor, ...]


class Cache:
    """Tensors [..., n, D] with one row for each position, oldest first, to which positions are appended.

    Args:
        size: the number of positions to keep. None keeps all, in buffers that double in size when they are full.
        merge: the function that merges all but the last `size` positions into one additional row, in front of the
            others: merge(merged, oldest) -> merged. `merged` has the merged row of each tensor, and `oldest` the row
            of the oldest position that is not merged yet. Both are float64, because a long sum in float32 would stop
            growing. If `merge` is None, these positions are dropped.
    """

    def __init__(self, size: int | None = None, merge: Callable[[Rows, Rows], Rows] | None = None):
        self.size, self.merge = size, merge
        self.buffers: list[Tensor] = []
        self.start = self.end = 0
        self.merged: Rows | None = None

    def append(self, *latest: Tensor) -> Rows:
        """Append the rows [..., 1, D] of the next position, and return all rows, [..., n, D].

        All rows get the dtype of the latest row. This dtype changes when streaming enters or leaves autocast.
        """
        full = not self.buffers or self.end == self.buffers[0].shape[-2]
        if full or any(b.dtype != row.dtype for b, row in zip(self.buffers, latest, strict=True)):
            self.reallocate(latest)
        for buffer, row in zip(self.buffers, latest, strict=True):
            buffer[..., self.end, :] = row[..., 0, :]
        self.end += 1
        n = self.end - self.start
        if self.merge is None and self.size is not None and n > self.size:
            self.start += 1
        elif self.merge is not None and self.size is not None and n > self.size + 1:
            self.merge_oldest()
        return self.rows()

    def rows(self) -> Rows:
        """Return all rows, [..., n, D]."""
        return tuple(buffer[..., self.start : self.end, :] for buffer in self.buffers)

    def reallocate(self, latest: Rows) -> None:
        """Copy all rows to the front of new buffers, about twice as large as needed, so that copies are rare."""
        rows = self.rows()
        n = self.end - self.start
        capacity = max(2 * n, 16) if self.size is None else 2 * (self.size + 1)
        self.buffers = [row.new_empty(*row.shape[:-2], capacity, row.shape[-1]) for row in latest]
        for buffer, old in zip(self.buffers, rows, strict=False):  # `rows` is empty at the first call
            buffer[..., :n, :] = old
        self.start, self.end = 0, n

    def merge_oldest(self) -> None:
        """Merge the two oldest rows into one."""
        oldest, following = (tuple(b[..., self.start + i, :].double() for b in self.buffers) for i in (0, 1))
        self.merged = self.merge(self.merged or oldest, following)
        self.start += 1
        for buffer, row in zip(self.buffers, self.merged, strict=True):
            buffer[..., self.start, :] = row


@dataclass
class Past:
    """The state of a weighted mean of V over the past positions.

    `mean` is a pair: the log of the sum of the weights, and the weighted mean. Both are float64 [B, 1, C]. Before the
    first position, they are the numbers -inf and 0.
    """

    mean: Mean


def new_past(like: Tensor) -> Past:
    """Return the state before the first position, on the device of `like`."""
    return Past((like.new_tensor(-torch.inf, dtype=torch.float64), like.new_tensor(0.0, dtype=torch.float64)))


@dataclass
class LayerState:
    """The state of a layer between two calls of `step`."""

    position: int  # of the next input
    # The last inputs, for the token shift: [B, 1, dim // 2], or [B, past, dim] for one of attn/shifts.py.
    previous: Tensor
    cache: object  # what the attention's `new_cache` returned

    def token_shift(self, x: Tensor) -> Tensor:
        """Apply `parts.token_shift` to the next input, x [B, 1, dim] -> [B, 1, dim], and store its first half."""
        half = self.previous.shape[-1]
        previous, self.previous = self.previous, x[..., :half]
        return torch.cat([previous, x[..., half:]], dim=-1)


class Streaming(nn.Module):
    """The streaming part of `Attention`: `begin` and `step` compute its outputs one position at a time.

    By default the cache holds all inputs, and each step computes the whole past again, which is correct but slow. To
    be faster, a variant overrides `new_cache` and `mix_step`. A variant that overrides `forward`, in order to use
    `carry`, must override `step` too.
    """

    def begin(self, batch: int) -> LayerState:
        """Return the state before the first position of `batch` sequences."""
        past, channels = (1, self.dim // 2) if self.shift is None else (self.shift.past, self.dim)
        return LayerState(0, self.out.weight.new_zeros(batch, past, channels), self.new_cache())

    def step(self, x: Tensor, state: LayerState, carry=None):
        """Return what `forward` returns at the next position, x [B, 1, dim] -> [B, 1, dim], and update the state.

        Raises ValueError if the next position is beyond `max_length`.
        """
        x, t = self.next_input(x, state)
        return self.project(self.mix_step(x, state.cache, t), t), carry

    def next_input(self, x: Tensor, state: LayerState) -> tuple[Tensor, int]:
        """Return the next input after the token shift, and its position; advance the position of the state.

        Raises ValueError if the position is beyond `max_length`.
        """
        t = state.position
        if self.max_length is not None and t >= self.max_length:
            raise ValueError(f"the attention is defined for {self.max_length} positions: got {t + 1}")
        state.position += 1
        if self.shift is not None:
            seen = torch.cat([state.previous, x], dim=1)
            state.previous = seen[:, 1:]
            return self.shift(seen), t
        return state.token_shift(x) if self.token_shift else x, t

    def new_cache(self) -> object:
        """Return the cache before the first position."""
        return Cache()

    def mix_step(self, x: Tensor, cache: object, t: int) -> Tensor:
        """Compute ATT at position t, x [B, 1, dim] -> [B, 1, width], and update the cache."""
        (x,) = cache.append(x)
        return self.mix(x)[:, -1:]


def cache_for(
    position_weight: PositionWeight | None, merge: Callable[[Rows, Rows], Rows], w_in_denominator: bool = True
) -> Cache:
    """Return the cache for `sum_step`, with merge=merge_sums, or for `mean_step`, with merge=merge_means.

    A denominator without w needs the positions outside the window of w too.
    """
    if position_weight is None:
        return Cache(0, merge)
    if w_in_denominator and position_weight.window is not None:
        return Cache(position_weight.window)
    return Cache(position_weight.constant_after, merge)


# The sum  sum_{u<=t} w[h,t,u] x[u,c]


def merge_sums(older: Rows, x: Rows) -> Rows:
    return (older[0] + x[0],)


def sum_step(position_weight: PositionWeight | None, cache: Cache, x: Tensor) -> Tensor:
    """Compute the sum at the next position, x [B, 1, C] -> [B, 1, C]."""
    (x,) = cache.append(x)
    n = x.shape[1]
    return weighted_sum(weight_matrix(position_weight, n, x, n - 1), x)


# The mean  sum_{u<=t} w[h,t,u] exp(k[u,c]) v[u,c] / sum_{u<=t} w[h,t,u] exp(k[u,c])


def mean_step(
    position_weight: PositionWeight | None, cache: Cache, k: Tensor, v: Tensor, w_in_denominator: bool = True
) -> Tensor:
    """Compute the mean at the next position, k, v [B, 1, C] -> [B, 1, C].

    If `w_in_denominator` is False, the denominator is sum_{u<=t} exp(k[u,c]). The largest exponent is subtracted before
    exp, so that exp cannot overflow.
    """
    with torch.autocast(k.device.type, enabled=False):
        k, v = cache.append(at_least_float32(k), at_least_float32(v))
        n = k.shape[1]
        if not w_in_denominator:
            return weighted_sum(weight_matrix(position_weight, n, k, n - 1), k.softmax(1) * v)
        if position_weight is None or position_weight.positive:
            log_w = k.new_zeros(1, n) if position_weight is None else position_weight.log_relative(n, n - 1)[:, 0]
            return log_weighted_mean(log_w, k, v)
        w, e = position_weight.relative(n, n - 1), (k - k.amax(1, keepdim=True)).exp()
        return weighted_sum(w, e * v) / weighted_sum(w, e)
