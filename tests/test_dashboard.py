"""Test the page of all runs: the data that are embedded in it, and its behaviour in a browser."""

import base64
import gzip
import itertools
import json
import math
import os
import re
import shutil
import statistics
from datetime import datetime
from pathlib import Path
from urllib.parse import unquote

import pytest
from omegaconf import OmegaConf

from data.files import UserError, write_bytes, write_json
from scripts import dashboard
from tests.conftest import ROOT, command
from training.runs import run_folders

pytestmark = pytest.mark.slow

NASTY = "</script><script>alert(1)</script>&amp;<b>"


def record(folder: Path, changes: dict | None = None, best: float = 10.0, steps: int = 300, **summary) -> Path:
    """Write an invented record whose perplexity falls to `best`, and return its folder.

    `changes` are keys of its config, and `summary` keys of its summary, with their values.
    """
    attn, _, seed = folder.name.partition("-seed")
    facts = {"experiment": folder.parent.name, "attn": attn, "name": folder.name}
    config = {"model": {"dim": 8}, "attn": {"_target_": "A", "dim": 8}, "seed": int(seed), "job": facts}
    config = OmegaConf.create(config)
    for key, value in (changes or {}).items():
        OmegaConf.update(config, key, value)
    rows = [
        {"step": s, "tokens": 32 * s, "seconds": s / 8, "perplexity": best * steps / s} for s in range(1, steps + 1)
    ]
    for row in rows[19::20]:
        row |= {"fit_perplexity": row["perplexity"], "heldout_perplexity": row["perplexity"] + 1}
    evaluation = {text: {"perplexity": best + i} for i, text in enumerate(("fit", "heldout", "sliding"))}
    outcome = {"status": "finished", "evaluation": evaluation, "tokens_per_second": 1000 * best, "parameters": 12345}
    folder.mkdir(parents=True)
    OmegaConf.save(config, folder / "config.yaml")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(folder / "summary.json", facts | {"seed": int(seed), "training_seconds": 37.5} | outcome | summary)
    return folder


def written_at(folder: Path) -> str:
    """Return the minute in which the last file of a record was written."""
    last = max((folder / name).stat().st_mtime for name in ("summary.json", "metrics.jsonl"))
    return datetime.fromtimestamp(last).strftime("%Y-%m-%d %H:%M")


def rows_of(data: dict) -> list[dict]:
    return [labelled(data, run["cells"]) for run in data["runs"]]


def labelled(data: dict, cells: list) -> dict:
    return dict(zip([column["label"] for column in data["columns"]], cells, strict=True))


def embedded(page: str) -> dict:
    (data,) = re.findall(r"^const \{ columns, runs, means, colours, damaged \} = (.*);$", unpacked(page), re.MULTILINE)
    return json.loads(data)


def unpacked(page: str) -> str:
    """Return the script in a page."""
    (packed,) = re.findall(r'const PACKED = "([\w+/=]*)"', page)
    return gzip.decompress(base64.b64decode(packed)).decode()


def test_a_row_shows_the_figures_of_the_record(tmp_path):
    folder = record(tmp_path / "quick/aft-seed1", best=20)
    (row,) = rows_of(dashboard.collect(tmp_path, tmp_path))
    later = {
        "best held-out perplexity": 19, "at step": 240, "FLOPs/step": 10**12, "streaming state, bytes": 4096,
        "fit bits per character": 4.3, "fit bits per byte": 1.4,
        "held-out bits per character": 4.6, "held-out bits per byte": 1.5,
    }  # fmt: skip
    former = {
        "experiment": "quick", "name": "aft-seed1", "attn": "aft", "seed": 1, "status": "finished",
        "fit perplexity": 20, "held-out perplexity": 21, "sliding perplexity": 22,
        "tokens/s": 20_000, "parameters": 12345, "training seconds": 37.5, "date": written_at(folder),
    }  # fmt: skip
    assert row == former | dict.fromkeys(later)  # figures that an older record lacks
    summary = json.loads((folder / "summary.json").read_text())
    summary["evaluation"]["fit"] |= {"bits_per_character": 4.3, "bits_per_byte": 1.4}
    summary["evaluation"]["heldout"] |= {"bits_per_character": 4.6, "bits_per_byte": 1.5}
    summary["evaluation"]["heldout_best"] = {"perplexity": 19, "step": 240}
    write_json(folder / "summary.json", summary | {"flops_per_step": 10**12, "state_bytes": 4096})
    (row,) = rows_of(dashboard.collect(tmp_path, tmp_path))
    assert row == former | later


