"""Test that a packed run reads like the run in its folder, and that packing a new run adds lines and changes none."""

import difflib
import json
import math
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from configs.cli import compose
from data.files import UserError, write_json
from scripts import dashboard
from scripts.pack_runs import pack
from scripts.reporting import curves as curves_plot
from scripts.reporting import headline as headline_page
from scripts.reporting import table as table_page
from scripts.reporting.claims import all_claims
from scripts.reporting.records import finished
from scripts.studies import claims as claims_study
from scripts.studies import rates
from tests.conftest import ROOT, unpacked
from training.packed import PackedRecord, find, pack_of, rows_of, tables_of
from training.record import Record
from training.runs import print_runs, run_folders

pytestmark = pytest.mark.slow

NAMES = [f"{attn}-initial_f=decays-lr=0.002-seed{seed}" for attn in ("aft", "mha_plus") for seed in (0, 1)]


@pytest.fixture
def local(tmp_path) -> Path:
    """Return a folder of runs, each in its own folder as train.py leaves it, but without weights and text."""
    for name in NAMES:
        unpacked(f"small/{name}", tmp_path / "local/runs")
    return tmp_path / "local/runs"


@pytest.fixture
def place(local, tmp_path) -> Path:
    """Return a folder with the same runs, packed."""
    pack(local, "*", tmp_path / "packed/runs", overwrite=False)
    return tmp_path / "packed/runs"


def listed(runs: Path, capsys) -> list[str]:
    capsys.readouterr()
    print_runs(map(find, run_folders(runs)), "fit")
    lines = capsys.readouterr().out.splitlines()
    return [line.rsplit("  ", 1)[0].rstrip() for line in lines]  # without the column of ages


def test_packed_runs_and_folders_give_the_same_pages(local, place, capsys):
    def pages(runs: Path) -> dict[str, object]:
        usual = [f"runs={runs}", "setup=small", "rows=[aft]"]
        table = [*usual, "seeds=[0,1]", "committed_seeds=[0,1]", "ratio_to=aft"]
        table += [f"committed={runs.parent}", f"speed={runs}/none"]
        shutil.copytree(ROOT / "results/benchmark", runs.parent / "benchmark")
        settings = {"setup": "small", "rows": ["aft"], "learning_rates": [0.002], "seeds": [0, 1]}
        headline = OmegaConf.merge(compose([], "report").headline[0], settings)
        trained = {row: headline_page.trained(headline, row, runs) for row in headline.rows}
        drawn = [curves_plot.draw(compose([*usual, "seeds=[0,1]"], "compare")), headline_page.draw(headline, trained)]
        shown = dashboard.collect(runs, runs)
        dated = [column["label"] for column in shown["columns"]].index("date")
        for row in [*shown["runs"], *shown["means"]]:
            row.pop("folder", None)
            del row["cells"][dated]  # a packed run has no date of its own
        return {
            "table": table_page.render(compose(table, "compare")),
            "headline": headline_page.page(headline, trained, runs.parent),
            "lines": [line.get_xydata().tolist() for figure in drawn for axes in figure.axes for line in axes.lines],
            "dashboard": shown,
            "list": listed(runs, capsys),
            "rates": rates.losses(
                compose(["study=rates", "variants=[aft]", "seeds=[0,1]", f"results={runs.parent}"], "reproduce"), "aft"
            ),
        }

    ours, theirs = pages(place), pages(local)
    assert len(ours["dashboard"]["runs"]) == 4
    assert len(ours["rates"]) == 1
    for page, content in ours.items():
        assert content == theirs[page], page


def test_packing_keeps_every_part_of_a_record(local, place):
    write_json(local / "small" / NAMES[0] / "position_weight.json", {"f": [[1.0, 0.5]], "gamma": [1.0]})
    pack(local, "*", place, overwrite=True)
    for name in NAMES:
        ours, packed = Record(local / "small" / name), find(place / "small" / name)
        assert isinstance(packed, PackedRecord)
        assert packed.name == ours.name
        assert packed.read_config() == ours.read_config()
        for path in (local / "small" / name).glob("*.json"):
            assert packed.read_object(packed.folder / path.name) == ours.read_object(path)
        for row, whole in zip(packed.rows(), ours.rows(), strict=True):
            assert row == pytest.approx(whole, rel=1e-6)
            exact = [key for key in whole if key.startswith(("fit_", "heldout_"))]
            assert [row[key] for key in exact] == [whole[key] for key in exact]
    assert find(place / "small" / NAMES[0]).read_object(Path("position_weight.json"))["gamma"] == [1.0]


