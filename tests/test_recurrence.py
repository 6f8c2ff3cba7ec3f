"""Test attentions whose state is a matrix against flash-linear-attention's naive functions and plain loops."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fla.ops.delta_rule.naive import delta_rule_recurrence
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.retention.naive import naive_retention
from fla.ops.simple_gla.naive import naive_recurrent_simple_gla
from hydra.utils import instantiate
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from attn.kernels import recurrence as kernel
from attn.kernels.recurrence import Recurrence, recurrent_step, recurrent_sum
from attn.recurrence import Recurrent, weights
from configs.cli import compose
from models.build import build_model
from tests.conftest import VARIANTS, mixer
from tests.helpers.variants import assert_equals_oracle, assert_same_with_gradients, streamed
from training.device import pick_compile

pytestmark = pytest.mark.slow

B, H, K, D = 2, 3, 4, 5
RECURRENT = [variant for variant in VARIANTS if isinstance(mixer(variant), Recurrent)]
every_recurrent = pytest.mark.parametrize("variant", RECURRENT)
both = pytest.mark.parametrize("impl", ["reference", "torch"])


@pytest.fixture
def small_chunks(monkeypatch):
    """Use chunks of 8 positions."""
    monkeypatch.setattr(kernel, "CHUNK", 8)


# The kernel


def random_inputs(T: int, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """Return the tensors from which OURS and THEIRS build recurrences.

    `unit` are keys of length 1, `scalar` and `vector` log decays between 0 and -2, `rate` numbers between 0 and 1.
    """
    torch.manual_seed(4)
    x = {name: torch.randn(B, H, T, size) for name, size in (("q", K), ("k", K), ("unit", K), ("v", D))}
    x |= {"scalar": -2 * torch.rand(B, H, T, 1), "vector": -2 * torch.rand(B, H, T, K), "rate": torch.rand(B, H, T, 1)}
    x["unit"] = F.normalize(x["unit"], dim=-1)
    return {name: value.to(dtype).requires_grad_() for name, value in x.items()}


def retention(x: dict) -> torch.Tensor:
    T = x["q"].shape[2]
    return torch.log(1 - 2.0 ** (-5 - torch.arange(H).to(x["q"])))[:, None, None].expand(1, H, T, 1)


OURS = {
    "constant": lambda x: Recurrence(x["q"], x["k"], x["v"], retention(x)),
    "scalar": lambda x: Recurrence(x["q"], x["k"], x["v"], x["scalar"]),
    "vector": lambda x: Recurrence(x["q"], x["k"], x["v"], x["vector"]),
    "delta": lambda x: Recurrence(x["q"], x["rate"] * x["unit"], x["v"], torch.zeros_like(x["rate"]), a=x["unit"]),
    "gated delta": lambda x: Recurrence(
        x["q"], x["rate"] * x["unit"], x["v"], x["scalar"], a=x["scalar"].exp() * x["unit"]
    ),
    "two keys": lambda x: Recurrence(
        x["q"], x["k"], x["v"], x["vector"], a=x["unit"], b=-x["vector"].exp() * x["rate"] * x["unit"]
    ),
    "slow decay": lambda x: Recurrence(
        x["q"], x["k"], x["v"], -0.5 * x["vector"].neg().sigmoid(), a=x["unit"], b=-x["rate"] * x["unit"], least=-0.5
    ),
    "one key for all heads": lambda x: Recurrence(x["q"][:, :1], x["k"][:, :1], x["v"], x["scalar"], s=x["rate"]),
}


def swap(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Swap T and H: [B, H, T, ...] <-> [B, T, H, ...]."""
    return [x.transpose(1, 2) for x in tensors]


