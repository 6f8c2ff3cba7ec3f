"""The map in attn/README.md: every attention in the unified form, what its W depends on, and how its costs grow.

The columns R, W, V and "after the sum" come from comments at the top of an attention's yaml, to which the last
column links. The others are measured.
With random parameters, W is computed from `terms` before and after the input at one position is changed, and a text is
streamed to see whether the state grows. With initial parameters, a layer's operations are counted for two text lengths.
"""

from functools import cache

import torch
from torch import Tensor, nn

from configs.cli import compose
from models.build import instantiate_model
from models.costs import forward_operations, memory
from models.lm import LM
from scripts.reporting.markdown import table
from scripts.reporting.variants import header, variants

# The same experiment as in `equations` of variants.py, so that Hydra composes it only once with each attention.
EXPERIMENT = "experiment=source"
SMALL = ("model.dim=32", "model.heads=4", "model.context=256")
T = 80  # the length of the text, more than FLASH's chunk_size
LATE, EARLY = 6, 3  # the positions t and u of the examined weight W[t,u]
LENGTH = 1024  # operations are counted for texts of this length and of twice this length
FEW_HEADS, MANY_HEADS = 2, 8  # in the layers whose operations are counted; the source has 8
CHANGED = {"t": LATE, "u": EARLY, "between": 5, "before u": 1}  # by name, the position at which the input is changed


@cache
def unified_form() -> str:
    """Return the table of all attentions. It is cached, because measuring them takes seconds."""
    rows = []
    for variant in variants():
        head = header(variant)
        model = random_model(variant)
        attention = model.blocks[0].attn
        depends = dependences(attention)
        own = "in W" if "before u" in depends else "no"
        rows.append([
            f"`{variant}`",
            with_gamma(attention, head.get("R", "1")),
            head.get("W", ""),
            head.get("V", "linear"),
            "yes" if weights(attention, inputs(attention))[1] else own,
            head.get("after", ""),
            ", ".join(positions(attention)),
            ", ".join(depends),
            state(variant),
            by_heads(growth(variant, FEW_HEADS), growth(variant, MANY_HEADS)),
            code(variant),
        ])  # fmt: skip
    heads = ["`attn=`", "gamma R", "W[t,u]", "V", "denominator", "after the sum"]
    heads += [
        "W depends on the positions",
        "W depends on the input at",
        "state of a stream, bytes",
        "operations for T characters",
        "code and settings",
    ]
    return table(rows, heads, left=range(len(heads))) + "\n"


def code(variant: str) -> str:
    """Return links from attn/ to the file with an attention's class and to its yaml."""
    file = f"{compose([f'attn={variant}', EXPERIMENT]).attn._target_.split('.')[-2]}.py"
    return f"[{file}]({file}), [yaml](../configs/attn/{variant}.yaml)"


def with_gamma(attention: nn.Module, R: str) -> str:
    """Return R, and before it gamma if the attention has one."""
    if attention.terms(inputs(attention)).gamma is None:
        return R
    return "gamma" if R == "1" else f"gamma {R}"


def state(variant: str) -> str:
    """Return the size of the state of a stream in bytes, for a float32 layer of the source's size.

    What the token shift keeps is not counted.
    """
    cfg = compose([f"attn={variant}", EXPERIMENT])
    half = cfg.model.context // 2
    once, twice = cache_sizes(instantiate_model(cfg, 16).eval().blocks[0].attn, half)
    return f"grows by {(twice - once) // half:,} per character" if state_grows(variant) else f"{twice:,}"


@cache
def state_grows(variant: str) -> bool:
    """Return whether the state of streaming grows with the text."""
    once, twice = cache_sizes(random_model(variant).blocks[0].attn, 100)
    return twice > once


