"""Test the computed and the measured memory of a training step of the large model, and their page, large.md."""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from configs.cli import compose
from scripts.benchmarking.memory_plan import config as step_config
from scripts.benchmarking.memory_plan import kept_bytes, measure_cells, measure_step
from scripts.reporting.memory import page
from scripts.reporting.records import MissingRecord
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
def test_the_memory_of_more_layers_follows_from_two(variant):
    """Counting two of four layers gives what counting all four gives.

    With checkpointing, a further layer keeps only the inputs of its block, which for RealFormer include the scores.
    """
    four = [kept_bytes(variant, [4, 3, 24, 16], 2, 50, "float32", counted=n) for n in (2, 4)]
    assert four[0] == four[1]
    eight = kept_bytes(variant, [8, 3, 24, 16], 2, 50, "float32")
    x, scores = 2 * 16 * 24 * 4, 2 * 3 * 16 * 16 * 4
    between = 4 * (x + (scores if variant == "realformer" else 0))
    assert eight["checkpointed"] - four[0]["checkpointed"] == between
    assert eight["plain"] - four[0]["plain"] > 3 * between


def test_the_input_of_a_checkpointed_block_is_counted_once():
    """With one block, checkpointing keeps no less and no more than a plain step, if the block keeps its input."""
    one = kept_bytes("mha", [1, 3, 24, 16], 2, 50, "float32")
    assert one["checkpointed"] == one["plain"]


def test_counting_frees_its_model():
    """A leak would add up, because one process counts dozens of models.

    The first round may fill caches, or empty those that earlier tests have filled.
    """
    counts = []
    for _ in range(2):
        for variant in ("mha", "aft"):
            kept_bytes(variant, [2, 3, 24, 16], 2, 50, "float32")
        counts.append(tensors())
    assert counts[0] == counts[1]


def measured_peak(size: list[int]) -> int:
    """Return the peak memory of a training step, after a step of a tiny model, whose memory is not counted."""
    cfg = config("vocabulary=5000")
    measure_step(step_config("mha", [1, 1, 8, 8], 1), cfg, CPU, "float32")
    return measure_step(step_config("mha", size, 8), cfg, CPU, "float32")["peak_bytes"]


def test_the_measured_peak_is_near_the_computed_memory():
    """The model is so large that the other memory of the process hardly counts.

    The peak is measured in a new process, because this one may have freed memory that the step would use again.
    """
    size = [2, 4, 256, 64]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        measured = process.submit(measured_peak, size).result()
    kept = kept_bytes("mha", size, 8, 5000, "float32")["plain"]
    state = 16 * (2 * 5000 * 256 + 2 * 13 * 256**2)
    assert 0.8 * (state + kept) < measured < 2 * (state + kept)


def test_a_record_is_continued_and_its_page_has_the_tables():
    origin = {"device": "a CPU", "threads": 2, "precision": "float32", "versions": {"torch": "2"}, "commit": "abc"}
    origin |= {"dirty": False, "command": "python -m scripts.benchmark measure=memory"}
    one = config("variants=[aft]")  # a single attention, because measuring takes time
    record = {"provenance": origin, "batch": 1, "vocabulary": 50}
    *_, record = measure_cells(one, record, CPU, "float32", time.monotonic())  # no time left: nothing is measured
    assert record["sizes"]["4x3x24x16"]["aft"].keys() & {"plain", "checkpointed"} == set()
    assert "| AFT " in page(record)
    del record["sizes"]["4x3x24x16"]["aft"]["bf16_sequence_bytes"]
    with pytest.raises(MissingRecord, match="the record lacks the largest model: `python"):
        page(record)
    *_, record = measure_cells(one, record, CPU, "float32", time.monotonic() + 600)
    assert all(
        len(cell[kind]["seconds"]) == 1
        for size in record["sizes"].values()
        for cell in size.values()
        for kind in ("plain", "checkpointed")
    )
    assert not list(measure_cells(one, record, CPU, "float32", time.monotonic() + 600))
    text = page(record)
    assert "4 layers, 3 heads, 24 dim, context 16" in text
    assert "1 x 3 x 24 x 16, c." in text
    assert "commit abc" in text
    record["sizes"]["1x1x8x8"] = record["sizes"].pop("1x3x24x16")  # a smaller size that was measured last
    assert "4 layers, 3 heads, 24 dim, context 16" in page(record)
