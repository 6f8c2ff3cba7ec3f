"""Damage one file of a run or of a tokenised corpus, and run a command that may read it."""

import functools
import json
import os
import random
import shutil
from pathlib import Path

import yaml

import evaluate
import train
from data.reading import read_json
from scripts import dashboard, list_runs, sample
from tests.torture.forks import in_a_fork, not_refused, typed
from tests.torture.runs import ENDED, UNMIRRORED, given, trained

JUNK = [b"", b"null", b"[]", b"{}", b"0", b'"x"', b"[" * 100_000, b"&a [*a]", b"NaN", b"\xff\xfe\x00", bytes(500)]
ABSURD = [None, True, -1, 0, 1, 1e5, float("nan"), float("inf"), 10**400, -(10**400), "x", "", [], [1], {}, {"fit": 1}]
HARMS = (
    "missing", "junk", "cut or flipped", "cut or flipped", "NULs", "another's", "last lines missing", "a FIFO",
    "an absurd value", "an absurd value",
)  # fmt: skip


class Case:
    """A run, half done or finished, with the commands that read it and their results while no file is damaged."""

    def __init__(self, place: Path, half: bool):
        self.half, self.place, self.undisturbed = half, place, {}
        self.folder = trained(place, steps=7 if half else ENDED)
        self.whole = place.with_suffix(".whole")
        shutil.copytree(place, self.whole)
        weights = 5 * [self.folder / ("state.pt" if half else "model.safetensors")]  # chosen more often than others
        self.files = [*sorted(self.folder.iterdir()), *sorted(place.glob("cache/*/*")), *weights]
        run, runs = f"run={self.folder}", f"runs={place}/runs"
        prompt = read_json(self.folder / "vocabulary.json")[0]
        self.commands = {
            "train": (train.run, *given(place, UNMIRRORED)),
            "evaluate": (evaluate.run, run, "stride=8"),
            "sample": (sample.run, run, f"prompt={prompt}", "length=9"),
            "dashboard": (dashboard.run, runs, f"out={self.folder}/dashboard.html"),
            "list_runs": (list_runs.run, runs),
        }
        for name in self.commands:
            status, output, self.undisturbed[name] = self.outcome(name)
            assert status == 0, output
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


def harms(count: int, folder: Path) -> list[str]:
    """Damage `count` files, each before one command, and return what was lost.

    One file of a run or of a tokenised corpus is removed, truncated, overwritten in part by NULs, replaced by junk,
    another run's file or a FIFO, or has a flipped bit or an absurd value. A command then refuses it in one line, or
    succeeds; only an absurd value may change a result of train, evaluate or sample. The command train tokenises a
    damaged corpus again, or may refuse it if the file is a FIFO.
    """
    everything, rng = [], random.Random(0)
    cases = [Case(folder / "half", half=True), Case(folder / "whole", half=False)]
    other = trained(folder / "other", "seed=1")
    for number in range(count):
        case, name, how = rng.choice(cases), rng.choice([*cases[0].commands, "train"]), HARMS[number % len(HARMS)]
        case.restore()
        path = rng.choice(case.files)
        content = path.read_bytes()
        path.unlink()
        if how == "a FIFO":
            os.mkfifo(path)
        elif how != "missing":
            path.write_bytes(harmed(how, path, content, other, rng))
        status, output, result = case.outcome(name)
        lost = not_refused(status, output) if status else []
        if status == 0 and how != "an absurd value" and result != case.undisturbed[name]:
            lost.append("the command succeeded with a different result")
        if status and name == "train" and case.place / "cache" in path.parents and how != "a FIFO":
            lost.append("the corpus is not tokenised again")
        everything += [f"{number}, {name}, half done: {case.half}, {path.name}, {how}: {one}" for one in lost]
    return everything


def harmed(how: str, path: Path, content: bytes, other: Path, rng: random.Random) -> bytes:
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
    if how == "an absurd value" and path.suffix in (".json", ".jsonl", ".yaml"):
        at = rng.randrange(len(lines)) if path.suffix == ".jsonl" else 0
        text = lines[at] if path.suffix == ".jsonl" else content
        tree = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
        put(tree, rng.choice(ABSURD), rng)
        text = (yaml.safe_dump(tree) if path.suffix == ".yaml" else json.dumps(tree)).encode()
        return b"".join([*lines[:at], text + b"\n", *lines[at + 1 :]]) if path.suffix == ".jsonl" else text
    place = rng.randrange(len(content))
    flipped = bytes([content[place] ^ (1 << rng.randrange(8))])
    return rng.choice([content[:place], content[:place] + flipped + content[place + 1 :]])


def put(tree: dict | list, value: object, rng: random.Random) -> None:
    """Replace a random branch or leaf of a tree by a value."""
    key = rng.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    if isinstance(tree[key], (dict, list)) and tree[key] and rng.random() < 0.8:
        put(tree[key], value, rng)
    else:
        tree[key] = value
