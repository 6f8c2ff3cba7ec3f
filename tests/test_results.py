"""Tables and plots are made from records alone. test_committed.py makes the committed ones again and compares them."""

import csv
import io
import itertools
import math
import re
import shutil
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from omegaconf import OmegaConf

from configs.arguments import quote
from configs.cli import compose
from data.files import UserError, write_json
from data.reading import read_json
from scripts import benchmark, report, reproduce
from scripts.benchmarking import rows as rows_timed
from scripts.reporting import attention_map, colours, figures, records
from scripts.reporting import curves as curves_plot
from scripts.reporting import headline as headline_page
from scripts.reporting import table as table_page
from scripts.reporting.claims import write_costs
from scripts.reporting.records import record_of, words_of
from scripts.reporting.variants import variants
from scripts.studies import rates, runner
from tests.conftest import command, tiny_run
from train import train
from training.record import Record

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory) -> Path:
    """Train two variants with two seeds."""
    place = tmp_path_factory.mktemp("trained")
    for variant in ("mha_plus", "aft"):
        for seed in (0, 1):
            cfg = compose([f"attn={variant}", f"seed={seed}", *tiny_run(text, place)])
            cfg.job.name = record(place, variant, seed).folder.name
            train(cfg)
    return place / "runs"


@pytest.fixture
def runs(trained, tmp_path) -> Path:
    """Copy the trained runs, also to a folder like results/, and write made-up speeds."""
    runs = tmp_path / "runs"
    shutil.copytree(trained, runs)
    shutil.copytree(trained, tmp_path / "results/runs")
    origin = {"commit": "abc", "dirty": False, "device": "a CPU", "command": "python x"}
    speed = {
        "batch": 2, "context": 16, "precision": "float32", "compiled": False, "provenance": origin,
        "speed": {"mha_plus": {"seconds": [0.4, 0.32, 0.2]}, "aft": {"seconds": [0.2, 0.16, 0.1]}},
    }  # fmt: skip
    write_json(tmp_path / "speed.json", speed)
    steps = {"tokens": 32, "compiled": True, "provenance": origin | {"precision": "float32"}}
    seconds = {"matrix product before mha_plus": [1.0], "mha_plus": [0.032] * 3, "aft": [0.016, 0.016, 0.032]}
    write_json(tmp_path / "results/benchmark/cpu/float32/steps.json", steps | {"seconds": seconds})
    return runs


def table_config(runs: Path, *overrides: str):
    places = [f"runs={runs}", f"speed={runs.parent}/speed.json", f"committed={runs.parent}/results", f"out={runs}/out"]
    usual = ["rows=[mha_plus,aft]", "committed_seeds=[0,1]"]
    given = {override.split("=")[0] for override in overrides}
    return compose([*(o for o in (*places, *usual) if o.split("=")[0] not in given), *overrides], "compare")


def record(runs: Path, variant: str, seed: int) -> Record:
    return record_of(runs, words_of(variant, "small"), seed)


def loss(runs: Path, variant: str, seed: int) -> float:
    return read_json(record(runs, variant, seed).summary)["evaluation"]["fit"]["loss"]


def set_loss(runs: Path, variant: str, seed: int, value: float) -> None:
    path = record(runs, variant, seed).summary
    summary = read_json(path)
    summary["evaluation"]["fit"] = {"loss": value, "perplexity": math.exp(value), "characters": 100}
    write_json(path, summary)


def cells(table: str) -> dict[tuple[str, str], list[str]]:
    """Return the cells of a markdown table by quantity and variant. An empty quantity is that of the line above."""
    found, quantity = {}, ""
    for line in table.splitlines():
        if line.startswith("| ") and not line.startswith("| --"):
            first, variant, *rest = (cell.strip() for cell in line.split("|")[1:-1])
            quantity = first or quantity
            found[quantity, variant] = rest
    return found


