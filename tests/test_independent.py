"""Compare attentions and kernels with independent implementations: PyTorch's own, and plain loops over numbers.

An attention's "oracle" is its slow form in float64, impl=reference.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import attn.kernels.toeplitz
from attn.kernels.causal import exp_weighted_mean, weighted_sum
from attn.kernels.chunks import all_at_once, chunk_by_chunk
from attn.kernels.toeplitz import fft_is_safe, toeplitz, toeplitz_product
from attn.mha import remove_component
from attn.parts import apply_rotary, merge_heads, split_heads, token_shift
from attn.position_weights import Toeplitz
from tests.conftest import mixer
from tests.helpers.variants import (
    K_CASES,
    assert_bf16_stays_near,
    assert_equals_oracle,
    assert_same_with_gradients,
    bytes_kept,
    mean_by_loops,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_mha_is_torch_s_multihead_attention(impl):
    ours = mixer("mha", "attn.token_shift=false")
    ours.impl = impl
    theirs = torch.nn.MultiheadAttention(24, 3, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.Q.weight, ours.K.weight, ours.V.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.Q.bias, ours.K.bias, ours.V.bias]))
        theirs.out_proj.load_state_dict(ours.out.state_dict())
    x = torch.randn(2, 63, 24, dtype=torch.float64)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(63, dtype=torch.float64)
    expected, _ = theirs(x, x, x, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(ours(x)[0], expected)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_mha_tw_is_sdpa_with_the_bias_log_w(impl):
    ours, x = ours_and_x("mha_tw", "attn.gamma=false", impl=impl)
    f, alpha, beta = (p.detach() for p in ours.position_weight.factors(30))
    w = np.zeros((3, 30, 30))
    for h in range(3):
        for t in range(30):
            for u in range(t + 1):
                w[h, t, u] = f[h, t - u] * alpha[h, t] * beta[h, u]
    with np.errstate(divide="ignore"):
        bias = torch.from_numpy(np.log(w))
    torch.testing.assert_close(ours(x)[0], ours.out(merge_heads(sdpa(ours, x, bias)[0])))


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("variant", ["mha_log_n", "gau_alpha"])
def test_log_n_is_sdpa_with_scaled_queries(variant, impl):
    """The queries are multiplied by log(t+1) / log(context). The context is 131 in these configs."""
    ours, x = ours_and_x(variant, "attn.rotary=0.0", impl=impl)
    if variant == "mha_log_n":
        q, k, v = (split_heads(linear(x), 3) for linear in (ours.Q, ours.K, ours.V))
    else:
        z = F.silu(ours.Z(x))[:, None]
        q, k = (z * scale + offset for scale, offset in zip(ours.views.scale, ours.views.offset, strict=True))
        v = F.silu(ours.V(x))[:, None]
    sharpness = torch.tensor([math.log(t + 1) / math.log(131) for t in range(30)], dtype=torch.float64)
    y = merge_heads(F.scaled_dot_product_attention(q * sharpness[:, None], k, v, is_causal=True))
    expected = ours.out(y if variant == "mha_log_n" else F.silu(ours.R(x)) * y)
    torch.testing.assert_close(ours(x)[0], expected)


def sdpa(ours, x, bias=None, rotary=False):
    """Return the output of torch's attention for the Q, K and V of `ours`, and V itself; both are [B, H, T, D]."""
    q, k, v = (split_heads(linear(x), ours.heads) for linear in (ours.Q, ours.K, ours.V))
    if rotary:
        q, k = (apply_rotary(y, y.shape[-1]) for y in (q, k))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None), v


