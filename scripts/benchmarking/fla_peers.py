"""Layers around the plain functions of fla-core, for comparison with ours.

fla-core's kernels need a GPU. The plain functions, which it calls naive and with which it tests its kernels, run
everywhere: linear attention, simple GLA, the delta rules and RWKV-7 in chunks, GLA position by position, and RetNet and
FoX with a matrix of all pairs of positions. The layers have only what these need: projections to q, k and v, one to the
decays and the like, and the output projection. Keys have as many dimensions as values; ours have fewer in RetNet, GLA,
Gated DeltaNet, Mamba-2 and RWKV-7.
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from fla.ops.delta_rule.naive import delta_rule_chunkwise
from fla.ops.forgetting_attn.naive import naive_forgetting_attn
from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule
from fla.ops.generalized_delta_rule.dplr.naive import dplr_chunkwise
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.linear_attn.naive import naive_chunk_linear_attn
from fla.ops.retention.naive import naive_retention
from fla.ops.simple_gla.naive import naive_chunk_simple_gla
from torch import Tensor, nn

CHUNK = 64  # positions; some of the functions need a multiple of it


def swapped(function: Callable, *tensors: Tensor) -> Tensor:
    """Call a function of tensors [B, T, H, ...] with tensors [B, H, T, ...], and return the first of its results."""
    y = function(*(x.transpose(1, 2) for x in tensors))
    return (y[0] if isinstance(y, tuple) else y).transpose(1, 2)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return swapped(partial(naive_chunk_linear_attn, normalize=True), F.elu(q) + 1, F.elu(k) + 1, v)


def simple_gla(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> Tensor:
    return swapped(naive_chunk_simple_gla, q, k, v, F.logsigmoid(z[..., 0]))


def gla(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> Tensor:
    return swapped(naive_recurrent_gla, q, k, v, F.logsigmoid(z) / 16)


def fox(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> Tensor:
    return swapped(naive_forgetting_attn, q, k, v, F.logsigmoid(z[..., 0]))


def deltanet(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> Tensor:
    return delta_rule_chunkwise(q, F.normalize(k, dim=-1), v, z[..., 0].sigmoid())[0]


def gated_deltanet(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> Tensor:
    decay, b = F.logsigmoid(z[..., 0]), z[..., 1].sigmoid()
    return swapped(naive_chunk_gated_delta_rule, q, F.normalize(k, dim=-1), v, decay, b)


def rwkv7(q: Tensor, k: Tensor, v: Tensor, z: Tensor) -> Tensor:
    decay, b = z.chunk(2, dim=-1)
    removed = F.normalize(k, dim=-1)
    return dplr_chunkwise(q, k, v, removed, -removed * b.sigmoid(), -0.6 * decay.sigmoid())[0]


def padded(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Call a function of tensors [B, H, T, ...] with zeros at their ends, so that T is a multiple of CHUNK."""
    T = tensors[0].shape[2]
    return function(*(F.pad(x, (0, 0, 0, -T % CHUNK)) for x in tensors))[:, :, :T]


def fla_layers(layer: Callable[..., nn.Module], size: int) -> dict[str, Callable[[], nn.Module]]:
    """Return {name: constructor}. `layer` is peers.Attention for a width and heads, whose q, k and v have `size`."""
    made = {
        "linear attention": (linear_attention, 0),
        "RetNet": (naive_retention, 0),
        "simple GLA": (simple_gla, 1),
        "GLA": (gla, size),
        "FoX": (fox, 1),
        "DeltaNet": (deltanet, 1),
        "Gated DeltaNet": (gated_deltanet, 2),
        "RWKV-7": (rwkv7, 2 * size),
    }
    return {
        f"fla-core, {name}": partial(layer, partial(padded, function), gates)
        for name, (function, gates) in made.items()
    }
