"""Freed memory stays for the next step."""

import platform
import resource

import pytest
import torch

from training.device import keep_freed_memory


def faults_of_a_large_tensor() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**25)  # 128 MiB: beyond what glibc keeps of itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
def test_pages_are_fetched_once():
    keep_freed_memory()
    assert min([faults_of_a_large_tensor() for _ in range(8)][4:]) < 100
