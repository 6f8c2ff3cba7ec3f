"""Weighted means with weights exp(k) that may overflow: only k and logarithms of sums of weights are stored."""

import torch
from torch import Tensor

Mean = tuple[Tensor, Tensor]


def merge_means(older: Mean, latest: Mean) -> Mean:
    """Merge the means V and v, whose total weights are exp(K) and exp(k).

    Returns log(exp(K) + exp(k)), (exp(K) V + exp(k) v) / (exp(K) + exp(k)); K, k broadcast with V, v.
    """
    (K, V), (k, v) = older, latest
    return torch.logaddexp(K, k), V + (v - V) * (k - K).sigmoid()


def running_means(k: Tensor, v: Tensor, decay: Tensor | float = 0.0) -> Mean:
    """Compute the means of v with the weights exp(k[u] - (t-u) decay) over u <= t, and the log of the sum of weights.

    k, v [B, T, C] -> K, V [B, T, C]; decay [C] or a number, 0 or more. k may have fewer channels than v if it
    broadcasts. Neighbours are merged into pairs, whose running means are those at every other position. One more merge
    gives the other means. This takes time and memory linear in T.
    """
    T = k.shape[1]
    if T == 1:
        return k, v
    pairs = merge_means((k[:, 0 : T - 1 : 2] - decay, v[:, 0 : T - 1 : 2]), (k[:, 1::2], v[:, 1::2]))
    odd = running_means(*pairs, 2 * decay)
    n = (T - 1) // 2  # even positions after the first
    even = merge_means((odd[0][:, :n] - decay, odd[1][:, :n]), (k[:, 2::2], v[:, 2::2]))
    return _interleave(k[:, :1], odd[0], even[0]), _interleave(v[:, :1], odd[1], even[1])


def _interleave(first: Tensor, odd: Tensor, even: Tensor) -> Tensor:
    """Return first, odd[0], even[0], odd[1], even[1] and so on, along dimension 1."""
    n = even.shape[1]
    return torch.cat([first, torch.stack([odd[:, :n], even], 2).flatten(1, 2), odd[:, n:]], dim=1)
