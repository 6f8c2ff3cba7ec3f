"""The part of W that depends on positions alone: w[h,t,u], zero for u > t.

A weighting gives
    forward(T, t)        w itself, its rows from t on (t = 0: all), [H, T - t, T] or, shared by the heads, [1, T - t, T]
    relative(T, t)       w up to a factor of each row (h, t), which a denominator cancels
    log_relative(T, t)   log of that for u <= t, of no meaning elsewhere; where `positive`
    way(T)               how the products below are computed, for the log
    product(T)           x -> sum_{u<=t} w[h,t,u] x[u,c], h the head of c; x [B, T, C]
    relative_product(T)  the same with relative(T), for x >= 0 and what it is to be divided by

and, for streaming, where the last row for T = n weighs the n latest positions; what knows absolute positions has to
be asked for all of them, n = t+1:
    horizon              how many positions it has; None: any number
    settled              w[h,t,u] is one number a head for all t-u >= settled; None: never
    window               that number is 0, and nothing so far back is needed any more: settled; else None
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn.kernels.causal import weighted_sum
from attn.kernels.rows import are_many, by_rows, way
from attn.kernels.toeplitz import fft_is_safe, is_long, toeplitz, toeplitz_product
from attn.parts import over_largest, spread

Product = Callable[[Tensor], Tensor]

TOEPLITZ_WAY = "Toeplitz products by halves"


class Toeplitz(nn.Module):
    """w[h,t,u] = f[h,t-u] * alpha[h,t] * beta[h,u]; alpha and beta are ones at the start.

    `initial_f` says what f is there: `ones`, or `decays`, f[h,d] = exp(-d context^(-h / (H - 1))) in the heads
    h = 1 ... H - 1 and 1 in the last, H: each sees further than the one before (the source author's code from
    autumn 2021 on). f [H, context] or, not `per_head`, [1, context]; alpha, beta [H, context], or none.
    `positive` trains log f, log alpha, log beta, so that w cannot change its sign and a
    denominator cannot vanish. `beyond` says what f is past the context: `refuse` it, `hold` its
    last value, or `forget`, 0, so that the layer sees a window of the context; the last two need
    alpha and beta away, which are values of absolute positions. Source article A.
    """

    def __init__(
        self, heads: int, context: int, per_head: bool, alpha_beta: bool, positive: bool, beyond: str, initial_f: str
    ):
        super().__init__()
        if beyond not in ("refuse", "hold", "forget"):
            raise ValueError(f"time.beyond must be refuse, hold or forget: got {beyond}")
        if beyond != "refuse" and alpha_beta:
            raise ValueError(f"time.beyond={beyond} needs time.alpha_beta=false: they are values of absolute positions")
        if initial_f not in ("ones", "decays"):
            raise ValueError(f"time.initial_f must be ones or decays: got {initial_f}")
        if initial_f == "decays" and not per_head:
            raise ValueError("time.initial_f=decays needs time.per_head=true: it gives each head a decay of its own")
        self.positive, self.beyond = positive, beyond
        start = torch.zeros if positive else torch.ones
        log_f = log_decays(heads, context) if initial_f == "decays" else torch.zeros(heads if per_head else 1, context)
        self.f = nn.Parameter(log_f if positive else log_f.exp())
        self.alpha = nn.Parameter(start(heads, context)) if alpha_beta else None
        self.beta = nn.Parameter(start(heads, context)) if alpha_beta else None
        self.horizon = context if beyond == "refuse" else None
        self.settled = None if beyond == "refuse" else context
        self.window = context if beyond == "forget" else None

    def trained(self, T: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """f, alpha, beta as they are trained, up to T positions."""
        f, context = self.f, self.f.shape[-1]
        if T > context and self.beyond == "refuse":
            raise ValueError(
                f"w has {context} positions and the sequence {T}: time.beyond=hold, without alpha and beta, "
                "holds the last value of f; time.beyond=forget sees a window"
            )
        if T > context:
            zero = torch.full_like(f[:, -1:], -torch.inf if self.positive else 0.0)
            last = f[:, -1:] if self.beyond == "hold" else zero
            f = torch.cat([f, last.expand(-1, T - context)], dim=-1)
        return f[:, :T], *(None if p is None else p[:, :T] for p in (self.alpha, self.beta))

    def factors(self, T: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """f, alpha, beta themselves."""
        trained = self.trained(T)
        return tuple(None if p is None else p.exp() for p in trained) if self.positive else trained

    def forward(self, T: int, t: int = 0) -> Tensor:
        f, alpha, beta = self.factors(T)
        w = toeplitz(f, t)
        return w if alpha is None else w * alpha[:, t:, None] * beta[:, None, :]

    def relative(self, T: int, t: int = 0) -> Tensor:
        """w / alpha[h,t], over the largest of its row where `positive`.

        Left in beside a denominator, alpha would receive nothing but rounding errors as its
        gradient, which an adaptive optimiser then scales up to full steps.
        """
        if self.positive:
            return over_largest(self.log_relative(T, t))
        f, _, beta = self.factors(T)
        w = toeplitz(f, t)
        return w if beta is None else w * beta[:, None, :]

    def way(self, T: int) -> str:
        return TOEPLITZ_WAY if is_long(T) else "dense Toeplitz products"

    def product(self, T: int) -> Product:
        if not is_long(T):
            return partial(weighted_sum, self(T))
        f, alpha, beta = self.factors(T)
        if alpha is None:
            return lambda x: toeplitz_product(f, x)
        return lambda x: spread(alpha, x.shape[-1]) * toeplitz_product(f, spread(beta, x.shape[-1]) * x)

    def relative_product(self, T: int) -> Product:
        if is_long(T):
            f, _, beta = self.trained(T)
            if self.positive:
                f, beta = (None if p is None else over_its_largest(p) for p in (f, beta))
            if fft_is_safe(f, beta):
                return lambda x: toeplitz_product(f, x if beta is None else spread(beta, x.shape[-1]) * x)
        return product_of(self.relative, T)  # where positive over the largest of each row: right for every f, beta

    def log_relative(self, T: int, t: int = 0) -> Tensor:
        f, _, beta = self.trained(T)
        log_w = toeplitz(f, t)
        return log_w if beta is None else log_w + beta[:, None, :]


def log_decays(heads: int, context: int) -> Tensor:
    """log f [heads, context] of Toeplitz's initial_f=decays."""
    speeds = [context ** (-h / (heads - 1)) for h in range(1, heads)] + [0.0]
    return -torch.outer(torch.tensor(speeds), torch.arange(float(context)))