# The same recurrences by flash-linear-attention, which divides q by sqrt(K) = 2.
THEIRS = {
    "constant": lambda x: naive_retention(2 * x["q"], x["k"], x["v"]),
    "scalar": lambda x: naive_recurrent_simple_gla(*swap(2 * x["q"], x["k"], x["v"], x["scalar"][..., 0]))[0],
    "vector": lambda x: naive_recurrent_gla(*swap(2 * x["q"], x["k"], x["v"], x["vector"]))[0],
    "delta": lambda x: delta_rule_recurrence(2 * x["q"], x["unit"], x["v"], x["rate"][..., 0])[0],
    "gated delta": lambda x: naive_recurrent_gated_delta_rule(
        *swap(2 * x["q"], x["unit"], x["v"], x["rate"][..., 0], x["scalar"][..., 0])
    )[0],
    "two keys": lambda x: dplr_recurrence(
        2 * x["q"], x["k"], x["v"], x["unit"], -x["vector"].exp() * x["rate"] * x["unit"], x["vector"]
    )[0],
    "slow decay": lambda x: dplr_recurrence(
        2 * x["q"], x["k"], x["v"], x["unit"], -x["rate"] * x["unit"], -0.5 * x["vector"].neg().sigmoid()
    )[0],
    "one key for all heads": lambda x: naive_recurrent_simple_gla(
        *swap(2 * all_heads(x["q"]), all_heads(x["k"]), x["rate"] * x["v"], x["scalar"][..., 0])
    )[0],
}


def all_heads(x: torch.Tensor) -> torch.Tensor:
    """Give all heads what the first one has."""
    return x[:, :1].expand_as(x)


def assert_same(found: torch.Tensor, expected: torch.Tensor, leaves: dict, **tolerance) -> None:
    """Check that the outputs and their gradients with respect to `leaves` are equal."""
    torch.testing.assert_close(found, expected, **tolerance)
    gradients = [
        torch.autograd.grad(y.sin().sum(), list(leaves.values()), retain_graph=True, materialize_grads=True)
        for y in (found, expected)
    ]
    torch.testing.assert_close(*gradients, **tolerance)


@pytest.mark.parametrize("T", [1, 37, 150])
@pytest.mark.parametrize("kind", THEIRS)
def test_flash_linear_attention_computes_the_same(kind, T, theirs_in_float64):
    x = random_inputs(T)
    theirs = THEIRS[kind](x)
    assert theirs.dtype == torch.float64
    theirs = theirs if theirs.shape[1] == H else theirs.transpose(1, 2)
    assert_same(recurrent_sum(OURS[kind](x)), theirs, x)


@pytest.mark.parametrize(("T", "chunk"), [(1, 4), (2, 1), (13, 4), (64, 16), (40, 64)])
@pytest.mark.parametrize("kind", OURS)
def test_chunks_of_several_sizes_and_steps_equal_a_sum_with_the_matrix_w(kind, T, chunk, monkeypatch):
    monkeypatch.setattr(kernel, "CHUNK", chunk)
    x = random_inputs(T)
    r = OURS[kind](x)
    expected = weights(r) @ r.v
    assert_same(recurrent_sum(r), expected, x)
    torch.testing.assert_close(by_steps(r), expected)


def by_steps(r: Recurrence) -> torch.Tensor:
    S, outputs = None, []
    for t in range(r.v.shape[2]):
        y, S = recurrent_step(Recurrence(*(None if x is None else x[:, :, t : t + 1] for x in r[:-1])), S)
        outputs.append(y)
    return torch.cat(outputs, 2)


EXTREMES = {
    "no decay": lambda x: x | {"scalar": 0 * x["scalar"], "vector": 0 * x["vector"]},
    "all is forgotten at once": lambda x: x | {"scalar": x["scalar"] - 1e30, "vector": x["vector"] - 1e30},
    "all is forgotten at times": lambda x: (
        x | {name: x[name] - 1e4 * (torch.arange(x[name].shape[2]) % 7 == 3)[:, None] for name in ("scalar", "vector")}
    ),
    "a decay of 0": lambda x: x | {name: torch.full_like(x[name], -torch.inf) for name in ("scalar", "vector")},
    "keys of length 0": lambda x: x | {"k": 0 * x["k"], "unit": 0 * x["unit"]},
    "equal keys": lambda x: x | {"unit": x["unit"][:, :, :1].expand_as(x["unit"]), "rate": torch.ones_like(x["rate"])},
    "scores times 10,000": lambda x: x | {"q": 100 * x["q"], "k": 100 * x["k"]},
    "nothing is written": lambda x: x | {"rate": 0 * x["rate"]},
}


