"""Compare every attention on a GPU with the oracle, and compiled training in bf16 with float32.

Some algorithms are used only on a GPU, such as the one that computes all chunks of FLASH in parallel. The tests of
Triton's kernels are in test_kernels.py, and those of whole runs in test_train.py.
"""

import pytest
import torch

from configs.cli import compose
from models.build import build_model
from tests.conftest import mixer
from tests.helpers.variants import assert_equals_oracle, every_variant_and_chunks, loss_and_gradient

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@every_variant_and_chunks
def test_attentions_on_a_gpu_equal_the_oracle(case):
    module, x = mixer(*case).cuda(), torch.randn(2, 131, 24, dtype=torch.float64).cuda()
    assert_equals_oracle(module, x, rtol=1e-8, atol=1e-9)


@every_variant_and_chunks
def test_attentions_on_a_gpu_are_causal(case):
    """New inputs from position 70 on, 30 times as large, change no earlier output."""
    module, x = mixer(*case, dtype=torch.float32).cuda(), torch.randn(2, 131, 24).cuda()
    changed = x.clone()
    changed[:, 70:] = 30 * torch.randn(2, 61, 24)
    with torch.no_grad():
        torch.testing.assert_close(module(changed)[0][:, :70], module(x)[0][:, :70], rtol=1e-4, atol=1e-4)


# One attention for each algorithm of which torch.compile compiles at least a part, and for each kernel in Triton.
COMPILED = [
    "aft", "aft_conv", "aft attn.impl=triton", "gmlp", "mha_plus", "mha_tw attn.impl=triton", "rwkv4", "rwkv7", "gla",
    "mamba2", "gated_deltanet", "flash_mixed_chunk", "fox",
]  # fmt: skip


@pytest.mark.parametrize("variant", COMPILED)
def test_compiled_bf16_stays_near_float32_on_a_gpu(variant):
    """Compare the loss and gradient of the source's model."""
    torch.manual_seed(0)
    model = build_model(compose(["experiment=source", *f"attn={variant}".split()]), 5744).cuda()
    ids = torch.randint(5744, (8, 129)).cuda()
    torch.compiler.reset()
    found, gradient = loss_and_gradient(torch.compile(model.loss), model, ids, "bf16")
    expected, exact = loss_and_gradient(model.loss, model, ids, "float32")
    assert found == pytest.approx(expected, abs=2e-3)
    assert torch.cosine_similarity(gradient, exact, dim=0) > 0.999
