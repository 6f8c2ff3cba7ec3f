"""Train without a writable folder, a home, a user, a network, a compiler, a login, or enough memory."""

import ctypes
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

from omegaconf import DictConfig

from tests.torture.forks import Fault, failed, in_a_fork, not_refused
from tests.torture.runs import UNMIRRORED, fresh, one_run, what_differs
from training import device

MOUNTS, USERS, NETWORK = 0x20000, 0x10000000, 0x40000000  # Linux's CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET
# Linux's MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC and MS_PRIVATE.
READ_ONLY, REMOUNT, BIND, ALL, PRIVATE = 1, 32, 4096, 16384, 1 << 18
KEPT = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC  # flags that a remount must keep
NOWHERE = "/proc/nowhere"  # a folder that cannot be created
ALLOWED = 100_000_000  # bytes of memory beyond those in use
REFUSES = "this machine does not permit the test"

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


def read_only(*folders: Path) -> None:
    """Make these folders read-only, except for disks that are mounted below them."""
    apart()
    for folder in folders:
        folder.mkdir(exist_ok=True)
        mount(str(folder), folder, flags=BIND | ALL)
        mount("none", folder, flags=REMOUNT | BIND | READ_ONLY | (os.statvfs(folder).f_flag & KEPT))


def without(*names: str, **values: str) -> None:
    """Remove and set environment variables, and forget the imported wandb, which has read them."""
    for name in [name for name in sys.modules if name.split(".")[0] == "wandb"]:
        del sys.modules[name]
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(values)


def nobody(**home: str) -> None:
    """Become a user without a name on this machine, as in a container."""
    without("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", **home)
    become(4711)


def no_network() -> None:
    without(*(name for name in os.environ if name.startswith("PIP_")), PIP_CONFIG_FILE=os.devnull)
    apart()


def no_compiler() -> None:
    without("CXX", PATH=NOWHERE)
    device.COMPILE_HOURS = 0  # as if the run were long


def little_memory() -> None:
    taken = re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    resource.setrlimit(resource.RLIMIT_DATA, (int(taken[1]) * 1024 + ALLOWED,) * 2)


class Lack(NamedTuple):
    """What is taken from a run, the run's overrides, and its expected end.

    If `ends`, the run completes and prints `words`. Otherwise it fails with one error line that contains `words`.
    """

    take: Callable[[], object]
    more: tuple[str, ...] = ()
    words: str = ""
    ends: bool = False


def lacks_of(place: Path) -> dict[str, Lack]:
    """Return everything that can be taken from a run in a folder, by name."""
    wall, compile_it, wide = "Read-only file system", "train.compile={}".format, "model.dim={}".format
    home = str(place.parent)  # outside `place`, so that files of libraries do not count as the run's
    no_key = partial(without, "WANDB_API_KEY", HOME=home, NETRC=f"{home}/netrc")
    slower = "training without torch.compile, which needs a C++ compiler: on a CPU this is 1.2 times slower"
    mirror, cache = (f"wandb.dir={place}/mirror",), f"data.cache={place}.cache"
    return {
        "runs": Lack(partial(read_only, place / "runs"), (), wall),
        "cache": Lack(partial(read_only, place / "cache"), (), wall),
        "mirror": Lack(partial(read_only, place / "mirror"), mirror, "wandb.mode=disabled needs no folder"),
        "home": Lack(partial(without, "HOME"), ends=True),
        "home's folder": Lack(partial(without, HOME=NOWHERE), ends=True),
        "user": Lack(nobody, (), "home directory"),
        "user's name": Lack(partial(nobody, HOME=home), ends=True),
        "network": Lack(no_network, ("data=sanguo", cache), "is there a network? A text of your own needs none"),
        "hub": Lack(no_network, ("data=hub", "data.name=no/text", cache), "cannot reach no/text on the hub"),
        "compiler": Lack(no_compiler, (compile_it("true"),), "train.compile=true needs a C++ compiler"),
        "compiler, unasked": Lack(no_compiler, (compile_it("null"),), slower, ends=True),
        "login": Lack(no_key, ("wandb.mode=online",), "wandb.mode=offline needs no account"),
        "memory for a model": Lack(little_memory, (wide(4096), UNMIRRORED), "need more memory than there is"),
        "memory for a step": Lack(little_memory, (wide(768), UNMIRRORED), "not enough memory for this run"),
    }


def lacks(cfg: DictConfig, folder: Path, rng: Random) -> Iterator[Fault]:
    """A run lacks something that it needs or can use. It completes with the same results, or fails with one line that
    names what is missing. After a failure, a run that lacks nothing completes in the same folder."""
    in_a_fork(partial(one_run, fresh(folder / "whole")))
    for number, name in enumerate(list(lacks_of(folder))[: cfg.lacks]):
        yield without_it(name, fresh(folder / str(number)), folder / "whole")


def without_it(name: str, place: Path, whole: Path) -> Fault:
    """Train without one thing, if the machine permits that, and return what was lost."""
    lack = lacks_of(place)[name]
    status, output = in_a_fork(lack.take, lambda: print("taken"), partial(one_run, place, *lack.more))
    if "taken" not in output:
        return Fault(name, [f"{REFUSES}: {output[-300:]}"], tried=False)
    if lack.ends:
        lost = failed(status, output) + [f"the output lacks {lack.words!r}"] * (lack.words not in output)
        return Fault(name, lost or what_differs(place, whole))
    lost = not_refused(status, output, lack.words)
    lost += [f"{path.name} is left over" for path in place.rglob("*") if path.suffix in (".tmp", ".work")]
    return Fault(name, lost or failed(*in_a_fork(partial(one_run, place))) or what_differs(place, whole))
