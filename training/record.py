"""The folder of a run: its files, how they are checked when they are read, and how they survive a crash.

config.yaml          the resolved config
metrics.jsonl        one line for each logged step
summary.json         the status, command, commit, device and text of the run, and its final figures if it is finished
loss_by_position.json    the mean loss at each position, for the training text and the held-out text
f.json               the learned factor f of the position weight w in the first layer, for each head and distance
vocabulary.json, text.safetensors, model.safetensors    the characters, the ids of the evaluated text, and the weights
state.pt             the state from which an interrupted run continues; deleted when the run is finished
evaluation*.json     what evaluate.py measured on these weights
position_weight.json, lengths.json    what a claim needs beside the summary (scripts/studies/claims.py)
"""

import contextlib
import errno
import json
import os
import platform
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml
from filelock import Timeout
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from safetensors.torch import save as tensor_bytes
from safetensors.torch import save_file
from torch import Tensor

from data.examine import hash_of
from data.files import (
    UserError,
    as_user_error,
    finite,
    locked,
    out_of_memory,
    regular,
    remove,
    remove_temporaries,
    replacing,
    sync,
    unlinked,
    write_bytes,
    write_json,
)
from data.reading import NUMBER, OR_NULL, TEXT, WHOLE, misfit, read_bytes, read_json, read_object
from training import metrics

OmegaConfLoader = get_yaml_loader()
# Files that other commands than train.py write about the weights of a run.
MEASURED = ("evaluation*.json", "position_weight.json", "lengths.json")
DEEPEST = 50  # levels of nesting in a config

# What the files hold, as the argument `types` of misfit().
SCORE = {
    **dict.fromkeys(("loss", "perplexity", "bits_per_character?", "bits_per_byte?", "accuracy?"), NUMBER),
    **dict.fromkeys(("characters", "answers?"), WHOLE),
}
EVALUATION = {
    **dict.fromkeys(("fit", "heldout?", "sliding?"), SCORE),
    "heldout_best?": {"step": WHOLE, "perplexity": NUMBER},
    "tokens_per_second": NUMBER + OR_NULL,
}
CONFIG = {"job": {"name": TEXT, "experiment?": TEXT, "attn?": TEXT}}
CODE = {"commit": TEXT + OR_NULL, "dirty": (bool,)}
SUMMARY = {
    "status": TEXT,
    **dict.fromkeys(("experiment", "name", "attn", "precision", "device", "command"), TEXT),
    **dict.fromkeys(("seed", "steps", "tokens", "parameters"), WHOLE),
    **dict.fromkeys(("training_seconds", "lr?", "flops_per_step?", "state_bytes?"), NUMBER),
    "tokens_per_second": NUMBER + OR_NULL,
    **CODE,
    "text_sha256?": TEXT,
    "weights_of_step?": WHOLE,
    "init_from?": {"run": TEXT, "weights_sha256": TEXT},
    "earlier_code?": [CODE],
    "earlier_devices?": [{"from_step": WHOLE, "device": TEXT, "torch": TEXT + OR_NULL}],
    "earlier_threads?": [{"from_step": WHOLE, "threads": WHOLE}],
    "data": {
        **dict.fromkeys(("name", "sha256"), TEXT),
        **dict.fromkeys(("characters", "unique", "vocabulary"), WHOLE),
        "holdout": NUMBER,
    },
    "versions": {"torch": TEXT + OR_NULL},
}
STATE = {
    **dict.fromkeys(("step", "metrics_bytes"), WHOLE),
    **dict.fromkeys(("model", "optimizer"), (dict,)),
    "run?": TEXT,
}
RESUMED = {
    "loss_sum": (Tensor,),
    "loss_count": WHOLE,
    "seconds": NUMBER,
    "data": TEXT,
    "precision?": TEXT,
    "first_row?": TEXT,
    "devices_used?": [{"from_step": WHOLE, "device": TEXT, "torch": TEXT + OR_NULL}],
    "threads_used?": [{"from_step": WHOLE, "threads": WHOLE}],
    "trained_by?": [{"from_step": WHOLE} | CODE],
    "best?": {"step": WHOLE, "loss": NUMBER, "weights": (dict,)},
}


