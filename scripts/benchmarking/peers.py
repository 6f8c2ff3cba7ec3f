"""Public implementations of single layers, and a plain one that stores its scores, for comparison with ours.

Those outside torch need requirements-dev.txt.

Each is like one of our attentions (`COUNTERPARTS` of benchmark_pages.py), apart from biases, norms and residual sums.
They also differ in details: our gMLP and MHATW have a factor gamma[t]; FLASH-pytorch's layers have a relative position
bias and no rotary embeddings, and divide the scores before relu², in its GAU by the length of the input and in its
FLASH by the size of a group; the position weights of aft-pytorch's "full" AFT are a free matrix, and its "simple" AFT
is not causal. FlexAttention needs a GPU, because it has no backward pass on a CPU. fla_peers.py adds those of fla-core.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head attention with projections. `function` maps q, k and v [B, H, T, D] to the output [B, H, T, D].

    If `gates` is not 0, `function` also gets the output of another linear layer, [B, H, T, gates].
    """

    def __init__(self, dim: int, heads: int, function: Callable[..., Tensor], gates: int = 0):
        super().__init__()
        self.heads, self.qkv, self.out, self.function = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), function
        self.gates = nn.Linear(dim, heads * gates) if gates else None

    def forward(self, x: Tensor) -> Tensor:
        parts = [*self.qkv(x).chunk(3, dim=-1), *([] if self.gates is None else [self.gates(x)])]
        y = self.function(*(part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts))
        return self.out(y.transpose(1, 2).flatten(2))


def scores_stored(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal softmax attention, softmax(q k^T / sqrt(D)) v, with all scores in memory."""
    S = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)
    future = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).triu(1)
    return S.masked_fill(future, -torch.inf).softmax(-1) @ v


class FlexAttention(nn.Module):
    """Causal softmax attention by torch's FlexAttention.

    The scores are q . k / sqrt(D) or, with time_weighted, q . k / sqrt(D) + f[t-u] + beta[u].
    """

    def __init__(self, heads: int, T: int, time_weighted: bool, device: str = "cuda"):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # a slow import

        super().__init__()
        self.f, self.beta = (nn.Parameter(torch.zeros(heads, T)) for _ in range(2)) if time_weighted else (None, None)
        self.past = create_block_mask(lambda _batch, _head, t, u: t >= u, None, None, T, T, device=device)
        self.attend = torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v, score_mod=None if self.f is None else self.weight, block_mask=self.past)

    def weight(self, score: Tensor, _batch: Tensor, h: Tensor, t: Tensor, u: Tensor) -> Tensor:
        return score + self.f[h, (t - u).clamp(min=0)] + self.beta[h, u]


def peers(dim: int, heads: int, T: int) -> dict[str, Callable[[], nn.Module]]:
    """Return {name: constructor} of the layers beside which ours are timed; without a GPU, FlexAttention is left out.

    If one of the packages outside torch is not installed, all of them are left out, and a line is printed.
    """
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
    installed: dict[str, Callable[[], nn.Module]] = {
        "torch SDPA": lambda: Attention(dim, heads, sdpa),
        "softmax, scores stored": lambda: Attention(dim, heads, scores_stored),
    }
    if torch.cuda.is_available():
        installed |= {
            "FlexAttention": lambda: Attention(dim, heads, FlexAttention(heads, T, time_weighted=False)),
            "FlexAttention, time-weighted": lambda: Attention(dim, heads, FlexAttention(heads, T, time_weighted=True)),
        }
    try:
        from aft_pytorch import AFTFull, AFTSimple
        from flash_pytorch import FLASH
        from flash_pytorch.flash_pytorch import GAU
        from g_mlp_pytorch.g_mlp_pytorch import gMLPBlock
        from x_transformers import x_transformers

        from scripts.benchmarking.fla_peers import fla_layers
    except ImportError as error:
        print(
            f"{error.name} is not installed: to measure all public implementations, pip install -r requirements-dev.txt"
        )
        return installed

    attention = {"dim": dim, "dim_head": dim // heads, "heads": heads, "causal": True}
    talking = {"pre_talking_heads": True, "post_talking_heads": True}
    block = {"dim": dim, "dim_ff": 4 * dim, "seq_len": T, "heads": heads, "causal": True, "circulant_matrix": True}
    unit = {"dim": dim, "query_key_dim": 128, "causal": True}

    def aft_full() -> nn.Module:
        layer = AFTFull(T, dim, dim)
        with torch.no_grad():  # mask the future
            layer.wbias.masked_fill_(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        return layer

    return installed | {
        "x-transformers": lambda: x_transformers.Attention(**attention, flash=True),
        "x-transformers, talking heads": lambda: x_transformers.Attention(**attention, **talking),
        "aft-pytorch, full": aft_full,
        "aft-pytorch, simple (not causal)": lambda: AFTSimple(T, dim, dim),
        "g-mlp-pytorch": lambda: gMLPBlock(**block, act=nn.Identity()),
        "FLASH-pytorch, GAU": lambda: GAU(**unit),
        "FLASH-pytorch, FLASH": lambda: FLASH(**unit, group_size=64),
        **fla_layers(partial(Attention, dim, heads), dim // heads),
    }