def test_what_was_trained_here_stands_beside_what_is_committed_and_the_source_s(runs):
    for variant, losses in {"mha_plus": (3.0, 3.1), "aft": (2.9, 3.04)}.items():
        for seed in (0, 1):
            set_loss(runs.parent / "results/runs", variant, seed, losses[seed])
    contents = table_page.render(table_config(runs))
    table = cells(contents["table.md"])
    here = math.exp(loss(runs, "aft", 0))
    fits = [math.exp(2.9), math.exp(3.04)]
    committed = f"{statistics.mean(fits):.2f} ± {statistics.stdev(fits):.2f}"
    assert table["fit perplexity", "AFT"] == [f"{here:.2f}", committed, "13.53"]
    # The leads are 0.1 and 0.06: mean 0.08, standard error 0.02. Student's t of one degree of freedom is 12.706.
    half = 12.706 * 0.02
    interval = f"+8.0% ({100 * (0.08 - half):+.1f}% to {100 * (0.08 + half):+.1f}%)"
    lead = 100 * (loss(runs, "mha_plus", 0) - loss(runs, "aft", 0))
    assert table["fit, lead over MHA+", "AFT"] == [f"{lead:+.1f}%", interval, "+3.9%"]
    assert ("fit, lead over MHA+", "MHA+") not in table
    assert table["parameters, source's size", "MHA+"] == ["9,301,696", "9,301,696", "9.3e6"]
    assert table["parameters, source's size", "AFT"] == ["9,301,632", "9,301,632", "9.3e6"]
    assert table["tokens/s, source's size", "MHA+"] == ["100 (80 to 160)", "1,000 (1,000 to 1,000)", "–"]
    assert table["speed over MHA+'s", "AFT"] == ["2.00", "2.00", "1.06"]
    (row,) = (
        row
        for row in csv.DictReader(io.StringIO(contents["table.csv"]))
        if (row["quantity"], row["variant"]) == ("fit perplexity", "aft")
    )
    assert float(row["trained here, seed 0"]) == pytest.approx(here)
    assert r"\toprule" in contents["table.tex"]
    assert r"$\pm$" in contents["table.tex"]


def test_only_what_is_committed_is_shown_where_nothing_was_trained(runs):
    table = table_page.render(table_config(runs, "runs=null"))["table.md"]
    assert "trained here" not in table
    assert "agree" not in table
    assert len(cells(table)["fit perplexity", "AFT"]) == 2


@pytest.mark.parametrize(("offset", "agrees"), [(0.027, True), (0.029, False), (-0.027, True), (-0.029, False)])
def test_figures_of_a_seed_agree_if_they_differ_by_at_most_two_deviations(runs, offset, agrees):
    """Losses of 3 and 3.02 have a standard deviation of 0.0141."""
    for seed, value in ((0, 3.0), (1, 3.02)):
        for variant in ("mha_plus", "aft"):
            set_loss(runs.parent / "results/runs", variant, seed, value)
            set_loss(runs, variant, seed, value)
    set_loss(runs, "aft", 0, 3.0 + offset)
    table = table_page.render(table_config(runs))["table.md"]
    assert ("figures agree with" in table) == agrees
    assert (f"DO NOT AGREE with the committed ones: AFT by {100 * offset:+.1f}%, where 2.8% is" in table) != agrees
    assert "MHA+ by" not in table


def test_missing_committed_runs_are_reported(runs):
    shutil.rmtree(runs.parent / "results/runs")
    table = table_page.render(table_config(runs))["table.md"]
    assert "This machine's figures cannot be compared: no row has two committed runs, one of them with a seed" in table
    assert "committed, none yet" in table
    assert "There are no committed runs of the source's size yet (experiment=novel)." in table
    assert cells(table)["fit perplexity", "AFT"][1] == "–"


def test_a_line_says_what_the_full_size_records_say(runs):
    results = runs.parent / "results/runs"
    for variant, losses in {"mha_plus": (1.0, 1.1), "aft": (1.2, 1.3)}.items():
        for seed in (0, 1):
            set_loss(results, variant, seed, losses[seed])
            summary = read_json(record(results, variant, seed).summary)
            for other in (seed, seed + 4):  # the headline has seeds from 4 on, and not those of the table
                write_json(record_of(results, words_of(variant, "novel"), other).summary, summary | {"seed": other})
    table = table_page.render(table_config(runs))["table.md"]
    (line,) = (line for line in table.splitlines() if line.startswith("At the source's size"))
    assert "experiment=novel: 4 steps of 32 characters" in line
    assert "seeds 4, 5" in line
    assert f"AFT {(math.exp(1.2) + math.exp(1.3)) / 2:.2f} ± " in line
    assert "lead -20.0% (-20.0% to -20.0%)" in line
    assert "initial_head_mix" not in line


def test_a_table_without_the_headline_s_rows_says_nothing_of_the_source_s_size(runs):
    for row in ("fox", "alibi"):
        for seed in (0, 1):
            shutil.copytree(record(runs, "aft", seed).folder, record(runs, row, seed).folder)
    cfg = table_config(runs)
    cfg.rows, cfg.ratio_to = ["fox", "alibi"], "fox"
    assert "At the source's size" not in table_page.render(cfg)["table.md"]