@pytest.mark.parametrize("what", EXTREMES)
@pytest.mark.parametrize("kind", OURS)
def test_extreme_inputs_give_finite_and_correct_results(kind, what, small_chunks):
    assert_near_float64(lambda x: OURS[kind](EXTREMES[what](x)), T=60, tolerance=1e-4)


@pytest.mark.parametrize("least", [-1.25, -3.0, -200.0])  # at -1.25, the sum over a chunk is LEAST_SUM
def test_a_bound_of_g_that_is_reached_at_all_positions(least):
    def make(x: dict) -> Recurrence:
        g = least + 0 * x["vector"]
        return Recurrence(x["q"], x["k"], x["v"], g, a=x["unit"], b=-x["rate"] * x["unit"], least=least)

    assert_near_float64(make, T=40, tolerance=2e-6)


def test_the_value_of_the_previous_position_is_read_undecayed_even_if_decays_are_near_0():
    """exp of a sum of g is about 0 here, but a_t reads S_{t-1}, in which the value written at t-1 has not decayed."""

    def make(x: dict) -> Recurrence:
        return Recurrence(x["q"], x["rate"] * x["unit"], x["v"], 20 * x["scalar"] - 40, a=x["unit"])

    assert_near_float64(make, T=40, tolerance=2e-6)


