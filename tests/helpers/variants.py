"""List every variant, alone and with one option changed, and compare fast implementations with the oracle.

The oracle is the unified form of attn/unified.py, computed in float64.
"""

import pytest
import torch

from attn.contents import WEIGHTS
from attn.kernels.causal import STEP
from configs.folder import flat
from tests.conftest import VARIANTS, attn_config
from training.device import autocast

SIGNED = [W for W in WEIGHTS if W.removeprefix("w_") in ("relu2_qk", "qk")]  # need denominator=none

CHOICES = {
    "rotary": ["0.0", "0.5", "1.0"],
    "initial_head_mix": ["uniform"],
    "denominator": ["without_w"],
    "initial_f": ["halves", "decays"],
    "talking_heads": ["none", "logits", "weights", "both"],
    "scale": ["sqrt", "log_n"],
    "key_size": ["4"],
    "expansion": ["1", "2"],
    "kernel": ["relu2", "softmax"],
    "divisor": ["visible", "context"],
    "chunk_size": ["5", "64"],
    "W": [W for W in WEIGHTS if W not in SIGNED],  # tests/test_rwv.py tests the other W, and R and V
}


SENSELESS = [  # options that are refused with the variant, or that it does not have
    ("gau", "attn.scale=log_n"),
    ("rwv", "attn.forget=true"),
    *(("rwv", f"attn.{option}") for option in ("rotary=0.5", "rotary=1.0", "norm=true")),
    *(("rwv", f"attn.talking_heads={choice}") for choice in ("true", *CHOICES["talking_heads"])),
    ("gau_alpha", "attn.kernel=relu2"),
    *((v, "attn.denominator=without_w") for v in VARIANTS if attn_config(v).get("position_weight") is None),
    *((v, "attn.gamma_scales_bias=true") for v in VARIANTS if not attn_config(v).get("gamma")),
]


def switched() -> list[tuple[str, ...]]:
    """Return each variant with one boolean, or one option in CHOICES, changed to another value that it accepts."""
    cases = []
    for variant in VARIANTS:
        for key, value in flat(attn_config(variant)).items():
            if isinstance(value, bool) and not key.endswith("_"):
                cases.append((variant, f"attn.{key}={str(not value).lower()}"))
            cases += [
                (variant, f"attn.{key}={choice}")
                for choice in CHOICES.get(key.rsplit(".", 1)[-1], [])
                if choice != str(value)
            ]
    return [case for case in cases if case not in SENSELESS]


def named(cases: list[tuple]) -> list:
    """Return each case as a pytest parameter with a readable id."""
    return [pytest.param(*case, id="-".join(map(str, [*case[0], *case[1:]])).replace("attn.", "")) for case in cases]


PLAIN = [(variant,) for variant in VARIANTS]


SWITCHED = switched()


every_switch = pytest.mark.parametrize("case", named([(case,) for case in PLAIN + SWITCHED]))


every_variant = pytest.mark.parametrize("variant", VARIANTS)


CHUNKED = ("flash_mixed_chunk", "attn.chunk_size=8")  # several chunks in a short text


every_variant_and_chunks = pytest.mark.parametrize("case", named([(case,) for case in [*PLAIN, CHUNKED]]))


REFUSED = "fast implementations have no second derivative: take impl=reference"


def assert_refuses_a_second_derivative(kernel, shapes, device="cpu"):
    """Check that a backward pass with create_graph=True raises the error of `kernel_backward`."""
    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(kernel(*inputs).sum(), inputs, create_graph=True)


def outputs_and_gradients(module, x, impl, probe):
    """Return y = module(x), and the gradients of (y * probe).sum() with respect to each parameter and x, by name."""
    module.impl = impl
    module.zero_grad()
    x = x.clone().requires_grad_()
    y, _ = module(x)
    (y * probe.to(y.dtype)).sum().backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
    return y.detach(), gradients | {"x": x.grad}


@torch.no_grad()
def streamed(module, x):
    """Return the outputs of the steps of a stream, [B, T, dim]."""
    state = module.begin(len(x))
    return torch.cat([module.step(x[:, t : t + 1], state)[0] for t in range(x.shape[1])], dim=1)


