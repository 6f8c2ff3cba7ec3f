"""Write the final files of a run and its summary, and count the costs of its model."""

import statistics
from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig
from torch import Tensor

from data.examine import hash_of
from data.files import write_json
from models.build import build_model
from models.costs import state_bytes, training_flops
from models.lm import parameter_count
from training import metrics
from training.device import without_triton
from training.evaluation import report
from training.wandb_mirror import Mirror

if TYPE_CHECKING:
    from training.trainer import Trainer

RATES = 10_000  # the speed of a run is the median of the speeds in its last rows, at most this many


def finish(trainer: "Trainer", result: dict, weights: dict[str, Tensor], mirror: Mirror) -> dict:
    """Write the weights and the summary of a finished run, print its figures and return the summary."""
    trainer.record.remove_measurements()  # of states during training
    sha256 = trainer.record.save_model(weights)
    hashes = {"weights_sha256": sha256} | {
        f"{path.stem}_sha256": hash_of(path) for path in (trainer.record.vocabulary, trainer.record.text)
    }
    f = weights.get("blocks.0.attn.position_weight.f")  # of the first layer; log f if `positive`
    if f is not None:
        positive = trainer.model.blocks[0].attn.position_weight.positive
        trainer.record.save_f(f.double().exp() if positive else f)
    if best := best_heldout(trainer):
        result["heldout_best"] = best
    write_json(trainer.record.loss_by_position, result.pop("loss_by_position"))
    kept = {"weights_of_step": trainer.early_stopping.step} if trainer.early_stopping.weights else {}
    summary = summary_of(trainer, {"status": "finished", "evaluation": result, **trainer.costs, **hashes, **kept})
    mirror.summarise(
        {
            f"{text}_{key}": figures[key]
            for text, figures in result.items()
            if isinstance(figures, dict)
            for key in ("perplexity", "accuracy", "bits_per_character", "bits_per_byte", "step")
            if key in figures
        }
        | {key: summary[key] for key in ("tokens_per_second", "parameters", "flops_per_step", "state_bytes")}
    )
    mirror.finish(exit_code=0)  # before save_summary, so that a run that is killed in between is mirrored again
    trainer.record.save_summary(summary)
    trainer.record.state.unlink(missing_ok=True)
    print(report(f"\n{trainer.cfg.job.experiment}/{trainer.cfg.job.name}", result, summary["parameters"]))
    if summary["tokens_per_second"]:
        print(f"{'training tokens/s':22}{summary['tokens_per_second']:10,.0f}")
    print(f"{'training FLOPs/step':22}{summary['flops_per_step']:10.3g}")
    print(f"{'streaming state, bytes':22}{summary['state_bytes']:10,}")
    print(f"records: {trainer.record.folder}", flush=True)
    return summary


def best_heldout(trainer: "Trainer") -> dict | None:
    """Return the evaluation during training with the lowest held-out loss, and the perplexity of the last one.

    Returns None if no text is held out, or if there is no row with an evaluation, as after a power cut.
    """
    rows = list(metrics.each_row(trainer.record.metrics, having="heldout_loss"))
    if not rows:
        return None
    best = min(rows, key=lambda row: row["heldout_loss"])
    return {
        "step": best["step"],
        "loss": best["heldout_loss"],
        "perplexity": best["heldout_perplexity"],
        "last_perplexity": rows[-1]["heldout_perplexity"],
        "characters": trainer.curve_windows["heldout"][:, 1:].numel(),
    }


def write_summary(trainer: "Trainer", status: str) -> None:
    """Write summary.json of a run that is not finished, in the first process alone."""
    if trainer.processes.first:
        trainer.record.save_summary(summary_of(trainer, {"status": status}))


def summary_of(trainer: "Trainer", outcome: dict) -> dict:
    """Return the content of summary.json: what was trained, on which text and device, by which code, and how fast.

    In a run that was continued, `compiled`, `processes` and the versions are those of its last part.
    `outcome` holds further entries, such as `status`.
    """
    rows = metrics.last_rows(trainer.record.metrics, RATES + 1)
    # The first row is left out: its steps are slower, because the first one may compile the model.
    rates = [row["tokens_per_second"] for row in rows[1:]]
    tokens = trainer.step * trainer.cfg.train.batch * trainer.cfg.model.context
    on_cpu = trainer.device.type == "cpu"
    return {
        "experiment": trainer.cfg.job.experiment,
        "name": trainer.cfg.job.name,
        "attn": trainer.cfg.job.attn,
        "seed": trainer.cfg.seed,
        "lr": trainer.cfg.optim.lr,
        "steps": trainer.step,
        "tokens": tokens,
        "parameters": parameter_count(trainer.model),
        "tokens_per_second": statistics.median(rates) if rates else None,
        "training_seconds": round(trainer.seconds, 1),
        "precision": trainer.precision,
        "compiled": trainer.compiled,
        "processes": trainer.processes.count,
        "data": trainer.corpus.summary(),
        **({"init_from": dict(trainer.cfg.job.init_from)} if "init_from" in trainer.cfg.job else {}),
        **outcome,
        **trainer.origin,
        **({"earlier_code": trainer.trained_by[:-1]} if len(trainer.trained_by) > 1 else {}),
        **({"earlier_devices": trainer.devices_used[:-1]} if len(trainer.devices_used) > 1 else {}),
        **({"earlier_threads": trainer.threads_used[:-1]} if on_cpu and len(trainer.threads_used) > 1 else {}),
    }


def counted_costs(cfg: DictConfig, vocabulary: int) -> dict:
    """Count the FLOPs of a training step, and the bytes that `LM.step` keeps after model.context characters.

    Both are counted for a new float32 model on the CPU, so that they do not depend on where the run is trained. All
    blocks but the first one have the same costs, so that models with at most two are counted.
    """
    counted = [costs_with(layers, cfg, vocabulary) for layers in range(1, min(cfg.model.layers, 2) + 1)]
    first, last = counted[0], counted[-1]
    return {key: last[key] + max(0, cfg.model.layers - 2) * (last[key] - first[key]) for key in last}


def costs_with(layers: int, cfg: DictConfig, vocabulary: int) -> dict:
    """Return the costs of a model with `layers` layers."""
    copy = cfg.copy()
    copy.model.layers = layers
    copy.model.activation_checkpointing = False  # it would count some of the forward pass twice
    with torch.random.fork_rng(devices=[]):
        model = without_triton(build_model(copy, vocabulary))
    context = cfg.model.context
    return {
        "flops_per_step": cfg.train.batch * training_flops(model, context),
        "state_bytes": state_bytes(model, context),
    }