def test_columns_of_figures_come_before_those_of_settings(tmp_path):
    record(tmp_path / "quick/aft-seed0")
    record(tmp_path / "quick/mha-seed0", {"model.dim": 16})
    labels = [column["label"] for column in dashboard.collect(tmp_path, tmp_path)["columns"]]
    assert labels[:4] == ["experiment", "name", "fit perplexity", "held-out perplexity"]
    assert (
        labels.index("tokens/s")
        < labels.index("parameters")
        < labels.index("date")
        < labels.index("sliding perplexity")
    )
    assert labels[-1] == "model.dim"


def test_a_date_is_that_of_the_newest_file(tmp_path):
    folder = record(tmp_path / "quick/aft-seed0")
    os.utime(folder / "summary.json", (0, 86400 * 365))
    assert rows_of(dashboard.collect(tmp_path, tmp_path))[0]["date"] == written_at(folder) != "1971-01-01 00:00"
    committed = dashboard.collect(ROOT / "results/runs/novel", tmp_path)
    assert {row["date"] for row in rows_of(committed)} == {None}  # packed runs have no date


def test_runs_that_differ_only_in_their_seed_have_a_row_of_means(tmp_path):
    for seed, best in enumerate((10, 20, 60)):
        record(tmp_path / f"quick/aft-seed{seed}", {"model.dim": 16}, best=best)
    record(tmp_path / "quick/aft-seed3", {"model.dim": 16}, best=99, status="interrupted", evaluation=None)
    record(tmp_path / "quick/mha-seed0")
    record(tmp_path / "slow/aft-seed4")
    data = dashboard.collect(tmp_path, tmp_path)
    (mean,) = data["means"]
    cells, deviations = labelled(data, mean["cells"]), labelled(data, mean["deviations"])
    assert (cells["experiment"], cells["name"], cells["seed"], cells["model.dim"]) == ("quick", "aft", None, 16)
    assert cells["status"] == "mean of 3 seeds"
    assert cells["date"] == max(row["date"] for row in rows_of(data)[:3])
    assert cells["fit perplexity"] == 30
    assert deviations["fit perplexity"] == pytest.approx(statistics.stdev((10, 20, 60)))
    assert (cells["parameters"], deviations["parameters"]) == (12345, 0)
    assert cells["at step"] is deviations["at step"] is None
    curves = [run["curves"]["fit_perplexity"] for run in data["runs"][:3]]
    drawn = mean["curves"]["fit_perplexity"]
    assert (drawn["step"], drawn["tokens"]) == (curves[0]["step"], curves[0]["tokens"])
    assert drawn["value"] == pytest.approx([3 * curves[0]["value"][i] for i in range(len(drawn["step"]))], rel=1e-3)
    assert mean["f"] is mean["folder"] is None


def test_curves_with_different_steps_have_no_mean(tmp_path):
    record(tmp_path / "quick/aft-seed0")
    record(tmp_path / "quick/aft-seed1", steps=320)
    (mean,) = dashboard.collect(tmp_path, tmp_path)["means"]
    assert mean["curves"]["fit_perplexity"] == {"step": [], "tokens": [], "seconds": [], "value": []}


