"""Writing files so that they are whole or not there; what the user can mend."""

import contextlib
import fcntl
import glob
import json
import os
import uuid
from pathlib import Path


class UserError(Exception):
    """Something the user can mend: one line that says what is wrong and what would be right."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is at its end: Python's, or torch's on a CPU or a GPU."""
    said = ("allocate memory", "out of memory", "bad_alloc")
    return isinstance(error, MemoryError) or any(words in str(error) for words in said)


@contextlib.contextmanager
def replacing(path: Path):
    """A temporary path beside `path` that takes its place when the block succeeds.

    Works for files and folders; a file does not take a folder's place. Where the block fails, the
    temporary is removed and `path` is as it was; an OSError (disk full, no permission) becomes a
    UserError that names `path`. What a killed process left of its own try is removed.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing_beside(path):
            try:
                yield temporary
                if path.is_dir() and temporary.is_dir():  # a folder replaces empty folders only; a file, none
                    remove(path)
                os.replace(temporary, path)
            finally:
                remove(temporary)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def writing_beside(path: Path):
    """Tell the other processes, by a shared lock on the folder, that temporaries of living ones may lie there.

    When nobody else writes there, those of `path` are what killed ones left. Where folders cannot be locked, they stay.
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for half in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
                remove(half)
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_SH)
        yield
    finally:
        os.close(folder)


def remove(path: Path) -> None:
    """Remove a file or a folder of files, if there is one."""
    if path.is_dir():
        for child in path.iterdir():
            remove(child)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole: through a temporary, flushed to the disk before it takes its place."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, content: dict | list) -> None:
    write_bytes(path, (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode())
