"""Writing files so that they are whole or not there; what the user can mend."""

import contextlib
import errno
import fcntl
import glob
import json
import math
import os
import shutil
import stat
import uuid
from pathlib import Path


class UserError(Exception):
    """Something the user can mend: one line that says what is wrong and what would be right."""


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it followed, says that memory is at its end: Python's, or torch's on CPU or GPU."""
    said = ("allocate memory", "out of memory", "bad_alloc")
    while error is not None:
        if isinstance(error, MemoryError) or any(words in str(error) for words in said):
            return True
        error = error.__cause__ or error.__context__
    return False


def regular(name: str | Path, flags: int) -> int:
    """Open a regular file, as the `opener` of open(); links are followed.

    OSError for anything else, at once: a device would be read without an end, a FIFO waited for.
    """
    descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # open() itself refuses folders
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(name))
    return descriptor


def unlinked(name: str | Path, flags: int) -> int:
    """Open a regular file that is not a link, for files that this program writes to in place."""
    try:
        return regular(name, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "It is a link, which is not followed: remove it", str(name)) from error


@contextlib.contextmanager
def replacing(path: Path):
    """A temporary path beside `path`, of a file that takes its place when the block succeeds.

    The file is on the disk, under its name, when the block ends: a power cut leaves the old file or the new one.
    It does not take the place of a folder or a device; it takes that of a link, and not of what the link leads to.
    Where the block fails, the temporary is removed and `path` is as it was; an OSError (disk full, no permission)
    becomes a UserError that names `path`. Temporaries of killed processes are removed.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        make_folder(path.parent)
        with writing_beside(path):
            try:
                yield temporary
                sync(temporary)
                if path.exists() and not (path.is_file() or path.is_dir()):
                    raise OSError(errno.EINVAL, "Not a regular file", str(path))
                os.replace(temporary, path)
                sync(path.parent)
            finally:
                temporary.unlink(missing_ok=True)
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
            remove_temporaries(path.parent, path.name)
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_SH)
        yield
    finally:
        os.close(folder)


def remove_temporaries(folder: Path, name: str = "") -> None:
    """Remove the temporaries of killed processes for the file `name`, or for all; they are files, no folders."""
    pattern = f".{glob.escape(name)}.*.tmp" if name else ".*.tmp"
    for half in folder.glob(pattern):
        if half.is_symlink() or not half.is_dir():
            half.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it, if there is one; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it where they are missing, so that a power cut does not take them away again."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # of a folder that one may write to and not list
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems have no such thing for folders
            raise
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole: through a temporary, flushed to the disk before it takes its place."""
    with replacing(path) as temporary, open(temporary, "xb") as file:
        file.write(content)


def write_json(path: Path, content: dict | list) -> None:
    """As UTF-8. What UTF-8 cannot hold, of names that were not in the encoding of the locale, is escaped.

    Infinities and NaN, which JSON does not have, become null.
    """
    text = json.dumps(finite(content), ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def finite(content: object) -> object:
    """The same with None in place of each infinity and NaN."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
