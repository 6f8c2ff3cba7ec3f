"""Runs that lack something: room on a disk, a folder to write to, memory, a home, a network, a compiler."""

import itertools
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

import train
from configs.cli import compose
from data.files import UserError
from tests.torture.apart import apart, become, mount_again, read_only, small_disk
from tests.torture.harm import half_done
from tests.torture.kills import fresh, one_run, opens_to_write, what_differs
from tests.torture.small import HANG, Untried, given, in_a_fork, write_text
from training.provenance import ROOT
from training.record import Record

DISK = 1 << 23  # bytes, more than a run writes
# Files that a run writes, each with which of its writes there is no room for.
FILES = [
    ("state.pt", 3), ("ids.bin", 1), ("counts", 1), ("vocabulary.json", 1), ("meta.json", 1), (".lock", 2),
    ("config.yaml", 1), ("metrics.jsonl", 1), ("metrics.jsonl", 9), ("state.pt", 1), ("model.safetensors", 1),
    ("summary.json", 1), ("summary.json", 2), (".lock", 1), (".html", 2),
]  # fmt: skip
ALLOWED = 100_000_000  # bytes of memory beyond what is taken already
LINES = "滚滚长江东逝水浪花淘尽英雄\n" * 1000
NOWHERE = "/proc/nowhere"  # which nobody can make


