"""Tables and plots: from the records alone, and the committed ones again from the committed records."""

import csv
import io
import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from configs.cli import compose
from data.files import UserError, write_json
from scripts import (
    list_variants,
    make_readme,
    make_samples,
    make_table,
    plan_memory,
    plot_benchmark,
    plot_curves,
    time_decode,
    time_steps,
)
from tests.conftest import NO_REGISTRY, ROOT, command
from train import train


@pytest.fixture
def runs(tiny, tmp_path):
    """Two variants, two seeds, and their speed."""
    for variant in ("mha_plus", "aft"):
        for seed in (0, 1):
            cfg = compose([f"attn={variant}", f"seed={seed}", *tiny])
            cfg.job.name = f"{variant}-seed{seed}"
            train(cfg)
    folder = tmp_path / "runs/source"
    speed = {
        "what": "steps", "batch": 2, "context": 16, "vocabulary": 194, "precision": "float32",
        "speed": {"mha_plus": {"tokens_per_second": 100.0}, "aft": {"tokens_per_second": 150.0}},
        "provenance": {"commit": "abc", "dirty": False, "device": "a CPU", "command": "python scripts/time_steps.py"},
    }  # fmt: skip
    write_json(folder / "speed.json", speed)
    return folder


def table_config(runs: Path, *overrides: str):
    return compose([f"runs={runs}", "rows=[mha_plus,aft]", "seeds=[0,1]", f"out={runs}/out", *overrides], "table")


def test_the_table_holds_the_means_of_the_records(runs):
    contents = make_table.render(table_config(runs))
    fits = [
        json.loads((runs / f"aft-seed{s}/summary.json").read_text())["evaluation"]["fit"]["perplexity"] for s in (0, 1)
    ]
    mean, std = statistics.mean(fits), abs(fits[0] - fits[1]) / 2**0.5
    (row,) = (line for line in contents["table.md"].splitlines() if line.startswith("| AFT"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[1] == f"{mean:.2f} ± {std:.2f}"
    other = [json.loads((runs / f"mha_plus-seed{s}/summary.json").read_text())["evaluation"]["fit"] for s in (0, 1)]
    assert cells[2] == f"{mean / statistics.mean(fit['perplexity'] for fit in other):.3f}"
    assert cells[3] == "13.53"
    assert cells[8] == "1.500"
    assert cells[9] == f"{13.4 / 12.6:.3f}"
    assert "0.962" in row
    (row,) = (row for row in csv.DictReader(io.StringIO(contents["table.csv"])) if row["variant"] == "aft")
    assert float(row["fit"]) == mean
    assert row["data_sha256"] == json.loads((runs / "aft-seed0/summary.json").read_text())["data"]["sha256"]
    assert r"\toprule" in contents["table.tex"]
    assert r"$\pm$" in contents["table.tex"]


def test_the_table_names_its_origins(runs):
    table = make_table.render(table_config(runs))["table.md"]
    summary = json.loads((runs / "aft-seed0/summary.json").read_text())
    for origin in ("4 steps of 32 characters", "20,000 characters", summary["data"]["sha256"][:12], summary["device"]):
        assert origin in table
    assert summary["command"] in table


def test_what_is_missing_is_named(runs):
    (runs / "aft-seed1/summary.json").unlink()
    summary = json.loads((runs / "mha_plus-seed0/summary.json").read_text())
    write_json(runs / "mha_plus-seed0/summary.json", summary | {"status": "interrupted"})
    curves_config = compose([f"runs={runs}", "rows=[mha_plus,aft]", "seeds=[0,1]"], "curves")
    for draw, cfg in ((make_table.render, table_config(runs)), (plot_curves.draw, curves_config)):
        with pytest.raises(UserError) as error:
            draw(cfg)
        assert "aft-seed1 (missing)" in str(error.value)
        assert "mha_plus-seed0 (interrupted)" in str(error.value)
        assert "mha_plus-seed1" not in str(error.value)


def test_a_missing_speed_is_named(runs):
    (runs / "speed.json").unlink()
    with pytest.raises(UserError, match=r"speed.json is needed and not there: python scripts/time_steps.py writes it"):
        make_table.render(table_config(runs))


@pytest.mark.parametrize(("key", "what"), [("tokens", "number of characters trained on"), ("data", "text")])
def test_runs_that_cannot_be_compared_are_refused(runs, key, what):
    path = runs / "aft-seed0/summary.json"
    summary = json.loads(path.read_text())
    other = {"tokens": 5} if key == "tokens" else {"data": summary["data"] | {"sha256": "0"}}
    write_json(path, summary | other)
    with pytest.raises(UserError, match=f"differ in their {what}"):
        make_table.render(table_config(runs))


def test_the_plot_shows_what_the_records_hold(runs):
    figure = plot_curves.draw(compose([f"runs={runs}", "rows=[mha_plus,aft]", "seeds=[0,1]"], "curves"))
    (axes,) = figure.axes
    lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    assert set(lines) == {f"{v}, {t} text" for v in ("MHA+", "AFT") for t in ("training", "held-out")}
    rows = [json.loads(line) for s in (0, 1) for line in (runs / f"aft-seed{s}/metrics.jsonl").read_text().splitlines()]
    last = [row["fit_perplexity"] for row in rows if row["step"] == 4]
    assert lines["AFT, training text"][-1] == pytest.approx(sum(last) / 2)


def test_the_scripts_write_files(runs):
    arguments = [f"runs={runs}", "rows=[mha_plus,aft]", "seeds=[0,1]", f"out={runs}/out"]
    for script in ("scripts/make_table.py", "scripts/plot_curves.py"):
        done = command(script, *arguments)
        assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (runs / "out").iterdir()) == [
        "curves.png", "curves.svg", "table.csv", "table.md", "table.tex",
    ]  # fmt: skip
    assert (runs / "out/curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_benchmark_measures_variants_in_turn(tiny, tmp_path):
    arguments = ["variants=[mha_plus,aft]", "repeats=2", "warm_up=0", f"out={tmp_path}/speed.json"]
    done = command("scripts/time_steps.py", *arguments)
    if re.search(NO_REGISTRY, done.stderr):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "speed.json").read_text())
    assert record["speed"]["mha_plus"]["ratio"] == 1
    assert len(record["speed"]["aft"]["seconds"]) == 2
    assert "measured before" in command("scripts/time_steps.py", *arguments).stdout


