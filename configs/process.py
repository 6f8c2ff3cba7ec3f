"""The process of a command: printing safely, ending with an error, and ending together with the parent process."""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from configs.startup import PARENT

# Control characters, which a terminal may obey, except for tabs and line feeds.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
WAIT = 5.0  # seconds that the other processes wait while the first one prints an error


def without_controls(text: str) -> str:
    """Return the text with its control characters replaced."""
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


class Lossy(io.FileIO):
    """A file that ignores write errors, such as those of a full disk, a closed pipe or a pipe that nobody empties."""

    def write(self, content: bytes) -> int:
        try:
            written = super().write(content)
        except OSError:
            return len(content)
        return len(content) if written is None else written  # None: a pipe that does not block is full


class Output(io.TextIOWrapper):
    """A text stream that, on a terminal, replaces the control characters that texts and records may contain."""

    def write(self, text: str) -> int:
        return super().write(without_controls(text) if self.isatty() else text)


def print_without_fail() -> None:
    """Make stdout and stderr ignore write errors, and replace or escape characters that the locale cannot encode."""
    # If descriptor 0, 1 or 2 is closed, the next file that is opened would get its number and, with 1 or 2, the output.
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    for name, kind, errors in (("stdout", Output, "replace"), ("stderr", io.TextIOWrapper, "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, open until the process ends
        elif stream is getattr(sys, f"__{name}__"):  # not replaced by a test or a library
            stream.flush()
            raw = io.BufferedWriter(Lossy(stream.fileno(), "w", closefd=False))
            by_line = stream.line_buffering or stream.write_through
            setattr(sys, name, kind(raw, stream.encoding, errors, line_buffering=by_line))


def give_up(message: str, status: int) -> NoReturn:
    """Print an error line and exit with `status`.

    Under torchrun, only the first process prints the line; the others exit after WAIT seconds.
    """
    tell_torchrun(message)
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(WAIT)
    sys.exit(status)


def process_count() -> int:
    """Return the number of processes that torchrun started, or 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def tell_torchrun(message: str) -> None:
    """Write the message to the file that torchrun reads for its error report, if torchrun started this process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun will send it; there is nothing left to save
        details = {"py_callstack": f"\n\nerror: {message}\n", "timestamp": int(time.time())}
        content = json.dumps({"message": {"message": message, "extraInfo": details}})
        with contextlib.suppress(OSError):  # a full disk, for example
            Path(path).write_text(content, encoding="utf-8")


@functools.cache
def end_with_parent() -> None:
    """Make this process send itself SIGTERM when its parent process has died, even by SIGKILL.

    If it handles SIGTERM, it ends with status 1 as soon as the handler has been removed. This also works if the
    parent died while this process was still importing.
    """
    started_by = multiprocessing.parent_process()
    parent = started_by.pid if started_by else PARENT

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        # As long as there is a handler of SIGTERM, a run may still be saving its state.
        while signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
