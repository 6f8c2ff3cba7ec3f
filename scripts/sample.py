"""python scripts/sample.py run=FOLDER prompt=TEXT: text from a trained model, shown as it is made."""

import signal
import sys
from dataclasses import fields
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import configs.startup

from omegaconf import DictConfig

from configs.cli import main
from data.files import UserError
from models.sampling import Sampler, characters
from training.device import pick_device
from training.loading import load_run
from training.record import Record


def sampler_of(cfg: DictConfig) -> Sampler:
    try:
        return Sampler(**{field.name: cfg[field.name] for field in fields(Sampler)})
    except ValueError as error:
        raise UserError(str(error)) from error


def ids_of(prompt: str, vocabulary: list[str | None], replace: str | None) -> list[int]:
    """The prompt as ids; UserError that names the characters the model does not know, unless `replace` stands in."""
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
    """Itself, or its code point where it would not be seen, as of blanks and line ends."""
    return character if character.isprintable() and not character.isspace() else f"U+{ord(character):04X}"


@main("sample")
def run(cfg: DictConfig) -> None:
    sampler, folder = sampler_of(cfg), Path(cfg.run)
    trained, model, _ = load_run(folder)
    vocabulary = Record(folder).read_vocabulary()
    prompt = ids_of(cfg.prompt, vocabulary, cfg.replace)
    model.to(pick_device(cfg.device)).eval()
    context = cfg.context or trained.model.context
    if model.max_length is not None and context > model.max_length:
        raise UserError(
            f"context must be at most {model.max_length}, beyond which this model has no rule: got {context}"
        )
    made = [""] * cfg.samples
    print(cfg.prompt, end="", flush=True)
    for drawn in characters(model, vocabulary, [prompt] * cfg.samples, cfg.length, sampler, cfg.seed, context):
        made = [text + character for text, character in zip(made, drawn, strict=True)]
        print(drawn[0], end="", flush=True)
    print()
    for number, text in enumerate(made[1:], 2):
        print(f"\n--- sample {number}\n{cfg.prompt}{text}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head ends it without a word
    run()
