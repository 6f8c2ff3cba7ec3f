"""Triton kernels against the float64 oracle; interpreted on the CPU where there is no GPU."""

import pytest
import torch

from tests.conftest import mixer
from tests.test_independent import K_CASES, mean_by_loops
from tests.test_variants import outputs_and_gradients

triton = pytest.importorskip("triton")
from attn.kernels.aft import exp_toeplitz_mean  # noqa: E402
from attn.kernels.toeplitz import toeplitz  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("name", "T"), [("ordinary", 1), ("ordinary", 70), *((name, 37) for name in K_CASES)])
def test_exp_toeplitz_mean(name, T):
    torch.manual_seed(0)
    f, k, v = torch.randn(2, T), K_CASES[name](torch.randn(2, T, 6)), torch.randn(2, T, 6)
    probe = torch.randn(2, T, 6)
    inputs = [x.to(DEVICE).requires_grad_() for x in (f, k, v)]
    y = exp_toeplitz_mean(*inputs)
    found = [y, *torch.autograd.grad((y * probe.to(DEVICE)).sum(), inputs)]
    exact = [x.double().requires_grad_() for x in (f, k, v)]
    y = mean_by_loops(toeplitz(exact[0].exp()), *exact[1:])
    expected = [y, *torch.autograd.grad((y * probe.double()).sum(), exact)]
    for got, right in zip(found, expected, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got.cpu().double(), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("future", [3.0, 120.0])
def test_the_kernel_is_causal_to_the_bit(future):
    torch.manual_seed(1)
    f, k, v = (torch.randn(*shape, device=DEVICE) for shape in ((2, 40), (1, 40, 6), (1, 40, 6)))
    before = exp_toeplitz_mean(f, k, v)
    for t in (31, 34):
        changed = k.clone()
        changed[:, t] = future
        assert torch.equal(exp_toeplitz_mean(f, changed, v)[:, :t], before[:, :t])
        leaf = changed.requires_grad_()
        (gradient,) = torch.autograd.grad(exp_toeplitz_mean(f, leaf, v)[:, :t].sum(), leaf)
        assert gradient.isfinite().all()
        assert (gradient[:, t:] == 0).all()


@pytest.mark.parametrize(
    "switches", [[], ["attn.time.per_head=false"], ["attn.time.alpha_beta=false"], ["attn.tied_keys=true"]]
)
def test_aft_by_its_kernel_equals_the_oracle(switches):
    torch.manual_seed(2)
    module, x = mixer("aft", *switches, dtype=torch.float32).to(DEVICE), torch.randn(2, 67, 24, device=DEVICE)
    probe = torch.randn(2, 67, 24, device=DEVICE)
    found = outputs_and_gradients(module, x, "triton", probe)
    expected = outputs_and_gradients(module.double(), x.double(), "reference", probe.double())
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-4, atol=1e-4)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name].double(), gradient, rtol=1e-3, atol=1e-3)


def test_the_kernel_is_refused_where_w_is_not_toeplitz():
    with pytest.raises(ValueError, match=r"impl=triton needs a Toeplitz w with time\.positive=true"):
        mixer("aft_simple", "attn.impl=triton")
