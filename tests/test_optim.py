"""Test the optimisers (AdaBelief, AdamW and Muon) and the schedule of the learning rate."""

import copy
import importlib
import sys
import types

import pytest
import torch

from configs.cli import compose
from data.files import UserError
from data.sources import fetch
from models.build import build_model
from tests.conftest import ROOT, TINY
from training.optimizer import learning_rate, optimizer_of

every_impl = pytest.mark.parametrize("impl", ["fused", "package"])


def optim(*overrides: str):
    return compose(["rates=none", *(f"optim.{override}" for override in overrides)]).optim


@pytest.mark.parametrize("impl", ["fused", "package", "adamw", "muon"])
def test_weight_decay_spares_biases_norms_and_position_weights(impl):
    model = build_model(compose(["attn=mha_plus", *TINY]), 50)
    optimizer = optimizer_of(model, optim(f"impl={impl}", "lr=0.1", "weight_decay=0.1"))
    *decaying, kept = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    decayed, spared = set().union(*decaying), kept
    for name, p in model.named_parameters():
        is_weight = name.endswith(".weight") and "norm" not in name
        assert (id(p) in decayed) == is_weight, name
        assert (id(p) in spared) != is_weight, name
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (0.99 if id(p) in decayed else 1.0))


def test_adamw_is_pytorch_s_with_the_decay_of_each_group():
    optimizer = optimizer_of(torch.nn.LayerNorm(3), compose(["rates=none", "optim=adamw"]).optim)
    assert type(optimizer) is torch.optim.AdamW
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert optimizer.defaults["eps"] == 1e-8


def test_muon_is_pytorch_s_in_the_blocks_and_adamw_elsewhere():
    cfg = compose(["rates=none", "attn=mha_plus", "optim=muon", *TINY])
    ours, theirs = (build_model(cfg, 50) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    matrices = [
        n for n, p in ours.named_parameters() if n.startswith("blocks.") and n.endswith("weight") and p.ndim == 2
    ]
    inside = [p for n, p in theirs.named_parameters() if n in matrices]
    weights = [theirs.embed.weight, theirs.head.weight]
    rest = [p for n, p in theirs.named_parameters() if n not in (*matrices, "embed.weight", "head.weight")]
    assert len(matrices) == 7
    assert len(inside) + len(weights) + len(rest) == len(list(theirs.parameters()))
    expected = [
        torch.optim.Muon(inside, lr=1e-3, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01),
        torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0),
    ]
    optimizer = optimizer_of(ours, cfg.optim)
    for _ in range(3):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for each in (optimizer, *expected):
            each.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)


@every_impl
@pytest.mark.parametrize("size", [1.0, 1e-8])  # with the smaller size, eps matters
def test_adabelief_follows_the_paper(impl, size, capsys):
    model = torch.nn.Linear(3, 1, bias=False)
    w = model.weight.detach().double().clone()
    optimizer = optimizer_of(model, optim(f"impl={impl}", "lr=0.01", "betas=[0.9,0.99]"))
    m = s = torch.zeros(1, 3, dtype=torch.float64)
    for step in range(1, 20):
        gradient = size * torch.randn(1, 3)
        model.weight.grad = gradient.clone()
        optimizer.step()
        g = gradient.double()
        m = 0.9 * m + 0.1 * g
        s = 0.99 * s + 0.01 * (g - m) ** 2 + 1e-16
        w = w - 0.01 * (m / (1 - 0.9**step)) / ((s / (1 - 0.99**step)).sqrt() + 1e-16)
    torch.testing.assert_close(model.weight.detach().double(), w, rtol=1e-4, atol=1e-5)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rectify", ["false", "true"])
def test_fused_equals_the_package_over_1000_steps(rectify, compiled, monkeypatch):
    """Both get the same gradients, of sizes from 1e-6 to 1e3, and a learning rate that decays."""
    if compiled:  # not every machine has the compiler that Inductor needs
        monkeypatch.setattr(
            torch, "compile", lambda f, dynamic: torch._dynamo.optimize("aot_eager", dynamic=dynamic)(f)
        )
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    configs = [optim(f"impl={impl}", "weight_decay=0.01", f"rectify={rectify}") for impl in ("fused", "package")]
    optimizers = [optimizer_of(model, config, compiled) for model, config in zip(models, configs, strict=True)]
    for step in range(1000):
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            ours.grad = torch.randn_like(ours) * 10 ** torch.empty(()).uniform_(-6, 3)
            theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, 1000, configs[0])
            optimizer.step()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture
def timm_adabelief(monkeypatch):
    """Return the class AdaBelief from timm's wheel. timm is not installed, because it needs torchvision."""
    sha256 = "5bd50f7d0fe6d09bf9285ac2523234a1b7e6bf075c0be3e7aed09139fcb617c7"
    try:
        wheel = fetch("timm==1.0.31", sha256, "wheel", ROOT / "data/cache/downloads")
    except UserError as error:
        pytest.skip(str(error))
    package = types.ModuleType("timm_optim")
    package.__path__ = [f"{wheel}/timm/optim"]
    monkeypatch.setitem(sys.modules, "timm_optim", package)
    return importlib.import_module("timm_optim.adabelief").AdaBelief


@pytest.mark.parametrize("rectify", [False, True])
def test_fused_equals_timm_s(rectify, timm_adabelief):
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(5, 7).double(), torch.nn.Linear(5, 7).double()
    theirs.load_state_dict(ours.state_dict())
    first = optimizer_of(ours, optim("weight_decay=0.01", f"rectify={str(rectify).lower()}"))
    groups = [{"params": [theirs.weight], "weight_decay": 0.01}, {"params": [theirs.bias], "weight_decay": 0.0}]
    second = timm_adabelief(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-16, rectify=rectify)
    for _ in range(300):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn_like(p) * 10 ** torch.empty(()).uniform_(-6, 3)
            q.grad = p.grad.clone()
        first.step()
        second.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("impl", ["fused", "muon"])
def test_an_optimiser_continues_from_its_state(impl):
    torch.manual_seed(0)
    cfg = compose(["attn=mha", *TINY])
    one, other = build_model(cfg, 50), build_model(cfg, 50)
    settings = compose(["rates=none", "optim=muon"] if impl == "muon" else ["rates=none"]).optim
    gradients = [[torch.randn_like(p) for p in one.parameters()] for _ in range(6)]
    first = optimizer_of(one, settings)
    for step, gradient in enumerate(gradients):
        if step == 3:
            other.load_state_dict(one.state_dict())
            second = optimizer_of(other, settings)
            second.load_state_dict(copy.deepcopy(first.state_dict()))
        for model, optimizer in ((one, first), *([(other, second)] if step >= 3 else [])):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 / (1 + step)
            for p, g in zip(model.parameters(), gradient, strict=True):
                p.grad = g.clone()
            optimizer.step()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_rate_goes_from_lr_to_min_lr():
    plain = optim()
    values = [learning_rate(step, 101, plain) for step in range(101)]
    assert values[0] == 1e-3
    assert values[50] == pytest.approx(5.5e-4)
    assert values[100] == pytest.approx(1e-4)
    assert values == sorted(values, reverse=True)
    low = optim("lr=1e-5")
    assert [learning_rate(step, 101, low) for step in range(101)] == [1e-5] * 101


def test_the_rate_rises_in_a_warm_up():
    plain, risen = optim(), optim("warm_up=10")
    values = [learning_rate(step, 111, risen) for step in range(111)]
    assert values[:10] == pytest.approx([1e-4 * step for step in range(1, 11)])
    assert values[10:] == pytest.approx([learning_rate(step, 101, plain) for step in range(101)])
