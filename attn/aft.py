"""AFT: each channel weighs the past by its own keys (source article A, after Zhai et al. 2021, arXiv 2105.14103)."""

from collections.abc import Callable

from torch import Tensor, nn

from attn.base import Attention
from attn.kernels.means import merge_means
from attn.parts import exponent_linear, heads_to_channels, per_channel
from attn.position_weights import PositionWeight, is_positive_toeplitz, position_weighted_mean, weight_matrix
from attn.ranges import Size
from attn.streaming import Cache, cache_for, mean_step
from attn.unified import Terms


class AFT(Attention):
    """ATT[t,c] = gamma[t] sigmoid(R[t,c]) sum_{u<=t} w[h,t,u] exp(K[u,c]) V[u,c] / sum_{u<=t} w[h,t,u] exp(K[u,c])

    h is the head of channel c. R, V = linear(C, C) and K = key_scale * linear(C, C).

    Args:
        position_weight: constructor of w; None means w = 1 (AFT-simple). A factor of w that depends on t alone cancels.
            `Toeplitz` has one, alpha. It gets no gradient, except with impl=reference, where the gradient consists of
            rounding errors.
        tied_keys: whether all channels of a head share one K, linear(C, H).
        key_scale: factor on K.
        impl: with `triton`, ATT[t] can be NaN if, at each u <= t, w[h,t,u] exp(K[u,c]) is below exp(-80) times the
            product of the largest w of the head and the largest exp(K[u,c]). `torch` has no such limit.

    Streaming keeps one mean if w = 1. Otherwise it caches K and V of the past positions, which takes O(T) memory. If w
    has a `constant_after`, positions at this distance or more are merged into one mean, or dropped if w is 0 there.
    """

    impls = ("reference", "torch", "triton")

    def __init__(
        self,
        dim: Size,
        heads: Size,
        context: Size,
        token_shift: bool,
        position_weight: Callable[[], PositionWeight] | None,
        tied_keys: bool,
        key_scale: float,
        gamma: bool,
        impl: str,
    ):
        super().__init__(dim, heads, dim, token_shift, impl, context if gamma else 0)
        self.key_scale = key_scale
        self.R, self.K, self.V = (nn.Linear(dim, width) for width in (dim, heads if tied_keys else dim, dim))
        if position_weight is not None:
            self.position_weight = position_weight()
        if impl == "triton" and not is_positive_toeplitz(self.position_weight):
            raise ValueError(
                "impl=triton needs a Toeplitz w with position_weight.positive=true and "
                "position_weight.extrapolation=error or constant"
            )

    def scaled_keys(self, K: Tensor) -> Tensor:
        """Multiply K by key_scale, and repeat a tied K for the channels of its head: [B, T, C or H] -> [B, T, C]."""
        if self.key_scale != 1:
            K = self.key_scale * K
        repeats = self.V.out_features // K.shape[-1]
        return K if repeats == 1 else K.repeat_interleave(repeats, dim=-1)

    def terms(self, x: Tensor) -> Terms:
        return Terms(
            R=self.R(x).sigmoid(),
            V=self.V(x),
            factor=per_channel(weight_matrix(self.position_weight, x.shape[1], x), x.shape[-1]),
            exponent=self.scaled_keys(self.K(x))[:, None, :, :],
            gamma=self.gamma_values(x.shape[1]),
        )

    def rkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return sigmoid(R), K and V, each [B, T, C]."""
        # The bias of K cancels between numerator and denominator, so it gets no gradient.
        R, K, V = self.R(x), exponent_linear(x, self.K, self.K.bias.detach()), self.V(x)
        return R.sigmoid(), self.scaled_keys(K), V

    def mix(self, x: Tensor) -> Tensor:
        R, K, V = self.rkv(x)
        return self.apply_gate(self.mean(K, V), R)

    def mean(self, K: Tensor, V: Tensor) -> Tensor:
        """Compute the weighted mean of V, [B, T, C]."""
        if self.impl == "triton":
            from attn.kernels.aft import exp_toeplitz_mean  # imported here, since Triton is not installed everywhere

            f, _, beta = self.position_weight.raw_factors(K.shape[1])
            K = K if beta is None else K + heads_to_channels(beta, K.shape[-1])
            return exp_toeplitz_mean(f.expand(self.heads, -1), K, V)
        return position_weighted_mean(self.position_weight, K, V)

    def new_cache(self) -> Cache:
        return cache_for(self.position_weight, merge_means)

    def mix_step(self, x: Tensor, cache: Cache, t: int) -> Tensor:
        R, K, V = self.rkv(x)
        return self.apply_gate(mean_step(self.position_weight, cache, K, V), R, t)
