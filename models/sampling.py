"""Text from a trained model: which characters may come next, and a loop that draws them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from models.lm import LM


@dataclass(frozen=True)
class Sampler:
    """What is kept of the next character's probabilities p, at `temperature`; the rest is never drawn.

        top_k     the k largest
        top_p     the fewest of the largest that sum to top_p or more (Holtzman et al. 2020, arXiv 1904.09751)
        top_p_x   beside top_p: also all above top_p_x (source A's author)
        min_p     those of min_p * max p or more (Nguyen et al. 2024, arXiv 2407.01082)
        top_a     those of top_a * (max p) ** top_a_power or more (source A's author)

    Each is switched off by None, and where several are on, a character has to be kept by all. The largest is
    always kept. `repetition_penalty` divides the positive logits of the characters that are there already
    and multiplies the negative ones (Keskar et al. 2019, arXiv 1909.05858). Temperature 0 takes the largest.

    Errors: ValueError for a number out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    top_p_x: float | None = None
    min_p: float | None = None
    top_a: float | None = None
    top_a_power: float = 2.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < torch.inf:
            raise ValueError(f"temperature must be 0 or more: got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be 1 or more: got {self.top_k}")
        for name in ("top_p", "top_p_x", "min_p", "top_a"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1: got {value}")
        if self.top_p_x is not None and self.top_p is None:
            raise ValueError("top_p_x widens top_p: give top_p too")
        for name in ("top_a_power", "repetition_penalty"):
            if not 0 < getattr(self, name) < torch.inf:
                raise ValueError(f"{name} must be above 0: got {getattr(self, name)}")

    def probabilities(self, logits: Tensor, seen: Tensor) -> Tensor:
        """What to draw from: logits [B, vocab], seen [B, vocab], True for characters that are there -> [B, vocab]."""
        logits = logits.double()
        if self.repetition_penalty != 1:
            penalty = self.repetition_penalty
            logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        largest = logits.amax(-1, keepdim=True)
        if self.temperature == 0:
            first = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
            return first
        p = ((logits - largest) / self.temperature).softmax(-1)
        p = torch.where(self.kept(p), p, 0.0)
        return p / p.sum(-1, keepdim=True)

    def kept(self, p: Tensor) -> Tensor:
        """Which probabilities [B, vocab] survive; True or False for each."""
        largest = p.amax(-1, keepdim=True)
        kept = torch.ones_like(p, dtype=torch.bool)
        if self.top_k is not None:
            kept &= p >= p.topk(min(self.top_k, p.shape[-1])).values[..., -1:]
        if self.top_p is not None:
            kept &= p >= self.smallest_of_top_p(p)
        if self.min_p is not None:
            kept &= p >= self.min_p * largest
        if self.top_a is not None:
            kept &= p >= self.top_a * largest**self.top_a_power
        return kept | (p == largest)

    def smallest_of_top_p(self, p: Tensor) -> Tensor:
        """The probability down to which top_p keeps, [B, 1]."""
        falling = p.sort(-1, descending=True).values
        before = falling.cumsum(-1) - falling  # what the larger ones sum to
        smallest = torch.where(before < self.top_p, falling, torch.inf).amin(-1, keepdim=True)
        return smallest if self.top_p_x is None else smallest.clamp(max=self.top_p_x)


@torch.no_grad()
def generate(
    model: LM, prompt: Tensor, length: int, sampler: Sampler, seed: int, context: int, banned: Tensor
) -> Iterator[Tensor]:
    """Draw `length` characters after `prompt`, one after the other; each comes as ids [B].

    prompt [B, P], P >= 1; ids in `banned` are never drawn. Seed, model and prompt decide what comes,
    whatever else draws random numbers. The model sees at most `context` characters: when they are
    full, it begins anew with the later half of them. A model that knows absolute positions can
    see no more than it was trained at, others can.
    """
    with one_thread() if len(prompt) == 1 else nullcontext():
        yield from draw(model, prompt, length, sampler, seed, min(context, model.horizon or context), banned)


def draw(
    model: LM, prompt: Tensor, length: int, sampler: Sampler, seed: int, context: int, banned: Tensor
) -> Iterator[Tensor]:
    """`generate`, for a context that the model takes."""
    generator = torch.Generator(prompt.device).manual_seed(seed)
    seen = torch.zeros(len(prompt), model.head.out_features, dtype=torch.bool, device=prompt.device)
    seen.scatter_(1, prompt, True)
    recent = list(prompt[:, -context:].unbind(1))
    state, logits = read(model, recent)
    for drawn in range(length):
        logits = logits.index_fill(-1, banned, -torch.inf)
        ids = torch.multinomial(sampler.probabilities(logits, seen), 1, generator=generator)
        yield ids[:, 0]
        seen.scatter_(1, ids, True)
        recent.append(ids[:, 0])
        if drawn == length - 1:
            return
        if len(recent) > context:
            recent = recent[-max(1, context // 2) :]
            state, logits = read(model, recent)
        else:
            logits = model.step(ids[:, 0], state)


@contextmanager
def one_thread() -> Iterator[None]:
    """Have one thread compute what a CPU does meanwhile.

    What one character of one text needs is so little that sharing it between threads takes longer than doing it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def characters(
    model: LM,
    vocabulary: list[str | None],
    prompts: list[list[int]],
    length: int,
    sampler: Sampler,
    seed: int,
    context: int,
) -> Iterator[list[str]]:
    """What `generate` draws, as characters of each of the prompts; the unknown symbol, None, is never drawn."""
    device = model.head.weight.device
    unknown = [i for i, character in enumerate(vocabulary) if character is None]
    banned = torch.tensor(unknown, dtype=torch.long, device=device)
    for ids in generate(model, torch.tensor(prompts, device=device), length, sampler, seed, context, banned):
        yield [vocabulary[i] for i in ids.tolist()]


def read(model: LM, text: list[Tensor]) -> tuple[object, Tensor]:
    """The state after a text, given as the ids [B] of each position, and the logits of what comes next."""
    state = model.begin(len(text[0]))
    for ids in text:
        logits = model.step(ids, state)
    return state, logits
