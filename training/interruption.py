"""How a run ends before its last step: it was asked to stop and saves its state first, or another process failed."""

import signal
import sys
from contextlib import contextmanager

import torch.distributed as dist

GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # in gloo's messages when a peer died
PEER_DIED = "another process of this run died: see its output"


class Interrupted(SystemExit):
    """Raised to exit after SIGINT, SIGTERM or SIGHUP, with 128 plus the signal's number as the exit status.

    The trainer saves the state first, unless torch.compile failed because the signal also ended its C++ compiler.
    """


class PeerFailed(Exception):
    """Another process of this run has failed; the message says which one, and why."""


class ExitWithPeers(SystemExit):
    """Raised to end this process after another process of its run has failed."""


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


def exit_with_peers(message: str, first: bool) -> ExitWithPeers:
    """Return the exception to raise. In the `first` process, also print `message`, the reason why the run ends."""
    if first:
        print(f"error: {message}", file=sys.stderr, flush=True)
    return ExitWithPeers(1)


def peer_is_gone(error: BaseException) -> bool:
    """Return whether an error is one that is raised in a process when a peer has died."""
    return isinstance(error, dist.DistError) or any(words in str(error) for words in GONE)
