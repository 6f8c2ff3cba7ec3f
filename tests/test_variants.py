"""Test every variant in configs/attn, with each of its switches, against the unified form."""

import re

import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import load, save
from torch.utils.checkpoint import checkpoint

import attn.kernels.rows
from attn.parts import rotary_dims
from attn.unified import Terms, unified
from configs.cli import compose
from models.build import build_model
from scripts.reporting.variants import header
from tests.conftest import TINY, attn_config, mixer, small_config, tensors
from tests.helpers.variants import (
    EXTREMES,
    PLAIN,
    SWITCHED,
    assert_bf16_stays_near,
    assert_equals_oracle,
    every_switch,
    every_variant,
    every_variant_and_chunks,
    named,
    outputs_and_gradients,
    with_extreme_logits,
)


@pytest.mark.parametrize(
    ("case", "T"), named([(case, T) for case in PLAIN for T in (1, 2, 63, 128)] + [(case, 37) for case in SWITCHED])
)
def test_equals_the_oracle(case, T):
    torch.manual_seed(3)
    assert_equals_oracle(mixer(*case), torch.randn(2, T, 24, dtype=torch.float64), rtol=1e-9, atol=1e-11)


@pytest.fixture
def short_rows(monkeypatch):
    """Use blocks of 8 rows for 32 or more positions."""
    monkeypatch.setattr(attn.kernels.rows, "ROWS", 8)


@every_variant
@pytest.mark.parametrize("T", [33, 37])
def test_a_block_of_rows_at_a_time_equals_the_oracle(variant, T, short_rows):
    torch.manual_seed(3)
    assert_equals_oracle(mixer(variant), torch.randn(2, T, 24, dtype=torch.float64), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("extrapolation", ["constant", "zero"])
@pytest.mark.parametrize("positive", ["true", "false"])
@pytest.mark.parametrize("variant", ["mha_tw", "rwv"])
def test_blocks_of_rows_beyond_the_context_equal_the_oracle(variant, extrapolation, positive, short_rows):
    torch.manual_seed(3)
    switches = [
        "model.context=20",
        "attn.gamma=false",
        "attn.position_weight.alpha_beta=false",
        f"attn.position_weight.extrapolation={extrapolation}",
    ]
    switches += [f"attn.position_weight.positive={positive}", *(["attn.W=w_exp_qk"] if variant == "rwv" else [])]
    module = mixer(variant, *switches)
    assert_equals_oracle(module, torch.randn(2, 37, 24, dtype=torch.float64), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_checkpoint_around_blocks_of_rows_stores_no_blocks(short_rows):
    module, x = mixer("mha_tw"), torch.randn(2, 37, 24, dtype=torch.float64, requires_grad=True)
    before = tensors()
    y = checkpoint(lambda x: module(x)[0], x, use_reentrant=False)
    assert tensors() - before == 2  # the result, and the state of the random number generator that checkpoint stores
    y.sum().backward()


@every_variant
def test_blocks_of_rows_are_causal_to_the_bit(variant, short_rows):
    module, x = mixer(variant, dtype=torch.float32), torch.randn(2, 37, 24, requires_grad=True)
    before = module(x)[0]
    for t in (1, 8, 20, 36):
        changed = torch.cat([x[:, :t], 1e4 * torch.randn(2, 37 - t, 24)], 1)
        assert torch.equal(module(changed)[0][:, :t], before[:, :t])
        (gradient,) = torch.autograd.grad(module(x)[0][:, :t].sum(), x)
        assert (gradient[:, t:] == 0).all()


def test_the_names_of_algorithms_in_the_log():
    halves = "recursive Toeplitz products (long ones by FFT), or row blocks where an FFT is not precise enough"
    rows = "weights by blocks of 256 rows"
    algorithms = {
        "aft": ("dense Toeplitz products", halves),
        "gmlp": ("dense Toeplitz products", halves),
        "aft_conv": ("all weights at once", halves),
        "aft_full": ("all weights at once", rows),
        "mha_tw": ("all weights at once", rows),
        "gau": ("all weights at once", rows),
        "rwv": ("dense Toeplitz products", halves),
        "flash_mixed_chunk": ("chunk by chunk", "chunk by chunk"),
        "gla": ("chunks of 32 positions", "chunks of 32 positions"),
        "mha": ("torch's SDPA", "torch's SDPA"),
        "realformer": ("all weights at once", "all weights at once"),
        "aft_simple": ("", ""),
        "rwkv4": ("", ""),
        "alibi": ("all weights at once", rows),
        "fox": ("all weights at once", rows),
        "linear_attention": ("chunk by chunk", "chunk by chunk"),
        "xsa": ("torch's SDPA", "torch's SDPA"),
    }
    for variant, expected in algorithms.items():
        module = mixer(variant)
        assert (module.algorithm(1023), module.algorithm(1024)) == expected, variant


@every_variant
def test_float32_equals_the_oracle(variant):
    torch.manual_seed(3)
    module = mixer(variant, dtype=torch.float32)
    assert_equals_oracle(module, torch.randn(3, 63, 24), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "what"),
    named([(case, what) for case in PLAIN for what in EXTREMES] + [(case, "times100") for case in SWITCHED]),
)
def test_extreme_logits_give_finite_and_correct_outputs(case, what):
    torch.manual_seed(3)
    module, x = with_extreme_logits(mixer(*case, dtype=torch.float32), what), torch.randn(2, 63, 24)
    y, gradients = outputs_and_gradients(module, x, "torch", torch.ones(2, 63, 24))
    assert y.isfinite().all()
    assert all(g.isfinite().all() for g in gradients.values())
    # Rounding an exponent of size E causes a relative error of up to E * 2^-24 in the weight, 6e-3 for E = 1e5.
    expected = outputs_and_gradients(module.double(), x.double(), "reference", torch.ones(2, 63, 24))[0]
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-2)