class Record:
    """The files of one run, in its folder. `place` is what holds them: the folder, or the file of a packed run."""

    def __init__(self, folder: Path):
        self.folder = self.place = folder
        self.experiment_folder = folder.parent
        self.config, self.metrics, self.summary = (folder / n for n in ("config.yaml", "metrics.jsonl", "summary.json"))
        self.loss_by_position, self.f = folder / "loss_by_position.json", folder / "f.json"
        self.vocabulary, self.text = folder / "vocabulary.json", folder / "text.safetensors"
        self.model, self.state = folder / "model.safetensors", folder / "state.pt"
        self.lock = folder / ".lock"

    @classmethod
    def of(cls, cfg: DictConfig) -> "Record":
        """Return the record of the run that a config describes."""
        return cls(Path(cfg.runs, cfg.job.experiment, cfg.job.name))

    def start(self, cfg: DictConfig) -> None:
        """Delete the files of an earlier run, except its vocabulary and text.

        Write the config and an empty metrics.jsonl.
        """
        self.remove_measurements()
        for path in (self.summary, self.loss_by_position, self.f, self.model, self.state, self.metrics):
            remove(path)
        sync(self.folder)
        write_bytes(self.config, OmegaConf.to_yaml(cfg, resolve=True).encode())
        write_bytes(self.metrics, b"")

    def remove_measurements(self) -> None:
        """Delete what was measured on the weights of this run, which are about to change."""
        for pattern in MEASURED:
            for path in self.folder.glob(pattern):
                remove(path)

    def save_text(self, vocabulary: list[str | None], text: dict[str, Tensor]) -> None:
        """Write the vocabulary and the ids of the text on which the run is evaluated, which evaluate.py reads."""
        write_json(self.vocabulary, vocabulary)
        write_bytes(self.text, tensor_bytes(text))

    @contextlib.contextmanager
    def alone(self):
        """Keep other processes from training this run until the block or this process ends.

        Deletes half-written files of killed processes. Raises UserError if another process trains the run.
        """
        unsafe = f"{self.folder} cannot be locked: do not train this run in two processes at once"
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locked(self.lock, unsafe))
                remove_temporaries(self.folder)
                with open(self.lock, "wb", opener=unlinked) as file:
                    file.write(f"process {os.getpid()} on {platform.node()}".encode())
            except Timeout as error:
                other = ""
                with contextlib.suppress(OSError), open(self.lock, "rb", opener=unlinked) as file:
                    other = file.read(100).decode(errors="replace")
                raise UserError(f"{self.folder} is being trained by {other or 'another process'}") from error
            except OSError as error:
                raise UserError(f"cannot write {error.filename or self.lock}: {error.strerror or error}") from error
            yield

    def tidy(self) -> None:
        """Delete leftovers of a process that was killed after finishing the run but before cleaning up."""
        if self.state.exists() or any(self.folder.glob(".*")):
            with contextlib.suppress(UserError, OSError), self.alone():
                self.state.unlink(missing_ok=True)

    def finished_with_weights(self) -> dict | None:
        """Return the summary if the run is finished and its weights are in the folder; else None."""
        if not (self.model.exists() and self.summary.exists()):
            return None
        summary = self.read_summary()
        return summary if summary["status"] == "finished" else None

    def has(self, path: Path) -> bool:
        """Return whether the run has this file."""
        return path.exists()

    def read_object(self, path: Path) -> dict:
        return read_object(path)

    def read_config(self) -> dict:
        return read_yaml(self.config)

    def each_row(self) -> Iterator[dict]:
        return metrics.each_row(self.metrics)

    def lines(self) -> list[bytes]:
        """Return the complete rows that were logged as lines of JSON, which metrics.parse() reads."""
        return list(metrics.complete_lines(self.metrics))

    def last_row(self) -> dict:
        """Return the last logged row, or an empty dict."""
        return next(iter(metrics.last_rows(self.metrics, 1)), {})

    def rows(self) -> list[dict]:
        """Return the logged rows. Raises UserError if a finished run lacks its last step."""
        rows = list(self.each_row())
        self.check_reached(rows[-1].get("step", 0) if rows else 0)
        return rows

    def check_reached(self, step: int) -> None:
        """Raise UserError if the run is finished and `step`, the last logged one, is not its last step."""
        summary = self.read_summary(whole=False) if self.has(self.summary) else {}
        if summary.get("status") == "finished" and summary.get("steps", step) != step:
            raise UserError(f"{self.metrics} is cut short: it does not reach step {summary['steps']}")

    def read_vocabulary(self) -> list[str | None]:
        vocabulary = read_json(self.vocabulary)
        symbols = vocabulary if isinstance(vocabulary, list) else [""]
        known = symbols[:-1] if symbols[-1:] == [None] else symbols  # the unknown symbol comes last
        if not all(isinstance(symbol, str) and len(symbol) == 1 for symbol in known):
            raise UserError(f"{self.vocabulary} is damaged: it is not a list of characters")
        return vocabulary

    def save_model(self, weights: dict[str, Tensor]) -> str:
        """Write the weights and return the sha256 of the file."""
        with replacing(self.model) as temporary:
            try:
                save_file({k: v.detach().cpu().contiguous() for k, v in weights.items()}, temporary)
            except SafetensorError as error:  # raised when the disk is full
                raise OSError(errno.EIO, str(error)) from error
            return hash_of(temporary)

    def save_f(self, f: Tensor) -> None:
        """Write a learned f [heads, distances], rounded to four significant digits."""
        values = finite([[float(f"{value:.4g}") for value in head] for head in f.tolist()])
        write_bytes(self.f, f"{json.dumps({'f': values}, separators=(',', ':'))}\n".encode())

    def save_state(self, state: dict) -> None:
        """Write the state, with the name of the run and the length, hash and first row of its metrics.jsonl.

        The first row shows whether a metrics.jsonl belongs to the state, even if a power cut has removed the last rows.
        The length says where the rows after the state begin, and the hash shows whether those before it are intact.
        """
        with as_user_error(f"cannot write {self.state}"):
            sync(self.metrics)
            rows = {"metrics_bytes": self.metrics.stat().st_size, "metrics_sha256": hash_of(self.metrics)}
        whole = state | {"run": self.name, "first_row": metrics.first_line(self.metrics)} | rows
        with replacing(self.state) as temporary, open(temporary, "xb") as file:
            try:
                torch.save(whole, file)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # torch goes on after this error and raises another one
                    raise error.__context__ from None
                raise

    def save_summary(self, summary: dict) -> None:
        """Write the summary once metrics.jsonl is on the disk."""
        with as_user_error(f"cannot write {self.summary}"):
            sync(self.metrics)
        write_json(self.summary, summary)

    def read_summary(self, whole: bool = True) -> dict:
        """Return the run's summary.

        Raises UserError for a value of a wrong type or, with `whole`, if a finished run lacks a value.
        """
        summary = self.read_object(self.summary)
        finished = summary.get("status") == "finished"
        evaluation = {"evaluation": EVALUATION} if finished or isinstance(summary.get("evaluation"), dict) else {}
        if wrong := misfit(summary, SUMMARY | evaluation, whole and finished):
            raise UserError(f"{self.summary} is damaged: {wrong}")
        return summary

    @property
    def experiment(self) -> str:
        return self.experiment_folder.absolute().name  # absolute, for a folder given without its parent

    @property
    def name(self) -> str:
        return f"{self.experiment}/{self.folder.name}"

    def read_state(self) -> dict:
        try:
            with open(self.state, "rb", opener=regular) as file:
                with zipfile.ZipFile(file) as archive:
                    if sum(part.file_size for part in archive.infolist()) > os.fstat(file.fileno()).st_size:
                        raise ValueError("it unpacks to more than it holds")  # torch does not compress
                    if archive.testzip() is not None:  # torch does not check this
                        raise ValueError("a part's checksum is wrong")
                file.seek(0)
                state = torch.load(file, map_location="cpu", weights_only=True)
            if not isinstance(state, dict) or misfit(state, STATE):
                raise ValueError("it holds no state")
            return state
        except Exception as error:
            if out_of_memory(error):
                raise
            if isinstance(error, OSError) and error.filename is not None:
                raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
            # A wrong offset in a damaged file also gives an OSError, which has no file name.
            raise UserError(f"{self.state} is damaged: resume=false trains the run anew") from error

    def load_state(self) -> dict:
        """Return the state, and remove the rows of metrics.jsonl that come after the state's step."""
        state = self.read_state()
        if wrong := misfit(state, RESUMED):
            raise UserError(f"{self.state} is damaged, {wrong}: resume=false trains the run anew")
        if state.get("run", self.name) != self.name:
            raise UserError(f"{self.state} is the state of {state['run']}: resume=false trains the run anew")
        if metrics.of_another_run(self.metrics, state.get("first_row", "")):
            what = f"{self.metrics} and {self.state.name} are of different runs"
            raise UserError(f"{what}: resume=false trains this run anew")
        size = state["metrics_bytes"]
        with as_user_error(f"cannot write {self.metrics}"):
            with open(self.metrics, "ab", opener=unlinked) as file:  # creates the file if it was lost
                file.truncate(min(size, os.fstat(file.fileno()).st_size))
            if hash_of(self.metrics) != state.get("metrics_sha256"):  # only then read it line by line
                metrics.repair(self.metrics, state["step"], size)
        return state


