"""Test scripts.benchmark on small models, and the pages that are made from its records."""

import re
import time

import pytest
import torch
from hydra.errors import HydraException

from configs.cli import compose
from data.files import UserError
from scripts.benchmarking import attentions, timing
from scripts.benchmarking.memory import peak_of_process, peak_of_tensors
from scripts.benchmarking.peers import peers
from scripts.reporting import benchmark_pages
from scripts.reporting.benchmark_pages import COUNTERPARTS, LIMIT, limit_before, over_floor
from scripts.reporting.figures import paired_ratio
from tests.conftest import TINY, VARIANTS

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def config(*overrides: str):
    return compose(["variants=[mha,mha_plus,aft]", "layers.tokens=64", "layers.repeats=2", *overrides], "benchmark")


@pytest.fixture
def small(monkeypatch):
    """Make everything small that the benchmark measures, and do not compile it."""
    monkeypatch.setattr("scripts.benchmarking.timing.MATMUL", 64)
    shape = [*(a for a in TINY if not a.startswith("model")), "model.dim=64", "model.heads=8"]
    monkeypatch.setattr(attentions, "compose", lambda overrides: compose([*shape, *overrides]))
    monkeypatch.setattr(attentions, "pick_compile", lambda *arguments, **named: False)


def in_ten_minutes() -> float:
    return time.monotonic() + 600


def test_the_peak_counts_tensors_that_exist_at_the_same_time():
    x = torch.ones(1000, 1000)

    def two_at_once():
        y = x + 1
        z = y * 2
        del y
        z + 1

    for _ in range(2):
        assert peak_of_tensors(two_at_once, CPU) == pytest.approx(2 * x.nbytes, rel=1e-3)
    assert x.nbytes < peak_of_process(two_at_once, CPU) < 4 * x.nbytes
    held = []
    assert peak_of_tensors(lambda: held.append(torch.zeros(1000, 1000)), CPU) == pytest.approx(x.nbytes, rel=1e-3)
    assert peak_of_tensors(held.clear, CPU) == 0


def test_functions_take_turns():
    order = []
    seconds = timing.in_turn({name: lambda name=name: order.append(name) for name in "ab"}, CPU, warm_up=1, repeats=2)
    assert order == ["a", "b"] * 3
    assert {name: len(s) for name, s in seconds.items()} == {"a": 2, "b": 2}


def test_each_timed_call_follows_untimed_ones_whose_memory_is_kept_for_it_alone(monkeypatch):
    order = []
    monkeypatch.setattr(timing, "keep_freed_memory", lambda unlimited: order.append("kept"))
    monkeypatch.setattr(timing, "stop_keeping_freed_memory", lambda: order.append("returned"))
    functions = {name: lambda name=name: order.append(name) for name in "ab"}
    seconds = timing.in_turn_each_warmed_up(functions, CPU, warm_up=2, repeats=2)
    assert order == ["kept", "a", "a", "a", "returned", "kept", "b", "b", "b", "returned"] * 2
    assert {name: len(s) for name, s in seconds.items()} == {"a": 2, "b": 2}


def test_the_floor_is_taken_round_by_round():
    """A round in which the machine runs at half its speed does not change the result."""
    assert over_floor([3.0, 6.0, 3.0], [1.0, 2.0, 1.0], work=20.0, matmul_work=10.0) == 1.5


def test_steps(small):
    (record,) = attentions.measure_steps(config(), {}, CPU, "float32", in_ten_minutes())
    assert set(record["seconds"]) == {f"{before}{v}" for v in config().variants for before in ("", limit_before(""))}
    assert record["floating_point_operations"]["mha"] == 6 * (4 * 64**2 + 9 * 64**2 + 64 * 5744) * record["tokens"]
    assert not list(attentions.measure_steps(config(), record, CPU, "float32", in_ten_minutes()))


def test_steps_in_a_row_are_timed_together(small, monkeypatch):
    calls = []
    monkeypatch.setitem(attentions.IN_A_ROW, "cpu", 3)
    monkeypatch.setattr(attentions, "training_step", lambda *_: lambda: calls.append(1))
    monkeypatch.setattr(attentions, "in_turn", lambda functions, *_: {name: [6.0, 9.0] for name in functions})
    (record,) = attentions.measure_steps(config("variants=[mha_plus]"), {}, CPU, "float32", in_ten_minutes())
    assert record["in_a_row"] == 3
    assert record["seconds"] == {limit_before("mha_plus"): [6.0, 9.0], "mha_plus": [2.0, 3.0]}
    assert len(calls) == 1 + 3  # a first step, then 3 in a row to measure the memory; in_turn calls none here


