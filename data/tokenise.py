"""Turn shards of text into ids, in several processes and bounded memory. Interrupted work can be continued."""

import contextlib
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from data.examine import digest, hash_of
from data.files import UserError, make_folder, remove, unlinked, write_bytes, write_json
from data.shards import Shard
from data.sources import Source

BLOCK = 1 << 20  # least number of characters that are processed at a time, except at the end of a shard
CODE_POINTS = 0x110000
SURROGATES = slice(0xD800, 0xE000)
HASHED = ("ids.bin", "vocabulary.json")  # the files with a sha256 in meta.json
MANY = 4  # more shards than this take more than a few seconds: their number is printed, and a terminal shows a bar
QUIET = 20  # least number of seconds between two lines of progress, which are printed if there is no bar


class Died(UserError):
    """A process was killed from outside. The work that it had finished is kept."""


def tokenise(
    source: Source, vocab_size: int | None, work: Path, processes: int, given: list[str | None] | None
) -> None:
    """Turn a source into ids.bin, vocabulary.json and meta.json in the folder `work`.

    The vocabulary is `given` or, if that is None, made from the text by `choose`.

    There are two passes over the shards, which the processes share: the first counts characters, the second writes
    their ids to their places. For every shard that a pass has finished there is a file in work/counts or work/ids, so
    that a call after an interruption processes only the other shards. The text's sha256 is computed meanwhile or, if
    there is one process, after both passes. It needs the characters in order, and an interrupted computation of it
    therefore starts from the beginning again. The text is read three times and never copied.

    Raises UserError if the source cannot be read, the text is empty, holds lone surrogates or changes meanwhile, or the
    given vocabulary lacks both a character of the text and the unknown symbol; UserError or OSError if the disk is
    full; and Died if a process is killed.
    """
    shards = source.shards()
    processes = min(processes, len(shards))
    if len(shards) > MANY:
        print(f"tokenising {len(shards)} shards in {processes} processes", flush=True)
    with ready_to_fork(), hashing(shards, work / "sha256", aside=processes > 1):
        each(shards, "counting characters", count, work / "counts", processes)
        counts, lengths = total(work / "counts", len(shards))
        vocabulary, table = choose(counts, vocab_size) if given is None else (given, table_of(counts, given))
        ends = np.cumsum(lengths)
        characters = int(ends[-1])
        allocate(work / "ids.bin", characters * table.itemsize, work / "ids")
        write = partial(write_ids, path=work / "ids.bin", table=table, ends=ends)
        each(shards, "writing ids", write, work / "ids", processes)
    write_json(work / "vocabulary.json", vocabulary)
    meta = {
        "characters": characters,
        # The mean UTF-8 length of the characters that get the id of the unknown symbol.
        "unknown_bytes": mean_bytes(counts * (table == table.max())),
        "unique": int(np.count_nonzero(counts)),
        "dtype": table.dtype.name,
        "sha256": (work / "sha256").read_text(encoding="ascii"),
        "hashes": {name: hash_of(work / name) for name in HASHED},
        "source": source.identity,
    }
    write_json(work / "meta.json", meta | {"digest": digest(meta)})
    for done in ("counts", "ids", "sha256"):
        remove(work / done)


def count(shard: Shard, number: int) -> bytes:
    """Return the code points of a shard and how often each occurs: bytes of int64 [2, points]."""
    counts = np.zeros(CODE_POINTS, np.int64)
    for block in blocks(shard()):
        counts += np.bincount(code_points(block), minlength=CODE_POINTS)
    points = np.flatnonzero(counts)
    return np.stack([points, counts[points]]).tobytes()


def total(folder: Path, shards: int) -> tuple[np.ndarray, list[int]]:
    """Return how often each code point occurs in all shards, whose counts are in `folder`, and the shards' lengths.

    Raises UserError if the text is empty or holds lone surrogates.
    """
    counts, lengths = np.zeros(CODE_POINTS, np.int64), []
    for number in range(shards):
        points, times = np.fromfile(folder / str(number), np.int64).reshape(2, -1)
        counts[points] += times
        lengths.append(int(times.sum()))
    if not counts.any():
        raise UserError("the text is empty")
    if counts[SURROGATES].any():
        raise UserError("the text holds lone surrogates, halves of characters: give another data.encoding=...")
    return counts, lengths


