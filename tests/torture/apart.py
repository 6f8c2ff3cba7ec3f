"""A process apart from its machine: with disks of its own, folders that it cannot write to, no network, another user.

All of it is Linux's namespaces, which end with the process. Where a machine grants none of them an OSError is raised.
"""

import ctypes
import os
from pathlib import Path

MOUNTS, USERS, NETWORK = 0x20000, 0x10000000, 0x40000000  # CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET
READ_ONLY, REMOUNT, BIND, ALL, PRIVATE = 1, 32, 4096, 16384, 1 << 18  # MS_...
KEPT = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC  # which a remount may not take away

libc = ctypes.CDLL(None, use_errno=True)


def apart() -> None:
    """What this process mounts from here on is its own, and of networks it has none."""
    try:
        checked(libc.unshare(MOUNTS | NETWORK))
    except PermissionError:
        become(0, MOUNTS | NETWORK)
    mount("none", Path("/"), flags=ALL | PRIVATE)


def become(user: int, also: int = 0) -> None:
    """A user of another number, who owns what this one owns."""
    before = os.getuid()
    checked(libc.unshare(USERS | also))
    Path("/proc/self/uid_map").write_text(f"{user} {before} 1", encoding="utf-8")


def small_disk(folder: Path, size: int) -> None:
    """An empty disk of `size` bytes at `folder`."""
    mount("tmpfs", folder, "tmpfs", options=f"size={size}")


def mount_again(folder: Path) -> None:
    """A folder becomes a disk of its own, with what is in it."""
    mount(str(folder), folder, flags=BIND | ALL)


def read_only(folder: Path) -> None:
    """Nothing below `folder` can be written, but for disks below it."""
    mount_again(folder)
    mount("none", folder, flags=REMOUNT | BIND | READ_ONLY | (os.statvfs(folder).f_flag & KEPT))


def mount(source: str, folder: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    texts = (source.encode(), str(folder).encode(), kind.encode())
    checked(libc.mount(*texts, ctypes.c_ulong(flags), options.encode()))


def checked(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
