"""A run's folder: what it holds, and how it stays whole whatever happens.

config.yaml          the resolved config
metrics.jsonl        a line per logged step
summary.json         how it ended, and what it came from
loss_by_position.json    the mean loss at each position, for the training text and the held-out text
vocabulary.json, text.safetensors, model.safetensors    what evaluate.py needs
state.pt             what a continued run needs; gone when the run is finished
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import subprocess
import zipfile
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor
from yaml import YAMLError

from data.examine import hash_of
from data.files import UserError, out_of_memory, remove, write_bytes, write_json

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "numpy", "adabelief-pytorch", "hydra-core", "datasets", "triton", "wandb")


class Record:
    """The files of one run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config, self.metrics, self.summary = (folder / n for n in ("config.yaml", "metrics.jsonl", "summary.json"))
        self.positions = folder / "loss_by_position.json"
        self.vocabulary, self.text = folder / "vocabulary.json", folder / "text.safetensors"
        self.model, self.state = folder / "model.safetensors", folder / "state.pt"
        self.lock = folder / ".lock"

    @classmethod
    def of(cls, cfg: DictConfig) -> "Record":
        """The record of the run that a config describes."""
        return cls(Path(cfg.runs, cfg.job.experiment, cfg.job.name))

    def start(self, cfg: DictConfig) -> None:
        """Begin anew: forget what an earlier run left here."""
        for path in (self.summary, self.positions, self.model, self.state, self.metrics):
            remove(path)
        write_bytes(self.config, OmegaConf.to_yaml(cfg, resolve=True).encode())
        write_bytes(self.metrics, b"")

    def save_text(self, vocabulary: list[str | None], text: dict[str, Tensor]) -> None:
        """Write what an evaluation needs of the text."""
        write_json(self.vocabulary, vocabulary)
        write_bytes(self.text, tensor_bytes(text))

    @contextlib.contextmanager
    def alone(self):
        """Keep every other process from training this run until the block ends, or this process does.

        What a killed process left half written is removed. Raises UserError where another one trains the run.
        """
        with self.locked() as file:
            try:
                for half in self.folder.glob(".*.tmp"):
                    remove(half)
                try:
                    file.truncate(0)
                    file.write(f"process {os.getpid()} on {platform.node()}".encode())
                except OSError as error:
                    raise UserError(f"cannot write {self.lock}: {error.strerror}") from error
                yield
            finally:
                self.lock.unlink(missing_ok=True)

    def locked(self) -> io.FileIO:
        """The lock's file, open and held until it is closed; not one that who held it has removed meanwhile."""
        while True:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                file = open(self.lock, "ab+", buffering=0)  # noqa: SIM115, closed by who calls
            except OSError as error:
                raise UserError(f"cannot write {self.folder}: {error.strerror}") from error
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                with file:
                    file.seek(0)
                    other = file.read().decode() or "another process"
                    raise UserError(f"{self.folder} is being trained by {other}") from error
            except OSError:
                print(f"{self.folder} lies where files cannot be locked: train it but once at a time", flush=True)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self.lock)):
                    return file
            file.close()

    def tidy(self) -> None:
        """Remove what a process left that was killed when it had finished the run but for that."""
        if self.state.exists() or any(self.folder.glob(".*")):
            with contextlib.suppress(UserError, OSError), self.alone():
                self.state.unlink(missing_ok=True)

    def finished(self) -> dict | None:
        """The summary of a run that came to its end here, weights and all; else None."""
        if not (self.model.exists() and self.summary.exists()):
            return None
        summary = read_object(self.summary)
        return summary if summary.get("status") == "finished" else None

    def without_weights(self) -> bool:
        """Whether the run came to its end elsewhere or its weights were deleted, as of a run that is committed."""
        return (
            self.summary.exists()
            and read_object(self.summary).get("status") == "finished"
            and not (self.model.exists() or self.state.exists())
        )

    def log(self, row: dict) -> None:
        """Append a line to metrics.jsonl: all of it or nothing."""
        size = self.metrics.stat().st_size
        try:
            with open(self.metrics, "a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            os.truncate(self.metrics, size)
            raise UserError(f"cannot write {self.metrics}: {error.strerror}") from error

    def rows(self) -> list[dict]:
        try:
            rows = [json.loads(line) for line in self.metrics.read_text().splitlines()]
            if not all(isinstance(row, dict) for row in rows):
                raise ValueError("a line is no object")
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{self.metrics} is damaged: resume=false starts the run again") from error
        summary = read_object(self.summary) if self.summary.exists() else {}
        reached = rows[-1].get("step") if rows else 0
        if summary.get("status") == "finished" and summary.get("steps", reached) != reached:
            raise UserError(f"{self.metrics} is cut short: it does not reach step {summary.get('steps')}")
        return rows

    def read_vocabulary(self) -> list[str | None]:
        vocabulary = read_json(self.vocabulary)
        symbols = vocabulary if isinstance(vocabulary, list) else [""]
        if not all(symbol is None or (isinstance(symbol, str) and len(symbol) == 1) for symbol in symbols):
            raise UserError(f"{self.vocabulary} is damaged: it is not a list of characters")
        return vocabulary

    def save_model(self, weights: dict[str, Tensor]) -> str:
        """Write the weights; gives the sha256 of the file, which holds no checksum of its own."""
        content = tensor_bytes({k: v.detach().cpu().contiguous() for k, v in weights.items()})
        write_bytes(self.model, content)
        return hashlib.sha256(content).hexdigest()

    def save_state(self, state: dict) -> None:
        """The state, and with it whose it is and how long metrics.jsonl is."""
        buffer = io.BytesIO()
        torch.save(state | {"run": self.name, "metrics_bytes": self.metrics.stat().st_size}, buffer)
        write_bytes(self.state, buffer.getvalue())

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    def read_state(self) -> dict:
        try:
            with zipfile.ZipFile(self.state) as archive:
                if archive.testzip() is not None:  # which torch does not look at
                    raise ValueError("a part's checksum is wrong")
            state = torch.load(self.state, map_location="cpu", weights_only=True)
            if not (isinstance(state, dict) and {"step", "model", "optimizer", "metrics_bytes"} <= state.keys()):
                raise ValueError("it is no state")
            return state
        except OSError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
        except Exception as error:
            if out_of_memory(error):
                raise
            raise UserError(f"{self.state} is damaged: resume=false starts the run again") from error

    def load_state(self) -> dict:
        """The state; metrics.jsonl goes back to where it was then."""
        state = self.read_state()
        if state.get("run", self.name) != self.name:
            raise UserError(f"{self.state} is the state of {state['run']}: resume=false starts the run again")
        try:
            there, needed = self.metrics.stat().st_size, state["metrics_bytes"]
            if there > needed:
                os.truncate(self.metrics, needed)
        except OSError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
        if there < needed:
            raise UserError(f"{self.metrics} has lost lines: resume=false starts the run again")
        return state


def read_json(path: Path):
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: it is not JSON") from error


def read_object(path: Path) -> dict:
    """A JSON file that holds names and values."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object")
    return content


def read_config(path: Path) -> DictConfig:
    """The config of a run, whose last part is its name: without that its end is missing."""
    try:
        cfg = OmegaConf.load(path)
        whole = isinstance(cfg, DictConfig) and OmegaConf.select(cfg, "job.name") is not None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (YAMLError, ValueError, RecursionError, OmegaConfBaseException) as error:
        raise UserError(f"{path} is damaged: it is not YAML") from error
    if not whole:
        raise UserError(f"{path} is damaged: it is not the whole config of a run")
    return cfg


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_tensors(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except SafetensorError as error:
        raise UserError(f"{path} is damaged: it is not a safetensors file") from error


def provenance(device: torch.device, command: str) -> dict:
    """What a figure needs beside it to be trusted: command, commit, device, versions."""
    return {
        "command": command,
        **code(),
        "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "versions": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
    }


def code() -> dict:
    """Which code this is: the commit, and a sha256 that changes with what is not committed, results apart, or None."""
    here = ("-z", "--", ".", ":!results")
    listed = git("diff", "--name-only", "HEAD", *here), git("ls-files", "--others", "--exclude-standard", *here)
    names = sorted({name for names in listed for name in (names or "").split("\0") if name})
    contents = {name: hash_of(ROOT / name) if is_code(ROOT / name) else None for name in names}
    changes = hashlib.sha256(json.dumps(contents).encode()).hexdigest() if names else None
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(names), "changes": changes}


def is_code(path: Path) -> bool:
    return path.suffix in (".py", ".yaml") and path.is_file()


def git(*arguments: str) -> str | None:
    """What git says of this repository; None without git or a repository."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        return models[0].split(":", 1)[1].strip()
    except (OSError, IndexError):
        return platform.machine()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
