"""Test properties that hold for any input. Hypothesis tries the same inputs on every machine."""

import codecs
import contextlib
import hashlib
import io
import json
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import train as train_script
from configs.cli import compose
from configs.folder import flat
from configs.messages import MISTAKES, explain
from data import corpus as corpora
from data.batches import crops, plain_windows, sliding_windows, spread_windows
from data.files import UserError, write_json
from data.reading import read_json, read_tensors
from models.sampling import Sampler
from tests.conftest import TINY, VARIANTS
from tests.helpers.lacks import little_memory
from tests.helpers.runs import in_a_new_process
from tests.torture.forks import failed, in_a_fork, not_refused, typed
from training.optimizer import learning_rate
from training.record import Record

pytestmark = pytest.mark.slow

same = settings(derandomize=True, deadline=None, database=None, max_examples=40)
few = settings(same, max_examples=12)  # for slow tests
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)
NUMBER = st.floats(1e-6, 1e6)
FILE = compose(["data=file", "data.path=a", "data.processes=1"])
KEYS = [key for key in flat(compose([])) if not key.startswith("job.")]
# The other keys would make the command train, or write outside the folder of the test.
TYPED = [key for key in KEYS if key not in ("train.steps", "data.cache", "runs", "wandb.dir")]
TYPED += ["attn", "ffn", "data", "model", "experiment", "atn", "model.dims", "train.", ".", "a b"]
VALUES = [
    "", "null", "-1", "0", "1", "1e9", "1e400", "nan", "-inf", "0.5", "true", "x", "[1,2]", "{a: 1}", "'", "∞",
    "${seed}", "${nothing}", "aft", "gmlp", "../x", "9" * 40, "é", "???", "👩\u200d👩", "\udcff", "a\nb",
]  # fmt: skip
CODECS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "gb18030", "big5", "utf-32"]
ENCODINGS = [*CODECS, "utf-7", "latin-1", "shift_jis", "idna", "unicode_escape", "hex", "zip", "rot13", "x\0"]
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
# The messages with which a run ends.
STOPPED = (
    r"the loss, the gradient or a weight is not finite after step \d+: "
    r"(?=.*(the output of|the gradient of|the loss|a weight|embed|blocks|norm|head)\S*.* became)"
    r".+ became inf or NaN at step \d+, at a learning rate of \S+; .*try .+"
)
DIVERGED = r"the run has diverged: after step \d+ the loss is \S+, .+ at optim\.lr=\S+; try .+"


