"""Disturb runs, sweeps and the making of tables at random moments. The same command must then complete them."""

import os
import random
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import train
from scripts import compare
from tests.helpers.lacks import apart, mount
from tests.helpers.runs import mirrors
from tests.torture.disk import Disk
from tests.torture.forks import failed, in_a_fork, not_refused, typed
from tests.torture.runs import PARTS, TABLE, Victim, fresh, given, one_run, promising

ROOM = 1 << 23  # bytes of a disk, more than a run writes
OF_A_RUN = [part for part in PARTS if part != TABLE]


def one_sweep(place: Path) -> None:
    typed(train.run, "-m", "attn=aft,mha", *given(place))


def write_table(place: Path) -> None:
    typed(compare.run, "runs=null", f"out={place}/table")


def interrupts(count: int, folder: Path) -> tuple[list[str], list[str]]:
    """Disturb `count` commands, each at a random moment. Return what was lost, and what could not be tried.

    A run, a sweep or the command that writes the comparison table is killed, or a run is stopped by SIGTERM or Ctrl-C,
    finds its disk full, or loses power. The same command then continues from the last state, if there is one, and ends
    with the results of an undisturbed command. Disks are filled only where this machine permits a disk to be mounted.
    """
    lost, untried, victims, rng, may_mount = [], [], {}, random.Random(0), in_a_fork(apart)[0] == 0
    for number in range(count):
        task, way = WAYS[number % len(WAYS)]
        if task not in victims:
            victims[task] = Victim(task, folder / task.__name__, TASKS[task])
        victim = victims[task]
        part = victim.parts[(number + number // len(WAYS)) % len(victim.parts)]
        name = f"{number}, {task.__name__}, {way}, aimed at {part}"
        if way == "a full disk" and not may_mount:
            untried.append(f"{name}: this machine permits no mounts")
        else:
            lost += [f"{name}: {one}" for one in HOW[way](victim, fresh(folder / str(number)), part, rng)]
    return lost, untried


def by_signal(victim: Victim, place: Path, part: str, rng: random.Random, sent: signal.Signals) -> list[str]:
    """Send a signal to a task during `part` or, in a third of the calls, at any moment. Return what is wrong."""
    status, attempt, anywhere = 0, 0, rng.random() < 1 / 3
    while status == 0 and attempt < 9:  # try again, at most 8 times, if the task ended before the signal
        attempt += 1
        if anywhere:
            moment = partial(after, rng.uniform(0.1, victim.seconds) / attempt, sent)
        else:
            moment = victim.when(part, rng, partial(signal.raise_signal, sent))
        status, output = in_a_fork(moment, partial(victim.task, fresh(place)))
    expected = -sent if sent == signal.SIGKILL else 128 + sent
    lost = failed(status, output, expected) + ["a traceback"] * ("Traceback" in output)
    for page in place.glob("table/table.*"):
        if page.read_bytes() != (victim.whole / "table" / page.name).read_bytes():
            lost.append(f"{page.name} differs from the complete one")
    if sent != signal.SIGKILL:
        exits = [0 if "the run is finished" in output else expected]
        lost += [f"wandb's exit status is {m['exits']}" for m in mirrors(place) if m["exits"] != exits]
    return lost + victim.again(place)


def after(seconds: float, sent: signal.Signals) -> None:
    """Send this process a signal after some seconds, if it has not ended by then."""
    timer = threading.Timer(seconds, os.kill, [os.getpid(), sent])
    timer.daemon = True
    timer.start()


def by_a_full_disk(victim: Victim, place: Path, part: str, rng: random.Random) -> list[str]:
    """Fill a task's disk to within 16 KiB during `part`. Make room after the task. Return what is wrong."""
    ballast, left = place / "ballast", rng.choice([0, 1 << 12, 1 << 14])

    def fill() -> None:
        with open(ballast, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, os.statvfs(place).f_bavail * os.statvfs(place).f_frsize - left)

    def task() -> None:
        mount("tmpfs", place, "tmpfs", options=f"size={ROOM}")
        status, output = in_a_fork(victim.when(part, rng, fill), partial(victim.task, fresh(place)))
        ballast.unlink()
        lost = not_refused(status, output, "No space left on device") if status else []
        lost += [f"{path.name} is left over" for path in place.rglob("*") if path.suffix in (".tmp", ".work")]
        print("\n".join(lost + victim.again(place)))

    status, output = in_a_fork(apart, partial(signal.alarm, 360), task)
    return failed(status, output) or [line for line in output.splitlines() if line]


def by_a_power_cut(victim: Victim, place: Path, part: str, rng: random.Random) -> list[str]:
    """Simulate a power cut during a task or at its end. Unflushed data survives by chance. Return what is wrong."""
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
HOW = {sent.name: partial(by_signal, sent=sent) for sent in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)}
HOW |= {"a power cut": by_a_power_cut, "a full disk": by_a_full_disk}
WAYS = [
    (promising, "a power cut"), (promising, "a full disk"), (one_run, "SIGKILL"), (one_run, "SIGTERM"),
    (one_run, "SIGINT"), (one_sweep, "SIGKILL"), (write_table, "SIGKILL"),
]  # fmt: skip
