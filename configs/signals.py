"""Signals that ask a run to stop: it comes to a good end of its own, and says so."""

import functools
import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager

from configs.startup import PARENT

WITH_PARENT = "RWV_END_WITH_PARENT"  # in the environment of a command that another one started: that one's process id


class Interrupted(SystemExit):
    """SIGINT, SIGTERM or SIGHUP came; the state is saved. The code is the shell's for that signal."""


def under_submitit() -> bool:
    """Whether submitit, which runs a sweep's jobs on Slurm, waits for SIGUSR2 in this process."""
    return callable(signal.getsignal(signal.SIGUSR2))


@contextmanager
def stop_signals(submitit: bool = False):
    """A list that holds SIGINT, SIGTERM or SIGHUP once it came; a second one interrupts at once.

    A second SIGHUP does not: a terminal that is closed sends several; nor does any for submitit, which sends SIGUSR2.
    Where SIGHUP is ignored, as under nohup, it stays so.
    """
    came: list[signal.Signals] = []

    def handle(number, _frame):
        if came and not submitit and number != signal.SIGHUP:
            raise KeyboardInterrupt
        came.append(signal.Signals(number))

    numbers = [signal.SIGINT, signal.SIGTERM] + [signal.SIGUSR2] * submitit
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ending_with_this() -> dict[str, str]:
    """The environment of a command that this process starts and that is to end with it."""
    return os.environ | {WITH_PARENT: str(os.getpid())}


@functools.cache
def end_with_parent() -> None:
    """From now on this process ends when the one that started it has died, even by SIGKILL: as after SIGTERM.

    That includes a parent that died while this process was still importing.
    """
    started_by = multiprocessing.parent_process()
    parent = started_by.pid if started_by else int(os.environ.pop(WITH_PARENT, PARENT))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # a run saves its state
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def hand_on(number: signal.Signals) -> None:
    """Raise a signal for submitit. Slurm answers the scontrol that SIGUSR2 makes it call with SIGTERM, that too."""
    before = signal.getsignal(signal.SIGTERM)
    if number == signal.SIGUSR2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGTERM, before)
