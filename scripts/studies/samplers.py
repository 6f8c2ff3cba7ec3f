"""Draw texts from one checkpoint with each sampler, and measure their perplexity under the model."""

import statistics
import sys
from pathlib import Path

import torch
from omegaconf import DictConfig

from configs.arguments import command_line
from data.examine import hash_of
from data.files import UserError
from models.lm import LM
from models.sampling import Sampler, characters, ids_of
from scripts.reporting import samples
from scripts.reporting.records import write_record
from training.device import pick_device, without_triton
from training.loading import load_run
from training.metrics import perplexity
from training.provenance import provenance
from training.record import Record


@torch.no_grad()
def loss_of(model: LM, text: list[int], start: int, context: int) -> float:
    """Return the mean loss on text[start:] in nats; at most `context` characters precede each target."""
    losses = []
    for t in range(start, len(text)):
        past = torch.tensor([text[max(0, t - context) : t]], device=model.head.weight.device)
        losses.append(-model(past)[0, -1].double().log_softmax(-1)[text[t]].item())
    return statistics.mean(losses)


def checked(name: str, settings: DictConfig) -> Sampler:
    try:
        return Sampler(**settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"samplers: {name}: {error}") from error


def compare(cfg: DictConfig) -> None:
    """Draw texts with every sampler, and write the record and its page.

    Raises UserError for unusable settings, or if the run is not finished.
    """
    if cfg.length < samples.GRAM:
        raise UserError(f"length must be {samples.GRAM} or more: got {cfg.length}")
    source = Record(Path(cfg.run))
    summary = source.finished_with_weights()
    if source.config.exists() and summary is None:  # load_run describes a folder without a config
        raise UserError(f"{cfg.run} is not finished: give the folder of a finished run")
    trained, model, _, vocabulary = load_run(cfg.run)
    samplers = {name: checked(name, settings) for name, settings in cfg.samplers.items()}
    prompt, context = ids_of(cfg.prompt, vocabulary, cfg.replace), trained.model.context
    device = pick_device(cfg.device)
    if device.type == "cpu":
        without_triton(model)
    model.to(device).eval()
    named = ("name", "steps", "command", "commit", "dirty", "earlier_code")
    run = {key: summary[key] for key in named if key in summary}
    record = {
        "prompt": cfg.prompt,
        "seed": cfg.seed,
        "run": run | {"fit_perplexity": summary["evaluation"]["fit"]["perplexity"]},
        "weights": hash_of(source.model),
        "samplers": {},
        "provenance": provenance(device, command_line("python -m scripts.reproduce", sys.argv[1:])),
    }
    ids = {character: i for i, character in enumerate(vocabulary)}
    for name, sampler in samplers.items():
        drawn = characters(model, vocabulary, [prompt] * cfg.samples, cfg.length, sampler, cfg.seed, context)
        texts = ["".join(text) for text in zip(*drawn, strict=True)]
        losses = [loss_of(model, [*prompt, *(ids[c] for c in text)], len(prompt), context) for text in texts]
        record["samplers"][name] = {"settings": dict(cfg.samplers[name]), "texts": texts, "losses": losses}
        print(f"{name}: perplexity {perplexity(statistics.mean(losses)):.2f}", flush=True)
    write_record(Path(cfg.results), "samples", record, samples.page)
