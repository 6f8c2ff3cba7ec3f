"""Test the leaderboard and the learning rates: what is trained and measured, and the pages made from the records."""

import itertools
import math
import re
import statistics

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from configs.cli import compose
from data.files import UserError, write_json
from data.reading import read_json
from scripts import reproduce
from scripts.benchmarking import side_by_side
from scripts.reporting import (
    best_starts,
    claim_pages,
    leaderboard,
    leaderboard_page,
    leaderboard_plots,
    rates,
    readme,
    row_rates,
)
from scripts.reporting.claims import all_claims
from scripts.reporting.colours import colour_of
from scripts.reporting.leaderboard_plots import Point, Scatter, best_for_their_cost
from scripts.reporting.plots import label_points, name_lines
from scripts.reporting.records import MissingRecord, composed, label, record_of
from scripts.reporting.starts import Start
from scripts.studies import best_starts as best_starts_study
from scripts.studies import leaderboard as study
from scripts.studies import runner
from tests.conftest import TINY, VARIANTS
from train import train
from training.record import Record

pytestmark = pytest.mark.slow

FIT = {"aft": (3.60, 3.58, 3.62), "mha": (3.70, 3.69, 3.74), "mha_plus": (3.65, 3.64, 3.66), "gmlp": (3.80, 3.83, 3.79)}
HELDOUT = {"mha": 0.3}  # the held-out loss of a run minus its loss on the training text; 0.5 for other attentions
STATE = {"aft": 1000, "mha": 4000, "mha_plus": 4000, "gmlp": 500}
RATE = 0.004


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Return the path of a results folder, which does not exist yet. Only the attentions in FIT have a chosen rate."""
    monkeypatch.setattr(rates, "RATES", tmp_path / "rates")
    for variant in FIT:
        path = tmp_path / f"rates/small/adabelief/{variant}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# @package optim\nlr: {RATE}\n")
    return tmp_path / "results"


def settings(results, *overrides):
    return compose(["study=leaderboard", "seeds=[0,1,2]", f"results={results}", *overrides], "reproduce")


def evaluation(loss: float) -> dict:
    bits = {"bits_per_character": loss / math.log(2), "bits_per_byte": loss / 2}
    return {"loss": loss, "perplexity": math.exp(loss), "characters": 1000} | bits


def summary(variant: str, seed: int, loss: float, **others) -> dict:
    """Return the summary of an invented run."""
    data = {"name": "a text", "sha256": "5" * 64, "characters": 9000, "unique": 60, "vocabulary": 50, "holdout": 0.1}
    heldout = loss + HELDOUT.get(variant, 0.5)
    best = {"step": 30, "perplexity": math.exp(heldout - 0.1)}
    texts = {"fit": evaluation(loss), "heldout": evaluation(heldout), "heldout_best": best}
    return {
        "experiment": "small", "name": f"{variant}-seed{seed}", "attn": variant, "seed": seed, "lr": RATE,
        "status": "finished", "steps": 40, "tokens": 8100, "parameters": 700, "training_seconds": 1.0,
        "tokens_per_second": 100.0, "precision": "float32", "device": "a CPU", "commit": "abcdef", "dirty": False,
        "versions": {"torch": "2"}, "command": f"python train.py attn={variant} seed={seed}", "data": data,
        "state_bytes": STATE.get(variant, 1), "evaluation": texts | {"tokens_per_second": None},
    } | others  # fmt: skip


def make_up(results, variant: str, seed: int, loss: float, **others) -> Record:
    """Write the record of an invented run at the chosen rate, with `others` in its summary, and return the record."""
    return make_up_run(results, leaderboard.words(settings(results), variant), variant, seed, loss, **others)


def make_up_run(results, words: tuple[str, ...], variant: str, seed: int, loss: float, **others) -> Record:
    """Write the record of an invented run with these overrides of train.py, and return the record."""
    record, config = record_of(results / "runs", words, seed), composed(words).copy()
    config.seed = seed
    record.folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, record.config)
    write_json(record.summary, summary(variant, seed, loss, **others))
    return record


def make_up_all(results) -> None:
    for variant, losses in FIT.items():
        for seed, loss in enumerate(losses):
            make_up(results, variant, seed, loss)


def make_up_costs(results) -> None:
    origin = {"ratio_to": "mha", "repeats": 3, "characters": 8, "batch": 8, "context": 128, "precision": "bf16"}
    origin |= {"device": "a CPU", "command": "python x", "commit": "123456", "dirty": False, "threads": 2}
    faster = {variant: {"seconds": [1.0, 2.0, 4.0], "reference": [2.0, 2.0, 2.0]} for variant in ("aft", "gmlp")}
    costs = {"training": faster, "streaming": faster, "provenance": origin | {"versions": {"torch": "2"}}}
    write_json(results / "runs/small/costs.json", costs)


def tables(page: str) -> list[list[dict[str, str]]]:
    """Return the tables of a page. A row of a table is a dictionary from column names to cells."""
    found, lines = [], page.splitlines()
    for is_table, group in itertools.groupby(lines, key=lambda line: line.startswith("|")):
        if is_table:
            head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in group)
            found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def written(results) -> str:
    leaderboard_page.write(settings(results))
    return (results / "leaderboard.md").read_text(encoding="utf-8")


def test_the_page_says_which_rows_were_trained_in_which_precision(results):
    make_up_all(results)
    assert "Trained in" not in written(results)
    for seed, loss in enumerate(FIT["mha"]):
        make_up(results, "mha", seed, loss, precision="bf16")
    make_up(results, "gmlp", 0, FIT["gmlp"][0], precision="bf16")
    sentence = "- Trained in float32: AFT; MHA+. Trained in bf16: MHA. Trained in bf16 and float32: gMLP."
    assert sentence in written(results)


def test_the_board_is_sorted_by_fit_and_its_figures_are_those_of_the_records(results):
    make_up_all(results)
    make_up_costs(results)
    page = written(results)
    board, _ = tables(page)
    assert [row[""] for row in board] == ["AFT", "MHA+", "MHA", "gMLP"]
    aft = board[0]
    perplexities = np.exp(FIT["aft"])
    half = 4.302653 * perplexities.std(ddof=1) / math.sqrt(3)  # Student's t for two degrees of freedom
    mean = perplexities.mean()
    assert aft["fit perplexity"] == f"{mean:.2f} ({mean - half:.2f} to {mean + half:.2f})"
    assert aft["held-out"].startswith(f"{np.exp(np.array(FIT['aft']) + 0.5).mean():.2f} (")
    best = np.exp(np.array(FIT["aft"]) + 0.4)
    assert aft["best held-out"] == f"{best.mean():.2f} ± {best.std(ddof=1):.2f} after 0.8 passes"
    assert aft["held-out bits per byte"] == f"{(3.6 + 0.5) / 2:.3f}"
    assert aft["training speed over MHA's"] == "1.00 (0.75 to 1.50)"  # the speeds of the rounds are 2, 1 and 0.5
    streaming = [row["streaming speed over MHA's"] for row in board]
    assert streaming == ["1.00 (0.75 to 1.50)", "–", "1", "1.00 (0.75 to 1.50)"]
    assert aft["parameters of the block"] == "218,112"
    assert aft["state, bytes"] == "1,000, grows"
    assert (aft["learning rate"], aft["seeds"]) == ("0.004", "3")
    assert "recall, %" not in aft
    for text in ("commit abcdef", "a CPU, float32", "sha256 555555555555", "commit 123456", "`python train.py attn="):
        assert text in page
    heading = "# Leaderboard: small"
    assert f"{heading}\n\n**AFT** fits best, with a perplexity of {mean:.2f}" in page
    lowest = np.exp(np.array(FIT["mha"]) + 0.2).mean()
    assert f"**MHA** has the lowest held-out perplexity during training, {lowest:.2f}. Rows are sorted by fit" in page


def test_leads_compare_equal_seeds_and_are_judged_by_the_rule(results):
    make_up_all(results)
    _, leads = tables(written(results))
    rows = {row[""]: row for row in leads}
    over_plus, over_best = "lead over MHA+", "lead over the best, AFT"
    assert rows["MHA+"][over_plus] == rows["AFT"][over_best] == "–"
    # AFT's leads are 0.05, 0.06 and 0.04. Its p-value is the second smallest of three, so that Holm's level is 97.5%.
    half = 6.205347 / 3**0.5  # in percent, with Student's t for two degrees of freedom
    assert rows["AFT"][over_plus] == f"+5.0% ({5 - half:+.1f}% to {5 + half:+.1f}%), ahead"
    assert rows["MHA"][over_plus].startswith("-6.0% (")
    assert rows["gMLP"][over_best].endswith("behind")


def test_runs_of_different_seeds_have_no_lead(results):
    make_up(results, "aft", 0, 3.6)
    make_up(results, "mha_plus", 1, 3.7)
    _, leads = tables(written(results))
    assert [row["lead over MHA+"] for row in leads] == ["–", "–"]


def test_leads_on_held_out_text_compare_the_lowest_perplexities(results):
    make_up_all(results)
    _, leads = tables(written(results))
    (mha,) = (row for row in leads if row[""] == "MHA")
    assert mha["lead over MHA+"].startswith("-6.0% (")  # 3.65 - 3.71
    assert mha["held-out lead over MHA+"].startswith("+14.0% (")  # (3.65 + 0.4) - (3.71 + 0.2)


def test_one_seed_has_no_interval_and_decides_nothing(results):
    make_up(results, "aft", 0, 3.6)
    make_up(results, "mha_plus", 0, 3.7)
    page = written(results)
    board, leads = tables(page)
    assert board[0]["fit perplexity"] == f"{math.exp(3.6):.2f}"
    assert board[0]["seeds"] == "1 of 3"
    assert leads[0]["lead over MHA+"] == "+10.0%, undecided"
    assert "by the rule, these are not shown to be behind it: MHA+." in page


def test_missing_runs_rates_and_speeds_are_listed(results):
    make_up(results, "aft", 0, 3.6)
    make_up(results, "aft", 1, 3.6, status="diverged", evaluation=None)
    make_up(results, "mha", 0, 3.6, status="diverged", evaluation=None)
    page = written(results)
    (row,) = tables(page)[0]
    assert (row[""], row["seeds"]) == ("AFT", "1 of 3, 1 diverged")
    assert tables(page)[1][0] == dict.fromkeys(
        ("lead over MHA+", "held-out lead over MHA+", "lead over the best, AFT"), "–"
    ) | {"": "AFT"}
    assert "- No run at the chosen learning rate with seeds 0, 1, 2 has ended: gMLP; MHA+.\n" in page
    assert "- All runs that have ended have diverged: MHA.\n" in page
    (without,) = (line for line in page.splitlines() if line.startswith("- No learning rate is chosen: "))
    assert without.count(";") == len(VARIANTS) - len(FIT) - 1
    assert "Speeds are not measured yet: `python -m scripts.reproduce study=leaderboard` measures them." in page
    assert not (results / "leaderboard.png").exists()


def test_without_any_run_there_is_no_page(results):
    with pytest.raises(MissingRecord, match="has no finished run at a chosen rate"):
        written(results)
    with pytest.raises(MissingRecord, match="runs/small has no finished run"):
        leaderboard_page.write_all(results)
    assert not results.exists()


def test_runs_at_another_rate_are_not_on_the_board(results):
    make_up_all(results)
    (results.parent / "rates/small/adabelief/aft.yaml").write_text("lr: 0.008\n")
    assert "- No run at the chosen learning rate with seeds 0, 1, 2 has ended: AFT.\n" in written(results)


def test_the_same_records_give_the_same_files(results, monkeypatch):
    monkeypatch.setattr(leaderboard_page, "LEAST_POINTS", 4)
    make_up_all(results)
    make_up_costs(results)
    written(results)
    files = {path.name: path.read_bytes() for path in results.glob("leaderboard*")}
    ends = (".md", ".png", ".svg")
    assert sorted(files) == sorted(f"leaderboard{end}" for end in ends)
    for path in results.glob("leaderboard*"):
        path.unlink()
    written(results)
    assert {path.name: path.read_bytes() for path in results.glob("leaderboard*")} == files
    make_up(results, "gmlp", 0, 3.5)
    make_up(results, "gmlp", 1, 3.5)
    make_up(results, "gmlp", 2, 3.5)
    assert [row[""] for row in tables(written(results))[0]] == ["gMLP", "AFT", "MHA+", "MHA"]


def make_up_recall(results, variant: str, name: str, accuracy: object, loss: float = 1.0) -> None:
    texts = {"fit": evaluation(loss), "heldout": evaluation(loss) | {"accuracy": accuracy}, "tokens_per_second": None}
    others = {"experiment": "recall", "name": name, "evaluation": texts, "state_bytes": 256}
    rate = float(name.split("lr=")[1].split("-seed")[0]) if "lr=" in name else 1e-3
    write_json(results / f"runs/recall/{name}/summary.json", summary(variant, 0, loss, **others) | {"lr": rate})


def test_recall_has_a_column_once_there_are_records(results):
    make_up_all(results)
    pairs = "keys=16-pairs=16-values=16"
    for seed, accuracy in enumerate((0.5, 0.6, 0.7)):
        make_up_recall(results, "aft", f"aft-{pairs}-seed{seed}", accuracy)
        make_up_recall(results, "mha", f"mha-{pairs}-lr=0.004-seed{seed}", 0.8)
    make_up_recall(results, "aft", f"aft-{pairs}-seed100", 0.3)  # seed 100 only chooses the rate
    make_up_recall(results, "mha", f"mha-{pairs}-lr=0.002-seed0", 0.9)
    make_up_recall(results, "mha", f"mha-{pairs}-lr=0.002-seed100", 0.6)
    make_up_recall(results, "mha", f"mha-{pairs}-lr=0.004-seed100", 0.7)
    make_up_recall(results, "mha", "mha-seed0", 0.1)  # 8 pairs, which the leaderboard does not show
    make_up_recall(results, "gmlp", f"gmlp-{pairs}-seed0", 0.9)  # not all seeds
    make_up_recall(results, "gmlp", f"gmlp-{pairs}-seed100", 0.9)
    board = {row[""]: row for row in tables(written(results))[0]}
    assert board["AFT"]["recall, %"] == "60.0 (50.0 to 70.0)"
    assert (board["MHA"]["recall, %"], board["gMLP"]["recall, %"]) == ("80.0 (80.0 to 80.0)", "–")
    make_up_recall(results, "aft", f"aft-{pairs}-seed1", 70)
    with pytest.raises(UserError, match=r"damaged: evaluation\.heldout\.accuracy must be from 0 to 1: it is 70"):
        written(results)


def test_a_run_whose_settings_are_not_those_of_its_name_is_refused(results):
    record = make_up(results, "mha_plus", 0, 3.6)
    text = record.config.read_text()
    record.config.write_text(text.replace("initial_head_mix: identity", "initial_head_mix: uniform"))
    with pytest.raises(UserError, match=r"was trained with another attn.initial_head_mix than its name says"):
        written(results)


def test_runs_trained_on_another_number_of_characters_are_refused(results):
    make_up(results, "mha", 0, 3.6)
    make_up(results, "aft", 0, 3.6, tokens=99)
    with pytest.raises(UserError, match="these runs differ in their number of characters trained on"):
        written(results)


@pytest.mark.parametrize(
    ("kind", "cell"),
    [
        ("training", {"seconds": [1.0]}),
        ("training", {"seconds": [1.0], "reference": [1.0, 2.0]}),
        ("streaming", {"seconds": [0.0], "reference": [1.0]}),
        ("streaming", 3),
    ],
)
def test_impossible_speeds_are_refused(results, kind, cell):
    make_up_all(results)
    make_up_costs(results)
    path = results / "runs/small/costs.json"
    costs = read_json(path)
    costs[kind]["aft"] = cell
    write_json(path, costs)
    with pytest.raises(UserError, match=r"costs\.json is damaged: .*aft"):
        written(results)


# Plots


def test_the_title_names_the_points_that_are_best_for_their_cost():
    points = [("aft", 2.0, 30.0), ("mha", 1.0, 29.0), ("gmlp", 3.0, 31.0), ("gau", 2.5, 31.5), ("mha_tw", 1.0, 33.0)]
    made = [Point(variant, cost, quality, quality, quality) for variant, cost, quality in points]
    faster = Scatter(made, "speed", 1, "perplexity", -1, "Best")
    assert [point.variant for point in best_for_their_cost(faster)] == ["mha", "aft", "gmlp"]
    smaller = faster._replace(cost_factor=-1)
    assert [point.variant for point in best_for_their_cost(smaller)] == ["mha"]
    more = smaller._replace(quality_factor=1)
    assert [point.variant for point in best_for_their_cost(more)] == ["mha_tw"]
    title = leaderboard_plots.draw([faster]).axes[0].get_title()
    assert title == "Best (ringed): MHA; AFT; gMLP"
    twice = faster._replace(points=[*made, made[0]._replace(variant="rwv")])
    assert [point.variant for point in best_for_their_cost(twice)] == ["mha", "aft", "rwv", "gmlp"]
    plt.close("all")


def test_points_have_the_colour_of_their_attention_and_the_interval_of_their_seeds(results, monkeypatch):
    monkeypatch.setattr(leaderboard_page, "LEAST_POINTS", 3)
    make_up_all(results)
    make_up_costs(results)
    speed, heldout, state = leaderboard_page.scatters(leaderboard.read(settings(results), list(FIT)))
    assert [(point.variant, point.cost) for point in speed.points] == [("aft", 1), ("mha", 1), ("gmlp", 1)]
    ratios = [
        math.log(above.quality / below.quality) for above, below in zip(heldout.points, speed.points, strict=True)
    ]
    assert ratios == pytest.approx([0.4, HELDOUT["mha"] - 0.1, 0.4])
    assert {point.variant: point.cost for point in state.points} == STATE
    interval, dot, *_ = leaderboard_plots.draw([speed, state]).axes[1].get_lines()
    assert dot.get_color() == interval.get_color() == colour_of("aft")
    perplexities = np.exp(FIT["aft"])
    mean, half = perplexities.mean(), 4.302653 * perplexities.std(ddof=1) / math.sqrt(3)
    assert dot.get_ydata() == pytest.approx([mean])
    assert interval.get_ydata() == pytest.approx([mean - half, mean + half])
    assert len({colour_of(variant) for variant in VARIANTS}) == len(VARIANTS)
    plt.close("all")


def test_points_at_the_same_place_have_one_label():
    points = [Point(v, x, 1.0, 1.0, 1.0) for v, x in (("mha", 1.0), ("aft", 2.0), ("mha_rotary", 1.0))]
    assert leaderboard_plots.names(points) == {"MHA; MHA,\u00a0rotary": (1.0, 1.0), "AFT": (2.0, 1.0)}


def test_labels_do_not_collide():
    """Labels must not overlap even if points lie close together."""
    generator = np.random.default_rng(0)
    points = {label(variant): tuple(generator.normal(size=2).round(1)) for variant in VARIANTS}
    figure, axes = plt.subplots(figsize=(9, 6.5), layout="constrained")
    axes.plot(*zip(*points.values(), strict=True), "o", markersize=6)
    texts = label_points(axes, points)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in texts]
    bare = [plt.Text.get_window_extent(text) for text in texts]  # the boxes without the lines that lead to the points
    assert len(boxes) == len(points)
    for one, other in itertools.combinations(bare, 2):
        assert not one.overlaps(other)
    for box in bare:
        assert axes.bbox.x0 < box.x0
        assert box.x1 < axes.bbox.x1
        assert not any(box.contains(*axes.transData.transform(point)) for point in points.values())
    plt.close("all")


def test_names_of_lines_stand_to_the_right_of_their_ends_and_do_not_overlap():
    heights = [3.0, 1.0, 1.01, 1.02, 0.0]
    names = ["MHA+, starts=none, initial_head_mix=uniform", "a", "b", "c", "d"]
    ends = {name: (1 - 0.01 * place, height) for place, (name, height) in enumerate(zip(names, heights, strict=True))}
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for _, height in ends.values():
        axes.plot([0, 1], [0, height])
    name_lines(axes, ends, dict.fromkeys(ends, "#ff0000"))
    figure.draw_without_rendering()
    boxes = {text.get_text(): plt.Text.get_window_extent(text) for text in axes.texts}
    assert set(boxes) == set(ends)
    assert all(axes.transData.transform((1.0, 0))[0] < box.x0 and box.x1 < axes.bbox.x1 for box in boxes.values())
    assert len({round(box.x0) for box in boxes.values()}) == 1
    assert sorted(boxes, key=lambda name: boxes[name].y0) == sorted(ends, key=lambda name: ends[name][1])
    for one, other in itertools.combinations(boxes.values(), 2):
        assert min(one.y1, other.y1) - max(one.y0, other.y0) < 0.3 * one.height
    plt.close("all")


# The best starts


@pytest.fixture
def compared_starts(results, monkeypatch):
    """Let MHA have a better start than the one in use, and gMLP and MHA+ none; not all starts of AFT are compared."""
    all_starts = compose(["study=starts"], "reproduce").starts
    best = {"mha": "half the std", "gmlp": "f decays", "mha_plus": "f decays"}
    groups = {
        variant: [Start(other, "", [], 3.0 + (other != name), {1: 1.0}) for other in all_starts[variant]]
        for variant, name in best.items()
    }
    groups["aft"] = [Start("plain", "", [], 3.0, {1: 1.0}), Start("f decays", "", [], 2.0, {1: 1.0})]  # not all of them
    monkeypatch.setattr(best_starts, "starts", lambda _: groups)
    make_up_all(results)


def test_the_section_of_best_starts_compares_equal_seeds(results, compared_starts):
    assert best_starts.HEADING not in written(results)
    assert readme.from_best_starts(results.parent) == {}
    with torch.device("meta"):
        jobs = best_starts_study.jobs(compose(["study=best_starts", f"results={results}"], "reproduce"))
    names = [compose(list(job.overrides)).job.name for job in jobs]
    assert [name.split("-lr=")[0] for name in names] == 5 * ["mha-init_std=0.01"]  # seeds 0 to 4
    losses = (3.47, 3.50, 3.49)
    words = jobs[0].overrides[:-1]
    for seed, loss in enumerate(losses):
        make_up_run(results, words, "mha", seed, loss)
    page = written(results)
    after = page.partition(f"## {best_starts.HEADING}\n")[2]
    (table,) = tables(after)
    rows = {row[""]: row for row in table}
    assert [row[""] for row in table] == ["MHA", "MHA+", "gMLP"]
    assert rows["MHA"]["best start"] == "`half the std`"
    assert rows["MHA"]["fit perplexity"].startswith(f"{statistics.mean(map(math.exp, losses)):.2f} (")
    gain = statistics.mean(FIT["mha"]) - statistics.mean(losses)
    assert rows["MHA"]["gain"].startswith(f"{100 * gain:+.1f}% (")
    assert rows["MHA"]["gain"].endswith(", ahead")
    lead = statistics.mean(FIT["mha_plus"]) - statistics.mean(losses)
    assert rows["MHA"]["lead over MHA+"].startswith(f"{100 * lead:+.1f}% (")
    assert rows["gMLP"]["gain"] == rows["MHA+"]["gain"] == rows["MHA+"]["lead over MHA+"] == "–"
    assert "change these verdicts on leads over MHA+: MHA (behind, now ahead).\n" in after
    assert "change these verdicts on held-out leads over MHA+: none.\n" in after
    assert "all of them have diverged: AFT.\n" in after
    assert "different precisions" not in after
    assert tables(page)[:2] == tables(page.partition("## From")[0])  # the board is that of the starts in use
    assert readme.from_best_starts(results.parent) == {}  # AFT is not among them
    for seed, loss in enumerate(losses):
        make_up_run(results, words, "mha", seed, loss, precision="bf16")
    assert "may be a part of the gain: MHA ([precision" in written(results)


def test_the_readme_shows_best_starts_once_all_attentions_have_them(tmp_path):
    board = ["| | fit perplexity | best held-out | state, bytes |", "|-|-|-|-|"]
    board += ["| A | 30 | 70 ± 1 after 2 passes | 9 |", "| B | 31 | 71 ± 1 after 2 passes | 9, grows |"]
    best = [f"## {best_starts.HEADING}", "", "| | fit perplexity | best held-out | gain |", "|-|-|-|-|"]
    rows = ["| B | 29 | 69 ± 1 after 2 passes | +6.7% (+1.0% to +9.0%), ahead |"]
    rows += ["| A | 30 | 70 ± 1 after 2 passes | – |"]
    path = tmp_path / readme.LEADERBOARD
    path.parent.mkdir()
    path.write_text("\n".join([*board, "", *best, *rows]) + "\n", encoding="utf-8")
    found = [list(row.values())[:3] for row in readme.by_heldout(tmp_path)]
    assert found == [["B", "29", "69 ± 1 after 2 passes"], ["A", "30", "70 ± 1 after 2 passes"]]
    assert readme.start_of_each(tmp_path).endswith(
        "the gain in log perplexity on the training text is +0.067 (B) to +0.067 (B), in the median +0.067."
    )
    assert "during training, each from the [start that fitted best](" in readme.answer(tmp_path)
    leads = {"A": "+1.0% (+0.5% to +1.5%), ahead", "B": "–", "C": "-2.0% (-3.0% to -1.0%), behind"}
    assert readme.verdicts("B", leads).endswith(", A is ahead of B there, and 1 of 2 is behind B.")
    assert readme.verdicts("B", {}) == ""
    undecided = dict.fromkeys("AC", "+1.0% (-1.0% to +3.0%), undecided")
    assert readme.verdicts("B", undecided).endswith("none of the 2 leads over B there is decided.")
    path.write_text("\n".join([*board, "", *best, *rows[:1]]) + "\n", encoding="utf-8")  # A has no best start
    found = [list(row.values())[:3] for row in readme.by_heldout(tmp_path)]
    assert found == [["A", "30", "70 ± 1 after 2 passes"], ["B", "31", "71 ± 1 after 2 passes"]]
    assert "perplexity during training: A 70" in readme.answer(tmp_path)


def test_attentions_without_compared_starts_are_refused(results, compared_starts, monkeypatch):
    cfg = compose(["study=best_starts", f"results={results}", "variants=[mha,aft]"], "reproduce")
    with pytest.raises(UserError, match=r"starts of aft were not all compared: python .+ variants=\[aft\] compares"):
        best_starts_study.jobs(cfg)
    with monkeypatch.context() as patched:
        patched.setattr(rates, "chosen_rate", lambda _, name: None if name == "aft" else 0.002)
        with pytest.raises(UserError, match=r"no learning rate is chosen for aft at experiment=small: .+ chooses it$"):
            best_starts_study.jobs(cfg)
    monkeypatch.setattr(best_starts, "starts", lambda _: {})
    cfg.variants = None
    with pytest.raises(UserError, match="no starts are compared yet: python"):
        best_starts_study.jobs(cfg)


# The study


@pytest.fixture
def small(results, tiny, monkeypatch):
    """Return the config of study=leaderboard for tiny models, and a list that gets the names of the trained runs.

    Runs are trained one after the other in this process.
    """
    trained = []

    def one_by_one(jobs, *_, **__):
        for job in jobs:
            train(compose(list(job.overrides)))
            trained.append(job.record.folder.name)

    words = leaderboard.words
    tiny = [word for word in tiny if not word.startswith("runs=")]
    for module in (leaderboard, study):
        monkeypatch.setattr(module, "words", lambda *given: (*words(*given), *tiny, f"runs={results}/runs"))
    monkeypatch.setattr(runner, "train_all", one_by_one)
    monkeypatch.setattr(side_by_side, "composed", lambda given: compose([*given, "seed=0", *tiny]))
    monkeypatch.setattr(study, "compose", lambda given: compose([*given, *TINY]))
    rounds = ["repeats=2", "warm_up=1", "characters=3"]
    return settings(results, "seeds=[0,1]", "variants=[aft,mha]", "lead_over=mha", *rounds), trained


def test_missing_runs_are_trained_and_missing_speeds_measured_once(small, results):
    cfg, trained = small
    study.reproduce(cfg)
    assert [(name.split("-")[0], name[-5:]) for name in trained] == [
        (variant, f"seed{seed}") for seed in (0, 1) for variant in ("aft", "mha")
    ]
    costs = read_json(results / "runs/small/costs.json")
    assert set(costs["training"]) == set(costs["streaming"]) == {"aft"}
    assert [len(costs[kind]["aft"][key]) for kind in ("training", "streaming") for key in ("seconds", "reference")] == [
        2, 2, 2, 2,
    ]  # fmt: skip
    page = (results / "leaderboard.md").read_text(encoding="utf-8")
    board = {row[""]: row for row in tables(page)[0]}
    fits = [read_json(results / f"runs/small/{name}/summary.json") for name in trained if name.startswith("aft")]
    mean = statistics.mean(summary["evaluation"]["fit"]["perplexity"] for summary in fits)
    assert board["AFT"]["fit perplexity"].startswith(f"{mean:.2f} (")
    assert board["AFT"]["state, bytes"] == f"{fits[0]['state_bytes']:,}, grows"
    assert board["MHA"]["training speed over MHA's"] == "1"
    study.reproduce(cfg)
    assert len(trained) == 4
    assert read_json(results / "runs/small/costs.json") == costs
    assert (results / "leaderboard.md").read_text(encoding="utf-8") == page


def test_measuring_speeds_continues_at_the_same_commit_and_starts_again_at_another(small, results, monkeypatch):
    cfg, _ = small
    origin = {"device": "a CPU", "dirty": False, "threads": 1, "versions": {"torch": "2"}}
    path, code = leaderboard.costs_path(cfg), origin | {"commit": "a"}
    monkeypatch.setattr(side_by_side, "provenance", lambda _, command: {"command": command, **code})
    timed = []

    def count_and_interrupt(functions, *_):
        if len(timed) == 3:
            raise KeyboardInterrupt
        timed.append(list(functions))
        return {name: [1.0, 2.0] for name in functions}

    monkeypatch.setattr(side_by_side, "in_turn", count_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        side_by_side.measure(cfg, ["aft", "gmlp"], path, "x")
    assert timed == [["mha", "aft"], ["mha", "gmlp"], ["mha", "aft"]]
    timed[:] = []
    side_by_side.measure(cfg, ["mha", "aft", "gmlp"], path, "x")
    assert timed == [["mha", "gmlp"]]
    timed[:] = []
    code["commit"] = "b"
    monkeypatch.setattr(
        side_by_side, "in_turn", lambda given, *_: timed.append(list(given)) or {name: [3.0] for name in given}
    )
    side_by_side.measure(cfg, ["aft"], path, "x")  # measures gmlp too, because it is in the older record
    assert timed == 2 * [["mha", "aft"], ["mha", "gmlp"]]
    assert read_json(path)["provenance"]["commit"] == "b"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["variants=[aft,gau]"],
            "error: no learning rate is chosen for gau at experiment=small: python -m scripts.reproduce study=rates "
            "variants=[gau] results={results} chooses it\n",
        ),
        (
            ["variants=[gau,rwv]", "setup=novel", "results=out"],
            "error: no learning rate is chosen for gau, rwv at experiment=novel: python -m scripts.reproduce "
            "study=rates variants=[gau,rwv] setup=novel chooses it\n",
        ),
        (["variants=[nothing]"], "error: there is no attn=nothing; there are aft, "),
        (["variants=[aft]", "ratio_to=nothing"], "error: there is no attn=nothing; there are aft, "),
        (["variants=[aft]", "repeats=100"], "error: characters x (warm_up + repeats) = 816 do not fit into a context"),
        (["variants=[aft]", "seeds=[]"], "error: seeds must not be empty"),
        (["variants=[aft]", "setup=nix"], "error: "),
        (["setup=large"], "error: no learning rate is chosen for any attention at experiment=large\n"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(results, given, message, monkeypatch, capsys):
    monkeypatch.setattr(runner, "train_all", lambda *_, **__: pytest.fail("a run was trained"))
    place = [] if "results=out" in given else [f"results={results}"]
    monkeypatch.setattr("sys.argv", ["reproduce", "study=leaderboard", *place, *given])
    with pytest.raises(SystemExit, match="2"):
        reproduce.run()
    output = capsys.readouterr().err
    assert output.startswith(message.replace("{results}", str(results)))
    assert output.count("\n") == 1
    assert not results.exists()


def test_every_run_that_has_not_ended_is_a_job(results):
    make_up(results, "aft", 0, 3.6)
    make_up(results, "mha", 1, 3.6, status="diverged", evaluation=None)
    with torch.device("meta"):
        jobs = study.jobs(settings(results), ["aft", "mha"])
    assert [job.overrides[1:] for job in jobs] == [
        (f"attn={variant}", "optim.lr=0.004", f"seed={seed}") for variant, seed in
        (("mha", 0), ("aft", 1), ("aft", 2), ("mha", 2))
    ]  # fmt: skip
    for job in jobs:
        assert job.record.folder.name == compose(list(job.overrides)).job.name


# The README


def test_the_readme_shows_the_top_of_the_leaderboard_if_there_is_one(results, monkeypatch):
    root = results.parent
    (root / "README.md").write_text("<!-- include leaderboard -->\n<!-- end -->\n")
    assert readme.filled(root / "README.md", root) == "<!-- include leaderboard -->\n<!-- end -->\n"
    make_up_all(results)
    written(results)
    monkeypatch.setattr(readme, "TOP", 2)
    filled = readme.filled(root / "README.md", root)
    (table,) = tables(filled)
    assert [row[""] for row in table] == ["MHA", "AFT"]  # by held-out perplexity
    assert "and from the start (initialisation) that train.py uses. [The" in filled
    assert list(table[0]) == [
        "", "best held-out", "held-out lead over MHA+", "fit perplexity", "training speed over MHA's",
        "streaming speed over MHA's", "parameters of the block", "state, bytes",
    ]  # fmt: skip
    assert filled.startswith("<!-- include leaderboard -->\n## The leaderboard\n\n| ")
    first = "The 2 of 4 attentions with the lowest held-out perplexity during training, each in a small model (1 block"
    assert first in filled


def test_the_readme_begins_with_what_the_leaderboard_the_recall_and_the_headline_say(results):
    root = results.parent
    assert readme.answer(root) == ""
    make_up_all(results)
    written(results)
    short = readme.answer(root)
    assert "on a Chinese novel, these have the lowest held-out perplexity during training: MHA 49." in short
    assert re.search(r"during training: MHA 49\.\d+; AFT 54\.\d+; MHA\+ 57", short)
    assert short.count("\n") == 2
    assert "judged by fit" not in short
    pairs = "keys=16-pairs=16-values=16"
    for variant, accuracy in (("aft", 0.5), ("mha", 0.96), ("mha_plus", 0.97), ("gmlp", 0.2)):
        make_up_recall(results, variant, f"{variant}-{pairs}-seed100", accuracy)
        for seed in range(3):
            make_up_recall(results, variant, f"{variant}-{pairs}-seed{seed}", accuracy)
    written(results)
    says = all_claims()["headline"].says
    judged = ("[contradicted](x#headline)", "{}", "[undecided](x#headline) (y)")
    claims = f"| claim | small tier | novel tier | source tier |\n|-|-|-|-|\n| {says} | {' | '.join(judged)} |\n"
    (results / "CLAIMS.md").write_text(claims.format("[reproduced](z#headline)"))
    short = readme.answer(root)
    assert "are trained for 400 steps, from the plain start, to [recall values from the context](" in short
    assert "answers are correct: MHA 96.0%; AFT 50.0%; MHA+ 97.0%. Always giving the most frequent value" in short
    assert re.search(
        r"have the lowest held-out perplexity on the novel: MHA 49\.\d+; MHA\+ 57\.\d+\.\n- The source's", short
    )
    assert "judged by fit, is contradicted by small models. At the source's size it is reproduced on the novel" in short
    (results / "CLAIMS.md").write_text(claims.format("not run"))
    assert "judged by fit" not in readme.answer(root)


def test_the_readme_names_constant_states_and_models_of_the_source_size(tmp_path):
    head = ["", "best held-out", "state, bytes", "recall, %"]
    cells = [
        ["A", "70 ± 1", "10, grows", "99 (98 to 100)"],
        ["B", "71 ± 1", "20", "30 (20 to 40)"],
        ["C", "72 ± 1", "30", "96 (95 to 97)"],
    ]
    rows = [dict(zip(head, line, strict=True)) for line in cells]
    beginning = "Of small models whose state does not grow with the text, B has the lowest held-out perplexity, 71"
    assert (
        readme.constant_state(rows)
        == f"{beginning}, and recalls 30%; of those among them that recall more than 95%, C has the lowest held-out "
        "perplexity, 72."
    )
    assert readme.constant_state(rows[:2]) == f"{beginning}, and recalls 30%."
    unmeasured = [rows[1] | {"recall, %": "–"}, rows[2]]
    assert readme.constant_state(unmeasured).startswith(f"{beginning}; of those among them that recall more than 95%")
    assert readme.constant_state(rows[:1]) == ""
    assert readme.at_the_source_size(tmp_path, "A") == ""
    cells = [f"| {name} | {80 - i}.5 ± 1 | 3 |" for i, name in enumerate("ABCDE")]
    lines = ["| | best held-out | seeds |", "|-|-|-|", *cells]
    (tmp_path / "results").mkdir()
    (tmp_path / readme.NOVEL_LEADERBOARD).write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert readme.at_the_source_size(tmp_path, "A").endswith("during training: E 76.5; D 77.5; C 78.5; A has 80.5.")
    assert "[5 attentions](results/leaderboard_novel.md) were trained, each with 3 seeds" in readme.at_the_source_size(
        tmp_path, "A"
    )
    assert readme.at_the_source_size(tmp_path, "D").endswith("during training: E 76.5; D 77.5; C 78.5.")
    fewer = "\n".join([*lines[:-1], "| E | 76.5 ± 1 | 2 of 3, 1 diverged |\n"])
    (tmp_path / readme.NOVEL_LEADERBOARD).write_text(fewer, encoding="utf-8")
    assert "were trained, each with 2 to 3 seeds and" in readme.at_the_source_size(tmp_path, "A")
    by_rate = [
        "| | 0.001 | 0.002 |",
        "|-|-|-|",
        "| A | **70.5** | 72 |",
        "| B | diverged | – |",
        "| C | 69 | **66.2** |",
    ]
    page = f"# Rates\n\n## novel, adabelief, held-out\n\n{rates.heldout_heading('novel', 'adabelief')}\n\n"
    (tmp_path / readme.RATES_PAGE).write_text(page + "\n".join(by_rate) + "\n", encoding="utf-8")
    told = (
        "at the best of the [rates that were tried](results/rates.md), two other seeds have C 66.2; A 70.5, and other "
        "rates may be better still."
    )
    assert readme.at_the_source_size(tmp_path, "D").endswith(
        f"Other settings lower the held-out perplexity at this size: {told}"
    )


# The rates


def make_up_rate(results, variant: str, rate: float, losses: tuple[float, float], **others) -> None:
    attn, *switch = variant.split("-")
    words = ["experiment=small", f"attn={attn}", *(f"attn.{value}" for value in switch), f"optim.lr={rate}"]
    for seed, loss in zip((100, 101), losses, strict=True):
        name = compose([*words, f"seed={seed}"]).job.name
        given = {"lr": rate, "name": name} | others
        write_json(results / f"runs/small/{name}/summary.json", summary(variant, seed, loss, **given))


def test_the_page_of_rates_follows_from_their_runs(results):
    for rate, loss in ((1e-3, 3.7), (2e-3, 3.6), (4e-3, 3.8)):
        make_up_rate(results, "aft", rate, (loss, loss + 0.02))
    make_up_rate(results, "mha", 1e-3, (3.9, 3.9))
    make_up_rate(results, "mha", 2e-3, (3.8, 3.8))
    make_up_rate(results, "mha", 4e-3, (3.7, 3.7), status="diverged", evaluation=None)
    make_up_rate(results, "gmlp", 4e-3, (3.5, 3.5))
    (missing,) = results.glob("runs/small/gmlp-*-seed101/summary.json")
    missing.unlink()
    make_up_rate(results, "aft-gamma=false", 4e-3, (1.0, 1.0))  # another model
    rates.write(results)
    page = (results / "rates.md").read_text(encoding="utf-8")
    table, heldout = tables(page)
    assert [row[""] for row in heldout] == ["AFT", "MHA"]
    assert [sum("**" in cell for cell in row.values()) for row in heldout] == [1, 1]
    assert heldout[1]["0.004"] == "diverged"
    assert table == [
        {"": "AFT", "0.001": f"{math.exp(3.71):.2f}", "0.002": f"**{math.exp(3.61):.2f}**",
         "0.004": f"{math.exp(3.81):.2f}"},
        {"": "MHA", "0.001": f"{math.exp(3.9):.2f}", "0.002": f"**{math.exp(3.8):.2f}**", "0.004": "diverged"},
    ]  # fmt: skip
    assert "- Best at 0.002: `AFT`; `MHA`.\n" in page
    assert "lies at an end" not in page
    assert "commit abcdef" in page
    files = {path.name: path.read_bytes() for path in results.glob("rates*")}
    rates.write(results)
    assert {path.name: path.read_bytes() for path in results.glob("rates*")} == files
    assert sorted(files) == ["rates.md", "rates.png", "rates.svg"]
    make_up_rate(results, "aft", 8e-3, (3.5, 3.5))
    rates.write(results)
    page = (results / "rates.md").read_text(encoding="utf-8")
    assert "- Best at 0.008: `AFT`.\n" in page
    assert "The best rate lies at an end of the range that was tried: AFT." in page


def test_rates_tried_with_the_settings_of_a_claims_row_are_told(results):
    def cell(row: str) -> str:
        return claim_pages.rate_and_start(all_claims()["aft_parts"], row, "small", results / "runs")[0]

    assert cell("no gamma") == "0.002, chosen for the attention with other settings"
    make_up_rate(results, "aft-gamma=false-position_weight.initial_f=ones", 1e-3, (3.7, 3.8))
    make_up_rate(results, "aft-gamma=false-position_weight.initial_f=ones", 2e-3, (3.5, 3.6))
    make_up_rate(results, "aft-gamma=false-position_weight.initial_f=ones", 4e-3, (3.6, 3.5), status="diverged")
    make_up_rate(results, "aft-gamma=false", 4e-3, (1.0, 1.0))  # another start
    assert cell("no gamma") == "0.002, best of 0.001, 0.002, 0.004"
    assert cell("one f") == "0.002, chosen for the attention with other settings"
    page = "\n\n".join(row_rates.sections(results))
    assert "## small, rows of claims" in page
    (row,) = tables(page)
    assert row == [
        {"": "AFT, position_weight.initial_f=ones, gamma=false", "0.001": f"{math.exp(3.7):.2f}, {math.exp(3.8):.2f}",
         "0.002": f"**{math.exp(3.5):.2f}, {math.exp(3.6):.2f}**", "0.004": "diverged, diverged"},
    ]  # fmt: skip
    assert "lies at an end" not in page
    make_up_rate(results, "aft-gamma=false-position_weight.initial_f=ones", 5e-4, (3.4, 3.4))
    assert cell("no gamma") == "0.002, 0.0005 is the best of 0.0005, 0.001, 0.002, 0.004"
    page = "\n\n".join(row_rates.sections(results))
    assert "lies at an end of the range that was tried: `AFT, position_weight.initial_f=ones, gamma=false`." in page


def test_the_plot_of_rates_has_a_line_for_each_attention_and_a_dot_at_its_best(results):
    for rate, loss in ((1e-3, 3.7), (2e-3, 3.6), (4e-3, 3.8)):
        make_up_rate(results, "aft", rate, (loss, loss))
    (axis,) = rates.draw(rates.studies(results)).axes
    line, dot = axis.get_lines()
    assert list(line.get_xdata()) == [1e-3, 2e-3, 4e-3]
    assert line.get_ydata() == pytest.approx(np.exp([3.7, 3.6, 3.8]))
    assert (dot.get_xdata(), dot.get_ydata()) == ([2e-3], [pytest.approx(math.exp(3.6))])
    assert line.get_color() == dot.get_color() == colour_of("aft")
    assert axis.get_title() == "small, adabelief; attentions by best rate: 1 at 0.002"
    plt.close("all")
