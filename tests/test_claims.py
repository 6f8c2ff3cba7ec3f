"""Test the claims: their expectations, the rule for verdicts, the runs that they need, and their pages."""

import io
import json
import math
import os
import re
import signal
import sys
import time
from functools import partial

import pytest
from omegaconf import OmegaConf
from scipy import stats

from configs.cli import compose
from data.files import UserError, write_json
from data.reading import read_json
from scripts.reporting import claim_pages, claim_plots, claims, colours
from scripts.reporting.benchmark_pages import LIMIT
from scripts.reporting.claims import (
    TRAINED,
    all_claims,
    benchmarked,
    choose,
    costs_of,
    outcomes,
    overrides,
    position_weight_shape,
    samples,
    seeds_needed,
    tiers,
    verdict,
    write_costs,
)
from scripts.reporting.records import MissingRecord, composed, record_of
from scripts.reporting.rule import judge_each
from scripts.studies import claims as claims_study
from scripts.studies import overview, runner
from tests.conftest import ROOT
from training.record import Record

pytestmark = pytest.mark.slow


def names_in(operand) -> list[str]:
    return [] if not isinstance(operand, str) else operand.split(" - ")


@pytest.mark.parametrize("name", [n for n, c in all_claims().items() if c.measure in TRAINED])
def test_the_rows_of_a_claim_are_different_runs(name, tmp_path):
    claim = all_claims()[name]
    for tier in tiers(claim):
        runs = [record_of(tmp_path, overrides(claim, row, tier), 1).folder.name for row in claim.rows]
        assert len(set(runs)) == len(runs)
        assert all(run.endswith("-seed1") for run in runs)
        assert composed(overrides(claim, next(iter(claim.rows)), tier)).job.experiment == tier


def test_claims_compare_figures_that_their_rows_have():
    assert {claim.number for claim in all_claims().values()} == set(range(1, 26))
    made_up = {"f": [[1.0] * 40], "alpha": None, "beta": [[1.0] * 40], "gamma": [1.0] * 40}
    for name, claim in all_claims().items():
        known = set(claim.rows)
        if claim.measure == "position_weight":
            shape = position_weight_shape(made_up, [[0.0] * 40])
            known = {f"{row}, {figure}" for row in claim.rows for figure in shape}
        if claim.measure == "step":
            known |= {f"{row}, memory" for row in claim.rows}
        if claim.measure == "layers":
            parts = ("seconds", "growth", "memory", "memory growth")
            known = {f"{row}, {part}" for row in claim.rows for part in parts}
        for a, relation, b in claim.expects:
            assert relation in ("<", "<="), name
            assert {*names_in(a), *names_in(b)} <= known, name


# The rule


def verdicts(expects: list, measured: dict[str, list[float]], **rest) -> list[str]:
    """Return the verdict on each comparison of a claim, and then the verdict on the claim."""
    claim = OmegaConf.create({"measure": "fit", "expects": expects} | rest)
    found = outcomes(claim, measured)
    return [*(outcome.verdict for outcome in found), verdict(claim, found)]


def around(mean: float, spread: float = 0.001) -> list[float]:
    """Return three samples with this mean and this standard deviation."""
    return [mean - spread, mean, mean + spread]


def test_rows_are_compared_pair_by_pair():
    a, b = [1.0, 2.0, 3.0], [1.02, 2.019, 3.021]  # the seeds differ more than the rows
    (found,) = outcomes(OmegaConf.create({"measure": "fit", "expects": [["a", "<", "b"]]}), {"a": a, "b": b})
    assert found.text == "a < b"
    assert found.comparison.mean == pytest.approx(0.02)
    assert found.comparison.deviation == pytest.approx(0.001)
    half = stats.t.ppf(0.975, 2) * 0.001 / math.sqrt(3)
    assert found.interval[:2] == pytest.approx((0.02 - half, 0.02 + half))
    assert found.verdict == "reproduced"


