"""Position weights w[h,t,u]: the factor of the attention weights W that does not depend on the input. It is 0 at u > t.

`PositionWeight` is the base class. An attention holds an instance as `self.position_weight`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.kernels import rows
from attn.kernels.causal import Product, exp_weighted_mean, running_sum, weighted_sum
from attn.kernels.toeplitz import fft_is_safe, is_long, toeplitz, toeplitz_product
from attn.parts import causal_mask, check_choice, heads_to_channels
from attn.ranges import Size

RECURSIVE = "recursive Toeplitz products (long ones by FFT), or row blocks where an FFT is not precise enough"


class PositionWeight(nn.Module, ABC):
    """The base class of position weights w[h,t,u], which all heads may share.

    A subclass must define `log_relative`; the other methods follow from it, and can be overridden by faster ones.
    `log_relative`, `forward` and `relative` return matrices [H, T - start, T], or [1, T - start, T] if all heads share
    w. The rows are the positions t from `start` to T-1, and the columns are the positions u from 0 to T-1.

    Attributes:
        positive: True if w cannot become negative, so that log w exists. It is -inf where w is 0 at u <= t.
        max_length: the largest number of positions that w is defined for; None means any number.
        constant_after: w is constant per head at distances t-u >= constant_after, so that streaming can merge the
            positions there into one. None means that streaming merges nothing.
        window: equal to `constant_after` if w is 0 at those distances, so that streaming can drop the positions there;
            otherwise None.
    """

    positive = True
    max_length: int | None = None
    constant_after: int | None = None
    window: int | None = None

    @abstractmethod
    def log_relative(self, T: int, start: int = 0) -> Tensor:
        """Return log w, up to a constant per row. Entries with u > t have no meaning.

        If the result differs from log w by such a constant, the subclass must override `forward`. Call this method only
        if `positive` is True. Raises ValueError if T is larger than `max_length`.
        """

    def forward(self, T: int, start: int = 0) -> Tensor:
        """Return the matrix w, which is 0 where u > t."""
        log_w = self.log_relative(T, start)
        return log_w.masked_fill(~causal_mask(T, log_w.device, start=start), -torch.inf).exp()

    def relative(self, T: int, start: int = 0) -> Tensor:
        """Return w up to a factor per row (h, t), which cancels between numerator and denominator."""
        return causal_exp_minus_max(self.log_relative(T, start))

    def algorithm(self, T: int) -> str:
        """Return the name of the algorithm of `product` and `relative_product` for T positions, for logging."""
        return rows.algorithm(T)

    def product(self, T: int) -> Product:
        """Return the function x -> sum_{u<=t} w[h,t,u] x[u,c], where h is the head of c and x is [B, T, C]."""
        return product_by_row_blocks(self, T)

    def relative_product(self, T: int) -> Product:
        """Return a function like that of `product`, with w multiplied by some factor for each row.

        A weighted mean uses it for numerator and denominator, so that the factors cancel. They need not be the factors
        in `relative`. If w is positive and x >= 0, the relative error of the result is small, so that the result can be
        a denominator.
        """
        return product_by_row_blocks(self.relative, T)


class Toeplitz(PositionWeight):
    """w[h,t,u] = f[h,t-u] * alpha[h,t] * beta[h,u]; alpha and beta are 1 at initialisation. Source article A.

    Parameters are f [heads, context] and, with `alpha_beta`, alpha and beta [heads, context].

    Args:
        per_head: whether each head has its own f. Otherwise f is [1, context].
        positive: whether the parameters are the logarithms of f, alpha and beta, so that w cannot become negative and
            a denominator cannot become 0.
        extrapolation: the value of f at distances t-u >= `context`: `error` raises ValueError, `constant` repeats
            the last value, and `zero` sets f to 0, so that each position sees only the last `context` positions.
            `constant` and `zero` need alpha_beta=False, because alpha and beta belong to absolute positions. So does
            gamma: an attention with gamma raises ValueError beyond the context that it was made for.
        initial_f: `ones`, `halves` (0.5 everywhere), or `decays`: f[h,d] = exp(-d context^(-h / (H - 1))) for
            h = 1 ... H - 1, and 1 in the last head H, so that each head sees further than the one before it. This start
            is from github.com/BlinkDL/RWKV-LM, RWKV-v1/src/model.py (autumn 2021). With one f for all heads, `decays`
            is the same as `ones`.

    Raises ValueError for other values, and for `constant` or `zero` with alpha_beta=True.
    """

    def __init__(
        self,
        heads: Size,
        context: Size,
        per_head: bool,
        alpha_beta: bool,
        positive: bool,
        extrapolation: str,
        initial_f: str,
    ):
        super().__init__()
        check_choice("position_weight.extrapolation", extrapolation, ("error", "constant", "zero"))
        if extrapolation != "error" and alpha_beta:
            raise ValueError(
                f"position_weight.extrapolation={extrapolation} needs position_weight.alpha_beta=false: alpha and beta "
                "belong to absolute positions"
            )
        check_choice("position_weight.initial_f", initial_f, ("ones", "halves", "decays"))
        self.positive, self.extrapolation = positive, extrapolation
        start = torch.zeros if positive else torch.ones
        log_f = initial_log_f(initial_f, heads if per_head else 1, context)
        self.f = nn.Parameter(log_f if positive else log_f.exp())
        self.alpha = nn.Parameter(start(heads, context)) if alpha_beta else None
        self.beta = nn.Parameter(start(heads, context)) if alpha_beta else None
        self.max_length = context if extrapolation == "error" else None
        self.constant_after = None if extrapolation == "error" else context
        self.window = context if extrapolation == "zero" else None

    def raw_factors(self, T: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return f, alpha and beta for T positions as `factors` does, but their logarithms if `positive`."""
        f, context = self.f, self.f.shape[-1]
        if T > context and self.extrapolation == "error":
            raise ValueError(
                f"w is defined for {context} positions: got {T}; position_weight.extrapolation=constant repeats the "
                "last value of f beyond them, and zero sets f to 0; both need position_weight.alpha_beta=false, and "
                "gamma=false beyond model.context"
            )
        if T > context:
            zero = torch.full_like(f[:, -1:], -torch.inf if self.positive else 0.0)
            last = f[:, -1:] if self.extrapolation == "constant" else zero
            f = torch.cat([f, last.expand(-1, T - context)], dim=-1)
        return f[:, :T], *(None if p is None else p[:, :T] for p in (self.alpha, self.beta))

    def factors(self, T: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return f, alpha and beta for T positions; alpha and beta are None without `alpha_beta`."""
        raw = self.raw_factors(T)
        return tuple(None if p is None else p.exp() for p in raw) if self.positive else raw

    def forward(self, T: int, start: int = 0) -> Tensor:
        f, alpha, beta = self.factors(T)
        w = toeplitz(f, start)
        return w if alpha is None else w * alpha[:, start:, None] * beta[:, None, :]

    def relative(self, T: int, start: int = 0) -> Tensor:
        """Return w / alpha[h,t]. If `positive`, each row is also divided by its largest entry.

        alpha cancels between numerator and denominator. It is left out because its gradient would consist of rounding
        errors, which an adaptive optimiser scales up to full steps.
        """
        if self.positive:
            return super().relative(T, start)
        f, _, beta = self.factors(T)
        w = toeplitz(f, start)
        return w if beta is None else w * beta[:, None, :]

    def log_relative(self, T: int, start: int = 0) -> Tensor:
        f, _, beta = self.raw_factors(T)
        log_w = toeplitz(f, start)
        return log_w if beta is None else log_w + beta[:, None, :]

    def algorithm(self, T: int) -> str:
        return RECURSIVE if is_long(T) else "dense Toeplitz products"

    def product(self, T: int) -> Product:
        if not is_long(T):
            return partial(weighted_sum, self(T))
        f, alpha, beta = self.factors(T)
        if alpha is None:
            return partial(toeplitz_product, f)
        return lambda x: heads_to_channels(alpha, x.shape[-1]) * scaled_toeplitz_product(f, beta, x)

    def relative_product(self, T: int) -> Product:
        if is_long(T):
            f, _, beta = self.raw_factors(T)
            if self.positive:
                f, beta = (None if p is None else exp_minus_max(p) for p in (f, beta))
            if fft_is_safe(f, beta):
                return partial(scaled_toeplitz_product, f, beta)
        return super().relative_product(T)  # accurate for every f and beta if w is positive


def is_positive_toeplitz(position_weight: PositionWeight | None) -> bool:
    """Return whether `position_weight` is a `Toeplitz` that is positive at all distances."""
    return isinstance(position_weight, Toeplitz) and position_weight.positive and position_weight.window is None


def scaled_toeplitz_product(f: Tensor, beta: Tensor | None, x: Tensor) -> Tensor:
    """Compute `toeplitz_product` of f and beta * x, where beta = None means 1."""
    return toeplitz_product(f, x if beta is None else heads_to_channels(beta, x.shape[-1]) * x)


def initial_log_f(initial_f: str, heads: int, context: int) -> Tensor:
    """Return log f [heads, context] at initialisation; see `Toeplitz`."""
    if initial_f != "decays":
        return torch.full((heads, context), math.log(0.5) if initial_f == "halves" else 0.0)
    speeds = [context ** (-h / (heads - 1)) for h in range(1, heads)] + [0.0]
    return -torch.outer(torch.tensor(speeds), torch.arange(float(context)))


class LowRank(PositionWeight):
    """AFT-full: log w[t,u] = P[t] . Q[u]. P and Q [context, rank] are small and random at initialisation.

    Zhai et al. 2021, arXiv 2105.14103.
    """

    def __init__(self, context: Size, rank: Size):
        super().__init__()
        self.P, self.Q = (nn.Parameter(0.01 * torch.randn(context, rank)) for _ in range(2))
        self.max_length = context

    def log_relative(self, T: int, start: int = 0) -> Tensor:
        if T > len(self.P):
            raise ValueError(f"a low-rank w is defined for {len(self.P)} positions: got {T}")
        with torch.autocast(self.P.device.type, enabled=False):  # bf16 is too coarse for an exponent
            return (self.P[start:T] @ self.Q[:T].T)[None]


class Local(PositionWeight):
    """AFT-local: log w[t,u] = b[t,t-u] for t-u < window, and 0 at larger distances, where w is 1.

    b [context, min(window, context)] is 0 at initialisation. As w is not 0 at any distance, the attribute `window` of
    the base class stays None.
    Zhai et al. 2021, arXiv 2105.14103.
    """

    def __init__(self, context: Size, window: Size):
        super().__init__()
        self.b = nn.Parameter(torch.zeros(context, min(window, context)))
        self.max_length = context

    def log_relative(self, T: int, start: int = 0) -> Tensor:
        context, window = self.b.shape
        if T > context:
            raise ValueError(f"a local w is defined for {context} positions: got {T}")
        position = torch.arange(T, device=self.b.device)
        distance = position[start:, None] - position
        inside = (distance >= 0) & (distance < window)
        return torch.where(inside, self.b[start:T].gather(1, distance.clamp(0, window - 1)), 0)[None]


class Kernel(PositionWeight):
    """AFT-conv: log w[h,t,u] = k[h,t-u] for t-u < window, and 0 at larger distances, where w is 1.

    k [heads, window] is 0 at initialisation. As w is not 0 at any distance, the attribute `window` of the base class
    stays None. No parameter belongs to an absolute position, so w is defined for any number of positions.
    Zhai et al. 2021, arXiv 2105.14103.
    """

    def __init__(self, heads: Size, window: Size):
        super().__init__()
        self.k = nn.Parameter(torch.zeros(heads, window))
        self.constant_after = window

    def log_relative(self, T: int, start: int = 0) -> Tensor:
        return toeplitz(self.log_f(T), start)

    def log_f(self, T: int) -> Tensor:
        """Return log w at each distance, [H, T]."""
        k = self.k[:, :T]
        return F.pad(k, (0, T - k.shape[-1]))

    def algorithm(self, T: int) -> str:
        return RECURSIVE if is_long(T) else super().algorithm(T)

    def product(self, T: int) -> Product:
        return partial(toeplitz_product, self.log_f(T).exp()) if is_long(T) else super().product(T)

    def relative_product(self, T: int) -> Product:
        if is_long(T):
            f = exp_minus_max(self.log_f(T))
            if fft_is_safe(f):
                return partial(toeplitz_product, f)
        return super().relative_product(T)  # accurate for every k


class Alibi(PositionWeight):
    """log w[h,t,u] = -2^(-8h/H) (t-u) for the heads h = 1 ... H: ALiBi.

    w has no parameters and is defined for any number of positions. Press et al. 2021, arXiv 2108.12409. If H is not a
    power of two, common implementations use other slopes.
    """

    def __init__(self, heads: Size):
        super().__init__()
        self.register_buffer("slopes", 2.0 ** (-8 * torch.arange(1, heads + 1) / heads))

    def log_relative(self, T: int, start: int = 0) -> Tensor:
        distance = torch.arange(T, dtype=self.slopes.dtype, device=self.slopes.device)
        return toeplitz(-torch.outer(self.slopes, distance), start)


def product_by_row_blocks(matrix: Callable[[int, int], Tensor], T: int) -> Product:
    """Return the function x -> M x. If T is large, the function computes blocks of rows one after the other.

    `matrix(end, start)` returns the rows `start` to `end` - 1 and the columns 0 to `end` - 1 of M [H or 1, T, T].
    """
    if not rows.uses_blocks(T):
        return partial(weighted_sum, matrix(T, 0))
    return lambda x: rows.by_row_blocks(lambda t, end, x: weighted_sum(matrix(end, t), x[:, :end]), T, 1, x)


def exp_minus_max(x: Tensor) -> Tensor:
    """Return exp(x - max x), with the maximum over the last dimension. No gradient flows through the maximum."""
    return (x - x.detach().amax(-1, keepdim=True)).exp()


def causal_exp_minus_max(S: Tensor, window: int | None = None) -> Tensor:
    """Return exp(S - m) at the visible positions, where m is the row's maximum over them, and 0 at the others.

    S [..., T, T], or its last rows. Positions are visible if u <= t and, if there is a `window`, t-u < window.
    """
    n, T = S.shape[-2:]
    return exp_minus_max(S.masked_fill(~causal_mask(T, S.device, window, T - n), -torch.inf))


def position_weighted_mean(position_weight: PositionWeight | None, k: Tensor, v: Tensor) -> Tensor:
    """Compute sum_{u<=t} w[h,t,u] exp(k[u,c]) v[u,c] / sum_{u<=t} w[h,t,u] exp(k[u,c]); None means w = 1.

    h is the head of c. k, v [B, T, C] -> [B, T, C].
    """
    if position_weight is None:
        return exp_weighted_mean(running_sum, k, v)
    log_w = position_weight.log_relative if position_weight.positive else None
    product = position_weight.relative_product(k.shape[1])
    return exp_weighted_mean(product, k, v, window=position_weight.window, log_w=log_w)


def weight_matrix(position_weight: PositionWeight | None, T: int, like: Tensor, start: int = 0) -> Tensor:
    """Return w [H or 1, T - start, T]. Without a position weight, w is the causal mask in the dtype of `like`."""
    if position_weight is None:
        return causal_mask(T, like.device, start=start).to(like.dtype)[None]
    return position_weight(T, start)


def causal_softmax(S: Tensor, position_weight: PositionWeight | None, w_in_denominator: bool = True) -> Tensor:
    """Return w[h,t,u] exp(S[h,t,u]) / sum_{u<=t} w[h,t,u] exp(S[h,t,u]), for S [B, H, T, T] or its last rows.

    Without a position weight, w is 1, and S may also be [B, T, T]. If `w_in_denominator` is False, the denominator is
    sum_{u<=t} exp(S[h,t,u]).
    """
    n, T = S.shape[-2:]
    if not w_in_denominator:
        return weight_matrix(position_weight, T, S, T - n) * causal_softmax(S, None)
    if position_weight is not None and not position_weight.positive:
        W = position_weight.relative(T, T - n) * causal_exp_minus_max(S, position_weight.window)
        return W / W.sum(-1, keepdim=True)
    if position_weight is not None:
        S = S + position_weight.log_relative(T, T - n)
    if n == 1:  # the last row sees every position
        return S.softmax(-1)
    return S.masked_fill(~causal_mask(T, S.device, start=T - n), -torch.inf).softmax(-1)
