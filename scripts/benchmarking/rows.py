"""Measure the training speed of the rows of scripts.compare: `python -m scripts.benchmark measure=rows`.

The rows, which are attentions of one size, take whole steps (forward, backward, optimiser) in turn, and
scripts.compare shows the medians. On a CPU the steps are not compiled, because compiling would take minutes. With
measure=attentions, compiled steps are timed.
"""

import statistics
from pathlib import Path

from omegaconf import DictConfig

from data.corpus import load
from data.files import UserError, write_json
from data.reading import read_object
from scripts.benchmarking.timing import in_turn, training_step
from scripts.reporting.figures import paired_ratio
from scripts.reporting.records import composed, label, words_of
from training.device import pick_compile, pick_device, pick_precision
from training.provenance import provenance


def measure(cfg: DictConfig, command: str) -> None:
    """Time the variants and write speed.json, unless there is one with the same provenance.

    Raises UserError if cfg.ratio_to is not among the variants.
    """
    if cfg.ratio_to not in cfg.variants:
        raise UserError(f"ratio_to={cfg.ratio_to} is not among the variants: {', '.join(cfg.variants)}")
    configs = {variant: composed(words_of(variant, cfg.setup)) for variant in cfg.variants}
    first = configs[cfg.variants[0]]
    device = pick_device(first.train.device, "train.device")
    precision, _ = pick_precision(first.train.precision, device)
    origin, out = provenance(device, command), Path(cfg.results, "speed.json")
    if out.exists() and read_object(out).get("provenance") == origin:
        print(f"already measured: {out}")
        return
    vocabulary = cfg.vocab_size or len(load(first.data).vocabulary)
    compiled = pick_compile(None, device, hours=0)
    steps = {v: training_step(c, vocabulary, device, precision, compiled) for v, c in configs.items()}
    seconds = in_turn(steps, device, cfg.warm_up, cfg.repeats)
    speed = {}
    for variant, values in seconds.items():
        rate = configs[variant].train.batch * configs[variant].model.context / statistics.median(values)
        ratio = paired_ratio(seconds[cfg.ratio_to], values)
        rounded = [round(s, 6) for s in values]  # in the order of the rounds
        speed[variant] = {"tokens_per_second": rate, "ratio": ratio, "seconds": rounded}
        print(f"{label(variant):8}{rate:12,.0f} tokens/s{ratio:8.3f} x {label(cfg.ratio_to)}")
    record = {
        "what": "one training step: forward, backward, optimiser; variants in turn; medians",
        "setup": cfg.setup,
        "batch": first.train.batch,
        "context": first.model.context,
        "vocabulary": vocabulary,
        "precision": precision,
        "compiled": compiled,
        "ratio_to": cfg.ratio_to,
        "speed": speed,
        "provenance": origin,
    }
    write_json(out, record)
    print(f"written to {out}")
