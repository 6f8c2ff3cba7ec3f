"""Test `pick_device`, and what a process needs with `keep_freed_memory`."""

import mmap
import platform
from pathlib import Path

import pytest

from data.files import UserError
from tests.conftest import command
from training.device import pick_device

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FAULTS = """
import resource
import torch
from training.device import keep_freed_memory, stop_keeping_freed_memory

def faults(numbers):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(numbers)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
"""
KEPT = f"{FAULTS}print(*[faults(2**25) for _ in range(40)])"  # 128 MiB, more than glibc keeps by default
RETURNED = f"""{FAULTS}
stop_keeping_freed_memory()
first, second = torch.ones(2**25), torch.ones(2**25)
del first  # if both were in the heap, its memory would be kept, because the other lies after it
print(*[faults(2**24) for _ in range(3)])
"""

BLOCKS = """
import torch
from attn.kernels.rows import ROWS, attend_by_row_blocks
from scripts.benchmarking.memory import peak_of_process
from training.device import keep_freed_memory

T = 16384

def step():
    q, k, v = (torch.randn(T, 16, requires_grad=True) for _ in range(3))
    attend_by_row_blocks(lambda q, k: (q @ k.mT).softmax(-1), q, k, v).sum().backward()

keep_freed_memory()
print(peak_of_process(step, torch.device("cpu")) / (4 * ROWS * T))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
def test_blocks_of_rows_use_the_memory_that_longer_ones_have_freed():
    """Computed from the first block to the last, they would need 44 times the memory of the last block's weights."""
    assert float(command("-c", BLOCKS).stdout) < 28


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
@pytest.mark.skipif(HUGE.exists() and "[always]" in HUGE.read_text(), reason="a fault fills a huge page")
def test_freed_memory_is_used_again_without_page_faults():
    """Count page faults in a separate process, because other tests would fragment the memory.

    Small objects can take pieces of the memory that the first tensors have freed. The next tensors may then not fit
    there and need new pages. After some repetitions every tensor fits, so only the last count must be small.
    """
    counts = list(map(int, command("-c", KEPT).stdout.split()))
    assert counts[0] > 0.9 * 2**27 / mmap.PAGESIZE
    assert counts[-1] < 100


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
@pytest.mark.skipif(HUGE.exists() and "[always]" in HUGE.read_text(), reason="a fault fills a huge page")
def test_freed_memory_is_returned_when_it_is_no_longer_kept():
    assert min(map(int, command("-c", RETURNED).stdout.split())) > 0.9 * 2**26 / mmap.PAGESIZE


@pytest.mark.parametrize("requested", ["tpu", "mps", "cpu:1", "cuda:99"])
def test_the_error_names_the_key_that_was_given(requested):
    with pytest.raises(UserError, match=r"^device(=cuda:99: this machine has| must be auto, cpu or cuda: got )"):
        pick_device(requested)
    with pytest.raises(UserError, match=r"^train\.device[= ]"):
        pick_device(requested, "train.device")
