"""Texts and command lines that make no sense."""

import contextlib
import hashlib
import io
import random
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig

from configs.cli import compose, flat
from data.batches import check_length
from data.corpus import load
from evaluate import build_model
from scripts.faults.small import given, harmed, refused, write_text
from train import check


def corpora(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """Bytes that may be no text at all are read to the character, or refused in one line."""
    place = folder / "corpora"
    write_text(place)
    for number in range(cfg.corpora):
        content = rubbish(rng)
        (place / "text.txt").write_bytes(content)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                corpus = load(compose([*given(place), "data.processes=1"]).data)
            text = "".join(corpus.vocabulary[i] for i in corpus.ids.tolist())
            if corpus.sha256 != hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest():
                yield f"corpus {number}: it is not its ids"
                continue
        except Exception as error:
            if not refused(error):
                yield f"corpus {number} ({content[:40]!r}): {type(error).__name__}: {error}"
                continue
        yield None


def overrides(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A command line with rubbish in it describes a model, or is refused in one line."""
    place = folder / "overrides"
    write_text(place)
    keys = [*flat(compose([])), "attn", "ffn", "data", "model", "experiment", "atn", "model.dims", "train.", ".", "a b"]
    values = [
        "", "null", "-1", "0", "1", "1e9", "1e400", "nan", "-inf", "0.5", "true", "x", "[1,2]", "{a: 1}", "'", "∞",
        "${seed}", "${nothing}", "aft", "gmlp", "../x", "9" * 40, "\x00", "é", "???",
    ]  # fmt: skip
    for _ in range(cfg.overrides):
        line = [f"{rng.choice(keys)}={rng.choice(values)}" for _ in range(rng.randint(1, 3))]
        run = partial(lambda line: described(compose([*given(place), *line])), line)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                run()
        except Exception as error:
            if not refused(error):
                yield f"{shlex.join(line)}: {type(error).__name__}: {str(error)[:200]}"
                continue
        yield None


def described(cfg: DictConfig) -> None:
    """As far as train.py goes with train.steps=0, in little memory."""
    check(cfg, processes=1)
    cfg.data.processes = 1
    corpus = load(cfg.data)
    check_length(len(corpus.training), len(corpus.heldout), cfg.model.context)
    with torch.device("meta"):
        build_model(cfg, len(corpus.vocabulary))


def rubbish(rng: random.Random) -> bytes:
    """A file that is, or is not quite, or is not at all, text."""
    length = rng.choice([0, 1, 2, 17, 300, 3000])
    text = "".join(rng.choice("一二三\n\r\0\t aé\u0301👨\u200d👩\ufeff\u2028𠀀") for _ in range(length))
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(length)
    content = text.encode(rng.choice(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "gb18030", "utf-32"]))
    if kind == 1:
        return content[: rng.randrange(len(content) + 1)]
    if kind == 2 and content:
        return harmed(content, rng)
    return content + (b"\xed\xa0\x80" if kind == 3 else b"")  # a lone surrogate
