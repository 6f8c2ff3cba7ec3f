"""python -m tests.helpers.compile_kernels: compile every Triton kernel for an H100 or H200, without a GPU.

Call the functions that launch the kernels, with a stand-in for Triton's driver and a launcher that only compiles. Print
a JSON list that gives, for each kernel and case, the registers and the bytes of stack of a thread, and the bytes of
shared memory of a program. Values that do not fit in the registers are spilled to the stack.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from attn.kernels.aft import exp_toeplitz_mean
from attn.kernels.flash import flash_attention

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Hopper:
    """The methods of Triton's driver that are called during compilation."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def usage(kernel) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [CUOBJDUMP, "-res-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{what}:(\d+)", listing)[1]) for what in ("REG", "STACK"))
    return {"registers": registers, "stack": stack, "shared": kernel.metadata.shared}


compiled = []
run = JITFunction.run


def compile_only(self, *args, grid, warmup, **sizes):
    kernel = run(self, *args, grid=grid, warmup=True, **sizes)
    compiled.append({"kernel": f"{self.__module__}.{self.__name__}", "case": case} | usage(kernel))
    return kernel


driver.set_active(Hopper())
JITFunction.run = compile_only
for dtype, D, biased in (
    (torch.bfloat16, 64, True),
    (torch.bfloat16, 128, False),
    (torch.float32, 64, True),
    (torch.float32, 128, False),
    (torch.float64, 16, True),  # most tests use float64 and at most 16 dimensions, which are padded to 16
):
    case = f"{dtype}, {D} dims{', biased' if biased else ''}"
    q, k, v = (torch.zeros(1, 2, 128, D, dtype=dtype, requires_grad=True) for _ in range(3))
    a, b = (torch.zeros(2, 128, dtype=q.dtype, requires_grad=True) if biased else None for _ in range(2))
    flash_attention(q, k, v, a, b).sum().backward()
case = "64 dims"
f, k, v = (torch.zeros(shape, requires_grad=True) for shape in ((2, 128), (1, 128, 128), (1, 128, 128)))
exp_toeplitz_mean(f, k, v).sum().backward()
print(json.dumps(compiled))
