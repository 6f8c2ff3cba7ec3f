"""Test the study that compares bf16 with float32, and its page."""

import pytest
import torch

from configs.cli import compose
from scripts.reporting import precision as precision_page
from scripts.studies import precision
from tests.conftest import TINY

pytestmark = pytest.mark.slow


@pytest.fixture
def tiny_models(monkeypatch):
    monkeypatch.setattr(precision, "compose", lambda overrides: compose([*overrides, *TINY]))


def test_a_step_in_bf16_is_near_one_in_float32(tiny_models):
    ids = torch.randint(50, (2, 2, 16))
    found = precision.compare_step("aft", 6, tuple(ids), 50, seed=0)
    assert 0 < abs(found["difference"]) < 0.01
    assert 0.999 < found["cosine"] < 1


def test_the_page_counts_what_is_near_and_judges_trained_models():
    near, far = {"loss": 8.0, "difference": 1e-4, "cosine": 0.99998}, {"loss": 8.0, "difference": 1e-3, "cosine": 0.9}
    same = {"float32": [3.60, 3.61, 3.62], "bf16": [3.60, 3.6101, 3.6201], "commit": "abc", "bf16_device": "a CPU"}
    origin = {"device": "a CPU", "versions": {"torch": "2"}, "commit": "abc", "dirty": False, "command": "python x"}
    record = {
        "scales": [1, 6], "seed": 0, "characters": 64, "data": "sanguo", "provenance": origin,
        "variants": {"aft": {"1": near, "6": far}}, "trained": {"aft": same}, "changed": "nothing",
    }  # fmt: skip
    page = precision_page.page(record)
    wanted = (
        "In 1 of 2 comparisons (each attention at x1 and at x6) the losses differ by at most 0.0003 and the cosine is "
    )
    assert f"{wanted}at least 0.99997 when rounded to five decimals. Not so: AFT at x6." in page
    assert "equivalent" in page
