"""Test what attn/kernels/compiler.py tells torch.compile, and that commands do not import the compiler without need."""

import subprocess
import sys

import pytest
import torch

from attn.kernels.compiler import constant_result, not_compiled
from tests.conftest import ROOT

MODULES = "attn, evaluate, train, scripts.compare, scripts.dashboard, scripts.list_runs, scripts.report, scripts.sample"


def test_the_compiler_is_not_imported_at_the_start_of_a_command():
    program = f"import sys, {MODULES}; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_a_recurrence_does_not_import_the_compiler():
    program = (
        "import sys, torch; from attn.kernels.recurrence import Recurrence, recurrent_sum; "
        "q = torch.ones(1, 1, 70, 4, requires_grad=True); "
        "recurrent_sum(Recurrence(q, q, q, g=torch.zeros(1, 1, 70, 1))).sum().backward(); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def inner(x):  # if it were compiled, its branch on data would add graphs
    for _ in range(3):
        x = x.sin() if x.sum() > 0 else x.cos()
    return x


@pytest.mark.slow
def test_not_compiled_leaves_a_function_out_of_the_graphs_as_torch_does():
    from torch._dynamo.testing import CompileCounter

    counted = []
    for keep_out in (torch.compiler.disable, not_compiled):
        kept, counter = keep_out(inner), CompileCounter()
        compiled = torch.compile(lambda x, kept=kept: kept(2 * x) + 1, backend=counter)
        for size in (3, 3, 5):
            x = torch.randn(size)
            torch.testing.assert_close(compiled(x), inner(2 * x) + 1)
        counted.append((counter.frame_count, counter.op_count))
        torch._dynamo.reset()
    assert counted[0] == counted[1]
    assert not_compiled(inner).__name__ == "inner"


def test_a_constant_result_is_marked_as_torch_marks_it():
    ours, torchs = lambda: None, lambda: None
    constant_result(ours)
    torch.compiler.assume_constant_result(torchs)
    assert vars(ours) == vars(torchs) != {}
