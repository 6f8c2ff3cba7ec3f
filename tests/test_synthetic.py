"""Synthetic texts: every answer follows from its row, crops and windows are rows, and accuracy is recorded."""

import hashlib
import json

import numpy as np
import pytest
import torch

import evaluate as evaluate_command
from configs.cli import compose
from configs.messages import MISTAKES, explain
from data import corpus as corpora
from data.batches import answers, check_length, crops, plain_windows, spread_windows
from data.files import UserError, write_json
from data.synthetic import LOWER, TRIGGER, UPPER, induction, recall
from scripts import dashboard
from scripts.reporting import figures, table
from tests.conftest import TINY
from tests.helpers.runs import assert_the_same, folder_of, rows_of, train_for
from train import train
from training.evaluation import evaluate, final_text, score
from training.loading import load_run
from training.packed import find
from training.record import Record
from training.runs import print_runs, run_folders
from training.summaries import read_summary

CPU = torch.device("cpu")
RECALL = {"length": 20, "sequences": 1500, "keys": 9, "values": 5, "pairs": 4, "seed": 3}
INDUCTION = {"length": 11, "sequences": 1500, "symbols": 6, "seed": 3}
HARD = {"length": 256, "sequences": 20, "keys": 64, "values": 64, "pairs": 64, "seed": 0}


def text_of(source) -> str:
    return "".join(source.pieces())


def rows(source) -> list[str]:
    text = text_of(source)
    assert len(text) % source.row_length == 0
    return [text[start : start + source.row_length] for start in range(0, len(text), source.row_length)]


def load(tmp_path, *overrides: str):
    return corpora.load(compose([f"data.cache={tmp_path}/cache", *overrides]).data)


@pytest.fixture
def short_rows(tmp_path):
    """Return the overrides of a short run on 200 rows of 16 characters: 2 pairs, and 6 queries with their answers."""
    places = [f"runs={tmp_path}/runs", f"wandb.dir={tmp_path}", f"data.cache={tmp_path}/cache", "wandb.mode=disabled"]
    return [*TINY, "data=recall", "data.sequences=200", "data.pairs=2", *places]


# The texts


@pytest.mark.parametrize("numbers", [RECALL, HARD, RECALL | {"length": 10}, RECALL | {"keys": 4}])
def test_every_row_of_recall_begins_with_the_pairs_that_it_repeats(numbers):
    source, drawn = recall(**numbers), set()
    found = rows(source)
    assert (source.row_length, len(found)) == (numbers["length"], numbers["sequences"])
    for row in found:
        known = {}
        for place in range(0, len(row), 2):
            key, value = row[place], row[place + 1]
            if place < 2 * numbers["pairs"]:
                assert key not in known
                known[key] = value
            assert value == known[key]
            drawn.add(key + value)
    assert {key for key, _ in drawn} == set(source.keys) == set(LOWER[: numbers["keys"]])
    assert {value for _, value in drawn} == set(UPPER[: numbers["values"]])
    if numbers == RECALL:
        assert len(drawn) == 9 * 5  # the same key has other values in other rows
        asked = {row[8::2] for row in found}
        assert len(asked) > 1000


def test_a_row_of_induction_ends_with_what_followed_the_trigger():
    places, followers = set(), set()
    source = induction(**INDUCTION)
    found = rows(source)
    assert (source.row_length, source.keys, len(found)) == (11, TRIGGER, 1500)
    for row in found:
        first, last = (place for place, character in enumerate(row) if character == TRIGGER)
        assert last == len(row) - 2
        assert row[last + 1] == row[first + 1]
        places.add(first)
        followers.add(row[-1])
    assert places == set(range(len(row) - 3))
    assert followers == set(LOWER[:6])


@pytest.mark.parametrize(("make", "numbers"), [(recall, RECALL), (induction, INDUCTION)])
def test_a_text_follows_from_its_numbers_alone(make, numbers):
    source = make(**numbers)
    text = text_of(source)
    assert text == text_of(source) == text_of(make(**numbers))
    for name in numbers:
        other = make(**numbers | {name: numbers[name] + 2})
        assert text_of(other) != text
        assert other.identity != source.identity


