"""python train.py attn=aft: train one language model. python train.py --help lists all keys.

torchrun --nproc-per-node=2 train.py attn=aft: train the same model with two processes.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import configs.startup

from omegaconf import DictConfig

from configs.cli import Result, main
from data.batches import check_length
from data.corpus import load
from data.files import UserError, out_of_memory
from models.lm import LM, parameter_count
from training.causality import check_causal
from training.device import keep_freed_memory, pick_precision
from training.distributed import Processes, joined, leave, own_device
from training.loading import finished_before
from training.pretrained import check_unchanged, initial_model, take_vocabulary
from training.provenance import same_code
from training.record import Record
from training.runs import print_runs
from training.settings import NO_HELDOUT, check
from training.trainer import Trainer, how_to_continue


def train(cfg: DictConfig, on_step: Callable[[Trainer], None] | None = None) -> dict | None:
    """Train the model that `cfg` describes and return its summary.

    The record is in <runs>/<experiment>/<name>. With resume=true, a finished run is not trained again, and an
    interrupted one continues from its state. With train.steps=0, the model is only described, and None is returned.
    With several processes, only the first one writes the record, and the others return None after training. `on_step`,
    if given, is called with the trainer before every step, also when steps are repeated to find a divergence.

    Raises UserError for an invalid config, a text that cannot be loaded or is too short, an attention that is not
    causal, a saved state that is damaged or belongs to another run, a run that another process trains, a full disk, too
    little memory for a step, or a loss that diverges; `Interrupted` after SIGINT, SIGTERM or SIGHUP, except under
    submitit, and KeyboardInterrupt after a second signal other than SIGHUP; and SystemExit if another process has
    failed.
    """
    keep_freed_memory()
    with joined() as processes:
        return train_with(processes, cfg, on_step)


def train_with(processes: Processes, cfg: DictConfig, on_step: Callable[[Trainer], None] | None) -> dict | None:
    with processes.together():
        check(cfg, processes.count)
        if "SLURM_RESTART_COUNT" in os.environ:  # Slurm has restarted the job to continue its run
            cfg.resume = True
        if not processes.first:
            cfg.wandb.mode = "disabled"  # only the first process mirrors the run in wandb
        device = own_device(cfg.train.device, processes)
        precision, reason = pick_precision(cfg.train.precision, device)
        if cfg.attn.get("impl") == "triton" and device.type == "cpu" and "TRITON_INTERPRET" not in os.environ:
            raise UserError("attn.impl=triton needs a GPU: take attn.impl=torch")
        vocabulary = take_vocabulary(cfg)
    corpus = processes.in_turn(lambda: load(cfg.data, vocabulary))
    with processes.together():
        check_length(len(corpus.training), len(corpus.heldout), cfg.model.context, corpus.row_length)
        if cfg.train.patience is not None and not len(corpus.heldout):
            raise UserError(NO_HELDOUT)  # data.holdout is less than one character of this text
        model = initial_model(cfg, len(corpus.vocabulary)).to(device)
        record = Record.of(cfg)
        if cfg.resume:
            check_unchanged(record, cfg)
        summary = finished_before(record, cfg, corpus.sha256) if cfg.resume and cfg.train.steps else None

    several = f", {processes.count} processes ({cfg.train.parallel})" if processes.count > 1 else ""
    announce(cfg, model, f"{device}, {precision} ({reason}){several}")
    if cfg.train.steps == 0:
        return None
    if summary is not None:
        if processes.first:
            record.tidy()
        print(in_short(summary, record), flush=True)
        return summary
    with ExitStack() as held:
        with processes.together():
            check_causal(model, cfg.job.attn, cfg.model.context, len(corpus.vocabulary))
            if processes.first:
                held.enter_context(record.alone())
            if cfg.resume and record.finished_with_weights() is not None:
                raise UserError(f"{record.folder} was finished by another process a moment ago")
        try:
            return Trainer(cfg, record, corpus, model, device, precision, processes, on_step).fit()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            advice = how_to_save_memory(cfg, processes.count)
            raise UserError(f"there is not enough memory for this run: {advice}") from error


def how_to_save_memory(cfg: DictConfig, processes: int) -> str:
    """Return what to add to the command of a run that needs more memory than there is."""
    halved = cfg.train.batch % (processes * 2 * cfg.train.accumulate) == 0
    savers = [f"train.accumulate={2 * cfg.train.accumulate}"] * halved
    savers += ["model.activation_checkpointing=true"] * (not cfg.model.activation_checkpointing)
    add = f"add {' or '.join(savers)} to the command ({how_to_continue(cfg, 'that command')}), or "
    return f"{add if savers else ''}train a smaller model"


def announce(cfg: DictConfig, model: LM, where: str) -> None:
    """Print the attention, the model's number of parameters, the implementation, and `where` it is trained."""
    how = f"impl {implementation(cfg, model)}, on {where}"
    print(f"{cfg.job.attn}: {parameter_count(model):,} parameters, {how}", flush=True)
    if cfg.model.layers == 1 and cfg.ffn and cfg.attn.get("residual_attention", "none") != "none":
        print("attn.residual_attention has no effect in one layer: take model.layers=2 or more", flush=True)


def in_short(summary: dict, record: Record) -> str:
    """Return a line that describes a run which was already finished."""
    note = "" if same_code(summary) else " with other code (resume=false trains it anew)"
    fit = summary["evaluation"]["fit"]["perplexity"]
    return f"finished before{note}: {summary['name']}, fit perplexity {fit:.2f}, {record.folder}"


def implementation(cfg: DictConfig, model: LM) -> str:
    """Return attn.impl and, if it is torch, the algorithms that the layers use at this context length."""
    impl = str(cfg.attn.get("impl"))
    algorithms = model.algorithms(cfg.model.context)
    return f"{impl} ({', '.join(sorted(algorithms))})" if impl == "torch" and algorithms else impl


def print_sweep(folders: list[Path]) -> None:
    """Print the finished runs of a sweep, the one with the best fit first."""
    print("\nfinished runs of this sweep, by fit perplexity:\n")
    print_runs(map(Record, dict.fromkeys(folders)), "fit")


@main("config", after_sweep=print_sweep)
def run(cfg: DictConfig) -> Result | None:
    """Train a model and return its fit loss, which Hydra sweepers can minimise."""
    summary = train(cfg)
    return None if summary is None else Result(summary["evaluation"]["fit"]["loss"], Record.of(cfg).folder)


if __name__ == "__main__":
    run()
    leave()
