"""A run's folder: what it holds, and how it stays whole whatever happens.

config.yaml          the resolved config
metrics.jsonl        a line per logged step
summary.json         how it ended, and what it came from
loss_by_position.json    the mean loss at each position, for the training text and the held-out text
f.json               the learned f of each head of the first layer, by distance, where the attention has one
vocabulary.json, text.safetensors, model.safetensors    what evaluate.py needs
state.pt             what a continued run needs; gone when the run is finished
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import reprlib
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import BinaryIO

import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes
from safetensors.torch import save_file
from torch import Tensor

from data.examine import hash_of
from data.files import (
    UserError,
    make_folder,
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

ROOT = Path(__file__).parents[1]
OmegaConfLoader = get_yaml_loader()
CHUNK = 1 << 16  # bytes of metrics.jsonl at a time
LARGEST_TEXT = 1 << 26  # bytes of a config, a summary, a vocabulary, a line of metrics: far more than any has
LARGEST_METRICS = 1 << 30  # bytes of metrics.jsonl that are read at once: millions of rows
DEEPEST = 50  # parts of a config within one another
NUMBER_IN_JSON = rb"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?"
# A line of metrics.jsonl that holds numbers alone, as nearly all do: it can be read, and need not be parsed to know it.
NUMBERS_ALONE = re.compile(rb'\{"step": (0|[1-9]\d*)(?:, "\w+": ' + NUMBER_IN_JSON + rb")*\}\n")

# What the files of a run hold: types, dicts of them, or a list of such dicts. "?" marks what need not be there.
TEXT, WHOLE, NUMBER, OR_NULL = (str,), (int,), (int, float), (NoneType,)
SCORE = {"loss": NUMBER, "perplexity": NUMBER, "characters": WHOLE}
CONFIG = {"job": {"name": TEXT, "experiment?": TEXT, "attn?": TEXT}}
CODE = {"commit": TEXT + OR_NULL, "dirty": (bool,)}
SUMMARY = {
    "status": TEXT,
    **dict.fromkeys(("experiment", "name", "attn", "precision", "device", "command"), TEXT),
    **dict.fromkeys(("seed", "steps", "tokens", "parameters"), WHOLE),
    "training_seconds": NUMBER,
    "tokens_per_second": NUMBER + OR_NULL,
    **CODE,
    "earlier_code?": [CODE],
    "earlier_threads?": [{"from_step": WHOLE, "threads": WHOLE}],
    "data": {
        **dict.fromkeys(("name", "sha256"), TEXT),
        **dict.fromkeys(("characters", "unique", "vocabulary"), WHOLE),
        "holdout": NUMBER,
    },
    "versions": {"torch": TEXT + OR_NULL},
}
EVALUATION = {"fit": SCORE, "heldout?": SCORE, "sliding?": SCORE, "tokens_per_second": NUMBER + OR_NULL}
STATE = {
    **dict.fromkeys(("step", "metrics_bytes"), WHOLE),
    **dict.fromkeys(("model", "optimizer"), (dict,)),
    "run?": TEXT,
}
RESUMED = {
    **dict.fromkeys(("loss_sum", "rng"), (Tensor,)),
    "cuda_rng": (Tensor, NoneType),
    "loss_count": WHOLE,
    "seconds": NUMBER,
    "data": TEXT,
    "precision?": TEXT,
    "threads_used?": [{"from_step": WHOLE, "threads": WHOLE}],
    "trained_by?": [{"from_step": WHOLE} | CODE],
}
CALLED = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}

PACKAGES = ("torch", "numpy", "adabelief-pytorch", "hydra-core", "datasets", "triton", "wandb")


class Record:
    """The files of one run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config, self.metrics, self.summary = (folder / n for n in ("config.yaml", "metrics.jsonl", "summary.json"))
        self.positions, self.f = folder / "loss_by_position.json", folder / "f.json"
        self.vocabulary, self.text = folder / "vocabulary.json", folder / "text.safetensors"
        self.model, self.state = folder / "model.safetensors", folder / "state.pt"
        self.lock = folder / ".lock"

    @classmethod
    def of(cls, cfg: DictConfig) -> "Record":
        """The record of the run that a config describes."""
        return cls(Path(cfg.runs, cfg.job.experiment, cfg.job.name))

    def start(self, cfg: DictConfig) -> None:
        """Begin anew: forget what an earlier run left here."""
        for path in (self.summary, self.positions, self.f, self.model, self.state, self.metrics):
            remove(path)
        sync(self.folder)
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
                remove_temporaries(self.folder)
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
                make_folder(self.folder)
                file = open(self.lock, "ab+", buffering=0, opener=unlinked)  # noqa: SIM115, closed by who calls
            except OSError as error:
                raise UserError(f"cannot write {error.filename}: {error.strerror}") from error
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                with file:
                    file.seek(0)
                    other = file.read(100).decode(errors="replace") or "another process"
                    raise UserError(f"{self.folder} is being trained by {other}") from error
            except OSError:
                print(f"{self.folder} lies where files cannot be locked: train it but once at a time", flush=True)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.lstat(self.lock)):
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
        summary = self.read_summary()
        return summary if summary["status"] == "finished" else None

    def without_weights(self) -> bool:
        """Whether the run came to its end elsewhere or its weights were deleted, as of a run that is committed."""
        return (
            self.summary.exists()
            and read_object(self.summary).get("status") == "finished"
            and not (self.model.exists() or self.state.exists())
        )

    def log(self, row: dict) -> None:
        """Append a line to metrics.jsonl: all of it or nothing."""
        size = None
        try:
            with open(self.metrics, "ab", opener=unlinked) as file:
                size = file.tell()
                file.write(f"{json.dumps(row)}\n".encode())
        except OSError as error:
            if size is not None:
                os.truncate(self.metrics, size)
            raise UserError(f"cannot write {self.metrics}: {error.strerror}") from error

    def rows(self, last: int | None = None) -> list[dict]:
        """The logged rows, or the last so many of them, without those before."""
        if last is None:
            return list(self.each_row())
        found = []
        for _, line in self.lines_from_the_end():
            found.append(self.row_of(line))
            if len(found) == last:
                break
        return found[::-1]

    def each_row(self, having: str | None = None) -> Iterator[dict]:
        """Yield the logged rows one after the other; with `having` only those with this key, without parsing others."""
        key, last = b"" if having is None else json.dumps(having).encode(), b""
        try:
            with open(self.metrics, "rb", opener=regular) as file:
                while line := file.readline(LARGEST_TEXT):
                    last = line
                    if key in line:
                        yield self.row_of(line)
        except OSError as error:
            raise self.damaged_metrics() from error
        self.check_reached(self.row_of(last).get("step", 0) if last else 0)

    def lines(self) -> list[bytes]:
        """The lines of metrics.jsonl, which row_of() reads."""
        try:
            with open(self.metrics, "rb", opener=regular) as file:
                if os.fstat(file.fileno()).st_size > LARGEST_METRICS:
                    raise UserError(f"{self.metrics} is damaged: it is larger than {LARGEST_METRICS >> 30} GiB")
                return file.read().splitlines()
        except OSError as error:
            raise self.damaged_metrics() from error

    def check_reached(self, step: int) -> None:
        """Raise UserError where the last logged step is not the last step of a finished run."""
        summary = self.read_summary(whole=False) if self.summary.exists() else {}
        if summary.get("status") == "finished" and summary.get("steps", step) != step:
            raise UserError(f"{self.metrics} is cut short: it does not reach step {summary['steps']}")

    def row_of(self, line: bytes) -> dict:
        """What a line of metrics.jsonl says."""
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise self.damaged_metrics() from error
        types = set(map(type, row.values())) if isinstance(row, dict) else {str}
        if str in types and isinstance(row, dict):
            types = {type(value) for key, value in row.items() if key != "sample"}
        if not (types <= {int, float, NoneType} and type(row.get("step", 0)) is int):
            raise self.damaged_metrics()
        return row

    def damaged_metrics(self) -> UserError:
        return UserError(f"{self.metrics} is damaged: resume=false starts the run again")

    def lines_from_the_end(self) -> Iterator[tuple[int, bytes]]:
        """The whole lines of metrics.jsonl from the last to the first, each with the place in the file behind it."""
        try:
            with open(self.metrics, "rb", opener=regular) as file:
                place, rest, torn = file.seek(0, io.SEEK_END), b"", True
                while place:
                    end = place + len(rest)
                    length = min(CHUNK, place)
                    place = file.seek(place - length)
                    rest, *lines = (file.read(length) + rest).split(b"\n")
                    for line in reversed(lines):
                        if not torn:
                            yield end + 1, line
                        end, torn = end - len(line) - 1, False
                    if len(rest) > LARGEST_TEXT:
                        raise self.damaged_metrics()
                if not torn:
                    yield len(rest) + 1, rest
        except OSError as error:
            raise self.damaged_metrics() from error

    def read_vocabulary(self) -> list[str | None]:
        vocabulary = read_json(self.vocabulary)
        symbols = vocabulary if isinstance(vocabulary, list) else [""]
        if not all(symbol is None or (isinstance(symbol, str) and len(symbol) == 1) for symbol in symbols):
            raise UserError(f"{self.vocabulary} is damaged: it is not a list of characters")
        return vocabulary

    def save_model(self, weights: dict[str, Tensor]) -> str:
        """Write the weights; gives the sha256 of the file, which holds no checksum of its own."""
        with replacing(self.model) as temporary:
            try:
                save_file({k: v.detach().cpu().contiguous() for k, v in weights.items()}, temporary)
            except SafetensorError as error:  # as it calls a full disk
                raise OSError(errno.EIO, str(error)) from error
            return hash_of(temporary)

    def save_f(self, f: Tensor) -> None:
        """Write a learned f [heads, distances], to four digits."""
        values = [[float(f"{value:.4g}") for value in head] for head in f.tolist()]
        write_bytes(self.f, f"{json.dumps({'f': values}, separators=(',', ':'))}\n".encode())

    def save_state(self, state: dict) -> None:
        """The state, and with it whose it is and how long metrics.jsonl is, whose rows reach the disk before it."""
        sync(self.metrics)
        whole = state | {"run": self.name, "metrics_bytes": self.metrics.stat().st_size}
        with replacing(self.state) as temporary, open(temporary, "xb") as file:
            try:
                torch.save(whole, file)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # torch goes on after it, and fails again
                    raise error.__context__ from None
                raise

    def save_summary(self, summary: dict) -> None:
        """The summary, which the rows of metrics.jsonl reach the disk before."""
        sync(self.metrics)
        write_json(self.summary, summary)

    def read_summary(self, whole: bool = True) -> dict:
        """The run's summary.json, with figures of the types they should have; of a finished run all, with `whole`."""
        summary = read_object(self.summary)
        finished = summary.get("status") == "finished"
        if wrong := misfit(summary, SUMMARY | ({"evaluation": EVALUATION} if finished else {}), whole and finished):
            raise UserError(f"{self.summary} is damaged: {wrong}")
        return summary

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    def read_state(self) -> dict:
        try:
            with open(self.state, "rb", opener=regular) as file:
                with zipfile.ZipFile(file) as archive:
                    if sum(part.file_size for part in archive.infolist()) > os.fstat(file.fileno()).st_size:
                        raise ValueError("it unpacks to more than it holds")  # torch packs nothing
                    if archive.testzip() is not None:  # which torch does not look at
                        raise ValueError("a part's checksum is wrong")
                file.seek(0)
                state = torch.load(file, map_location="cpu", weights_only=True)
            if not isinstance(state, dict) or misfit(state, STATE):
                raise ValueError("it is no state")
            return state
        except OSError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
        except Exception as error:
            if out_of_memory(error):
                raise
            raise UserError(f"{self.state} is damaged: resume=false starts the run again") from error

    def load_state(self) -> dict:
        """Read the state, and bring metrics.jsonl back to the rows up to the state's step."""
        state = self.read_state()
        if wrong := misfit(state, RESUMED):
            raise UserError(f"{self.state} is damaged, {wrong}: resume=false starts the run again")
        if state.get("run", self.name) != self.name:
            raise UserError(f"{self.state} is the state of {state['run']}: resume=false starts the run again")
        try:
            with open(self.metrics, "ab+", opener=unlinked) as file:  # made anew where it is lost
                self.restore_metrics(file, state["step"], state["metrics_bytes"])
        except OSError as error:
            raise UserError(f"cannot write {self.metrics}: {error.strerror}") from error
        return state

    def restore_metrics(self, file: BinaryIO, step: int, size: int) -> None:
        """Remove from metrics.jsonl, open as `file`, the rows after `step` and the lines that cannot be read.

        A power cut leaves such lines, most often runs of NUL bytes, or takes lines away. What is left is then less
        than the `size` in bytes that the file had at `step`: a line is printed that names the longest gap.
        """
        kept, end, unreadable, dropped = 0, 0, 0, 0  # bytes, place, lines since and before the last row that is kept
        before, gap = 0, (0, 0)
        for place, line, reached in self.rows_in_place(file):
            if reached is None:
                unreadable += 1
            elif reached > step:
                break
            else:
                gap = max(gap, (before, reached), key=length)
                before, dropped, kept, end = reached, unreadable, kept + len(line), place
        gap = max(gap, (before, step), key=length)
        if dropped:
            with replacing(self.metrics) as temporary, open(temporary, "xb") as whole:
                rows = self.rows_in_place(file)
                whole.writelines(line for place, line, reached in rows if place <= end and reached is not None)
        else:
            file.truncate(end)
        what = "holds lines that cannot be read, as after a power cut" if dropped else None
        if kept < size:
            what = f"has lost rows, as in a power cut, and its longest gap is between steps {gap[0]} and {gap[1]}"
        if what:
            print(f"{self.metrics} {what}: the run goes on from its state after step {step}, without them", flush=True)

    def rows_in_place(self, file: BinaryIO) -> Iterator[tuple[int, bytes, int | None]]:
        """Yield the place in metrics.jsonl behind each line, the line and its step; None for what is no whole row."""
        place = file.seek(0)
        while line := file.readline(LARGEST_TEXT):
            place += len(line)
            if len(line) == LARGEST_TEXT:
                raise self.damaged_metrics()
            step = None
            if numbers := NUMBERS_ALONE.fullmatch(line):
                step = int(numbers[1])
            elif line.endswith(b"\n"):
                with contextlib.suppress(UserError):
                    step = self.row_of(line).get("step")
            yield place, line, step