def test_the_default_texts_do_not_change():
    """Committed records contain the sha256 of their text."""
    sizes = {"length": 128, "sequences": 12800, "seed": 0}
    texts = recall(**sizes, keys=8, values=8, pairs=8), induction(**sizes, symbols=16)
    hashes = [hashlib.sha256(text_of(source).encode()).hexdigest()[:12] for source in texts]
    assert hashes == ["0086420c2198", "e9163e6163c2"]


def test_there_are_hundreds_of_letters_and_all_are_different():
    assert len(LOWER) == len(UPPER) > 400
    assert len({*LOWER, *UPPER, TRIGGER}) == 2 * len(LOWER) + 1
    assert all(len(letter) == 1 and letter.isalpha() for letter in (*LOWER, *UPPER))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["data.pairs=9"], "data.pairs must be at most data.keys=8: got 9"),
        (["data.length=127", "model.context=127"], "data.length must be even, since rows consist of keys and values"),
        (["model.context=16"], "data.length=16 must be more than twice data.pairs=8"),
        (["data.keys=500"], "data.keys must be from 1 to 479, the number of letters: got 500"),
        (["data.values=0"], "data.values must be 1 or more: got 0"),
        (["data.source.values=0"], "data.values must be from 1 to 479"),
        (["data.source.sequences=0"], "data.sequences must be 1 or more: got 0"),
        (["data.source.seed=-1"], "data.text_seed must be 0 or more: got -1"),
        (["data.text_seed=-1"], "data.text_seed must be 0 or more: got -1"),
        (["data.vocab_size=12"], "each of the 16 characters of recall needs an id: take data.vocab_size=null"),
        (["data.sequences=19"], "data.holdout=0.05 of 19 rows is less than one row: take a larger data.holdout"),
        (
            ["data=induction", "data.length=3"],
            "data.length must be 4 or more, to hold the trigger and its answer twice",
        ),
        (["data=induction", "data.symbols=480"], "data.symbols must be from 1 to 479"),
    ],
)
def test_impossible_texts_are_refused_in_one_line(given, message, tmp_path):
    with pytest.raises(MISTAKES) as refused:
        load(tmp_path, "data=recall", "data.sequences=40", *given)
    line = explain(refused.value, "config")
    assert message in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["data.length=18"], "data.length must be model.context=16, so that every window is a row of the text: got 18"),
        (["data.sequences=39"], "model.context=16 needs more than 16 held-out characters, there are 16"),
    ],
)
def test_rows_that_do_not_fit_the_windows_are_refused(given, message, short_rows):
    with pytest.raises(UserError) as refused:
        train(compose([*short_rows, *given]))
    assert str(refused.value).startswith(message)


# Crops, windows and answers


def test_both_texts_are_whole_rows(tmp_path):
    corpus = load(tmp_path, "data=recall", "model.context=20", "data.sequences=130", "data.holdout=0.1")
    assert (len(corpus.training), len(corpus.heldout)) == (117 * 20, 13 * 20)
    assert "".join(corpus.vocabulary[i] for i in corpus.key_ids()) == "".join(
        sorted(corpus.keys, key=corpus.vocabulary.index)
    )
    odd = load(tmp_path, "data=recall", "model.context=20", "data.sequences=130", "data.holdout=0.03")
    assert (len(odd.training), len(odd.heldout)) == (127 * 20, 3 * 20)
    even = load(tmp_path, "data=recall", "model.context=20", "data.sequences=100", "data.holdout=0.29")
    assert (len(even.training), len(even.heldout)) == (71 * 20, 29 * 20)