def test_speeds_of_another_size_are_not_shown(runs):
    path = Path(table_config(runs).speed)
    write_json(path, read_json(path) | {"setup": "small"})
    table = table_page.render(table_config(runs))["table.md"]
    assert f"Speed here: not shown, because {path} has the size of experiment=small." in table
    assert cells(table)["tokens/s, source's size", "AFT"][0] == "–"


def test_the_table_names_its_origins(runs):
    table = table_page.render(table_config(runs))["table.md"]
    summary = read_json(record(runs, "aft", 0).summary)
    for origin in ("4 steps of 32 characters", "vocabulary 194", summary["data"]["sha256"][:12], summary["device"]):
        assert origin in table
    assert summary["command"] in table
    assert f"AFT {summary['lr']:g}" in table
    timing = (
        "compiled, float32; speeds are medians (slowest to fastest) over rounds, each of which times every row once; "
    )
    ratio = "a ratio is the median of the ratios in each round; a CPU; at commit abc: `python x`"
    assert timing + ratio in table


def test_what_is_missing_is_named(runs):
    record(runs, "aft", 1).summary.unlink()
    diverged = record(runs, "aft", 0).summary
    write_json(diverged, read_json(diverged) | {"status": "diverged", "evaluation": None})
    shutil.rmtree(record(runs, "mha_plus", 0).folder)
    curves_config = compose([f"runs={runs}", "rows=[mha_plus,aft]", "seeds=[0,1]"], "compare")
    for draw, cfg in ((table_page.render, table_config(runs, "seeds=[0,1]")), (curves_plot.draw, curves_config)):
        with pytest.raises(UserError) as error:
            draw(cfg)
        assert f"{record(runs, 'aft', 1).folder.name} (not finished)" in str(error.value)
        assert f"{record(runs, 'mha_plus', 0).folder.name} (missing)" in str(error.value)
        assert f"{record(runs, 'aft', 0).folder.name} (diverged)" in str(error.value)
        assert record(runs, "mha_plus", 1).folder.name not in str(error.value)


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("their number of characters trained on", {"tokens": 5}),
        ("their text", {"data": {"sha256": "0"}}),
        ("numbers of characters (heldout)", {"evaluation": {"heldout": {"characters": 5}}}),
        ("evaluated on different characters (fit)", {"text_sha256": "0"}),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(runs, what, other):
    path = record(runs, "aft", 0).summary
    write_json(path, OmegaConf.to_container(OmegaConf.merge(read_json(path), other)))
    with pytest.raises(UserError, match=re.escape(what)):
        table_page.render(table_config(runs))


def line_that_ends(axes, text):
    """Return the line, or the dot, at whose end a name is written."""
    return next(line for line in axes.get_lines() if (line.get_xdata()[-1], line.get_ydata()[-1]) == text.xy)


def test_the_plot_shows_what_the_records_hold(runs):
    figure = curves_plot.draw(compose([f"runs={runs}", "rows=[mha_plus,aft]", "seeds=[0,1]"], "compare"))
    (axes,) = figure.axes
    lines = {text.get_text(): line_that_ends(axes, text).get_ydata() for text in axes.texts}
    assert set(lines) == {f"{v}, {t} text" for v in ("MHA+", "AFT") for t in ("training", "held-out")}
    rows = [row for seed in (0, 1) for row in record(runs, "aft", seed).rows()]
    last = [row["fit_perplexity"] for row in rows if row["step"] == 4]
    assert lines["AFT, training text"][-1] == pytest.approx(sum(last) / 2)
    dots = {float(y) for line in axes.get_lines() for y in line.get_ydata() if line.get_linestyle() == "None"}
    assert statistics.mean(math.exp(loss(runs, "aft", seed)) for seed in (0, 1)) in map(pytest.approx, dots)
    assert len(dots) == len(lines)
    assert "lines: 2 windows of a text; dots: the final evaluation, as in tables" == figure.get_supxlabel()


def test_any_number_of_rows_is_drawn_each_in_a_colour_of_its_own(runs):
    rows = ["aft", *(f"aft train.batch={batch}" for batch in range(20, 29))]
    for row in rows[1:]:
        shutil.copytree(record(runs, "aft", 0).folder, record(runs, row, 0).folder)
    (axes,) = curves_plot.draw(compose([f"runs={runs}", f"rows=[{','.join(map(quote, rows))}]"], "compare")).axes
    lines = [line for line in axes.get_lines() if line.get_linestyle() != "None"]
    assert len(lines) == 2 * len(rows)
    assert len({tuple(line.get_color()) for line in lines}) == len(rows)


