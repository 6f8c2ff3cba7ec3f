"""Compare the models of claim author_code with the source author's public code, whose equations are repeated here.

The code is RWKV-LM, commit 447eae5 of August 2021. Its time_w is f in reverse, so that distance 0 comes last. Its
time_alpha is our beta, the factor of the position that sends, and its time_beta our alpha, that of the position that
receives. It has no gMLP, so that the claim's row gMLP is not compared: the tests only stream and train it.
"""

import math
import shlex

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.cli import compose
from models.build import build_model
from scripts.reporting.claims import all_claims
from tests.conftest import TINY
from train import train
from training.optimizer import optimizer_of
from training.record import Record

pytestmark = pytest.mark.slow

HEADS, SIZE, CONTEXT, T = 3, 8, 16, 13
ROWS = all_claims()["author_code"].rows
Weights = dict[str, Tensor]


def model_of(row: str) -> torch.nn.Module:
    """Return a small model of a row of the claim, in float64 and with random weights."""
    torch.manual_seed(5)
    model = build_model(compose([*shlex.split(ROWS[row]), *TINY]), 40).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    return model


def their_weights(model: torch.nn.Module) -> Weights:
    """Return the block's weights, with f, alpha and beta as the author's code stores them; all require gradients."""
    ours = dict(model.blocks[0].named_parameters())
    theirs = {name: p.detach() for name, p in ours.items()}
    theirs["time_w"] = theirs.pop("attn.position_weight.f").flip(-1)
    theirs["time_alpha"] = theirs.pop("attn.position_weight.beta")[:, None, :]
    theirs["time_beta"] = theirs.pop("attn.position_weight.alpha")[:, :, None]
    return {name: p.clone().requires_grad_() for name, p in theirs.items()}


def our_gradients(theirs: Weights) -> Weights:
    """Return the gradients of the author's weights under our names; zeros for a weight without a gradient."""
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in theirs.items()}
    found["attn.position_weight.f"] = found.pop("time_w").flip(-1)
    found["attn.position_weight.beta"] = found.pop("time_alpha")[:, 0, :]
    found["attn.position_weight.alpha"] = found.pop("time_beta")[:, :, 0]
    return found


def linear(p: Weights, name: str, x: Tensor) -> Tensor:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def shifted(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:, : x.shape[-1] // 2] = x[:, :-1, : x.shape[-1] // 2]
    y[:, 0, : x.shape[-1] // 2] = 0
    return y


def w_of(p: Weights) -> Tensor:
    rows = [
        [p["time_w"][:, CONTEXT - 1 - (t - u)] if u <= t else torch.zeros(HEADS).double() for u in range(T)]
        for t in range(T)
    ]
    w = torch.stack([torch.stack(row, -1) for row in rows], 1)  # [H, T, T]
    return w * p["time_alpha"][:, :, :T] * p["time_beta"][:, :T, :]


def heads_of(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2)


def half_rotated(x: Tensor) -> Tensor:
    """Rotate the first 4 of the 8 dimensions of each head, as two complex numbers, by angles that grow with t."""
    z = torch.complex(x[..., :2], x[..., 2:4])
    angle = torch.outer(torch.arange(T).double(), torch.tensor([1.0, 0.01], dtype=torch.float64))
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag, x[..., 4:]], -1)


def mha_plus(p: Weights, x: Tensor) -> Tensor:
    x = shifted(x)
    q, k, v = (heads_of(linear(p, f"attn.{name}", x)) for name in "QKV")
    scores = half_rotated(q) @ half_rotated(k).transpose(-2, -1) / math.sqrt(SIZE)
    att = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1) * w_of(p)
    att = torch.einsum("hg,bgtu->bhtu", p["attn.mix_weights"], att)
    y = (att @ v).transpose(1, 2).reshape(x.shape)
    return linear(p, "attn.out", y) * p["attn.gamma"][:T, None]


def aft(p: Weights, x: Tensor) -> Tensor:
    x = shifted(x)
    r, k, v = (linear(p, f"attn.{name}", x) for name in "RKV")
    kv = torch.einsum("htu,bhuc->bhtc", w_of(p), heads_of(k.exp() * v)).transpose(1, 2).reshape(x.shape)
    y = r.sigmoid() * kv / k.exp().cumsum(1)
    return linear(p, "attn.out", y) * p["attn.gamma"][:T, None]


def feed_forward(p: Weights, x: Tensor) -> Tensor:
    x = shifted(x)
    r, k, v = (linear(p, f"ffn.{name}", x) for name in "RGL")
    return r.sigmoid() * linear(p, "ffn.O", F.gelu(k) * v)


def block(mixer, p: Weights, x: Tensor) -> Tensor:
    for layer, path in ((mixer, "attn_path"), (feed_forward, "ffn_path")):
        x = x + layer(p, F.layer_norm(x, x.shape[-1:], p[f"{path}.norm.weight"], p[f"{path}.norm.bias"]))
    return x


@pytest.mark.parametrize(("row", "mixer"), [("MHA+", mha_plus), ("AFT", aft)])
def test_a_block_equals_that_of_the_author_s_code(row, mixer):
    """Compare the outputs and every gradient."""
    model = model_of(row)
    theirs = their_weights(model)
    x, probe = torch.randn(2, 2, T, HEADS * SIZE, dtype=torch.float64)
    y, expected = model.blocks[0](x)[0], block(mixer, theirs, x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    (y * probe).sum().backward()
    (expected * probe).sum().backward()
    for name, gradient in our_gradients(theirs).items():
        ours = model.blocks[0].get_parameter(name).grad
        ours = torch.zeros_like(gradient) if ours is None else ours  # AFT's bias of K has none, because it cancels
        torch.testing.assert_close(ours, gradient, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_streams(row):
    model, ids = model_of(row), torch.randint(40, (2, T))
    with torch.no_grad():
        state = model.begin(2)
        steps = [model.step(ids[:, t], state) for t in range(T)]
        torch.testing.assert_close(torch.stack(steps, 1), model(ids))


def test_the_initial_head_mix_is_below_one_over_the_root_of_the_heads():
    model = build_model(compose([*shlex.split(ROWS["MHA+"]), *TINY, "model.heads=8", "model.dim=32"]), 40)
    mix = model.blocks[0].attn.mix_weights.abs()
    assert 0.8 * 8**-0.5 < mix.max() < 8**-0.5


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_trained_with_the_author_s_optimiser(row, tiny):
    cfg = compose([*shlex.split(ROWS[row]), *tiny])
    optimizer = optimizer_of(build_model(cfg, 40), cfg.optim)
    assert type(optimizer) is torch.optim.AdamW
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.99)}
    assert cfg.optim.clip == 1.0
    assert cfg.optim.lr == (6e-4 if row == "AFT" else 4e-4)
    summary = train(cfg)
    rows = Record.of(cfg).rows()
    assert summary["status"] == "finished"
    assert rows[-1]["fit_loss"] < rows[0]["loss"]