@pytest.mark.parametrize("kind", ["file", "device"])
def test_crops_begin_with_a_row(kind):
    """Every row that has a character after it can be drawn. Ids in a tensor give the same crops as ids in an array."""
    ids = np.arange(100)
    some = ids if kind == "file" else torch.from_numpy(ids)
    starts = set()
    for step in range(100):
        x, y = crops(some, 10, 8, 0, step, 10)
        assert torch.equal(x, x[:, :1] + torch.arange(10))
        assert torch.equal(y, x + 1)
        assert torch.equal(x, crops(ids, 10, 8, 0, step, 10)[0])
        starts |= set(x[:, 0].tolist())
    assert starts == set(range(0, 90, 10))


def test_crops_of_texts_without_rows_begin_anywhere():
    ids = np.arange(1000)
    starts = np.random.default_rng([5, 7]).integers(0, 1000 - 16, 8)
    assert crops(ids, 16, 8, 5, 7)[0][:, 0].tolist() == starts.tolist()


def answers_by_loops(windows: list[list[int]], keys: set[int]) -> list[list[bool]]:
    return [[x in keys and x in window[:t] for t, x in enumerate(window)] for window in windows]


def test_answers_follow_keys_that_occurred_before():
    ids = torch.randint(12, (40, 30), generator=torch.Generator().manual_seed(0))
    keys = torch.tensor([1, 3, 4, 11])
    found = answers(ids, keys)
    assert found.tolist() == answers_by_loops(ids.tolist(), {1, 3, 4, 11})
    assert 0 < found.sum() < found.numel()
    assert not answers(ids, torch.tensor([], dtype=torch.int32)).any()


@pytest.mark.parametrize(
    ("given", "per_row"),
    [
        (["data=recall", "data.pairs=4"], 6),
        (["data=recall", "data.keys=40", "data.pairs=7"], 3),
        (["data=induction"], 1),
    ],
)
def test_every_window_has_the_answers_of_its_row(given, per_row, tmp_path):
    corpus = load(tmp_path, *given, "model.context=20", "data.sequences=60")
    keys = torch.tensor(corpus.key_ids())
    for windows in (
        spread_windows(corpus.training, 20, 50),
        plain_windows(torch.from_numpy(np.array(corpus.training)), 20),
    ):
        windows = windows.long()
        mask = answers(windows[:, :-1], keys)
        assert (mask.sum(1) == per_row).all()
        assert not mask[:, -1].any()  # the target of the last character is in the next row
        for window, row in zip(windows.tolist(), mask, strict=True):
            for place in row.nonzero().flatten().tolist():  # each time, the same character follows the key
                assert window[place + 1] == window[window.index(window[place]) + 1]


# Accuracy


