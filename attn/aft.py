"""AFT: every channel weighs the past by its own keys (source article A; after Zhai et al. 2021, arXiv 2105.14103)."""

from collections.abc import Callable

from torch import Tensor, nn

from attn.base import Attention
from attn.kernels.causal import exp_weighted_mean, running_sum
from attn.parts import dense_w, exponent, per_channel, spread
from attn.streaming import Past, begin_mean, step_mean
from attn.unified import Terms
from attn.weightings import Toeplitz


class AFT(Attention):
    """ATT[t,c] = gamma[t] sigmoid(R[t,c]) sum_{u<=t} w[h,t,u] exp(K[u,c]) V[u,c] / sum_{u<=t} w[h,t,u] exp(K[u,c])

    R, V = linear(C, C), K = key_scale linear(C, C); h is the head of channel c; w is a weighting of
    attn/weightings.py, or 1 where there is none (AFT-simple); what only depends on t, as alpha does,
    cancels and gets no gradient. `tied_keys` gives the channels of a head one K, linear(C, H).

    Streaming: the K and V that have a w of their own, O(T) at most, and one mean of those before, which
    is all of them in AFT-simple.
    """

    impls = ("reference", "torch", "triton")

    def __init__(
        self,
        dim: int,
        heads: int,
        context: int,
        token_shift: bool,
        time: Callable[[], nn.Module] | None,
        tied_keys: bool,
        key_scale: float,
        gamma: bool,
        impl: str,
    ):
        super().__init__(dim, heads, context, dim, token_shift, gamma, impl)
        self.key_scale = key_scale
        self.R, self.K, self.V = (nn.Linear(dim, width) for width in (dim, heads if tied_keys else dim, dim))
        self.time = None if time is None else time()
        if impl == "triton" and not (isinstance(self.time, Toeplitz) and self.time.positive and not self.time.window):
            raise ValueError("impl=triton needs a Toeplitz w with time.positive=true and not time.beyond=forget")

    def of_channels(self, K: Tensor) -> Tensor:
        """K [B, T, C], scaled, from K [B, T, C] or, tied, [B, T, H]."""
        if self.key_scale != 1:
            K = self.key_scale * K
        shared_by = self.V.out_features // K.shape[-1]
        return K if shared_by == 1 else K.repeat_interleave(shared_by, dim=-1)

    def terms(self, x: Tensor) -> Terms:
        return Terms(
            R=self.R(x).sigmoid(),
            V=self.V(x),
            factor=per_channel(dense_w(self.time, x.shape[1], x), x.shape[-1]),
            exponent=self.of_channels(self.K(x))[:, None, :, :],
            gamma=self.time_gate(x.shape[1]),
        )

    def mix(self, x: Tensor) -> Tensor:
        R, K, V = self.R(x), exponent(x, self.K, self.K.bias.detach()), self.V(x)
        K = self.of_channels(K)
        if self.impl == "triton":
            return self.receive(self.mean_by_kernel(K, V), R.sigmoid())
        if self.time is None:
            return self.receive(exp_weighted_mean(running_sum, K, V), R.sigmoid())
        product = self.time.relative_product(x.shape[1])
        return self.receive(exp_weighted_mean(product, K, V, window=self.time.window), R.sigmoid())

    def mean_by_kernel(self, K: Tensor, V: Tensor) -> Tensor:
        from attn.kernels.aft import exp_toeplitz_mean  # Triton is not everywhere

        f, _, beta = self.time.trained(K.shape[1])
        if beta is not None:
            K = K + spread(beta, K.shape[-1])
        return exp_toeplitz_mean(f.expand(self.heads, -1), K, V)

    def begin_mix(self) -> Past:
        return begin_mean(self.time)

    def mix_step(self, x: Tensor, past: Past, t: int) -> Tensor:
        R, K, V = self.R(x), exponent(x, self.K, self.K.bias.detach()), self.V(x)
        return self.receive(step_mean(self.time, past, self.of_channels(K), V), R.sigmoid(), t)
