"""What every command does before the imports that take seconds, by importing this module first."""

import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARENT = os.getppid()  # noted while the parent is most likely alive


def is_command() -> bool:
    """Whether this process was started as train.py, evaluate.py or one of scripts/."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return path is not None and Path(path).resolve().parent in (ROOT, ROOT / "scripts")


def read_arguments_as_utf8() -> None:
    """Start Python anew in its UTF-8 mode where the locale misreads arguments in UTF-8: they would name another run."""
    given = b" ".join(map(os.fsencode, sys.argv))
    if sys.getfilesystemencoding() == "utf-8" or given.isascii():
        return
    try:
        given.decode("utf-8")
    except UnicodeDecodeError:  # they are in the encoding of the locale
        return
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


if is_command():
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # which prints a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until configs.cli.main
    read_arguments_as_utf8()
