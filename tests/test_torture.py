"""Interrupt commands and damage their files at random: make torture tries more such faults than a usual test run."""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.torture.forks import in_a_fork
from tests.torture.harm import harms
from tests.torture.interrupts import interrupts

pytestmark = [pytest.mark.slow, pytest.mark.torture]


@pytest.mark.parametrize(("fault", "times"), [(interrupts, 1), (harms, 2)])
def test_nothing_is_lost(fault, times, pytestconfig, tmp_path):
    # A process of its own, because it forks: the tests before have started threads, which a fork does not copy.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        lost = process.submit(fault, times * pytestconfig.getoption("faults"), tmp_path).result()
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize(("code", "status"), [("error: x", 1), (None, 0), (3, 3)])
def test_a_fork_that_exits_ends_with_its_status(code, status):
    assert in_a_fork(lambda: sys.exit(code))[0] == status