def test_a_variant_with_a_switch_has_a_line_in_the_table(tiny, runs, monkeypatch):
    """By the name of its run, which is what time_steps.py writes."""
    seen = {}

    def instead(steps, *_):
        seen.update(steps)
        return {name: [1.0] for name in steps}

    monkeypatch.setattr(time_steps, "in_turn", instead)
    monkeypatch.setattr(time_steps, "training_step", lambda *_: None)
    monkeypatch.setattr(time_steps, "load", lambda _: SimpleNamespace(vocabulary="ab"))
    arguments = ["variants=[mha_plus,'aft attn.gamma=false attn.time.alpha_beta=false']", f"out={runs}/speed.json"]
    monkeypatch.setattr("sys.argv", ["scripts/time_steps.py", *arguments])
    time_steps.run()
    name = "aft-gamma=false-alpha_beta=false"
    assert list(seen) == ["mha_plus", "aft attn.gamma=false attn.time.alpha_beta=false"]
    cfg = compose(["attn=aft", "attn.gamma=false", "attn.time.alpha_beta=false", *tiny])
    cfg.job.name = f"{name}-seed0"
    train(cfg)
    table = make_table.render(table_config(runs, f"rows=[mha_plus,'{name}']", "seeds=[0]"))["table.md"]
    assert "| AFT-gamma=false-alpha_beta=false |" in table


def test_the_ratio_needs_its_variant(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["scripts/time_steps.py", "variants=[aft,gmlp]", f"out={tmp_path}/speed.json"])
    with pytest.raises(SystemExit, match="2"):
        time_steps.run()
    assert capsys.readouterr().err == "error: ratio_to=mha_plus is not among the variants: aft, gmlp\n"


# What is committed


def test_the_committed_table_comes_from_the_committed_records(committed):
    cfg = compose([f"runs={committed}/results/runs/quick"], "table")
    for name, content in make_table.render(cfg).items():
        assert (committed / "results/quick" / name).read_text(encoding="utf-8") == content


def test_readme_shows_the_committed_table(committed):
    readme = (committed / "README.md").read_text(encoding="utf-8")
    assert readme == make_readme.filled(readme, committed)
    assert "MHA+" in readme


def test_committed_records_are_complete_and_small(committed):
    for summary in committed.rglob("summary.json"):
        record = json.loads(summary.read_text())
        assert record["status"] == "finished", summary
        assert record["commit"], summary
        assert not record["dirty"], summary
        assert OmegaConf.load(summary.with_name("config.yaml")).job.name == record["name"] == summary.parent.name
        assert summary.with_name("metrics.jsonl").exists()
    assert sum(p.stat().st_size for p in committed.rglob("*") if p.is_file()) < 6e6


def test_the_committed_list_of_variants_is_that_of_the_configs():
    assert (ROOT / "results/variants.md").read_text(encoding="utf-8") == f"{list_variants.table()}\n"


@pytest.mark.parametrize(
    ("name", "page"), [("decode", time_decode.table), ("large", plan_memory.table), ("samples", make_samples.page)]
)
def test_a_committed_page_comes_from_the_record_beside_it(committed, name, page):
    record = json.loads((committed / f"results/{name}.json").read_text(encoding="utf-8"))
    assert not record["provenance"]["dirty"]
    assert (committed / f"results/{name}.md").read_text(encoding="utf-8") == page(record)


def test_the_committed_benchmark_tables_come_from_the_committed_records(committed):
    folder = committed / "results/benchmark/cpu"
    steps = plot_benchmark.steps_table(json.loads((folder / "steps.json").read_text()), compose([], "table").source)
    assert (folder / "steps.md").read_text(encoding="utf-8") == steps
    peers = plot_benchmark.peers_table(json.loads((folder / "layers.json").read_text()))
    assert (folder / "peers.md").read_text(encoding="utf-8") == peers
