"""Tasks in copies of this process, and how they end."""

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

import datasets  # noqa: F401, here once and not in every fork
import wandb.sdk.launch  # noqa: F401
from hydra.core.global_hydra import GlobalHydra

from configs.messages import MISTAKES, explain

HANG = 120  # seconds after which a run counts as hanging


class Fault(NamedTuple):
    """A fault, what was lost by it, and whether this machine let it be tried."""

    name: str
    lost: list[str]
    tried: bool = True


def typed(script: ModuleType, *arguments: str) -> None:
    """What a command line does, in a process that has imported all it needs."""
    GlobalHydra.instance().clear()
    sys.argv = ["script", *arguments]
    script.run()


class Fork:
    """Tasks in a copy of this process, which goes on beside it."""

    def __init__(self, *tasks: Callable[[], object]):
        self.said = tempfile.NamedTemporaryFile("w", encoding="utf-8")  # noqa: SIM115, closed by end()
        self.child = os.fork()
        if self.child == 0:
            self.do(tasks)

    def do(self, tasks: tuple[Callable[[], object], ...]) -> None:
        multiprocessing.process._parent_process = None  # the torture's, which is not that of this copy of a worker
        os.dup2(self.said.fileno(), 1)
        os.dup2(self.said.fileno(), 2)
        signal.alarm(HANG)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
        status = 1
        try:
            for task in tasks:
                task()
            status = 0
        except MISTAKES as error:
            print(f"error: {explain(error, 'config')}", file=sys.stderr)
            status = 2
        except SystemExit as end:
            status = end.code
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def end(self) -> tuple[int, str]:
        """Its exit status, or minus the signal that ended it; and what it printed."""
        _, status = os.waitpid(self.child, 0)
        # Opened anew, because wandb's process may still write at the offset that the copies share.
        with self.said, Path(self.said.name).open(encoding="utf-8") as said:
            return os.waitstatus_to_exitcode(status), said.read()


def in_a_fork(*tasks: Callable[[], object]) -> tuple[int, str]:
    """Do tasks in a copy of this process: its exit status, or minus the signal that ended it; and what it printed."""
    return Fork(*tasks).end()


def failed(status: int, said: str, expected: int = 0) -> list[str]:
    """How a command ended, if not with this exit status."""
    return [f"exit status {status}: {said[-300:]}"] * (status != expected)


def fell(status: int, said: str, words: str = "") -> list[str]:
    """How a command ended that was not refused in one line, its last, with these words in it, and exit status 2."""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    refused = status == 2 and errors == said.splitlines()[-1:] and words in errors[0] and "Traceback" not in said
    return [] if refused else [f"exit status {status}, not refused in a line with {words!r}: {said[-300:]}"]