def test_many_seeds_do_not_make_noise_a_difference():
    noise = [(-1) ** i * 0.1 + 0.006 for i in range(12)]
    assert verdicts([["a", "<", "b"]], {"a": [0.0] * 12, "b": noise}) == ["undecided"] * 2


def test_one_seed_decides_nothing():
    claim, measured = (
        OmegaConf.create({"measure": "fit", "expects": [["a", "<", "b"]], "novel": {"seeds": [0]}}),
        {"a": [1.0], "b": [2.0]},
    )
    found = outcomes(claim, measured)
    assert verdict(claim, found) == "undecided"
    assert seeds_needed(claim, found) is None
    assert claim_pages.interval_cells(found[0].interval) == ("–", "95%")
    assert claim_pages.beside_the_verdict(claim, "novel", measured) == " (1 seed, which decides nothing)"


def test_the_intervals_of_a_claim_are_corrected_for_their_number():
    """With t = 5, p is 0.038. That decides a single comparison; of two, the smaller p must be below 0.025."""
    measured = {"a": [0.0] * 3, "b": around(0.05, 0.01 * math.sqrt(3)), "c": around(0.0, 0.05)}
    assert verdicts([["a", "<", "b"]], measured)[-1] == "reproduced"
    assert verdicts([["a", "<", "b"], ["a", "<", "c"]], measured)[0] == "undecided"


def test_differences_of_rows_and_numbers_are_compared_too():
    measured = {"a": [1.0, 1.0], "b": [1.5, 1.51], "c": [2.0, 2.0], "d": [3.0, 3.01]}
    assert verdicts([["b - a", "<", "d - c"]], measured)[-1] == "reproduced"
    assert verdicts([["d - c", "<", "b - a"]], measured)[-1] == "contradicted"
    assert verdicts([[0.5, "<", "a"]], measured)[-1] == "reproduced"
    equal = {"a": [1.0, 1.0]}
    assert verdicts([["a", "<", math.exp(1.01)]], equal, measure="layers")[-1] == "reproduced"
    assert verdicts([[math.exp(1.01), "<", "a"]], equal, measure="layers")[-1] == "contradicted"


def test_an_order_has_one_verdict():
    order = [["a", "<", "b"], ["b", "<", "c"]]

    def of(b: float, c: float, spread: float = 0.001) -> str:
        return verdicts(order, {"a": [0.0] * 3, "b": around(b, spread), "c": [c] * 3})[-1]

    assert of(0.1, 0.2) == "reproduced"
    assert of(0.1, 0.05) == "contradicted"
    assert of(0.1, 0.1) == "equivalent"
    assert of(0.1, 0.2, spread=0.5) == "undecided"


def test_a_claim_with_exists_needs_one_row_for_which_all_comparisons_hold():
    expects = [["a", "<", "x"], ["b", "<", "x"], ["a", "<", "y"], ["b", "<", "y"]]
    x, y = around(0.5), around(0.7)

    def of(a: float, b: float) -> str:
        return verdicts(expects, {"a": [a] * 3, "b": [b] * 3, "x": x, "y": y}, exists=True)[-1]

    assert of(0.9, 0.1) == of(0.1, 0.9) == "reproduced"
    assert of(0.6, 0.6) == "contradicted"  # both a and b are below y, and neither is below x
    assert of(0.9, 0.5) == "equivalent"
    assert verdicts(expects, {"a": [0.9] * 3, "b": [0.1] * 3, "x": x, "y": y})[-1] == "contradicted"


def test_an_undecided_claim_says_how_many_seeds_would_decide():
    claim = OmegaConf.create({"measure": "fit", "expects": [["a", "<", "b"]]})
    cases = {(0.01, 0.01): "about 7 would give the verdict reproduced", (0.0, 0.9): "more than 100 would decide"}
    for (mean, deviation), more in cases.items():
        measured = {"a": [0.0] * 3, "b": around(mean, deviation)}
        assert claim_pages.beside_the_verdict(claim, "novel", measured) == f" (3 seeds; {more})"
    assert claim_pages.beside_the_verdict(claim, "novel", {"a": [0.0] * 3, "b": around(0.1)}) == ""


