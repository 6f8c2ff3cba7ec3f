"""Random bytes, unusual texts, random command lines, and learning rates that can make training diverge."""

import codecs
import contextlib
import hashlib
import io
import random
import re
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig

import train
from configs.cli import compose
from configs.folder import flat
from data.corpus import load
from data.reading import read_tensors
from scripts.reporting.variants import variants
from tests.torture.forks import Fault, failed, in_a_fork, not_refused
from tests.torture.lacks import little_memory
from tests.torture.runs import UNMIRRORED, cut_or_flipped, fresh, given, one_run
from training.record import Record

CODECS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "gb18030", "big5", "utf-32"]
ENCODINGS = [*CODECS, "utf-7", "latin-1", "shift_jis", "idna", "unicode_escape", "hex", "zip", "rot13", "x\0"]
VALUES = [
    "", "null", "-1", "0", "1", "1e9", "1e400", "nan", "-inf", "0.5", "true", "x", "[1,2]", "{a: 1}", "'", "∞",
    "${seed}", "${nothing}", "aft", "gmlp", "../x", "9" * 40, "\x00", "é", "???", "👩\u200d👩", "\udcff", "a\nb",
]  # fmt: skip
UNUSUAL = [
    ("一二三四五六七八九十" * 200_000).encode(),  # no line break, and longer than data.tokenise.BLOCK
    "".join(chr(point) for point in range(0x3400, 0x3400 + 62_048) if not 0xD800 <= point < 0xE000).encode(),
    ("👨‍👩‍👧‍👦🏳️‍🌈e\u0301ạ̈" * 500 + "a" + "\u0301" * 5000).encode(),
    ("字" * 2000 + "\0" + "字" * 2000).encode(),
    b"\xed\xa0\x80" * 500,  # lone surrogates, in UTF-8
    codecs.BOM_UTF16_LE + "字\ud800字".encode("utf-16-le", "surrogatepass") * 500,
    "字".encode() * 3000 + b"\xe5\xad",  # cut off within a character
    codecs.BOM_UTF8 * 3,
    b"\r" * 3000,
]
STOPPED = (
    r"error: the loss, the gradient or a weight is not finite after step \d+: "
    r"(?=.*(the output of|the gradient of|the loss|a weight|embed|blocks|norm|head)\S*.* became)"
    r".+ became inf or NaN at step \d+, at a learning rate of \S+; .*try .+"
)
DIVERGED = r"error: the run has diverged: after step \d+ the loss is \S+, .+ at optim\.lr=\S+; try .+"
LONGER = ["train.steps=200", "train.log_every=10", "evaluation.every=100", "train.checkpoint_seconds=60", UNMIRRORED]


def corpora(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[Fault]:
    """A file of random bytes or of an unusual text, sometimes read with a random data.encoding, is either tokenised
    unchanged, except that line ends become newlines, or refused in one line."""
    data = compose([*given(fresh(folder / "corpora")), "data.processes=1", "data.vocab_size=null"]).data

    def read(content: bytes) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            corpus = load(data)
        text = "".join(corpus.vocabulary[i] for i in corpus.ids.tolist())
        encoding = re.search(r"text\.txt: (\S+) \(", output.getvalue())[1]
        assert text == content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
        assert corpus.sha256 == hashlib.sha256(text.encode()).hexdigest()

    for number in range(cfg.corpora):
        content = UNUSUAL[number] if number < len(UNUSUAL) else bytes_like_text(rng)
        data.encoding = rng.choice(ENCODINGS) if number >= len(UNUSUAL) and rng.random() < 0.2 else None
        Path(data.path).write_bytes(content)
        status, output = in_a_fork(partial(read, content))
        yield Fault(f"{number} ({content[:40]!r}, {data.encoding})", not_refused(status, output) if status else [])


def bytes_like_text(rng: random.Random) -> bytes:
    """Return random bytes, or those of a random text: whole, damaged, or followed by a lone surrogate in UTF-8."""
    length = rng.choice([0, 1, 2, 17, 300, 3000])
    text = "".join(rng.choice("一二三\n\r\0\t aé\u0301👨\u200d👩\ufeff\u2028𠀀") for _ in range(length))
    content = text.encode(rng.choice(CODECS), "ignore")
    surrogate = content + b"\xed\xa0\x80"
    return rng.choice([rng.randbytes(length), content, cut_or_flipped(content or b"x", rng), surrogate])


def overrides(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[Fault]:
    """train gets random keys and values, and train.steps=0.

    It prints a description of the model, or refuses the command line in one line.
    """
    place = fresh(folder / "overrides")
    keys = [key for key in flat(compose([])) if key not in ("train.steps", "data.cache")]  # the cache stays in `place`
    keys += ["attn", "ffn", "data", "model", "experiment", "atn", "model.dims", "train.", ".", "a b"]
    for _ in range(cfg.overrides):
        line = [f"{rng.choice(keys)}={rng.choice(VALUES)}" for _ in range(rng.randint(1, 3))]
        status, output = in_a_fork(little_memory, partial(one_run, place, "train.steps=0", *line))
        yield Fault(ascii(shlex.join(line)), not_refused(status, output) if status else [])


def numbers(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[Fault]:
    """An attention trains for 200 steps at 10 or 1e30 times its learning rate. Its losses and weights stay finite, or
    the run stops with a line that names the step, what became inf or NaN (if anything), the learning rate and a remedy.
    """
    for number in range(cfg.numbers):
        variant, factor = rng.choice(variants()), (10, 1e30)[number % 2]
        usual = compose([f"attn={variant}"]).optim
        rates = [f"optim.lr={usual.lr * factor}", f"optim.min_lr={usual.min_lr * factor}"]
        config = compose([*given(fresh(folder / str(number)), *LONGER), *rates, f"attn={variant}"])
        status, output = in_a_fork(partial(train.train, config))
        last, record = output.rstrip().rsplit("\n", 1)[-1], Record.of(config)
        lost = [] if status == 2 and re.fullmatch(f"{STOPPED}|{DIVERGED}", last) else failed(status, output)
        if status == 0:
            losses = [value for row in record.rows() for key, value in row.items() if key.endswith("loss")]
            finite = [
                tensor.isfinite().all() for tensor in (*read_tensors(record.model).values(), torch.tensor(losses))
            ]
            lost = ["the run succeeded with a loss or a weight that is not finite"] * (not all(finite))
        yield Fault(f"{variant}, {factor} times", lost)
