"""python scripts/make_samples.py run=FOLDER: what each sampler makes of one checkpoint.

Writes out/samples.json, the texts with what they come from, and from it alone out/samples.md.
"""

import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import configs.startup

import torch
from omegaconf import DictConfig
from tabulate import tabulate

from configs.arguments import command_line
from configs.cli import main
from data.examine import hash_of
from data.files import UserError, write_bytes, write_json
from models.lm import LM
from models.sampling import Sampler, characters, ids_of
from scripts.records import commit
from training.device import pick_device
from training.evaluation import perplexity
from training.loading import load_run
from training.provenance import provenance
from training.record import Record

GRAM = 4  # characters of what counts as repeated


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


def repeated(text: str) -> float:
    """The share of runs of GRAM characters that stood in the text before."""
    grams = [text[i : i + GRAM] for i in range(len(text) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams)


def page(record: dict) -> str:
    """The page samples.md, from the record."""
    rows, shown = [], []
    for name, found in record["samplers"].items():
        share = statistics.mean(repeated(text) for text in found["texts"])
        variety = len(set("".join(found["texts"])))
        rows.append(
            [name, f"{perplexity(statistics.mean(found['losses'])):.2f}", f"{100 * share:.1f}%", f"{variety:,}"]
        )
        shown += [f"**{name}**", "", f"> {record['prompt']}{found['texts'][0]}".replace("\n", "\n> "), ""]
    heads = ["sampler", "perplexity of the text, by the model", f"repeated runs of {GRAM}", "different characters"]
    origin, run = record["provenance"], record["run"]
    first = next(iter(record["samplers"].values()))
    return "\n".join(
        [
            "# The samplers on one checkpoint",
            "",
            tabulate(rows, heads, "github", colalign=["left", *["right"] * 3], disable_numparse=True),
            "",
            f"- {len(first['texts'])} samples of {len(first['texts'][0])} characters each, after {record['prompt']}; "
            "the first of each is below. Low perplexity is what the model finds likely, which ends in repetition.",
            f"- Model: {run['name']}, {run['steps']:,} steps, fit perplexity {run['fit_perplexity']:.2f}, "
            f"made by `{run['command']}` at commit {commit(run)}; weights sha256 {record['weights'][:12]}.",
            f"- {origin['device']}, torch {origin['versions']['torch']}; commit {commit(origin)}; "
            f"`{origin['command']}`.",
            "",
            *shown,
        ]
    )


@main("samples")
def run(cfg: DictConfig) -> None:
    if cfg.length < GRAM:
        raise UserError(f"length must be {GRAM} or more: got {cfg.length}")
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
        "provenance": provenance(device, command_line("python scripts/make_samples.py", sys.argv[1:])),
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
    write_bytes(results / "samples.md", page(record).encode())
    print(f"written to {results}/samples.md")


if __name__ == "__main__":
    run()
