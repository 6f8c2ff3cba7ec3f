"""Test the parts of a model around its attention (feed-forwards, norms, depth), and whole models."""

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import nn

from configs.cli import compose
from data.files import UserError
from models.block import PLACEMENTS, ResidualPath
from models.build import build, build_model
from models.ffn import GLU, MLP
from models.lm import parameter_count
from tests.conftest import ROOT, TINY, VARIANTS
from training.optimizer import optimizer_of, update

FFN = sorted(path.stem for path in (ROOT / "configs/ffn").glob("*.yaml") if path.stem != "attention")
SMALL = [a for a in TINY if not a.startswith("model")] + ["model.dim=24", "model.heads=3", "model.context=64"]


def small(*overrides: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(compose([*SMALL, *overrides]), 40).double()
    with torch.no_grad():  # the initial N(0, 0.02^2) would make errors too small to notice
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def test_a_position_weight_for_another_number_of_heads_is_refused():
    with pytest.raises(UserError, match=r"attn\.position_weight\.heads must be attn\.heads=3: got 1"):
        build("alibi", 24, 3, 16, "attn.position_weight.heads=1")


def set_impl(model: nn.Module, impl: str) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "impl"):
            module.impl = impl
    return model


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_layers_equal_the_oracle_and_are_causal(variant, placement):
    """Compare the loss and every gradient. In RealFormer the first layer passes scores, or Q and K, to the second."""
    model = small(f"attn={variant}", "model.layers=2", f"model.norm={placement}")
    ids = torch.randint(40, (2, 31))
    found = {}
    for impl in ("reference", "torch"):
        set_impl(model, impl).zero_grad()
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        found[impl] = gradients | {"loss": loss.detach()}
    torch.testing.assert_close(found["torch"], found["reference"], rtol=1e-8, atol=1e-10)

    other = ids.clone()
    other[:, 16:] = torch.randint(40, (2, 15))
    torch.testing.assert_close(model(ids)[:, :16], model(other)[:, :16], rtol=0, atol=1e-12)
    assert not torch.allclose(model(ids)[:, 16:], model(other)[:, 16:])


@pytest.mark.parametrize("name", FFN)
def test_feed_forwards_have_as_many_parameters_as_the_source_s(name):
    reference = parameter_count(instantiate(compose(["experiment=source"]).ffn)())
    if name == "channel_mix":
        reference += 512 * 512 + 512  # the parameters of its gate
    assert parameter_count(instantiate(compose([f"ffn={name}", "experiment=source"]).ffn)()) == pytest.approx(
        reference, rel=2e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FFN)
def test_the_hidden_size_can_be_set(name):
    ffn = instantiate(compose([f"ffn={name}", "ffn.hidden=7"]).ffn)()
    assert ffn.L.out_features == ffn.O.in_features == 7


def test_the_source_s_feed_forward_is_geglu():
    ffn = instantiate(compose(["experiment=source"]).ffn)()
    assert ffn.L.out_features == 1536
    x = torch.randn(2, 3, 512)
    expected = F.linear(
        F.gelu(F.linear(x, ffn.G.weight, ffn.G.bias)) * F.linear(x, ffn.L.weight, ffn.L.bias), ffn.O.weight
    )
    torch.testing.assert_close(ffn(x)[0], expected + ffn.O.bias)


def test_head_mix_scale_and_output_scale_scale_nothing_else():
    changed = ("attn=mha_plus", "attn.head_mix_scale=0.5", "model.output_scale=0")
    torch.manual_seed(0)
    plain = build_model(compose([*SMALL, changed[0]]), 40).state_dict()
    torch.manual_seed(0)
    model = build_model(compose([*SMALL, *changed]), 40)
    for name, weight in model.state_dict().items():
        factor = 0.5 if "mix" in name else 0 if name.endswith(("attn.out.weight", "ffn.O.weight")) else 1
        assert torch.equal(weight, factor * plain[name]), name
    ids = torch.randint(40, (2, 9))
    torch.testing.assert_close(model(ids), model.head(model.norm(model.embed(ids))))


def test_position_embeddings_are_added_and_stream():
    cfg = compose(["attn=mha", "model.position_embedding=true", *TINY])
    model, plain = build_model(cfg, 50).double(), build_model(compose(["attn=mha", *TINY]), 50).double()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("positions")})
    ids = torch.randint(50, (2, 16))
    logits = model(ids)
    model_input = model.embed.weight[ids] + model.positions.weight[:16]
    plain.embed.weight = torch.nn.Parameter(model_input.flatten(0, 1))
    torch.testing.assert_close(plain(torch.arange(32).view(2, 16)), logits)
    state = model.begin(2)
    with torch.no_grad():
        steps = [model.step(column, state) for column in ids.T]
    torch.testing.assert_close(torch.stack(steps, 1), logits)
    assert (model.max_length, plain.max_length) == (16, None)
    with pytest.raises(ValueError, match="the model has 16 position embeddings: got 17 positions"):
        model.step(ids[:, 0], state)


def test_placements_are_their_equations():
    x, f = torch.randn(2, 5, 8), nn.Linear(8, 8)
    pre, post, rezero = (ResidualPath(8, placement, 0.0) for placement in PLACEMENTS)
    nn.init.constant_(rezero.a, 0.3)
    expected = {pre: x + f(F.layer_norm(x, (8,))), post: F.layer_norm(x + f(x), (8,)), rezero: x + 0.3 * f(x)}
    for path, y in expected.items():
        torch.testing.assert_close(path.after(x, f(path.before(x))), y)


def test_rezero_starts_as_the_identity():
    model = build_model(compose([*SMALL, "model.norm=rezero", "model.layers=3"]), 40)
    ids = torch.randint(40, (2, 9))
    torch.testing.assert_close(model(ids), model.head(model.embed(ids)))


