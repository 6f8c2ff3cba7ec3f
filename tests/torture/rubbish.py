"""Texts and command lines that make no sense."""

import codecs
import contextlib
import hashlib
import io
import random
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import torch
from omegaconf import DictConfig

from configs.cli import compose
from configs.folder import flat
from configs.messages import MISTAKES, explain
from data.batches import check_length
from data.corpus import load
from models.build import build_model
from scripts.reporting.variants import variants
from tests.torture.small import given, harmed, no_hang, refused, write_text
from training.settings import check

CODECS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "gb18030", "big5", "utf-32"]
ENCODINGS = [
    *CODECS,
    "utf-7",
    "latin-1",
    "shift_jis",
    "idna",
    "unicode_escape",
    "hex",
    "zip",
    "rot13",
    "undefined",
    "x\0",
]
VALUES = [
    "", "null", "-1", "0", "1", "1e9", "1e400", "nan", "-inf", "0.5", "true", "x", "[1,2]", "{a: 1}", "'", "∞",
    "${seed}", "${nothing}", "aft", "gmlp", "../x", "9" * 40, "\x00", "é", "???", "👩\u200d👩", "\udcff", "a\nb",
]  # fmt: skip
SENSELESS = [  # what each of fits alone, and not together
    ["model.dim=7", "model.heads=2"],
    ["train.batch=3", "train.accumulate=2"],
    ["evaluation.stride=17", "model.context=16"],
    ["model.context=9000"],
    ["data.holdout=0.999"],
    ["attn=mha", "attn.rotary=1.0", "model.dim=6", "model.heads=2"],
    ["attn=gau", "attn.scale=log_n"],
    ["attn=aft", "attn.position_weight.extrapolation=constant"],
    ["attn=talking_heads", "attn.talking_heads=weights", "attn.logit_heads=6"],
    ["attn=rwv", "attn.W=exp_k", "attn.denominator=none"],
    ["attn=aft", "attn.key_size=4"],  # a key of another attention
    ["optim.betas=[0.9]"],
    ["data=file", "data.path=[]"],
]


