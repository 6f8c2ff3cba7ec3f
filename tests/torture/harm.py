"""Damage one file of a run or of a tokenised corpus, and run a command that may read it."""

import functools
import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml
from omegaconf import DictConfig

import evaluate
import train
from data.files import UserError, remove
from data.reading import read_json
from scripts import dashboard, list_runs, sample
from tests.torture.forks import Fault, in_a_fork, not_refused, typed
from tests.torture.runs import UNMIRRORED, cut_or_flipped, finished, given, half_done

JUNK = [b"", b"null", b"[]", b"{}", b"0", b'"x"', b"[" * 100_000, b"&a [*a]", b"NaN", b"\xff\xfe\x00", bytes(500)]
ABSURD = [None, True, -1, 0, 1, 1e5, float("nan"), float("inf"), 10**400, -(10**400), "x", "", [], [1], {}, {"fit": 1}]
# Files that a run or a command may create: a link in their place must not lead a command to write elsewhere.
ABSENT = (".lock", ".state.pt.x.tmp", ".summary.json.x.tmp", "evaluation.json", "dashboard.html")
HARMS = (
    "missing", "junk", "cut or flipped", "cut or flipped", "NULs", "another's", "last lines missing", "a pickle",
    "a pickle of torch", "YAML that calls open", "an absurd value", "an absurd value", "a link", "a FIFO",
)  # fmt: skip


