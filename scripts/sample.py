"""python -m scripts.sample run=FOLDER prompt=TEXT: text from a trained model, shown as it is made."""

import signal
from dataclasses import fields
from pathlib import Path

import configs.startup

from omegaconf import DictConfig

from configs.cli import main
from data.files import UserError
from models.sampling import Sampler, characters, ids_of
from training.device import pick_device
from training.loading import load_run


def sampler_of(cfg: DictConfig) -> Sampler:
    try:
        return Sampler(**{field.name: cfg[field.name] for field in fields(Sampler)})
    except ValueError as error:
        raise UserError(str(error)) from error


@main("sample")
def run(cfg: DictConfig) -> None:
    sampler, folder = sampler_of(cfg), Path(cfg.run)
    trained, model, _, vocabulary = load_run(folder)
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