def assert_streamed_and_oracle_agree(module: Recurrent) -> None:
    """Check that a float32 layer gives what streaming and the oracle give, the latter with all gradients."""
    x = torch.randn(2, 33, 24)
    torch.testing.assert_close(streamed(module, x), module(x)[0], rtol=1e-3, atol=1e-3)
    assert_equals_oracle(module, x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bias", [None, 1e4, -1e4])
@every_recurrent
def test_layers_with_extreme_decays_and_keys_of_length_0_equal_the_oracle(variant, bias, small_chunks):
    """A bias of ±1e4 makes the decays 1 or 0, or at their bounds. None leaves them, and makes all keys 0."""
    module = mixer(variant, dtype=torch.float32)
    decay = getattr(module, "decay", None) or getattr(module, "a", None)
    if bias is not None and decay is None:
        pytest.skip("the decay is constant, or there is none")
    with torch.no_grad():
        if bias is None:
            module.K.weight.zero_()
            module.K.bias.zero_()
        else:
            decay.bias.fill_(bias)
    assert_streamed_and_oracle_agree(module)


@pytest.mark.parametrize("log_rate", [-200.0, 200.0])
@pytest.mark.parametrize("bias", [0.0, -200.0])  # at -200, dt is 0 in float32
@pytest.mark.parametrize("variant", ["mamba2", "gated_deltanet"])
def test_an_extreme_rate_of_the_scalar_decay_gives_finite_outputs_and_gradients(variant, bias, log_rate):
    module = mixer(variant, dtype=torch.float32)
    with torch.no_grad():
        module.decay.log_rate.fill_(log_rate)
        module.decay.bias.fill_(bias)
    assert_streamed_and_oracle_agree(module)


def assert_near_float64(make: Callable[[dict], Recurrence], T: int, tolerance: float) -> None:
    """Check that outputs and gradients in float32 are near those that the matrix W gives in float64."""
    leaves = random_inputs(T, torch.float32)
    exact_leaves = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    r, exact = make(leaves), make(exact_leaves)
    y, expected = recurrent_sum(r), weights(exact) @ exact.v
    gradients, exact_gradients = (
        torch.autograd.grad(z.sum(), list(x.values()), retain_graph=True, materialize_grads=True)
        for z, x in ((y, leaves), (expected, exact_leaves))
    )
    found = [y, by_steps(r), *gradients]
    for one, right in zip(found, [expected, expected, *exact_gradients], strict=True):
        assert (one.double() - right).abs().max() <= tolerance * right.abs().max().clamp(min=1)


@pytest.mark.parametrize("kind", OURS)
def test_sums_are_causal_to_the_bit(kind):
    """Later inputs change neither an earlier output nor its gradient, even by rounding."""
    inputs, t = {name: x.detach() for name, x in random_inputs(70, torch.float32).items()}, 40

    def before(x: dict) -> list[torch.Tensor]:
        x = {name: value.clone().requires_grad_() for name, value in x.items()}
        y = recurrent_sum(OURS[kind](x))[:, :, :t]
        gradients = torch.autograd.grad(y.sin().sum(), list(x.values()), materialize_grads=True, allow_unused=True)
        assert all((gradient[:, :, t:] == 0).all() for gradient in gradients)
        return [y, *(gradient[:, :, :t] for gradient in gradients)]

    factors = {"q": 1e3, "k": 1e3, "v": 1e3}
    changed = {
        name: torch.cat([x[:, :, :t], factors.get(name, 1) * x[:, :, t:].flip(2)], 2) for name, x in inputs.items()
    }
    assert all(torch.equal(one, other) for one, other in zip(before(inputs), before(changed), strict=True))


@pytest.mark.parametrize("kind", OURS)
def test_a_long_sequence_in_float32_stays_near_float64(kind):
    x = {name: value.detach() for name, value in random_inputs(3000, torch.float32).items()}
    r = OURS[kind](x | {"scalar": 1e-4 * x["scalar"], "vector": 1e-4 * x["vector"]})
    exact = by_steps(Recurrence(*(None if z is None else z.double() for z in r[:-1])))
    assert (recurrent_sum(r) - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("kind", OURS)
def test_under_autocast_outputs_are_float32_and_gradients_have_the_precision_of_bf16(kind):
    """The gradient of a decay is a difference of other gradients, which must therefore not be rounded to bf16."""
    x = random_inputs(128, torch.float32)
    exact = {name: value.detach().double().requires_grad_() for name, value in x.items()}
    with torch.autocast("cpu", torch.bfloat16):
        y = recurrent_sum(OURS[kind](x))
    expected = recurrent_sum(OURS[kind](exact))
    assert (y - expected).norm() <= 1e-6 * expected.norm()
    found, right = (
        torch.autograd.grad(z.sin().sum(), list(leaves.values()), materialize_grads=True, allow_unused=True)
        for z, leaves in ((y, x), (expected, exact))
    )
    for one, other in zip(found, right, strict=True):
        assert (one - other).norm() <= 9e-3 * other.norm()


@pytest.mark.parametrize("kind", OURS)
def test_the_compiler_is_told_the_shapes_and_strides_of_the_scan(kind, monkeypatch):
    calls, scan = [], torch.ops.rwv_lab.scan
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops.rwv_lab, "scan", lambda *inputs: [calls.append(inputs), scan(*inputs)][1])
        recurrent_sum(OURS[kind](random_inputs(70)))
    (inputs,) = calls
    torch.library.opcheck(scan, [x if x is None else x.detach().requires_grad_() for x in inputs])


@pytest.mark.parametrize("kind", OURS)
def test_activation_checkpointing_gives_the_same_gradients(kind):
    x = random_inputs(70)
    expected = torch.autograd.grad(recurrent_sum(OURS[kind](x)).sin().sum(), list(x.values()), allow_unused=True)
    y = checkpoint(lambda: recurrent_sum(OURS[kind](x)).sin().sum(), use_reentrant=False)
    found = torch.autograd.grad(y, list(x.values()), allow_unused=True)
    for one, right in zip(found, expected, strict=True):
        assert (one is right is None) or torch.equal(one, right)


@pytest.mark.parametrize("kind", OURS)
def test_memory_is_linear_in_the_length(kind):
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    sizes = []
    for T in (512, 1024):
        kept.clear()
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            y = recurrent_sum(OURS[kind](random_inputs(T)))
        sizes.append(sum(kept.values()))
        del y
    assert sizes[1] < 2.1 * sizes[0]


# The attentions


@every_recurrent
def test_chunks_are_causal_to_the_bit(variant, small_chunks):
    module, x = mixer(variant, dtype=torch.float32), torch.randn(2, 37, 24, requires_grad=True)
    before = module(x)[0]
    for t in (1, 8, 20, 36):
        changed = torch.cat([x[:, :t], 1e4 * torch.randn(2, 37 - t, 24)], 1)
        assert torch.equal(module(changed)[0][:, :t], before[:, :t])
        (gradient,) = torch.autograd.grad(module(x)[0][:, :t].sum(), x)
        assert (gradient[:, t:] == 0).all()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * sigmoid(x)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x**2).sum() + 1e-6)