@every_variant_and_chunks
@pytest.mark.parametrize("size", [1, 100, 1e4])
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_values_are_causal_to_the_bit(case, size, impl):
    """Inputs at t and after it, however large, change no bit of the outputs before t, but change those from t on."""
    module = mixer(*case, dtype=torch.float32)
    module.impl = impl
    torch.manual_seed(4)
    x = torch.randn(2, 33, 24)
    before = module(x)[0]
    for t in (1, 16, 32):
        changed = x.clone()
        changed[:, t:] = size * torch.randn(2, 33 - t, 24)
        after = module(changed)[0]
        assert torch.equal(before[:, :t], after[:, :t]), f"the inputs from {t} on change outputs before {t}"
        assert not torch.equal(before[:, t:], after[:, t:])


@every_switch
def test_gradients_are_causal(case):
    module = mixer(*case)
    x = torch.randn(1, 12, 24, dtype=torch.float64, requires_grad=True)
    y = module(x)[0]
    for t in range(getattr(module, "exclude_self", False), 12):  # exclude_self makes output 0 independent of the input
        (gradient,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
        assert (gradient[0, t + 1 :] == 0).all(), f"the output at {t} depends on later inputs"
        assert (gradient[0, t] != 0).any()


@every_variant
def test_a_prefix_gives_the_same_outputs(variant):
    module = mixer(variant)
    x = torch.randn(2, 40, 24, dtype=torch.float64)
    torch.testing.assert_close(module(x)[0][:, :17], module(x[:, :17])[0])


@every_variant
def test_the_yaml_says_what_r_is_if_terms_has_one(variant):
    R = mixer(variant).terms(torch.randn(1, 5, 24, dtype=torch.float64)).R
    assert ("R" in header(variant)) == (R is not None), f"configs/attn/{variant}.yaml: the comment `# R: ...`"


@every_variant
def test_sequences_do_not_mix(variant):
    module = mixer(variant)
    x = torch.randn(3, 20, 24, dtype=torch.float64)
    torch.testing.assert_close(module(x)[0][1:2], module(x[1:2])[0])


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("factor", (5, 8), "T, T, C"),
        ("factor", (4, 5, 5), "T, T, C"),
        ("exponent", (2, 5, 8), "T, T, C"),
        ("R", (4,), "T, C"),
    ],
)
def test_a_term_of_another_shape_is_named(name, shape, wanted):
    terms = Terms(R=None, V=torch.ones(2, 5, 8), factor=torch.ones(5, 5, 8))._replace(**{name: torch.ones(shape)})
    with pytest.raises(ValueError, match=re.escape(f"Terms.{name} must be broadcastable to [B, {wanted}] = [2, 5, ")):
        unified(terms)


