"""Runs, sweeps and tables that are interrupted at a chosen moment, and are to end as if nothing had been."""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

import train
from scripts import compare
from tests.helpers.runs import mirrors
from tests.torture.disk import Disk
from tests.torture.forks import Fault, Fork, failed, fell, in_a_fork, typed
from tests.torture.lacks import REFUSES, apart, mount
from tests.torture.runs import PARTS, TABLE, Victim, fresh, given, one_run, promising

ANYWHERE = "anywhere"
ROOM = 1 << 23  # bytes of a disk, more than a run writes
OF_A_RUN = [part for part in PARTS if part != TABLE]


def one_sweep(place: Path) -> None:
    typed(train, "-m", "attn=aft,mha", *given(place))


def write_table(place: Path) -> None:
    typed(compare, "runs=null", f"out={place}/table")


def interrupts(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[Fault]:
    """A run, a sweep or the comparison table is killed, stopped by SIGTERM or Ctrl-C, out of room on its disk, or loses
    power, in each of its parts. The same command goes on from the last state, and all ends as if nothing had been."""
    victims, apart_allowed = {}, in_a_fork(apart)[0] == 0
    for number in range(cfg.interrupts):
        task, way = WAYS[number % len(WAYS)]
        if task not in victims:
            victims[task] = Victim(task, folder / task.__name__, TASKS[task])
        victim, place = victims[task], folder / str(number)
        part = victim.parts[number // len(WAYS) % len(victim.parts)]
        name = f"{number}, {task.__name__}, {way} in {part}"
        if way == "a full disk" and not apart_allowed:
            yield Fault(name, [REFUSES], tried=False)
        else:
            yield Fault(name, HOW[way](victim, fresh(place), part, rng))


def by_signal(victim: Victim, place: Path, part: str, rng: random.Random, sent: signal.Signals) -> list[str]:
    """A signal strikes a task in a part of it, or, every third time, whenever it may be."""

    def struck(attempt: int) -> tuple[int, str]:
        task = partial(victim.task, fresh(place))
        if part != ANYWHERE:
            return in_a_fork(victim.when(part, rng, partial(signal.raise_signal, sent)), task)
        fork = Fork(task)
        time.sleep(rng.uniform(0.1, victim.seconds) / attempt)
        os.kill(fork.child, sent)  # which waits to be asked for its end, if it has come to it
        return fork.end()

    part, status, attempt = rng.choice([part, part, ANYWHERE]), 0, 0
    while status == 0 and attempt < 9:  # it may end before it is struck, and is struck earlier then
        attempt += 1
        status, said = struck(attempt)
    expected = -sent if sent == signal.SIGKILL else 128 + sent
    lost = failed(status, said, expected) + ["a traceback"] * ("Traceback" in said)
    for page in place.glob("table/table.*"):
        if page.read_bytes() != (victim.whole / "table" / page.name).read_bytes():
            lost.append(f"{page.name} is half written")
    if sent != signal.SIGKILL:
        exits = [0 if "the run is finished" in said else expected]
        lost += [f"wandb's exit status is {m['exits']}" for m in mirrors(place) if m["exits"] != exits]
    return lost + victim.again(place)


def by_a_full_disk(victim: Victim, place: Path, part: str, rng: random.Random) -> list[str]:
    """On a disk of its own there is no room left from a moment of a task on; later there is."""
    ballast, left = place / "ballast", rng.choice([0, 1 << 12, 1 << 14])

    def fill() -> None:
        with open(ballast, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, os.statvfs(place).f_bavail * os.statvfs(place).f_frsize - left)

    def task() -> None:
        mount("tmpfs", place, "tmpfs", options=f"size={ROOM}")
        status, said = in_a_fork(victim.when(part, rng, fill), partial(victim.task, fresh(place)))
        ballast.unlink()
        lost = fell(status, said, "No space left on device") if status else []
        lost += [f"{path.name} is left behind" for path in place.rglob("*") if path.suffix in (".tmp", ".work")]
        print("\n".join(lost + victim.again(place)))

    status, said = in_a_fork(apart, partial(signal.alarm, 360), task)
    return said.split("\n") if status or said.strip() else []


def by_a_power_cut(victim: Victim, place: Path, part: str, rng: random.Random) -> list[str]:
    """In a task, or at its end, the power is cut: of what is not flushed some is lost, and some is there."""
    disks, flush, seed = [], os.fsync, rng.random()

    def fsync(descriptor: int) -> None:
        flush(descriptor)
        around = sys.getprofile()
        sys.setprofile(None)
        disks[0].flush(Path(f"/proc/self/fd/{descriptor}"))
        sys.setprofile(around)

    def begin() -> None:
        disks.append(Disk(place))
        os.fsync = fsync

    def cut() -> None:
        disks[0].cut(random.Random(seed))
        os.kill(os.getpid(), signal.SIGKILL)

    moments = [victim.when(part, rng, cut)] * (rng.random() < 0.8)
    ended = in_a_fork(begin, *moments, partial(victim.task, place), cut)
    return failed(*ended, -signal.SIGKILL) or victim.again(place)


TASKS = {
    promising: [part for part in OF_A_RUN if "wandb" not in part],
    one_run: OF_A_RUN,
    one_sweep: OF_A_RUN,
    write_table: [TABLE],
}
HOW = {
    "a power cut": by_a_power_cut,
    "a full disk": by_a_full_disk,
    "SIGKILL": partial(by_signal, sent=signal.SIGKILL),
    "SIGTERM": partial(by_signal, sent=signal.SIGTERM),
    "Ctrl-C": partial(by_signal, sent=signal.SIGINT),
}
WAYS = [
    (promising, "a power cut"), (promising, "a full disk"), (one_run, "SIGKILL"), (one_run, "SIGTERM"),
    (one_run, "Ctrl-C"), (one_sweep, "SIGKILL"), (write_table, "SIGKILL"),
]  # fmt: skip
