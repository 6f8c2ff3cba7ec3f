"""Test that records with impossible figures, as a stranger may make, are refused with a line that names the file."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from configs.cli import compose
from data.files import UserError, write_json
from data.reading import read_json
from scripts import dashboard
from scripts.reporting import claim_pages
from scripts.reporting import curves as curves_plot
from scripts.reporting import headline as headline_page
from scripts.reporting import table as table_page
from scripts.reporting.claims import all_claims, benchmark_record, extra_contents, overrides, seeds
from scripts.reporting.records import curves, record_of, speed_record, steps_record
from scripts.studies import rates
from tests.conftest import ROOT, unpacked
from training.record import Record
from training.runs import print_runs
from training.summaries import at, read_summary

pytestmark = pytest.mark.slow

LARGE = 10**400  # valid in JSON, but too large for a float
IMPOSSIBLE = [  # keys of a summary, and impossible values
    ("lr", "x"),
    ("lr", LARGE),
    ("steps", 0),
    ("tokens", 0),
    ("tokens", LARGE),
    ("parameters", LARGE),
    ("training_seconds", LARGE),
    ("tokens_per_second", LARGE),
    ("text_sha256", []),
    ("data.holdout", 1),
    ("data.characters", 0),
    ("evaluation.fit.loss", 1e5),
    ("evaluation.fit.loss", LARGE),
    ("evaluation.fit.loss", float("nan")),
    ("evaluation.fit.perplexity", LARGE),
    ("evaluation.fit.bits_per_byte", "x"),
    ("evaluation.heldout_best", {}),
    ("evaluation.heldout_best", {"step": "x", "perplexity": 1.0}),
]
READERS = ("table", "curves", "headline", "dashboard", "list_runs")


def copied(folder: Path, place: Path) -> Path:
    """Copy the folder of a run to `place`, and return the path of the summary there."""
    shutil.copytree(folder, place)
    return place / "summary.json"


def change(summary: Path, key: str, value: object) -> None:
    content = read_json(summary)
    *above, last = key.split(".")
    (at(content, ".".join(above)) if above else content)[last] = value
    summary.write_text(json.dumps(content))


@pytest.fixture
def stranger(tmp_path) -> Path:
    """Return the path of the summary of a valid run of AFT."""
    return unpacked("small/aft-initial_f=decays-lr=0.002-seed0", tmp_path / "runs") / "summary.json"


def readers(summary: Path) -> dict[str, Callable[[], object]]:
    """Return functions, by name, that read the record of a run and write nothing."""
    runs = summary.parents[2]
    given = [f"runs={runs}", "setup=small", "rows=[aft]", "seeds=[0]"]
    settings = {"setup": "small", "rows": ["aft"], "learning_rates": [0.002], "seeds": [0]}
    headline = OmegaConf.merge(compose([], "report").headline[0], settings)
    committed = [f"committed={ROOT}/results", "ratio_to=aft", f"speed={runs}/none"]

    def make_the_headline() -> None:
        found = {"aft": headline_page.trained(headline, "aft", runs)}
        headline_page.page(headline, found, runs.parent)
        headline_page.draw(headline, found)

    return {
        "table": lambda: table_page.render(compose([*given, *committed], "compare")),
        "curves": lambda: curves_plot.draw(compose(given, "compare")),
        "headline": make_the_headline,
        "dashboard": lambda: dashboard.page(dashboard.collect(runs, runs)),
        "list_runs": lambda: print_runs([Record(summary.parent)], "newest"),
    }


@pytest.mark.parametrize("reader", READERS)
def test_a_valid_record_is_read(stranger, reader):
    readers(stranger)[reader]()


@pytest.mark.parametrize(("key", "value"), IMPOSSIBLE, ids=lambda value: str(value)[:30])
def test_a_summary_with_impossible_figures_is_refused(stranger, key, value):
    change(stranger, key, value)
    with pytest.raises(UserError, match=rf"{re.escape(str(stranger))} is damaged: .*{key.split('.')[-1]}") as error:
        read_summary(Record(stranger.parent))
    assert len(str(error.value)) < len(str(stranger)) + 200


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_checks_the_record(stranger, reader):
    change(stranger, "data.holdout", 1)
    with pytest.raises(UserError, match=r"summary\.json is damaged: data.holdout must be from 0 to 0.999999: it is 1"):
        readers(stranger)[reader]()


def test_the_dashboard_leaves_a_damaged_record_out_and_names_it(stranger):
    other = copied(stranger.parent, stranger.parents[1] / "other-seed1")
    change(other, "evaluation.fit.loss", LARGE)
    data = dashboard.collect(stranger.parents[2], stranger.parents[2])
    assert len(data["runs"]) == 1
    assert data["damaged"][0].startswith(f"{other} is damaged: evaluation.fit.loss")


def test_a_record_without_a_learning_rate_is_shown_in_a_table_and_refused_by_study_rates(stranger):
    content = read_json(stranger)
    del content["lr"]
    stranger.write_text(json.dumps(content))
    assert "learning rates AFT –." in readers(stranger)["table"]()["table.md"]
    results = stranger.parents[3] / "results"
    shutil.copytree(stranger.parents[2], results / "runs")
    with pytest.raises(UserError, match=r"summary\.json is damaged: it holds no lr"):
        rates.losses(compose(["study=rates", "variants=[aft]", "seeds=[0]", f"results={results}"], "reproduce"), "aft")


@pytest.mark.parametrize("value", [LARGE, None, "x", 1e5, math.nan])
def test_rows_with_impossible_figures_are_refused(stranger, value):
    record = Record(stranger.parent)
    with open(record.metrics) as file:
        rows = list(map(json.loads, file))
    rows[-1]["fit_loss"] = value
    record.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=rf"{re.escape(str(record.metrics))} is damaged"):
        curves([record], "fit_loss")


def test_curves_with_different_steps_are_refused(stranger):
    one = Record(stranger.parent)
    other = Record(copied(stranger.parent, stranger.parents[1] / "other-seed1").parent)
    rows = other.metrics.read_text().splitlines(keepends=True)
    first = next(row for row in rows if "fit_loss" in row)
    other.metrics.write_text("".join(row for row in rows if row != first))
    assert len(curves([one], "fit_loss")[0]) == len(curves([other], "fit_loss")[0]) + 1
    with pytest.raises(UserError, match="have fit_loss at different tokens"):
        curves([one, other], "fit_loss")


def test_a_config_without_the_number_of_evaluation_windows_is_refused(stranger):
    config = stranger.with_name("config.yaml")
    config.write_text(config.read_text().replace("\nevaluation:", "\nanother:"))
    with pytest.raises(UserError, match=r"config\.yaml is damaged: evaluation\.windows must be a whole number"):
        readers(stranger)["curves"]()


ORIGIN = {"device": "a CPU", "command": "x", "commit": None, "dirty": False, "precision": "float32"}
TIMES = {"precision": "float32", "batch": 2, "context": 16, "tokens": 32, "compiled": True, "provenance": ORIGIN}


@pytest.mark.parametrize("seconds", [[0], [-1.0], [LARGE], ["x"], [None], [True], [], 3])
def test_impossible_times_are_refused(tmp_path, seconds):
    write_json(tmp_path / "speed.json", TIMES | {"speed": {"aft": {"seconds": seconds}}})
    write_json(tmp_path / "steps.json", TIMES | {"seconds": {"aft": seconds}})
    for read, name in ((speed_record, "speed.json"), (steps_record, "steps.json")):
        with pytest.raises(UserError, match=rf"{name} is damaged: "):
            read(tmp_path / name)


@pytest.mark.parametrize("key", ["batch", "context", "tokens"])
@pytest.mark.parametrize("value", [0, LARGE])
def test_impossible_sizes_are_refused(tmp_path, key, value):
    write_json(tmp_path / "x.json", TIMES | {"speed": {}, "seconds": {}} | {key: value})
    for read in (speed_record, steps_record):
        with pytest.raises(UserError, match=rf"x.json is damaged: {key} must be from 1 to"):
            read(tmp_path / "x.json")


# Claims


@pytest.fixture
def results(tmp_path) -> Path:
    """Return a results folder with the runs of claim learned_w and their learned factors."""
    claim, place = all_claims()["learned_w"], tmp_path / "results"
    for row in claim.rows:
        for seed in seeds(claim, "small"):
            unpacked(record_of(place / "runs", overrides(claim, row, "small"), seed).name, place / "runs")
    return place


def test_a_damaged_record_of_a_claim_is_not_taken_for_a_missing_one(results, monkeypatch):
    claims = {"learned_w": all_claims()["learned_w"]}
    monkeypatch.setattr("scripts.reporting.claims.all_claims", lambda: claims)
    summary = next(results.glob("runs/small/*-seed0/summary.json"))
    change(summary, "tokens", LARGE)
    with pytest.raises(UserError, match=rf"{re.escape(str(summary))} is damaged: tokens"):
        claim_pages.write(results)


@pytest.mark.parametrize(
    "factors",
    [
        [],
        {},
        {"f": [[0.0] * 128]},
        {"alpha": None},
        {"gamma": [LARGE] * 128},
        {"f": [[float("nan")] * 128]},
        {"beta": [[1.0], [1.0, 2.0]]},
    ],
    ids=lambda factors: str(factors)[:20],
)
def test_impossible_factors_are_refused(results, factors):
    claim = all_claims()["learned_w"]
    row = next(iter(claim.rows))
    path = record_of(results / "runs", overrides(claim, row, "small"), 0).folder / "position_weight.json"
    path.write_text(json.dumps(read_json(path) | factors if factors else factors))
    with pytest.raises(UserError, match=rf"{re.escape(str(path))} is damaged: "):
        extra_contents(results / "runs", claim, row, "small")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seconds.mha_plus", [0.0]),
        ("seconds.mha_plus", "x"),
        ("peak_bytes.mha_plus", LARGE),
        ("peak_bytes.gmlp", None),
        ("provenance.device", 3),
        ("provenance.versions", None),
        ("seconds", []),
    ],
    ids=lambda value: str(value)[:20],
)
def test_impossible_figures_of_a_benchmark_are_refused(tmp_path, key, value):
    path = tmp_path / "claims/small.costs.json"
    path.parent.mkdir(parents=True)
    shutil.copy(ROOT / "results/claims/small.costs.json", path)
    assert benchmark_record(all_claims()["speed"], "small", tmp_path)["tokens"]
    change(path, f"speed.{key}", value)
    with pytest.raises(UserError, match=r"costs\.json is damaged: "):
        benchmark_record(all_claims()["speed"], "small", tmp_path)
