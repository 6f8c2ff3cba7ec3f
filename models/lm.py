"""The language model: embedding, blocks, final norm, untied head; and its initialisation."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn

from models.block import PLACEMENTS, Block


class LM(nn.Module):
    """ids [B, T] -> logits [B, T, vocab]: embed, `layers` blocks, with pre-norm an LN, linear without bias.

    `attn` and `ffn` are called once per layer. No positional encoding is added anywhere: a
    variant brings its own. A submodule that needs another start than `initialise` gives it
    holds it in a bare nn.Parameter, which `initialise` leaves alone.
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        layers: int,
        placement: str,
        init_std: float,
        attn: Callable[[], nn.Module],
        ffn: Callable[[], nn.Module],
    ):
        super().__init__()
        if placement not in PLACEMENTS:
            raise ValueError(f"model.norm must be one of {', '.join(PLACEMENTS)}: got {placement}")
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, placement, attn, ffn) for _ in range(layers))
        self.norm = nn.LayerNorm(dim) if placement == "pre" else nn.Identity()
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(partial(initialise, std=init_std))

    def forward(self, ids: Tensor) -> Tensor:
        x, carry = self.embed(ids), None
        for block in self.blocks:
            x, carry = block(x, carry)
        return self.head(self.norm(x))

    def loss(self, ids: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy in nats per character, in float32 at least; reduction `none` gives [B, T]."""
        logits = self(ids)
        if logits.dtype.itemsize < 4:
            logits = logits.float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        return losses.view_as(targets) if reduction == "none" else losses


def initialise(module: nn.Module, std: float) -> None:
    """Weights of linear layers and embeddings from N(0, std^2), biases 0."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


def build(cfg: DictConfig, vocab: int) -> LM:
    """The model that a config describes, for a vocabulary of `vocab` symbols.

    ffn=again puts the attention into both slots of a block, as gated attention units want it.
    """
    attn = instantiate(cfg.attn)
    ffn = instantiate(cfg.ffn) if cfg.ffn else attn
    return LM(vocab, cfg.model.dim, cfg.model.layers, cfg.model.norm, cfg.model.init_std, attn, ffn)


def parameter_count(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