@few
@given(TEXT, st.none() | st.integers(2, 6))
def test_ids_give_the_text_back(tmp_path_factory, text, vocab_size):
    """Every line end becomes LF. If the vocabulary is cut, some characters become the unknown symbol."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_bytes(text.encode())
    given = {"path": str(folder / "a.txt"), "cache": str(folder), "encoding": "utf-8", "vocab_size": vocab_size}
    corpus = corpora.load(OmegaConf.merge(FILE, {"data": given}).data)
    normal = text.replace("\r\n", "\n").replace("\r", "\n")
    back = [corpus.vocabulary[i] for i in corpus.ids]
    assert len(back) == len(normal)
    assert all(ours in (theirs, None) for ours, theirs in zip(back, normal, strict=True))
    assert (None in back) == (vocab_size is not None and len(set(normal)) > vocab_size)
    assert len(corpus.training) + len(corpus.heldout) == len(normal)


@st.composite
def bytes_like_text(draw) -> bytes:
    """Return a text in some encoding, perhaps cut off, with a flipped bit, or with a lone surrogate at its end."""
    text = draw(st.text("一二三\n\r\0\t aé\u0301👨\u200d👩\ufeff\u2028𠀀", max_size=300))
    content = bytearray(text.encode(draw(st.sampled_from(CODECS)), "ignore"))
    if content and draw(st.booleans()):
        content[draw(st.integers(0, len(content) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(content[: draw(st.none() | st.integers(0, 900))] + draw(st.sampled_from([b"", b"\xed\xa0\x80"])))


@settings(same, max_examples=100)
@given(st.binary(max_size=3000) | bytes_like_text(), st.none() | st.sampled_from(ENCODINGS))
def test_any_bytes_are_tokenised_unchanged_or_refused_in_one_line(tmp_path_factory, content, encoding):
    tokenised_or_refused(tmp_path_factory.mktemp("text"), content, encoding)


@pytest.mark.parametrize("content", UNUSUAL, ids=range(len(UNUSUAL)))
def test_an_unusual_text_is_tokenised_unchanged_or_refused_in_one_line(tmp_path, content):
    tokenised_or_refused(tmp_path, content, None)


def tokenised_or_refused(folder: Path, content: bytes, encoding: str | None) -> None:
    """Assert that a file is tokenised without a change other than line ends, or refused in one line."""
    (folder / "a.txt").write_bytes(content)
    given = {"path": str(folder / "a.txt"), "cache": str(folder), "encoding": encoding, "vocab_size": None}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            corpus = corpora.load(OmegaConf.merge(FILE, {"data": given}).data)
        except MISTAKES as error:
            message = explain(error, "config")
            assert re.fullmatch(".+", message), message
            return
    found = re.search(r"a\.txt: (\S+) \(", output.getvalue())[1]
    text = "".join(corpus.vocabulary[i] for i in corpus.ids.tolist())
    assert text == content.decode(found).replace("\r\n", "\n").replace("\r", "\n")
    assert corpus.sha256 == hashlib.sha256(text.encode()).hexdigest()


@same
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
        max_leaves=10,
    )
)
def test_json_is_read_as_it_was_written(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("json") / "a.json"
    write_json(path, content)
    assert read_json(path) == content


@same
@given(st.binary(max_size=60))
@example(b"1\x00")  # given these bytes, json.loads would decode them as UTF-16
@example(b"\xef\xbb\xbf1")
def test_what_is_not_json_is_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_bytes(content)
    try:
        expected = json.loads(content.decode())
    except ValueError:
        with pytest.raises(UserError, match="is damaged: it is not JSON"):
            read_json(path)
    else:
        assert repr(read_json(path)) == repr(expected)


@few
@given(
    st.sampled_from(KEYS),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8"), max_size=8),
)
def test_an_override_is_taken_unchanged_or_refused_in_one_line(key, value):
    written = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    try:
        cfg = compose([f"{key}={written}"])
    except (*MISTAKES, ValueError) as error:
        message = explain(error, "config")
        assert message
        assert "\n" not in message
    else:
        if value is None or isinstance(value, bool):
            assert flat(cfg)[key] is value
        elif isinstance(value, int | float):
            assert math.isclose(flat(cfg)[key], value, rel_tol=1e-12) or str(value) in str(flat(cfg)[key])


def test_a_command_line_describes_a_model_or_is_refused_in_one_line(tiny):
    in_a_new_process(try_command_lines, tiny)


def try_command_lines(usual: list[str]) -> None:
    @settings(same, max_examples=60)
    @given(st.lists(st.tuples(st.sampled_from(TYPED), st.sampled_from(VALUES)), min_size=1, max_size=3))
    def describes_or_refuses(line):
        words = [*usual, "train.steps=0", *(f"{key}={value}" for key, value in line)]
        status, output = in_a_fork(little_memory, partial(typed, train_script.run, *words))
        assert not (not_refused(status, output) if status else failed(status, output)), words
        assert status or "parameters" in output

    compose([*usual, "train.steps=0"])  # so that the forks inherit what it caches
    describes_or_refuses()


@settings(same, max_examples=6)
@given(st.sampled_from(VARIANTS), st.sampled_from([10, 1e30]))
def test_a_run_at_a_far_too_high_rate_stays_finite_or_says_when_it_diverged(text, tmp_path_factory, variant, factor):
    place = tmp_path_factory.mktemp("rate")
    usual = [
        *TINY,
        f"attn={variant}",
        "train.steps=200",
        "evaluation.every=100",
        "wandb.mode=disabled",
        f"runs={place}",
    ]
    cfg = compose([*usual, "data=file", f"data.path={text}", f"data.cache={place}"])
    cfg.optim.lr, cfg.optim.min_lr = cfg.optim.lr * factor, cfg.optim.min_lr * factor
    try:
        train_script.train(cfg)
    except UserError as error:
        message = str(error)
        assert re.fullmatch(f"{STOPPED}|{DIVERGED}", message), message
    else:
        record = Record.of(cfg)
        losses = [value for row in record.rows() for key, value in row.items() if key.endswith("loss")]
        assert all(math.isfinite(loss) for loss in losses)
        assert all(tensor.isfinite().all() for tensor in read_tensors(record.model).values())


@same
@given(st.integers(2, 400), st.integers(1, 50), st.integers(1, 9), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_crops_lie_in_the_text(length, context, batch, seed, step):
    assume(context < length)
    ids = np.arange(length)
    x, y = crops(ids, context, batch, seed, step)
    assert x.shape == y.shape == (batch, context)
    assert torch.equal(x, x[:, :1] + torch.arange(context))
    assert torch.equal(y, x + 1)
    assert x.min() >= 0
    assert y.max() < length


@same
@given(st.integers(2, 400), st.integers(1, 50), st.integers(1, 30), st.data())
def test_windows_lie_in_the_text_and_count_it_once(length, context, count, data):
    assume(context < length)
    ids = torch.arange(length)
    spread, plain = spread_windows(ids.numpy(), context, count), plain_windows(ids, context)
    windows, counted = sliding_windows(ids, context, data.draw(st.integers(1, context)))
    for some in (spread, plain, windows):
        assert torch.equal(some.long(), some[:, :1] + torch.arange(context + 1))
        assert 0 <= some.min() <= some.max() < length
    assert 1 <= len(spread) <= count
    assert sorted(windows[:, 1:][counted].tolist()) == list(range(1, length))


@same
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=12),
    st.builds(
        Sampler,
        temperature=st.just(0.0) | st.floats(1e-3, 1e3),
        top_k=st.none() | st.integers(1, 20),
        top_p=st.floats(0, 1),
        top_p_x=st.none() | st.floats(0, 1),
        min_p=st.none() | st.floats(0, 1),
        top_a=st.none() | st.floats(0, 1),
        top_a_power=NUMBER,
        repetition_penalty=NUMBER,
    ),
)
def test_a_sampler_gives_probabilities_and_keeps_the_likeliest(logits, sampler):
    logits = torch.tensor([logits])
    p = sampler.probabilities(logits, torch.zeros_like(logits, dtype=torch.bool))
    assert (p >= 0).all()
    torch.testing.assert_close(p.sum(), torch.ones((), dtype=p.dtype))
    assert p[logits == logits.max()].max() == p.max()


@same
@given(st.integers(1, 10_000), st.integers(0, 10_000), NUMBER, st.floats(0, 1), st.data())
def test_the_learning_rate_stays_between_its_ends(steps, warm_up, lr, share, data):
    optim = OmegaConf.create({"lr": lr, "min_lr": lr * share, "warm_up": warm_up})
    step = data.draw(st.integers(0, steps - 1))
    rate = learning_rate(step, steps, optim)
    least = lr / warm_up if step < warm_up else optim.min_lr
    assert min(least, lr) * (1 - 1e-9) <= rate <= lr * (1 + 1e-9)
