"""The language model: embedding, blocks, final norm, untied head; and its initialisation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn.base import Attention, Stream, shortest
from models.block import PLACEMENTS, Block


@dataclass
class State:
    """What `LM.step` keeps of the characters so far: of `batch` texts, the streams of each block."""

    batch: int
    blocks: list[list[Stream | None]]


class LM(nn.Module):
    """ids [B, T] -> logits [B, T, vocab]: embed, `layers` blocks, with pre-norm an LN, linear without bias.

    `attn` and `ffn` are called once per layer. No positional encoding is added anywhere: a
    variant brings its own. A submodule that needs another start than `initialise` gives it
    holds it in a bare nn.Parameter, which `initialise` leaves alone. `scaled_init` makes what the
    blocks add to the residual sum small enough that it does not grow with their number: of a sum of 2 layers,
    independent at the start, the variance then stays that of one (GPT-2, Radford et al. 2019). `output_scale`
    multiplies it too; with 0, every block starts as the identity.
    `checkpointing` keeps only what goes from block to block for the backward pass, which computes
    the rest again: the same numbers, less memory, about a third more time.
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        layers: int,
        placement: str,
        init_std: float,
        scaled_init: bool,
        output_scale: float,
        checkpointing: bool,
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
        scale_outputs(self.blocks, output_scale / (2 * layers) ** 0.5 if scaled_init else output_scale)
        self.checkpointing = checkpointing

    def forward(self, ids: Tensor) -> Tensor:
        x, carry = self.embed(ids), None
        for block in self.blocks:
            if self.checkpointing:
                x, carry = checkpoint(block, x, carry, use_reentrant=False, preserve_rng_state=False)
            else:
                x, carry = block(x, carry)
        return self.head(self.norm(x))

    @property
    def horizon(self) -> int | None:
        """How many positions `forward` and `step` take; None: any number."""
        return shortest(module.horizon for module in self.modules() if isinstance(module, Attention))

    def ways(self, T: int) -> set[str]:
        """How the attentions compute T positions, for the log."""
        return {module.way(T) for module in self.modules() if isinstance(module, Attention)} - {""}

    def begin(self, batch: int) -> State:
        """The state of `step` before the first characters of `batch` texts."""
        return State(batch, [block.begin(batch) for block in self.blocks])

    def step(self, ids: Tensor, state: State) -> Tensor:
        """The logits after the next character of each text, ids [batch] -> [batch, vocab]; moves the state on.

        What `forward` gives at that position, to rounding, without computing the others again. Call it
        under torch.no_grad. Raises ValueError at the horizon and for ids of another batch.
        """
        if ids.shape != (state.batch,):
            raise ValueError(f"the state is of {state.batch} texts: got ids of shape {tuple(ids.shape)}")
        x, carry = self.embed(ids[:, None]), None
        for block, streams in zip(self.blocks, state.blocks, strict=True):
            x, carry = block.step(x, streams, carry)
        return self.head(self.norm(x))[:, 0]

    def loss(self, ids: Tensor, targets: Tensor, mean: bool = True) -> Tensor:
        """Cross-entropy in nats per character, in float32 at least; without `mean` that of each, [B, T]."""
        logits = self(ids)
        if logits.dtype.itemsize < 4:
            logits = logits.float()
        if torch.compiler.is_compiling():
            losses = CrossEntropy.apply(logits, targets)
        else:
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        return losses.mean() if mean else losses


class CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target], written for the compiler, which makes one loop of its backward pass.

    It makes one of F.cross_entropy's that is not vectorised, and of a gather's one that fills a tensor as large
    as the logits with zeros first. logits [..., V], targets [...] -> [...].
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        log_sum = logits.logsumexp(-1)
        ctx.save_for_backward(logits, log_sum, targets)
        return log_sum - logits.gather(-1, targets[..., None])[..., 0]

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None]:
        logits, log_sum, targets = ctx.saved_tensors
        hit = torch.arange(logits.shape[-1], device=logits.device) == targets[..., None]
        return ((logits - log_sum[..., None]).exp() - hit.to(logits.dtype)) * g[..., None], None


def initialise(module: nn.Module, std: float) -> None:
    """Weights of linear layers and embeddings from N(0, std^2), biases 0."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


@torch.no_grad()
def scale_outputs(blocks: nn.ModuleList, scale: float) -> None:
    """Multiply the weights of the linear layers that write to the residual sum by `scale`."""
    for name, module in blocks.named_modules():
        if name.endswith((".attn.out", ".ffn.out", ".ffn.O")):
            module.weight *= scale


def parameter_count(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