def read_yaml(path: Path) -> dict:
    """Return the config of a run as a dict. Raises UserError if it is damaged."""
    text = read_bytes(path)
    # "\uDC.." is a byte of a file name that the locale cannot decode; libyaml cannot read it.
    loader = OmegaConfLoader if b"\\uDC" in text else ConfigLoader
    depth = 0
    try:
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            # Configs of this project contain no aliases, but a file that was made to exhaust the memory does.
            if isinstance(event, yaml.AliasEvent) or depth > DEEPEST:
                raise ValueError("an alias, or too deep")
        config = yaml.load(text, loader)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML raises a KeyError, which is a LookupError, for values such as `!!bool x`.
        raise UserError(f"{path} is damaged: it is not YAML that train.py writes") from error
    if not (isinstance(config, dict) and isinstance(job := config.get("job"), dict) and job.get("name") is not None):
        raise UserError(f"{path} is damaged: it is not the whole config of a run")
    if wrong := misfit(config, CONFIG):
        raise UserError(f"{path} is damaged: {wrong}")
    try:
        json.dumps(config)
    except (TypeError, ValueError) as error:  # YAML has dates and bytes, JSON has not
        raise UserError(f"{path} is damaged: {error}") from error
    return config


class ConfigLoader(yaml.CSafeLoader):
    """Load YAML that OmegaConf wrote, twenty times faster than OmegaConf does."""

    yaml_implicit_resolvers = OmegaConfLoader.yaml_implicit_resolvers


def read_config(record: Record) -> DictConfig:
    """Return the config of a run."""
    try:
        return OmegaConf.create(record.read_config())
    except OmegaConfBaseException as error:
        raise UserError(f"{record.config} is damaged: it is not YAML that train.py writes") from error