def test_a_public_layer_that_fails_is_skipped(small, monkeypatch):
    def fails(x):
        raise RuntimeError("no room\nfor this")

    monkeypatch.setattr(attentions, "peers", lambda *_: {"torch SDPA": lambda: Failing(fails)})
    record = next(attentions.measure_layers(config("layers.lengths=[16]"), {}, CPU, "float32", in_ten_minutes()))
    assert record["lengths"]["16"]["torch SDPA"] == {"skipped": "fails: no room"}
    origin = {"device": "a CPU", "threads": 2, "precision": "float32", "versions": {"torch": "2"}, "commit": "abc"}
    record["provenance"] = origin | {"dirty": False, "command": "python -m scripts.benchmark", "tokens": 64}
    assert "torch SDPA fails: no room" in benchmark_pages.peers_table(record)
    assert len(record["lengths"]["16"]["mha"]["seconds"]) == 2


def test_lengths_that_do_not_divide_the_tokens_are_refused(tmp_path):
    cfg = config("layers.lengths=[16,24,128]", "precisions=[float32]", "tier=cpu", f"results={tmp_path}")
    with pytest.raises(UserError, match=r"layers.tokens=64 must be a multiple of every length: got \[24, 128\]"):
        attentions.measure(cfg, "x")
    assert not list(tmp_path.iterdir())


class Failing(torch.nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.forward = forward


def test_layers_continue_where_they_stopped(small):
    cfg = config("layers.lengths=[16,32]")
    record = next(attentions.measure_layers(cfg, {}, CPU, "float32", in_ten_minutes()))
    assert list(record["lengths"]) == ["16"]
    assert list(attentions.measure_layers(cfg, record, CPU, "float32", time.monotonic())) == []
    *_, record = attentions.measure_layers(cfg, record, CPU, "float32", in_ten_minutes())
    assert list(record["lengths"]) == ["16", "32"]
    for cells in record["lengths"].values():
        assert set(cells) == {"mha", "mha_plus", "aft", LIMIT, *peers(32, 8, 16)}
        assert all(len(cell["seconds"]) == 2 for cell in cells.values())


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ({}, None),
        ({1: {"seconds": [1.0], "peak_bytes": 10}}, None),
        ({1: {"seconds": [11.0], "peak_bytes": 10}}, "expected to take more than 20 s"),
        ({1: {"seconds": [11.0], "peak_bytes": 10}, 2: {"seconds": [12.0, 11.5], "peak_bytes": 10}}, None),
        ({1: {"seconds": [1.0], "peak_bytes": 1 << 50}}, "expected to need more memory than 22%"),
        ({1: {"seconds": [1.0], "peak_bytes": 10}, 2: {"skipped": "slower"}}, "slower"),
    ],
)
def test_layers_that_need_too_much_time_or_memory_are_skipped(before, why):
    found = attentions.too_much(before, 2 * max(before, default=1), config(), CPU)
    assert found is None if why is None else found.startswith(why)


@pytest.mark.parametrize(
    ("measured", "value"),
    [({128: 3.0}, 6.0), ({64: 1.0, 128: 4.0, 256: 6.0}, 10.0), ({128: 5.0, 256: 4.0}, 4.0)],
)
def test_what_the_next_length_needs_is_expected_from_the_last_two(measured, value):
    assert attentions.expected(measured, 2 * max(measured)) == value


def test_peers_follow_their_counterparts():
    names = list(attentions.layers_to_measure(config(), compose([]).model, 16, CPU))
    assert names[:4] == ["mha", "torch SDPA", "softmax, scores stored", "x-transformers"]
    assert set(names) == {"mha", "mha_plus", "aft", *peers(64, 8, 16)}


def test_a_gpu_measures_our_kernels_too():
    names = attentions.everything(torch.device("cuda"))
    assert attentions.everything(CPU) == VARIANTS
    kernels = {"aft", "gated_mha", "mha", "mha_key_size", "mha_log_n", "mha_rotary", "mha_tw", "realformer_qk", "xsa"}
    assert set(names) - set(VARIANTS) == {f"{v} attn.impl=triton" for v in kernels}


def test_unknown_layers_are_named_before_anything_is_measured():
    for names, why in (("[mha,mah]", "mah"), ("[mha,'aft attn.gama=false']", "gama")):
        with pytest.raises(HydraException, match=why):
            next(attentions.measure_layers(config(f"variants={names}"), {}, CPU, "float32", in_ten_minutes()))