def test_a_verdict_that_rests_on_a_single_seed_says_so():
    claim = OmegaConf.create({"measure": "fit", "expects": [["a", "<", "b"]], "small": {"seeds": [7, 8, 9, 10]}})
    told = claim_pages.beside_the_verdict(claim, "small", {"a": [0.0] * 4, "b": [0.1, -0.2, 0.1, 0.101]})
    assert told == " (4 seeds; more than 100 would decide; without seed 8: reproduced)"


def test_an_undecided_comparison_of_a_contradicted_claim_says_how_many_seeds_would_decide():
    claim = OmegaConf.create({"measure": "fit", "expects": [["a", "<", "b"], ["b", "<", "c"], ["d", "<", "e"]]})
    measured = {"a": [0.0] * 3, "b": around(0.1), "c": around(0.0), "d": [0.0] * 3, "e": around(0.02, 0.02)}
    judged = outcomes(claim, measured)
    assert [o.verdict for o in judged] == ["reproduced", "contradicted", "undecided"]
    assert claim_pages.beside_the_verdict(claim, "novel", measured) == ""
    told = claim_pages.verdict_on_each(claim, judged)
    assert told[:2] == ["reproduced", "contradicted"]
    needed = int(re.fullmatch(r"undecided \(3 seeds; about (\d+) would give the verdict reproduced\)", told[2])[1])
    for n, expected in ((needed - 1, "undecided"), (needed, "reproduced")):
        assert judge_each([o.comparison._replace(n=n) for o in judged])[2] == expected


def test_the_title_of_a_plot_says_in_words_what_was_found():
    expects = [["a", "<", "b"], ["b", "<", "a"], ["a", "<=", "b"], ["a", "<=", "c"], ["a", "<", "c"], ["a", "<", "d"]]
    claim = OmegaConf.create({"measure": "fit", "expects": expects})
    measured = {"a": [0.0] * 3, "b": around(0.1), "c": around(0.0), "d": around(0.0, 0.1)}
    told = claim_plots.title_of(claim, outcomes(claim, measured))
    assert told == (
        "claim contradicted. Found: a better than b; a better than b; a better than b; a no worse than c; "
        "a equivalent to c. Not decided: a or d"
    )
    claim.measure = "layers"
    assert "a lower than b" in claim_plots.title_of(claim, outcomes(claim, measured))


def test_the_title_of_a_plot_names_limits_and_differences_in_words():
    expects = [[2, "<", "a"], ["a", "<", 2], ["b - a", "<", "a - b"], ["a", "<=", "b"]]
    claim = OmegaConf.create({"measure": "layers", "expects": expects})
    measured = {"a": [math.log(3.0)] * 3, "b": around(math.log(3.0))}
    told = claim_plots.title_of(claim, outcomes(claim, measured))
    assert told == (
        "claim contradicted. Found: a above 2; a above 2; (b - a) equivalent to (a - b); a no higher than b"
    )


def test_a_row_has_the_colour_of_the_attention_that_it_shows():
    assert colours.attention_of("MHA, rotary, 512", "attn=mha_rotary model.context=512") == "mha_rotary"
    assert colours.attention_of("MHA, positions", "attn=mha model.position_embedding=true") == "mha"
    assert colours.attention_of("gMLP, denominator", "attn=rwv attn.R=gelu") == "gmlp"
    assert colours.attention_of("AdamW", "starts=none attn=rwv optim=adamw") == "aft"
    assert colours.attention_of("two GAUs, 512", "gau model.context=512") == "gau"
    assert colours.attention_of("scores stored", "softmax, scores stored") == "softmax,"