def ours_and_x(*case: str, impl: str):
    """Return a mixer without token shift, and an input that requires gradients."""
    module = mixer(*case, "attn.token_shift=false")
    module.impl = impl
    return module, torch.randn(2, 30, 24, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_alibi_is_sdpa_with_a_bias(impl):
    """With four heads, float32 can hold the slopes exactly."""
    ours, x = ours_and_x("alibi", "model.heads=4", impl=impl)
    bias = torch.full((4, 30, 30), -torch.inf, dtype=torch.float64)
    for h in range(4):
        for t in range(30):
            for u in range(t + 1):
                bias[h, t, u] = -(2 ** (-8 * (h + 1) / 4)) * (t - u)
    expected = ours.out(merge_heads(sdpa(ours, x, bias)[0]))
    assert_same_with_gradients(ours(x)[0], expected, [x, *ours.parameters()], 1e-9)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_gated_mha_is_a_gate_on_sdpa(impl):
    ours, x = ours_and_x("gated_mha", impl=impl)
    y, _ = sdpa(ours, x, rotary=True)
    expected = ours.out(merge_heads(y) / (1 + (-ours.R(x)).exp()))
    assert_same_with_gradients(ours(x)[0], expected, [x, *ours.parameters()], 1e-9)


def test_gated_mha_has_as_many_parameters_as_mha():
    gated, plain = (sum(p.numel() for p in mixer(v).parameters()) for v in ("gated_mha", "mha"))
    assert gated == plain  # Q and K have half the size, which saves as many weights and biases as R has


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_xsa_subtracts_a_projection_onto_its_own_value(impl):
    """The projection is computed as the matrix V V^T / V^T V."""
    ours, x = ours_and_x("xsa", impl=impl)
    y, v = sdpa(ours, x)
    onto_v = v[..., :, None] * v[..., None, :] / (v * v).sum(-1)[..., None, None]
    expected = ours.out(merge_heads(y - (onto_v @ y[..., None])[..., 0]))
    assert_same_with_gradients(ours(x)[0], expected, [x, *ours.parameters()], 1e-9)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 1e6, 1e15])