def test_columns_are_the_keys_that_tell_runs_apart():
    same = {"model.dim": 8, "attn.dim": 8, "attn._target_": "A", "job.attn": "aft", "seed": 0, "optim.betas": [0, 1]}
    wide = {"model.dim": 16, "attn.dim": 16, "attn._target_": "B", "data.cache": "x", "train.device": "cpu", "seed": 1}
    assert dashboard.differing([same, same]) == []
    assert dashboard.differing([same, same | wide]) == ["model.dim"]  # attn.dim repeats it
    assert dashboard.differing([same, same | wide | {"attn.dim": 32}]) == ["model.dim", "attn.dim"]
    assert dashboard.differing([same, same | {"optim.betas": [0, 2]}]) == ["optim.betas"]
    # A key gets no column if only the runs of one attention have it, and all of them with the same value. A key gets a
    # column if one run of an attention has it and another run of the same attention lacks it.
    assert dashboard.differing([same, same | {"job.attn": "gau", "attn.key": 1}]) == []
    assert dashboard.differing([same, same | {"attn.position_weight": None}]) == ["attn.position_weight"]


def test_values_of_a_config_are_shown_as_they_are_written(tmp_path):
    record(tmp_path / "quick/aft-seed0", {"attn.gamma": True, "optim.betas": [0.9, 0.99], "ffn.hidden": None})
    record(tmp_path / "quick/aft-seed1", {"optim.lr": 1e-3})
    first, second = rows_of(dashboard.collect(tmp_path, tmp_path))
    assert (first["attn.gamma"], first["optim.betas"], first["ffn.hidden"]) == ("true", "[0.9, 0.99]", "null")
    assert (first["optim.lr"], second["optim.lr"], second["attn.gamma"]) == (None, 1e-3, None)


@pytest.mark.parametrize("count", [0, 1, 2, 99, 100, 101, 1000, 100_000])
def test_thinned_curves_keep_their_ends(count):
    kept = dashboard.thinned(count)
    assert len(kept) == count if count <= 100 else 60 < len(kept) <= 100
    assert kept == sorted(set(kept))
    assert not count or (kept[0], kept[-1]) == (0, count - 1)


def test_curves_hold_points_of_the_record(tmp_path):
    record(tmp_path / "quick/aft-seed0", best=10, steps=3000)
    (run,) = dashboard.collect(tmp_path, tmp_path)["runs"]
    for metric, offset in (("perplexity", 0), ("fit_perplexity", 0), ("heldout_perplexity", 1)):
        drawn = run["curves"][metric]
        assert drawn["tokens"] == [32 * step for step in drawn["step"]]
        assert drawn["seconds"] == pytest.approx([step / 8 for step in drawn["step"]], rel=5e-4)
        assert drawn["value"] == pytest.approx([30_000 / step + offset for step in drawn["step"]], rel=5e-4)
    assert run["curves"]["fit_perplexity"]["step"][-1] == 3000


def test_no_text_in_a_record_ends_the_script_element(tmp_path):
    record(tmp_path / "quick/aft-seed0", {"data.path": NASTY}, name=NASTY, command=NASTY)
    record(tmp_path / "quick/aft-seed1", {"data.path": "{{script}}"})
    data = dashboard.collect(tmp_path, tmp_path)
    page = dashboard.page(data)
    assert "alert(1)" in unpacked(page)
    assert "alert(1)" not in page
    assert page.count("</script>") == 1
    assert embedded(page) == data


def test_numbers_that_are_not_finite_survive(tmp_path):
    """Older records may hold infinity and NaN."""
    folder = record(tmp_path / "quick/aft-seed0")
    numbers = {"evaluation": {"fit": {"perplexity": math.inf}}, "tokens_per_second": math.nan}
    summary = folder / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | numbers))
    row = {"step": 301, "tokens": 1, "seconds": 1, "fit_perplexity": math.nan, "perplexity": math.inf}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    data = embedded(dashboard.page(dashboard.collect(tmp_path, tmp_path)))
    (cells,) = rows_of(data)
    assert cells["fit perplexity"] == math.inf
    assert math.isnan(cells["tokens/s"])
    assert cells["sliding perplexity"] is None
    assert math.isnan(data["runs"][0]["curves"]["fit_perplexity"]["value"][-1])
    assert data["runs"][0]["curves"]["perplexity"]["value"][-1] == math.inf


