"""The unified form of all attentions, computed slowly in float64. The tests compare every attention with it.

ATT[t,c] = gamma[t] * R[t,c] * (sum_{u<=t} W[t,u,c] V[u,c] / sum_{u<=t} W[t,u,c] + bias[t,c])

An attention may lack gamma, R, bias and the denominator. Some also apply a norm to the sum, or add terms to it.
Their method `reference` computes the form without R and gamma, applies the norm or adds the terms, and then multiplies
by R and gamma.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Terms(NamedTuple):
    """The terms of the unified form for one variant, with W = factor * exp(exponent).

    W has two parts because exp(exponent) may overflow even if the ratio of the two sums does not.
    """

    R: Tensor | None  # [B, T, C]; None means 1
    V: Tensor  # [B, T, C]
    # The indices of W are b, t (receives), u (sends), c, used for u <= t. Only b may be missing, unless all are.
    factor: Tensor  # broadcastable to [B, T, T, C]
    exponent: Tensor | None = None  # broadcastable to [B, T, T, C]; None means 0
    gamma: Tensor | None = None  # [T]; None means 1
    bias: Tensor | None = None  # [T, C], added before the multiplication by R; None means 0
    normalised: bool = True  # whether there is a denominator


def unified(terms: Terms) -> Tensor:
    """Compute ATT [B, T, C] in float64, one position at a time, and return it in the dtype of V.

    To avoid an overflow, the maximum of the exponent over the u with W != 0 is subtracted from the exponent. This
    leaves the ratio of the two sums unchanged, but not a sum without a denominator. Raises ValueError if there is an
    exponent but no denominator, or if R, factor or exponent has a shape that does not fit.
    """
    if terms.exponent is not None and not terms.normalised:
        raise ValueError("an exponent needs a denominator: without one, give the whole W as factor")
    V = terms.V.double()
    B, T, C = V.shape
    R, factor = expanded("R", terms.R, (B, T, C)), expanded("factor", terms.factor, (B, T, T, C))
    exponent = expanded("exponent", terms.exponent, (B, T, T, C))

    rows = []
    for t in range(T):
        past = slice(0, t + 1)
        W = factor[:, t, past]  # [B, t+1, C]
        if exponent is not None:
            E = exponent[:, t, past]
            largest = E.detach().masked_fill(W == 0, -torch.inf).amax(1, keepdim=True)  # it cancels in the ratio
            # E can be above `largest` only where W is 0; the clamp keeps exp, and thus the gradient of W, finite there.
            W = W * torch.exp((E - largest).clamp(max=300))
        row = (W * V[:, past]).sum(1)
        if terms.normalised:
            row = row / W.sum(1)
        if terms.bias is not None:
            row = row + terms.bias[t].double()
        if R is not None:
            row = row * R[:, t]
        if terms.gamma is not None:
            row = row * terms.gamma[t].double()
        rows.append(row)
    return torch.stack(rows, 1).to(terms.V.dtype)


def expanded(name: str, term: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Return a term in float64 and in this shape, or None if the form lacks it."""
    if term is None:
        return None
    # With fewer dimensions, a factor [T, T] would be taken for [u, c] wherever T = C.
    sizes = zip(reversed(term.shape), reversed(shape), strict=False)
    fits = term.dim() in (0, len(shape) - 1, len(shape)) and all(n in (1, size) for n, size in sizes)
    if not fits:
        wanted = f"[B, {'T, ' * (len(shape) - 2)}C] = {list(shape)}"
        raise ValueError(
            f"Terms.{name} must be broadcastable to {wanted}, and lack no dimension but B: got {list(term.shape)}. To "
            "use weights of heads, [H, T, T], repeat them with attn.parts.per_channel"
        )
    return term.double().expand(shape)
