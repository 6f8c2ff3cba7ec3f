"""A model of a disk that loses power."""

import os
import random
import shutil
from pathlib import Path


class Disk:
    """A model of a disk, of a folder and all below it.

    What fsync has flushed stays: of a file its content, of a folder its list of names. All else may be there after a
    cut or not, every file and every name by itself; of what was appended to a file a part, or zeros.
    """

    def __init__(self, root: Path):
        self.root = root
        self.flushed: dict[int, bytes | dict[str, int]] = {}
        self.held: dict[int, int] = {}  # open, so that no other file gets the number of one that was removed
        for path in (root, *root.rglob("*")):
            self.flush(path)

    def flush(self, path: Path) -> None:
        self.flushed[self.hold(path)] = self.now(path)

    def hold(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self.held:
            self.held[inode] = os.open(path, os.O_PATH)
        return inode

    def now(self, path: Path) -> bytes | dict[str, int]:
        """A file's content, or a folder's names."""
        return {child.name: self.hold(child) for child in path.iterdir()} if path.is_dir() else path.read_bytes()

    def cut(self, rng: random.Random) -> None:
        """Leave in the folder what the disk holds."""
        there = {path.stat().st_ino: path for path in (self.root, *self.root.rglob("*"))}
        left = self.root.with_suffix(".left")
        self.leave(self.root.stat().st_ino, left, there, rng)
        shutil.rmtree(self.root)
        left.rename(self.root)

    def leave(self, inode: int, target: Path, there: dict[int, Path], rng: random.Random) -> None:
        """Write to another place what the disk holds of a file or a folder."""
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
        if now.startswith(flushed):  # it is not written over in place
            left += [some, flushed + bytes(len(some) - len(flushed))]
        target.write_bytes(rng.choice(left))