def length(gap: tuple[int, int]) -> int:
    return gap[1] - gap[0]


def read_text(path: Path) -> bytes:
    """The content of a small regular file."""
    try:
        with open(path, "rb", opener=regular) as file:
            content = file.read(LARGEST_TEXT + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > LARGEST_TEXT:
        raise UserError(f"{path} is damaged: it is larger than {LARGEST_TEXT >> 20} MiB")
    return content


def read_json(path: Path):
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: it is not JSON") from error


def read_object(path: Path) -> dict:
    """A JSON file that holds names and values."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object")
    return content


def read_yaml(path: Path) -> dict:
    """The config of a run as a dict; its last part is its name, without which its end is missing."""
    text = read_text(path)
    # Bytes of a file's name that the locale cannot read are written like this, which libyaml does not read.
    loader = OmegaConfLoader if b"\\uDC" in text else ConfigLoader
    depth = 0
    try:
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > DEEPEST:  # which ours have not, and bombs are made of
                raise ValueError("an alias, or too deep")
        config = yaml.load(text, loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: it is not YAML") from error
    if not (isinstance(config, dict) and isinstance(job := config.get("job"), dict) and job.get("name") is not None):
        raise UserError(f"{path} is damaged: it is not the whole config of a run")
    if wrong := misfit(config, CONFIG):
        raise UserError(f"{path} is damaged: {wrong}")
    return config


class ConfigLoader(yaml.CSafeLoader):
    """Reads what OmegaConf writes, twenty times faster than OmegaConf does."""

    yaml_implicit_resolvers = OmegaConfLoader.yaml_implicit_resolvers


def read_config(path: Path) -> DictConfig:
    """The config of a run."""
    try:
        return OmegaConf.create(read_yaml(path))
    except OmegaConfBaseException as error:
        raise UserError(f"{path} is damaged: it is not YAML") from error


def misfit(content: dict, types: dict, whole: bool = True) -> str | None:
    """What is wrong with the first entry that is not of its type, or, where it is to be whole, not there."""
    for name, kinds in types.items():
        key = name.removesuffix("?")
        if key not in content:
            if whole and key == name:
                return f"it holds no {key}"
            continue
        value = content[key]
        if isinstance(kinds, list) and isinstance(value, list):
            wrong = (misfit(one, kinds[0], whole) if isinstance(one, dict) else "one is no object" for one in value)
            if wrong := next(filter(None, wrong), None):
                return f"in {key}, {wrong}"
            continue
        if isinstance(kinds, dict) and isinstance(value, dict):
            if wrong := misfit(value, kinds, whole):
                return f"in {key}, {wrong}"
            continue
        kinds = kinds if isinstance(kinds, tuple) else (type(kinds),)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(CALLED.get(kind, kind.__name__) for kind in kinds)
            return f"{key} must be {expected}: it is {reprlib.repr(value)[:40]}"
    return None


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with open(path, "rb", opener=regular) as file:
            return load_tensors(file.read())
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
    """What git says of this repository; None without git or a repository, as for a copy inside another one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(ROOT.resolve().parent)
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, env=environment, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return os.fsdecode(done.stdout).strip()


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        models = [
            line
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ]
        return models[0].split(":", 1)[1].strip()
    except (OSError, IndexError):
        return platform.machine()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
