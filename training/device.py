"""Choose the device, the precision and whether to compile; make the C library keep or return freed memory."""

import ctypes
import os
import platform
import shutil
import sysconfig
import warnings
from pathlib import Path

import torch
from torch import nn

from data.files import UserError

CPU_RATE = {"float32": 1.5e11, "bf16": 4e11}  # floating-point operations per second, for `guess_hours`
COMPILE_HOURS = 0.1  # shorter training on a CPU is compiled only if that is requested
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of mallopt, from malloc.h

# torch.compile advises TensorFloat32 for float32 products, which is too coarse for the arguments of exp.
warnings.filterwarnings("ignore", "TensorFloat32 tensor cores for float32 matrix multiplication")


def pick_device(requested: str, key: str = "device") -> torch.device:
    """Return the device that `requested` names: auto (the GPU if there is one), cpu, cuda or cuda:N.

    Raises UserError for another name and for a GPU that this machine does not have. The message names the config's
    `key`.
    """
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(requested)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda") or requested.startswith("cpu:"):
        raise UserError(f"{key} must be auto, cpu or cuda: got {requested}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"{key}={requested}: this machine has {torch.cuda.device_count()} CUDA devices")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton launches its kernels on the current device
    return device


def pick_precision(requested: str, device: torch.device) -> tuple[str, str]:
    """Return the precision of matrix products in training, float32 or bf16, and the reason for it.

    `requested` is auto, float32 or bf16.
    """
    if requested != "auto":
        return requested, f"train.precision={requested}"
    instructions = bf16_instructions(device)
    where, without = ("GPU", "no bf16") if device.type == "cuda" else ("processor", "neither AMX nor AVX512-BF16")
    if instructions:
        return "bf16", f"the {where} has {instructions}"
    return "float32", f"the {where} has {without}"


def bf16_instructions(device: torch.device) -> str:
    """Return the name of a device's bf16 instructions; "" if it has none that training uses."""
    if device.type == "cuda":
        return "bf16 tensor cores" if torch.cuda.is_bf16_supported(including_emulation=False) else ""
    known = torch.cpu.get_capabilities()
    if known.get("amx_tile"):
        return "AMX"
    return "AVX512-BF16" if known.get("avx512_bf16") else ""


def without_triton(model: nn.Module) -> nn.Module:
    """Replace impl=triton by impl=torch in all attentions of a model, for a CPU, and return the model."""
    for module in model.modules():
        if getattr(module, "impl", None) == "triton":
            module.impl = "torch"
    return model


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context manager under which matrix products are computed in `precision`, float32 or bf16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def pick_compile(requested: bool | None, device: torch.device, hours: float) -> bool:
    """Return whether to train with torch.compile.

    `requested` is train.compile; None means to compile where that is possible and, on a CPU, where it saves time.
    Compiling needs Python's headers and a compiler: a C++ compiler on a CPU, a C compiler on a GPU. If one of them is
    missing, requested=True raises UserError, and requested=None prints a message if it would have compiled. On a CPU,
    compiling takes about a minute, which is longer than it saves in a run of a few minutes. `hours` is the expected
    length of the run.
    """
    on_cpu = device.type == "cpu"
    if requested is False or (requested is None and on_cpu and hours < COMPILE_HOURS):
        return False
    # On a CPU, torch tries only $CXX or, without it, g++; on a GPU, Triton only $CC or, without it, gcc and clang.
    variable, usual = ("CXX", ["g++"]) if on_cpu else ("CC", ["gcc", "clang"])
    compiler = any(map(shutil.which, [os.environ[variable]] if variable in os.environ else usual))
    if compiler and Path(sysconfig.get_path("include"), "Python.h").exists():
        return True
    missing = "Python's headers" if compiler else f"a {'C++' if on_cpu else 'C'} compiler"
    if requested is True:
        raise UserError(f"train.compile=true needs {missing}, which this machine lacks")
    slower = ": on a CPU this is 1.2 times slower" if on_cpu else ""
    print(f"training without torch.compile, which needs {missing}{slower}", flush=True)
    return False


def guess_hours(parameters: int, tokens: int, precision: str) -> float:
    """Estimate the hours of training on `tokens` characters on a CPU, at 6 operations per parameter and character."""
    return 6 * parameters * tokens / CPU_RATE[precision] / 3600


def wait(device: torch.device) -> None:
    """Wait until the device has finished all work in its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def keep_freed_memory(unlimited: bool = False) -> None:
    """Make glibc keep freed memory for the next training step; do nothing with another C library.

    Unless `unlimited`, glibc still returns what is free at the end of the heap if that is 2 GiB or more.

    By default, glibc returns the memory of large tensors to the system when they are freed. At the next step, the
    system maps and zeroes the pages again: a quarter of a million pages at experiment=source. Keeping the memory may
    raise the peak of memory use by a fifth.
    """
    if is_glibc():
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1 if unlimited else 2**31 - 1)


def return_freed_memory() -> None:
    """Make glibc return to the system the freed memory that it has kept; do nothing with another C library."""
    if is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def stop_keeping_freed_memory() -> None:
    """Undo `keep_freed_memory`, and return to the system what was kept; do nothing with another C library."""
    if is_glibc():
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 65536)  # glibc's default
        libc.mallopt(M_TRIM_THRESHOLD, 128 * 1024)  # glibc's default
    return_freed_memory()


def is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
