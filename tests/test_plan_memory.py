"""What a step of the large model needs: computed, measured, and as a page."""

import time

import pytest
import torch

from configs.cli import compose
from scripts.benchmarking.memory_plan import cells, kept_bytes, measure_step
from scripts.benchmarking.memory_plan import config as step_config
from scripts.reporting.memory import page
from tests.conftest import tensors

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_product(monkeypatch):
    monkeypatch.setattr("scripts.benchmarking.timing.MATMUL", 64)


def config(*overrides: str):
    sizes = "sizes=[[1,3,24,16],[4,3,24,16]]"
    return compose(
        [sizes, "variants=[mha,aft]", "vocabulary=50", "seconds=0", "measure=memory", *overrides], "benchmark"
    )


@pytest.mark.parametrize("variant", ["mha", "realformer"])
def test_two_layers_tell_what_more_would_keep(variant):
    """And the second kind keeps little: its blocks' inputs, RealFormer's scores among them."""
    four = [kept_bytes(variant, [4, 3, 24, 16], 2, 50, "float32", counted=n) for n in (2, 4)]
    assert four[0] == four[1]
    eight = kept_bytes(variant, [8, 3, 24, 16], 2, 50, "float32")
    x, scores = 2 * 16 * 24 * 4, 2 * 3 * 16 * 16 * 4
    between = 4 * (x + (scores if variant == "realformer" else 0))
    assert eight["checkpointed"] - four[0]["checkpointed"] == between
    assert eight["plain"] - four[0]["plain"] > 3 * between


def test_counting_frees_what_it_counted():
    """Dozens of models are counted by one process."""
    before = tensors()
    for variant in ("mha", "aft"):
        kept_bytes(variant, [2, 3, 24, 16], 2, 50, "float32")
    assert tensors() == before


def test_what_is_measured_is_about_what_is_on_paper():
    """A model large beside what a process needs anyway."""
    size, cfg = [2, 4, 256, 64], config("vocabulary=5000")
    measure_step(step_config("mha", [1, 1, 8, 8], 1), cfg, CPU, "float32")
    measured = measure_step(step_config("mha", size, 8), cfg, CPU, "float32")["peak_bytes"]
    kept = kept_bytes("mha", size, 8, 5000, "float32")["plain"]
    state = 16 * (2 * 5000 * 256 + 2 * 13 * 256**2)
    assert 0.8 * (state + kept) < measured < 2 * (state + kept)


def test_it_goes_on_where_it_stopped_and_draws_a_table():
    origin = {"device": "a CPU", "threads": 2, "precision": "float32", "versions": {"torch": "2"}, "commit": "abc"}
    origin |= {"dirty": False, "command": "python -m scripts.benchmark measure=memory"}
    record = {"provenance": origin, "batch": 1, "vocabulary": 50}
    *_, record = cells(config(), record, CPU, "float32", time.monotonic())  # computed alone
    assert record["sizes"]["4x3x24x16"]["aft"].keys() & {"plain", "checkpointed"} == set()
    assert "| AFT " in page(record)
    *_, record = cells(config(), record, CPU, "float32", time.monotonic() + 600)
    assert all(
        len(cell[kind]["seconds"]) == 1
        for size in record["sizes"].values()
        for cell in size.values()
        for kind in ("plain", "checkpointed")
    )
    assert not list(cells(config(), record, CPU, "float32", time.monotonic() + 600))
    text = page(record)
    assert "4 layers, 3 heads, 24 dim, context 16" in text
    assert "1 x 3 x 24 x 16, c." in text
    assert "commit abc" in text
