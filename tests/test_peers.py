"""Test variants against PyTorch, x-transformers, fla-core, aft-pytorch, g-mlp-pytorch and FLASH-pytorch.

A part that only the peer has (residuals, norms, position biases), or that only our code has (token shift, gamma, biases
of linear layers), is switched off or set to zero. The residual of FLASH is subtracted.
"""

import pytest
import torch
import torch.nn.functional as F
from aft_pytorch import AFTFull, AFTLocal, AFTSimple
from fla.ops.forgetting_attn.naive import naive_forgetting_attn
from fla.ops.linear_attn.naive import naive_chunk_linear_attn
from flash_pytorch import FLASH
from flash_pytorch.flash_pytorch import GAU
from g_mlp_pytorch.g_mlp_pytorch import SpatialGatingUnit
from hydra.utils import instantiate
from rotary_embedding_torch import RotaryEmbedding as PairwiseRotary
from torch import nn
from x_transformers.x_transformers import (
    AlibiPositionalBias,
    Attention,
    FeedForward,
    RotaryEmbedding,
    orthog_project,
)

from attn.parts import merge_heads, split_heads
from configs.cli import compose
from scripts.benchmarking import peers
from tests.conftest import mixer
from tests.helpers.variants import assert_same_with_gradients

pytestmark = pytest.mark.slow

T, DIM, HEADS = 13, 24, 3
both = pytest.mark.parametrize("impl", ["reference", "torch"])


def ours_and_x(*case: str, impl: str):
    """Return our mixer and a batch."""
    module = mixer(*case, "attn.token_shift=false")
    module.impl = impl
    torch.manual_seed(5)
    return module, torch.randn(2, T, DIM, dtype=torch.float64)


def copy(ours: nn.Linear, theirs: nn.Linear, rows=slice(None)) -> None:
    """Copy our weight and bias to their layer, in the order `rows`. If theirs has no bias, set ours to zero."""
    with torch.no_grad():
        if theirs.bias is None:
            ours.bias.zero_()
        else:
            theirs.bias.copy_(ours.bias[rows])
        theirs.weight.copy_(ours.weight[rows])