def test_xsa_takes_values_of_any_length(size):
    """In float32 the result is orthogonal to V, or y itself if V is 0 or tiny."""
    y, v = torch.randn(2, 5, 8, requires_grad=True), (size * torch.randn(2, 5, 8)).requires_grad_()
    z = remove_component(y, v)
    gradients = torch.autograd.grad(z.square().sum(), (y, v))
    assert all(x.isfinite().all() for x in (z, *gradients))
    if size < 1e-20:
        torch.testing.assert_close(z, y)
    else:
        torch.testing.assert_close((z * v).sum(-1) / v.norm(dim=-1), torch.zeros(2, 5), rtol=0, atol=1e-5)
    module = mixer("xsa", dtype=torch.float32)
    with torch.no_grad():
        module.V.weight.mul_(size)
        module.V.bias.mul_(size)
        module.out.weight.div_(max(size, 1))  # so that the tolerances fit outputs from a large V
    assert_equals_oracle(module, torch.randn(2, 9, 24), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_aft_conv_by_loops(impl):
    """K has one number per head. W is w exp(K), and w is exp(k) in its window and 1 outside."""
    ours = mixer("aft_conv", "attn.token_shift=false", "attn.position_weight.window=4")
    ours.impl = impl
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    R, K, V = (linear(x)[0].detach().numpy() for linear in (ours.R, ours.K, ours.V))
    k = ours.position_weight.k.detach().numpy()
    y = np.zeros((9, 24))
    for t in range(9):
        for c in range(24):
            h = c // 8
            W = [math.exp(K[u, h] + (k[h, t - u] if t - u < 4 else 0)) for u in range(t + 1)]
            y[t, c] = sum(W[u] * V[u, c] for u in range(t + 1)) / sum(W) / (1 + math.exp(-R[t, c]))
    torch.testing.assert_close(ours(x)[0][0], ours.out(torch.from_numpy(y)))


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_gmlp_is_a_causal_convolution(impl):
    """Without alpha and beta, f is the kernel of a grouped convolution."""
    ours, x = ours_and_x("gmlp", "attn.position_weight.alpha_beta=false", "attn.gamma=false", impl=impl)
    V = F.gelu(ours.V(x)).transpose(1, 2)  # [B, 48, T]
    kernel = ours.position_weight.f[:, :30].flip(-1).repeat_interleave(16, 0)[:, None]
    summed = F.conv1d(F.pad(V, (29, 0)), kernel, groups=48).transpose(1, 2)
    torch.testing.assert_close(ours(x)[0], ours.out(F.gelu(ours.R(x)) * summed))


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_aft_is_a_ratio_of_causal_convolutions(impl):
    ours, x = ours_and_x("aft", "attn.position_weight.alpha_beta=false", "attn.gamma=false", impl=impl)
    K, V = ours.K(x).transpose(1, 2), ours.V(x).transpose(1, 2)
    kernel = ours.position_weight.f[:, :30].exp().flip(-1).repeat_interleave(8, 0)[:, None]
    top, bottom = (F.conv1d(F.pad(z, (29, 0)), kernel, groups=24) for z in (K.exp() * V, K.exp()))
    torch.testing.assert_close(ours(x)[0], ours.out(ours.R(x).sigmoid() * (top / bottom).transpose(1, 2)))


def test_mixed_heads_by_loops():
    """MHA+ with both head mixes, without token shift and rotary embeddings."""
    ours = mixer("mha_plus", "attn.token_shift=false", "attn.talking_heads=both", "attn.rotary=0.0")
    H, T, D = 3, 7, 8
    x = torch.randn(1, T, 24, dtype=torch.float64)
    Q, K, V = (linear(x)[0].detach().numpy() for linear in (ours.Q, ours.K, ours.V))
    f, alpha, beta = (p.detach().numpy() for p in ours.position_weight.factors(T))
    A, M = ours.mix_logits.detach().numpy(), ours.mix_weights.detach().numpy()
    y = np.zeros((T, 24))
    for t in range(T):
        P = np.zeros((H, t + 1))
        for h in range(H):
            for u in range(t + 1):
                S = [Q[t, g * D : g * D + D] @ K[u, g * D : g * D + D] / math.sqrt(D) for g in range(H)]
                P[h, u] = f[h, t - u] * alpha[h, t] * beta[h, u] * math.exp(sum(A[h, g] * S[g] for g in range(H)))
            P[h] /= P[h].sum()
        for c in range(24):
            h = c // D
            y[t, c] = sum(M[h, g] * P[g, u] * V[u, c] for g in range(H) for u in range(t + 1))
    y *= ours.gamma.detach().numpy()[:T, None]
    expected = ours.out(torch.from_numpy(y))
    for impl in ("reference", "torch"):
        ours.impl = impl
        torch.testing.assert_close(ours(x)[0][0], expected)


def test_rotary_is_a_complex_rotation():
    x = torch.randn(2, 3, 20, 10, dtype=torch.float64)
    y = apply_rotary(x, 6)
    z = torch.complex(x[..., :3], x[..., 3:6])
    for t in range(20):
        for i in range(3):
            rotated = z[:, :, t, i] * np.exp(1j * t * 10_000 ** (-2 * i / 6))
            torch.testing.assert_close(torch.complex(y[:, :, t, i], y[:, :, t, 3 + i]), rotated)
    assert torch.equal(y[..., 6:], x[..., 6:])


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = (torch.randn(8, dtype=torch.float64).expand(1, 1, 20, 8) for _ in range(2))
    scores = (apply_rotary(q, 8) @ apply_rotary(k, 8).transpose(-1, -2))[0, 0]
    for distance in range(20):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_toeplitz_by_loops():
    f = torch.randn(2, 5)
    expected = torch.zeros(2, 5, 5)
    for t in range(5):
        for u in range(t + 1):
            expected[:, t, u] = f[:, t - u]
    assert torch.equal(toeplitz(f), expected)


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("per_head", [True, False])
def test_time_weighting_starts_at_one(positive, per_head):
    w = Toeplitz(4, 16, per_head, alpha_beta=True, positive=positive, extrapolation="error", initial_f="ones")(9)
    assert torch.equal(w, torch.ones(9, 9).tril().expand(4, 9, 9))


@pytest.mark.parametrize("positive", [True, False])
def test_f_may_start_as_decays(positive):
    """With 3 heads and a context of 16, f decays at rates 16^(-1/2), 16^(-1) and 0. A single head does not decay."""
    w = Toeplitz(3, 16, True, alpha_beta=False, positive=positive, extrapolation="error", initial_f="decays")
    f = w.factors(16)[0]
    for h, speed in enumerate((1 / 4, 1 / 16, 0)):
        for d in range(16):
            assert f[h, d].item() == pytest.approx(math.exp(-d * speed))
    (one,) = Toeplitz(1, 16, True, alpha_beta=False, positive=positive, extrapolation="error", initial_f="decays")(4)
    assert torch.equal(one, torch.ones(4, 4).tril())


@pytest.mark.parametrize("channels", [1, 2, 5, 8])
def test_token_shift_takes_half_from_before(channels):
    x = torch.randn(2, 4, channels)
    y = token_shift(x)
    half = channels // 2
    assert torch.equal(y[:, 1:, :half], x[:, :-1, :half])
    assert (y[:, 0, :half] == 0).all()
    assert torch.equal(y[..., half:], x[..., half:])


# exp_weighted_mean against a loop in float64 that takes the maximum anew at every position


@pytest.mark.parametrize("name", K_CASES)
@pytest.mark.parametrize("T", [1, 2, 63])
@pytest.mark.parametrize("heads", [1, 3])
def test_exp_weighted_mean(name, T, heads):
    torch.manual_seed(5)
    w = 1 + torch.rand(heads, T, T)
    k, v = K_CASES[name](torch.randn(2, T, 6)), torch.randn(2, T, 6)
    results = []
    for mean, dtype in ((exp_weighted_mean, torch.float32), (mean_by_loops, torch.float64)):
        inputs = [x.to(dtype).requires_grad_() for x in (w, k, v)]
        w_of = partial(weighted_sum, inputs[0].tril()) if mean is exp_weighted_mean else inputs[0].tril()
        y = mean(w_of, *inputs[1:])
        results.append([y.detach(), *torch.autograd.grad(y.sum(), inputs)])
    for got, expected in zip(*results, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("future", [120.0, 1e4, 1e30])
@pytest.mark.parametrize("scale", [1, 100])
def test_a_large_future_key_changes_nothing_before_it(future, scale):
    torch.manual_seed(6)
    w = (1 + torch.rand(2, 31, 31)).tril()
    k, v = scale * torch.randn(3, 31, 8), torch.randn(3, 31, 8)
    before = exp_weighted_mean(partial(weighted_sum, w), k, v)
    k[:, 17] = future
    assert torch.equal(exp_weighted_mean(partial(weighted_sum, w), k, v)[:, :17], before[:, :17])
    inputs = [x.requires_grad_() for x in (w, k, v)]
    gradients = torch.autograd.grad(exp_weighted_mean(partial(weighted_sum, w), k, v)[:, :17].sum(), inputs)
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[1][:, 17:] == 0).all()
    assert (gradients[2][:, 17:] == 0).all()


def test_exp_weighted_mean_gradcheck_over_segments():
    torch.manual_seed(7)
    w = (1 + torch.rand(2, 6, 6, dtype=torch.float64)).requires_grad_()
    k = (70 * torch.randn(2, 6, 4, dtype=torch.float64)).requires_grad_()
    v = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w, k, v: exp_weighted_mean(partial(weighted_sum, w.tril()), k, v), (w, k, v))


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize(("high", "low"), [(40, -40), (34, -45), (70, 0), (95.9, 0), (300, 0)])
def test_exp_weighted_mean_where_w_falls_quickly_after_a_large_key(high, low, window):
    torch.manual_seed(8)
    T, slopes = 250, torch.tensor([0.5, 0.2])
    position = torch.arange(T)
    distance = (position[:, None] - position).clamp(min=0)
    k, v = low + torch.randn(2, T, 4), torch.randn(2, T, 4)
    k[:, 3] = high

    def results(dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (slopes, k, v)]
        log_w = (-inputs[0][:, None, None] * distance).masked_fill(distance >= (window or T), -torch.inf)
        w = log_w.exp().tril()
        if dtype == torch.float64:
            y = mean_by_loops(w, *inputs[1:])
        else:
            w_of = partial(weighted_sum, w)
            y = exp_weighted_mean(w_of, *inputs[1:], window=window, log_w=lambda end, start: log_w[:, start:end, :end])
        return [y.detach(), *torch.autograd.grad(y.sum(), inputs)]

    for got, expected in zip(results(torch.float32), results(torch.float64), strict=True):
        scale = expected.abs().max()  # the gradient at the large key is the difference of two sums of 250 terms
        torch.testing.assert_close(got.double() / scale, expected / scale, rtol=1e-3, atol=1e-3)