@pytest.mark.parametrize("name", ["f.json", "position_weight.json"])  # older records have the second
def test_f_is_that_of_the_record(tmp_path, name):
    f = [[head + t / 1000 for t in range(500)] for head in range(3)]
    write_json(record(tmp_path / "quick/aft-seed0") / name, {"f": f})
    record(tmp_path / "quick/aft-seed1")
    with_f, without = dashboard.collect(tmp_path, tmp_path)["runs"]
    assert without["f"] is None
    assert len(with_f["f"]["distance"]) <= 100
    assert with_f["f"]["heads"] == [[pytest.approx(head[t]) for t in with_f["f"]["distance"]] for head in f]


def test_a_page_of_many_runs_is_small(tmp_path, monkeypatch):
    """On average, each further run adds less than 600 bytes to the page."""
    for seed in range(60):
        noise = {"fit": {"perplexity": 10 + seed / 7}, "heldout": {"perplexity": 11 + seed / 7}}
        record(tmp_path / f"quick/aft-seed{seed}", best=10 + seed / 7, evaluation=noise)
    # With this limit, curves on the page of 60 runs get as few points as those on a page of thousands of runs usually
    # do. On the page of one run, they get more.
    monkeypatch.setattr(dashboard, "ALL", 60 * dashboard.FEWEST)
    places = (tmp_path / "quick/aft-seed0", tmp_path)
    sizes = [len(dashboard.page(dashboard.collect(place, tmp_path))) for place in places]
    assert sizes[0] < 2.1e6  # mostly plotly, which has 4.8 MB before compression
    assert sizes[1] - sizes[0] < 59 * 600


def test_figures_have_the_digits_that_the_table_shows(tmp_path):
    record(tmp_path / "quick/aft-seed0", tokens_per_second=1234.567, training_seconds=37.54)
    (row,) = rows_of(dashboard.collect(tmp_path, tmp_path))
    assert (row["tokens/s"], row["training seconds"]) == (1235, 37.5)
    assert dashboard.rounded(math.inf, 0) == math.inf


def test_links_lead_to_the_records(tmp_path):
    record(tmp_path / "runs/quick & dirty/aft-seed0")
    (run,) = dashboard.collect(tmp_path / "runs", tmp_path / "pages/all")["runs"]
    assert (tmp_path / "pages/all" / unquote(run["folder"])).resolve() == tmp_path / "runs/quick & dirty/aft-seed0"
    assert run["folder"] == "../../runs/quick%20%26%20dirty/aft-seed0/"


def test_unfinished_runs_are_shown_as_far_as_they_have_come(tmp_path):
    killed = record(tmp_path / "quick/aft-seed0")
    (killed / "summary.json").unlink()
    record(tmp_path / "quick/aft-seed1", status="interrupted", evaluation=None)
    started = record(tmp_path / "quick/aft-seed2", steps=0)
    (started / "summary.json").unlink()
    alone = record(tmp_path / "quick/aft-seed3")
    for name in ("config.yaml", "metrics.jsonl"):
        (alone / name).unlink()
    rows = rows_of(dashboard.collect(tmp_path, tmp_path))
    assert [row["status"] for row in rows] == [
        "unfinished at step 300", "interrupted at step 300", "unfinished", "finished",
    ]  # fmt: skip
    assert [row["seed"] for row in rows] == [0, 1, 2, 3]
    assert [row["attn"] for row in rows] == ["aft"] * 4
    assert [row["fit perplexity"] for row in rows] == [None, None, None, 10]


