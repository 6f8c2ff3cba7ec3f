"""attn=rwv: named attentions are special cases of it, and every option equals its equation or is refused."""

import itertools
import pickle

import pytest
import torch
from hydra.utils import instantiate

from attn.contents import DENOMINATORS, KEY_WEIGHTS, RECEPTANCES, SCORE_WEIGHTS, VALUES, WEIGHTS, log_phi_dot
from attn.decays import ChannelDecay, HeadDecay
from attn.shifts import SHIFTS
from configs.cli import compose
from tests.conftest import attn_config, mixer
from tests.helpers.variants import assert_equals_oracle, with_extreme_logits

# Named attentions as options of attn=rwv.
SPECIAL_CASES = {
    "mha": ["R=one", "W=exp_qk", "V=linear", "denominator=with_w", "gamma=false"],
    "mha_tw": ["R=one", "W=w_exp_qk", "V=linear", "denominator=with_w"],
    "gmlp": ["R=gelu", "W=w", "V=gelu", "denominator=none", "expansion=2", "position_weight.positive=false"],
    "aft": ["R=sigmoid", "W=w_exp_k", "V=linear", "denominator=with_w"],
    "aft_simple": ["R=sigmoid", "W=exp_k", "V=linear", "denominator=with_w", "gamma=false"],
    "mha_plus": ["R=one", "W=w_exp_qk", "V=linear", "denominator=with_w", "rotary=0.5", "talking_heads=true"],
    "linear_attention": ["R=one", "W=phi_qk", "V=linear", "denominator=with_w", "gamma=false"],
    "fox": ["R=one", "W=exp_qk", "V=linear", "denominator=with_w", "gamma=false", "forget=true"],
    "rwkv4": ["R=sigmoid", "W=w_exp_k", "denominator=with_w", "gamma=false", "position_weight=channel_decay"],
    "retnet": ["R=silu", "W=w_qk", "denominator=none", "gamma=false", "rotary=1", "norm=true"],
}
# The attentions whose parameters have other names in attn=rwv: {beginning of a name: beginning in attn=rwv}.
NAMES = {
    "fox": {"f.": "forget."},
    "rwkv4": {"log_lambda": "position_weight.log_lambda", "bonus": "position_weight.bonus"},
}


