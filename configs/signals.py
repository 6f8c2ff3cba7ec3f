"""Signals that ask a run to stop: it comes to a good end of its own, and says so."""

import signal
from contextlib import contextmanager


class Interrupted(SystemExit):
    """SIGINT or SIGTERM came; the state is saved. The code is the shell's for that signal."""


def under_submitit() -> bool:
    """Whether submitit, which runs a sweep's jobs on Slurm, waits for SIGUSR2 in this process."""
    return callable(signal.getsignal(signal.SIGUSR2))


@contextmanager
def stop_signals(submitit: bool = False):
    """A list that holds SIGINT or SIGTERM once it came; the second one interrupts at once.

    For submitit also SIGUSR2, and any number of signals.
    """
    came: list[signal.Signals] = []

    def handle(number, _frame):
        if came and not submitit:
            raise KeyboardInterrupt
        came.append(signal.Signals(number))

    numbers = [signal.SIGINT, signal.SIGTERM] + [signal.SIGUSR2] * submitit
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hand_on(number: signal.Signals) -> None:
    """Raise a signal for submitit. Slurm answers the scontrol that SIGUSR2 makes it call with SIGTERM, that too."""
    before = signal.getsignal(signal.SIGTERM)
    if number == signal.SIGUSR2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGTERM, before)