class Copier(torch.nn.Module):
    """Predicts what followed the first occurrence of the same character, or id 0 if there was none."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary = vocabulary

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        predicted = torch.zeros_like(ids)
        for b, window in enumerate(ids.tolist()):
            for t, character in enumerate(window):
                if character in window[:t]:
                    predicted[b, t] = window[window.index(character) + 1]
        return torch.nn.functional.one_hot(predicted, self.vocabulary).float()


class Guesser(torch.nn.Module):
    """Predicts one of the ids in `among` at random."""

    def __init__(self, vocabulary: int, among: list[int]):
        super().__init__()
        self.vocabulary, self.among = vocabulary, torch.tensor(among)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        predicted = self.among[torch.randint(len(self.among), ids.shape, generator=self.generator)]
        return torch.nn.functional.one_hot(predicted, self.vocabulary).float()


@pytest.mark.parametrize("kind", ["recall", "induction"])
def test_perfect_prediction_has_accuracy_1_and_guessing_that_of_chance(kind, tmp_path):
    corpus = load(tmp_path, f"data={kind}", "model.context=64", "data.sequences=2000")
    text, size = final_text(corpus, 64, 10_000), len(corpus.vocabulary)
    perfect = evaluate(Copier(size), text, 64, 64, CPU)
    answers_per_row, values = (24, 8) if kind == "recall" else (1, 16)
    for name, count in (("fit", 1899), ("heldout", 99)):
        assert perfect[name]["accuracy"] == 1
        assert perfect[name]["answers"] == answers_per_row * count
        assert perfect[name]["characters"] == 64 * count
    assert "sliding" not in perfect
    guess = Guesser(
        size, [i for i, symbol in enumerate(corpus.vocabulary) if symbol in UPPER[:8] + LOWER[:16] * (kind != "recall")]
    )
    found = evaluate(guess, text, 64, 64, CPU)["fit"]
    assert found["accuracy"] == pytest.approx(1 / values, abs=4 * (values * found["answers"]) ** -0.5)


def test_without_keys_there_is_no_accuracy():
    windows = torch.randint(9, (3, 17))
    assert "accuracy" not in score(Copier(9), windows, None, CPU)
    assert (
        score(Copier(9), windows, None, CPU, keys=torch.tensor([], dtype=torch.int32))
        .keys()
        .isdisjoint({"accuracy", "answers"})
    )


# Runs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recall", "induction"])
def test_a_run_records_its_accuracy(kind, short_rows, capsys, monkeypatch):
    given = [
        f"data={kind}" if part == "data=recall" else part
        for part in short_rows
        if kind == "recall" or "pairs" not in part
    ]
    cfg = compose([*given, "train.steps=6", "evaluation.final_windows=1000"])
    evaluation = train(cfg)["evaluation"]
    per_row = 6 if kind == "recall" else 1
    output = capsys.readouterr().out
    assert [evaluation[name]["answers"] for name in ("fit", "heldout")] == [189 * per_row, 9 * per_row]
    assert "sliding" not in evaluation
    last = rows_of(folder_of(cfg))[-1]
    assert {"fit_accuracy", "heldout_accuracy"} <= last.keys()
    assert f"; accuracy fit {last['fit_accuracy']:.4f}, held-out {last['heldout_accuracy']:.4f}\n" in output
    assert f"held-out accuracy {evaluation['heldout']['accuracy']:14.4f}   over {9 * per_row} answers" in output
    run = load_run(folder_of(cfg))
    assert evaluate(run.model, run.text, 16, 8, CPU)["heldout"] == evaluation["heldout"]
    monkeypatch.setattr("sys.argv", ["evaluate.py", f"run={folder_of(cfg)}", "context=8"])
    with pytest.raises(SystemExit, match="2"):
        evaluate_command.run()
    assert "context must be 16, the length of a row of the text that the run kept: got 8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_continued_run_equals_one_that_never_stopped(short_rows, tmp_path):
    whole, cut = (compose([*short_rows, f"runs={tmp_path}/{name}", "train.checkpoint_seconds=0"]) for name in "ab")
    train(whole)
    train_for(3, cut)
    train(cut)
    assert_the_same(folder_of(cut), folder_of(whole))


@pytest.mark.slow
def test_a_small_model_learns_to_recall(tmp_path):
    overrides = [
        "attn=mha",
        "experiment=recall",
        "model.dim=64",
        "model.context=32",
        "data.pairs=4",
        "data.sequences=6000",
    ]
    places = [f"runs={tmp_path}/runs", f"data.cache={tmp_path}/cache", "wandb.mode=disabled", "train.device=cpu"]
    budget = [
        "train.steps=250",
        "optim.lr=3e-3",
        "evaluation.every=250",
        "train.compile=false",
        "train.precision=float32",
    ]
    evaluation = train(compose([*overrides, *places, *budget]))["evaluation"]
    assert evaluation["heldout"]["accuracy"] > 0.5  # a random value: 1/8; always the row's most frequent one: 0.41


# Lists and tables


@pytest.fixture
def with_accuracy(tmp_path):
    """Return a folder with two made-up runs that have an accuracy, and one that has none."""
    for name, accuracy in (("aft-seed0", 0.25), ("aft-seed1", 0.75), ("mha-seed0", None)):
        summary = committed_summary() | {"name": name, "attn": name[:3], "seed": int(name[-1]), "steps": 3}
        if accuracy is not None:
            for text in ("fit", "heldout"):
                summary["evaluation"][text] |= {"accuracy": accuracy, "answers": 100}
        folder = tmp_path / "runs/small" / name
        folder.mkdir(parents=True)
        row = {"step": 3, "tokens": 3, "seconds": 1, "fit_perplexity": 2.0, "fit_accuracy": accuracy}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        write_json(folder / "summary.json", summary)
    return tmp_path / "runs"


def committed_summary() -> dict:
    return find(folder_of(compose(["attn=aft", "experiment=small", "seed=0", "runs=results/runs"]))).read_summary()


def test_the_list_shows_accuracy_where_there_is_one(with_accuracy, capsys):
    print_runs(map(Record, run_folders(with_accuracy)), "newest")
    output = capsys.readouterr().out
    assert "held-out accuracy" in output.splitlines()[0]
    assert "0.5000 ± 0.3536" in output
    print_runs([Record(with_accuracy / "small/mha-seed0")], "newest")
    assert "accuracy" not in capsys.readouterr().out


def test_the_dashboard_shows_accuracy_where_there_is_one(with_accuracy, tmp_path):
    data = dashboard.collect(with_accuracy, tmp_path)
    labels = [column["label"] for column in data["columns"]]
    place = labels.index("held-out accuracy")
    assert labels[place - 1] == "fit accuracy"
    assert [run["cells"][place] for run in data["runs"]] == [0.25, 0.75, None]
    assert [run["curves"]["fit_accuracy"]["value"] for run in data["runs"]] == [[0.25], [0.75], []]
    for seed in (0, 1):
        (with_accuracy / f"small/aft-seed{seed}/summary.json").unlink()
    labels = [column["label"] for column in dashboard.collect(with_accuracy, tmp_path)["columns"]]
    assert not any("accuracy" in label for label in labels)


def test_figures_out_of_range_are_refused(with_accuracy):
    record = Record(with_accuracy / "small/aft-seed0")
    summary = read_summary(record)
    for figure, wrong in (("accuracy", 1.5), ("answers", 0)):
        broken = summary["evaluation"] | {"heldout": summary["evaluation"]["heldout"] | {figure: wrong}}
        write_json(record.summary, summary | {"evaluation": broken})
        with pytest.raises(UserError, match=f"evaluation.heldout.{figure} must be from"):
            read_summary(record)


def test_the_table_has_lines_of_accuracy_where_there_is_one(with_accuracy):
    cfg = compose(["runs=null", "rows=[mha,aft]", "ratio_to=mha"], "compare")
    runs = {name: [] for name in cfg.rows}
    for folder in run_folders(with_accuracy):
        summary = read_summary(Record(folder))
        runs[summary["attn"]].append(summary)
    columns = [table.Column("committed", runs, {}, "")]
    lines = {row: found for quantity, row, found in table.table_lines(cfg, columns) if quantity == table.ACCURACY}
    assert lines["mha"] == [None, None]
    assert lines["aft"] == [figures.Figure(0.5, "0.5000 ± 0.3536"), None]
    assert any(note.startswith("Accuracy: the share of the 100 answers") for note in table.origins(cfg, columns))
    (source,) = (
        found[-1] for what, row, found in table.table_lines(cfg, columns) if (what, row) == ("fit perplexity", "aft")
    )
    assert source.text == "13.53"  # though the source has no MHA to compare it with
    columns = [table.Column("committed", runs | {"aft": []}, {}, "")]
    assert not any(quantity == table.ACCURACY for quantity, _, _ in table.table_lines(cfg, columns))
    assert not any("ccuracy" in note for note in table.origins(cfg, columns))


def test_windows_of_other_texts_have_any_length():
    check_length(1000, 100, 99)
    with pytest.raises(UserError, match="so that every window is a row"):
        check_length(1000, 500, 99, 98)