def test_the_functions_are_what_their_names_say():
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

    q, k = torch.randn(5, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    S = torch.tensor([[sum(a * b for a, b in zip(row, column, strict=True)) / 2 for column in k] for row in q]).double()
    phi_q, phi_k = (torch.where(y > 0, y + 1, y.exp()) for y in (q, k))
    factors = {"exp_qk": S.exp(), "phi_qk": phi_q @ phi_k.T, "relu2_qk": torch.where(S > 0, S * S, 0), "qk": S}
    for name, weight in SCORE_WEIGHTS.items():
        found = weight.function(q, k)
        torch.testing.assert_close(found.exp() if weight.positive else found, factors[name], rtol=1e-6, atol=1e-6)


def special_case(variant: str) -> torch.nn.Module:
    choices = [choice for choice in SPECIAL_CASES[variant] if "position_weight=" not in choice]
    module = mixer("rwv", *(f"attn.{choice}" for choice in choices))
    if variant == "rwkv4":
        module.position_weight = ChannelDecay(24).double()
    elif variant == "retnet":  # RetNet's decays are constants
        module.position_weight = HeadDecay(module.heads, 16).double()
        decay = -torch.log1p(-(2.0 ** (-5 - torch.arange(module.heads, dtype=torch.float64))))
        module.position_weight.log_lambda.data = decay.log()
    return module


@pytest.mark.parametrize("variant", SPECIAL_CASES)
def test_a_named_attention_is_a_special_case(variant):
    """attn=rwv can load the parameters of the attention, and then has the same outputs and gradients."""
    named, special = mixer(variant), special_case(variant)
    theirs = {}
    for name in named.state_dict():
        old, new = next(((o, n) for o, n in NAMES.get(variant, {}).items() if name.startswith(o)), ("", ""))
        theirs[name] = new + name.removeprefix(old) if old else name
    missing = special.load_state_dict({theirs[n]: p for n, p in named.state_dict().items()}, strict=False)
    assert not missing.unexpected_keys
    assert variant == "retnet" or not missing.missing_keys
    x = torch.randn(2, 21, 24, dtype=torch.float64)
    for module in (named, special):
        module(x)[0].square().sum().backward()
    torch.testing.assert_close(special(x)[0], named(x)[0])
    for name, p in named.named_parameters():
        if p.grad is not None:  # what cancels in the ratio gets no gradient
            torch.testing.assert_close(dict(special.named_parameters())[theirs[name]].grad, p.grad)


@pytest.mark.parametrize("positive", ["true", "false"])
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("W", WEIGHTS)
def test_every_w_equals_its_equation_or_is_refused(W, denominator, positive):
    case = ("rwv", f"attn.W={W}", f"attn.denominator={denominator}", f"attn.position_weight.positive={positive}")
    refused = {
        "can overflow without a denominator": denominator == "none" and "exp" in W,
        "take denominator=none": denominator != "none" and W.removeprefix("w_") in ("relu2_qk", "qk"),
        "has no w to leave out": denominator == "without_w" and not W.startswith("w"),
    }
    for message in (message for message, is_so in refused.items() if is_so):
        with pytest.raises(ValueError, match=message):
            mixer(*case)
        return
    assert_equals_oracle(mixer(*case), torch.randn(2, 19, 24, dtype=torch.float64), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize("W", ["w_exp_k", "w_exp_qk"])
def test_denominator_without_w_equals_a_loop_over_positions(W, size):
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
def test_every_r_with_every_v_equals_its_equation(R, V):
    module = mixer("rwv", f"attn.R={R}", f"attn.V={V}")
    assert_equals_oracle(module, torch.randn(2, 9, 24, dtype=torch.float64), rtol=1e-9, atol=1e-11)


def options() -> list[tuple[str, ...]]:
    """Return combinations of W with other options that are not refused, and each learned token shift alone.

    Every W except `w` has each option alone and all options together; some are repeated with denominator=without_w.
    """
    cases = []
    for prefix, content in itertools.product(("", "w_"), (*KEY_WEIGHTS, *SCORE_WEIGHTS)):
        signed, of_scores = content in ("qk", "relu2_qk"), content in SCORE_WEIGHTS
        common = (f"attn.W={prefix}{content}", f"attn.denominator={'none' if signed else 'with_w'}")
        switches = [["attn.norm=true"]] * signed + [["attn.forget=true"]] * (of_scores or not prefix)
        switches += [["attn.talking_heads=true"]] * of_scores + [["attn.rotary=0.5"]] * (content in ("exp_qk", "qk"))
        switches += [["attn.R=one", "attn.gamma=false"]]
        for n in {1, len(switches)}:
            cases += [(*common, *itertools.chain(*chosen)) for chosen in itertools.combinations(switches, n)]
    cases += [(*case, "attn.denominator=without_w") for case in cases if "w_exp_qk" in case[0] or "w_phi_qk" in case[0]]
    cases += [("attn.W=w_phi_qk", "attn.denominator=none", "attn.norm=true", "attn.forget=true")]
    return [*cases, *((f"attn.shift={shift}",) for shift in SHIFTS)]


every_option = pytest.mark.parametrize("case", options(), ids=lambda case: "-".join(case).replace("attn.", ""))


@pytest.mark.slow
@every_option
def test_every_option_equals_its_equation(case):
    torch.manual_seed(3)
    assert_equals_oracle(mixer("rwv", *case), torch.randn(2, 19, 24).double(), rtol=1e-9, atol=1e-11)


@every_option
def test_every_option_streams(case):
    torch.manual_seed(3)
    module, x = mixer("rwv", *case), torch.randn(2, 12, 24, dtype=torch.float64)
    with torch.no_grad():
        state = module.begin(2)
        steps = [module.step(x[:, t : t + 1], state)[0] for t in range(12)]
        torch.testing.assert_close(torch.cat(steps, 1), module(x)[0], rtol=1e-10, atol=1e-10)


@every_option
def test_every_option_is_causal_to_the_bit(case):
    torch.manual_seed(3)
    module, x = mixer("rwv", *case, dtype=torch.float32), torch.randn(1, 21, 24, requires_grad=True)
    y = module(x)[0]
    (gradient,) = torch.autograd.grad(y[:, :9].sum(), x)
    assert not gradient[:, 9:].any()
    for t in (1, 8, 20):
        changed = torch.cat([x[:, :t], 1e4 * torch.randn(1, 21 - t, 24)], 1)
        assert torch.equal(module(changed)[0][:, :t], y[:, :t])


@every_option
@pytest.mark.parametrize("what", ["times100", "plus-120"])
def test_every_option_stays_finite(case, what):
    module = with_extreme_logits(mixer("rwv", *case, dtype=torch.float32), what)
    x = (3 * torch.randn(2, 21, 24)).requires_grad_()
    y = module(x)[0]
    y.square().mean().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)


@pytest.mark.parametrize("decay", [-50.0, 0.0, 50.0])
@pytest.mark.parametrize("content", ["exp_k", "exp_qk", "phi_qk"])
def test_forget_gates_that_are_open_or_shut(content, decay):
    """Open gates change nothing, and with shut gates each position sees only itself."""
    torch.manual_seed(3)
    case = (f"attn.W={content}", "attn.R=one", "attn.gamma=false")
    module, plain = mixer("rwv", *case, "attn.forget=true"), mixer("rwv", *case)
    with torch.no_grad():
        module.forget.bias.add_(decay)
        x = torch.randn(1, 21, 24, dtype=torch.float64)
        y = module.mix(x)
        plain.load_state_dict({n: p for n, p in module.state_dict().items() if "forget" not in n})
        expected = {-50.0: module.values(x), 50.0: plain.mix(x), 0.0: module.reference(x)}[decay]
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)


