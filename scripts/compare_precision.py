"""python scripts/compare_precision.py: what bf16 changes in a step of every variant, and in trained models.

Measures loss and gradient of the source's model at its start, on crops of the default text, in float32 and in bf16.
Compares runs of experiment=small that were trained with train.precision=float32 with those where auto meant bf16,
where there are some.
"""

import math
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import configs.startup

import torch
from omegaconf import DictConfig
from tabulate import tabulate
from torch import Tensor, nn

from configs.arguments import command_line
from configs.cli import compose, main
from data.batches import crops
from data.corpus import load
from data.files import write_bytes, write_json
from models.build import build_model
from scripts.list_variants import variants
from scripts.records import commit, finished, label, record_of
from scripts.rule import Comparison, intervals, judge
from training.device import autocast
from training.provenance import provenance

CPU = torch.device("cpu")
LOSS, COSINE = 3e-4, 0.99997  # no more, and no less, is wanted


def compare(variant: str, scale: float, ids: tuple[Tensor, Tensor], vocabulary: int, seed: int) -> dict[str, float]:
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
    found = {}
    for variant, pairs in cfg.pairs.items():
        summaries = {}
        for precision, switch in (("float32", " train.precision=float32"), ("bf16", "")):  # auto was bf16
            records = [record_of(Path(cfg.runs), "small", f"{variant}{switch}", seed) for seed in range(pairs)]
            summaries[precision] = [summary for record in records if (summary := finished(record))]
        whole = all(len(group) == pairs for group in summaries.values())
        if whole and all(s["precision"] == p for p, group in summaries.items() for s in group):
            found[variant] = {
                "commit": commit(summaries["bf16"][0]),
                **{p: [s["evaluation"]["fit"]["loss"] for s in group] for p, group in summaries.items()},
                **{f"{p}_device": group[0]["device"] for p, group in summaries.items()},
            }
    return found


def page(record: dict) -> str:
    """results/precision.md, from the record."""
    scales = record["scales"]
    rows = [
        [label(variant), *(cell for scale in scales for cell in figures(cells[str(scale)]))]
        for variant, cells in record["variants"].items()
    ]
    heads = ["", *(f"{head}, x{scale:g}" for scale in scales for head in ("loss", "bf16 adds", "cosine"))]
    cells = [cell for found in record["variants"].values() for cell in found.values()]
    far = [cell for cell in cells if abs(cell["difference"]) > LOSS or round(cell["cosine"], 5) < COSINE]
    came = record["provenance"]
    return "\n".join(
        [
            "# bf16 beside float32",
            "",
            "Loss and gradient of the source's model at its start: in nats per character, and as the cosine between "
            "the gradients of all parameters. x6: the weights that make Q, K and Z are six times as large.",
            "",
            tabulate(rows, heads, "github", colalign=["left", *["right"] * (len(heads) - 1)], disable_numparse=True),
            "",
            f"- {len(cells) - len(far)} of {len(cells)} losses agree to {LOSS:g} with a cosine of {COSINE} or more.",
            f"- {record['characters']:,} characters of {record['data']}, seed {record['seed']}; {came['device']}, "
            f"torch {came['versions']['torch']}; commit {commit(came)}; `{came['command']}`.",
            "",
            *training(record["trained"], record["changed"]),
        ]
    )


def figures(cell: dict) -> list[str]:
    return [f"{cell['loss']:.4f}", f"{cell['difference']:+.0e}", f"{cell['cosine']:.6f}"]


def training(trained: dict[str, dict], changed: str) -> list[str]:
    """Whether training ends at the same place, by the rule."""
    if not trained:
        return []
    comparisons = []
    for group in trained.values():
        d = [b - a for a, b in zip(group["bf16"], group["float32"], strict=True)]
        comparisons.append(Comparison("<", statistics.mean(d), statistics.stdev(d), len(d)))
    rows = [
        [
            label(variant),
            str(comparison.n),
            *(f"{statistics.mean(map(math.exp, group[p])):.2f}" for p in ("float32", "bf16")),
            f"{100 * comparison.mean:+.2f}% ({100 * interval.low:+.2f} to {100 * interval.high:+.2f})",
            judge(comparison, interval),
        ]
        for (variant, group), comparison, interval in zip(
            trained.items(), comparisons, intervals(comparisons), strict=True
        )
    ]
    first = next(iter(trained.values()))
    heads = ["fit perplexity", "pairs", "float32", "bf16", "float32 above bf16", "verdict"]
    return [
        "Trained to the end of experiment=small:",
        "",
        tabulate(rows, heads, "github", colalign=["left", *["right"] * 4, "left"], disable_numparse=True),
        "",
        f"- Pairs of one seed, from 0 on; intervals by scripts/rule.py; commit {first['commit']}, "
        f"{first['bf16_device']}.",
        f"- {changed}.",
        "",
    ]


@main("precision")
def run(cfg: DictConfig) -> None:
    corpus = load(compose(["experiment=novel"]).data)
    context = compose([]).model.context
    ids = crops(corpus.training, context, cfg.batch, cfg.seed, 0)
    vocabulary = len(corpus.vocabulary)
    found: dict[str, dict] = {}
    for variant in variants():
        found[variant] = {str(s): compare(variant, s, ids, vocabulary, cfg.seed) for s in cfg.scales}
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
        "provenance": provenance(CPU, command_line("python scripts/compare_precision.py", sys.argv[1:])),
    }
    out = Path(cfg.out)
    write_json(out.with_suffix(".json"), record)
    write_bytes(out.with_suffix(".md"), page(record).encode())
    print(f"written to {out}.json, {out}.md")


if __name__ == "__main__":
    run()
