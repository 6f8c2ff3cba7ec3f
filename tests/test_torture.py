"""Interrupt commands and damage their files at random: make torture tries more such faults than a usual test run."""

import sys

import pytest

from tests.helpers.runs import in_a_new_process
from tests.torture.forks import in_a_fork
from tests.torture.harm import harms
from tests.torture.interrupts import interrupts

pytestmark = [pytest.mark.slow, pytest.mark.torture]


def test_nothing_is_lost_by_damaged_files(pytestconfig, tmp_path):
    lost = in_a_new_process(harms, 2 * pytestconfig.getoption("faults"), tmp_path)
    assert not lost, "\n".join(lost)


def test_nothing_is_lost_by_interrupts(pytestconfig, tmp_path):
    lost, untried = in_a_new_process(interrupts, pytestconfig.getoption("faults"), tmp_path)
    assert not lost, "\n".join(lost)
    if untried:
        pytest.skip("nothing was lost, but these faults were not tried: " + "; ".join(untried))


@pytest.mark.parametrize(("code", "status"), [("error: x", 1), (None, 0), (3, 3)])
def test_a_fork_that_exits_ends_with_its_status(code, status):
    assert in_a_fork(lambda: sys.exit(code))[0] == status