class Trap:
    """An object that creates a file when it is unpickled, which shows that code in a file was executed."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


class Case:
    """A run, half done or finished, with the commands that read it and their results while no file is damaged."""

    def __init__(self, place: Path, half: bool):
        self.half, self.place, self.undisturbed = half, place, {}
        self.folder = (half_done(place) if half else finished(place)).folder
        self.whole = place.with_suffix(".whole")
        shutil.copytree(place, self.whole)
        weights = 5 * [self.folder / ("state.pt" if half else "model.safetensors")]  # chosen more often than others
        self.files = [*sorted(self.folder.iterdir()), *sorted(place.glob("cache/*/*")), *weights]
        run, runs = f"run={self.folder}", f"runs={place}/runs"
        prompt = read_json(self.folder / "vocabulary.json")[0]
        self.commands = {
            "train": (train, *given(place, UNMIRRORED)),
            "evaluate": (evaluate, run, "stride=8"),
            "sample": (sample, run, f"prompt={prompt}", "length=9"),
            "dashboard": (dashboard, runs, f"out={self.folder}/dashboard.html"),
            "list_runs": (list_runs, runs),
        }
        for name in self.commands:
            status, output, self.undisturbed[name] = self.outcome(name)
            if status:
                raise UserError(f"{name} failed on an undamaged run: exit status {status}: {output[-300:]}")
            self.restore()

    def restore(self) -> None:
        """Restore the run and its corpus, all of `place`, to their undamaged state."""
        shutil.rmtree(self.place)
        shutil.copytree(self.whole, self.place)

    def outcome(self, name: str) -> tuple[int, str, object]:
        """Run a command. Return its exit status, its output and its result.

        The result is what sample prints, the scores of evaluate, or the contents of model.safetensors and
        text.safetensors if train completes a half-done run. Otherwise it is None.
        """
        status, output = in_a_fork(functools.partial(typed, *self.commands[name]))
        result = output if name == "sample" else None
        if status == 0 and name == "train" and self.half:
            result = [(self.folder / file).read_bytes() for file in ("model.safetensors", "text.safetensors")]
        elif status == 0 and name == "evaluate":
            figures = read_json(self.folder / "evaluation.json")
            result = [figures.get(text) for text in ("fit", "heldout", "sliding")]
        return status, output, result


def harms(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[Fault]:
    """One file of a run or of a tokenised corpus is removed, truncated, overwritten in part by NULs, replaced by junk,
    another run's file, a pickle, a link or a FIFO, or has a flipped bit, an absurd value or, in YAML, a call. A command
    then refuses it in one line, or succeeds; only an absurd value may change a result of train, evaluate or sample.
    The command train tokenises a damaged corpus again, or may refuse it if the file is a link or a FIFO. No code in a
    file is executed, and the target of a link stays unchanged.
    """
    cases = [Case(folder / "half", half=True), Case(folder / "whole", half=False)]
    other = finished(folder / "other", "seed=1").folder
    outside, trap, work = folder / "outside", folder / "executed", "years of work"
    for number in range(cfg.harms):
        case, name, how = rng.choice(cases), rng.choice([*cases[0].commands, "train"]), HARMS[number % len(HARMS)]
        case.restore()
        remove(outside)
        outside.mkdir()
        (outside / "chapter").write_text(work, encoding="utf-8")
        path = rng.choice(case.files)
        if how == "a link":
            path = rng.choice([path, *(case.folder / absent for absent in ABSENT)])
        content = path.read_bytes() if path.exists() else b""
        remove(path)
        if how == "a link":
            path.symlink_to(rng.choice([outside, outside / "chapter", outside / "nowhere"]))
        elif how == "a FIFO":
            os.mkfifo(path)
        elif how != "missing":
            path.write_bytes(harmed(how, path, content, other, trap, rng))
        status, output, result = case.outcome(name)
        lost = not_refused(status, output) if status else []
        if status == 0 and how != "an absurd value" and result != case.undisturbed[name]:
            lost.append("the command succeeded with a different result")
        if status and name == "train" and case.place / "cache" in path.parents and how not in ("a link", "a FIFO"):
            lost.append("the corpus is not tokenised again")
        lost += ["code in the file was executed"] * trap.exists()
        if list(outside.iterdir()) != [outside / "chapter"] or (outside / "chapter").read_text("utf-8") != work:
            lost.append("the target of the link was changed")
        trap.unlink(missing_ok=True)
        yield Fault(f"{number}, {name}, half done: {case.half}, {path.name}: {how}", lost)


def harmed(how: str, path: Path, content: bytes, other: Path, trap: Path, rng: random.Random) -> bytes:
    """Return the damaged content of a file.

    If this kind of damage does not suit the file, the content is cut off or one of its bits is flipped instead.
    """
    lines, (a, b) = content.splitlines(keepends=True), sorted(rng.choices(range(len(content) + 1), k=2))
    if how == "junk":
        return rng.choice(JUNK)
    if how == "NULs":
        return rng.choice([content[:a] + bytes(len(content) - a), content[:a] + bytes(b - a) + content[b:]])
    if how == "another's" and path.name in ("vocabulary.json", "text.safetensors", "model.safetensors"):
        return (other / path.name).read_bytes()
    if how == "last lines missing":
        return b"".join(lines[: rng.randrange(len(lines) or 1)])
    if how == "a pickle":
        return pickle.dumps({"model": Trap(trap)}, protocol=rng.choice([0, 5]))
    if how == "a pickle of torch":
        file = io.BytesIO()
        state = {"step": 1, "model": Trap(trap), "optimizer": {}, "metrics_bytes": 0}
        torch.save(state, file, _use_new_zipfile_serialization=rng.random() < 0.5)
        return file.getvalue()
    if how == "YAML that calls open" and path.suffix == ".yaml":
        call = {"_target_": "builtins.open", "file": str(trap), "mode": "w"}
        tree = yaml.safe_load(content)
        tree["attn"] = rng.choice([call, tree["attn"] | {"position_weight": rng.choice([call, [call]])}])
        return yaml.safe_dump(tree).encode()
    if how == "an absurd value" and path.suffix in (".json", ".jsonl", ".yaml"):
        at = rng.randrange(len(lines)) if path.suffix == ".jsonl" else 0
        text = lines[at] if path.suffix == ".jsonl" else content
        tree = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
        put(tree, rng.choice(ABSURD), rng)
        text = (yaml.safe_dump(tree) if path.suffix == ".yaml" else json.dumps(tree)).encode()
        return b"".join([*lines[:at], text + b"\n", *lines[at + 1 :]]) if path.suffix == ".jsonl" else text
    return cut_or_flipped(content, rng)


def put(tree: dict | list, value: object, rng: random.Random) -> None:
    """Replace a random branch or leaf of a tree by a value."""
    key = rng.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    if isinstance(tree[key], (dict, list)) and tree[key] and rng.random() < 0.8:
        put(tree[key], value, rng)
    else:
        tree[key] = value
