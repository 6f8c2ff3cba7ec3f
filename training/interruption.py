"""Signals that ask a run to stop: it comes to a good end of its own, and says so."""

import signal
from contextlib import contextmanager


class Interrupted(SystemExit):
    """SIGINT, SIGTERM or SIGHUP was received; the state is saved. The code is the shell's for that signal."""


def under_submitit() -> bool:
    """Return whether submitit, which runs a sweep's jobs on Slurm, waits for SIGUSR2 in this process."""
    return callable(signal.getsignal(signal.SIGUSR2))


@contextmanager
def stop_signals(submitit: bool = False):
    """Give a list to which received signals (SIGINT, SIGTERM, SIGHUP) are added; a second one interrupts at once.

    A second SIGHUP does not: a terminal that is closed sends several; nor does any for submitit, which sends SIGUSR2.
    Where SIGHUP is ignored, as under nohup, it stays so.
    """
    received: list[signal.Signals] = []

    def handle(number, _frame):
        if received and not submitit and number != signal.SIGHUP:
            raise KeyboardInterrupt
        received.append(signal.Signals(number))

    numbers = [signal.SIGINT, signal.SIGTERM] + [signal.SIGUSR2] * submitit
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_for_submitit(number: signal.Signals) -> None:
    """Raise a signal for submitit. Slurm answers the scontrol that SIGUSR2 makes it call with SIGTERM, that too."""
    before = signal.getsignal(signal.SIGTERM)
    if number == signal.SIGUSR2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGTERM, before)
