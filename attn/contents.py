"""Functions for R, W and V that `attn.rwv.RWV` looks up by name, and checks of its options."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attn.kernels.compiler import not_compiled
from attn.kernels.products import at_least_float32, float32_product
from attn.parts import any_true, check_choice, log_phi

# phi(q_t) and phi(k_u) are divided by their largest entries. If their product is then below LEAST, it may consist of
# terms that underflow in float32.
LEAST = 1e-30


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def relu2_dot(q: Tensor, k: Tensor) -> Tensor:
    return relu2(scaled_dot(q, k))


def scaled_dot(q: Tensor, k: Tensor) -> Tensor:
    """Return S[t,u] = q_t . k_u / sqrt(D): q [..., n, D], k [..., T, D] -> [..., n, T]."""
    return float32_product(q * q.shape[-1] ** -0.5, k.mT)


def log_phi_dot(q: Tensor, k: Tensor) -> Tensor:
    """Return log(phi(q_t) . phi(k_u)), phi(x) = elu(x) + 1: q [..., n, D], k [..., T, D] -> [..., n, T].

    phi(q_t) and phi(k_u) are first divided by their largest entries, so that the product underflows only if the large
    entries of each meet tiny entries of the other. Where this happens, the result is computed from logarithms.
    """
    log_q, log_k = log_phi(at_least_float32(q)), log_phi(at_least_float32(k))
    top_q, top_k = log_q.detach().amax(-1, keepdim=True), log_k.detach().amax(-1, keepdim=True)
    product = float32_product((log_q - top_q).exp(), (log_k - top_k).exp().mT)
    lost = product < LEAST
    log_product = product.clamp(min=LEAST).log() + top_q + top_k.mT
    return _from_logarithms(log_product, log_q, log_k, lost) if any_true(lost) else log_product


@not_compiled  # the number of pairs depends on values
def _from_logarithms(log_product: Tensor, log_q: Tensor, log_k: Tensor, lost: Tensor) -> Tensor:
    """Replace the entries of log_product that are `lost` by log(sum_i phi(q_t)_i phi(k_u)_i), without underflow."""
    *batch, t, u = lost.nonzero(as_tuple=True)
    exact = torch.logsumexp(log_q[(*batch, t)] + log_k[(*batch, u)], -1)
    return log_product.index_put((*batch, t, u), exact)


def identity(x: Tensor) -> Tensor:
    return x


class Weight(NamedTuple):
    """A factor of W that depends on the content: on K[u], or on Q[t] and K[u].

    Attributes:
        function: maps K, or Q and K, to the factor or, if `positive`, to its logarithm, which cannot overflow.
        bounded: False if the factor can overflow, so that W needs a denominator.
        positive: False if the factor is not always positive. A denominator could then be 0, so there must be none.
    """

    function: Callable[..., Tensor]
    bounded: bool = True
    positive: bool = True


RECEPTANCES = {"one": None, "sigmoid": torch.sigmoid, "gelu": F.gelu, "silu": F.silu, "relu2": relu2}
VALUES = {"linear": identity, "gelu": F.gelu, "silu": F.silu}
KEY_WEIGHTS = {"exp_k": Weight(identity, bounded=False), "sigmoid_k": Weight(F.logsigmoid)}
SCORE_WEIGHTS = {
    "exp_qk": Weight(scaled_dot, bounded=False),
    "phi_qk": Weight(log_phi_dot),
    "relu2_qk": Weight(relu2_dot, positive=False),
    "qk": Weight(scaled_dot, positive=False),
}
DENOMINATORS = ("with_w", "without_w", "none")
WEIGHTS = [prefix + kind for prefix in ("", "w_") for kind in (*KEY_WEIGHTS, *SCORE_WEIGHTS)] + ["w"]


def check_options(W: str, denominator: str, forget: bool, rotary: float, talking_heads: bool, norm: bool) -> None:
    """Raise ValueError if the options of `RWV` do not fit W and the denominator."""
    check_choice("W", W, WEIGHTS)
    check_choice("denominator", denominator, DENOMINATORS)
    content = W.removeprefix("w_")
    weight = KEY_WEIGHTS.get(content) or SCORE_WEIGHTS.get(content)  # None for W=w
    if weight and not weight.bounded and denominator == "none":
        raise ValueError(f"W={W} can overflow without a denominator: take denominator=with_w or another W")
    if weight and not weight.positive and denominator != "none":
        raise ValueError(f"W={W} is not always positive, so that its sum can be 0: take denominator=none")
    if denominator == "without_w" and not W.startswith("w"):
        raise ValueError(f"W={W} has no w to leave out of the denominator: take denominator=with_w, the sum of W")
    if talking_heads and content not in SCORE_WEIGHTS:
        raise ValueError(f"talking_heads=true needs a W that depends on Q: got W={W}")
    if rotary and content not in ("exp_qk", "qk"):
        raise ValueError(f"rotary needs W=exp_qk, qk, w_exp_qk or w_qk: got W={W}")
    if norm and denominator != "none":
        raise ValueError(f"norm=true needs denominator=none: got denominator={denominator}")
    if forget and content not in SCORE_WEIGHTS and (W.startswith("w") or denominator != "with_w"):
        raise ValueError(
            f"forget=true needs W=exp_k or sigmoid_k with denominator=with_w, or a W that depends on Q: got W={W} with "
            f"denominator={denominator}"
        )
