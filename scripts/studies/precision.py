"""What bf16 changes in a step of every variant, and in trained models.

Measures loss and gradient of the source's model at its start, on crops of the default text, in float32 and in bf16.
Where <results>/runs/small holds runs of both precisions, train.precision=float32 and auto where it meant bf16, their
losses are kept beside these.
"""

import sys
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from configs.arguments import command_line
from configs.cli import compose
from data.batches import crops
from data.corpus import load
from data.files import write_json
from models.build import build_model
from scripts.reporting import precision as precision_page
from scripts.reporting.records import commit, finished, record_of
from scripts.reporting.variants import variants
from training.device import autocast
from training.provenance import provenance

CPU = torch.device("cpu")


def compare_step(
    variant: str, scale: float, ids: tuple[Tensor, Tensor], vocabulary: int, seed: int
) -> dict[str, float]:
    """The loss in float32, what bf16 adds to it, and the cosine between the gradients of all parameters."""
    torch.manual_seed(seed)
    model = build_model(compose(["experiment=novel", f"attn={variant}"]), vocabulary)
    enlarge(model, scale)
    exact, gradient = gradient_of(model, ids, "float32")
    loss, rounded = gradient_of(model, ids, "bf16")
    cosine = torch.cosine_similarity(gradient, rounded, dim=0).item()
    return {"loss": exact, "difference": loss - exact, "cosine": cosine}


@torch.no_grad()
def enlarge(model: nn.Module, scale: float) -> None:
    """Multiply what logits and exponents are made of."""
    for name, p in model.named_parameters():
        if name.endswith((".Q.weight", ".K.weight", ".Z.weight")):
            p.mul_(scale)


def gradient_of(model: nn.Module, ids: tuple[Tensor, Tensor], precision: str) -> tuple[float, Tensor]:
    """The loss, and its gradient by all parameters as one vector."""
    model.zero_grad()
    with autocast(CPU, precision):
        loss = model.loss(*ids)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def trained(cfg: DictConfig) -> dict[str, dict]:
    """By variant, the losses of the same seeds in float32 and in bf16; without variants that lack runs."""
    found, runs = {}, Path(cfg.results, "runs")
    for variant, pairs in cfg.pairs.items():
        summaries = {}
        for precision, switch in (("float32", " train.precision=float32"), ("bf16", "")):  # auto was bf16
            records = [record_of(runs, "small", f"{variant}{switch}", seed) for seed in range(pairs)]
            summaries[precision] = [summary for record in records if (summary := finished(record))]
        whole = all(len(group) == pairs for group in summaries.values())
        if whole and all(s["precision"] == p for p, group in summaries.items() for s in group):
            found[variant] = {
                "commit": commit(summaries["bf16"][0]),
                **{p: [s["evaluation"]["fit"]["loss"] for s in group] for p, group in summaries.items()},
                **{f"{p}_device": group[0]["device"] for p, group in summaries.items()},
            }
    return found


def compare(cfg: DictConfig) -> None:
    """Measure every variant, and write the record and its page."""
    corpus = load(compose(["experiment=novel"]).data)
    context = compose([]).model.context
    ids = crops(corpus.training, context, cfg.batch, cfg.seed, 0)
    vocabulary = len(corpus.vocabulary)
    found: dict[str, dict] = {}
    for variant in variants():
        found[variant] = {str(s): compare_step(variant, s, ids, vocabulary, cfg.seed) for s in cfg.scales}
        print(
            variant, *(f"x{s} {c['difference']:+.1e} {c['cosine']:.7f}" for s, c in found[variant].items()), flush=True
        )
    record = {
        "scales": list(cfg.scales),
        "seed": cfg.seed,
        "characters": ids[0].numel(),
        "data": f"{corpus.summary()['name']}, sha256 {corpus.sha256[:12]}",
        "variants": found,
        "trained": trained(cfg),
        "changed": cfg.changed,
        "provenance": provenance(CPU, command_line("python -m scripts.reproduce", sys.argv[1:])),
    }
    results = Path(cfg.results)
    write_json(results / "precision.json", record)
    precision_page.write(results)
    print(f"written to {results}: precision.json, precision.md")
