"""Prepare the process of a command. Commands import this module first, before imports that take seconds."""

import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARENT = os.getppid()  # read early, while the parent is most likely still alive


def is_command() -> bool:
    """Return whether this process was started as train.py, evaluate.py or a module of scripts/."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:  # python -c, or an interactive session
        return False
    path = Path(file).resolve()
    return path.parent == ROOT / "scripts" or path in (ROOT / "train.py", ROOT / "evaluate.py")


def raw_arguments() -> list[bytes]:
    """Return the arguments of the process as bytes. Those in sys.argv were decoded, which cannot always be undone."""
    try:
        return Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:  # not Linux
        return [os.fsencode(argument) for argument in sys.orig_argv]


def read_arguments_as_utf8() -> None:
    """Restart Python in UTF-8 mode if the locale misreads UTF-8 arguments, which would change the name of the run."""
    if sys.getfilesystemencoding() == "utf-8":
        return
    given = raw_arguments()[1:]
    if b" ".join(given).isascii():
        return
    try:
        b" ".join(given).decode("utf-8")
    except UnicodeDecodeError:  # the arguments are in the encoding of the locale
        return
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *given])


if is_command():
    # Python's default handler would print a traceback during the imports. configs.cli.run_command restores it later.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    read_arguments_as_utf8()
