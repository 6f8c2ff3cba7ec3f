"""The delta rule: the value that the state holds for a key is moved towards the new value for this key."""

from torch import Tensor, nn

from attn.kernels.recurrence import Recurrence
from attn.parts import exponent_linear, silu, split_heads
from attn.ranges import Size
from attn.recurrence import Recurrent, ScalarDecay, half_of_a_head, l2_normalize


class DeltaRule(Recurrent):
    """ATT[t,c] = R[t,c] N(sum_{u<=t} W[h,t,u] V[u,c])

    W[h,t,u] = b_u Q_t . A_t A_{t-1} ... A_{u+1} K_u with A_j = a_j (I - b_j K_j K_j^T), so that W depends on all keys
    between u and t. Equivalently, each head has a state S with S_t = a_t S_{t-1} + b_t K_t (V_t - a_t S_{t-1}^T K_t)^T,
    which moves the value that S holds for the key K_t towards V_t, by the fraction b_t. The sum is S_t^T Q_t.

    Q and K are silu(linear), each divided by its norm per head; V = silu(linear(C, C)), and b = sigmoid(linear(C, H)).
    N is a norm per head, see `Recurrent`. Yang et al. 2024, arXiv 2406.06484, and 2412.06464. In the papers, Q, K and V
    also pass through a short convolution, which the token shift replaces here.

    Args:
        decay: whether a is the decay of Mamba-2 (`ScalarDecay`), as in Gated DeltaNet. Otherwise a = 1, as in DeltaNet.
        gate: whether R = silu(linear(C, C)). Otherwise R = 1.
        key_size: dimensions of a head of Q and K; None means as many as V has, or half as many with `gate`, so that
            the layer has about as many parameters as MHA.
    """

    def __init__(
        self, dim: Size, heads: Size, token_shift: bool, decay: bool, gate: bool, key_size: Size | None, impl: str
    ):
        if key_size is None:
            key_size = half_of_a_head(dim, heads) if gate else dim // heads
        super().__init__(dim, heads, dim, heads * key_size, token_shift, gate, impl)
        self.b = nn.Linear(dim, heads)
        self.decay = ScalarDecay(dim, heads) if decay else None

    def recurrence(self, x: Tensor, start: int = 0) -> Recurrence:
        q, k = (l2_normalize(silu(self.heads_of(x, layer))) for layer in (self.Q, self.K))
        b = exponent_linear(x, self.b).sigmoid().mT[..., None]  # [B, H, T, 1]
        g = b.new_zeros(1, 1, x.shape[1], 1) if self.decay is None else self.decay(x)[0]
        return Recurrence(q, b * k, split_heads(silu(self.V(x)), self.heads), g, a=g.exp() * k)
