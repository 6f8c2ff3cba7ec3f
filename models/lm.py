"""The language model, from embedding to logits, and its initialisation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn.base import Attention, smallest
from attn.streaming import LayerState
from models.block import Block


@dataclass
class LMState:
    """The state of a language model between two calls of `step`, after `length` characters of each of `batch` texts."""

    batch: int
    length: int
    blocks: list[list[LayerState | None]]


class LM(nn.Module):
    """Embedding, blocks, a final norm (with placement `pre`) and a linear head: ids [B, T] -> logits [B, T, vocab].

    Positions are not encoded unless `positions` is set, since an attention that needs an encoding has its own.

    Args:
        placement: the place of the norms; see `ResidualPath`.
        init_std: standard deviation of the initial weights of linear layers and embeddings; see `initialise`. A
            submodule that needs another initialisation uses a bare nn.Parameter, which `initialise` leaves unchanged.
        scaled_init: whether the initial weights of the layers that write to the residual stream are divided by
            sqrt(2 layers), so that the variance of the stream does not grow with the number of layers (GPT-2, Radford
            et al. 2019).
        output_scale: another factor on these initial weights. With 0, layers add nothing to the residual stream at
            first. 0 cannot be combined with placement `rezero`, because no gradient would reach a block.
        dropout: probability of setting to zero, in training, each element of the embedding and of what each layer adds
            to the residual stream; see `ResidualPath`.
        positions: number of learned position embeddings, which are added to the embedding; 0 adds none.
        activation_checkpointing: whether the backward pass recomputes the activations inside blocks instead of storing
            them. The results are the same to rounding, with less memory and about a third more time.
        attn, ffn: constructors, called once for each block.

    Raises ValueError for an unknown placement, and for `rezero` with output_scale=0.
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        layers: int,
        placement: str,
        init_std: float,
        scaled_init: bool,
        output_scale: float,
        dropout: float,
        positions: int,
        activation_checkpointing: bool,
        attn: Callable[[], nn.Module],
        ffn: Callable[[], nn.Module],
    ):
        super().__init__()
        if placement == "rezero" and output_scale == 0:
            raise ValueError(
                "model.norm=rezero needs model.output_scale above 0: with 0, no gradient would reach a block; "
                "if a file of configs/starts sets it to 0, add starts=none, which ignores this file"
            )
        self.embed = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(positions, dim) if positions else None
        self.blocks = nn.ModuleList(Block(dim, placement, dropout, attn, ffn) for _ in range(layers))
        self.norm = nn.LayerNorm(dim) if placement == "pre" else nn.Identity()
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(partial(initialise, std=init_std))
        scale_outputs(self.blocks, output_scale / (2 * layers) ** 0.5 if scaled_init else output_scale)
        self.dropout, self.activation_checkpointing = dropout, activation_checkpointing

    def forward(self, ids: Tensor) -> Tensor:
        x, carry = F.dropout(self.embedded(ids), self.dropout, self.training), None
        for block in self.blocks:
            if self.activation_checkpointing:
                x, carry = checkpoint(block, x, carry, use_reentrant=False)
            else:
                x, carry = block(x, carry)
        return self.head(self.norm(x))

    def embedded(self, ids: Tensor, start: int = 0) -> Tensor:
        """Return the embeddings before dropout at the positions from `start` on, ids [B, T] -> [B, T, dim].

        Raises ValueError if there are more positions than position embeddings.
        """
        x = self.embed(ids)
        if self.positions is None:
            return x
        end = start + ids.shape[1]
        if end > self.positions.num_embeddings:
            raise ValueError(f"the model has {self.positions.num_embeddings} position embeddings: got {end} positions")
        return x + self.positions.weight[start:end]

    @property
    def max_length(self) -> int | None:
        """The largest number of positions that `forward` and `step` accept; None means any number."""
        limits = [module.max_length for module in self.modules() if isinstance(module, Attention)]
        return smallest([*limits, None if self.positions is None else self.positions.num_embeddings])

    def algorithms(self, T: int) -> set[str]:
        """Return the names of the algorithms that the attentions use for T positions, for logging."""
        return {module.algorithm(T) for module in self.modules() if isinstance(module, Attention)} - {""}

    def begin(self, batch: int) -> LMState:
        """Return the state before the first characters of `batch` texts."""
        return LMState(batch, 0, [block.begin(batch) for block in self.blocks])

    def step(self, ids: Tensor, state: LMState) -> Tensor:
        """Read one character of each text and return the logits of the next one, ids [batch] -> [batch, vocab].

        The logits are those of `forward` at that position, up to rounding. Earlier positions are not computed again,
        unless an attention keeps the default `mix_step`. The state is updated in place. Call this in eval mode (dropout
        is not supported) and under torch.no_grad. Raises ValueError after `max_length` characters, and for ids of
        another shape.
        """
        if ids.shape != (state.batch,):
            raise ValueError(f"the state is of {state.batch} texts: got ids of shape {tuple(ids.shape)}")
        x, carry = self.embedded(ids[:, None], state.length), None
        for block, states in zip(self.blocks, state.blocks, strict=True):
            x, carry = block.step(x, states, carry)
        state.length += 1
        return self.head(self.norm(x))[:, 0]

    def loss(self, ids: Tensor, targets: Tensor, mean: bool = True) -> Tensor:
        """Return the mean cross-entropy in nats or, if `mean` is False, that of each target, [B, T].

        ids, targets [B, T]. The result is float32 or float64.
        """
        losses = cross_entropy(self(ids), targets)
        return losses.mean() if mean else losses


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log softmax(logits)[target] in nats, float32 or float64: logits [B, T, V], targets [B, T] -> [B, T]."""
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    if torch.compiler.is_compiling():
        return CrossEntropy.apply(logits, targets)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


class CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] with a backward pass that torch.compile turns into one fast loop.

    Inductor does not vectorise the backward pass of F.cross_entropy, and that of a gather would first fill a tensor of
    the size of the logits with zeros. logits [..., V], targets [...] -> [...].
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
    """Draw the weights of linear layers and embeddings from N(0, std^2), and set biases to 0."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


@torch.no_grad()
def scale_outputs(blocks: nn.ModuleList, scale: float) -> None:
    """Multiply by `scale` the weights of the linear layers whose output is added to the residual stream."""
    for name, module in blocks.named_modules():
        if name.endswith((".attn.out", ".ffn.out", ".ffn.O")):
            module.weight *= scale


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters that require a gradient.

    They include those without effect, such as AFT's alpha and bias of K, which its denominator cancels.
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