def test_the_first_row_of_an_attention_has_its_own_colour():
    own = {variant: colours.colour_of(variant) for variant in ("aft", "mha_plus")}
    found = colours.colours_of_rows(["attn=mha_plus x=1", "attn=mha_plus", "attn=aft", "attn=fox"])
    assert (found[0], found[2]) == (own["mha_plus"], own["aft"])
    assert len({*found}) == 4


def test_the_colours_of_attentions_can_be_told_apart():
    shades = [np.array(to_rgb(colours.colour_of(variant))) for variant in variants()]
    distances = [np.linalg.norm(a - b) for a, b in itertools.combinations(map(colours.lab, shades), 2)]
    assert min(distances) > 0.05  # in OKLab, where black and white differ by 1
    assert colours.lab(np.ones(3)) == pytest.approx([1, 0, 0], abs=1e-4)
    # Ottosson's coordinates of pure red
    assert colours.lab(np.array([1.0, 0, 0])) == pytest.approx([0.628, 0.2249, 0.1258], abs=1e-3)


def test_a_comparison_writes_its_table_and_its_curves(runs):
    places = [f"speed={runs.parent}/speed.json", f"committed={runs.parent}/results"]
    given = [f"runs={runs}", "rows=[mha_plus,aft]", "seeds=[0,1]", f"out={runs}/out", *places]
    done = command("-m", "scripts.compare", *given)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (runs / "out").iterdir()) == [
        "curves.png", "curves.svg", "table.csv", "table.md", "table.tex",
    ]  # fmt: skip
    assert (runs / "out/curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_was_trained_with_another_default_is_refused(runs):
    expected = compose([*words_of("aft", "small"), "seed=0"])
    cfg = OmegaConf.create({"results": str(runs.parent)})
    OmegaConf.save(expected, record(runs, "aft", 0).config)
    assert runner.missing([(words_of("aft", "small"), 0)], cfg) == []
    expected.attn.gamma = False
    OmegaConf.save(expected, record(runs, "aft", 0).config)
    wanted = "was trained with another attn.gamma than its name says: if a default has changed since, move this run"
    with pytest.raises(UserError, match=wanted):
        runner.missing([(words_of("aft", "small"), 0)], cfg)


def headline_config(**others):
    settings = {"setup": "small", "rows": ["mha_plus", "aft"], "seeds": [0, 1], "learning_rates": [1e-3, 2e-3]}
    return OmegaConf.merge(compose([], "report").headline[0], {"tried": None} | settings | others)


def test_the_headline_takes_each_row_at_its_best_rate(runs):
    for seed in (0, 1):
        original = record(runs, "aft", seed).folder
        shutil.copytree(original, record(runs, "aft optim.lr=1e-3", seed).folder)
        set_loss(runs, "mha_plus", seed, 3.0)
        set_loss(runs, "aft", seed, 2.9)
        set_loss(runs, "aft optim.lr=1e-3", seed, 2.8 + 0.01 * seed)
    cfg = headline_config()
    found = {row: headline_page.trained(cfg, row, runs) for row in cfg.rows}
    assert {row: list(rates) for row, rates in found.items()} == {"mha_plus": [0.002], "aft": [0.001, 0.002]}
    timed = read_json(runs.parent / "results/benchmark/cpu/float32/steps.json")
    precision = found["aft"][0.002].summaries[0]["precision"]
    timed["provenance"] |= {"versions": {"torch": "2.13.0"}, "precision": precision}
    write_json(runs.parent / f"results/benchmark/cpu/{precision}/steps.json", timed)
    page = headline_page.page(cfg, found, runs.parent / "results")
    (table, every_rate) = (page.split("## Learning rates")[i] for i in (0, 1))
    assert "AFT 16.53 ± 0.12; MHA+ 20.09 ± 0.00" in table
    assert "+19.5% (+13.1% to +25.9%)" in table  # 0.195 ± 12.706 * 0.00707 / sqrt(2)
    (line,) = re.findall(r"^\| AFT .*$", table, re.MULTILINE)
    assert [cell.strip() for cell in line.split("|")[-3:-1]] == ["2.00", "1.06"]
    step = f"{timed['tokens']:,} characters, {'compiled' if timed['compiled'] else 'not compiled'}"
    assert f"- Speed: MHA+'s time of a training step ({step}) divided by the row's" in table
    assert f"More attentions: [steps](../benchmark/cpu/{precision}/steps.md)" in table
    assert "Not trained" not in table
    assert "chose the learning rates" not in every_rate
    assert [line.split("|")[2].strip() for line in every_rate.splitlines() if line.startswith("| AFT")] == [
        "0.001 (best)", "0.002",
    ]  # fmt: skip
    # Claim 2's record is preferred to the benchmark's: both have all rows, and claim 2's has more rounds.
    timed["seconds"] = {"mha_plus": [1.0] * 40, "aft": [0.8] * 40, "gmlp": [1.0] * 40}
    timed["provenance"] |= {"tokens": 32, "threads": 1}
    write_costs("speed", "small", runs.parent / "results", timed | {"peak_bytes": dict.fromkeys(timed["seconds"], 1)})
    cfg.tried = {"seeds": [1], "learning_rates": [1e-3, 2e-3]}
    shutil.copytree(runs, runs.parent / "results/runs", dirs_exist_ok=True)
    page = headline_page.page(cfg, found, runs.parent / "results")
    assert (
        "lies at an end of the range that was tried: AFT at 0.001. Runs with seed 1 chose the learning rates:" in page
    )
    failed = record(runs.parent / "results/runs", "aft optim.lr=5e-4", 1)
    shutil.copytree(record(runs, "aft", 1).folder, failed.folder)
    write_json(failed.summary, read_json(failed.summary) | {"status": "diverged"})
    cfg.tried.learning_rates = [5e-4, 1e-3, 2e-3]
    page = headline_page.page(cfg, found, runs.parent / "results")
    assert "at an end of the range" not in page
    assert re.search(r"^\| AFT +\| +0\.0005 \| +diverged \|", page, re.MULTILINE)
    (line,) = re.findall(r"^\| AFT .*$", page.split("## Learning rates")[0], re.MULTILINE)
    assert [cell.strip() for cell in line.split("|")[-3:-1]] == ["1.25", "1.06"]
    assert "the median of 40 rounds in which each was timed once" in page


def test_the_leads_at_the_source_s_perplexity_lie_between_two_evaluations(runs, monkeypatch):
    """MHA+ reaches 14.07 three quarters of the way between two evaluations. AFT leads by 1% at one, 5% at the next."""
    cfg = headline_config(learning_rates=[2e-3])
    chosen = {row: headline_page.trained(cfg, row, runs)[2e-3] for row in cfg.rows}
    first, second = math.log(14.07) + 0.3, math.log(14.07) - 0.1
    losses = [[first, second]] * 2 + [[first - 0.01, second - 0.05]] * 2
    monkeypatch.setattr(records, "curves", lambda *_: ([100, 200], losses))
    passes = figures.passes(chosen["mha_plus"].summaries[0], 175)
    assert headline_page.at_the_source(cfg, chosen) == (
        f"MHA+ reaches 14.07, its perplexity in the source, after {passes:.1f} passes. At this point the leads over "
        "MHA+ are: AFT +4.0% (+4.0% to +4.0%), in the source +3.9%. These leads were added after the curves were "
        "known; no verdict rests on them."
    )
    monkeypatch.setattr(records, "curves", lambda *_: ([100, 200], [[5.0, 4.0]] * 4))
    assert headline_page.at_the_source(cfg, chosen) is None


def test_the_headline_says_how_far_its_models_overfit(runs):
    cfg = headline_config(learning_rates=[2e-3])
    chosen = {row: headline_page.trained(cfg, row, runs)[2e-3] for row in cfg.rows}
    for summary in (summary for group in chosen.values() for summary in group.summaries):
        summary["evaluation"] |= {"heldout": {"loss": 5.0, "perplexity": math.exp(5.0)}}
        summary["evaluation"] |= {"heldout_best": {"step": 4, "perplexity": math.exp(4.0)}}
    assert headline_page.overfitting(chosen) == (
        "The models overfit: at the end their held-out perplexity is MHA+ 148.41 ± 0.00; AFT 148.41 ± 0.00. The "
        "lowest that each row had is in the column `best held-out perplexity`."
    )
    chosen["aft"].summaries[1]["evaluation"]["heldout_best"]["perplexity"] = math.exp(4.95)
    assert headline_page.overfitting(chosen) is None


def drawn_by_name(axes) -> dict[str, np.ndarray]:
    """Return the heights of the solid line of each name, which stands at a dot of the line's colour."""
    solid = {line.get_color(): line.get_ydata() for line in axes.get_lines() if line.get_linestyle() == "-"}
    return {text.get_text(): solid[line_that_ends(axes, text).get_color()] for text in axes.texts}


def test_the_headline_draws_perplexity_and_the_lead(runs):
    cfg = headline_config(learning_rates=[2e-3])
    found = {row: headline_page.trained(cfg, row, runs) for row in cfg.rows}
    upper, lower = headline_page.draw(cfg, found).axes
    rows = {
        attn: np.array([[r["fit_loss"] for r in record(runs, attn, seed).rows() if "fit_loss" in r] for seed in (0, 1)])
        for attn in ("mha_plus", "aft")
    }
    perplexities, leads = map(drawn_by_name, (upper, lower))
    assert set(perplexities) == {"MHA+", "AFT"}
    assert perplexities["MHA+"] == pytest.approx(np.exp(rows["mha_plus"]).mean(0))
    assert set(leads) == {"AFT"}
    assert leads["AFT"] == pytest.approx(100 * (rows["mha_plus"] - rows["aft"]).mean(0))


def test_a_headline_without_runs_does_not_keep_the_others_from_being_written(runs):
    entries = [headline_config(setup="source"), headline_config(name="small", learning_rates=[2e-3])]
    (runs.parent / "headline").mkdir()
    with pytest.raises(
        records.MissingRecord, match=r"source holds no row with all seeds finished at one rate: mha_plus, aft$"
    ):
        headline_page.write(entries, runs.parent)
    assert {path.name for path in (runs.parent / "headline").iterdir()} == {"small.md", "small.png", "small.svg"}


def test_pages_without_records_are_left_out_of_a_report_and_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["report", f"results={tmp_path}", "pages=[headline,decode,search,starts,precision]"]
    )
    report.run()
    output = capsys.readouterr().out
    assert (
        f"headline: not all written, {tmp_path}/runs/novel holds no row with all seeds finished at one rate: mha_plus"
        in output
    )
    assert output.count("not all written") == 5
    assert list(tmp_path.iterdir()) == []


