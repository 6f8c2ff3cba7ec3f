"""Means with the weights exp(k). As exp(k) may overflow, only logarithms of weights and of their sums are stored."""

import torch
from torch import Tensor

Mean = tuple[Tensor, Tensor]


def merge_means(older: Mean, latest: Mean) -> Mean:
    """Merge the means V and v, whose total weights are exp(K) and exp(k).

    Return log(exp(K) + exp(k)) and (exp(K) V + exp(k) v) / (exp(K) + exp(k)). K and k must broadcast with V and v.
    """
    (K, V), (k, v) = older, latest
    return torch.logaddexp(K, k), V + (v - V) * (k - K).sigmoid()


def running_means(k: Tensor, v: Tensor, decay: Tensor | float = 0.0) -> Mean:
    """Compute K, the log of the sum of the weights exp(k[u] - (t-u) decay) over u <= t, and V, the mean of v[u] with
    these weights.

    k, v [B, T, C] -> K, V [B, T, C]; decay [C] or a number, 0 or more. If decay is a number, k may have one channel for
    all of v; K then has one channel too.

    Neighbouring positions are merged into pairs. The running means of the pairs, computed by recursion, are the results
    at the odd positions, and one more merge gives the results at the even positions. Time and memory are linear in T.
    """
    T = k.shape[1]
    if T == 1:
        return k, v
    pairs = merge_means((k[:, 0 : T - 1 : 2] - decay, v[:, 0 : T - 1 : 2]), (k[:, 1::2], v[:, 1::2]))
    odd = running_means(*pairs, 2 * decay)
    n = (T - 1) // 2  # the number of even positions after position 0
    even = merge_means((odd[0][:, :n] - decay, odd[1][:, :n]), (k[:, 2::2], v[:, 2::2]))
    return _interleave(k[:, :1], odd[0], even[0]), _interleave(v[:, :1], odd[1], even[1])


def _interleave(first: Tensor, odd: Tensor, even: Tensor) -> Tensor:
    """Return first, odd[0], even[0], odd[1], even[1] and so on, along dimension 1."""
    n = even.shape[1]
    return torch.cat([first, torch.stack([odd[:, :n], even], 2).flatten(1, 2), odd[:, n:]], dim=1)


def log_weighted_mean(log_w: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute y[c] = sum_u w[h,u] exp(k[u,c]) v[u,c] / sum_u w[h,u] exp(k[u,c]), where h is the head of c.

    log_w [H, n] or [1, n], k, v [B, n, C] -> y [B, 1, C].
    """
    k = (k.unflatten(-1, (len(log_w), -1)) + log_w.T[:, :, None]).flatten(2)
    return (k.softmax(1) * v).sum(1, keepdim=True)