def test_the_difference_on_held_out_text_is_between_the_lowest_perplexities(monkeypatch):
    best = {"MHATW": [50.0, 60.0], "MHA": [55.0, 66.0]}

    def made_up(_, row: str, *__) -> list[dict]:
        return [{"seed": i, "evaluation": {"heldout_best": {"perplexity": p}}} for i, p in enumerate(best[row])]

    monkeypatch.setattr(claims, "summaries", made_up)
    (difference,) = claims.heldout_differences(all_claims()["time_weighting"], "novel", ROOT)
    assert difference.value == pytest.approx(math.log(1.1))
    assert difference.text == "+9.53% (+9.53% to +9.53%)"
    assert set(claims.heldout_differences(all_claims()["speed"], "small", ROOT)) == {None}


def test_notes_say_what_was_changed_after_results_were_known():
    for name, claim in all_claims().items():
        notes = claim_pages.rule_notes(claim)
        changed = [note for note in notes if note.startswith("Changed after results were known: ")]
        one_row = [note for note in notes if note.startswith("It is enough for this claim that one row fulfils it")]
        assert bool(changed) == ("changed" in claim), name
        assert bool(one_row) == claim.get("exists", False), name
    assert "version 2 of the rule" in claim_pages.overview({})


def test_a_figure_that_a_record_lacks_is_a_dash():
    old, new = ({"evaluation": {"fit": fit}} for fit in ({"loss": 1.0}, {"loss": 1.0, "bits_per_byte": 0.5}))
    assert claim_pages.column([new, new], "fit", "bits_per_byte", 3) == "0.500"
    assert claim_pages.column([old, new], "fit", "bits_per_byte", 3) == "–"
    assert claim_pages.column([new, new], "heldout_best", "perplexity", 2) == "–"


def test_a_benchmark_s_growth_is_from_the_shortest_to_the_longest_length_at_which_every_row_ran():
    def cells(a, b):
        rows = {"x": a, "y": b}
        return {
            key: {"seconds": [s, s], "peak_bytes": 100 * s} if s else {"skipped": "slow"} for key, s in rows.items()
        }

    claim = OmegaConf.create({"measure": "layers", "rows": {"A": "x", "B": "y"}})
    found = benchmarked(claim, {"lengths": {"16": cells(1, 2), "32": cells(2, 8), "64": cells(4, None)}})
    assert found["A, growth"] == pytest.approx([math.log(2)] * 2)
    assert found["B, growth"] == pytest.approx([math.log(4)] * 2)
    assert found["B, memory growth"] == pytest.approx([math.log(4)] * 2)
    assert found["A, seconds"] == pytest.approx([math.log(2)] * 2)


def test_the_shape_of_learned_factors():
    """f alternates between 1 and e up to distance 16, then stays at 1, and is e at the last 4 distances."""
    f = [math.exp(i % 2) for i in range(17)] + [1.0] * 43 + [math.e] * 4
    factors = {"f": [f, f], "alpha": None, "beta": [[1.0, math.e] * 32] * 2, "gamma": [1.0, 3.0] * 32}
    shape = position_weight_shape(factors, [[-0.5] * 64] * 2)
    assert shape["near"] == pytest.approx(1)
    assert shape["far"] == pytest.approx(0)
    assert shape["far, jump"] == pytest.approx(0)
    assert shape["far left, jump"] == pytest.approx(1)
    assert shape["far, learned"] == pytest.approx(12 / 64)  # the mean of log f over all distances is 12 / 64
    assert shape["far left, learned"] == pytest.approx(1 - 12 / 64)
    assert shape["beta"] == pytest.approx(0.5, rel=0.02)
    assert shape["gamma"] == pytest.approx(0.5, rel=0.02)


# What is run


def test_unknown_claims_and_tiers_are_refused():
    assert list(choose(["headline", 8], "small")) == ["headline", "mha_parts"]
    with pytest.raises(UserError, match="there is no claim headlines; there are headline, "):
        choose(["headlines"], "small")