def corpora(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """Bytes that may be no text at all are read to the character, or refused in one line."""
    place = folder / "corpora"
    write_text(place)
    data = compose([*given(place), "data.processes=1", "data.vocab_size=null"]).data
    for number in range(cfg.corpora):
        content = UNUSUAL[number]() if number < len(UNUSUAL) else rubbish(rng)
        told = rng.choice(ENCODINGS) if number >= len(UNUSUAL) and rng.random() < 0.2 else None
        data.encoding = told
        (place / "text.txt").write_bytes(content)
        try:
            with contextlib.redirect_stdout(io.StringIO()) as said, no_hang():
                corpus = load(data)
            text = "".join(corpus.vocabulary[i] for i in corpus.ids.tolist())
            encoding = re.search(r"text\.txt: (\S+) \(", said.getvalue())[1]
            whole = content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
            if text != whole or corpus.sha256 != hashlib.sha256(text.encode()).hexdigest():
                yield f"corpus {number} ({content[:40]!r}): what was read is not the file in {encoding}"
                continue
        except Exception as error:
            if not refused(error):
                yield f"corpus {number} ({content[:40]!r}, {told}): {type(error).__name__}: {error}"
                continue
        yield None


def overrides(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A command line with rubbish in it describes a model, or is refused in one line that offers the nearest name."""
    place = folder / "overrides"
    write_text(place)
    keys = [*flat(compose([])), "attn", "ffn", "data", "model", "experiment", "atn", "model.dims", "train.", ".", "a b"]
    names = [key for key in flat(compose([])) if not key.startswith("job.") and not key.endswith("_")]
    for number in range(cfg.overrides):
        wanted = word = None  # the name that has to be offered, and what is written instead
        senseless = number < len(SENSELESS)
        if senseless:
            line = SENSELESS[number]
        elif rng.random() < 0.3:
            wanted = rng.choice(names)
            word = misspelt(wanted, rng)
            line = [f"{word}=1"]
        elif rng.random() < 0.1:
            wanted = rng.choice(variants())
            word = misspelt(wanted, rng)
            line = [f"attn={word}"]
        else:
            line = [f"{rng.choice(keys)}={rng.choice(VALUES)}" for _ in range(rng.randint(1, 3))]
        if wanted and (word in names or word in variants()):
            yield None  # misspelt into another name
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()), no_hang():
                described([*given(place), *line])
            wrong = "was taken for sense" if senseless or wanted else None
        except Exception as error:
            said = explain(error, "config")
            wrong = None if refused(error) else f"{type(error).__name__}: {said[:200]}"
            if wanted and not nearest_named(word, wanted, said):
                wrong = f"does not offer {wanted}: {said[:200]}"
        yield f"{shlex.join(line)}: {wrong}" if wrong else None


def described(line: list[str]) -> None:
    """As far as train.py goes with train.steps=0, in little memory."""
    try:
        cfg = compose(line)
    except ValueError as error:  # Hydra raises them bare, and a command takes them for mistakes
        raise error if isinstance(error, MISTAKES) else MISTAKES[0](str(error)) from error
    check(cfg, processes=1)
    cfg.data.processes = 1
    corpus = load(cfg.data)
    check_length(len(corpus.training), len(corpus.heldout), cfg.model.context)
    with torch.device("meta"):
        build_model(cfg, len(corpus.vocabulary))


def misspelt(name: str, rng: random.Random) -> str:
    """A letter of the last word left out, doubled, or changed places with the next."""
    start = name.rfind(".") + 1
    place = rng.randrange(start, max(start + 1, len(name) - 1))
    head, letter, rest = name[:place], name[place], name[place + 1 :]
    return rng.choice([head + rest, head + 2 * letter + rest, head + rest[:1] + letter + rest[1:]])


def nearest_named(word: str, wanted: str, said: str) -> bool:
    """Whether the wanted name is offered, or another one that is no farther from what was written."""
    offered = re.search(r"did you mean (\S+)\?", said)
    return bool(offered) and (offered[1] == wanted or edits(word, offered[1]) <= edits(word, wanted))


def edits(one: str, other: str) -> int:
    """How many letters have to be put in, taken out or changed to get from one word to the other."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


UNUSUAL = [
    lambda: b"",
    lambda: b"a",
    lambda: "字".encode(),
    lambda: b"\n",
    lambda: ("一二三四五六七八九十" * 200_000).encode(),  # one line that does not end, larger than what is read at once
    lambda: "".join(chr(point) for point in range(0x3400, 0x3400 + 62_048) if not 0xD800 <= point < 0xE000).encode(),
    lambda: ("👨‍👩‍👧‍👦🏳️‍🌈e\u0301ạ̈" * 500).encode(),
    lambda: ("a" + "\u0301" * 5000).encode(),
    lambda: bytes(5000),
    lambda: b"text with a \0 in it, and more of it" * 50,
    lambda: ("字" * 2000 + "\0" + "字" * 2000).encode(),
    lambda: b"\xed\xa0\x80" * 500,  # lone surrogates, in UTF-8
    lambda: codecs.BOM_UTF16_LE + "字\ud800字".encode("utf-16-le", "surrogatepass") * 500,
    lambda: "字".encode() * 3000 + b"\xe5\xad",  # cut in a character
    lambda: codecs.BOM_UTF8 * 3,
    lambda: b"\r" * 3000,
    lambda: random.Random(0).randbytes(100_000),
]


def rubbish(rng: random.Random) -> bytes:
    """A file that is, or is not quite, or is not at all, text."""
    length = rng.choice([0, 1, 2, 17, 300, 3000])
    text = "".join(rng.choice("一二三\n\r\0\t aé\u0301👨\u200d👩\ufeff\u2028𠀀") for _ in range(length))
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(length)
    content = text.encode(rng.choice(CODECS), "ignore")
    if kind == 1:
        return content[: rng.randrange(len(content) + 1)]
    if kind == 2 and content:
        return harmed(content, rng)
    return content + (b"\xed\xa0\x80" if kind == 3 else b"")  # a lone surrogate