def disks(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A disk is full when a run writes a file: the run says so, and ends as if nothing had been once there is room."""
    whole = undisturbed(folder)
    for number in range(cfg.disks):
        name, time = FILES[number] if number < len(FILES) else ("", rng.randint(1, 50))
        fault = partial(full_disk, name, time, rng.choice([0, 1 << 12, 1 << 14]))
        yield outcome(f"disk {number}, write {time} of {name or 'any'}", fault, apart, folder / str(number), whole)


def starve(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A run lacks what it needs, or might want: it says so in one line, or comes to the same end without it."""
    whole = undisturbed(folder)
    faults = {fault.__name__: fault for fault in NEEDS}
    for name in cfg.starve:
        if name not in faults:
            raise UserError(f"starve is a list of {', '.join(faults)}: got {name}")
        write_text(folder / name)
        yield outcome(name, faults[name], NEEDS[faults[name]], folder / name, whole)


def undisturbed(folder: Path) -> Path:
    whole = fresh(folder / "whole")
    status, said = in_a_fork(partial(one_run, whole))
    if status:
        raise UserError(f"a run that nobody disturbs fails, exit status {status}: {said}")
    return whole


def outcome(name: str, fault: Callable, needs: Callable | None, place: Path, whole: Path) -> str | None:
    """What was lost by a fault, if the machine allows what it needs."""
    if needs is not None and in_a_fork(needs)[0]:
        return Untried(f"{name}: this machine does not let it be tried")
    try:
        lost = fault(place, whole)
    except Exception as error:
        lost = [f"{type(error).__name__}: {error}"]
    return f"{name}: {'; '.join(lost)}" if lost else None


def refused(words: str, place: Path, *more: str, prepare: Callable[[], object] = lambda: None) -> list[str]:
    """Of a run that should end with one line that has these words in it, what is wrong."""
    return what_is_wrong(place, *in_a_fork(partial(one_run, place, *more), prepare), words)


def what_is_wrong(place: Path, status: int, said: str, words: str) -> list[str]:
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    left = [f"{path.name} is left behind" for path in place.rglob("*") if path.suffix in (".tmp", ".work")]
    if status == 2 and len(errors) == 1 and words in errors[0] and "Traceback" not in said:
        return left
    return [f"exit status {status}, not a line with {words!r}: {said[-500:]}", *left]


def comes_to_its_end(
    place: Path, whole: Path, *more: str, prepare: Callable[[], object] = lambda: None, words: str = ""
) -> list[str]:
    """Of a run that should end as the whole one, and say these words, what is wrong."""
    status, said = in_a_fork(partial(one_run, place, *more), prepare)
    if status or words not in said or "Traceback" in said:
        return [f"exit status {status}: {said[-500:]}"]
    return what_differs(place, whole)


def full_disk(name: str, time: int, room: int, place: Path, whole: Path) -> list[str]:
    """On a disk of its own there is no room left before the `time`th write of files of this name; later there is."""

    def task() -> None:
        place.mkdir()
        small_disk(place, DISK)
        write_text(place)
        print("\n".join(fill_and_empty(place, whole, prepare=no_room_at(name, time, room, place))))

    def prepare() -> None:
        signal.alarm(3 * HANG)
        apart()

    status, said = in_a_fork(task, prepare)
    return said.split("\n") if status or said.strip() else []


def fill_and_empty(place: Path, whole: Path, prepare: Callable[[], object]) -> list[str]:
    ballast, before = place / "ballast", place.with_suffix(".before")
    state = Record.of(compose(given(place))).state
    status, said = in_a_fork(partial(one_run, place), prepare)
    lost = [] if ballast.exists() else ["the disk was never full"]
    ballast.unlink(missing_ok=True)
    if status == 0:  # what was left to write found room; but for wandb's part, which then is named
        mirrored = "the disk is full: the wandb mirror" not in said
        return lost + [one for one in what_differs(place, whole) if mirrored or "wandb" not in one]
    lost += what_is_wrong(place, status, said, "No space left on device")
    if before.exists() and not (state.exists() and state.read_bytes() == before.read_bytes()):
        lost.append("the last good state is lost")
    return lost + comes_to_its_end(place, whole)


def no_room_at(name: str, time: int, room: int, place: Path) -> Callable[[], None]:
    """Fill the disk at `place`, but for so many bytes, before this process opens a file to write for the `time`th time.

    Only files of whose path `name` is a part count. The state that there is then is kept elsewhere, to compare.
    """
    times = itertools.count(1)
    state = Record.of(compose(given(place))).state

    def look(event: str, arguments: tuple) -> None:
        if not (opens_to_write(event, arguments) and name in str(arguments[0])) or next(times) != time:
            return
        if state.exists():
            shutil.copyfile(state, place.with_suffix(".before"))
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
        file = os.open(place / "ballast", os.O_WRONLY | os.O_CREAT)
        os.posix_fallocate(file, 0, free - room)
        os.close(file)

    return lambda: sys.addaudithook(look)


def runs(place: Path, whole: Path) -> list[str]:
    lost = refused("Read-only file system", place, prepare=cannot_write(place / "runs"))
    lost += comes_to_its_end(place, whole)
    return lost + comes_to_its_end(place, whole, prepare=cannot_write(place / "runs"), words="finished before")


def cache(place: Path, whole: Path) -> list[str]:
    """What is in a folder that cannot be written to is used all the same."""
    lost = refused("Read-only file system", place, prepare=cannot_write(place / "cache"))
    lost += comes_to_its_end(place, whole)
    shutil.rmtree(place / "runs")
    return lost + comes_to_its_end(place, whole, prepare=cannot_write(place / "cache"))


def mirror(place: Path, whole: Path) -> list[str]:
    elsewhere = f"wandb.dir={place}/mirror"
    lost = refused("wandb.mode=disabled needs none", place, elsewhere, prepare=cannot_write(place / "mirror"))
    return lost + comes_to_its_end(place, whole)


def home(place: Path, whole: Path) -> list[str]:
    lost = comes_to_its_end(place, whole, prepare=without("HOME"))
    shutil.rmtree(place / "runs")
    return lost + comes_to_its_end(place, whole, prepare=without(HOME=NOWHERE))


def user(place: Path, whole: Path) -> list[str]:
    """One whom the machine does not know, as in a container."""

    def nobody(**home: str) -> None:
        without("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", **home)()
        become(4711)

    home = place.with_suffix(".home")
    home.mkdir()
    lost = refused("home directory", place, prepare=nobody)
    return lost + comes_to_its_end(place, whole, prepare=partial(nobody, HOME=str(home)))


def temporary(place: Path, whole: Path) -> list[str]:
    def prepare() -> None:
        without(TMPDIR=NOWHERE, TEMP=NOWHERE, TMP=NOWHERE)()
        apart()
        mount_again(place)
        for folder in filter(os.path.isdir, ("/tmp", "/var/tmp", "/usr/tmp")):
            read_only(Path(folder))
        os.chdir("/proc")
        tempfile.tempdir = None

    lost = refused("No usable temporary directory", place, prepare=prepare)
    status, said = in_a_fork(partial(one_run, place, "wandb.mode=disabled"), prepare)
    if status:
        lost.append(f"without wandb, exit status {status}: {said[-500:]}")
    shutil.rmtree(place / "runs")
    return lost + comes_to_its_end(place, whole)


def network(place: Path, whole: Path) -> list[str]:
    def prepare() -> None:
        without(*(name for name in os.environ if name.startswith("PIP_")), PIP_CONFIG_FILE=os.devnull)()
        apart()

    return refused("is there a network? A text of your own needs none", place, "data=sanguo", prepare=prepare)


def hub(place: Path, whole: Path) -> list[str]:
    return refused("cannot reach no/text on the hub", place, "data=hub", "data.name=no/text", prepare=apart)


def compiler(place: Path, whole: Path) -> list[str]:
    def prepare() -> None:
        without("CXX", PATH=NOWHERE)()
        train.COMPILE_HOURS = 0  # as if the run were long

    lost = refused("train.compile=true needs a C++ compiler", place, "train.compile=true", prepare=prepare)
    notice = "training without torch.compile, on a CPU 1.2 times slower: a C++ compiler would be needed"
    return lost + comes_to_its_end(place, whole, "train.compile=null", prepare=prepare, words=notice)


def login(place: Path, whole: Path) -> list[str]:
    nobody = without("WANDB_API_KEY", HOME=str(place), NETRC=f"{place}/netrc")
    lost = refused("wandb.mode=offline needs no account", place, "wandb.mode=online", prepare=nobody)
    return lost + comes_to_its_end(place, whole)


def account(place: Path, whole: Path) -> list[str]:
    """An account there is, and no network to it."""

    def prepare() -> None:
        without(WANDB_API_KEY="0" * 40, WANDB_INIT_TIMEOUT="20")()
        apart()

    lost = refused("wandb.mode=offline needs no account", place, "wandb.mode=online", prepare=prepare)
    return lost + comes_to_its_end(place, whole)


def port(place: Path, whole: Path) -> list[str]:
    """Taken by another program, with torchrun and without it."""
    with socket.create_server(("localhost", 0)) as server:
        number = server.getsockname()[1]
        group = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(number)}
        lost = refused(f"port: {number}, useIpv6", place, prepare=without(**group))
        line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={number}"]
        options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": HANG}
        done = subprocess.run([*line, "train.py", *given(place)], **options)
    if done.returncode == 0 or "EADDRINUSE" not in done.stderr:
        lost.append(f"torchrun, exit status {done.returncode}: {done.stderr[-500:]}")
    return lost + comes_to_its_end(place, whole)


