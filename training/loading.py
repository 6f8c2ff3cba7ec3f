"""Load a trained run from its folder."""

from pathlib import Path
from typing import NamedTuple

import torch
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from configs.checking import check_recorded
from configs.cli import compose
from configs.naming import NOTHING_CHOSEN
from data.examine import hash_of
from data.files import UserError
from data.reading import read_object, read_tensors
from models.build import build_model
from models.lm import LM
from models.sampling import DEFAULT, Sampler, characters, ids_of
from training.device import without_triton
from training.record import Record, read_config
from training.settings import differing


class LoadedRun(NamedTuple):
    """A trained run.

    `text` is what `training.evaluation.evaluate` calls `text`. It is {} for committed weights, which have no text.
    """

    cfg: DictConfig
    model: LM
    text: dict[str, Tensor]
    vocabulary: list[str | None]

    def write(self, prompt: str, length: int, sampler: Sampler = DEFAULT, seed: int = 0) -> str:
        """Return `prompt` and `length` characters that the model writes after it.

        Raises UserError if the prompt is empty or holds characters that the model does not know.
        """
        ids, context = ids_of(prompt, self.vocabulary, None), self.cfg.model.context
        drawn = characters(self.model.eval(), self.vocabulary, [ids], length, sampler, seed, context)
        return prompt + "".join(character for (character,) in drawn)


def load_run(folder: str | Path) -> LoadedRun:
    """Load a run from its folder. The files of its corpus and the run of train.init_from are not read.

    If the run is not finished, the model is that of its last state. The model is on the CPU; where no GPU is, it has
    impl=torch instead of impl=triton. Raises UserError if a file is missing or damaged, or belongs to another run.
    """
    record = Record(Path(folder))
    if not record.config.exists():
        raise UserError(f"{folder} holds no run: give the folder that train.py printed at its end")
    if not record.model.exists() and not record.state.exists():
        raise UserError(f"{folder} holds no model: run the command in its config.yaml with resume=false")
    cfg = config_of(record)
    vocabulary = record.read_vocabulary()
    model = build_model(cfg, len(vocabulary))
    if not torch.cuda.is_available():
        without_triton(model)
    if not record.model.exists():
        state, ours = record.read_state(), f"{cfg.job.experiment}/{cfg.job.name}"
        if state.get("run", ours) != ours:
            raise UserError(f"{record.state} is the state of {state['run']}, not of {ours}")
        print(f"{folder} is not finished: taking its state after step {state['step']}", flush=True)
        load_weights(model, state["model"], record.state)
        return LoadedRun(cfg, model, read_text(record, len(vocabulary)), vocabulary)
    load_weights(model, read_tensors(record.model), record.model)
    summary = read_object(record.summary) if record.summary.exists() else {}
    # scripts/pack_runs.py writes weights without a text.
    left_out = "text_sha256" not in summary and not record.text.exists()
    text = {} if left_out else read_text(record, len(vocabulary))
    for path, what in ((record.model, "weights"), (record.vocabulary, "vocabulary"), (record.text, "text")):
        sha256 = summary.get(f"{what}_sha256")
        if sha256 is not None and sha256 != hash_of(path):
            raise UserError(f"{path} is damaged: its sha256 is not the one in {record.summary.name}")
    return LoadedRun(cfg, model, text, vocabulary)


def finished_before(record: Record, cfg: DictConfig, sha256: str) -> dict | None:
    """Return the summary of a finished run, or None if the run is still to be trained.

    Raises UserError if the folder holds another finished run, or one of another text or config, or one without weights.
    """
    summary = record.finished_with_weights()
    if summary is None:
        done = record.summary.exists() and read_object(record.summary).get("status") == "finished"
        if done and not (record.model.exists() or record.state.exists()):
            raise UserError(f"{record.folder} is a finished run without its weights: resume=false trains it anew")
        return None
    if summary["data"]["sha256"] != sha256:
        raise UserError(f"{record.folder} was trained on another text: resume=false trains it anew")
    if differs := differing(config_of(record), cfg):
        raise UserError(f"{record.folder} was trained with another {differs[0]}: resume=false trains it anew")
    ours, theirs = (cfg.job.experiment, cfg.job.name), (summary["experiment"], summary["name"])
    if theirs != ours:
        raise UserError(f"{record.summary} is of {'/'.join(theirs)}: resume=false trains the run anew")
    return summary


def config_of(record: Record) -> DictConfig:
    """Return the config of a run.

    Keys of model, optim, train and evaluation that it lacks get their defaults, and so do those of attn and ffn if its
    attention and its experiment still exist.
    """
    cfg = read_config(record)
    try:
        # The keys that the run lacks were added after it was made, so it took none of them from a file of
        # configs/starts or configs/rates. These groups are therefore left out.
        usual = compose([f"attn={cfg.job.attn}", f"experiment={cfg.job.experiment}", *NOTHING_CHOSEN])
        known = True
    except (HydraException, OmegaConfBaseException, ValueError):  # its attention or experiment no longer exists
        others, known = compose([]), False
        usual = OmegaConf.masked_copy(others, [part for part in others if part not in ("attn", "ffn")])
    for part in ("model", "attn", "ffn", "optim", "train", "evaluation", "data"):
        if not isinstance(cfg.get(part), DictConfig):
            raise UserError(f"{record.config} is damaged: it holds no {part}")
    if known and not cfg.ffn:  # ffn=attention
        usual.ffn = {}
    for part in ("model", "optim", "train", "evaluation", *(("attn", "ffn") if known else ())):
        add_missing(cfg[part], usual[part])
    check_recorded(cfg, usual, f"{record.config} is damaged")
    return cfg


def add_missing(given: DictConfig, usual: DictConfig) -> None:
    """Add the keys of `usual` that `given` lacks, also in nested parts, except in parts that are of another class."""
    if given.get("_target_") != usual.get("_target_"):  # for example attn/position_weight=channel_decay
        return
    for key, value in usual.items():
        if key not in given:
            given[key] = value
        elif isinstance(value, DictConfig) and isinstance(given[key], DictConfig):
            add_missing(given[key], value)


def read_text(record: Record, vocabulary: int) -> dict[str, Tensor]:
    """Return the text on which a run is evaluated. Raises UserError if it is damaged."""
    text = read_tensors(record.text)
    dims = {name: tensor.dim() for name, tensor in text.items() if tensor.numel()}
    expected = {"fit": 2, "utf8_bytes": 1} | {name: 1 for name in ("heldout", "keys") if name in text}
    integral = not any(tensor.is_floating_point() for name, tensor in text.items() if name != "utf8_bytes")
    if not integral or dims != expected:
        raise UserError(f"{record.text} is damaged: it does not hold token ids and the byte count of each symbol")
    ids = [text[name].int() for name in text.keys() - {"utf8_bytes"}]
    if len(text["utf8_bytes"]) != vocabulary or not all(0 <= each.min() <= each.max() < vocabulary for each in ids):
        raise UserError(f"{record.text} is of another text: its symbols do not fit the model's vocabulary")
    return text


def load_weights(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Load weights into a model. Raises UserError, which names their file, if they belong to another model."""
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"{path} holds the weights of another model") from error