def test_a_row_has_its_own_speed_or_that_of_the_same_step():
    column = table_page.Column("here", {}, {"aft": [2.0], "aft train.batch=4": [1.0], "mha_plus": [4.0]}, "")
    rows = ("aft", "aft starts=none", "aft train.batch=4", "gmlp")
    assert [figure and figure.value for figure in map(column.speed, rows)] == [2.0, 2.0, 1.0, None]
    assert column.speed_ratio("aft train.batch=4", "mha_plus").value == 0.25


def test_a_report_of_a_page_that_cannot_be_written_is_refused():
    with pytest.raises(UserError, match=r"there is no page tables; there are rule, headline, "):
        report.chosen(compose(["pages=[tables]"], "report"))
    with pytest.raises(
        UserError, match="the page rule belongs to the repository: it is written only with results=results"
    ):
        report.chosen(compose(["pages=[rule]", "results=out"], "report"))


def time_variants(monkeypatch, *arguments: str) -> list[str]:
    """Run measure=rows with made-up times, and return the names of the attentions that it would have timed."""
    seen = {}

    def instead(steps, *_):
        seen.update(steps)
        return {name: [1.0, 2.0] for name in steps}

    monkeypatch.setattr(rows_timed, "in_turn", instead)
    monkeypatch.setattr(rows_timed, "training_step", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["benchmark", "measure=rows", *arguments])
    benchmark.run()
    return list(seen)


