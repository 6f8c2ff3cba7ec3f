"""Test streaming: `step` computes at each position what `forward` computes, past the end of the context too.

The last tests are those of the benchmark of decoding.
"""

import copy
import itertools

import pytest
import torch
from torch import nn

from attn.base import Attention
from attn.contents import DENOMINATORS, WEIGHTS
from attn.kernels.causal import exp_weighted_mean
from attn.kernels.means import merge_means
from attn.parts import per_channel
from attn.position_weights import Alibi, Kernel, Local, LowRank, Toeplitz
from attn.streaming import cache_for, mean_step
from attn.unified import Terms
from configs.cli import compose
from models.build import instantiate_model
from scripts.benchmarking import decode
from scripts.reporting import decode as decode_page
from tests.conftest import TINY, VARIANTS, attn_config, command, random_mixer, randomised, small_config
from tests.helpers.variants import (
    EXTREMES,
    PLAIN,
    SIGNED,
    SWITCHED,
    assert_equals_oracle,
    named,
    streamed,
    with_extreme_logits,
)

CONTEXT, LONG = 12, 40  # LONG: the length of inputs if there is no max_length

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_gradients")]


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


def toeplitz_variants() -> list[str]:
    """Return the variants with a Toeplitz w."""
    return [v for v in VARIANTS if "extrapolation" in (attn_config(v).get("position_weight") or {})]


def past_the_context(extrapolation: str, positive: bool = True) -> tuple[str, ...]:
    """Return overrides with which an attention with a Toeplitz w is defined past its context."""
    free = (
        "attn.position_weight.alpha_beta=false",
        "attn.gamma=false",
        f"attn.position_weight.positive={str(positive).lower()}",
    )
    return (f"attn.position_weight.extrapolation={extrapolation}", *free)


def forms() -> list[tuple[str, ...]]:
    """Return a case of attn=rwv for every W and every denominator that this W may have."""
    cases = []
    for W, denominator in itertools.product(WEIGHTS, DENOMINATORS):
        refused = ("exp" in W and denominator == "none") or (W in SIGNED and denominator != "none")
        if not refused and (W.startswith("w") or denominator != "without_w"):
            cases.append(("rwv", f"attn.W={W}", f"attn.denominator={denominator}"))
    return cases


BEYOND = [
    (variant, *past_the_context(extrapolation, positive))
    for variant, extrapolation, positive in itertools.product(toeplitz_variants(), ("constant", "zero"), (True, False))
]
FORMS = [(*form, *rule) for form in forms() for rule in ((), past_the_context("constant"), past_the_context("zero"))]
FORMS += [(*form, *past_the_context("zero", positive=False)) for form in forms() if form[1].startswith("attn.W=w")]
MORE = [
    ("gau", "attn.relative_bias=true", "attn.token_shift=true"),
    ("gmlp_sgu", "attn.heads=3", "attn.token_shift=true"),
    ("aft_conv", "attn.position_weight.window=5"),
    ("aft", "attn.position_weight.per_head=false", *past_the_context("constant")),
    ("mha_plus", "attn.talking_heads=both", "attn.logit_heads=6", "attn.value_heads=2"),
]


def config(case: tuple[str, ...]):
    """Return a small config with a context of 12. It is composed once per variant, because composing takes long."""
    whole = copy.deepcopy(small_config(case[0]))
    whole.model.context = CONTEXT
    for override in case[1:]:
        whole.merge_with_dotlist([override])
    return whole


def small_mixer(case: tuple[str, ...], dtype=torch.float64) -> Attention:
    return random_mixer(config(case).attn, dtype)


@pytest.mark.parametrize("case", named([(case,) for case in PLAIN + SWITCHED + BEYOND + FORMS + MORE]))
def test_steps_give_what_forward_gives(case):
    """Compare all positions up to max_length, after which steps and forward raise ValueError.

    If there is no max_length, compare positions far past the context.
    """
    module = small_mixer(case)
    assert module.max_length in (None, CONTEXT)
    T = module.max_length or LONG
    x = torch.randn(2, T + 1, 24, dtype=torch.float64)
    torch.testing.assert_close(streamed(module, x[:, :T]), module(x[:, :T])[0], rtol=1e-10, atol=1e-10)
    if module.max_length is not None:
        for run in (module, lambda x: streamed(module, x)):
            with pytest.raises(ValueError, match=r"is defined for \d+ positions: got"):
                run(x)


POSITION_WEIGHTS = [(Kernel, 3, 5), (LowRank, CONTEXT, 4), (Local, CONTEXT, 5), (Alibi, 3)]


