"""Training in bf16: what must stay float32, how near the gradients are to those of float32, and when bf16 is chosen."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attn.kernels.products import float32_product
from configs.cli import compose
from models.build import build_model
from tests.conftest import TINY, VARIANTS, mixer
from tests.helpers.runs import train_for
from tests.helpers.variants import PLAIN, SWITCHED, loss_and_gradient, named, outputs_and_gradients
from train import train
from training.device import pick_precision
from training.optimizer import optimizer_of, update

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
every_variant = pytest.mark.parametrize("variant", VARIANTS)

# bf16 has eight significant bits. These are too few for long sums, for divisions by such sums, and for the arguments
# of exp.
NEEDS_FLOAT32 = {
    "exp", "log", "logsumexp", "_softmax", "_softmax_backward_data", "_log_softmax", "cumsum", "cummax",
    "log_sigmoid_forward", "amax", "div", "reciprocal", "rsqrt", "sqrt", "native_layer_norm",
    "native_layer_norm_backward", "nll_loss_forward", "_fft_r2c", "cos", "sin",
}  # fmt: skip


class Roundings(TorchDispatchMode):
    """Collects in `found` the names of operations in NEEDS_FLOAT32 that have a bf16 input or output."""

    def __init__(self):
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        tensors = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
        if name in NEEDS_FLOAT32 and any(t.dtype == torch.bfloat16 for t in tensors):
            self.found.add(name)
        return result


def language_model(variant: str, scale: float = 1.0, *overrides: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a new model whose weights of Q, K and Z are multiplied by `scale`, and the ids of four texts, [4, 65]."""
    torch.manual_seed(0)
    model = build_model(compose([f"attn={variant}", "model.dim=64", "model.context=64", *overrides]), 200)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith((".Q.weight", ".K.weight", ".Z.weight")):
                p.mul_(scale)
    return model, torch.randint(200, (4, 65))


@pytest.mark.parametrize("scale", [1, 6])
@every_variant
def test_loss_and_gradient_stay_near_float32(variant, scale):
    model, ids = language_model(variant, scale, "model.init_std=0.06")
    (exact_loss, exact), (loss, gradient) = (
        loss_and_gradient(model.loss, model, ids, precision) for precision in ("float32", "bf16")
    )
    assert loss == pytest.approx(exact_loss, abs=1e-3)
    assert torch.cosine_similarity(gradient, exact, dim=0) > 0.9999


@every_variant
def test_operations_that_need_float32_get_it(variant):
    model, ids = language_model(variant)
    with Roundings() as roundings:
        loss_and_gradient(model.loss, model, ids, "bf16")
    assert not roundings.found


def test_weights_and_moments_are_float32():
    cfg = compose(["attn=aft", *TINY])
    model = build_model(cfg, 50)
    optimizer = optimizer_of(model, cfg.optim)
    ids = torch.randint(50, (2, 17))
    update(model.loss, optimizer, ids[:, :-1], ids[:, 1:], CPU, "bf16")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    moments = [value for state in optimizer.state.values() for value in state.values()]
    assert moments
    assert {value.dtype for value in moments} == {torch.float32}


@pytest.mark.parametrize("case", named([(case,) for case in PLAIN + SWITCHED]))
def test_parameters_that_cancel_have_no_gradient(case):
    """A gradient that is 0 in exact arithmetic must be 0: an optimiser would scale rounding errors up to full steps."""
    torch.manual_seed(3)
    x, probe = torch.randn(2, 37, 24, dtype=torch.float64), torch.randn(2, 37, 24, dtype=torch.float64)
    _, exact = outputs_and_gradients(mixer(*case), x, "reference", probe)
    _, fast = outputs_and_gradients(mixer(*case, dtype=torch.float32), x.float(), "torch", probe)
    for name, gradient in exact.items():
        if name in ("position_weight.P", "position_weight.b"):
            continue  # their first rows affect only w[0,0], which cancels, but the gradients may be rounding errors
        cancels = gradient.abs() < 1e-12 * max(g.abs().max() for g in exact.values())
        assert (fast[name][cancels] == 0).all(), (
            f"entries of {name} have no effect, so their gradients must be exactly 0, and not rounding errors: see "
            "`bias` of exponent_linear, or stop_cancelling_gradient, in attn/parts.py"
        )


@pytest.mark.parametrize(
    ("amx", "avx512_bf16", "expected"),
    [
        (True, True, ("bf16", "the processor has AMX")),
        (False, True, ("bf16", "the processor has AVX512-BF16")),
        (False, False, ("float32", "the processor has neither AMX nor AVX512-BF16")),
    ],
)
def test_auto_is_bf16_where_the_processor_has_it(amx, avx512_bf16, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": amx, "avx512_bf16": avx512_bf16})
    assert pick_precision("auto", CPU) == expected
    assert pick_precision("float32", CPU) == ("float32", "train.precision=float32")


def test_a_run_continues_in_the_precision_in_which_it_was_begun(tiny, monkeypatch, capsys):
    """On another machine, train.precision=auto may choose another precision."""
    cfg = compose(["attn=aft", *tiny, "train.precision=auto", "train.steps=9", "train.checkpoint_seconds=0"])
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": True})
    train_for(5, cfg)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert train(cfg)["precision"] == "bf16"
    assert "this run was begun in bf16, and continues in it" in capsys.readouterr().out


def test_a_float32_product_has_the_range_of_float32_under_float16():
    a, b = (torch.full((2, 2), x, requires_grad=True) for x in (1e5, 1e-3))
    with torch.autocast("cpu", torch.float16):
        float32_product(a, b).sum().backward()
    torch.testing.assert_close(a.grad, torch.full((2, 2), 2e-3))
    torch.testing.assert_close(b.grad, torch.full((2, 2), 2e5))
