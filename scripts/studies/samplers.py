"""What each sampler makes of one checkpoint: texts, and what the model itself thinks of them."""

import statistics
import sys
from pathlib import Path

import torch
from omegaconf import DictConfig

from configs.arguments import command_line
from data.examine import hash_of
from data.files import UserError, write_json
from models.lm import LM
from models.sampling import Sampler, characters, ids_of
from scripts.reporting import samples
from training.device import pick_device
from training.evaluation import perplexity
from training.loading import load_run
from training.provenance import provenance
from training.record import Record


def draw(model: LM, vocabulary: list, prompt: list[int], sampler: Sampler, cfg: DictConfig, context: int) -> list[str]:
    made = characters(model, vocabulary, [prompt] * cfg.samples, cfg.length, sampler, cfg.seed, context)
    return ["".join(text) for text in zip(*made, strict=True)]


@torch.no_grad()
def loss_of(model: LM, text: list[int], start: int, context: int) -> float:
    """Nats a character that the model itself gives to text[start:], each seeing up to `context` characters."""
    losses = []
    for t in range(start, len(text)):
        past = torch.tensor([text[max(0, t - context) : t]], device=model.head.weight.device)
        losses.append(-model(past)[0, -1].double().log_softmax(-1)[text[t]].item())
    return statistics.mean(losses)


def compare(cfg: DictConfig) -> None:
    """Draw samples by every sampler, and write the record and its page.

    Raises UserError for a run that cannot be used.
    """
    if cfg.length < samples.GRAM:
        raise UserError(f"length must be {samples.GRAM} or more: got {cfg.length}")
    folder = Path(cfg.run)
    trained, model, _, _ = load_run(folder)
    source = Record(folder)
    summary, vocabulary = source.finished(), source.read_vocabulary()
    if summary is None:
        raise UserError(f"{folder} is not finished: only a finished run has its samples kept")
    prompt = ids_of(cfg.prompt, vocabulary, cfg.replace)
    device = pick_device(cfg.device)
    model.to(device).eval()
    context = trained.model.context
    record = {
        "prompt": cfg.prompt,
        "seed": cfg.seed,
        "run": {key: summary[key] for key in ("name", "steps", "command", "commit", "dirty")}
        | {"fit_perplexity": summary["evaluation"]["fit"]["perplexity"]},
        "weights": hash_of(source.model),
        "samplers": {},
        "provenance": provenance(device, command_line("python -m scripts.reproduce", sys.argv[1:])),
    }
    known = {character: i for i, character in enumerate(vocabulary)}
    for name, settings in cfg.samplers.items():
        try:
            sampler = Sampler(**settings)
        except (TypeError, ValueError) as error:
            raise UserError(f"samplers: {name}: {error}") from error
        made = draw(model, vocabulary, prompt, sampler, cfg, context)
        losses = [loss_of(model, [*prompt, *(known[c] for c in text)], len(prompt), context) for text in made]
        record["samplers"][name] = {"settings": dict(settings), "texts": made, "losses": losses}
        print(f"{name}: {perplexity(statistics.mean(losses)):.2f}", flush=True)
    results = Path(cfg.results)
    write_json(results / "samples.json", record)
    samples.write(results)
    print(f"written to {results}: samples.json, samples.md")