def test_a_last_row_that_is_cut_short_does_not_hide_an_unfinished_run(tmp_path):
    cut = record(tmp_path / "quick/aft-seed0")
    (cut / "summary.json").unlink()
    with open(cut / "metrics.jsonl", "a") as file:
        file.write('{"step": 301, "tok')
    (row,) = rows_of(dashboard.collect(tmp_path, tmp_path))
    assert row["status"] == "unfinished at step 300"


def test_means_are_those_of_exact_figures_and_of_losses(tmp_path):
    for seed, rate in enumerate((0.5, 1.4)):  # which are shown as 0 and 1
        record(tmp_path / f"quick/aft-seed{seed}", tokens_per_second=rate)
    data = dashboard.collect(tmp_path, tmp_path)
    assert labelled(data, data["means"][0]["cells"])["tokens/s"] == 1
    curve = {"step": [1], "tokens": [1], "seconds": [1.0]}
    mean = dashboard.mean_curve([curve | {"value": [value]} for value in (2.0, 8.0)])
    assert (mean["value"], mean["loss"]) == ([5.0], [pytest.approx(math.log(4), rel=1e-3)])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", '{"status": '),
        ("summary.json", "[]"),
        ("metrics.jsonl", '{"step": 1, "tok\n'),
        ("metrics.jsonl", "3\n"),
        ("metrics.jsonl", '{"step": 1}\n'),
        ("config.yaml", "a: [1"),
        ("config.yaml", "- 1"),
        ("f.json", '{"f": [1, 2]}'),
        ("f.json", '{"f": [["a"]]}'),
        ("position_weight.json", '{"f": [[1, 2], [1]]}'),
    ],
)
def test_a_damaged_run_is_named_and_left_out(tmp_path, name, content, monkeypatch):
    monkeypatch.setattr(dashboard, "get_plotlyjs", str)  # which takes time to compress
    path = record(tmp_path / "quick/aft-seed0") / name
    path.write_text(content)
    with pytest.raises(UserError, match=re.escape(f"{path} is damaged")):
        dashboard.collect(tmp_path, tmp_path)
    record(tmp_path / "quick/mha-seed0")
    data = dashboard.collect(tmp_path, tmp_path)
    assert [row["name"] for row in rows_of(data)] == ["mha-seed0"]
    (message,) = data["damaged"]
    assert message.startswith(f"{path} is damaged")
    assert message in json.loads(json.dumps(embedded(dashboard.page(data))["damaged"]))


def test_a_folder_in_the_place_of_metrics_is_named(tmp_path):
    path = record(tmp_path / "quick/aft-seed0") / "metrics.jsonl"
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=re.escape(f"cannot read {path}: Is a directory")):
        dashboard.collect(tmp_path, tmp_path)


def test_curves_of_many_runs_have_fewer_points(tmp_path, monkeypatch):
    for seed in range(3):
        record(tmp_path / f"quick/aft-seed{seed}")
    ours = dashboard.collect(tmp_path, tmp_path)["runs"]
    assert len(ours[0]["curves"]["perplexity"]["step"]) > dashboard.FEWEST
    monkeypatch.setattr(dashboard, "ALL", 3 * dashboard.FEWEST)
    for run in dashboard.collect(tmp_path, tmp_path)["runs"]:
        steps = run["curves"]["perplexity"]["step"]
        assert len(steps) <= dashboard.FEWEST
        assert (steps[0], steps[-1]) == (1, 300)


def test_the_command_writes_one_file(tmp_path):
    record(tmp_path / "runs/quick/aft-seed0")
    done = command("-m", "scripts.dashboard", f"runs={tmp_path}/runs", f"out={tmp_path}/page/all.html")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "page").iterdir()] == ["all.html"]
    assert "1 runs" in done.stdout


