"""Folders of runs in which a file is missing, torn, another run's, or would run if it were believed."""

import functools
import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import yaml
from omegaconf import DictConfig

import evaluate
import train
from data.reading import read_json
from scripts import compare, dashboard, sample
from tests.torture.harm import finished, half_done
from tests.torture.small import as_command, fell, given
from training.record import Record

MADE = {"half": half_done, "whole": finished}
WEIGHTS = {"half": "state.pt", "whole": "model.safetensors"}
NAMES = ("config.yaml", "metrics.jsonl", "summary.json", "vocabulary.json", "text.safetensors")
OURS = ("config.yaml", "metrics.jsonl", "summary.json")  # which say whose they are
JUNK = [b"", b"null", b"[]", b"{}", b"0", b'"x"', b"[" * 100_000, b"&a [*a]", b"NaN", b"\xff\xfe\x00", bytes(500)]


def folders(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A run's folder in which a file is missing, torn, junk, another run's or a pickle is continued and read as if
    nothing were, or refused in one line; and nothing in it is run."""
    cases = make_cases(folder)
    trap = folder / "sprung"

    @functools.cache
    def stranger(kind: str, attn: str) -> dict[str, bytes]:
        return read_files(MADE[kind](folder / f"{kind}-{attn}", "seed=1", f"attn={attn}").folder)

    for number in range(cfg.folders):
        case = cases[rng.choice(["half", "whole"])]
        name = rng.choice(list(case.commands))
        file = rng.choice([f for f in (*NAMES, WEIGHTS[case.kind]) if f in case.files])
        how = rng.choice(["missing", "junk", "another's", "short of lines", "cut", "cut", *FORMS])
        expected = case.undisturbed(name)
        case.put_back()
        path, content = case.record.folder / file, case.files[file]
        if how == "missing":
            path.unlink()
        elif how == "junk":
            path.write_bytes(rng.choice(JUNK))
        elif how == "another's" and file not in OURS:
            path.write_bytes(stranger(case.kind, rng.choice(["aft", "mha"]))[file])
        elif how == "short of lines":
            lines = content.splitlines(keepends=True)
            path.write_bytes(b"".join(lines[: rng.randrange(len(lines) or 1)]))
        elif how in FORMS:
            FORMS[how](trap, path)
        else:
            path.write_bytes(content[: rng.randrange(len(content))])
        (status, said), got = case.outcome(name)
        wrong = fell(status, said)
        if trap.exists():
            trap.unlink()
            wrong = "it was run"
        elif status == 0 and got != expected:
            wrong = "another result, in silence"
        what = f"folder {number}: {name} on a {case.kind} run, {file} {how}"
        yield f"{what}: {wrong}" if wrong else None


def make_cases(folder: Path) -> dict[str, "Case"]:
    return {kind: Case(kind, make(folder / kind), folder / kind) for kind, make in MADE.items()}


class Case:
    """A run, half done or whole, and the commands that read its folder."""

    def __init__(self, kind: str, record: Record, place: Path):
        self.kind, self.record, self.files = kind, record, read_files(record.folder)
        run, out = f"run={record.folder}", record.folder / "out"
        runs = f"runs={record.folder.parents[1]}"
        row = '"{}"'.format(" ".join(["aft", *given(place)]))
        prompt = json.loads(self.files["vocabulary.json"])[0]
        self.commands = {
            "train": (train.run, *given(place), "wandb.mode=disabled"),
            "evaluate": (evaluate.run, run, "stride=8"),
            "sample": (sample.run, run, f"prompt={prompt}", "length=9"),
            "compare": (compare.run, runs, f"rows=[{row}]", f"ratio_to={row}", f"out={out}"),
            "dashboard": (dashboard.run, runs, f"out={out}/dashboard.html"),
        }
        self.undisturbed = functools.cache(self.untouched)

    def put_back(self) -> None:
        """The folder as it was."""
        shutil.rmtree(self.record.folder)
        self.record.folder.mkdir()
        for name, content in self.files.items():
            (self.record.folder / name).write_bytes(content)

    def untouched(self, name: str) -> object:
        """What a command finds out in the folder as it was."""
        self.put_back()
        (status, said), got = self.outcome(name)
        if status and "these runs are missing or not finished" not in said:  # which a run half done is not
            raise RuntimeError(f"{name} on a {self.kind} run that nobody harmed: exit status {status}: {said[-300:]}")
        return got

    def outcome(self, name: str) -> tuple[tuple[int, str], object]:
        """How a command ended, and what it found out; None for what only shows what is there."""
        status, said = as_command(*self.commands[name])
        folder, got = self.record.folder, None
        if status == 0 and name == "train" and self.kind == "half":
            got = [(folder / file).read_bytes() for file in (WEIGHTS["whole"], *NAMES[3:])]
        elif status == 0 and name == "evaluate":
            figures = read_json(folder / "evaluation.json")
            got = [figures.get(text) for text in ("fit", "heldout", "sliding")]
        elif status == 0 and name == "sample":
            got = said
        elif status == 0 and name == "compare":
            got = [(folder / "out" / file).read_bytes() for file in ("table.md", "curves.png")]
        return (status, said), got


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable, tuple]:
        return open, (str(self.path), "w")


def zipped(trap: Path, path: Path) -> None:
    torch.save({"step": 1, "model": Trap(trap), "optimizer": {}, "metrics_bytes": 0}, path)


def legacy(trap: Path, path: Path) -> None:
    torch.save({"step": 1, "model": Trap(trap)}, path, _use_new_zipfile_serialization=False)


def tagged(trap: Path, path: Path) -> None:
    path.write_text(f"!!python/object/apply:builtins.open ['{trap}', 'w']\n", encoding="utf-8")


def called(trap: Path, path: Path) -> None:
    """In the place of an attention, or of a part of it, or in a list, something else to be called."""
    if path.name == "config.yaml":
        cfg = yaml.safe_load(path.read_text(encoding="utf-8"))
        call = {"_target_": "builtins.open", "file": str(trap), "mode": "w"}
        cfg["attn"] = random.choice(
            [call, cfg["attn"] | {"position_weight": call}, cfg["attn"] | {"position_weight": [call]}]
        )
        path.write_text(yaml.safe_dump(cfg, sort_keys=False), encoding="utf-8")


FORMS = {
    "a pickle": lambda trap, path: path.write_bytes(pickle.dumps(Trap(trap))),
    "an old pickle": lambda trap, path: path.write_bytes(pickle.dumps({"model": Trap(trap)}, protocol=0)),
    "a pickle as torch saves it": zipped,
    "a pickle as torch used to save it": legacy,
    "YAML that names Python": tagged,
    "a config that calls": called,
}
