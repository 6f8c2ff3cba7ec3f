"""Power cuts: a run goes on from what only the disk holds, by a model of a disk and on a real ext4."""

import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from data.files import UserError
from tests.torture.apart import apart
from tests.torture.kills import WRITES, fresh, one_run, opens_to_write, what_differs
from tests.torture.small import HANG, Fork, Untried, in_a_fork, write_text
from training.record import Record

ENDED = "finished"  # what a run promises when it has come to its end; before that, the step of its last state
MODELLED = 5  # of so many cuts one is on ext4
EXT4 = 1 << 26  # bytes of a disk


def power_cuts(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """The power is cut in a run, or just after it: of what it has not flushed, some is lost and some is there. It goes
    on from its last state, or is finished, and ends as if nothing had been; on a model of a disk and on ext4."""
    whole, ext4 = fresh(folder / "whole"), in_a_fork(partial(try_ext4, folder / "try"))[0] == 0
    began = time.monotonic()
    total = modelled(whole, None, rng)
    seconds = time.monotonic() - began
    fell = {"a model of a disk": 0, "ext4": 0}
    for number in range(cfg.power_cuts):
        place = fresh(folder / str(number))
        if number % MODELLED == MODELLED - 1:
            if not ext4:
                yield Untried(f"power cut {number}: this machine does not let a disk image be mounted")
                continue
            fell["ext4"] += 1
            lost = on_ext4(place, whole, rng.uniform(0.1, 1.2 * seconds))  # sometimes after its end
        else:
            fell["a model of a disk"] += 1
            at = total + 1 if number % MODELLED == 0 else rng.randint(1, total)
            modelled(place, at, rng)
            lost = goes_on(place, whole)
        yield f"power cut {number}: {'; '.join(lost)}" if lost else None
        shutil.rmtree(place)
    return fell


def run(place: Path) -> None:
    """A run that says, beside its folder, what nobody may take from it any more."""
    inner, promise = Record.save_state, place.with_suffix(".promise")

    def save_state(record: Record, state: dict) -> None:
        inner(record, state)
        promise.write_text(str(state["step"]), encoding="utf-8")

    Record.save_state = save_state
    one_run(place, "wandb.mode=disabled")
    promise.write_text(ENDED, encoding="utf-8")


def goes_on(place: Path, whole: Path) -> list[str]:
    """What is wrong with how a run goes on that has lost what the disk had not."""
    promise = place.with_suffix(".promise")
    kept = promise.read_text(encoding="utf-8") if promise.exists() else "0"
    status, said = in_a_fork(partial(one_run, place, "wandb.mode=disabled"))
    if status:
        return [f"exit status {status}: {said[-300:]}"]
    after = re.search(r"continuing .+ after step (\d+)", said)
    lost = ["rows are lost"] * bool(re.search("has lost rows|holds lines that cannot be read", said))
    if kept == ENDED and "finished before" not in said:
        lost.append("it had come to its end, and is trained again")
    elif kept != ENDED and int(kept) and "finished before" not in said and (not after or int(after[1]) < int(kept)):
        lost.append(f"its state after step {kept} is gone")
    try:
        return lost + [one for one in what_differs(place, whole) if "wandb" not in one]
    except UserError as error:
        return [*lost, str(error)]


def modelled(place: Path, at: int | None, rng: random.Random) -> int:
    """Run on a modelled disk; the power is cut at one of its calls to the system, or never: how many there are."""
    seed = rng.random()

    def task() -> None:
        disk, calls = Disk(place), 0
        flush = os.fsync

        def cut() -> None:
            disk.cut(random.Random(seed))
            os.kill(os.getpid(), signal.SIGKILL)

        def call() -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                cut()

        def fsync(descriptor: int) -> None:
            flush(descriptor)
            disk.flush(descriptor)
            call()

        os.fsync = fsync
        sys.addaudithook(lambda event, given: call() if event in WRITES or opens_to_write(event, given) else None)
        run(place)
        if at is not None:
            cut()
        print(calls)

    status, said = in_a_fork(task)
    if status != (0 if at is None else -signal.SIGKILL):
        raise UserError(f"a run on a modelled disk, exit status {status}: {said[-300:]}")
    return int(said.split()[-1]) if at is None else 0


class Disk:
    """A model of a disk, of a folder and all below it.

    What fsync has flushed stays: of a file its content, of a folder its list of names. All else may be there after a
    cut or not, every file and every name by itself; of what was appended to a file a part, or zeros.
    """

    def __init__(self, root: Path):
        self.root = root
        self.files: dict[int, bytes] = {}
        self.folders: dict[int, dict[str, int]] = {}
        self.held: dict[int, int] = {}  # open, so that no other file gets the number of one that was removed
        for path in (root, *root.rglob("*")):
            descriptor = os.open(path, os.O_RDONLY)
            self.flush(descriptor)
            os.close(descriptor)

    def flush(self, descriptor: int) -> None:
        path, status = Path(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor)
        self.hold(path, status.st_ino)
        if stat.S_ISDIR(status.st_mode):
            self.folders[status.st_ino] = self.names(path)
        else:
            self.files[status.st_ino] = path.read_bytes()

    def names(self, folder: Path) -> dict[str, int]:
        found = {entry.name: entry.inode() for entry in os.scandir(folder)}
        for name, inode in found.items():
            self.hold(folder / name, inode)
        return found

    def hold(self, path: Path, inode: int) -> None:
        if inode not in self.held:
            self.held[inode] = os.open(path, os.O_PATH)

    def cut(self, rng: random.Random) -> None:
        """Leave in the folder what the disk holds."""
        there = {path.lstat().st_ino: path for path in (self.root, *self.root.rglob("*"))}
        left = self.left(self.root.stat().st_ino, there, rng)
        for child in self.root.iterdir():
            shutil.rmtree(child) if child.is_dir() else child.unlink()
        put(self.root, left)

    def left(self, inode: int, there: dict[int, Path], rng: random.Random) -> dict | bytes:
        """A folder, as what its names stand for, or the content of a file."""
        path = there.get(inode)
        if inode not in self.folders and not (path and path.is_dir()):
            return self.content(inode, path, rng)
        flushed, now = self.folders.get(inode, {}), self.names(path) if path else {}
        names = {name: rng.choice([flushed.get(name), now.get(name)]) for name in sorted(flushed | now)}
        return {name: self.left(child, there, rng) for name, child in names.items() if child is not None}

    def content(self, inode: int, path: Path | None, rng: random.Random) -> bytes:
        flushed = self.files.get(inode, b"")
        now = path.read_bytes() if path else flushed
        if not now.startswith(flushed):  # written over in place
            return rng.choice([flushed, now])
        some = now[: rng.randint(len(flushed), len(now))]
        return rng.choice([flushed, now, some, flushed + bytes(len(some) - len(flushed))])


def put(folder: Path, left: dict) -> None:
    for name, child in left.items():
        if isinstance(child, dict):
            (folder / name).mkdir()
            put(folder / name, child)
        else:
            (folder / name).write_bytes(child)


# On a real file system


def try_ext4(place: Path) -> None:
    place.mkdir()
    new_disk(place)


def new_disk(place: Path) -> None:
    """An ext4 of its own, in the file place.img, at `place`: for this process and its children."""
    image = place.with_suffix(".img")
    with open(image, "wb") as file:
        file.truncate(EXT4)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    apart()
    mount(image, place)


def mount(image: Path, place: Path) -> None:
    subprocess.run(["mount", "-o", "loop", image, place], check=True)


def on_ext4(place: Path, whole: Path, pause: float) -> list[str]:
    """Cut the power of a run on a disk by copying its image after a while, and let the run go on on the copy."""
    image, copy = place.with_suffix(".img"), place.with_suffix(".copy")

    def task() -> None:
        new_disk(place)
        write_text(place)
        os.sync()
        fork = Fork(partial(run, place))
        time.sleep(pause)
        os.kill(fork.child, signal.SIGSTOP)  # so that nothing is written while the image is copied
        shutil.copyfile(image, copy)
        os.kill(fork.child, signal.SIGKILL)
        fork.end()
        subprocess.run(["umount", "--lazy", place], check=True)
        mount(copy, place)
        print("\n".join(goes_on(place, whole)))

    status, said = in_a_fork(task, lambda: signal.alarm(3 * HANG))
    for path in (image, copy):
        path.unlink(missing_ok=True)
    return said.strip().split("\n") if status or said.strip() else []
