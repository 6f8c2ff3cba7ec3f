"""Test tests.torture: try a few faults of each kind except `parents`, and check the page that it writes.

None of these faults may lose anything. The page names what was lost and which faults could not be tried.
"""

import sys

import pytest

from data.reading import read_json
from tests.conftest import ROOT, command
from tests.torture import __main__ as torture
from tests.torture import lacks
from tests.torture.forks import in_a_fork

pytestmark = [pytest.mark.slow, pytest.mark.torture]

FEW = {"interrupts": 4, "parents": 0, "harms": 14, "corpora": 20, "overrides": 6, "lacks": 1, "numbers": 1}


def test_a_short_torture_loses_nothing(tmp_path):
    few = [f"{kind}={count}" for kind, count in FEW.items()]
    done = command("-m", "tests.torture", *few, f"out={tmp_path}/torture", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_json(tmp_path / "torture.json")
    tried = {kind: found["tried"] + len(found["untried"]) for kind, found in record["kinds"].items()}
    assert tried == FEW
    assert (tmp_path / "torture.md").read_text() == torture.page(record)


def test_the_committed_page_comes_from_the_record_beside_it():
    record = read_json(ROOT / "tests/torture/torture.json")
    assert (ROOT / "tests/torture/torture.md").read_text() == torture.page(record)
    assert not any(found["provenance"]["dirty"] for found in record["kinds"].values())


def test_a_fault_that_the_machine_refuses_counts_as_not_tried(tmp_path, monkeypatch):
    def refused():
        raise PermissionError

    monkeypatch.setattr(lacks, "apart", refused)
    assert not lacks.without_it("runs", tmp_path / "runs", tmp_path).tried


@pytest.mark.parametrize(("code", "status"), [("error: x", 1), (None, 0), (3, 3)])
def test_a_fork_that_exits_ends_with_its_status(code, status):
    assert in_a_fork(lambda: sys.exit(code))[0] == status


def test_the_page_names_what_was_lost_or_not_tried():
    origin = {"device": "a CPU", "commit": "abc", "dirty": False, "command": "x"}
    harms = {"tried": 2, "lost": ["1: x differs"], "untried": ["3: refused"], "seed": 0, "provenance": origin}
    page = torture.page({"kinds": {"harms": harms}})
    assert page.endswith(f"\n{torture.MENDED.read_text()}")
    page = page.partition("## Defects that such faults")[0]
    assert "- Lost: 1: x differs" in page
    assert "- Not tried: 3: refused" in page
    assert "- abc: a CPU, seed 0; `x`." in page
    assert "| nothing" not in page