def pairwise(size: int, heads: int = 1) -> torch.Tensor:
    """Return the order that puts dimensions i and i + size/2 of each head side by side.

    Rotary embeddings rotate these two together in our code, and adjacent dimensions in the peers'.
    """
    head = torch.arange(size).view(2, size // 2).T.flatten()
    return torch.cat([head + h * size for h in range(heads)])


def assert_equals_x(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # the peer's softmax and frequencies are float32


def x_attention(ours, rows=slice(None), **options) -> Attention:
    key_size = ours.Q.out_features // ours.heads
    sizes = {"dim_head": key_size, "value_dim_head": DIM // ours.heads, "heads": ours.heads}
    theirs = Attention(DIM, **sizes, causal=True, **options)
    theirs = theirs.double()
    copy(ours.Q, theirs.to_q, rows)
    copy(ours.K, theirs.to_k, rows)
    copy(ours.V, theirs.to_v)
    copy(ours.out, theirs.to_out)
    return theirs


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@both
def test_time_weighting_is_a_bias_of_flex_attention(impl):
    ours, x = ours_and_x("mha_tw", "attn.gamma=false", impl=impl)
    theirs = peers.Attention(DIM, HEADS, peers.FlexAttention(HEADS, T, time_weighted=True, device="cpu")).double()
    theirs.out = ours.out
    f, _, beta = ours.position_weight.raw_factors(T)
    with torch.no_grad():
        for name in ("weight", "bias"):
            getattr(theirs.qkv, name).copy_(torch.cat([getattr(layer, name) for layer in (ours.Q, ours.K, ours.V)]))
        theirs.function.f.copy_(f)
        theirs.function.beta.copy_(beta)
        assert_equals_x(ours(x)[0], theirs(x))


@both
@pytest.mark.parametrize("talking", ["logits", "weights", "both"])
def test_talking_heads(talking, impl):
    ours, x = ours_and_x("talking_heads", f"attn.talking_heads={talking}", impl=impl)
    before, after = ours.mix_logits is not None, ours.mix_weights is not None
    theirs = x_attention(ours, pre_talking_heads=before, post_talking_heads=after)
    with torch.no_grad():
        if before:  # theirs adds the mix to the logits
            mix = ours.mix_logits - torch.eye(HEADS, dtype=torch.float64)
            theirs.attend.pre_softmax_talking_heads.weight.copy_(mix[:, :, None, None])
        if after:
            theirs.attend.post_softmax_talking_heads.weight.copy_(ours.mix_weights[:, :, None, None])
    assert_equals_x(ours(x)[0], theirs(x))


@both
@pytest.mark.parametrize("key_size", [2, 4, 12])
def test_key_size(key_size, impl):
    ours, x = ours_and_x("mha_key_size", f"attn.key_size={key_size}", impl=impl)
    theirs = x_attention(ours)
    assert_equals_x(ours(x)[0], theirs(x))


@both
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_rotary(share, impl):
    ours, x = ours_and_x("mha_rotary", f"attn.rotary={share}", impl=impl)
    rotary_dims = int(share * 8)
    rows = torch.cat([torch.cat([pairwise(rotary_dims), torch.arange(rotary_dims, 8)]) + 8 * h for h in range(HEADS)])
    positions = RotaryEmbedding(rotary_dims).double().forward_from_seq_len(T)
    theirs = x_attention(ours, rows)
    assert_equals_x(ours(x)[0], theirs(x, rotary_pos_emb=positions))


@both
def test_realformer(impl):
    first, x = ours_and_x("realformer", impl=impl)
    second, _ = ours_and_x("realformer", impl=impl)
    with torch.no_grad():
        for p in second.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    their_first, their_second = x_attention(first), x_attention(second)
    y, carry = first(x)
    z, _ = second(y, carry)
    their_y, inner = their_first(x, return_intermediates=True)
    assert_equals_x(y, their_y)
    assert_equals_x(z, their_second(y, prev_attn=inner.pre_softmax_attn))


@both
def test_alibi(impl, theirs_in_float64):
    """Use four heads, because the peer has other slopes if the number of heads is not a power of two."""
    ours, x = ours_and_x("alibi", "model.heads=4", impl=impl)
    theirs = x_attention(ours)(x.requires_grad_(), rel_pos=AlibiPositionalBias(4).double())
    assert_same_with_gradients(ours(x)[0], theirs, [x], 1e-9)


@both
def test_gated_mha(impl, theirs_in_float64):
    ours, x = ours_and_x("gated_mha", impl=impl)
    theirs = x_attention(ours, pairwise(4, HEADS), gate_values=True)
    copy(ours.R, theirs.to_v_gate)
    rotary = RotaryEmbedding(4).double().forward_from_seq_len(T)
    theirs = theirs(x.requires_grad_(), rotary_pos_emb=rotary)
    assert_same_with_gradients(ours(x)[0], theirs, [x], 1e-9)


@both
def test_xsa(impl):
    """Call the peer's function on each vector, because its layer treats all positions and heads as a single vector."""
    ours, x = ours_and_x("xsa", impl=impl)
    q, k, v = (split_heads(linear(x), HEADS) for linear in (ours.Q, ours.K, ours.V))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    z = orthog_project(y.flatten(0, -2), v.flatten(0, -2)).view_as(y)
    assert_same_with_gradients(ours(x)[0], ours.out(merge_heads(z)), list(ours.parameters()), 1e-9)


@both
def test_fox(impl, theirs_in_float64):
    ours, x = ours_and_x("fox", impl=impl)
    theirs = x_attention(ours, data_dependent_alibi=True)
    copy(ours.f, theirs.data_dependent_alibi.to_forget_gates[0])
    x.requires_grad_()
    assert_same_with_gradients(ours(x)[0], theirs(x), [x], 1e-9)
    q, k, v = (linear(x).unflatten(-1, (HEADS, -1)) for linear in (ours.Q, ours.K, ours.V))
    y = naive_forgetting_attn(q, k, v, F.logsigmoid(ours.f(x)))
    assert_same_with_gradients(ours(x)[0], ours.out(y.flatten(2)), list(ours.parameters()), 1e-9)


@both
def test_linear_attention(impl):
    ours, _ = ours_and_x("linear_attention", impl=impl)
    x = torch.randn(2, 128, DIM, dtype=torch.float64, requires_grad=True)  # the peer's chunks have 64 positions
    q, k, v = (linear(x).unflatten(-1, (HEADS, -1)) for linear in (ours.Q, ours.K, ours.V))
    y = naive_chunk_linear_attn(F.elu(q) + 1, F.elu(k) + 1, v, normalize=True)
    assert_same_with_gradients(ours(x)[0], ours.out(y.flatten(2)), [x, *ours.parameters()], 1e-9)


ACTIVATIONS = {"relu": nn.ReLU(), "gelu": nn.GELU(), "glu": nn.Sigmoid(), "bilinear": nn.Identity()}
ACTIVATIONS |= {"reglu": nn.ReLU(), "geglu": nn.GELU(), "swiglu": nn.SiLU()}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_feed_forwards(name):
    ours = instantiate(compose([f"ffn={name}", f"model.dim={DIM}", f"ffn.hidden={2 * DIM}"]).ffn)().double()
    gated = hasattr(ours, "G")
    theirs = FeedForward(DIM, mult=2, glu=gated, custom_activation=ACTIVATIONS[name]).double()
    with torch.no_grad():
        if gated:
            theirs.ff[0].proj.weight.copy_(torch.cat([ours.L.weight, ours.G.weight]))
            theirs.ff[0].proj.bias.copy_(torch.cat([ours.L.bias, ours.G.bias]))
        else:
            copy(ours.L, theirs.ff[0][0])
    copy(ours.O, theirs.ff[-1])
    x = torch.randn(2, T, DIM, dtype=torch.float64)
    torch.testing.assert_close(ours(x)[0], theirs(x))


def aft(kind, ours, **options):
    """Return a peer of hidden size DIM with our projections."""
    theirs = kind(T, DIM, DIM, **options).double()
    for mine, its in ((ours.R, "to_q"), (ours.K, "to_k"), (ours.V, "to_v"), (ours.out, "project")):
        copy(mine, getattr(theirs, its))
    return theirs


@both
def test_aft_full(impl):
    ours, x = ours_and_x("aft_full", impl=impl)
    theirs = aft(AFTFull, ours)
    with torch.no_grad():  # the peer is not causal by itself
        theirs.wbias.copy_(
            ours.position_weight.log_relative(T)[0].masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        )
    torch.testing.assert_close(ours(x)[0], theirs(x))


@both
def test_aft_simple(impl):
    ours, x = ours_and_x("aft_simple", impl=impl)
    theirs = aft(AFTSimple, ours)
    for t in range(T):  # the peer is not causal: every position gets the mean of all
        torch.testing.assert_close(ours(x)[0][:, t], theirs(x[:, : t + 1])[:, -1])


@both
def test_aft_local(impl):
    ours, x = ours_and_x("aft_local", "attn.position_weight.window=4", impl=impl)
    theirs = aft(AFTLocal, ours, s=4).float()  # the peer computes its bias in float32
    with torch.no_grad():
        theirs.wbias.copy_(ours.position_weight.log_relative(T)[0])
    expected = theirs(x.float())[:, -1]  # the peer is not causal; the last position has no future
    torch.testing.assert_close(ours(x)[0][:, -1].float(), expected, rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize("heads", [1, 3])
def test_spatial_gating_unit(heads, impl):
    ours, x = ours_and_x("gmlp_sgu", f"attn.heads={heads}", impl=impl)
    theirs = SpatialGatingUnit(2 * DIM, 131, causal=True, heads=heads).double()
    with torch.no_grad():
        theirs.weight.copy_(ours.w)
        theirs.bias.copy_(ours.b)
    theirs.norm.load_state_dict(ours.norm.state_dict())
    gate, value = nn.functional.gelu(ours.RV(x)).chunk(2, dim=-1)
    torch.testing.assert_close(ours(x)[0], ours.out(theirs(torch.cat([gate, value], -1))))


@both
def test_gmlp_and_its_time_weighting(impl):
    """g-mlp-pytorch's circulant matrix with position awareness is f[t-u] alpha[t] beta[u]."""
    ours, x = ours_and_x("gmlp", "attn.gamma=false", "attn.expansion=1", impl=impl)
    theirs = SpatialGatingUnit(2 * DIM, 131, causal=True, heads=HEADS, circulant_matrix=True).double()
    theirs.norm = nn.Identity()
    with torch.no_grad():
        theirs.weight.copy_(ours.position_weight.f.flip(-1))  # the peer's last entry is that of distance 0
        theirs.circulant_pos_x.copy_(ours.position_weight.alpha)
        theirs.circulant_pos_y.copy_(ours.position_weight.beta)
        theirs.bias.zero_()
    gate, value = nn.functional.gelu(ours.R(x)), nn.functional.gelu(ours.V(x))
    torch.testing.assert_close(ours(x)[0], ours.out(theirs(torch.cat([gate, value], -1))))


def copy_unit(ours, theirs, qk: nn.Linear, views, order: list[int], divisor: int) -> None:
    """Copy our weights to a peer's gated unit.

    The peer divides scores by `divisor` before relu^2. Ours divides them by sqrt(size) before relu^2, and by `divisor`
    after it.
    """
    size = ours.Z.out_features
    rows = pairwise(size) if ours.rotary_dims else slice(None)
    theirs.norm = nn.Identity()
    nn.init.zeros_(theirs.rel_pos_bias.relative_attention_bias.weight)
    copy(ours.Z, qk, rows)
    with torch.no_grad():
        views.gamma.copy_(ours.views.scale[order][:, rows])
        views.beta.copy_(ours.views.offset[order][:, rows])
        factor = (divisor / size) ** 0.5
        views.gamma[0].mul_(factor)
        views.beta[0].mul_(factor)
        theirs.to_hidden[0].weight.copy_(torch.cat([ours.V.weight, ours.R.weight]))
        theirs.to_hidden[0].bias.copy_(torch.cat([ours.V.bias, ours.R.bias]))


@both
def test_gau(impl):
    ours, x = ours_and_x("gau", f"model.context={T}", "attn.divisor=context", "attn.rotary=0.0", impl=impl)
    theirs = GAU(dim=DIM, query_key_dim=128, causal=True, add_residual=False).double()
    copy_unit(ours, theirs, theirs.to_qk[0], theirs.offsetscale, [0, 1], T)
    copy(ours.out, theirs.to_out[0])
    torch.testing.assert_close(ours(x)[0], theirs(x))


@both
@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("chunk", [1, 4, 13, 64])
def test_flash_mixed_chunk(chunk, share, impl):
    ours, x = ours_and_x("flash_mixed_chunk", f"attn.chunk_size={chunk}", f"attn.rotary={share}", impl=impl)
    positions = PairwiseRotary(dim=128) if share else None
    theirs = FLASH(dim=DIM, group_size=chunk, query_key_dim=128, causal=True, rotary_pos_emb=positions).double()
    copy_unit(ours, theirs, theirs.to_qk[0], theirs.qk_offset_scale, [0, 2, 1, 3], chunk)  # theirs: q, q', k, k'
    copy(ours.out, theirs.to_out)
    torch.testing.assert_close(ours(x)[0], theirs(x) - x, rtol=1e-6, atol=1e-6)