def test_rows_with_different_keys_become_tables_and_rows_again():
    rows = [
        {"step": 1, "loss": 2.5, "perplexity": math.exp(2.5), "tokens_per_second": None},
        {"step": 2, "fit_loss": 2.123456789012, "fit_perplexity": math.exp(2.123456789012), "sample": "天下"},
        {"step": 3, "loss": math.inf, "perplexity": math.inf, "fit_loss": 2.0, "fit_perplexity": math.exp(2.0)},
        {"step": 4, "loss": None, "fit_accuracy": 0.5},
    ]
    tables = json.loads(json.dumps(tables_of(rows)))
    assert not any("perplexity" in column for table in tables for column in table)
    assert rows_of(tables) == rows
    assert rows_of(tables_of([])) == []


def test_packing_twice_changes_nothing(local, place, capsys):
    before = {path: path.read_bytes() for path in place.rglob("*.*")}
    assert {path.name for path in before} == {"aft.runs.json", "mha_plus.runs.json"}
    pack(local, "*", place, overwrite=False)
    assert "0 new, 0 replaced, 4 unchanged" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in place.rglob("*.*")} == before


def test_an_experiment_in_one_file_reads_like_files_of_attentions(local, place, tmp_path, monkeypatch, capsys):
    out = tmp_path / "one/runs"
    pack(local, f"{NAMES[0]}", out, overwrite=False, one_file=True)
    pack(local, "*", out, overwrite=False)  # the other runs join the file
    assert [path.relative_to(out) for path in out.rglob("*.*")] == [Path("small.runs.json")]
    assert run_folders(out) == run_folders(out / "small") == [out / "small" / name for name in NAMES]
    monkeypatch.chdir(tmp_path)
    assert not isinstance(find(Path(NAMES[0])), PackedRecord)  # the parent of this path has no name
    assert listed(out, capsys) == listed(place, capsys) == listed(local, capsys)
    tables = [dashboard.collect(runs, runs) for runs in (out, place)]
    assert len(tables[0]["means"]) == len(tables[1]["means"]) == 2
    assert [row["cells"] for row in tables[0]["runs"]] == [row["cells"] for row in tables[1]["runs"]]
    with pytest.raises(UserError, match=r"small has packed files, such as aft\.runs\.json: remove them"):
        pack(local, "*", place, overwrite=False, one_file=True)


@pytest.mark.parametrize("first", [0, 1])
def test_a_new_run_adds_lines_and_changes_none(local, tmp_path, first):
    out = tmp_path / "out"
    pack(local, NAMES[first], out, overwrite=False)
    before = (out / "small/aft.runs.json").read_text().splitlines()
    pack(local, NAMES[1 - first], out, overwrite=False)
    after = (out / "small/aft.runs.json").read_text().splitlines()
    assert len(after) > 1.5 * len(before)
    assert not [line for line in difflib.ndiff(before, after) if line.startswith("-")]


def test_a_run_with_another_content_is_refused_before_anything_is_written(local, place):
    summary = local / "small" / NAMES[-1] / "summary.json"
    summary.write_text(summary.read_text().replace('"AMD EPYC"', '"another CPU"'))
    unpacked("small/gmlp-lr=0.008-seed0", local)
    before = {path: path.read_bytes() for path in place.rglob("*.*")}
    with pytest.raises(UserError, match=r"mha_plus\.runs\.json already holds mha_plus.*, with other .*overwrite"):
        pack(local, "*", place, overwrite=False)
    assert {path: path.read_bytes() for path in place.rglob("*.*")} == before
    pack(local, "*", place, overwrite=True)
    assert finished(find(place / "small" / NAMES[-1]))["device"] == "another CPU"


