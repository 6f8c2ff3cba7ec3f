"""Generate text: rules for the characters that may come next, and a loop that draws them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from data.files import UserError
from models.lm import LM


@dataclass(frozen=True)
class Sampler:
    """Rules that select the characters that may be drawn, by their probabilities p at `temperature`.

    Args:
        temperature: divisor of the logits. 0 always takes the most probable character.
        top_k: keep the k most probable characters.
        top_p: keep the fewest characters, from the most probable on, whose p sum to at least top_p (Holtzman et al.
            2020, arXiv 1904.09751).
        top_p_x: with top_p, also keep every character with p >= top_p_x. This rule and top_a are Peng Bo's, the author
            of the first article in CITATION.cff.
        min_p: keep p >= min_p * max p (Nguyen et al. 2024, arXiv 2407.01082).
        top_a: keep p >= top_a * (max p) ** top_a_power.
        repetition_penalty: divisor of the positive logits of characters that are in the text already, and factor of
            the negative ones (after Keskar et al. 2019, arXiv 1909.05858, who divide the negative ones too).

    None switches a rule off. With several rules, a character must be kept by each. The most probable character is
    always kept, and characters that are equally probable are kept or dropped together, unless temperature is 0. Raises
    ValueError for a number that is out of range, and for top_p_x without top_p.
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
            raise ValueError(f"temperature must be finite and 0 or more: got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be 1 or more: got {self.top_k}")
        for name in ("top_p", "top_p_x", "min_p", "top_a"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1: got {value}")
        if self.top_p_x is not None and self.top_p is None:
            raise ValueError("top_p_x needs top_p: give both")
        for name in ("top_a_power", "repetition_penalty"):
            if not 0 < getattr(self, name) < torch.inf:
                raise ValueError(f"{name} must be finite and above 0: got {getattr(self, name)}")

    def probabilities(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Return the probabilities to draw from, [B, vocab].

        logits [B, vocab]; seen [B, vocab] is True for the characters that are in the text already.
        """
        logits = logits.double()
        if self.repetition_penalty != 1:
            penalty = self.repetition_penalty
            logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        p = ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        p = torch.where(self.kept(p), p, 0.0)
        return p / p.sum(-1, keepdim=True)

    def kept(self, p: Tensor) -> Tensor:
        """Return the mask [B, vocab] of the characters that the rules keep, given the probabilities p [B, vocab]."""
        largest = p.amax(-1, keepdim=True)
        kept = torch.ones_like(p, dtype=torch.bool)
        if self.top_k is not None:
            kept &= p >= p.topk(min(self.top_k, p.shape[-1])).values[..., -1:]
        if self.top_p is not None:
            kept &= p >= self.top_p_threshold(p)
        if self.min_p is not None:
            kept &= p >= self.min_p * largest
        if self.top_a is not None:
            kept &= p >= self.top_a * largest**self.top_a_power
        return kept | (p == largest)

    def top_p_threshold(self, p: Tensor) -> Tensor:
        """Return the lowest value of p at which top_p or top_p_x keeps a character, [B, 1]."""
        falling = p.sort(-1, descending=True).values
        larger = falling.cumsum(-1) - falling  # the sum of the probabilities before each one
        smallest = torch.where(larger < self.top_p, falling, torch.inf).amin(-1, keepdim=True)
        return smallest if self.top_p_x is None else smallest.clamp(max=self.top_p_x)


DEFAULT = Sampler(top_a=0.02)  # the source author's rule


@torch.no_grad()
def generate(
    model: LM, prompt: Tensor, length: int, sampler: Sampler, seed: int, context: int, banned: Tensor
) -> Iterator[Tensor]:
    """Draw `length` characters after `prompt`, and yield the ids [B] of each.

    prompt [B, P] with P >= 1. Ids in `banned` are never drawn. The result depends only on the arguments, and not on
    torch's global random state. The model must be in eval mode. It sees at most `context` characters, or its
    `max_length` if that is smaller. Of a longer prompt it reads the last characters, up to this limit. If it has
    read that many, and a character was drawn, it starts again and reads the last limit // 2 characters (at least one),
    which include the drawn one.
    """
    context = min(context, model.max_length or context)
    threads = one_thread if len(prompt) == 1 else nullcontext
    generator = torch.Generator(prompt.device).manual_seed(seed)
    seen = torch.zeros(len(prompt), model.head.out_features, dtype=torch.bool, device=prompt.device)
    seen.scatter_(1, prompt, True)
    state, unread = model.begin(len(prompt)), prompt[:, -context:].unbind(1)
    recent = [*unread]
    for _ in range(length):
        with threads():
            for ids in unread:
                logits = model.step(ids, state)
            logits = logits.index_fill(-1, banned, -torch.inf)
            drawn = torch.multinomial(sampler.probabilities(logits, seen), 1, generator=generator)
            seen.scatter_(1, drawn, True)
        yield drawn[:, 0]
        unread = [drawn[:, 0]]
        recent += unread
        if len(recent) > context:
            recent = unread = recent[-max(1, context // 2) :]
            state = model.begin(len(prompt))


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one CPU thread within this context.

    The work for one character of one text is so small that dividing it between threads would take longer than the work.
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
    """Yield the characters that `generate` draws, one for each prompt; all prompts must have the same length.

    The unknown symbol, None, is never drawn.
    """
    device = model.head.weight.device
    unknown = [i for i, character in enumerate(vocabulary) if character is None]
    banned = torch.tensor(unknown, dtype=torch.long, device=device)
    for ids in generate(model, torch.tensor(prompts, device=device), length, sampler, seed, context, banned):
        yield [vocabulary[i] for i in ids.tolist()]


def ids_of(prompt: str, vocabulary: list[str | None], replace: str | None) -> list[int]:
    """Return the ids of a prompt. Characters that are not in the vocabulary become `replace`.

    Raises UserError if the prompt is empty, if `replace` is not in the vocabulary, or if `replace` is None and a
    character is not in the vocabulary.
    """
    if not prompt:
        raise UserError("prompt is empty: the model needs a character to go on from")
    known = {character: i for i, character in enumerate(vocabulary) if character is not None}
    if replace is not None and replace not in known:
        raise UserError(f"replace must be one character that the model knows: got {replace}")
    unknown = dict.fromkeys(character for character in prompt if character not in known)
    if unknown and replace is None:
        names = " ".join(map(named, unknown))
        raise UserError(f"the model does not know {names}: leave them out, or give replace=CHARACTER")
    return [known[character if character in known else replace] for character in prompt]


def named(character: str) -> str:
    """Return a character or, if it is not visible, such as a space or a line break, its code point as U+XXXX."""
    return character if character.isprintable() and not character.isspace() else f"U+{ord(character):04X}"
