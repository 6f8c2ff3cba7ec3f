"""Compare counted FLOPs, operations and bytes of state with formulas."""

from types import SimpleNamespace

import pytest
import torch

import attn.kernels.recurrence  # noqa: F401 defines torch.ops.rwv_lab
from configs.cli import compose
from models.build import build_model
from models.costs import OperationCounter, forward_operations, memory, state_bytes, training_flops
from tests.conftest import TINY
from training.summary import counted_costs

T, DIM = 16, 24


@pytest.mark.parametrize("variant", ["mha", "aft", "talking_heads"])
def test_flops_are_those_of_linear_layers_and_pairs_of_positions(variant):
    """Each product of the forward pass has two in the backward pass, one for the gradient of each factor."""
    model = build_model(compose([f"attn={variant}", *TINY]), 50)
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    pairs = 2 * 2 * T * T * DIM
    if variant == "talking_heads":  # the logits and the weights are mixed
        pairs += 2 * 2 * T * T * 3 * 3
    assert training_flops(model, T) == 3 * (2 * T * weights + pairs)


def test_products_that_add_in_place_are_counted():
    y, a, b = torch.ones(2, 3, 7), torch.ones(2, 3, 5), torch.ones(2, 5, 7)
    with OperationCounter() as counter:
        y.baddbmm_(a, b)
    assert counter.count == 2 * 2 * 3 * 5 * 7
    model = SimpleNamespace(loss=lambda *_: y.clone().requires_grad_().sum() + 0 * y.baddbmm_(a, b).sum())
    assert training_flops(model, T) == 2 * 2 * 3 * 5 * 7


@pytest.mark.parametrize("delta_rule", [False, True])
def test_the_products_of_the_recurrences_are_counted(delta_rule):
    """The first of the four chunks begins with a state of 0, so that it has no products with it."""
    N, heads, G, K, D = 4, 6, 5, 3, 7
    shapes = {"M": (1, 1), "U": (G, K), "b": (G, K), "z": (G, D), "U_a": (G, K), "k": (G, K), "v": (G, D)}
    inputs = {name: torch.ones(N, heads, *shape, requires_grad=True) for name, shape in shapes.items()}
    if not delta_rule:
        inputs |= dict.fromkeys(("U_a", "k", "v"))
    flops = 2 * (4 if delta_rule else 2) * (N - 1) * heads * G * K * D
    with OperationCounter() as counter, torch.no_grad():
        torch.ops.rwv_lab.scan(*inputs.values())
    assert counter.count == flops
    model = SimpleNamespace(loss=lambda *_: sum(out.sum() for out in torch.ops.rwv_lab.scan(*inputs.values())[:2]))
    assert training_flops(model, T) == 3 * flops


def test_operations_of_products_ffts_and_other_functions():
    a, b, z = torch.ones(3, 5), torch.ones(5, 7), torch.ones(2, 8, dtype=torch.complex64)
    for compute, operations in (
        (lambda: a @ b, 2 * 3 * 5 * 7),
        (lambda: a.exp(), 15),
        (lambda: a.sum(0), 5),
        (lambda: a.mT[1:].reshape(12).expand(2, 12), 12),  # counted for the copy that reshape makes
        (lambda: torch.fft.fft(z), 5 * 16 * 3),
    ):
        with OperationCounter() as counter:
            compute()
        assert counter.count == operations
    assert forward_operations(torch.nn.Linear(5, 7), a) == 2 * 3 * 5 * 7


def test_a_run_s_costs_are_those_of_a_batch_without_recomputation():
    cfg = compose(["attn=mha", *TINY])
    costs, model = counted_costs(cfg, 50), build_model(cfg, 50)
    assert costs == {"flops_per_step": 2 * training_flops(model, T), "state_bytes": state_bytes(model, T)}
    assert counted_costs(compose(["attn=mha", *TINY, "model.activation_checkpointing=true"]), 50) == costs
    assert counted_costs(compose(["attn=mha", *TINY, "train.batch=6"]), 50)["flops_per_step"] == 6 * training_flops(
        model, T
    )


@pytest.mark.parametrize("attn", ["aft", "realformer", "realformer_qk", "mha_tw"])
def test_costs_of_many_layers_are_those_of_the_whole_model(attn):
    cfg = compose([f"attn={attn}", *TINY, "model.layers=4"])
    model = build_model(cfg, 50)
    costs = {"flops_per_step": 2 * training_flops(model, T), "state_bytes": state_bytes(model, T)}
    assert counted_costs(cfg, 50) == costs


def test_counting_draws_no_random_numbers():
    cfg = compose(["attn=aft", *TINY])
    before = torch.get_rng_state()
    counted_costs(cfg, 50)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_state_of_attention_grows_and_that_of_a_running_mean_does_not():
    shifted = DIM * 4  # all bytes of the last input, because the token shift keeps a view into it
    for length in (16, 32):
        attention, mean = (
            build_model(compose([f"attn={attn}", *TINY, f"model.context={length}"]), 50)
            for attn in ("mha", "aft_simple")
        )
        assert state_bytes(attention, length) == 2 * length * DIM * 4 + shifted
        # In float32, a buffer for two rows of K and one for two rows of V. In float64, the row into which earlier
        # positions are merged: the log of the sum of their weights, and their weighted mean.
        assert state_bytes(mean, length) == 2 * 2 * DIM * 4 + 2 * DIM * 8 + shifted


def test_memory_is_counted_once_and_without_weights():
    x = torch.zeros(10)
    other = {"double": torch.zeros(2, dtype=torch.double), "none": None}
    assert sum(memory([x, x[:5], (other, "text"), torch.nn.Linear(9, 9)]).values()) == 10 * 4 + 2 * 8