def choose(counts: np.ndarray, vocab_size: int | None) -> tuple[list[str | None], np.ndarray]:
    """Return the vocabulary and each code point's id.

    The most frequent character comes first, and equally frequent ones are in the order of their code points. If the
    text has more than `vocab_size` different characters, the unknown symbol, None, replaces the rarest and comes last.
    """
    unique = int(np.count_nonzero(counts))
    by_frequency = np.argsort(-counts, kind="stable")
    cut = vocab_size is not None and vocab_size < unique
    kept = by_frequency[: vocab_size - 1 if cut else unique]
    vocabulary: list[str | None] = [chr(point) for point in kept] + [None] * cut
    return vocabulary, table_of(counts, vocabulary)


def table_of(counts: np.ndarray, vocabulary: list[str | None]) -> np.ndarray:
    """Return each code point's id in a vocabulary, in which the unknown symbol, if there is one, comes last.

    Raises UserError if the vocabulary has no unknown symbol and lacks a character that occurs according to `counts`.
    """
    known = np.array([ord(symbol) for symbol in vocabulary if symbol is not None], np.int64)
    lacking = np.setdiff1d(np.flatnonzero(counts), known)
    if lacking.size and len(known) == len(vocabulary):
        raise UserError(
            "the vocabulary of train.init_from has no unknown symbol and lacks characters of this text, "
            f"{len(lacking):,} in all, like {chr(lacking[0])!r}: start from a run whose data.vocab_size was smaller "
            "than the number of different characters in its text"
        )
    table = np.full(CODE_POINTS, len(known), np.uint32)
    table[known] = np.arange(len(known))
    return table.astype(np.uint16 if len(vocabulary) <= 1 << 16 else np.uint32)


def mean_bytes(counts: np.ndarray) -> float:
    """Return the mean UTF-8 length of characters, given how often each code point occurs; 0 if none does."""
    lengths = 1 + np.digitize(np.arange(CODE_POINTS), (0x80, 0x800, 0x10000))
    return float(lengths @ counts / max(1, counts.sum()))


def allocate(path: Path, size: int, done: Path) -> None:
    """Give the file `path` its size of `size` bytes. Except on macOS, the bytes are reserved on the disk.

    A full disk is then noticed before ids are written.
    If the file has this size already, it is kept. Otherwise the folder `done` of the finished shards is removed.
    """
    if path.exists() and path.stat().st_size == size:
        return
    remove(done)
    with open(path, "wb", opener=unlinked) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:  # macOS: the bytes are not reserved
            file.truncate(size)


def write_ids(shard: Shard, number: int, path: Path, table: np.ndarray, ends: np.ndarray) -> bytes:
    """Write the ids of a shard to their place in `path`, and return b""; `ends` holds where each shard ends."""
    place, end = int(ends[number - 1]) if number else 0, int(ends[number])
    with open(path, "r+b", opener=unlinked) as file:
        file.seek(place * table.itemsize)
        for block in blocks(shard()):
            place += len(block)
            if place <= end:
                file.write(table[code_points(block)].tobytes())
        if place != end:
            raise UserError("the text changed while it was read: start again")
        file.flush()
        os.fsync(file.fileno())  # before the shard counts as done
    return b""


def blocks(pieces: Iterator[str]) -> Iterator[str]:
    """Yield the same text in pieces of at least BLOCK characters, except the last one."""
    gathered, size = [], 0
    for piece in pieces:
        gathered.append(piece)
        size += len(piece)
        if size >= BLOCK:
            yield "".join(gathered)
            gathered, size = [], 0
    yield "".join(gathered)


def code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


# Processes