def test_phi_where_the_large_entries_of_one_meet_tiny_entries_of_the_other():
    torch.manual_seed(9)
    q = torch.tensor([5.0, -100.0, -100.0]) + torch.randn(2, 7, 3)
    k = torch.tensor([-100.0, 5.0, -100.0]) + torch.randn(2, 9, 3)
    k[:, 4], k[:, 6] = torch.tensor([-40.0, 5.0, -100.0]), 1.0
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k)]
        phi_q, phi_k = (torch.where(x > 0, 1 + x, x.exp()) for x in leaves)
        y = log_phi_dot(*leaves) if dtype == torch.float32 else (phi_q @ phi_k.mT).log()
        results.append([y, *torch.autograd.grad(y.sigmoid().sum() + 1e-3 * y.sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "case", [(f"attn.W={W}", "attn.denominator=none") for W in ("w_phi_qk", "relu2_qk", "sigmoid_k")]
)
def test_can_be_pickled(case):
    module, x = mixer("rwv", *case), torch.randn(2, 9, 24, dtype=torch.float64)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x)[0], module(x)[0])


@pytest.mark.parametrize("shift", SHIFTS)
def test_a_learned_shift_equals_the_fixed_one_at_initialisation(shift):
    module, plain = mixer("rwv", f"attn.shift={shift}"), mixer("rwv")
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    fresh = SHIFTS[shift](24).double()
    module.shift = fresh
    torch.testing.assert_close(module.shift_tokens(x), plain.shift_tokens(x))


def test_a_gated_form_has_as_many_parameters_as_an_ungated_one():
    count = [sum(p.numel() for p in mixer("rwv", "attn.W=exp_qk", f"attn.R={R}").parameters()) for R in ("one", "silu")]
    assert count[1] - count[0] == 0


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (("attn.talking_heads=true",), "talking_heads=true needs a W that depends on Q: got W=w_exp_k"),
        (("attn.rotary=0.5",), "rotary needs W=exp_qk, qk, w_exp_qk or w_qk: got W=w_exp_k"),
        (("attn.norm=true",), "norm=true needs denominator=none: got denominator=with_w"),
        (("attn.forget=true",), "forget=true needs W=exp_k or sigmoid_k with denominator=with_w"),
    ],
)
def test_options_that_do_not_fit_are_refused(case, message):
    with pytest.raises(ValueError, match=message):
        mixer("rwv", *case)


def test_a_decay_per_channel_needs_weights_per_channel():
    config = compose(["attn=rwv", "attn/position_weight=channel_decay", "attn.W=w_exp_qk"]).attn
    with pytest.raises(ValueError, match="a decay per channel needs a W that does not depend on Q: got W=w_exp_qk"):
        instantiate(config)()


@pytest.mark.parametrize(("key", "value"), [("R", "tanh"), ("W", "w_exp"), ("V", "relu"), ("denominator", "half")])
def test_an_unknown_name_is_refused(key, value):
    config = attn_config("rwv").copy()
    config[key] = value
    with pytest.raises(ValueError, match=f"{key} must be one of .*: got {value}"):
        instantiate(config)()


def test_r_and_w_are_in_the_name_of_a_run():
    assert compose(["attn=rwv", "attn.R=silu", "attn.W=w"]).job.name == "rwv-R=silu-W=w-seed0"