def test_a_claim_is_tested_at_the_tiers_that_it_names():
    assert "author_code" in choose([1], "novel")
    assert "author_code" not in choose([1], "small")
    with pytest.raises(UserError, match="claim author_code is tested at tier=novel: got tier=small"):
        choose(["author_code"], "small")
    with pytest.raises(UserError, match="claim 24 is tested at tier=small: got tier=source"):
        choose([24], "source")


def test_a_run_that_two_claims_need_is_planned_once(tmp_path):
    chosen = choose(["headline", "learned_w", "learned_w_left"], "small")
    jobs = claims_study.missing_runs(chosen, "small", tmp_path)
    folders = [job.record.folder.name for job in jobs]
    assert len(folders) == len(set(folders)) == 25  # 5 seeds of MHA+, of gMLP, and of AFT with each of three initial_f
    kept = [job.record.folder.name for job in jobs if job.keep.args[0]]
    assert len(kept) == 15
    assert all(name.startswith("aft-") for name in kept)
    assert folders[0].endswith("seed0")


def test_a_run_that_has_diverged_is_not_trained_again(tmp_path):
    chosen = choose(["headline"], "small")
    jobs = claims_study.missing_runs(chosen, "small", tmp_path)
    write_json(jobs[0].record.summary, {"status": "diverged"})
    left = claims_study.missing_runs(chosen, "small", tmp_path)
    assert [job.record.folder for job in left] == [job.record.folder for job in jobs[1:]]


def test_devices_and_precisions_are_named_by_row_if_they_differ():
    def runs(*precisions: str) -> list[dict]:
        return [{"device": "CPU", "precision": precision, "seed": i} for i, precision in enumerate(precisions)]

    alike = {"A": runs("bf16", "float32"), "B": runs("bf16", "float32")}
    assert claim_pages.devices_by_row(alike) == ""
    differing = {"A": runs("bf16", "bf16"), "B": runs("bf16", "float32")}
    wanted = " Devices and precisions by row: A: CPU in bf16; B: CPU in bf16 (seed 0) and CPU in float32 (seed 1)."
    wanted += " [precision.md](../precision.md) compares the two precisions."
    assert claim_pages.devices_by_row(differing) == wanted


@pytest.fixture
def jobs(tiny, tmp_path):
    """Return two jobs that train for a few seconds, and also write a file that a claim needs into the run's folder."""
    found = []
    for attn, also in (("aft", "position_weight"), ("gau", "lengths")):
        given = ("experiment=small", f"attn={attn}", *tiny, "data.vocab_size=50", "evaluation.final_windows=64")
        given = tuple(word for word in given if not word.startswith("runs="))
        record = Record(tmp_path / "runs/small" / compose(list(given)).job.name)
        found.append(runner.Job(given, record, 1, partial(claims_study.keep, {also})))
    return found


def test_runs_are_trained_and_files_that_claims_need_are_written(jobs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "core_count", lambda: 2)
    cfg = OmegaConf.create({"processes": None, "results": str(tmp_path), "wandb": "disabled"})
    runner.train_all(jobs, cfg, time.monotonic() + 600)
    output = capsys.readouterr().out
    assert "2/2" in output
    assert "failed" not in output
    aft, gau = (job.record for job in jobs)
    kept = read_json(aft.folder / "position_weight.json")
    assert [len(kept[key]) for key in ("f", "alpha", "beta", "gamma")] == [3, 3, 3, 16]
    lengths = read_json(gau.folder / "lengths.json")
    assert lengths["trained"] == 16
    at_16 = json.loads(gau.summary.read_text())["evaluation"]["heldout"]["loss"]
    assert set(lengths["heldout_loss"]) == {"32", "64", "128", "256", "512"}  # not 1024: only 1,000 are held out
    assert lengths["heldout_loss"]["32"] == pytest.approx(at_16, rel=0.2)


