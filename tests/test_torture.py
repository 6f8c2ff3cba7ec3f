"""The torture, in its short form; and that it notices what is lost."""

import pytest

from data.reading import read_json
from tests.conftest import ROOT, command
from tests.torture import __main__ as torture
from tests.torture.small import Untried
from tests.torture.starve import outcome

pytestmark = [pytest.mark.slow, pytest.mark.torture]

FEW = {
    "kills": 2,
    "signals": 1,
    "sweeps": 0,
    "ranks": 0,
    "rivals": 0,
    "parents": 0,
    "power_cuts": 2,
    "nuls": 1,
    "links": 2,
    "locales": 0,
    "caches": 4,
    "threads": 0,
    "disks": 1,
    "states": 60,
    "weights": 10,
    "folders": 1,
    "strangers": 4,
    "corpora": 20,
    "overrides": 6,
    "twice": 0,
    "twice_compiled": 0,
}


def test_nothing_is_lost(tmp_path):
    few = [f"{kind}={count}" for kind, count in FEW.items()]
    arguments = [*few, "starve=[hub]", "cuts=4000", "blowing_up=1", f"out={tmp_path}/torture"]
    done = command("-m", "tests.torture", *arguments, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_json(tmp_path / "torture.json")
    tried = {kind: found["tried"] + len(found["untried"]) for kind, found in record["kinds"].items()}
    assert tried.pop("cuts") > 5
    assert tried == FEW | {"starve": 1, "blowing_up": 3}
    assert (tmp_path / "torture.md").read_text() == torture.page(record)


def test_the_committed_page_comes_from_the_record_beside_it():
    record = read_json(ROOT / "results/torture.json")
    assert (ROOT / "results/torture.md").read_text() == torture.page(record)
    assert not any(found["provenance"]["dirty"] for found in record["kinds"].values())


def test_what_a_machine_refuses_is_not_tried(tmp_path):
    def refused():
        raise PermissionError

    found = outcome("runs", lambda place, whole: ["never reached"], refused, tmp_path, tmp_path)
    assert isinstance(found, Untried)


def test_what_was_lost_is_named():
    kills = {
        "tried": 2,
        "lost": ["kill 1: metrics.jsonl differs"],
        "untried": ["kill 3: refused"],
        "where": {"a step": 2},
        "seed": 0,
        "provenance": {"device": "a CPU", "versions": {"torch": "2"}, "commit": "abc", "dirty": False, "command": "x"},
    }
    page = torture.page({"kinds": {"kills": kills}})
    assert page.endswith(f"\n{torture.MENDED.read_text()}")
    page = page.partition("## What such faults")[0]
    assert "- kill 1: metrics.jsonl differs" in page
    assert "- Where the kills fell: a step 2." in page
    assert "- kill 3: refused" in page
    assert "- abc: a CPU, torch 2; seed 0; `x`." in page
    assert "nothing" not in page