@pytest.mark.parametrize("w", POSITION_WEIGHTS, ids=lambda w: w[0].__name__)
@pytest.mark.parametrize("variant", toeplitz_variants())
def test_every_position_weight_streams_in_every_attention_that_takes_one(variant, w):
    module = small_mixer((variant, "attn.gamma=false"))
    module.position_weight = randomised(w[0](*w[1:])).double()
    x = torch.randn(2, module.max_length or LONG, 24, dtype=torch.float64)
    torch.testing.assert_close(streamed(module, x), module(x)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", named([(case,) for case in BEYOND]))
def test_past_the_context_forward_equals_the_oracle(case):
    with torch.enable_grad():
        assert_equals_oracle(small_mixer(case), torch.randn(2, LONG, 24).double(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", named([(case,) for case in BEYOND]))
def test_past_the_context_gradients_are_causal_and_end_with_the_window(case):
    """Gradients are exactly 0 at later positions and, with extrapolation=zero, before the window.

    The token shift extends the window by one position.
    """
    module = small_mixer(case)
    with torch.enable_grad():
        x = torch.randn(1, LONG, 24, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(module(x)[0][0, 30].sum(), x)
    reached = (gradient[0] != 0).any(1)
    assert not reached[31:].any()
    first = 30 - CONTEXT if "zero" in case[1] else 0  # the window is 19 to 30, and the token shift adds 18
    assert reached[first:31].all()
    assert not reached[:first].any()


EXTREME = [(case, what) for case in PLAIN for what in EXTREMES]
EXTREME += [(case, what) for case in BEYOND for what in ("times100", "plus-120")]


@pytest.mark.parametrize(("case", "what"), named(EXTREME))
def test_extreme_logits_stream(case, what):
    """Compare forward and steps in float32, and then steps in float64, with the oracle in float64."""
    torch.manual_seed(3)
    module = with_extreme_logits(small_mixer(case, torch.float32), what)
    x = torch.randn(2, module.max_length or 30, 24)
    found = streamed(module, x), module(x)[0]
    module.double().impl = "reference"
    expected = module(x.double())[0]
    for y in found:  # a comment in tests/test_variants.py explains the tolerance
        torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-2)
    module.impl = "torch"
    torch.testing.assert_close(streamed(module, x.double()), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("extrapolation", ["constant", "zero"])
def test_a_large_key_leaves_no_trace_after_its_window(extrapolation, positive):
    """Once k was large at one position, the mean equals v of that position until the window has left it behind.

    Channels 0 to 2 have a large negative k at another position.
    """
    w = randomised(Toeplitz(3, CONTEXT, True, False, positive, extrapolation, initial_f="ones"))
    k, v = torch.randn(1, LONG, 6), torch.randn(1, LONG, 6)
    k[:, 20] += 120
    k[:, 22, :3] -= 120
    cache = cache_for(w, merge_means)
    steps = torch.cat([mean_step(w, cache, k[:, t : t + 1], v[:, t : t + 1]) for t in range(LONG)], dim=1)
    forward = exp_weighted_mean(w.relative_product(LONG), k, v, window=w.window)
    W = per_channel(w.double()(LONG), 6) * k.double().exp()  # [T, T, 6]
    expected = ((W * v).sum(1) / W.sum(1))[None]
    torch.testing.assert_close(steps.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(forward.double(), expected, rtol=1e-4, atol=1e-5)
    in_sight = slice(20, LONG if extrapolation == "constant" else 20 + CONTEXT)
    torch.testing.assert_close(steps[:, in_sight], v[:, 20:21].expand_as(steps[:, in_sight]))


def test_a_mean_over_many_steps_in_float32_stays_accurate():
    k, v = torch.randn(1, 2000, 4), 1 + torch.randn(1, 2000, 4)
    cache = cache_for(None, merge_means)
    for t in range(2000):
        y = mean_step(None, cache, k[:, t : t + 1], v[:, t : t + 1])
    torch.testing.assert_close(y[0, 0].double(), (k.double().softmax(1) * v).sum(1)[0], rtol=2e-7, atol=0)


def memory(state) -> int:
    """Return the number of bytes of all tensors in a state."""
    if isinstance(state, torch.Tensor):
        return state.untyped_storage().nbytes()
    if isinstance(state, (list, tuple)):
        return sum(map(memory, state))
    return sum(map(memory, vars(state).values())) if hasattr(state, "__dict__") else 0


CONSTANT = [("rwkv4",), ("linear_attention",), ("aft_simple",), ("aft_conv", "attn.position_weight.window=5")]
CONSTANT += [("flash_mixed_chunk", "attn.chunk_size=24")]
CONSTANT += [case for case in BEYOND if case[0] in ("aft", "gmlp", "rwv") or "zero" in case[1]]
CONSTANT += [("retnet",), ("mamba2",), ("gla",), ("deltanet",), ("gated_deltanet",), ("rwkv7",)]


@pytest.mark.parametrize("case", named([(case,) for case in CONSTANT]))
def test_a_state_has_constant_memory(case):
    module, x = small_mixer(case), torch.randn(1, 1, 24, dtype=torch.float64)
    state, sizes = module.begin(1), []
    for _ in range(200):
        module.step(x, state)
        sizes.append(memory(state))
    assert max(sizes[50:]) == max(sizes[:50]) > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_of_two_layers(variant):
    """Check the logits of steps, a step from a copy of the state, and max_length.

    In some variants the first layer passes its scores, or its q and k, to the second.
    """
    whole = config((variant,))
    whole.model.layers = 2
    torch.manual_seed(0)
    model = randomised(instantiate_model(whole, 40)).double()
    assert model.max_length == model.blocks[0].attn.max_length
    ids = torch.randint(40, (2, model.max_length or LONG))
    state, logits = model.begin(2), []
    for t in range(ids.shape[1]):
        if t == 9:
            branch = copy.deepcopy(state)
        logits.append(model.step(ids[:, t], state))
    torch.testing.assert_close(torch.stack(logits, 1), model(ids), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.step(ids[:, 9], branch), logits[9])
    with pytest.raises(ValueError, match="the state is of 2 texts"):
        model.step(ids[:1, 0], state)
    if model.max_length is not None:
        with pytest.raises(ValueError, match=r"is defined for \d+ positions: got"):
            model.step(ids[:, 0], state)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_autocast_streams(variant):
    module, x = small_mixer((variant,), torch.float32), torch.randn(2, CONTEXT, 24)
    exact = module(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        y = streamed(module, x)
    assert (y.float() - exact).abs().max() < 0.03 * exact.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_streaming_can_enter_and_leave_autocast(variant):
    module, x = small_mixer((variant,), torch.float32), torch.randn(2, CONTEXT, 24)
    exact, state, outputs = module(x)[0], module.begin(2), []
    for t in range(CONTEXT):
        with torch.autocast("cpu", torch.bfloat16, enabled=t % 3 == 0):
            outputs.append(module.step(x[:, t : t + 1], state)[0].float())
    assert (torch.cat(outputs, 1) - exact).abs().max() < 0.03 * exact.abs().max()


class Halves(Attention):
    """ATT[t,c] = gamma[t] * sum_{u<=t} 2^(u-t) V[u,c], with `terms` alone and no code for streaming."""

    def __init__(self):
        super().__init__(24, 3, 24, token_shift=True, impl="torch", gamma=CONTEXT)
        self.V = nn.Linear(24, 24)

    def terms(self, x: torch.Tensor) -> Terms:
        position = torch.arange(x.shape[1])
        w = 2.0 ** (position - position[:, None])
        return Terms(None, self.V(x), w[..., None], gamma=self.gamma_values(x.shape[1]), normalised=False)


def test_an_attention_with_terms_alone_streams():
    module, x = randomised(Halves()).double(), torch.randn(2, CONTEXT, 24, dtype=torch.float64)
    torch.testing.assert_close(streamed(module, x), module(x)[0])
    assert module.max_length == CONTEXT


@pytest.fixture
def tiny_models(monkeypatch):
    shape = [*(a for a in TINY if not a.startswith("model.context"))]
    monkeypatch.setattr(decode, "compose", lambda overrides: compose([*shape, *overrides]))


def test_decoding_is_timed_and_shown_in_a_table(tiny_models):
    cfg = compose(["variants=[mha,aft]", "repeats=2", "characters=3", "vocabulary=50", "measure=decode"], "benchmark")
    cells = decode.measure_context(cfg, 16, torch.device("cpu"))
    assert set(cells) == {"mha", "aft"}
    assert all(len(cells[v][kind]) == 2 for v in cells for kind in ("streaming", "recomputing"))
    origin = {"device": "a CPU", "threads": 1, "versions": {"torch": "2"}, "commit": "abc", "dirty": False}
    record = {"dim": 24, "vocabulary": 50, "precision": "float32", "provenance": origin | {"command": "python x"}}
    cells = {"mha": {"streaming": [0.001, 0.002, 0.9], "recomputing": [0.005, 0.007, 0.006]}}
    table = decode_page.page(record | {"contexts": {"16": cells, "2048": cells}})
    assert "context 2,048" in table
    assert [cell.strip() for cell in table.splitlines()[4].split("|")[1:-1]] == ["MHA", "500", "3.0", "500", "3.0"]


def test_a_context_too_short_to_be_timed_is_refused(tmp_path):
    done = command("-m", "scripts.benchmark", "measure=decode", "contexts=[16]", f"results={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.startswith("error: characters x (warm_up + repeats) = 64 do not fit into a context of 16")
    assert not list(tmp_path.iterdir())