def loss_and_gradient(loss, model, ids, precision) -> tuple[float, torch.Tensor]:
    """Return the loss, and its gradients with respect to the parameters that have one, in one vector."""
    model.zero_grad()
    with autocast(ids.device, precision):
        value = loss(ids[:, :-1], ids[:, 1:])
    value.backward()
    return value.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def assert_equals_oracle(module, x, rtol, atol):
    """Compare outputs and all gradients of the fast implementation with those of the oracle.

    Afterwards `module` has float64 parameters and impl="reference".
    """
    torch.manual_seed(2)
    probe = torch.randn(x.shape, dtype=torch.float64).to(x.device)
    fast, fast_gradients = outputs_and_gradients(module, x, "torch", probe)
    slow, slow_gradients = outputs_and_gradients(module.double(), x.double(), "reference", probe)
    torch.testing.assert_close(fast.double(), slow, rtol=rtol, atol=atol)
    for name, expected in slow_gradients.items():
        scale = expected.abs().max().clamp(min=1)
        torch.testing.assert_close(
            fast_gradients[name].double() / scale,
            expected / scale,
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"gradient of {name}: {text}",
        )


def assert_same_with_gradients(y, expected, inputs, tolerance):
    """Compare two outputs, and their gradients with respect to `inputs`."""
    torch.manual_seed(2)
    probe, options = torch.randn_like(y), {"retain_graph": True, "materialize_grads": True}
    found, right = ((z.detach(), *torch.autograd.grad((z * probe).sum(), inputs, **options)) for z in (y, expected))
    torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)


def with_extreme_logits(module: torch.nn.Module, what: str) -> torch.nn.Module:
    """Multiply K and Q, or add to K, and return the module. A module may lack Q, or both, or their biases.

    `what` is, for example, "times50" or "plus90".
    """
    with torch.no_grad():
        for name in ("Q", "K"):
            linear = getattr(module, name, None)
            if linear is not None and what.startswith("times"):
                for parameter in linear.parameters():
                    parameter.mul_(float(what[5:]))
        if what.startswith("plus") and hasattr(module, "K") and module.K.bias is not None:
            module.K.bias.add_(float(what[4:]))
    return module


def bytes_kept(module, x) -> int:
    """Return how many bytes a forward pass keeps for the backward pass, not counting the parameters."""
    kept, own = {}, {p.untyped_storage().data_ptr() for p in module.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _y = module(x)  # kept alive until its saved tensors are counted
        return sum(kept.values())


EXTREMES = ("times50", "times100", "plus90", "plus-120")


def assert_bf16_stays_near(module, T):
    """Compare the output and the gradient of the input under bf16 autocast with those in float32.

    The backward pass runs under autocast too, because users of the module may run it there.
    """
    torch.manual_seed(3)
    x = torch.randn(2, T, 24, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)[0]
        (gradient,) = torch.autograd.grad(y.float().square().sum(), x)
    exact = module(x)[0]
    (exact_gradient,) = torch.autograd.grad(exact.square().sum(), x)
    assert (y.float() - exact).abs().max() < 0.03 * exact.abs().max()
    assert (gradient - exact_gradient).abs().max() < 0.1 * exact_gradient.abs().max()


def mean_by_loops(w, k, v):
    w, k, v = w.double(), k.double(), v.double()
    _, T, C = k.shape
    rows = []
    for t in range(T):
        e = (k[:, : t + 1] - k[:, : t + 1].amax(1, keepdim=True)).exp()  # [B, t+1, C]
        weight = w[:, t, : t + 1].T.repeat_interleave(C // len(w), 1) * e
        rows.append((weight * v[:, : t + 1]).sum(1) / weight.sum(1))
    return torch.stack(rows, 1)


K_CASES = {
    "ordinary": lambda k: k,
    "times 50": lambda k: 50 * k,
    "times 100": lambda k: 100 * k,
    "times 1e4": lambda k: 1e4 * k,
    "times 1e30": lambda k: 1e30 * k,
    "plus 90": lambda k: k + 90,
    "minus 120": lambda k: k - 120,
    "rising by 70 a step": lambda k: k + 70 * torch.arange(k.shape[1])[:, None],
    "falling by 70 a step": lambda k: k - 70 * torch.arange(k.shape[1])[:, None],
    "one future 120": lambda k: k.index_fill(1, torch.tensor([k.shape[1] // 2]), 120.0),
    "at the edge of a segment": lambda k: k.clamp(-0.01, 0.01) + STEP / 2,
}
