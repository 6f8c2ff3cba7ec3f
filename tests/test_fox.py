"""Compare FoX with PyTorch's scaled_dot_product_attention, and test forget gates at and near 0 and 1."""

import pytest
import torch
import torch.nn.functional as F

import attn.kernels.rows
from attn.parts import merge_heads, split_heads
from tests.conftest import mixer
from tests.helpers.variants import (
    assert_equals_oracle,
    assert_same_with_gradients,
    outputs_and_gradients,
    streamed,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_fox_is_sdpa_with_the_gates_as_a_bias(impl):
    ours = mixer("fox", "attn.token_shift=false")
    ours.impl = impl
    x = torch.randn(2, 13, 24, dtype=torch.float64, requires_grad=True)
    q, k, v = (split_heads(linear(x), 3) for linear in (ours.Q, ours.K, ours.V))
    gates = ours.f(x).sigmoid()  # [B, T, H]
    kept = [torch.stack([gates[:, u + 1 : t + 1].prod(1) for u in range(13)], -1) for t in range(13)]
    future = torch.ones(13, 13, dtype=torch.bool).triu(1)
    bias = torch.stack(kept, -2).log().masked_fill(future, -torch.inf)  # [B, H, T, T]
    expected = ours.out(merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))
    assert_same_with_gradients(ours(x)[0], expected, [x, *ours.parameters()], 1e-9)


@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize("bias", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gates_of_0_and_1(dtype, bias, size):
    """With size=1, all gates are closed (a position sees only itself) or all are open (FoX is softmax attention)."""
    module, x = mixer("fox", dtype=dtype), torch.randn(2, 33, 24, dtype=dtype)
    with torch.no_grad():
        module.f.weight.mul_(size)
        module.f.bias.fill_(bias)
    y, gradients = outputs_and_gradients(module, x, "torch", torch.ones_like(x))
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    if size == 1:
        plain = mixer("mha", dtype=dtype)
        plain.load_state_dict({name: p for name, p in module.state_dict().items() if not name.startswith("f.")})
        alone = module.out(module.V(module.shift_tokens(x)))
        torch.testing.assert_close(y, alone if bias < 0 else plain(x)[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(streamed(module, x), y, rtol=1e-4, atol=1e-5)
    assert_equals_oracle(module, x, rtol=1e-3, atol=1e-4)


def test_closed_gates_at_early_positions_cost_no_digits_later(monkeypatch):
    """The logarithms of the gates add up to about -2e8, where float32 has no digits after the decimal point."""
    monkeypatch.setattr(attn.kernels.rows, "ROWS", 8)
    module, x = mixer("fox", "attn.token_shift=false", dtype=torch.float32), torch.randn(1, 40, 24)
    alone, inputs = module(x[:, 20:])[0], module.inputs

    def closed(x):
        q, k, v, log_f = inputs(x)
        return q, k, v, log_f.index_fill(2, torch.arange(21), -1e7)

    module.inputs = closed
    torch.testing.assert_close(module(x)[0][:, 20:], alone, rtol=1e-5, atol=1e-6)