def mamba_decay(m, x: torch.Tensor, h: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dt and the decay a of a head at one position."""
    dt = torch.log(1 + torch.exp(m.decay.linear.weight[h] @ x + m.decay.bias[h]))
    return dt, torch.exp(-dt * torch.exp(m.decay.log_rate[h]))


def rms(m, y: torch.Tensor, h: int) -> torch.Tensor:
    return m.scale[h, 0] * y / torch.sqrt((y**2).mean() + 1e-5)


# Each function computes one head h of the attention m at position t. Its argument S is the state at t - 1. It returns
# the state at t, and the head's part of ATT before the product with R. q, k and v are the outputs of the layers Q, K
# and V for the head at t, and x is the input of the layers at t.


def retnet(m, S, q, k, v, x, h, t):
    half = len(q) // 2
    angle = t * 10_000 ** (-torch.arange(half, dtype=q.dtype) / half)
    turn = torch.complex(angle.cos(), angle.sin())
    q, k = ((torch.complex(z[:half], z[half:]) * turn) for z in (q, k))
    q, k = (torch.cat([z.real, z.imag]) for z in (q, k))
    S = (1 - 2.0 ** (-5 - h)) * S + torch.outer(k, v) / math.sqrt(len(k))
    return S, rms(m, q @ S, h)


def mamba2(m, S, q, k, v, x, h, t):
    dt, a = mamba_decay(m, x, h)
    S = a * S + dt * torch.outer(silu(k), silu(v))
    return S, rms(m, silu(q) @ S + m.skip[h, 0, 0] * silu(v), h)


def gla(m, S, q, k, v, x, h, t):
    z = m.decay.up.weight @ (m.decay.down.weight @ x) + m.decay.bias
    a = sigmoid(z.view(H, -1)[h]) ** (1 / 16)
    S = a[:, None] * S + torch.outer(k, v) / math.sqrt(len(k))
    return S, rms(m, q @ S, h)


def delta(m, S, q, k, v, x, h, t):
    a = 1.0 if m.decay is None else mamba_decay(m, x, h)[1]
    q, k, b = unit(silu(q)), unit(silu(k)), sigmoid(m.b.weight[h] @ x + m.b.bias[h])
    S = a * (S - b * torch.outer(k, k @ S)) + b * torch.outer(k, silu(v))
    return S, rms(m, q @ S, h)


def rwkv7(m, S, q, k, v, x, h, t):
    z, i = (
        (part.up.weight @ f(part.down.weight @ x) + part.bias).view(H, -1)[h]
        for part, f in ((m.a, torch.tanh), (m.b, lambda y: y))
    )
    w, i = torch.exp(-math.exp(-0.5) * sigmoid(z)), sigmoid(i)
    removed, added = unit(m.m[h, 0] * k), k * (1 + (i - 1) * m.n[h, 0])
    S = S.T @ (torch.diag(w) - torch.outer(removed, removed * i)) + torch.outer(v, added)  # [D, K], as in the paper
    y = S @ q
    y = m.scale[h, 0] * (y - y.mean()) / torch.sqrt(((y - y.mean()) ** 2).mean() + 64e-5) + m.norm_bias[h, 0]
    return S.T, y + (q * added * m.p[h, 0]).sum() * v


LOOPS = [("retnet", retnet), ("mamba2", mamba2), ("gla", gla), ("deltanet", delta), ("gated_deltanet", delta)]
LOOPS += [("rwkv7", rwkv7)]


@both
@pytest.mark.parametrize(("variant", "step"), LOOPS)
def test_an_attention_equals_a_loop_over_positions(variant, step, impl, small_chunks):
    """There are two whole chunks and a part of a third."""
    module = mixer(variant, "attn.token_shift=false")
    module.impl = impl
    T = 21
    x = torch.randn(1, T, 24, dtype=torch.float64, requires_grad=True)
    Q, K, V = (layer(x)[0] for layer in (module.Q, module.K, module.V))
    heads = []
    for h in range(H):
        q, k = (z if variant == "mamba2" else z.view(T, H, -1)[:, h] for z in (Q, K))
        v = V.view(T, H, -1)[:, h]
        S, rows = torch.zeros(k.shape[1], v.shape[1], dtype=torch.float64), []
        for t in range(T):
            S, y = step(module, S, q[t], k[t], v[t], x[0, t], h, t)
            rows.append(y)
        heads.append(torch.stack(rows))
    R = {"rwkv7": module.R, "deltanet": lambda x: 1.0}.get(variant, lambda x: silu(module.R(x)))
    expected = module.out(R(x[0]) * torch.cat(heads, -1))
    assert_same_with_gradients(module(x)[0][0], expected, [x, *module.parameters()], 1e-9)


@pytest.mark.skipif(
    not pick_compile(None, torch.device("cpu"), hours=math.inf), reason="needs a C++ compiler and Python's headers"
)
@pytest.mark.parametrize("variant", ["gla", "rwkv7"])
def test_compiled_code_gives_the_same_gradients(variant, small_chunks):
    """With an earlier form of `_pairs`, the gradient of k in attn/rwkv7.py was wrong, but only in compiled code."""
    torch.manual_seed(0)
    module = instantiate(compose([f"attn={variant}", "experiment=small"]).attn)()
    x, parameters = torch.randn(2, 20, 128), list(module.parameters())

    def loss(x: torch.Tensor) -> torch.Tensor:
        return recurrent_sum(module.recurrence(x)).sin().sum()

    torch.compiler.reset()
    found, expected = (
        torch.autograd.grad(f(x), parameters, materialize_grads=True, allow_unused=True)
        for f in (torch.compile(loss, dynamic=False, fullgraph=True), loss)
    )
    for one, right in zip(found, expected, strict=True):
        assert (one - right).abs().max() <= 1e-4 * right.abs().max()


@every_recurrent
def test_a_block_has_as_many_parameters_as_mha_s(variant):
    """The numbers differ by at most 1% at the source's size."""
    counts = []
    for name in (variant, "mha"):
        with torch.device("meta"):
            block = build_model(compose([f"attn={name}", "experiment=source"]), 50).blocks[0]
        counts.append(sum(p.numel() for p in block.parameters()))
    assert counts[0] == pytest.approx(counts[1], rel=0.01)


def test_the_initial_range_of_log_decays():
    for variant, slowest, fastest in (("mamba2", 0.001, 1.6), ("rwkv7", 0.0009, 0.11)):
        model = build_model(compose([f"attn={variant}", "experiment=source"]), 50)
        with torch.no_grad():
            g = model.blocks[0].attn.recurrence(torch.zeros(1, 1, 512)).g
        assert -g.max().item() == pytest.approx(slowest, rel=0.05)
        assert -g.min().item() == pytest.approx(fastest, rel=0.05)