def test_weighted_sum_by_einsum():
    w, x = torch.randn(3, 9, 9, dtype=torch.float64).tril(), torch.randn(2, 9, 12, dtype=torch.float64)
    expected = torch.einsum("htu,buhd->bthd", w, x.unflatten(-1, (3, 4))).flatten(2)
    torch.testing.assert_close(weighted_sum(w, x), expected)


# Long sequences


@pytest.fixture
def short_blocks(monkeypatch):
    """Treat 64 or more positions as long. `toeplitz_product` then uses an FFT for halves of 32 or more positions."""
    monkeypatch.setattr(attn.kernels.toeplitz, "BLOCK", 16)
    monkeypatch.setattr(attn.kernels.toeplitz, "FFT", 32)


@pytest.mark.parametrize("fft", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("T", [32, 33, 64, 65, 100, 128, 257, 500])
def test_toeplitz_product(T, heads, fft, short_blocks, monkeypatch):
    if not fft:
        monkeypatch.setattr(attn.kernels.toeplitz, "FFT", 1000)
    f = torch.randn(heads, T, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, T, 6, dtype=torch.float64, requires_grad=True)
    expected = torch.einsum("htu,buhd->bthd", toeplitz(f), x.unflatten(-1, (heads, -1))).flatten(2)
    probe = torch.randn_like(expected)
    y = toeplitz_product(f, x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    gradients = (torch.autograd.grad((z * probe).sum(), (f, x)) for z in (y, expected))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("T", [1024, 1500, 2049])
def test_toeplitz_product_with_its_real_block_size(T):
    f = torch.randn(2, T, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, T, 4, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(1, T, 4, dtype=torch.float64)
    y, expected = toeplitz_product(f, x), weighted_sum(toeplitz(f), x)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    gradients = (torch.autograd.grad((z * probe).sum(), (f, x)) for z in (y, expected))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fft", [True, False])
def test_toeplitz_product_is_causal_to_the_bit(fft, short_blocks, monkeypatch):
    if not fft:
        monkeypatch.setattr(attn.kernels.toeplitz, "FFT", 1000)
    f, x = torch.randn(3, 300), torch.randn(2, 300, 6)
    before = toeplitz_product(f, x)
    for t in (1, 37, 150, 299):
        changed = x.clone()
        changed[:, t:] = 1e6 * torch.randn(2, 300 - t, 6)
        assert torch.equal(toeplitz_product(f, changed)[:, :t], before[:, :t])
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(toeplitz_product(f, leaf)[:, :t].sum(), leaf)
        assert gradient[:, :t].abs().sum() > 0
        assert (gradient[:, t:] == 0).all()


@pytest.mark.parametrize("variant", ["gmlp", "aft", "rwv"])
@pytest.mark.parametrize(
    "switches", [[], ["attn.position_weight.per_head=false"], ["attn.position_weight.alpha_beta=false"]]
)
def test_long_variants_equal_the_oracle(variant, switches, short_blocks):
    module = mixer(variant, *switches)
    assert_equals_oracle(module, torch.randn(2, 131, 24, dtype=torch.float64), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("size", [1.0, 20.0, 400.0])
def test_long_kernel_equals_the_oracle(size, short_blocks):
    """AFT-conv's w is Toeplitz too. With large k it is multiplied as a matrix: an FFT would lose its small values."""
    module = mixer("aft_conv", "attn.position_weight.window=5")
    with torch.no_grad():
        module.position_weight.k.copy_(size * torch.randn(3, 5))
    assert fft_is_safe(module.position_weight.log_f(131).exp()) == (size == 1)
    assert_equals_oracle(module, torch.randn(2, 131, 24, dtype=torch.float64), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("variant", ["gmlp", "aft", "aft_conv", "rwv"])
def test_long_bf16_autocast_stays_near(variant, short_blocks):
    assert_bf16_stays_near(mixer(variant, dtype=torch.float32), T=131)


@pytest.mark.parametrize("variant", ["gmlp", "aft"])
def test_long_variants_compile(variant, short_blocks):
    torch.compiler.reset()
    module, x = mixer(variant), torch.randn(2, 131, 24, dtype=torch.float64, requires_grad=True)
    found, expected = torch.compile(module, backend="aot_eager")(x)[0], module(x)[0]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)))


LINEAR = ["rwkv4", "linear_attention", "flash_mixed_chunk", "fox", "alibi", "gated_mha", "xsa"]


@pytest.mark.parametrize("variant", LINEAR)
def test_memory_is_linear(variant):
    module = mixer(variant)
    short, long = (bytes_kept(module, torch.randn(1, T, 24, dtype=torch.float64)) for T in (1024, 2048))
    assert 1.9 * short < long < 2.1 * short


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_chunk_by_chunk_equals_all_at_once(chunks):
    shapes = [(2, chunks, 4, 4), (2, chunks, 4, 3), (2, chunks, 4, 3), (2, chunks, 4, 6)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    y, expected = chunk_by_chunk(*inputs), all_at_once(*inputs)
    torch.testing.assert_close(y, expected)
    probe = torch.randn_like(y)
    gradients = (torch.autograd.grad((z * probe).sum(), inputs, materialize_grads=True) for z in (y, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("size", [1, 3, 50, 100])
@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
def test_long_aft_equals_the_oracle_with_spread_k_and_f(size, spread, short_blocks):
    """In float32, K and log f with a large spread give the values of the oracle. f decides whether an FFT is used."""
    module = mixer("aft", dtype=torch.float32)
    with torch.no_grad():
        module.K.weight.mul_(size)
        module.position_weight.f.copy_(spread * torch.randn(3, 131))
    x = torch.randn(2, 131, 24)
    y = module(x)[0]
    module.impl = "reference"
    torch.testing.assert_close(y.double(), module.double()(x.double())[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("f", [0.0, 100.0, -100.0, 3.0, -3.0])
@pytest.mark.parametrize("beta", [0.0, 100.0, -100.0, 3.0, -3.0])
def test_long_aft_equals_the_oracle_with_extreme_f_and_beta(f, beta, short_blocks):
    """Add a constant of 100 or -100, or a slope of 3 or -3 per position, to the logarithms of f and beta.

    In float32, exp(100) overflows, and exp(-100) underflows.
    """
    module = mixer("aft", dtype=torch.float32)
    position = torch.arange(131.0)
    with torch.no_grad():
        for logarithm, value in ((module.position_weight.f, f), (module.position_weight.beta, beta)):
            logarithm.add_(value if abs(value) > 10 else value * position)
    assert_equals_oracle(module, torch.randn(2, 131, 24), rtol=1e-3, atol=1e-3)


def test_fft_is_safe():
    flat = torch.ones(1, 4096)
    assert fft_is_safe(flat)
    assert not fft_is_safe(torch.cat([1e6 * flat, flat], -1))
    assert fft_is_safe(1e-30 * flat)
    assert not fft_is_safe(1e-30 * torch.cat([1e6 * flat, flat], -1))
    assert not fft_is_safe(torch.cat([flat, -flat], -1))
    assert not fft_is_safe(torch.cat([flat, 0 * flat], -1))
    assert fft_is_safe(flat, scale=torch.cat([1e3 * flat, flat], -1))
    assert not fft_is_safe(flat, scale=torch.cat([1e6 * flat, flat], -1))
    assert not fft_is_safe(flat, scale=torch.cat([flat, -flat], -1))
