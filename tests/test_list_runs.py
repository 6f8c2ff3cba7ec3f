"""Test the list of runs in the terminal: groups over seeds, globs, sorting, unfinished and damaged runs, sweeps."""

import json
import os
import pickle
import re
import time
from pathlib import Path

import pytest

import train
from configs.cli import Failure, Result
from data.files import UserError
from scripts import list_runs
from training.packed import find
from training.record import Record
from training.runs import matching, print_runs, read_run, run_folders

pytestmark = pytest.mark.slow

COMMITTED = Path(__file__).parents[1] / "results/runs"


def record(folder: Path, fit: float = 10.0, age: float = 0.0, **changes) -> Path:
    """Write an invented record of a run of three steps, dated `age` seconds ago, and return its folder.

    `changes` are keys of its summary with their values.
    """
    attn, _, seed = folder.name.partition("-seed")
    like = find(COMMITTED / "small/aft-lr=0.002-seed0").read_summary()
    like |= {"experiment": folder.parent.name, "name": folder.name, "attn": attn, "seed": int(seed), "steps": 3}
    like |= {"tokens_per_second": 1000 * fit, "parameters": 12345}
    like["evaluation"]["fit"]["perplexity"] = fit
    like["evaluation"]["heldout"]["perplexity"] = 200 - fit
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    (folder / "summary.json").write_text(json.dumps(like | changes))
    for path in folder.iterdir():
        os.utime(path, (time.time() - age,) * 2)
    return folder


def rows_of(printed: str) -> list[dict]:
    """Return the rows of a printed table. The line of dashes below its head shows where the columns are."""
    lines = printed.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("---"))
    spans = [found.span() for found in re.finditer("-+", lines[rule])]
    head, *below = ([line[a:b].strip() for a, b in spans] for line in (lines[rule - 1], *lines[rule + 1 :]))
    return [dict(zip(head, cells, strict=True)) for cells in below]


def listed(monkeypatch, capsys, *arguments: str) -> list[dict]:
    """Return the rows that the command lists."""
    monkeypatch.setattr("sys.argv", ["list_runs.py", *arguments])
    list_runs.run()
    return rows_of(capsys.readouterr().out)


def test_runs_that_differ_only_in_their_seed_are_one_line(tmp_path, monkeypatch, capsys):
    record(tmp_path / "small/aft-seed0", fit=10, age=7300)
    record(tmp_path / "small/aft-seed12", fit=14, age=130)
    record(tmp_path / "small/aft-lr=0.1-seed0", fit=8, age=260_000)
    record(tmp_path / "novel/aft-seed0", fit=4, age=900_000)
    several, other_rate, other_experiment = listed(monkeypatch, capsys, f"runs={tmp_path}")
    assert several == {
        "experiment": "small", "name": "aft", "seeds": "0, 12", "status": "finished",
        "fit perplexity": "12.00 ± 2.83", "held-out perplexity": "188.00 ± 2.83",
        "tokens/s": "12,000", "parameters": "12,345", "age": "2 min",
    }  # fmt: skip
    assert (other_rate["name"], other_rate["fit perplexity"], other_rate["age"]) == ("aft-lr=0.1", "8.00", "72.2 hours")
    assert (other_experiment["experiment"], other_experiment["age"]) == ("novel", "10.4 days")


def test_a_run_that_has_written_nothing_yet_is_unfinished(tmp_path):
    run = read_run(Record(tmp_path / "small/aft-seed0"))  # like one that has just deleted its files to start anew
    assert (run.status, run.name, run.seed) == ("unfinished", "aft", 0)


