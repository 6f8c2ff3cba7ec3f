"""python scripts/benchmark.py: training speed of variants, side by side.

Every variant takes one whole training step (forward, backward, optimiser) in turn, over and over;
warm-up stays outside; the figure is the median, and the ratio is that of the medians.
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
from omegaconf import DictConfig

from configs.cli import compose, main
from data.corpus import load
from data.files import write_json
from data.record import provenance, read_json
from evaluate import build_model, pick_device, pick_precision
from models.optim import adabelief
from scripts.records import label
from train import update


def stepper(cfg: DictConfig, vocabulary: int, device: torch.device, precision: str):
    """A function that takes one training step on random characters and returns its seconds."""
    torch.manual_seed(0)
    model = build_model(cfg, vocabulary).to(device)
    optim = cfg.optim
    optimizer = adabelief(model, optim.lr, optim.betas, optim.eps, optim.weight_decay, optim.rectify)
    ids = torch.randint(vocabulary, (cfg.train.batch, cfg.model.context + 1), device=device)

    def step() -> float:
        began = time.perf_counter()
        update(model, optimizer, ids[:, :-1], ids[:, 1:], device, precision)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return step


@main("benchmark")
def run(cfg: DictConfig) -> None:
    configs = {v: compose([f"attn={v}", f"experiment={cfg.experiment}"]) for v in cfg.variants}
    first = configs[cfg.variants[0]]
    device = pick_device(first.train.device)
    precision = pick_precision(first.train.precision, device)
    command = f"python scripts/benchmark.py experiment={cfg.experiment} variants=[{','.join(cfg.variants)}]"
    origin = provenance(device, command)
    out = Path(cfg.out)
    if out.exists() and read_json(out)["provenance"] == origin:
        print(f"measured before: {out}")
        return
    vocabulary = len(load(first.data).vocabulary)
    steps = {v: stepper(c, vocabulary, device, precision) for v, c in configs.items()}
    seconds: dict[str, list[float]] = {v: [] for v in steps}
    for repeat in range(cfg.warm_up + cfg.repeats):
        for variant, step in steps.items():
            taken = step()
            if repeat >= cfg.warm_up:
                seconds[variant].append(taken)
    tokens = first.train.batch * first.model.context
    median = {v: statistics.median(s) for v, s in seconds.items()}
    record = {
        "what": "one training step: forward, backward, optimiser; variants in turn; medians",
        "batch": first.train.batch,
        "context": first.model.context,
        "vocabulary": vocabulary,
        "precision": precision,
        "ratio_to": cfg.ratio_to,
        "speed": {
            v: {
                "tokens_per_second": tokens / median[v],
                "ratio": median[cfg.ratio_to] / median[v],
                "seconds": [round(s, 6) for s in sorted(seconds[v])],
            }
            for v in steps
        },
        "provenance": origin,
    }
    write_json(out, record)
    for variant, figures in record["speed"].items():
        ratio = f"{figures['ratio']:8.3f} x {label(cfg.ratio_to)}"
        print(f"{label(variant):8}{figures['tokens_per_second']:12,.0f} tokens/s{ratio}")
    print(f"written to {out}")


if __name__ == "__main__":
    run()
