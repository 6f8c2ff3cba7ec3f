"""Do tasks in forks of this process, and describe how they end."""

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import datasets  # noqa: F401, imported here once and not in each fork
import wandb.sdk.launch  # noqa: F401
from hydra.core.global_hydra import GlobalHydra

HANG = 120  # seconds after which a run counts as hanging


def typed(run: Callable[[], object], *arguments: str) -> None:
    """Run a command, whose function is `run`, with these arguments, in this process."""
    GlobalHydra.instance().clear()
    sys.argv = ["script", *arguments]
    run()


def in_a_fork(*tasks: Callable[[], object]) -> tuple[int, str]:
    """Do tasks in a fork of this process. Return its exit status, or minus the signal that ended it, and its output."""

    def do() -> None:
        multiprocessing.process._parent_process = None  # otherwise a command would take itself for a launcher's worker
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        signal.alarm(HANG)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs that a shell runs in the background ignore it
        for task in tasks:
            task()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a signal that comes too late must not change the exit status
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    with tempfile.NamedTemporaryFile() as output:
        process = multiprocessing.get_context("fork").Process(target=do)
        process.start()
        process.join()
        # Open the file again: seeking in `output` would move the offset at which wandb's process may still write.
        return process.exitcode, Path(output.name).read_text(encoding="utf-8")


def failed(status: int, output: str, expected: int = 0) -> list[str]:
    """Return how a command ended if it did not end with the expected exit status, otherwise an empty list."""
    return [f"exit status {status}: {output[-300:]}"] * (status != expected)


def not_refused(status: int, output: str, words: str = "") -> list[str]:
    """Return how a command ended if it was not refused, otherwise an empty list.

    A refused command ends with exit status 2, and its last line is its only error line and contains `words`.
    """
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    alone = errors == output.splitlines()[-1:] and any(words in error for error in errors)
    refused = status == 2 and alone and "Traceback" not in output
    return [] if refused else [f"exit status {status}, not refused in a line with {words!r}: {output[-300:]}"]