def test_steps_are_timed_in_turn_and_once(tmp_path, monkeypatch, capsys):
    arguments = ["variants=[mha_plus,aft]", f"results={tmp_path}"]
    assert time_variants(monkeypatch, *arguments) == ["mha_plus", "aft"]
    found = read_json(tmp_path / "speed.json")
    assert (found["batch"], found["context"], found["vocabulary"]) == (64, 128, 5744)
    assert found["speed"]["mha_plus"]["ratio"] == 1
    assert found["speed"]["aft"]["seconds"] == [1.0, 2.0]
    assert time_variants(monkeypatch, *arguments) == []
    assert "already measured" in capsys.readouterr().out


def test_a_row_with_switches_has_its_speed_and_one_that_was_not_timed_a_dash(tiny, runs, monkeypatch):
    switched, unknown = "aft attn.gamma=false attn.position_weight.alpha_beta=false", "aft attn.token_shift=false"
    time_variants(monkeypatch, f"variants=[mha_plus,{quote(switched)}]", f"results={runs.parent}")
    rows = ["mha_plus", f"{switched} train.batch=3 optim.lr=0.002", unknown]
    for row in rows[1:]:
        cfg = compose([*tiny, f"attn={row.split()[0]}", *row.split()[1:]])
        cfg.job.name = record(runs, row, 0).folder.name
        train(cfg)
        path = record(runs, row, 0).summary
        write_json(path, read_json(path) | {"tokens": 128})
    cfg = table_config(runs, f"rows=[{','.join(map(quote, rows))}]")
    table = cells(table_page.render(cfg)["table.md"])
    speeds = {variant: found[0] for (quantity, variant), found in table.items() if quantity.startswith("tokens/s")}
    assert speeds == {
        "MHA+": "6,144 (4,096 to 8,192)",
        rows[1].replace("aft", "AFT"): "6,144 (4,096 to 8,192)",
        "AFT attn.token_shift=false": "–",
    }