@torch.no_grad()
def cache_sizes(attention: nn.Module, steps: int) -> tuple[int, int]:
    """Return the size of the cache of a stream in bytes after `steps` positions and after twice as many."""
    stream, sizes = attention.begin(1), []
    x = torch.zeros(1, 1, attention.dim, dtype=next(attention.parameters()).dtype)
    for _ in range(2):
        for _ in range(steps):
            attention.step(x, stream)
        sizes.append(sum(memory(stream.cache).values()))
    return sizes[0], sizes[1]


def random_model(variant: str) -> LM:
    """Return a small float64 model of a variant, without token shift. All parameters are random."""
    torch.manual_seed(0)
    cfg = compose([f"attn={variant}", EXPERIMENT, "attn.token_shift=false", *SMALL])
    model = instantiate_model(cfg, 16).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def inputs(attention: nn.Module) -> Tensor:
    """Return the inputs of 8 random texts.

    If W has a relu, W[t,u] is 0 in about half of the texts, and a weight that is 0 can hide what it depends on.
    """
    return torch.randn(8, T, attention.dim, dtype=torch.float64)


@torch.no_grad()
def weights(attention: nn.Module, x: Tensor) -> tuple[Tensor, bool]:
    """Return W [B, T, T, C] for x [B, T, dim], and whether there is a denominator."""
    terms = attention.terms(x)
    W = terms.factor if terms.exponent is None else terms.factor * terms.exponent.exp()
    return W.expand(len(x), T, T, terms.V.shape[-1]), terms.normalised


def dependences(attention: nn.Module) -> list[str]:
    """Return those keys of CHANGED for which a change of the input at their position changes W[t,u]."""
    x = inputs(attention)
    before = weights(attention, x)[0][:, LATE, EARLY]
    found = []
    for name, position in CHANGED.items():
        other = x.clone()
        other[:, position] += 1
        if not torch.allclose(weights(attention, other)[0][:, LATE, EARLY], before, rtol=1e-9, atol=0):
            found.append(name)
    return found


def positions(attention: nn.Module) -> list[str]:
    """Return which positions W[t,u] depends on if the input is the same at all positions.

    Return ["t", "u"], or ["t-u"] if W depends on the distance alone, or [] if W does not depend on positions.
    """
    x = inputs(attention)[:, :1].expand(-1, T, -1)
    W = weights(attention, x)[0]
    diagonal = W.diagonal(EARLY - LATE, 1, 2)  # W[t,u] at all positions with this distance, [B, C, T - distance]
    if not torch.allclose(diagonal, diagonal[..., :1], rtol=1e-9, atol=0):
        return ["t", "u"]
    return [] if torch.allclose(W[:, LATE, 1], W[:, LATE, EARLY], rtol=1e-9, atol=0) else ["t-u"]


def by_heads(few: str, many: str) -> str:
    """Return how the operations grow with FEW_HEADS and, if it differs, with MANY_HEADS."""
    return few if few == many else f"{few}; {many} with {MANY_HEADS} heads"


def growth(variant: str, heads: int) -> str:
    """Return how the number of operations grows with the length T of a text.

    A text of twice the length takes 2.00 to 2.02 times as many operations if they grow as T, and 3.5 to 4 times as
    many if they grow as T². The factor is below 4 if an algorithm skips pairs with u > t block by block, because it
    can skip a larger share of them in a longer text. A Toeplitz product grows as T log² T but takes only 2.09 to 2.10
    times as many operations: at these lengths it consists mostly of dense products of blocks of at most 512 positions,
    whose number grows as T.
    """
    torch.manual_seed(0)
    size = [f"model.dim={8 * heads}", f"model.heads={heads}", f"model.context={2 * LENGTH}"]
    attention = instantiate_model(compose([f"attn={variant}", EXPERIMENT, *size]), 16).eval().blocks[0].attn
    inputs = (torch.randn(1, length, 8 * heads) for length in (LENGTH, 2 * LENGTH))
    once, twice = (forward_operations(attention, x) for x in inputs)
    return "T" if twice < 2.05 * once else "T log² T" if twice < 3 * once else "T²"