def test_runs_are_sorted_as_asked(tmp_path, monkeypatch, capsys):
    for name, fit, age in (("aft", 20, 500), ("gmlp", 10, 1000), ("mha", 30, 100)):
        record(tmp_path / f"small/{name}-seed0", fit, age)
    (record(tmp_path / "small/gau-seed0", age=2000) / "summary.json").unlink()  # without figures, and the oldest

    def order(*arguments: str) -> list[str]:
        return [row["name"] for row in listed(monkeypatch, capsys, f"runs={tmp_path}", *arguments)]

    assert order() == order("sort=newest") == ["mha", "aft", "gmlp", "gau"]
    assert order("sort=fit") == ["gmlp", "aft", "mha", "gau"]
    assert order("sort=heldout") == order("sort=tokens_per_second") == ["mha", "aft", "gmlp", "gau"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", ["novel/aft-seed0", "small/aft-lr=0.1-seed0", "small/aft-seed0", "small/aft-seed1"]),
        ("small/aft*", ["small/aft-lr=0.1-seed0", "small/aft-seed0", "small/aft-seed1"]),
        ("small/aft", ["small/aft-seed0", "small/aft-seed1"]),
        ("small/*-seed0", ["small/aft-lr=0.1-seed0", "small/aft-seed0"]),
        ("aft-seed[12]", ["small/aft-seed1"]),
        ("*/aft", ["novel/aft-seed0", "small/aft-seed0", "small/aft-seed1"]),
    ],
)
def test_a_glob_chooses_runs(pattern, found, tmp_path):
    for name in ("small/aft-seed0", "small/aft-seed1", "small/aft-lr=0.1-seed0", "novel/aft-seed0"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    folders = run_folders(tmp_path)
    assert [str(folder.relative_to(tmp_path)) for folder in matching(folders, pattern)] == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["match=gmlp*"], "none of the 1 runs matches gmlp*: one of them is small/aft-seed0"),
        (["match=a,b"], "none of the 1 runs matches a,b"),
        (["match="], "match must be a glob over <experiment>/<name>, like small/aft*: got ''"),
        (["runs=nowhere"], "there are no runs in nowhere: python train.py makes one"),
    ],
)
def test_what_cannot_be_listed_ends_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    record(tmp_path / "small/aft-seed0")
    monkeypatch.setattr("sys.argv", ["list_runs.py", f"runs={tmp_path}", *arguments])
    with pytest.raises(SystemExit, match="2"):
        list_runs.run()
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_runs_that_are_not_finished_are_shown_as_such(tmp_path, capsys):
    record(tmp_path / "small/aft-seed0", fit=10)
    record(tmp_path / "small/aft-seed1", fit=99, status="diverged")
    record(tmp_path / "small/gau-seed0", status="interrupted", tokens_per_second=None)
    (record(tmp_path / "small/mha-seed0") / "summary.json").unlink()
    begun = record(tmp_path / "small/rwv-seed0")
    (begun / "summary.json").unlink()
    (begun / "metrics.jsonl").write_text("")
    print_runs(map(find, run_folders(tmp_path)), "fit")
    rows = {row["name"]: row for row in rows_of(capsys.readouterr().out)}
    assert rows["aft"]["status"] == "1 finished, 1 diverged at step 3"
    assert rows["aft"]["fit perplexity"] == "10.00"
    assert rows["gau"]["status"] == "interrupted at step 3"
    assert rows["mha"]["status"] == "unfinished at step 3"
    assert rows["rwv"]["status"] == "unfinished"
    for name in ("gau", "mha", "rwv"):
        assert (rows[name]["fit perplexity"], rows[name]["held-out perplexity"], rows[name]["tokens/s"]) == ("–",) * 3


def test_figures_that_are_not_there_or_not_finite(tmp_path, capsys):
    """Runs with data.holdout=0 have no held-out figures, and older records may hold infinite ones."""
    evaluation = {"fit": {"loss": 1.0, "perplexity": 7.0, "characters": 9}, "tokens_per_second": None}
    record(tmp_path / "small/aft-seed0", evaluation=evaluation)
    record(tmp_path / "small/gau-seed0", fit=float("inf"))
    record(tmp_path / "small/gau-seed1")
    print_runs(map(find, run_folders(tmp_path)), "fit")
    aft, gau = rows_of(capsys.readouterr().out)
    assert (aft["fit perplexity"], aft["held-out perplexity"]) == ("7.00", "–")
    assert (gau["fit perplexity"], gau["tokens/s"]) == ("inf", "–")


@pytest.mark.parametrize("content", ['{"status": ', '{"status": "finished"}'])
def test_a_damaged_record_is_named_and_left_out(tmp_path, capsys, content):
    path = record(tmp_path / "small/aft-seed0") / "summary.json"
    path.write_text(content)
    with pytest.raises(UserError, match=re.escape(f"none of these runs can be read: {path} is damaged")):
        print_runs(map(find, run_folders(tmp_path)), "fit")
    record(tmp_path / "small/mha-seed0")
    print_runs(map(find, run_folders(tmp_path)), "fit")
    printed = capsys.readouterr()
    assert [row["name"] for row in rows_of(printed.out)] == ["mha"]
    assert printed.err.startswith(f"left out: {path} is damaged")


def test_a_sweep_ends_with_its_runs(tiny, tmp_path, monkeypatch, capsys):
    """The sweep's finished runs, and no others, are listed by fit perplexity, then its failed jobs are named."""
    monkeypatch.setattr(Result, "folders", [])
    monkeypatch.setattr(Failure, "known", [])
    record(tmp_path / "runs/small/mha-seed0", fit=1e-3)  # of no sweep
    monkeypatch.setattr("sys.argv", ["train.py", "-m", *tiny, "attn=aft_simple,gau", "optim.lr=-1,1e-2"])
    with pytest.raises(SystemExit, match="1"):
        train.run()
    printed = capsys.readouterr()
    best, worse = rows_of(printed.out)
    assert {row["name"].split("-")[0] for row in (best, worse)} == {"aft_simple", "gau"}
    assert 0.01 < float(best["fit perplexity"]) < float(worse["fit perplexity"])
    assert "2 of the sweep's jobs failed:" in printed.err


def test_one_run_ends_without_a_list(tiny, monkeypatch, capsys):
    monkeypatch.setattr(Result, "folders", [])
    monkeypatch.setattr("sys.argv", ["train.py", *tiny])
    train.run()
    printed = capsys.readouterr().out
    assert "fit perplexity" in printed
    assert "by fit perplexity" not in printed


def test_a_result_that_arrives_from_another_process_is_known(monkeypatch):
    monkeypatch.setattr(Result, "folders", [])
    sent = pickle.dumps(Result(1.5, Path("out/runs/small/aft-seed0")))
    Result.folders.clear()
    assert pickle.loads(sent) == 1.5
    assert Result.folders == [Path("out/runs/small/aft-seed0")]
