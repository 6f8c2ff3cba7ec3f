"""Write files atomically, open only regular files, and define UserError, the exception for mistakes of the user."""

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

from filelock import FileLock, Timeout


class UserError(Exception):
    """A mistake that the user can correct. The message is one line: what is wrong, what was given, what is right."""


@contextlib.contextmanager
def as_user_error(what: str):
    """Turn an OSError in the block into a UserError that says what could not be done, and why."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from error


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is an out-of-memory error of Python or torch."""
    phrases = ("allocate memory", "out of memory", "bad_alloc")
    while error is not None:
        if isinstance(error, MemoryError) or any(phrase in str(error) for phrase in phrases):
            return True
        error = error.__cause__ or error.__context__
    return False


def regular(name: str | Path, flags: int) -> int:
    """Open a regular file, following links. This is an `opener` for open().

    Raises OSError for devices, FIFOs and sockets: reading a device might not end, and opening a FIFO would block.
    open() itself refuses folders.
    """
    descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(name))
    return descriptor


def unlinked(name: str | Path, flags: int) -> int:
    """Open a regular file. This is an `opener` for files that this program modifies in place.

    Raises OSError for a link, and in the cases of `regular`.
    """
    with explaining_links():
        return regular(name, flags | os.O_NOFOLLOW)


@contextlib.contextmanager
def explaining_links():
    """Make the error of opening a link, which is not followed, say that the link must be removed."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "It is a link, which is not followed: remove it", error.filename) from error


@contextlib.contextmanager
def locked(path: Path, unsafe: str, waiting: str | None = None):
    """Hold a lock against other processes during a block. `path` is its file, which is removed when the block ends.

    If another process still holds the lock after 0.2 s, print the line `waiting` and wait for it; if `waiting` is None,
    raise filelock.Timeout. If the file system does not support locks, print the line `unsafe` and run the block without
    a lock. The lock ends when this process dies, even if processes that it has forked live on. Raises OSError if the
    file cannot be opened, or is a link or not a regular file.
    """
    make_folder(path.parent)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    lock = FileLock(path, fallback_to_soft=False)
    try:
        with explaining_links():
            try:
                # Not 0: if the holder removes the file while acquire() opens and locks it, acquire() must try again.
                lock.acquire(timeout=0.2)
            except Timeout:
                if waiting is None:
                    raise
                print(waiting, flush=True)
                lock.acquire()
    except OSError as error:
        # An error of opening the file names it. One of locking does not, and means that locks are not supported.
        if isinstance(error, Timeout) or error.filename is not None:
            raise
        print(unsafe, flush=True)
    try:
        yield
    finally:
        try:
            path.unlink(missing_ok=True)
        finally:
            lock.release()


@contextlib.contextmanager
def replacing(path: Path):
    """Yield a temporary path beside `path`. If the block succeeds, the file written there replaces `path`.

    The file is synced to the disk first, so that a power cut leaves the old file or the new one. A link to a file, to
    a folder or to nothing is replaced itself, not its target. A folder, a device, a FIFO or a socket, or a link to one
    of the last three, is not replaced. If the block fails, the temporary file is removed and `path` is unchanged; an
    OSError (disk full, no permission) becomes a UserError that names `path`. Temporary files of killed processes are
    removed.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    with as_user_error(f"cannot write {path}"):
        make_folder(path.parent)
        # The pattern also matches temporary files for files whose names begin with this one and a dot.
        with writing_in(path.parent, f".{glob.escape(path.name)}.*.tmp"):
            try:
                yield temporary
                sync(temporary)
                if path.exists() and not (path.is_file() or path.is_dir()):
                    raise OSError(errno.EINVAL, "Not a regular file", str(path))
                os.replace(temporary, path)
                sync(path.parent)
            finally:
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def writing_in(folder: Path, leftovers: str):
    """Hold a shared lock on a folder, so that other processes do not remove the temporary files in it.

    If no other process holds such a lock, first remove the files whose names match the pattern `leftovers`, which are
    temporary files that killed processes left. If the file system cannot lock folders, or if this user may not list the
    folder, these files stay.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_matching(folder, leftovers)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def remove_temporaries(folder: Path) -> None:
    """Remove all temporary files that killed processes left in a folder, under the conditions of `writing_in`."""
    with writing_in(folder, ".*.tmp"):
        pass


def remove_matching(folder: Path, pattern: str) -> None:
    """Remove the files in a folder whose names match a pattern. Keep folders."""
    for temporary in folder.glob(pattern):
        if temporary.is_symlink() or not temporary.is_dir():
            temporary.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a file, a link (not its target), or a folder with its contents. Do nothing if `path` does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and sync them to the disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # a folder that this user may write to but not list
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically, by `replacing`."""
    with replacing(path) as temporary, open(temporary, "xb") as file:
        file.write(content)


def write_json(path: Path, content: dict | list) -> None:
    """Write JSON in UTF-8. Infinities and NaN, which JSON does not have, become null.

    Bytes of a file name that the locale could not decode are escaped, since UTF-8 cannot hold them.
    """
    text = json.dumps(finite(content), ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def finite(content: object) -> object:
    """Return the content with None in place of each infinity and NaN."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