def memory(place: Path, whole: Path) -> list[str]:
    """Less than a text takes, or its ids."""
    with open(place / "long.txt", "w", encoding="utf-8") as file:
        for _ in range(3 * ALLOWED // len(LINES.encode())):
            file.write(LINES)
    long = [f"data.path={place}/long.txt", "train.steps=2", "wandb.mode=disabled"]
    status, said = in_a_fork(partial(one_run, place, *long), little_memory)
    return [f"exit status {status}: {said[-500:]}"] if status else []


def model(place: Path, whole: Path) -> list[str]:
    """Less than a model takes: itself, or it and its gradients, at the start or from a state on."""
    small, large = ([f"model.dim={dim}", "wandb.mode=disabled"] for dim in (768, 4096))
    lost = refused("need more memory than there is", place, *large, prepare=little_memory)
    lost += refused("not enough memory for this run", place, *small, prepare=little_memory)
    state = half_done(place, "model.dim=768").state
    before = state.read_bytes()
    lost += refused("not enough memory for this run", place, *small, prepare=little_memory)
    return lost + ["the last good state is lost"] * (state.read_bytes() != before)


NEEDS = {
    runs: apart, cache: apart, mirror: apart, home: None, user: partial(become, 4711), temporary: apart,
    network: apart, hub: apart, compiler: None, login: None, account: apart, port: None, memory: None, model: None,
}  # fmt: skip


def cannot_write(folder: Path) -> Callable[[], None]:
    def prepare() -> None:
        apart()
        folder.mkdir(exist_ok=True)
        read_only(folder)

    return prepare


def without(*names: str, **values: str) -> Callable[[], None]:
    """An environment without some variables, and with others changed, for a wandb that was not imported before."""

    def prepare() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "wandb"]:
            del sys.modules[name]
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(values)

    return prepare


def little_memory() -> None:
    import datasets  # noqa: F401, which takes much by itself

    (line,) = (
        line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith("VmData")
    )
    bytes_ = int(line.split()[1]) * 1024 + ALLOWED
    resource.setrlimit(resource.RLIMIT_DATA, (bytes_, bytes_))
