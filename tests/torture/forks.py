"""Do tasks in forks of this process, and describe how they end."""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import datasets  # noqa: F401, imported here once and not in each fork
import wandb.sdk.launch  # noqa: F401
from hydra.core.global_hydra import GlobalHydra

from configs.messages import MISTAKES, explain

HANG = 120  # seconds after which a run counts as hanging


class Fault(NamedTuple):
    """A fault, and what was lost because of it.

    If `tried` is False, the fault was not tried on this machine, and `lost` holds the reason.
    """

    name: str
    lost: list[str]
    tried: bool = True


def typed(script: ModuleType, *arguments: str) -> None:
    """Run a command with these arguments, in this process."""
    GlobalHydra.instance().clear()
    sys.argv = ["script", *arguments]
    script.run()


class Fork:
    """A fork of this process that does tasks while this process continues."""

    def __init__(self, *tasks: Callable[[], object]):
        self.output = tempfile.NamedTemporaryFile("w", encoding="utf-8")  # noqa: SIM115, closed by end()
        self.child = os.fork()
        if self.child == 0:
            self.do(tasks)

    def do(self, tasks: tuple[Callable[[], object], ...]) -> None:
        multiprocessing.process._parent_process = None  # the copied value is the parent of this fork's parent
        os.dup2(self.output.fileno(), 1)
        os.dup2(self.output.fileno(), 2)
        signal.alarm(HANG)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs that a shell runs in the background ignore it
        status = 1
        try:
            for task in tasks:
                task()
            status = 0
        except MISTAKES as error:
            print(f"error: {explain(error, 'config')}", file=sys.stderr)
            status = 2
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def end(self) -> tuple[int, str]:
        """Wait for the fork. Return its exit status, or minus the signal that ended it, and what it printed."""
        _, status = os.waitpid(self.child, 0)
        # Open the file again: seeking in self.output would move the offset at which wandb's process may still write.
        with self.output, Path(self.output.name).open(encoding="utf-8") as output:
            return os.waitstatus_to_exitcode(status), output.read()


def in_a_fork(*tasks: Callable[[], object]) -> tuple[int, str]:
    """Do tasks in a fork, and return what `Fork.end` returns."""
    return Fork(*tasks).end()


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
