"""The unified form, written once, slowly, in float64: every variant is tested against it.

ATT[t,c] = gamma[t] * R[t,c] * sum_{u<=t} W[t,u,c] V[u,c] / sum_{u<=t} W[t,u,c]
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Terms(NamedTuple):
    """What a variant puts into the unified form, with W = factor * exp(exponent).

    W comes in two parts because exp(K) or exp(QK) alone may overflow where the ratio does not.
    """

    R: Tensor | None  # [B, T, C]; None stands for 1
    V: Tensor  # [B, T, C]
    factor: Tensor  # W's factor, broadcastable to [B, T, T, C], indexed b, t, u, c
    exponent: Tensor | None = None  # W's exponent, broadcastable to [B, T, T, C]; None stands for 0
    gamma: Tensor | None = None  # [T]; None stands for 1
    bias: Tensor | None = None  # added to the sum, [T, C]; None stands for 0
    normalised: bool = True  # False: no denominator


def unified(terms: Terms) -> Tensor:
    """ATT [B, T, C] in the dtype of V, computed in float64 position by position.

    Raises ValueError when an exponent comes without the denominator that makes it safe.
    """
    if terms.exponent is not None and not terms.normalised:
        raise ValueError("an exponent needs the denominator: give W as a factor instead")
    V = terms.V.double()
    B, T, C = V.shape
    factor = terms.factor.double().expand(B, T, T, C)
    exponent = None if terms.exponent is None else terms.exponent.double().expand(B, T, T, C)

    rows = []
    for t in range(T):
        past = slice(0, t + 1)
        W = factor[:, t, past]  # [B, t+1, C]
        if exponent is not None:
            E = exponent[:, t, past].masked_fill(W == 0, -torch.inf)  # what has no weight sets no scale
            W = W * torch.exp(E - E.amax(1, keepdim=True).detach())  # the largest cancels in the ratio
        row = (W * V[:, past]).sum(1)
        if terms.normalised:
            row = row / W.sum(1)
        if terms.bias is not None:
            row = row + terms.bias[t].double()
        if terms.R is not None:
            row = row * terms.R[:, t].double()
        if terms.gamma is not None:
            row = row * terms.gamma[t].double()
        rows.append(row)
    return torch.stack(rows, 1).to(terms.V.dtype)
