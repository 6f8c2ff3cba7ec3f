"""Start a run with the vocabulary and the weights of another run."""

from pathlib import Path

import torch
from omegaconf import DictConfig, open_dict

from configs.checking import shown
from configs.folder import flat
from data.examine import hash_of
from data.files import UserError
from data.reading import read_tensors
from models.build import build_model
from models.lm import LM
from training.loading import load_run, load_weights
from training.record import Record, read_config
from training.settings import differing

# A run and the run that its train.init_from names must have the same values of all keys that `differing` compares and
# that begin with one of PARTS. Keys in FREE may differ, because they do not change what given weights compute in
# evaluation.
PARTS = ("model.", "attn.", "ffn.", "data.vocab_size")
FREE = (
    "model.init_std",
    "model.scaled_init",
    "model.output_scale",
    "model.dropout",
    "attn.impl",
    "attn.position_weight.initial_f",
    "attn.initial_head_mix",
    "attn.head_mix_scale",
    "attn.initial_scale",
)


def take_vocabulary(cfg: DictConfig) -> list[str | None] | None:
    """Return the vocabulary of the run that train.init_from names, or None if it names none.

    The run's name and the sha256 of its weights are written to cfg.job.init_from. Raises UserError if train.init_from
    names no finished run, a run of another model, or a run with missing or damaged files.
    """
    if cfg.train.init_from is None:
        return None
    folder = Path(cfg.train.init_from)
    record = Record(folder)
    if record.finished_with_weights() is None:
        raise UserError(f"train.init_from={folder} holds no finished run: give a folder that train.py printed")
    run = load_run(folder)
    ours, theirs = flat(cfg, resolve=True), flat(run.cfg, resolve=True)
    for key in differing(run.cfg, cfg):
        if key.startswith(PARTS) and key not in FREE:
            here, there = (shown(values.get(key)) for values in (ours, theirs))
            raise UserError(f"train.init_from={folder} is a run with {key}={there}: got {key}={here}")
    with open_dict(cfg):
        cfg.job.init_from = {"run": record.name, "weights_sha256": hash_of(record.model)}
    print(f"the initial weights and the vocabulary are those of {record.name}", flush=True)
    return run.vocabulary


def check_unchanged(record: Record, cfg: DictConfig) -> None:
    """Raise UserError if the run in `record` was begun with other weights than train.init_from holds now."""
    if cfg.train.init_from is not None and record.config.exists():
        begun = read_config(record).job.get("init_from")
        if begun != cfg.job.init_from:
            raise UserError(
                f"{record.folder} was begun with other weights than those that are now in train.init_from="
                f"{cfg.train.init_from}: resume=false starts it again"
            )


def initial_model(cfg: DictConfig, vocabulary: int) -> LM:
    """Return the model of a run before the first step, for a vocabulary of `vocabulary` symbols."""
    torch.manual_seed(cfg.seed)
    model = build_model(cfg, vocabulary)
    if cfg.train.init_from is not None:
        path = Record(Path(cfg.train.init_from)).model
        load_weights(model, read_tensors(path), path)
    return model