def test_a_folder_is_not_overwritten(tmp_path):
    folder = record(tmp_path / "runs/quick/aft-seed0")
    done = command("-m", "scripts.dashboard", f"runs={tmp_path}/runs", f"out={tmp_path}/runs")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "runs is a folder: give a file, like" in done.stderr
    assert (folder / "summary.json").exists()


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(UserError, match="there are no runs in"):
        dashboard.collect(tmp_path / "none", tmp_path)


# In a browser


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium or google-chrome is installed")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def show(browser, tmp_path):
    """Return a function that opens the page of the runs under tmp_path/runs.

    Fail if the page raises an error, opens a dialog, or requests a URL other than a file.
    """
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    errors, asked = [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))

    def open_page():
        path = tmp_path / "all runs.html"
        write_bytes(path, dashboard.page(dashboard.collect(tmp_path / "runs", tmp_path)).encode())
        page.goto(path.as_uri())
        page.wait_for_function("window.Plotly && body.rows.length")
        return page

    yield open_page
    assert not errors
    assert [url for url in asked if not url.startswith("file:")] == []
    page.close()


def names(page) -> list[str]:
    return page.locator("#runs tbody a").all_inner_texts()


def curves(page, plot: str = "curves") -> dict:
    """Return plotly's `lines` (y by name), `xs` (x of each line), and the layouts of the axes `x` and `y`."""
    page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    return page.evaluate(
        "(id) => ({lines: Object.fromEntries($(id).data.map(({name, y}) => [name, [...y]])),"
        " xs: $(id).data.map(({x}) => [...x]), x: $(id).layout.xaxis, y: $(id).layout.yaxis})",
        plot,
    )


@pytest.mark.browser
def test_the_page_in_a_browser(show, tmp_path):
    for best, name in ((30, "aft-seed0"), (9, "gmlp-seed0"), (100, "mha-seed0")):
        record(tmp_path / "runs/quick" / name, {"model.dim": 2 * best}, best)
    record(tmp_path / "runs/quick/rwv-seed0", name=NASTY, evaluation=None, status="interrupted")
    write_json(tmp_path / "runs/quick/aft-seed0/position_weight.json", {"f": [[1.0, 0.5, 0.25], [1.0, 0.9, 0.8]]})
    page = show()
    assert names(page) == ["aft-seed0", "gmlp-seed0", "mha-seed0", NASTY]

    # Sort by a click and with the keyboard. The order is numeric; runs without a figure come last in both directions.
    fit = page.get_by_role("button", name="fit perplexity")
    fit.click()
    assert names(page) == ["gmlp-seed0", "aft-seed0", "mha-seed0", NASTY]
    fit.press("Enter")
    assert names(page) == ["mha-seed0", "aft-seed0", "gmlp-seed0", NASTY]
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("fit")

    # Filter by words in any column, and by a bound for one column.
    page.get_by_label("Filter all columns").fill("quick GMLP")
    assert names(page) == ["gmlp-seed0"]
    page.get_by_label("Filter all columns").fill("")
    page.get_by_label("Filter model.dim").fill(">= 60")
    assert names(page) == ["mha-seed0", "aft-seed0"]

    # Tick all runs that are shown, and then single ones.
    page.get_by_role("button", name="none").click()
    page.wait_for_function('$("curves-hint").textContent.includes("Tick runs")')  # it is drawn with the next frame
    page.get_by_role("button", name="tick all shown").click()
    assert "2 of 4 runs shown, 2 ticked" in page.locator("#count").inner_text()
    drawn = curves(page)
    assert set(drawn["lines"]) == {"quick/aft-seed0", "quick/mha-seed0"}
    assert drawn["lines"]["quick/aft-seed0"][-1] == 30
    page.get_by_label("Filter model.dim").fill("")
    page.get_by_label("quick/gmlp-seed0").press("Space")
    page.get_by_label("quick/mha-seed0").uncheck()
    page.get_by_label(f"quick/{NASTY}").check()
    escaped = NASTY.replace("&", "&amp;").replace("<", "&lt;")
    assert set(curves(page)["lines"]) == {"quick/aft-seed0", "quick/gmlp-seed0", f"quick/{escaped}"}
    assert NASTY in page.locator("#curves-legend").text_content()

    # Choose the scales of the axes and what is drawn.
    assert (drawn["x"]["type"], drawn["y"]["type"]) == ("linear", "log")
    page.locator("#log-x").check()
    page.locator("#log-y").uncheck()
    page.locator("#axis").select_option("tokens")
    page.locator("#metric").select_option("held-out")
    page.locator("#unit").select_option("loss")
    drawn = curves(page)
    assert (drawn["x"]["type"], drawn["y"]["type"]) == ("log", "linear")
    assert drawn["xs"][0][-1] == 300 * 32
    assert drawn["lines"]["quick/gmlp-seed0"][-1] == pytest.approx(math.log(10))
    assert drawn["y"]["title"]["text"] == "held-out loss"
    assert curves(page, "f")["lines"] == {"head 1": [1, 0.5, 0.25], "head 2": [1, 0.9, 0.8]}

    link = page.get_by_role("link", name="aft-seed0", exact=True)
    assert link.evaluate("(a) => a.href") == (tmp_path / "runs/quick/aft-seed0").as_uri() + "/"
    link.click()
    assert "summary.json" in page.content()