def over_its_largest(log_f: Tensor) -> Tensor:
    return (log_f - log_f.detach().amax(-1, keepdim=True)).exp()


def product_of(rows: Callable[[int, int], Tensor], T: int) -> Product:
    """x -> the sums of x that the T rows of a matrix weigh; rows(end, t) are those from t to end - 1."""
    if not are_many(T):
        return partial(weighted_sum, rows(T, 0))
    return lambda x: by_rows(lambda t, end, x: weighted_sum(rows(end, t), x[:, :end]), T, 1, x)


class LogWeighting(nn.Module):
    """w = exp(log_relative(T)), one for all heads or one for each."""

    positive = True
    horizon = settled = window = None

    def log_relative(self, T: int, t: int = 0) -> Tensor:
        raise NotImplementedError

    def forward(self, T: int, t: int = 0) -> Tensor:
        return self.log_relative(T, t).exp().tril(t)

    def relative(self, T: int, t: int = 0) -> Tensor:
        return over_largest(self.log_relative(T, t))

    def way(self, T: int) -> str:
        return way(T)

    def product(self, T: int) -> Product:
        return product_of(self, T)

    def relative_product(self, T: int) -> Product:
        return product_of(self.relative, T)


class LowRank(LogWeighting):
    """log w[t,u] = P[t] . Q[u], with P, Q [context, rank] small at the start: AFT-full.

    Zhai et al. 2021, arXiv 2105.14103.
    """

    def __init__(self, context: int, rank: int):
        super().__init__()
        self.P, self.Q = (nn.Parameter(0.01 * torch.randn(context, rank)) for _ in range(2))
        self.horizon = context

    def log_relative(self, T: int, t: int = 0) -> Tensor:
        if T > len(self.P):
            raise ValueError(f"a low-rank w has {len(self.P)} positions and no rule beyond them: got {T}")
        with torch.autocast(self.P.device.type, enabled=False):  # an exponent needs its digits
            return (self.P[t:T] @ self.Q[:T].T)[None]


class Local(LogWeighting):
    """log w[t,u] = b[t,t-u] for t-u < window, else 0, with b [context, window] 0 at the start: AFT-local.

    What lies outside the window still counts, with w = 1. Zhai et al. 2021, arXiv 2105.14103.
    """

    def __init__(self, context: int, window: int):
        super().__init__()
        self.b = nn.Parameter(torch.zeros(context, min(window, context)))
        self.horizon = context

    def log_relative(self, T: int, t: int = 0) -> Tensor:
        context, window = self.b.shape
        if T > context:
            raise ValueError(f"a local w has {context} positions and no rule beyond them: got {T}")
        position = torch.arange(T, device=self.b.device)
        distance = position[t:, None] - position
        inside = (distance >= 0) & (distance < window)
        return torch.where(inside, self.b[t:T].gather(1, distance.clamp(0, window - 1)), 0)[None]


class Kernel(LogWeighting):
    """log w[h,t,u] = k[h,t-u] for t-u < window, else 0, with k [H, window] 0 at the start: AFT-conv.

    What lies outside the window still counts, with w = 1; it has no absolute positions and runs
    at any length. Zhai et al. 2021, arXiv 2105.14103.
    """

    def __init__(self, heads: int, window: int):
        super().__init__()
        self.k = nn.Parameter(torch.zeros(heads, window))
        self.settled = window

    def log_relative(self, T: int, t: int = 0) -> Tensor:
        return toeplitz(self.log_f(T), t)

    def log_f(self, T: int) -> Tensor:
        """The log of w by distance, [H, T]."""
        k = self.k[:, :T]
        return F.pad(k, (0, T - k.shape[-1]))

    def way(self, T: int) -> str:
        return TOEPLITZ_WAY if is_long(T) else super().way(T)

    def product(self, T: int) -> Product:
        return partial(toeplitz_product, self.log_f(T).exp()) if is_long(T) else super().product(T)

    def relative_product(self, T: int) -> Product:
        if is_long(T):
            f = over_its_largest(self.log_f(T))
            if fft_is_safe(f):
                return partial(toeplitz_product, f)
        return super().relative_product(T)  # over the largest of each row: right for every k