def test_one_bar_names_the_runs_and_shows_their_total_progress(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr", Terminal())
    shown = overview.Overview({"aft-seed0": 3.0, "mha-seed0": 1.0})
    shown.at("aft-seed0", 0.5)
    shown.at("mha-seed0", 0.25)
    shown.bar.refresh()
    assert " 44%|" in sys.stderr.getvalue()  # (3 x 0.5 + 1 x 0.25) / 4
    assert "aft-seed0 50%, mha-seed0 25%" in sys.stderr.getvalue()
    shown.end("mha-seed0", 90.0, None)
    shown.end("aft-seed0", 1.0, "no text")
    shown.bar.close()
    assert capsys.readouterr().out.splitlines() == ["1/2 mha-seed0: 2 min", "2/2 aft-seed0: failed: no text"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_runs_of_more_than_a_day_need_yes_true(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "timed", lambda *_: 1.0)
    monkeypatch.setattr(runner, "matmul", lambda *_: (None, 1e9))
    small, large = (runner.job((f"experiment={name}", "attn=aft"), tmp_path) for name in ("small", "source"))
    runner.refuse_days([small])
    with pytest.raises(UserError, match=r"these 2 runs take at least [\d.]+ (hours|days) here: yes=true starts them"):
        runner.refuse_days([small, large])


def kill_this_process(record: Record, device: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_whose_process_is_killed_counts_as_failed(jobs, tmp_path, capsys):
    cfg = OmegaConf.create({"processes": 1, "results": str(tmp_path), "wandb": "disabled"})
    assert runner.train_all([jobs[0]._replace(keep=kill_this_process)], cfg, time.monotonic() + 600) == 1
    assert "a process died with exit status -9; in training: " in capsys.readouterr().out


def test_no_run_is_finished_after_the_budget_is_spent(jobs, tmp_path):
    cfg = OmegaConf.create({"processes": 1, "results": str(tmp_path), "wandb": "disabled"})
    runner.train_all(jobs, cfg, time.monotonic())
    assert all(job.record.finished_with_weights() is None for job in jobs)


def test_the_costs_of_the_rows_of_a_claim_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.benchmarking.timing.MATMUL", 64)
    claim = OmegaConf.merge(all_claims()["flash_attention"])
    claim.timing = ["layers.lengths=[16,32]", "layers.tokens=64", "layers.repeats=2"]
    where = "flash_attention", claim, tmp_path, "small"
    assert not claims_study.is_timed(*where)
    for _ in range(2):  # the second call finds the record complete
        claims_study.measure_cost(*where, time.monotonic() + 600)
        assert claims_study.is_timed(*where)
    record = costs_of("flash_attention", "small", tmp_path)
    assert list(record["lengths"]) == ["16", "32"]
    assert set(record["lengths"]["16"]) == {*claim.rows.values(), LIMIT}
    assert "python -m scripts.reproduce claims=[flash_attention]" in record["provenance"]["command"]
    assert len(benchmarked(claim, record)["scores stored, growth"]) == 2


def test_steps_are_timed_in_the_precision_of_their_rows():
    precisions = {
        name: claims_study.requested_precision(all_claims()[name]) for name in ("two_units_cost_bf16", "speed")
    }
    assert precisions == {"two_units_cost_bf16": "bf16", "speed": "auto"}


@pytest.mark.parametrize("name", ["flash_attention", "flash_linear", "speed_by_context"])
def test_timings_that_lack_a_length_are_not_judged(name, tmp_path):
    claim = all_claims()[name]
    record = costs_of(name, "small", ROOT / "results")
    assert set(record["lengths"]) == {"128", "512", "2048"}
    where = name, "small", tmp_path
    for lengths in (["128"], ["128", "512"]):
        write_costs(*where, record | {"lengths": {T: record["lengths"][T] for T in lengths}})
        with pytest.raises(MissingRecord, match=f"the timings of {name} are not complete: .* tier=small continues"):
            samples(claim, "small", tmp_path)
    skipped = {row: {"skipped": "slower than 20 s"} for row in claim.rows.values()}
    write_costs(*where, record | {"lengths": {"128": record["lengths"]["128"], "512": skipped, "2048": skipped}})
    with pytest.raises(MissingRecord, match=f"claim {name} have fewer than two lengths"):
        samples(claim, "small", tmp_path)


def test_steps_are_timed_again_if_a_row_was_added(tmp_path):
    claim = all_claims()["speed"]
    seconds = {row: [1.0] for row in claim.rows.values()}
    write_costs("flash_linear", "small", tmp_path, {"lengths": {}})
    write_costs("speed", "small", tmp_path, {"seconds": seconds})
    assert claims_study.is_timed("speed", claim, tmp_path, "small")
    seconds.popitem()
    write_costs("speed", "small", tmp_path, {"seconds": seconds})
    assert not claims_study.is_timed("speed", claim, tmp_path, "small")
    assert costs_of("flash_linear", "small", tmp_path) == {"lengths": {}}


def test_measurements_of_another_commit_are_started_again(tmp_path, monkeypatch):
    write_costs("flash_attention", "small", tmp_path, {"provenance": {"commit": "another"}, "lengths": {"128": {}}})
    seen = []
    monkeypatch.setattr(claims_study, "measure_layers", lambda _, record, *rest: seen.append(record) or [])
    claims_study.measure_cost("flash_attention", all_claims()["flash_attention"], tmp_path, "small", 0)
    assert "lengths" not in seen[0]
    assert seen[0]["provenance"]["commit"] != "another"


def test_missing_records_of_a_claim_are_named(tmp_path):
    wanted = r"these runs are missing, not finished or lack a file of the claim: .*gmlp.*-seed0, .*gmlp.*-seed4"
    with pytest.raises(UserError, match=wanted):
        samples(all_claims()["gmlp_width"], "small", tmp_path)
    with pytest.raises(UserError, match=r"has no timings of speed: python -m scripts.reproduce claims="):
        samples(all_claims()["speed"], "small", tmp_path)


def test_rows_that_were_measured_on_different_numbers_of_characters_are_refused(tmp_path, monkeypatch):
    counts = {"short": 29_952, "long": 16_384}
    rows, expects = dict.fromkeys(counts, "attn=mha"), [["short", "<", "long"]]
    claim = OmegaConf.create({"measure": "heldout", "rows": rows, "expects": expects})
    monkeypatch.setattr(claims, "all_claims", lambda: {"made_up": claim})
    monkeypatch.setattr(claims, "samples", lambda *_: {})
    monkeypatch.setattr(claim_pages, "draw", lambda *_: None)
    found = {row: [{"name": row, "evaluation": {"heldout": {"characters": n}}}] for row, n in counts.items()}
    monkeypatch.setattr(claims, "summaries", lambda _, row, *__: found[row])
    with pytest.raises(UserError, match=r"\(heldout\): short \(29,952\), long \(16,384\)"):
        claim_pages.write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_final_order_is_shown_with_the_number_of_characters_since_which_it_holds(tmp_path):
    losses = {"a": [[3.0, 2.0, 1.2, 1.0], [3.0, 2.2, 1.0, 1.0]], "b": [[2.0, 1.9, 1.4, 1.3]] * 2}
    records = {row: [Record(tmp_path / f"{row}{i}") for i in range(2)] for row in losses}
    for row, seeds in losses.items():
        for record, values in zip(records[row], seeds, strict=True):
            record.folder.mkdir()
            points = [{"tokens": 100 * i, "fit_loss": loss} for i, loss in enumerate(values, 1)]
            record.metrics.write_text("".join(f"{json.dumps(p)}\n" for p in [{"tokens": 50}, *points]))
    found = claim_pages.final_order(records)
    order = "By fit perplexity on a few windows, from the lowest: a, b."
    assert found == f"{order} This is the order from 300 to 400 training characters."
