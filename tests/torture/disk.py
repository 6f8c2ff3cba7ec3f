"""A model of a disk that loses power."""

import os
import random
import shutil
from pathlib import Path


class Disk:
    """A model of a disk that holds a folder and everything below it.

    What fsync has flushed survives a power cut: the content of a file, and the list of names of a folder. Everything
    else survives by chance, each file and each name independently. Of what was appended to a file, a part may survive,
    or zeros may be in its place.
    """

    def __init__(self, root: Path):
        self.root = root
        self.flushed: dict[int, bytes | dict[str, int]] = {}
        self.held: dict[int, int] = {}  # open files by inode, so that no other file gets the inode of a removed one
        for path in (root, *root.rglob("*")):
            self.flush(path)

    def flush(self, path: Path) -> None:
        self.flushed[self.hold(path)] = self.now(path)

    def hold(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self.held:
            self.held[inode] = os.open(path, os.O_PATH)
            if path.is_dir():
                self.flushed.setdefault(inode, {})
        return inode

    def now(self, path: Path) -> bytes | dict[str, int]:
        """Return the content of a file, or the inodes of a folder's files by name."""
        return {child.name: self.hold(child) for child in path.iterdir()} if path.is_dir() else path.read_bytes()

    def cut(self, rng: random.Random) -> None:
        """Replace the folder by what survives a power cut."""
        there = {path.stat().st_ino: path for path in (self.root, *self.root.rglob("*"))}
        left = self.root.with_suffix(".left")
        self.leave(self.root.stat().st_ino, left, there, rng)
        shutil.rmtree(self.root)
        left.rename(self.root)

    def leave(self, inode: int, target: Path, there: dict[int, Path], rng: random.Random) -> None:
        """Write what survives of a file or a folder to `target`."""
        now, flushed = self.now(there[inode]) if inode in there else None, self.flushed.get(inode)
        if isinstance(now, dict) or isinstance(flushed, dict):
            target.mkdir()
            now, flushed = now or {}, flushed or {}
            for name in sorted(flushed | now):
                child = rng.choice([flushed.get(name), now.get(name)])
                if child is not None:
                    self.leave(child, target / name, there, rng)
            return
        flushed = flushed or b""
        now = flushed if now is None else now
        some = now[: rng.randint(min(len(flushed), len(now)), len(now))]
        left = [flushed, now]
        if now.startswith(flushed):  # the file was appended to and not overwritten
            left += [some, flushed + bytes(len(some) - len(flushed))]
        target.write_bytes(rng.choice(left))
