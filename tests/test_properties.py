"""Test properties that hold for any input. Hypothesis tries the same inputs on every machine."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from configs.cli import compose
from configs.folder import flat
from configs.messages import MISTAKES, explain
from data import corpus as corpora
from data.batches import crops, plain_windows, sliding_windows, spread_windows
from data.files import UserError, write_json
from data.reading import read_json
from models.sampling import Sampler
from training.optimizer import learning_rate

pytestmark = pytest.mark.slow

same = settings(derandomize=True, deadline=None, database=None, max_examples=40)
few = settings(same, max_examples=12)  # for slow tests
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)
NUMBER = st.floats(1e-6, 1e6)
FILE = compose(["data=file", "data.path=a", "data.processes=1"])
KEYS = [key for key in flat(compose([])) if not key.startswith("job.")]


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
