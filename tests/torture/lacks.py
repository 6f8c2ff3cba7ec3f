"""Runs that lack something: a folder to write to, a home, a user, a network, a compiler, a login, memory."""

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

from tests.torture.forks import Fault, failed, fell, in_a_fork
from tests.torture.runs import UNMIRRORED, fresh, one_run, what_differs
from training import device

MOUNTS, USERS, NETWORK = 0x20000, 0x10000000, 0x40000000  # Linux's CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET
READ_ONLY, REMOUNT, BIND, ALL, PRIVATE = 1, 32, 4096, 16384, 1 << 18  # MS_...
KEPT = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC  # which a remount may not take away
NOWHERE = "/proc/nowhere"  # which nobody can make
ALLOWED = 100_000_000  # bytes of memory beyond what is taken already
REFUSES = "this machine does not let it be tried"

libc = ctypes.CDLL(None, use_errno=True)


def checked(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


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


def mount(source: str, folder: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    texts = (source.encode(), str(folder).encode(), kind.encode())
    checked(libc.mount(*texts, ctypes.c_ulong(flags), options.encode()))


def read_only(*folders: Path) -> None:
    """Nothing below these folders can be written, but for disks below them."""
    apart()
    for folder in folders:
        folder.mkdir(exist_ok=True)
        mount(str(folder), folder, flags=BIND | ALL)
        mount("none", folder, flags=REMOUNT | BIND | READ_ONLY | (os.statvfs(folder).f_flag & KEPT))


def without(*names: str, **values: str) -> None:
    """An environment without some variables, and with others changed, for a wandb that was not imported before."""
    for name in [name for name in sys.modules if name.split(".")[0] == "wandb"]:
        del sys.modules[name]
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(values)


def nobody(**home: str) -> None:
    """A user whom the machine does not know, as in a container."""
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
    """Something is taken from a run with these overrides: it is refused with these words, or ends, saying them."""

    take: Callable[[], object]
    more: tuple[str, ...] = ()
    words: str = ""
    ends: bool = False


def lacks_of(place: Path) -> dict[str, Lack]:
    """Of each thing that can be taken from a run in a folder, what is done and what it has to say."""
    wall, compile_it, wide = "Read-only file system", "train.compile={}".format, "model.dim={}".format
    home = str(place.parent)  # what libraries leave there is not the run's
    no_key = partial(without, "WANDB_API_KEY", HOME=home, NETRC=f"{home}/netrc")
    slower = "training without torch.compile, which needs a C++ compiler: on a CPU this is 1.2 times slower"
    mirror, cache = (f"wandb.dir={place}/mirror",), f"data.cache={place}.cache"
    return {
        "runs": Lack(partial(read_only, place / "runs"), (), wall),
        "cache": Lack(partial(read_only, place / "cache"), (), wall),
        "mirror": Lack(partial(read_only, place / "mirror"), mirror, "wandb.mode=disabled needs none"),
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
    """A run lacks what it needs, or might want. It comes to the same end without it, or says so in one line, and the
    run that has it again ends as if nothing had been."""
    in_a_fork(partial(one_run, fresh(folder / "whole")))
    for number, name in enumerate(list(lacks_of(folder))[: cfg.lacks]):
        yield without_it(name, fresh(folder / str(number)), folder / "whole")


def without_it(name: str, place: Path, whole: Path) -> Fault:
    """What is lost where something is taken away, if the machine allows that."""
    lack = lacks_of(place)[name]
    status, said = in_a_fork(lack.take, lambda: print("taken"), partial(one_run, place, *lack.more))
    if "taken" not in said:
        return Fault(name, [f"{REFUSES}: {said[-300:]}"], tried=False)
    if lack.ends:
        lost = failed(status, said) + [f"nothing says {lack.words}"] * (lack.words not in said)
        return Fault(name, lost or what_differs(place, whole))
    lost = fell(status, said, lack.words)
    lost += [f"{path.name} is left behind" for path in place.rglob("*") if path.suffix in (".tmp", ".work")]
    return Fault(name, lost or failed(*in_a_fork(partial(one_run, place))) or what_differs(place, whole))
