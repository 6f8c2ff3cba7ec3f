"""Tokenised corpora that were harmed."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from configs.cli import compose
from data.corpus import load
from data.files import remove
from tests.torture.folders import JUNK
from tests.torture.small import as_command, fell, given, harmed, write_text
from train import run

NAMES = ("ids.bin", "vocabulary.json", "meta.json")
VALUES = (None, -1, "x", [], {}, 1e9, True, "object", "uint32")


def caches(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A tokenised corpus with a file that is harmed, cut, junk, missing or reversed, or with another value in its
    meta.json, is made anew: it holds the text, and its sha256 is the text's. So with a junk memory of files."""
    place = folder / "caches"
    write_text(place)
    line = [*given(place), "train.steps=0"]
    data = compose(line).data
    whole = load(data)
    ids = np.array(whole.ids)
    (made,) = (path for path in Path(data.cache).iterdir() if path.name != "files")
    where = dict.fromkeys((*NAMES, "files"), 0)
    for number in range(cfg.caches):
        name = list(where)[number % len(where)]
        where[name] += 1
        path = made / name if name in NAMES else next((made.parent / "files").iterdir())
        how = harm(path, rng)
        status, said = as_command(run, *line)
        wrong = fell(status, said) or (f"it was refused: {said[-300:]}" if status else None)
        if not wrong:
            now = load(data)
            same = (now.sha256, now.unique, now.vocabulary) == (whole.sha256, whole.unique, whole.vocabulary)
            same = same and np.array_equal(now.ids, ids)
            wrong = None if same else "another text was loaded, in silence"
        if wrong:
            remove(made.parent)
            load(data)
        yield f"cache {number}, {name} {how}: {wrong}" if wrong else None
    return where


def harm(path: Path, rng: random.Random) -> str:
    """Do something to a file: what it was."""
    content = path.read_bytes()
    how = rng.choice(["harmed", "junk", "missing", "reversed", *(["changed"] * 3 if path.name == "meta.json" else [])])
    if how == "harmed":
        path.write_bytes(harmed(content, rng))
    elif how == "junk":
        path.write_bytes(rng.choice(JUNK))
    elif how == "missing":
        remove(path)
    elif how == "reversed":
        path.write_bytes(json.dumps(json.loads(content)[::-1]).encode() if path.name[0] == "v" else content[::-1])
    else:
        meta = json.loads(content)
        key = rng.choice(list(meta))
        meta[key] = rng.choice(VALUES)
        path.write_text(json.dumps(meta), encoding="utf-8")
        how = f"with {key}={meta[key]}"
    return how
