"""python scripts/time_steps.py: training speed at the source's size on this machine, variants side by side.

Every variant takes one whole training step (forward, backward, optimiser) in turn, over and over;
warm-up stays outside; the figure is the median, and the ratio is that of the medians. On a CPU the
steps are not compiled, which would take minutes: scripts/benchmark.py times compiled ones.
"""

import shlex
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import configs.startup

from omegaconf import DictConfig

from configs.arguments import command_line
from configs.cli import compose, main
from data.corpus import load
from data.files import UserError, write_json
from data.reading import read_json
from scripts.records import label
from scripts.timing import in_turn, training_step
from training.device import pick_compile, pick_device, pick_precision
from training.provenance import provenance


@main("steps")
def run(cfg: DictConfig) -> None:
    if cfg.ratio_to not in cfg.variants:
        raise UserError(f"ratio_to={cfg.ratio_to} is not among the variants: {', '.join(cfg.variants)}")
    configs = {v: compose([*shlex.split(f"attn={v}"), f"experiment={cfg.setup}", "seed=0"]) for v in cfg.variants}
    first = configs[cfg.variants[0]]
    device = pick_device(first.train.device)
    precision, _ = pick_precision(first.train.precision, device)
    command = command_line("python scripts/time_steps.py", sys.argv[1:])
    origin = provenance(device, command)
    out = Path(cfg.out)
    if out.exists() and read_json(out)["provenance"] == origin:
        print(f"measured before: {out}")
        return
    vocabulary = cfg.vocabulary or len(load(first.data).vocabulary)
    compiled = pick_compile(None, device, hours=0)
    steps = {v: training_step(c, vocabulary, device, precision, compiled) for v, c in configs.items()}
    seconds = in_turn(steps, device, cfg.warm_up, cfg.repeats)
    tokens = first.train.batch * first.model.context
    median = {v: statistics.median(s) for v, s in seconds.items()}
    record = {
        "what": "one training step: forward, backward, optimiser; variants in turn; medians",
        "batch": first.train.batch,
        "context": first.model.context,
        "vocabulary": vocabulary,
        "precision": precision,
        "compiled": compiled,
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
