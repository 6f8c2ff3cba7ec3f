"""Runs that start with another run's weights and vocabulary."""

import shutil

import pytest
import torch

import training.divergence
from configs.cli import compose
from data.files import UserError, write_json
from tests.helpers.runs import assert_the_same, folder_of, train_for
from train import train
from training import checkpoint
from training.loading import load_run
from training.record import Record

pytestmark = pytest.mark.slow


@pytest.fixture
def first(tiny):
    """Return the folder of a finished run. Its vocabulary is 99 of the text's 194 characters and the unknown symbol."""
    cfg = compose([*tiny, "data.vocab_size=100", "optim.lr=0.01"])
    train(cfg)
    return folder_of(cfg)


@pytest.fixture
def later(tiny, first):
    """Return the overrides of a run that starts with the weights of `first`."""
    return [*tiny, "data.vocab_size=100", f"train.init_from={first}"]


def test_a_run_starts_with_the_weights_of_another(later, first, capsys):
    cfg, started = compose([*later, "seed=5"]), {}

    def note(trainer):
        if trainer.step == 0:
            started.update({name: value.clone() for name, value in trainer.model.state_dict().items()})

    train(cfg, note)
    weights = load_run(first).model.state_dict()
    assert started.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(started[name], weight), name
    name = f"small/{first.name}"
    output = capsys.readouterr().out
    assert f"the initial weights and the vocabulary are those of {name}\n" in output
    assert "finished before" not in output
    summary = Record.of(cfg).read_summary()
    assert summary["init_from"] == {"run": name, "weights_sha256": Record(first).read_summary()["weights_sha256"]}
    assert summary["weights_sha256"] != summary["init_from"]["weights_sha256"]
    assert train(compose([*later, "seed=5"])) == summary


def test_another_text_is_tokenised_with_the_first_run_s_vocabulary(later, first, text, tmp_path, capsys):
    known = Record(first).read_vocabulary()
    other = tmp_path / "other.txt"
    symbols = [*known[:10], "新"]
    other.write_text("".join(symbols[i % 11] for i in range(3300)), encoding="utf-8")
    cfg = compose([*(a for a in later if not a.startswith("data.path")), f"data.path={other}"])
    train(cfg)
    run = load_run(folder_of(cfg))
    assert run.vocabulary == known
    assert run.text["fit"].flatten()[:11].tolist() == [*range(10), 99]
    assert run.text["utf8_bytes"][99] == 3
    assert "9.09% of the text unknown to the vocabulary of train.init_from" in capsys.readouterr().out


def test_a_character_that_the_vocabulary_lacks_is_named(tiny, tmp_path):
    whole = compose(tiny)
    train(whole)
    other = tmp_path / "other.txt"
    other.write_text("新一" * 900, encoding="utf-8")
    given = [*(a for a in tiny if not a.startswith("data.path")), f"data.path={other}"]
    with pytest.raises(UserError, match=r"no unknown symbol and lacks characters of this text, 1 in all, like '新'"):
        train(compose([*given, f"train.init_from={folder_of(whole)}"]))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("model.dim=48", r"is a run with model\.dim=24: got model\.dim=48"),
        ("model.heads=4", r"is a run with model\.heads=3: got model\.heads=4"),
        ("model.context=32", r"is a run with model\.context=16: got model\.context=32"),
        (
            "attn=mha",
            r"is a run with attn\.position_weight\._target_=attn\.position_weights\.Toeplitz: got attn\.",
        ),
        ("ffn=attention", r"is a run with ffn\._target_=models\.ffn\.GLU: got ffn\._target_=null"),
        ("data.vocab_size=null", r"is a run with data\.vocab_size=100: got data\.vocab_size=null"),
    ],
)
def test_another_model_is_refused(later, tmp_path, changed, message):
    key = changed.split("=")[0]
    with pytest.raises(UserError, match=message):
        train(compose([*(a for a in later if a.split("=")[0] != key), changed]))
    assert len(list((tmp_path / "runs/small").iterdir())) == 1


def test_settings_that_do_not_change_what_weights_compute_may_differ(later):
    changed = ["model.dropout=0.1", "model.init_std=0.01", "attn.position_weight.initial_f=decays"]
    assert train(compose([*later, *changed]))["status"] == "finished"


def test_a_run_that_is_missing_or_not_finished_is_refused(tiny, tmp_path):
    cfg = compose([*tiny, "train.steps=9", "train.checkpoint_seconds=0"])
    train_for(5, cfg)
    for folder in (tmp_path / "nowhere", folder_of(cfg)):
        with pytest.raises(UserError, match=rf"train\.init_from={folder} holds no finished run: give a folder"):
            train(compose([*tiny, f"train.init_from={folder}"]))


def test_a_continued_run_equals_one_that_never_stopped(later, first, tmp_path):
    long = [*later, "train.steps=9", "train.checkpoint_seconds=0"]
    whole, cut = compose([*long, f"runs={tmp_path}/whole"]), compose(long)
    train(whole)
    train_for(5, cut)
    train(cut)
    assert_the_same(folder_of(cut), folder_of(whole))


@pytest.mark.parametrize("steps", [5, None])
def test_other_weights_in_the_same_folder_are_noticed(later, first, tiny, steps):
    """The run has been cut after 5 steps, or is finished."""
    long = [*later, "train.steps=9", "train.checkpoint_seconds=0"]
    train_for(steps, compose(long)) if steps else train(compose(long))
    shutil.rmtree(first)
    other = compose([*tiny, "data.vocab_size=100", "optim.lr=0.01", "seed=1"])
    train(other)
    folder_of(other).rename(first)
    with pytest.raises(UserError, match=r"was begun with other weights .*: resume=false starts it again"):
        train(compose(long))
    assert train(compose([*long, "resume=false"]))["status"] == "finished"


def test_a_damaged_vocabulary_is_named(later, first):
    write_json(Record(first).vocabulary, [None, *Record(first).read_vocabulary()[:-1]])
    with pytest.raises(UserError, match=r"vocabulary\.json is damaged: it is not a list of characters"):
        train(compose(later))


def test_a_search_for_the_first_nan_starts_from_the_first_run_s_weights(later, first, monkeypatch):
    found = []

    def rewind(trainer):
        checkpoint.rewind(trainer)
        found.append(trainer.model.embed.weight.detach().clone())

    def spoil(trainer):
        with torch.no_grad():
            trainer.model.head.weight.fill_(torch.nan)

    monkeypatch.setattr(training.divergence, "rewind", rewind)
    with pytest.raises(UserError, match="became inf or NaN"):
        train(compose(later), spoil)
    assert torch.equal(found[0], load_run(first).model.embed.weight)