@pytest.mark.parametrize("variant", ["gau", "gau_softmax", "gau_alpha", "flash_mixed_chunk"])
def test_two_units_have_as_many_parameters_as_attention_and_feed_forward(variant):
    """The numbers agree within 2% for the model and, with key_size=256, within 0.2% for the block alone."""

    def built(*overrides: str) -> nn.Module:
        with torch.device("meta"):
            return build_model(compose([*overrides, "experiment=source"]), 5744)

    units, usual = built(f"attn={variant}"), built("attn=mha")
    assert parameter_count(units) == pytest.approx(parameter_count(usual), rel=0.02)
    assert type(units.blocks[0].attn) is type(units.blocks[0].ffn)
    larger = built(f"attn={variant}", "attn.key_size=256")
    assert parameter_count(larger.blocks[0]) == pytest.approx(parameter_count(usual.blocks[0]), rel=0.002)


def test_realformer_differs_from_mha_with_two_layers_and_not_with_one():
    """The second of two layers adds the scores, or Q and K, of the first."""
    ids = torch.randint(40, (1, 20))
    for variant in ("realformer", "realformer_qk"):
        one, plain = small(f"attn={variant}"), small("attn=mha", "model.norm=post")
        torch.testing.assert_close(one(ids), plain(ids))
        two, plain = (small(f"attn={a}", "model.layers=2", "model.norm=post") for a in (variant, "mha"))
        assert not torch.allclose(two(ids), plain(ids))


def test_realformer_s_two_forms_differ_by_the_cross_terms():
    """S_2 is Q_2 K_2 + Q_1 K_1 in realformer, and (Q_1 + Q_2)(K_1 + K_2) in realformer_qk."""
    scores, qk = (instantiate(compose([f"attn={v}", *SMALL]).attn)().double() for v in ("realformer", "realformer_qk"))
    qk.load_state_dict(scores.state_dict())
    x, y = (torch.randn(1, 6, 24, dtype=torch.float64) for _ in range(2))
    carried_scores, carried_qk = scores(y, scores(x)[1])[1], qk(y, qk(x)[1])[1]
    (q1, k1), (q2, k2) = qk(x)[1], qk(y)[1]
    cross = q1 @ k2.transpose(-1, -2) + q2 @ k1.transpose(-1, -2)
    both = carried_qk[0] @ carried_qk[1].transpose(-1, -2)  # the carried Q and K are not scaled yet
    torch.testing.assert_close(qk.logit_scale(q1) * (both - cross), carried_scores)


@pytest.mark.parametrize("heads", [(3, 4, 6), (6, 2, 4), (1, 6, 2), (4, 4, 12)])
@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_talking_heads_with_three_numbers_of_heads(heads, impl):
    """Compare with the paper's einsums, with separate numbers of heads for logits, softmaxes and values."""
    logit_heads, softmaxes, value_heads = heads
    overrides = [f"model.heads={softmaxes}", f"attn.logit_heads={logit_heads}", f"attn.value_heads={value_heads}"]
    config = compose(["attn=talking_heads", "model.dim=24", "attn.token_shift=false", *overrides]).attn
    ours = instantiate(config)().double()
    ours.impl = impl
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    q, k = (linear(x).view(2, 11, logit_heads, -1) for linear in (ours.Q, ours.K))
    v = ours.V(x).view(2, 11, value_heads, -1)
    J = torch.einsum("bnhk,bmhk->bhnm", q, k) / q.shape[-1] ** 0.5
    L = torch.einsum("bhnm,gh->bgnm", J, ours.mix_logits)
    P = L.masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf).softmax(-1)
    U = torch.einsum("bgnm,vg->bvnm", P, ours.mix_weights)
    expected = ours.out(torch.einsum("bvnm,bmvd->bnvd", U, v).reshape(2, 11, 24))
    torch.testing.assert_close(ours(x)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_equals_eager(variant):
    """Use the backend aot_eager, because not every machine has the compiler that Inductor needs."""
    model = small(f"attn={variant}")
    ids = torch.randint(40, (2, 21))
    torch._dynamo.reset()
    compiled = torch.compile(model.loss, backend="aot_eager")
    expected = torch.autograd.grad(model.loss(ids[:, :-1], ids[:, 1:]), model.embed.weight)
    found = torch.autograd.grad(compiled(ids[:, :-1], ids[:, 1:]), model.embed.weight)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_the_large_model_has_its_parameters_and_learns():
    """experiment=large is article A's model of 24 layers. Two steps are taken at dim 32."""
    with torch.device("meta"):
        large = build_model(compose(["experiment=large"]), 5744)
    # Attention has 4 C^2 in each layer and the feed-forward 9 C^2. Embedding and head come on top.
    assert parameter_count(large) == pytest.approx(24 * 13 * 1024**2 + 2 * 5744 * 1024, rel=0.01)
    cfg = compose(["experiment=large", "model.dim=32"])
    model, ids = build_model(cfg, 40), torch.randint(40, (1, 513))
    optimizer = optimizer_of(model, cfg.optim)
    losses = [
        update(model.loss, optimizer, ids[:, :-1], ids[:, 1:], torch.device("cpu"), "float32")[0] for _ in range(2)
    ]
    assert losses[1] < losses[0]


def test_rotary_and_init_std_may_be_0():
    assert build_model(compose([*TINY, "attn=mha_plus", "attn.rotary=0", "model.init_std=0"]), 9).head.weight.sum() == 0


@pytest.mark.parametrize("kind", [MLP, GLU])
def test_an_unknown_activation_is_refused(kind):
    with pytest.raises(ValueError, match="activation must be one of identity, sigmoid, relu, gelu, silu: got x"):
        kind(8, "x", None)
