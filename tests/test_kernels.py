"""Compare Triton kernels with references in float64. Without a GPU, Triton interprets the kernels on the CPU."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import ROOT, mixer
from tests.helpers.variants import (
    K_CASES,
    assert_refuses_a_second_derivative,
    mean_by_loops,
    outputs_and_gradients,
)

triton = pytest.importorskip("triton")
from attn.kernels.aft import exp_toeplitz_mean  # noqa: E402
from attn.kernels.flash import flash_attention  # noqa: E402
from attn.kernels.toeplitz import toeplitz  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.slow  # the interpreter takes seconds
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@pytest.fixture
def poisoned(monkeypatch):
    """Fill newly allocated tensors with NaN, so that elements that are never written are NaN."""

    def poison(allocate):
        return lambda *args, **options: allocate(*args, **options).fill_(torch.nan)

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))


def with_gradients(function, inputs, probe):
    """Return the output, and the gradients of all inputs that are not None."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad((y * probe).sum(), [x for x in leaves if x is not None])]


@pytest.mark.parametrize(("name", "T"), [("ordinary", 1), ("ordinary", 70), *((name, 37) for name in K_CASES)])
def test_exp_toeplitz_mean(name, T, poisoned):
    torch.manual_seed(0)
    f, k, v = torch.randn(2, T), K_CASES[name](torch.randn(2, T, 6)), torch.randn(2, T, 6)
    probe = torch.randn(2, T, 6)
    found = with_gradients(exp_toeplitz_mean, [x.to(DEVICE) for x in (f, k, v)], probe.to(DEVICE))
    exact = [x.double() for x in (f, k, v)]
    expected = with_gradients(lambda f, k, v: mean_by_loops(toeplitz(f.exp()), k, v), exact, probe.double())
    for got, right in zip(found, expected, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got.cpu().double(), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kernel", "shapes"), [(exp_toeplitz_mean, [(2, 5), (1, 5, 4), (1, 5, 4)]), (flash_attention, [(1, 2, 5, 4)] * 3)]
)
def test_kernels_refuse_a_second_derivative(kernel, shapes):
    assert_refuses_a_second_derivative(kernel, shapes, DEVICE)


def test_flash_attention_keeps_small_gradients_in_float16():
    inputs, probe = attention_inputs(131, a=False, b=False, dtype=torch.float16)
    # Most of `small`, divided by the kernel's row_sum, is below the smallest normal number of float16.
    small = probe / 2**14
    found, expected = with_gradients(flash_attention, inputs, small), attention_by_torch(inputs, small)
    for got, right in zip(found, expected, strict=True):
        assert (got.double() - right).norm() < 1e-3 * right.norm()


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
    "switches",
    [[], ["attn.position_weight.per_head=false"], ["attn.position_weight.alpha_beta=false"], ["attn.tied_keys=true"]],
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
    with pytest.raises(ValueError, match=r"impl=triton needs a Toeplitz w with position_weight\.positive=true"):
        mixer("aft_simple", "attn.impl=triton")


def attention_inputs(T, B=2, H=2, DK=6, DV=5, a=True, b=True, dtype=torch.float64):
    """Return random inputs [q, k, v, a, b], and a random `probe` to multiply the output by.

    The bias of a score is a[t-u] + b[u]. Each of the two is None if the argument of the same name is False.
    """
    torch.manual_seed(3)
    q, k, v, probe = (torch.randn(B, H, T, D).to(DEVICE, dtype) for D in (DK, DK, DV, DV))
    biases = (torch.randn(H, T).to(DEVICE, torch.promote_types(dtype, torch.float32)) for _ in range(2))
    return [q, k, v, *(bias if given else None for bias, given in zip(biases, (a, b), strict=True))], probe


def attention_by_torch(inputs, probe):
    """Return the output and gradients of PyTorch's attention in float64, with the bias as a matrix."""

    def function(q, k, v, a, b):
        position = torch.arange(q.shape[2], device=q.device)
        distance = position[:, None] - position
        bias = 0.0 * distance.double() if a is None else a[:, distance.clamp(min=0)]
        bias = bias if b is None else bias + b[:, None, :]
        bias = bias.masked_fill(distance < 0, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)

    return with_gradients(function, [None if x is None else x.double() for x in inputs], probe.double())


def assert_near(found, expected, tolerance):
    """Compare tensors, each divided by the largest absolute value of the expected one if that is above 1."""
    for got, right in zip(found, expected, strict=True):
        scale = right.abs().max().clamp(min=1)
        torch.testing.assert_close(got.double() / scale, right / scale, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("T", "sizes"),
    [
        (1, {}),
        (17, {"H": 3, "DK": 20}),
        (63, {"DK": 3, "DV": 24}),
        (111, {"B": 1, "DK": 33, "DV": 16}),
        (131, {"H": 1}),
        (40, {"a": False}),
        (40, {"b": False}),
        (40, {"a": False, "b": False}),
    ],
)
def test_flash_attention_equals_torch_s_with_a_bias(T, sizes, poisoned):
    inputs, probe = attention_inputs(T, **sizes)
    assert_near(with_gradients(flash_attention, inputs, probe), attention_by_torch(inputs, probe), 1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=on_a_gpu)])