class Pass:
    """One pass over the shards. Each process calls it with the number of one shard after the other."""

    def __init__(self, shards: list[Shard], what: str, do, done: Path):
        self.shards, self.what, self.do, self.done = shards, what, do, done
        self.failed = done / "failed"
        self.todo = [number for number in range(len(shards)) if not (done / str(number)).exists()]
        self.bar = len(self.todo) > MANY and sys.stderr.isatty()
        self.start = self.last_print = time.monotonic()

    def __call__(self, number: int, rank: int | None) -> None:
        if self.failed.exists():  # another process has failed
            return
        try:
            write_bytes(self.done / str(number), self.do(self.shards[number], number))
        except Exception:
            self.failed.touch()
            raise
        if not rank and not self.bar and time.monotonic() - self.last_print > QUIET:
            self.last_print = time.monotonic()
            left = [number for number in self.todo if not (self.done / str(number)).exists()]
            seconds = (self.last_print - self.start) * len(left) / (len(self.todo) - len(left))
            share = 1 - len(left) / len(self.shards)
            print(f"{self.what}: {share:.0%}, about {seconds / 60:.1f} min left", flush=True)


def each(shards: list[Shard], what: str, do, done: Path, processes: int) -> None:
    """Call do(shard, number) for each shard that has no file in the folder `done`, and write the result there.

    `datasets` runs the calls, in several processes if `processes` is above 1, and shows a bar if `Pass.bar` is set.
    """
    import datasets
    import multiprocess

    make_folder(done)
    step = Pass(shards, what, do, done)
    step.failed.unlink(missing_ok=True)
    if not step.todo:
        return
    if len(step.todo) < len(shards):
        print(f"{what}: continuing after {len(shards) - len(step.todo)} of {len(shards)} shards", flush=True)
    numbers = datasets.Dataset.from_dict({"shard": step.todo})
    processes = min(processes, len(step.todo))
    quiet = datasets.are_progress_bars_disabled()
    if not step.bar:
        datasets.disable_progress_bars()
    try:
        numbers.map(
            step,
            input_columns="shard",
            with_rank=True,
            num_proc=processes if processes > 1 else None,
            desc=what,
            new_fingerprint="shards",  # otherwise the library hashes everything that `step` holds
        )
    except multiprocess.TimeoutError as error:  # raised by `datasets` while it handled the original error
        raise error.__context__ or error from None
    except RuntimeError as error:
        if "abruptly died" not in str(error):
            raise
        raise Died(
            "a tokenising process was killed, perhaps for lack of memory: the same command continues the work"
        ) from error
    finally:
        if not quiet:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def ready_to_fork():
    """End the processes that this one forks in the `with` block, without a message, when this process dies."""
    import multiprocess.util

    guard = partial(end_with, os.getpid())
    multiprocess.util.register_after_fork(guard, lambda guard: guard())  # until the guard is deleted
    yield
    del guard


def end_with(first: int) -> None:
    """End this process, a fork of the process `first`, when that process has died."""

    def watch() -> None:
        while os.getppid() == first:
            time.sleep(0.2)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after a Ctrl-C, the first process ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def hashing(shards: list[Shard], path: Path, aside: bool):
    """Write the sha256 of the text in UTF-8 to `path` before the `with` statement ends, unless this file exists.

    If `aside`, a separate process computes it during the block; otherwise, this process does so after the block.
    """
    import multiprocess

    if path.exists() or not aside:
        yield
        if not path.exists():
            write_bytes(path, hash_text(shards).encode())
        return
    process = multiprocess.Process(target=write_hash, args=(shards, path))
    process.start()
    try:
        yield
        process.join()
        if not path.exists() and process.exitcode == 0:
            raise UserError(f"cannot write {path}")
        if not path.exists():
            raise Died("the process that hashed the text was killed: the same command continues the work")
    finally:
        process.kill()


def write_hash(shards: list[Shard], path: Path) -> None:
    # If the text cannot be read, the passes over the shards raise the error too, unless both are finished already. If
    # the hash is not written, `hashing` notices that its file is missing.
    with contextlib.suppress(UserError):
        sha256 = hash_text(shards)
        write_bytes(path, sha256.encode())


def hash_text(shards: list[Shard]) -> str:
    digest = hashlib.sha256()
    for shard in shards:
        for block in blocks(shard()):
            digest.update(block.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
