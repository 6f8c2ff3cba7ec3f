"""attn=rwv: the named variants are points of it, and what makes no sense is refused."""

import itertools

import pytest
import torch
from hydra.utils import instantiate

from attn.rwv import DENOMINATORS, KEY_WEIGHTS, RECEPTANCES, SCORE_WEIGHTS, VALUES, WEIGHTS
from configs.cli import compose
from tests.conftest import attn_config, mixer
from tests.helpers.variants import assert_equals_oracle

# The source's table (section 1 of its article) in the words of attn=rwv.
POINTS = {
    "mha": ["R=one", "W=exp_qk", "V=linear", "denominator=with_w", "gamma=false"],
    "mha_tw": ["R=one", "W=w_exp_qk", "V=linear", "denominator=with_w"],
    "gmlp": ["R=gelu", "W=w", "V=gelu", "denominator=none", "expansion=2", "position_weight.positive=false"],
    "aft": ["R=sigmoid", "W=w_exp_k", "V=linear", "denominator=with_w"],
    "aft_simple": ["R=sigmoid", "W=exp_k", "V=linear", "denominator=with_w", "gamma=false"],
}


def test_the_parts_are_what_their_names_say():
    x = torch.tensor([-2.0, -0.5, 0.0, 1.0, 3.0], dtype=torch.float64)
    sigmoid = 1 / (1 + (-x).exp())
    gelu = x * (1 + torch.erf(x / 2**0.5)) / 2
    relu2 = torch.where(x > 0, x * x, 0)
    names = {"sigmoid": sigmoid, "gelu": gelu, "silu": x * sigmoid, "relu2": relu2, "linear": x}
    for name, function in [*VALUES.items(), *RECEPTANCES.items()]:
        if name != "one":
            torch.testing.assert_close(function(x), names[name])
    for name, weight in KEY_WEIGHTS.items():
        torch.testing.assert_close(weight.function(x).exp(), {"exp_k": x.exp(), "sigmoid_k": sigmoid}[name])
    for name, weight in SCORE_WEIGHTS.items():
        torch.testing.assert_close(weight.function(x), {"exp_qk": x.exp(), "relu2_qk": relu2}[name])


@pytest.mark.parametrize("variant", POINTS)
def test_a_named_variant_is_a_point(variant):
    """The same parameters by name and shape; with the same numbers, the same outputs and gradients."""
    named, point = mixer(variant), mixer("rwv", *(f"attn.{choice}" for choice in POINTS[variant]))
    point.load_state_dict(named.state_dict())
    x = torch.randn(2, 21, 24, dtype=torch.float64)
    for module in (named, point):
        module(x)[0].square().sum().backward()
    torch.testing.assert_close(point(x)[0], named(x)[0])
    for name, p in named.named_parameters():
        if p.grad is not None:  # alpha beside a denominator has none
            torch.testing.assert_close(dict(point.named_parameters())[name].grad, p.grad)


@pytest.mark.parametrize("positive", ["true", "false"])
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("W", WEIGHTS)
def test_every_w_is_its_equation_or_refused(W, denominator, positive):
    case = ("rwv", f"attn.W={W}", f"attn.denominator={denominator}", f"attn.position_weight.positive={positive}")
    refused = {
        "overflows without a denominator": denominator == "none" and "exp" in W,
        "take denominator=none": denominator != "none" and "relu2" in W,
        "has no w to leave out": denominator == "without_w" and not W.startswith("w"),
    }
    for message in (message for message, is_so in refused.items() if is_so):
        with pytest.raises(ValueError, match=message):
            mixer(*case)
        return
    assert_equals_oracle(mixer(*case), torch.randn(2, 19, 24, dtype=torch.float64), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize("W", ["w_exp_k", "w_exp_qk"])
def test_without_w_is_a_loop_over_positions(W, size):
    module = mixer("rwv", f"attn.W={W}", "attn.denominator=without_w", "attn.R=one", "attn.gamma=false")
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    with torch.no_grad():
        module.K.weight.mul_(size)
        w, K, V, S = module.position_weight(9), module.K(x), module.V(x), module.scores(x) if module.Q else None
        rows = torch.empty_like(V)
        for t in range(9):
            for c in range(24):
                h = c // 8
                E = (K[0, : t + 1, c] if S is None else S[0, h, t, : t + 1]).softmax(0)
                rows[0, t, c] = (w[h, t, : t + 1] * E * V[0, : t + 1, c]).sum()
        torch.testing.assert_close(module.mix(x), rows)


@pytest.mark.parametrize(("R", "V"), list(itertools.product(RECEPTANCES, VALUES)))
def test_every_r_with_every_v(R, V):
    module = mixer("rwv", f"attn.R={R}", f"attn.V={V}")
    assert_equals_oracle(module, torch.randn(2, 9, 24, dtype=torch.float64), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("key", "value"), [("R", "tanh"), ("W", "w_exp"), ("V", "relu"), ("denominator", "half")])
def test_an_unknown_name_is_refused_with_those_there_are(key, value):
    config = attn_config("rwv").copy()
    config[key] = value
    with pytest.raises(ValueError, match=f"{key} must be one of .*: got {value}"):
        instantiate(config)()


def test_a_sweep_over_the_parts_names_its_runs():
    assert compose(["attn=rwv", "attn.R=silu", "attn.W=w"]).job.name == "rwv-R=silu-W=w-seed0"