@every_switch
def test_more_positions_than_the_context(case):
    """An attention with a parameter for each position or distance raises ValueError for more than its context.

    In the others, further positions do not change the outputs of the first ones.
    """
    module, x = mixer(*case), torch.randn(1, 150, 24, dtype=torch.float64)
    if any(131 in p.shape for p in module.parameters()):
        assert module.max_length == 131
        with pytest.raises(ValueError, match=r"is defined for \d+ positions: got"):
            module(x)
        return
    assert module.max_length is None
    longer = module(x)[0]
    torch.testing.assert_close(longer[:, :131], module(x[:, :131])[0])
    module.impl = "reference"
    torch.testing.assert_close(longer, module(x)[0])


@every_variant
def test_a_sequence_of_length_0_is_refused(variant):
    with pytest.raises(ValueError, match=r"needs at least one position: got an input of the shape \[2, 0, 24\]"):
        mixer(variant)(torch.randn(2, 0, 24, dtype=torch.float64))


@every_variant
def test_unknown_impl_is_refused(variant):
    config = attn_config(variant).copy()
    config.impl = "cuda"
    with pytest.raises(ValueError, match="impl must be one of reference, torch"):
        instantiate(config)()


@every_variant_and_chunks
def test_bf16_autocast_stays_near(case):
    assert_bf16_stays_near(mixer(*case, dtype=torch.float32), T=63)


@pytest.mark.slow
@every_variant
def test_saved_and_loaded_weights_give_the_same_outputs(variant):
    cfg = compose([f"attn={variant}", *TINY, "model.layers=2"])
    model, other = build_model(cfg, 50), build_model(cfg, 50)
    ids = torch.randint(50, (2, 16))
    assert not torch.equal(model(ids), other(ids))
    other.load_state_dict(load(save(model.state_dict())))
    assert torch.equal(model(ids), other(ids))


@every_variant
def test_layers_do_not_share_parameters(variant):
    model = build_model(small_config(variant, "model.layers=2"), 50)
    first, second = (set(map(id, block.parameters())) for block in model.blocks)
    assert not first & second


@pytest.mark.parametrize(
    ("variant", "parameters"),
    [("mha_plus", 9_301_696), ("gmlp", 9_826_432), ("aft", 9_301_632)],
)
def test_parameter_counts_are_the_source_s(variant, parameters):
    model = build_model(compose([f"attn={variant}", "experiment=source"]), 5744)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_the_oracle_refuses_an_unsafe_exponent():
    terms = mixer("aft").terms(torch.randn(1, 4, 24, dtype=torch.float64))
    with pytest.raises(ValueError, match="needs a denominator"):
        unified(terms._replace(normalised=False))


@pytest.mark.parametrize("variant", ["aft", "mha_tw"])
def test_a_w_of_0_has_the_gradient_of_the_equation(variant):
    """With positive=false, f can be 0. Its gradient is not, so that training can change it."""
    ours = mixer(variant, "attn.position_weight.positive=false")
    with torch.no_grad():
        ours.position_weight.f[:, 2:5] = 0
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    gradients = []
    for algorithm in (ours.mix, ours.reference):
        ours.zero_grad()
        algorithm(x).square().sum().backward()
        gradients.append(ours.position_weight.f.grad.clone())
    assert (gradients[0][:, 2:5] != 0).all()
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_the_fraction_of_rotary_dimensions_is_rounded_down():
    assert [rotary_dims(fraction, 8) for fraction in (0, 0.3, 0.5, 1)] == [0, 2, 4, 8]
    with pytest.raises(ValueError, match=r"0.58 times 50 selects 29"):
        rotary_dims(0.58, 50)
