"""Test that second derivatives are right or refused. A fast backward pass often cannot be differentiated itself."""

import re

import pytest
import torch

from attn.kernels.chunks import chunk_by_chunk
from attn.kernels.products import float32_product
from attn.kernels.recurrence import Recurrence, recurrent_sum
from attn.kernels.toeplitz import toeplitz_product
from tests.conftest import mixer
from tests.helpers.variants import REFUSED, assert_refuses_a_second_derivative, every_variant_and_chunks


@every_variant_and_chunks
def test_a_second_derivative_is_right_or_refused(case):
    torch.manual_seed(3)
    module, x = mixer(*case), torch.randn(1, 37, 24, dtype=torch.float64, requires_grad=True)

    def second_derivative():
        (first,) = torch.autograd.grad(module(x)[0].sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    try:
        found = second_derivative()
    except RuntimeError as error:
        found = str(error)
    module.impl = "reference"
    expected = second_derivative()
    if isinstance(found, str):
        assert re.search(f"{REFUSED}|derivative for .* is not implemented", found)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7 * expected.abs().max().item())


def product_under_autocast(a, b):
    with torch.autocast("cpu", torch.bfloat16):
        return float32_product(a, b)


def recurrence(q, k, v):
    return recurrent_sum(Recurrence(q, k, v, g=torch.zeros(1, 1, q.shape[2], 1)))


@pytest.mark.parametrize(
    ("kernel", "shapes"),
    [
        (recurrence, [(1, 2, 37, 4)] * 3),
        (chunk_by_chunk, [(2, 3, 5, 5), (2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 6)]),
        (toeplitz_product, [(2, 600), (1, 600, 4)]),
        (product_under_autocast, [(3, 4), (4, 5)]),
    ],
)
def test_kernels_refuse_a_second_derivative(kernel, shapes):
    assert_refuses_a_second_derivative(kernel, shapes)
