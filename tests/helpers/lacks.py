"""python -m tests.helpers.lacks WHAT ...: take WHAT from this process, and then run train.py with the other arguments.

WHAT is a key of TAKE, or read-only:FOLDER for a folder that becomes read-only. The exit status is NOT_PERMITTED if the
machine does not permit this.
"""

import ctypes
import os
import re
import resource
import sys
from functools import partial
from pathlib import Path

MOUNTS, USERS, NETWORK = 0x20000, 0x10000000, 0x40000000  # Linux's CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET
# Linux's MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC and MS_PRIVATE.
READ_ONLY, REMOUNT, BIND, ALL, PRIVATE = 1, 32, 4096, 16384, 1 << 18
KEPT = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC  # flags that a remount must keep
NOWHERE = "/proc/nowhere"  # a folder that cannot be created
NOT_PERMITTED = 77  # an exit status that no command of ours has
ALLOWED = 300_000_000  # bytes of memory beyond those in use

libc = ctypes.CDLL(None, use_errno=True)


def checked(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def apart() -> None:
    """Give this process its own mounts and no network."""
    try:
        checked(libc.unshare(MOUNTS | NETWORK))
    except PermissionError:
        become(0, MOUNTS | NETWORK)
    mount("none", Path("/"), flags=ALL | PRIVATE)


def become(user: int, also: int = 0) -> None:
    """Enter a user namespace in which this process, and the owner of its files, has the id `user`."""
    before = os.getuid()
    checked(libc.unshare(USERS | also))
    Path("/proc/self/uid_map").write_text(f"{user} {before} 1", encoding="utf-8")


def mount(source: str, folder: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    texts = (source.encode(), str(folder).encode(), kind.encode())
    checked(libc.mount(*texts, ctypes.c_ulong(flags), options.encode()))


def read_only(folder: Path) -> None:
    """Make a folder read-only, except for disks that are mounted below it."""
    apart()
    folder.mkdir(exist_ok=True)
    mount(str(folder), folder, flags=BIND | ALL)
    mount("none", folder, flags=REMOUNT | BIND | READ_ONLY | (os.statvfs(folder).f_flag & KEPT))


def without(*names: str, **values: str) -> None:
    """Remove and set environment variables."""
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(values)


def nobody(*names: str) -> None:
    """Become a user without a name on this machine, as in a container. Also remove environment variables."""
    without("USER", "LOGNAME", "LNAME", "USERNAME", *names)
    become(4711)


def no_network() -> None:
    without(*(name for name in os.environ if name.startswith("PIP_")), PIP_CONFIG_FILE=os.devnull)
    apart()


def no_compiler() -> None:
    from training import device

    without("CXX", PATH=NOWHERE)
    device.COMPILE_HOURS = 0  # as if the run were long


def little_memory() -> None:
    import train  # noqa: F401, the memory that its import takes is in use already

    taken = re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    resource.setrlimit(resource.RLIMIT_DATA, (int(taken[1]) * 1024 + ALLOWED,) * 2)


TAKE = {
    "home": partial(without, "HOME"),
    "home's folder": partial(without, HOME=NOWHERE),
    "user": partial(nobody, "HOME"),
    "user's name": nobody,
    "network": no_network,
    "compiler": no_compiler,
    "login": partial(without, "WANDB_API_KEY", HOME=NOWHERE, NETRC=NOWHERE),
    "memory": little_memory,
}

if __name__ == "__main__":
    what, _, folder = sys.argv.pop(1).partition(":")
    take = partial(read_only, Path(folder)) if what == "read-only" else TAKE[what]
    try:
        take()
    except OSError as error:
        print(f"{what} cannot be taken from a process of this machine: {error}", file=sys.stderr)
        sys.exit(NOT_PERMITTED)

    from train import run  # only now, because wandb reads the environment when it is imported

    run()
