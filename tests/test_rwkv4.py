"""Compare RWKV-4 with plain loops, for exponents of any size."""

import math

import pytest
import torch
from hydra.utils import instantiate

from attn.kernels.means import running_means
from tests.conftest import attn_config, mixer
from tests.helpers.variants import (
    K_CASES,
    assert_equals_oracle,
    assert_same_with_gradients,
    outputs_and_gradients,
    streamed,
)

pytestmark = pytest.mark.slow

DECAYS = [0.0, 1e-3, 0.5, 30.0, 8000.0]


def means_by_loops(k, v, decay):
    rows = []
    for t in range(k.shape[1]):
        distance = torch.arange(t, -1, -1, dtype=k.dtype)[:, None]
        log_w = k[:, : t + 1] - distance * decay
        rows.append((log_w.logsumexp(1), (log_w.softmax(1) * v[:, : t + 1]).sum(1)))
    return [torch.stack(each, 1) for each in zip(*rows, strict=True)]


@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 8, 13, 37])
@pytest.mark.parametrize("name", K_CASES)
def test_running_means_equal_loops(name, T):
    torch.manual_seed(5)
    k, v = K_CASES[name](torch.randn(2, T, len(DECAYS))).double(), torch.randn(2, T, len(DECAYS), dtype=torch.float64)
    decay = torch.tensor(DECAYS, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (k, v, decay)]
    found, expected = running_means(*inputs), means_by_loops(*inputs)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-9)
    assert_same_with_gradients(found[1], expected[1], inputs, 1e-8)


@pytest.mark.parametrize("name", K_CASES)
def test_running_means_in_float32(name):
    torch.manual_seed(5)
    k, v, decay = K_CASES[name](torch.randn(2, 37, len(DECAYS))), torch.randn(2, 37, len(DECAYS)), torch.tensor(DECAYS)
    exact = means_by_loops(*(x.double() for x in (k, v, decay)))[1]
    inputs = [x.requires_grad_() for x in (k, v, decay)]
    _, y = running_means(*inputs)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(y.sum(), inputs))
    torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-3)


def recurrence(ours, x):
    """Compute RWKV-4 by the recurrence of the paper.

    a is the decayed sum of exp(K) V and b that of exp(K), both divided by exp(m), where m is the largest exponent.
    """
    R, K, V = ours.R(x).sigmoid(), ours.K(x), ours.V(x)
    decay = ours.log_lambda.exp()
    a, b, m = torch.zeros_like(V[:, 0]), torch.zeros_like(V[:, 0]), torch.full_like(V[:, 0], -1e38)
    rows = []
    for t in range(x.shape[1]):
        own = K[:, t] + ours.bonus
        largest = torch.maximum(m, own)
        past, now = (m - largest).exp(), (own - largest).exp()
        rows.append(R[:, t] * (past * a + now * V[:, t]) / (past * b + now))
        largest = torch.maximum(m - decay, K[:, t])
        past, now = (m - decay - largest).exp(), (K[:, t] - largest).exp()
        a, b, m = past * a + now * V[:, t], past * b + now, largest
    return ours.out(torch.stack(rows, 1))


@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_rwkv4_equals_the_recurrence_of_the_paper(impl, size):
    ours = mixer("rwkv4", "attn.token_shift=false")
    ours.impl = impl
    with torch.no_grad():
        ours.K.weight.mul_(size)
    x = torch.randn(2, 21, 24, dtype=torch.float64, requires_grad=True)
    assert_same_with_gradients(ours(x)[0], recurrence(ours, x), [x, *ours.parameters()], 1e-9)


@pytest.mark.parametrize("bonus", [0.0, 100.0, -100.0])
@pytest.mark.parametrize("log_lambda", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_decays_and_bonuses(dtype, log_lambda, bonus):
    """With log_lambda=-200 nothing decays. With 200 a position sees only itself and the one before it."""
    module = mixer("rwkv4", dtype=dtype)
    with torch.no_grad():
        module.log_lambda.fill_(log_lambda)
        module.bonus.fill_(bonus)
    x = torch.randn(2, 33, 24, dtype=dtype)
    y, gradients = outputs_and_gradients(module, x, "torch", torch.ones_like(x))
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    torch.testing.assert_close(streamed(module, x), y, rtol=1e-4, atol=1e-5)
    assert_equals_oracle(module, x, rtol=1e-3, atol=1e-4)


def test_initial_decays_and_bonuses():
    """The values are those of the first layer in the paper.

    lambda rises from exp(-5) in the first channel to exp(3) in the last.
    """
    start = instantiate(attn_config("rwkv4"))()
    assert (start.log_lambda.diff() > 0).all()
    assert start.log_lambda[[0, -1]].tolist() == pytest.approx([-5, 3])
    assert start.bonus[:4].tolist() == pytest.approx([math.log(0.3) + 0.5 * z for z in (0, 1, -1, 0)])