@pytest.mark.browser
def test_means_over_seeds_are_rows(show, tmp_path):
    for seed, best in ((0, 10), (1, 20), (2, 30)):
        record(tmp_path / f"runs/quick/aft-seed{seed}", best=best)
    record(tmp_path / "runs/quick/mha-seed0", best=15)
    page = show()
    rows = page.locator("#runs tbody tr")
    assert rows.count() == 5
    assert "20.00 ± 10.00" in rows.first.inner_text()
    assert "4 of 4 runs, 1 of 1 means shown" in page.locator("#count").inner_text()
    page.get_by_role("button", name="fit perplexity").first.click()
    assert [row.split("\t")[2].strip() for row in rows.all_inner_texts()] == [
        "aft-seed0", "mha-seed0", "aft", "aft-seed1", "aft-seed2",
    ]  # fmt: skip
    page.get_by_label("only means over seeds").check()
    assert rows.count() == 1
    page.get_by_role("button", name="none").click()
    page.get_by_role("button", name="tick all shown").click()
    assert curves(page)["lines"].keys() == {"quick/aft"}
    assert curves(page)["lines"]["quick/aft"][-1] == 20


@pytest.mark.browser
def test_accuracy_is_a_unit_if_runs_logged_it(show, tmp_path):
    folder = record(tmp_path / "runs/quick/aft-seed0")
    assert show().locator("#unit option").all_inner_texts() == ["perplexity", "loss"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if "fit_perplexity" in row:
            row |= {"fit_accuracy": row["step"] / 300, "heldout_accuracy": row["step"] / 600}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = show()
    assert page.locator("#unit option").all_inner_texts() == ["perplexity", "loss", "accuracy"]
    page.locator("#unit").select_option("accuracy")
    for text, last in (("fit", 1), ("held-out", 0.5)):
        page.locator("#metric").select_option(text)
        assert curves(page)["lines"]["quick/aft-seed0"][-1] == last
    page.locator("#metric").select_option("training batches")
    page.locator("#curves-hint", has_text="1 of the ticked runs logged no training batches accuracy.").wait_for()


@pytest.mark.browser
def test_a_legend_tells_39_curves_apart(show, tmp_path):
    names_of = [f"aft-key_size={i}-lr=0.00{i}-seed0" for i in range(39)]
    for name in names_of:
        record(tmp_path / "runs/quick" / name)
    page = show()
    page.get_by_role("button", name="tick all shown").click()
    curves(page)
    keys = page.locator("#curves-legend li")
    assert {item.removesuffix("×").strip() for item in keys.all_inner_texts()} == set(names_of)
    looks = page.evaluate("[...document.querySelectorAll('#curves-legend line')].map((line) => line.outerHTML)")
    assert len(set(looks)) == 39
    assert page.locator("#curves .nsewdrag").bounding_box()["height"] > 300  # pixels that are left for the curves
    page.get_by_role("button", name=f"untick {names_of[3]}").click()
    curves(page)
    assert keys.count() == 38
    assert not page.get_by_label(f"quick/{names_of[3]}").is_checked()


@pytest.mark.browser
def test_ticks_and_names_stay_in_view(show, tmp_path):
    for i in range(4):
        changes = {f"model.setting_with_a_long_name_{k}": 10 * k + i for k in range(20)}
        record(tmp_path / f"runs/quick/aft-seed{i}", changes)
    page = show()
    frame = page.locator("#frame")
    frame.evaluate("(frame) => frame.scrollLeft = frame.scrollWidth")
    left = frame.bounding_box()["x"]
    box = page.get_by_label("quick/aft-seed0").bounding_box()
    link = page.get_by_role("link", name="aft-seed0").bounding_box()
    assert left <= box["x"] < box["x"] + box["width"] <= link["x"] < left + 200


@pytest.mark.browser
@pytest.mark.parametrize("logarithmic", [[], ["#log-x", "#f-log-x", "#f-log-y"]])
@pytest.mark.parametrize("least", [3, 90])
def test_labels_of_plots_do_not_overlap(show, tmp_path, logarithmic, least):
    """Check axis titles, tick labels and the titles of panels, with long names."""
    for i in range(7):
        folder = record(tmp_path / f"runs/quick/aft-a_setting_with_a_long_name={i}-seed0", best=least + i)
        write_json(folder / "f.json", {"f": [[1.0, 0.5 / (1 + i), 0.25]] * 8})
    page = show()
    for box in logarithmic:
        page.locator(box).check()
    curves(page)
    for plot in ("curves", "f"):
        texts = page.evaluate(
            """(id) => [...$(id).querySelectorAll("text")].filter((text) => text.textContent)
                .map((text) => [text.textContent, text.getBoundingClientRect()])
                .map(([text, { x, y, width, height }]) => [text, x, y, width, height])""",
            plot,
        )
        assert len(texts) > 8
        for one, other in itertools.combinations(texts, 2):
            (_, x, y, width, height), (_, u, v, wide, high) = one, other
            apart = x + width <= u + 1 or u + wide <= x + 1
            apart |= y + height <= v + 4 or v + high <= y + 4  # a box is empty above and below its digits
            assert apart, (one, other)


@pytest.mark.browser
def test_of_hundreds_of_runs_only_a_screenful_is_laid_out(show, tmp_path):
    for i in range(300):
        record(tmp_path / f"runs/{'ab'[i % 2]}/aft-seed{i}", {"model.dim": i % 7, "optim.lr": i % 5}, best=10 + i % 50)
    page = show()
    assert "300 of 300 runs, 2 of 2 means shown" in page.locator("#count").inner_text()
    search = """(text) => { $("search").value = text; $("search").dispatchEvent(new Event("input")); }"""
    for act in ("() => filter()", f"() => ({search})('a seed1')", f"() => ({search})('')"):
        page.evaluate(act)
        assert 0 < page.evaluate("body.rows.length") <= 60
    page.evaluate("columns.at(-4).title.firstChild.click()")
    assert page.evaluate("body.rows.length") == 60
    page.locator("#frame").evaluate("(frame) => frame.scrollTop = frame.scrollHeight")
    page.wait_for_function("body.rows.length > 60")


def test_committed_records_make_a_page():
    data = dashboard.collect(ROOT / "results/runs/novel", ROOT / "results")
    names = {folder.name for folder in run_folders(ROOT / "results/runs/novel")}
    assert len(names) > 20
    assert {row["name"] for row in rows_of(data)} == names
    assert all((ROOT / "results" / unquote(run["folder"])).is_file() for run in data["runs"])
