"""Measure what bf16 changes in the loss and the gradients of every attention before training, and in trained models.

The loss and gradient of the untrained model of experiment=novel are computed in bf16 and in float32, on crops of its
text. For each attention in `pairs` of configs/study/precision.yaml, the losses of trained models are recorded too, if
<results>/runs/small has all of their runs in both precisions.
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
from models.build import build_model
from scripts.reporting import precision as precision_page
from scripts.reporting.markdown import commit
from scripts.reporting.records import finished, record_of, words_of, write_record
from scripts.reporting.variants import variants
from training.device import autocast
from training.provenance import provenance

CPU = torch.device("cpu")


def compare_step(variant: str, scale: float, ids: tuple[Tensor, Tensor], vocabulary: int, seed: int) -> dict:
    """Return the float32 loss, what bf16 adds to it, and the cosine between the gradients in the two precisions.

    The initial weights of Q and K, and of Z in gated attention units, are multiplied by `scale`.
    """
    torch.manual_seed(seed)
    # starts=none, because the start that was chosen for MHA at novel sets model.output_scale to 0. The losses in both
    # precisions would then not depend on Q and K.
    model = build_model(compose(["experiment=novel", f"attn={variant}", "starts=none"]), vocabulary)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith((".Q.weight", ".K.weight", ".Z.weight")):
                p.mul_(scale)
    exact, gradient = gradient_of(model, ids, "float32")
    loss, rounded = gradient_of(model, ids, "bf16")
    cosine = torch.cosine_similarity(gradient, rounded, dim=0).item()
    return {"loss": exact, "difference": loss - exact, "cosine": cosine}


def gradient_of(model: nn.Module, ids: tuple[Tensor, Tensor], precision: str) -> tuple[float, Tensor]:
    """Return the loss, and its gradient with respect to all parameters as one vector."""
    model.zero_grad()
    with autocast(CPU, precision):
        loss = model.loss(*ids)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def trained(cfg: DictConfig) -> dict[str, dict]:
    """Return losses, devices and one commit for each attention in `pairs` whose runs all exist in both precisions.

    The commit is that of the first run in bf16.
    """
    trained_pairs, runs = {}, Path(cfg.results, "runs")
    for variant, pair in cfg.pairs.items():
        summaries = {}
        for precision, override in (("float32", " train.precision=float32"), ("bf16", "")):
            # Without an override, train.precision=auto was bf16 on the machine that trained these runs.
            words = words_of(f"{variant}{override} starts=none optim.lr={pair.lr}", "small")
            records = [record_of(runs, words, seed) for seed in range(pair.seeds)]
            summaries[precision] = list(map(finished, records))
        if all(s and s["precision"] == precision for precision, group in summaries.items() for s in group):
            trained_pairs[variant] = {
                "commit": commit(summaries["bf16"][0]),
                **{p: [s["evaluation"]["fit"]["loss"] for s in group] for p, group in summaries.items()},
                **{f"{p}_device": group[0]["device"] for p, group in summaries.items()},
            }
        else:
            print(f"left out: {variant}: {runs}/small lacks some of its runs in float32 or bf16", file=sys.stderr)
    return trained_pairs


def compare(cfg: DictConfig) -> None:
    """Measure every attention, and write the record and its page."""
    novel, steps = compose(["experiment=novel"]), {}
    corpus = load(novel.data)
    ids = crops(corpus.training, novel.model.context, cfg.batch, cfg.seed, 0)
    for variant in variants():
        steps[variant] = {str(s): compare_step(variant, s, ids, len(corpus.vocabulary), cfg.seed) for s in cfg.scales}
        for scale, step in steps[variant].items():
            bf16 = f"bf16 adds {step['difference']:+.1e} to the loss, cosine of the gradients {step['cosine']:.7f}"
            print(f"{variant}, initial weights x{scale}: {bf16}", flush=True)
    record = {
        "scales": list(cfg.scales),
        "seed": cfg.seed,
        "characters": ids[0].numel(),
        "data": f"{corpus.name}, sha256 {corpus.sha256[:12]}",
        "variants": steps,
        "trained": trained(cfg),
        "changed": cfg.changed,
        "provenance": provenance(CPU, command_line("python -m scripts.reproduce", sys.argv[1:])),
    }
    write_record(Path(cfg.results), "precision", record, precision_page.page)
