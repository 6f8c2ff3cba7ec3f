"""python -m scripts.sample run=FOLDER prompt=TEXT: write text with a trained model, character by character."""

import signal
from dataclasses import fields

import configs.startup

from omegaconf import DictConfig

from configs.cli import main
from data.files import UserError
from models.sampling import Sampler, characters, ids_of
from training.device import pick_device
from training.loading import load_run


@main("sample")
def run(cfg: DictConfig) -> None:
    try:
        sampler = Sampler(**{field.name: cfg[field.name] for field in fields(Sampler)})
    except ValueError as error:
        raise UserError(str(error)) from error
    trained, model, _, vocabulary = load_run(cfg.run)
    prompt = ids_of(cfg.prompt, vocabulary, cfg.replace)
    model.to(pick_device(cfg.device)).eval()
    context = cfg.context or trained.model.context
    if model.max_length is not None and context > model.max_length:
        raise UserError(f"context must be at most {model.max_length} for this model: got {context}")
    texts = [""] * cfg.samples
    print(cfg.prompt, end="", flush=True)
    for drawn in characters(model, vocabulary, [prompt] * cfg.samples, cfg.length, sampler, cfg.seed, context):
        texts = [text + character for text, character in zip(texts, drawn, strict=True)]
        print(drawn[0], end="", flush=True)
    print()
    for number, text in enumerate(texts[1:], 2):
        print(f"\n--- sample {number}\n{cfg.prompt}{text}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head` ends it silently
    run()