def test_ratio_to_must_be_one_of_the_variants(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmark", "measure=rows", "variants=[aft,gmlp]", f"results={tmp_path}"])
    with pytest.raises(SystemExit, match="2"):
        benchmark.run()
    assert capsys.readouterr().err == "error: ratio_to=mha_plus is not among the variants: aft, gmlp\n"


# The learning rates


def summary(rate: float, fit: dict) -> dict:
    """Return the summary of a made-up run."""
    texts = dict.fromkeys(("experiment", "name", "attn", "precision", "device", "command"), "x")
    counts = dict.fromkeys(("seed", "steps", "tokens", "parameters"), 1)
    data = {"name": "x", "sha256": "x", "characters": 1, "unique": 1, "vocabulary": 1, "holdout": 0.0}
    fit = fit | {"perplexity": math.exp(fit["loss"]), "characters": 1}
    return texts | counts | {
        "status": "finished", "lr": rate, "training_seconds": 1.0, "tokens_per_second": None, "commit": None,
        "dirty": False, "data": data, "versions": {"torch": "2"}, "evaluation": {"fit": fit, "tokens_per_second": None},
    }  # fmt: skip


@pytest.fixture
def tried_rates(tmp_path, monkeypatch):
    """Replace training by made-up runs whose loss is lowest at the rate 0.008, and which diverge from 0.03 on.

    Return a list to which the (attention, rate, seed) of each run is added.
    """
    monkeypatch.setattr("scripts.reporting.rates.RATES", tmp_path / "configs/rates")
    monkeypatch.setattr(rates, "CONFIGS", tmp_path / "configs")
    trained = []

    def instead(jobs, *_, **__):
        for job in jobs:
            given = dict(word.split("=") for word in job.overrides)
            rate, seed = float(given["optim.lr"]), int(given["seed"])
            trained.append((given["attn"], rate, seed))
            fit = {"loss": abs(math.log(rate / 8e-3)) + seed / 1000}
            ended = {} if rate < 0.03 else {"status": "diverged", "evaluation": None}
            write_json(job.record.summary, summary(rate, fit) | {"seed": seed} | ended)

    monkeypatch.setattr(runner, "train_all", instead)
    arguments = [f"results={tmp_path}", "variants=[aft,gmlp]"]
    monkeypatch.setattr("sys.argv", ["reproduce", "study=rates", *arguments])
    return trained


def test_rates_are_tried_until_the_best_lies_between_two_others(tried_rates, tmp_path):
    other = record(tmp_path / "runs", "aft train.batch=3 optim.lr=0.032", 100)
    write_json(other.summary, summary(0.032, {"loss": 0.0}))
    reproduce.run()
    tried = {(attn, rate) for attn, rate, _ in tried_rates}
    assert tried == {(attn, rate) for attn in ("aft", "gmlp") for rate in (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)}
    assert {seed for *_, seed in tried_rates} == {100, 101}
    text = (tmp_path / "configs/rates/small/adabelief/aft.yaml").read_text()
    assert text.startswith("# @package optim\n")
    found = "study=rates variants=[aft] setup=small optimizer=adabelief. Log perplexity on the training text after "
    found += "training, the mean of seeds 100, 101, for each learning rate: 0.001: 2.1799; 0.002: 1.4868; "
    found += "0.004: 0.7936; 0.008: 0.1005; 0.016: 0.7936"
    assert found in text.replace("\n# ", " ")
    assert OmegaConf.create(text) == {"lr": 0.008}
    done = len(tried_rates)
    reproduce.run()
    assert len(tried_rates) == done


def test_lower_rates_are_tried_too_at_any_size(tried_rates, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [*sys.argv, "learning_rates=[0.016,0.032]", "setup=novel", "seeds=[7]"])
    reproduce.run()
    assert {(rate, seed) for _, rate, seed in tried_rates} == {(0.032, 7), (0.016, 7), (0.008, 7), (0.004, 7)}
    text = (tmp_path / "configs/rates/novel/adabelief/aft.yaml").read_text()
    assert "lr: 0.008" in text
    assert "0.016: 0.7001; 0.032: diverged" in text.replace("\n# ", " ")


def test_a_rate_counts_as_tried_with_the_six_digits_that_names_of_runs_have():
    cfg = OmegaConf.create({"learning_rates": [0.00123456789]})
    assert rates.rates_to_try(cfg, {0.00123457: 1.0}) == [2 * 0.00123457]


def test_an_attention_that_diverges_at_every_rate_is_not_tried_for_ever():
    cfg = OmegaConf.create({"learning_rates": [1e-3, 2e-3]})
    tried = {1e-3: math.inf, 2e-3: math.inf}
    while more := rates.rates_to_try(cfg, tried):
        tried = dict.fromkeys(sorted([*more, *tried]), math.inf)
        assert len(tried) < 15
    assert min(tried) < 1e-6


def test_a_run_that_fails_chooses_nothing(tried_rates, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "train_all", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="2"):
        reproduce.run()
    assert "error: these runs are not finished: aft-initial_f=decays-seed100, " in capsys.readouterr().err
    assert not (tmp_path / "configs").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("optimizer=sgd", "there is no optim=sgd; there are adabelief, adamw, muon"),
        ("variants=[aft,nothing]", "there is no attn=nothing; there are aft, "),
        ("variants=[aft,mha_pluss]", "there is no attn=mha_pluss, did you mean mha_plus?; there are aft, "),
        ("learning_rates=[0.001,-1]", "learning_rates must be above 0: got [0.001, -1]"),
        ("learning_rates=[]", "learning_rates must not be empty"),
    ],
)
def test_rates_that_cannot_be_chosen_are_refused(tried_rates, given, message, monkeypatch, capsys):
    rest = [word for word in sys.argv if not word.startswith(given.split("=")[0])]
    monkeypatch.setattr("sys.argv", [*rest, given])
    with pytest.raises(SystemExit, match="2"):
        reproduce.run()
    assert message in capsys.readouterr().err
    assert tried_rates == []


