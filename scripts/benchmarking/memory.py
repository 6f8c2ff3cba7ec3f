"""Measure the memory of the machine, and the memory that a function needs."""

import gc
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from training.device import return_freed_memory, wait


def total_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return read_size("/proc/meminfo", "MemTotal")


def peak_of_tensors(function: Callable[[], None], device: torch.device) -> int:
    """Return the peak of the memory of all tensors during a call, minus their memory before it, in bytes.

    On a CPU, the result is reproducible, unlike that of `peak_of_process`: the same call in another process gives the
    same number. But on a CPU, the profiler notices that a tensor is freed only if it was allocated during this call or
    an earlier measured one. If the call frees another tensor, the measured memory does not fall.
    """
    gc.collect()
    if device.type == "cuda":
        return peak_on_gpu(function, device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = [e for e in json.loads(Path(file.name).read_bytes())["traceEvents"] if e.get("name") == "[memory]"]
    if not events:
        return 0
    events.sort(key=lambda e: e["ts"])
    first = events[0]["args"]
    return max(0, *(e["args"]["Total Allocated"] - first["Total Allocated"] + first["Bytes"] for e in events))


def peak_of_process(function: Callable[[], None], device: torch.device) -> int:
    """Return the peak of the memory of this process during a call, minus its memory before it, in bytes.

    On a GPU, the memory is that of all tensors.
    """
    gc.collect()
    if device.type == "cuda":
        return peak_on_gpu(function, device)
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    before = read_size("/proc/self/status", "VmRSS")
    function()
    return max(0, read_size("/proc/self/status", "VmHWM") - before)


def peak_on_gpu(function: Callable[[], None], device: torch.device) -> int:
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    wait(device)
    return torch.cuda.max_memory_allocated(device) - before


def read_size(path: str, key: str) -> int:
    return int(re.search(rf"{key}:\s+(\d+) kB", Path(path).read_text(encoding="utf-8"))[1]) * 1024
