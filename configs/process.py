"""A command as a process: what it prints, how it fails, and that it ends with the process that started it."""

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

from configs.startup import PARENT

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # which a terminal may obey
WAIT = 5.0  # seconds that a process gives the first one to say what is wrong
WITH_PARENT = "RWV_END_WITH_PARENT"  # in the environment of a command that another one started: that one's process id


class Lossy(io.FileIO):
    """A file in which what cannot be written, to a pipe that nobody reads or a full disk, is lost without an error."""

    def write(self, content: bytes) -> int:
        try:
            return super().write(content)
        except OSError:
            return len(content)


class Output(io.TextIOWrapper):
    """What is printed: on a terminal without characters that it would obey, as a text or a record may hold them."""

    def write(self, text: str) -> int:
        return super().write(CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text) if self.isatty() else text)


def print_without_fail() -> None:
    """From now on printing neither fails nor ends a run, whatever becomes of who reads it, and in any locale."""
    # Where a stream is closed, the next file that is opened would take its place, and what libraries print go there.
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    for name, kind, errors in (("stdout", Output, "replace"), ("stderr", io.TextIOWrapper, "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, open until the process ends
        elif stream is getattr(sys, f"__{name}__"):  # nobody has put another one in its place
            stream.flush()
            raw = io.BufferedWriter(Lossy(stream.fileno(), "w", closefd=False))
            wrapped = kind(
                raw,
                encoding=stream.encoding,
                errors=errors,
                line_buffering=stream.line_buffering or stream.write_through,
            )
            setattr(sys, name, wrapped)


def give_up(message: str, status: int) -> None:
    """End with one line; of torchrun's processes the first says it, and the others wait for torchrun to end them."""
    tell_torchrun(message)
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(WAIT)
    sys.exit(status)


def process_count() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def tell_torchrun(message: str) -> None:
    """Leave the message where torchrun, if that started us, looks for the last lines of its own report."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is open any more
        details = {"py_callstack": f"\n\nerror: {message}\n", "timestamp": int(time.time())}
        content = json.dumps({"message": {"message": message, "extraInfo": details}})
        Path(path).write_text(content, encoding="utf-8")


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