def test_the_map_finds_what_w_depends_on():
    """The expected lists, of positions and of inputs, follow from the equations.

    FoX's W[t,u] depends on the inputs between u and t, by its gates. With talking heads, W[t,u] depends on all inputs
    up to t, and on the number t: the heads are mixed after the softmax, so that their denominators do not cancel. The
    product of the delta rules has a factor for each position between u and t.
    """
    found = {}
    variants = ["aft", "mha", "fox", "talking_heads", "gmlp", "alibi", "retnet", "rwkv4", "linear_attention", "gla"]
    for variant in [*variants, "deltanet", "rwkv7", "xsa"]:
        attention = attention_map.random_model(variant).blocks[0].attn
        found[variant] = attention_map.positions(attention), attention_map.dependences(attention)
    assert found == {
        "aft": (["t", "u"], ["u"]),
        "mha": ([], ["t", "u"]),
        "fox": (["t-u"], ["t", "u", "between"]),
        "talking_heads": (["t", "u"], ["t", "u", "between", "before u"]),
        "gmlp": (["t", "u"], []),
        "alibi": (["t-u"], ["t", "u"]),
        "retnet": (["t-u"], ["t", "u"]),
        "rwkv4": (["t-u"], ["u"]),
        "linear_attention": ([], ["t", "u"]),
        "gla": (["t-u"], ["t", "u", "between"]),
        "deltanet": (["t-u"], ["t", "u", "between"]),
        "rwkv7": (["t-u"], ["t", "u", "between"]),
        "xsa": (["t", "u"], ["t", "u", "between", "before u"]),
    }


def test_the_map_finds_how_the_operations_grow():
    variants = ("mha", "aft_simple", "retnet", "gmlp", "fox", "rwkv7", "linear_attention")
    found = {variant: attention_map.growth(variant, attention_map.FEW_HEADS) for variant in variants}
    expected = {"mha": "T²", "aft_simple": "T", "retnet": "T", "gmlp": "T log² T", "fox": "T²"}
    assert found == expected | {"rwkv7": "T", "linear_attention": "T"}


def test_the_map_shows_the_bytes_of_the_state():
    """MHA keeps K and V, DeltaNet a matrix of 64 x 64 numbers for each of 8 heads."""
    assert attention_map.state("mha") == f"grows by {4 * 2 * 512:,} per character"
    assert attention_map.state("deltanet") == f"{4 * 8 * 64 * 64:,}"