def test_two_runs_of_the_same_name_are_refused(local, tmp_path):
    shutil.copytree(local / "small" / NAMES[0], local / "again/small" / NAMES[0])
    with pytest.raises(UserError, match="have the same name: pack them with different values of out"):
        pack(local, "*", tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out").exists()


def test_runs_that_have_not_ended_are_left_out(local, tmp_path, capsys):
    for name, status in zip(NAMES, ("interrupted", "diverged"), strict=False):
        summary = local / "small" / name / "summary.json"
        summary.write_text(summary.read_text().replace('"finished"', f'"{status}"'))
    (local / "small" / NAMES[2] / "summary.json").unlink()
    pack(local, "*", tmp_path / "out", overwrite=False)
    errors = capsys.readouterr().err
    assert errors.count("left out: ") == 2
    assert f"{NAMES[0]} is not finished" in errors
    assert sorted(folder.name for folder in run_folders(tmp_path / "out")) == [NAMES[1], NAMES[3]]
    print_runs(map(find, run_folders(tmp_path / "out")), "fit")
    assert "diverged at step 1,500" in capsys.readouterr().out
    with pytest.raises(UserError, match="there are no runs in nowhere"):
        pack(Path("nowhere"), "*", tmp_path, overwrite=False)


def test_a_run_that_exists_twice_is_read_from_the_pack(local, place):
    shutil.copytree(local, place, dirs_exist_ok=True)
    assert isinstance(find(place / "small" / NAMES[0]), PackedRecord)
    assert len(run_folders(place)) == len(NAMES)
    pack_of(place / "small" / NAMES[0]).unlink()
    assert not isinstance(find(place / "small" / NAMES[0]), PackedRecord)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda runs: runs.pop("config"), "it holds no config"),
        (lambda runs: runs.update(summary=[]), r"summary must be an object: it is \[\]"),
        (lambda runs: runs.update(f=3), "f must be an object: it is 3"),
        (lambda runs: runs["config"].pop("job"), "in config, it holds no job"),
        (lambda runs: runs.update(metrics=[3]), "metrics must be tables"),
        (lambda runs: runs.update(metrics=[{"loss": [1.0], "step": 5}]), "metrics must be tables with a column step"),
        (lambda runs: runs["metrics"][0]["loss"].pop(), "metrics must be tables with a column step, whose columns"),
        (lambda runs: runs["metrics"][1]["fit_loss"].__setitem__(0, "x"), "the column fit_loss of metrics"),
        (lambda runs: runs["metrics"][0]["step"].__setitem__(0, None), "the column step of metrics"),
    ],
)
def test_a_damaged_packed_file_is_named_in_one_line(place, harm, message):
    path = pack_of(place / "small" / NAMES[0])
    content = json.loads(path.read_text())
    harm(content[NAMES[0]])
    path.write_text(json.dumps(content))
    for read in (lambda: dashboard.collect(place, place), lambda: find(place / "small" / NAMES[1])):
        with pytest.raises(UserError, match=rf"small/aft\.runs\.json is damaged: in {NAMES[0]}, {message}") as error:
            read()
        assert "\n" not in str(error.value)


def test_a_packed_file_that_is_cut_short_is_named(place):
    path = pack_of(place / "small" / NAMES[0])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"small/aft\.runs\.json is damaged: it is not JSON"):
        run_folders(place)


def test_an_impossible_figure_in_a_packed_file_is_refused(place):
    path = pack_of(place / "small" / NAMES[0])
    path.write_text(path.read_text().replace('"holdout": 0.05', '"holdout": 1', 1))
    with pytest.raises(UserError, match=rf"small/aft\.runs\.json/{NAMES[0]}/summary\.json is damaged: data\.holdout"):
        finished(find(place / "small" / NAMES[0]))


def test_no_run_of_claims_headline_and_learned_w_is_missing_in_results():
    claims = {name: all_claims()[name] for name in ("headline", "learned_w")}
    assert claims_study.missing_runs(claims, "small", ROOT / "results") == []
