"""Handle signals that ask a run to stop, so that it can save its state first."""

import signal
from contextlib import contextmanager


class Interrupted(SystemExit):
    """Raised to exit after SIGINT, SIGTERM or SIGHUP, with 128 plus the signal's number as the exit status.

    The trainer saves the state first, unless torch.compile failed because the signal also ended its C++ compiler.
    """


def under_submitit() -> bool:
    """Return whether submitit, which runs a sweep's jobs on Slurm, handles SIGUSR2 in this process."""
    return callable(signal.getsignal(signal.SIGUSR2))


@contextmanager
def stop_signals(submitit: bool = False):
    """Yield a list to which SIGINT, SIGTERM and SIGHUP are added when this process receives them.

    Signals after the first raise KeyboardInterrupt, except for SIGHUP, because closing a terminal sends it several
    times. With `submitit`, SIGUSR2 is added too, and no signal raises KeyboardInterrupt. If SIGHUP is ignored, as under
    nohup, it stays ignored.
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
    """Send a received signal to this process again, after `stop_signals` has restored the earlier handlers.

    submitit has such a handler. On SIGUSR2 it calls scontrol to queue the job again. Slurm then sends SIGTERM, which is
    ignored meanwhile.
    """
    before = signal.getsignal(signal.SIGTERM)
    if number == signal.SIGUSR2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGTERM, before)