def test_a_record_of_another_commit_is_not_continued(tmp_path):
    path, origin = tmp_path / "r.json", {"command": "x", "commit": "a"}
    attentions.write_json(path, {"provenance": origin, "seconds": {}})
    assert "seconds" in attentions.open_record(path, origin | {"command": "y"})
    for other in ({"commit": "b"}, {"changes": "c"}, {"variants": ["aft"]}):
        assert attentions.open_record(path, origin | other) == {"provenance": origin | other}


def test_peers_have_counterparts_and_keep_the_shape():
    found = peers(64, 8, 16)
    on_gpu = {"FlexAttention", "FlexAttention, time-weighted"}
    assert set(found) == set(COUNTERPARTS) - (set() if torch.cuda.is_available() else on_gpu)
    assert set(COUNTERPARTS.values()) <= set(VARIANTS)
    for make in found.values():
        assert make()(torch.randn(2, 16, 64)).shape == (2, 16, 64)


def test_tables_and_plot(small):
    origin = {"device": "a CPU", "threads": 2, "precision": "float32", "versions": {"torch": "2"}, "commit": "abc"}
    origin |= {"dirty": False, "command": "python -m scripts.benchmark", "tokens": 64}
    (steps,) = attentions.measure_steps(config(), {"provenance": origin}, CPU, "float32", in_ten_minutes())
    table = benchmark_pages.steps_table(steps, compose([], "compare").source)
    assert "| MHA+" in table
    assert "1.06" in table
    over_aft = paired_ratio(steps["seconds"]["mha_plus"], steps["seconds"]["aft"])
    assert re.search(rf"^\| MHA\+ +\| +1\.00 \| +1\.00 \| +{over_aft:.2f} \|", table, re.MULTILINE)
    *_, layers = attentions.measure_layers(
        config("layers.lengths=[16,32]"), {"provenance": origin}, CPU, "float32", in_ten_minutes()
    )
    table = benchmark_pages.peers_table(layers)
    assert "| MHA / torch SDPA" in table
    assert "triton" not in table
    for cells in layers["lengths"].values():
        cells["aft attn.impl=triton"] = cells["aft"] | {"seconds": [2 * s for s in cells["aft"]["seconds"]]}
    cell = "2.00 (2.00 to 2.00); 1.00"
    row = rf"\| AFT attn\.impl=triton / AFT +\| +{re.escape(cell)} +\|"  # padded if another ratio is 10 or more
    assert re.search(row, benchmark_pages.peers_table(layers))
    layers["lengths"]["16"]["aft"] = {"seconds": [64e-6, 128e-6, 640e-6], "peak_bytes": 5 * 2**20}
    layers["lengths"]["32"]["aft"] = {"skipped": "expected to take more than 20 s"}
    by_length = benchmark_pages.layers_table(layers)
    assert re.search(r"^\| AFT +\| +2; 5 \| +– \|$", by_length, re.MULTILINE)
    assert "torch SDPA" not in by_length
    figure = benchmark_pages.draw_layers(
        layers, ["mha", "aft", "torch SDPA"], steps["floating_point_operations"][LIMIT]
    )
    shown = {text.get_text() for text in figure.axes[0].texts}
    assert shown == {"MHA", "AFT", "torch SDPA", "limit: four\ndim x dim products"}


def test_a_missing_record_is_named_with_its_command(tmp_path):
    with pytest.raises(UserError, match=r"steps.json does not exist: python -m scripts.benchmark writes it"):
        benchmark_pages.read(tmp_path / "steps.json", "seconds")


def test_a_budget_that_ends_before_any_layer_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(attentions, "measure_precision", lambda *_: None)
    attentions.measure(config("precisions=[float32]", "tier=cpu", f"results={tmp_path}"), "x")
    assert not list(tmp_path.rglob("*.md"))


def test_no_other_precision_is_begun_after_the_budget(tmp_path, monkeypatch, capsys):
    measured = []
    monkeypatch.setattr(attentions, "measure_precision", lambda *given: measured.append(given[3]))
    monkeypatch.setattr(attentions.benchmark_pages, "complete", lambda results: [results])
    monkeypatch.setattr(attentions.benchmark_pages, "write", measured.append)
    for budget, expected in ((0, ["float32", tmp_path]), (600, ["float32", tmp_path, "bf16", tmp_path])):
        cfg = config(f"budget={budget}", "precisions=[float32,bf16]", "tier=cpu", f"results={tmp_path}")
        attentions.measure(cfg, "x")
        assert measured == expected
        measured.clear()
    assert capsys.readouterr().out == "the budget is spent: the same command continues in bf16\n"
