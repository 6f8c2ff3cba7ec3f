"""Test linear attention with several chunks, and with Q and K of any magnitude."""

import pytest
import torch
import torch.nn.functional as F

import attn.linear_attention
from attn.linear_attention import LEAST, linear_mean, mean_by_dimensions
from attn.parts import log_phi, phi
from tests.conftest import mixer
from tests.helpers.variants import (
    assert_bf16_stays_near,
    assert_equals_oracle,
    assert_same_with_gradients,
    with_extreme_logits,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Make chunks have 8 positions."""
    monkeypatch.setattr(attn.linear_attention, "CHUNK", 8)


def test_phi_is_elu_plus_1_and_keeps_the_digits_of_small_results():
    x = torch.tensor([-200.0, -20.0, -1.0, 0.0, 1.0, 50.0], dtype=torch.float64, requires_grad=True)
    expected = torch.where(x < 0, x.exp(), x + 1)
    assert_same_with_gradients(phi(x), expected, x, 1e-12)
    torch.testing.assert_close(phi(x), expected, rtol=1e-12, atol=0)
    assert_same_with_gradients(log_phi(x), expected.log(), x, 1e-12)
    torch.testing.assert_close(phi(x)[1:], F.elu(x[1:]) + 1)


def mean_by_loops(q, k, v):
    log_w = torch.logsumexp(log_phi(q)[:, :, None] + log_phi(k)[:, None], -1)  # [B, T, T]
    return torch.stack([(log_w[:, t, : t + 1, None].softmax(1) * v[:, : t + 1]).sum(1) for t in range(q.shape[1])], 1)


SIZES = {
    "ordinary": lambda q, k: (q, k),
    "times 100": lambda q, k: (100 * q, 100 * k),
    "keys minus 1e4": lambda q, k: (q, k - 1e4),
    "queries minus 1e4": lambda q, k: (q - 1e4, k),
    "falling keys": lambda q, k: (q, k - 70 * torch.arange(k.shape[1])[:, None]),
    "rising keys": lambda q, k: (q, k + 70 * torch.arange(-30, k.shape[1] - 30)[:, None]),
    "small where queries are large": lambda q, k: (q + torch.tensor([90.0, -90]), k - torch.tensor([300.0, 0])),
}


@pytest.mark.parametrize("T", [1, 7, 8, 9, 37])
@pytest.mark.parametrize("name", SIZES)
def test_weights_of_any_size(name, T):
    torch.manual_seed(5)
    q, k = (y.double().requires_grad_() for y in SIZES[name](*torch.randn(2, 3, T, 2)))
    v = torch.randn(3, T, 5, dtype=torch.float64, requires_grad=True)
    expected = mean_by_loops(q, k, v)
    for mean in (linear_mean, mean_by_dimensions):
        assert_same_with_gradients(mean(q, k, v), expected, (q, k, v), 1e-8)
    inputs = [y.detach().float().requires_grad_() for y in (q, k, v)]
    y = linear_mean(*inputs)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(y.sum(), inputs))
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-3)


def test_mean_by_dimensions_replaces_only_rows_that_may_have_underflowed(monkeypatch):
    """If all rows were replaced when one underflows, a later row would change earlier rows by rounding."""
    q, k, v = torch.randn(3, 2, 33, 4)
    before = linear_mean(q, k, v)
    taken = []

    def slowly(*inputs):
        taken.append(True)
        return mean_by_dimensions(*inputs)

    monkeypatch.setattr(attn.linear_attention, "mean_by_dimensions", slowly)
    for t in (1, 8, 20, 32):
        lost = q.index_fill(1, torch.arange(t, 33), -1e3)
        assert (phi(lost[:, t:]) @ phi(k).mT < LEAST).all()
        after = linear_mean(lost, k, v)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t:], before[:, t:])
    assert len(taken) == 4


@pytest.mark.parametrize("what", ["times1", "times100", "plus-120"])
@pytest.mark.parametrize("T", [8, 33])
def test_a_full_chunk_and_several_chunks_equal_the_oracle(T, what):
    module = with_extreme_logits(mixer("linear_attention"), what)
    assert_equals_oracle(module, torch.randn(2, T, 24, dtype=torch.float64), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("size", [1, 100, 1e4])
def test_several_chunks_are_causal_to_the_bit(size):
    module, x = mixer("linear_attention", dtype=torch.float32), torch.randn(2, 37, 24)
    before = module(x)[0]
    for t in (1, 8, 20, 36):
        changed = torch.cat([x[:, :t], size * torch.randn(2, 37 - t, 24)], 1).requires_grad_()
        y = module(changed)[0]
        assert torch.equal(y[:, :t], before[:, :t])
        (gradient,) = torch.autograd.grad(y[:, :t].sum(), changed)
        assert (gradient[:, t:] == 0).all()


def test_several_chunks_in_bf16_stay_near_float32():
    assert_bf16_stays_near(mixer("linear_attention", dtype=torch.float32), T=63)