@pytest.mark.parametrize("size", [8, 128])
def test_flash_attention_in_half_precision(dtype, size, poisoned):
    inputs, probe = attention_inputs(100, B=1, DK=size, DV=size, dtype=dtype)
    inputs[0] *= size**-0.5
    found = with_gradients(flash_attention, inputs, probe)
    assert [x.dtype for x in found] == [dtype] * 4 + [torch.float32] * 2
    assert_near(found, attention_by_torch(inputs, probe), 0.02)


@pytest.mark.parametrize(("size", "reach"), [(100, 0), (1, 80), (1, -80), (100, 80)])
def test_flash_attention_with_extreme_inputs_is_finite_and_right(size, reach, poisoned):
    """q and k are multiplied by `size`, and numbers from -reach to reach are added to a, in the order of distance.

    Rounding a score of 1e5 to float32 changes it by up to 4e-3, hence the larger tolerance.
    """
    inputs, probe = attention_inputs(70, B=1, dtype=torch.float32)
    q, k, v, a, b = inputs
    inputs = [q * size, k * size, v, a + torch.linspace(-reach, reach, 70, device=DEVICE), b]
    found = with_gradients(flash_attention, inputs, probe)
    assert all(x.isfinite().all() for x in found)
    assert_near(found, attention_by_torch(inputs, probe), 0.02 if size == 100 else 1e-4)


@pytest.mark.parametrize("future", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("t", [1, 32, 45])
def test_flash_attention_is_causal_to_the_bit(t, future):
    """Inputs at and after t, however large, change no output before t, and get no gradient from outputs before t."""
    inputs, probe = attention_inputs(50, B=1, dtype=torch.float32)
    probe[:, :, t:] = 0
    y, *gradients = with_gradients(flash_attention, inputs, probe)
    changed = [x.clone() for x in inputs]
    for x in (x.movedim(2 if x.dim() == 4 else 1, 0) for x in changed):
        x[t:] = future * torch.randn_like(x[t:])
    other, *others = with_gradients(flash_attention, changed, probe)
    assert torch.equal(other[:, :, :t], y[:, :, :t])
    assert not torch.equal(other[:, :, t:], y[:, :, t:])
    for before, after in zip(gradients, others, strict=True):
        positions = 2 if before.dim() == 4 else 1
        assert torch.equal(before, after)
        assert (before.movedim(positions, 0)[t:] == 0).all()


def test_flash_attention_stores_nothing_of_size_t_by_t():
    class Largest(TorchDispatchMode):
        size = 0  # bytes

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.size = max(self.size, result.nbytes)
            return result

    inputs, probe = attention_inputs(160, B=1, H=1, DK=4, DV=4)
    with Largest() as largest:
        with_gradients(flash_attention, inputs, probe)
    assert probe.nbytes <= largest.size < 8 * 160 * 160 / 2


@pytest.mark.gpu
@on_a_gpu
def test_flash_attention_gives_the_same_gradients_each_time():
    inputs, probe = attention_inputs(500, B=8, H=8, DK=64, DV=64, dtype=torch.bfloat16)
    first, second = (with_gradients(flash_attention, inputs, probe) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    "case",
    [
        ("mha",),
        ("mha_key_size",),
        ("mha_log_n",),
        ("mha_rotary",),
        ("mha_tw",),
        ("mha_tw", "attn.position_weight.per_head=false"),
        ("mha_tw", "attn.position_weight.alpha_beta=false"),
        ("mha_plus", "attn.talking_heads=none"),
        ("realformer_qk",),
        ("gated_mha",),
        ("xsa",),
    ],
    ids=" ".join,
)
def test_mha_by_its_kernel_equals_the_oracle(case):
    torch.manual_seed(4)
    module, x = mixer(*case).to(DEVICE), torch.randn(2, 37, 24, dtype=torch.float64, device=DEVICE)
    y, gradients = outputs_and_gradients(module, x, "triton", x.cos())
    expected, expected_gradients = outputs_and_gradients(module, x, "reference", x.cos())
    assert_near([y, *gradients.values()], [expected, *expected_gradients.values()], 1e-11)


@pytest.mark.parametrize(
    "case",
    [("mha_plus",), ("talking_heads",), ("realformer",), ("alibi",), ("mha_tw", "attn.position_weight.positive=false")],
    ids=" ".join,
)
def test_the_kernel_is_refused_for_attentions_that_it_cannot_compute(case):
    with pytest.raises(
        ValueError, match="impl=triton needs talking_heads=none, denominator=with_w, residual_attention=none or qk"
    ):
        mixer(*case, "attn.impl=triton")


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    """Triton's interpreter accepts code that its compiler refuses. An H100 has 227 KiB of shared memory per program."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = [sys.executable, "-m", "tests.helpers.compile_kernels"]
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    launched = {
        f"attn.kernels.{path.stem}.{name}"
        for path in (ROOT / "attn/kernels").glob("*.py")
        for name in re.findall(r"(\w+)\[(?:ctx\.)?grid\]\(", path.read_text(encoding="utf-8"))
    }
    assert {one["kernel"] for one in compiled} == launched
    for one in compiled:
        assert one["shared"] <= 227 * 1024, one
        assert one["stack"] <= 128, f"the kernel spills too many registers to the stack: {one}"
