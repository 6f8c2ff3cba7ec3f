"""AdaBelief, ours and the package's, and the learning rate."""

import copy

import pytest
import torch

from configs.cli import compose
from models.build import build_model
from tests.conftest import TINY
from training.optimizer import learning_rate, optimizer_of

every_impl = pytest.mark.parametrize("impl", ["fused", "package"])


def optim(*overrides: str):
    return compose(["rates=none", *(f"optim.{override}" for override in overrides)]).optim


@pytest.mark.parametrize("impl", ["fused", "package", "adamw"])
def test_weight_decay_spares_biases_norms_and_position_weights(impl):
    model = build_model(compose(["attn=mha_plus", *TINY]), 50)
    optimizer = optimizer_of(model, optim(f"impl={impl}", "lr=0.1", "weight_decay=0.1"))
    decayed, spared = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
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


@every_impl
@pytest.mark.parametrize("size", [1.0, 1e-8])  # beside the smaller one eps is large
def test_adabelief_is_the_paper_s(impl, size, capsys):
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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rectify", ["false", "true"])
def test_fused_equals_the_package_over_1000_steps(rectify, compiled, monkeypatch):
    """The same gradients, of sizes from 1e-6 to 1e3, with a learning rate that decays."""
    if compiled:  # traced as for a compiler, which not every machine has
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


def test_fused_continues_from_its_state():
    torch.manual_seed(0)
    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    gradients = torch.randn(20, 4, 4)
    first = optimizer_of(one, optim())
    for step, gradient in enumerate(gradients):
        if step == 10:
            other.load_state_dict(one.state_dict())
            second = optimizer_of(other, optim())
            second.load_state_dict(copy.deepcopy(first.state_dict()))
        for model, optimizer in ((one, first), *([(other, second)] if step >= 10 else [])):
            model.weight.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(one.weight, other.weight)


def test_the_rate_goes_from_lr_to_min_lr():
    plain = optim()
    values = [learning_rate(step, 101, plain) for step in range(101)]
    assert values[0] == 1e-3
    assert values[50] == pytest.approx(5.5e-4)
    assert values[100] == pytest.approx(1e-4)
    assert values == sorted(values, reverse=True)


def test_the_rate_rises_in_a_warm_up():
    plain, risen = optim(), optim("warm_up=10")
    values = [learning_rate(step, 111, risen) for step in range(111)]
    assert values[:10] == pytest.approx([1e-4 * step for step in range(1, 11)])
    assert values[10:] == pytest.approx([learning_rate(step, 101, plain) for step in range(101)])
