"""Append, read and repair the rows that a run logs in metrics.jsonl, which has one JSON object per line."""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import BinaryIO

from data.files import UserError, regular, replacing, unlinked
from data.reading import LARGEST_TEXT

CHUNK = 1 << 16  # number of bytes that `lines_from_the_end` reads at a time
LARGEST = 1 << 30  # maximum number of bytes that `read_lines` reads, enough for millions of rows


def append_row(path: Path, row: dict) -> None:
    """Append a row. Raises UserError if this fails, for example on a full disk, and leaves no part of the row."""
    size = None
    try:
        with open(path, "ab", opener=unlinked) as file:
            size = file.tell()
            file.write(f"{json.dumps(row)}\n".encode())
    except OSError as error:
        if size is not None:
            os.truncate(path, size)
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def each_row(path: Path, having: str | None = None) -> Iterator[dict]:
    """Yield the rows in order, or only those with the key `having`, without parsing the others.

    Raises UserError if the file or a parsed row is damaged.
    """
    key = b"" if having is None else json.dumps(having).encode()
    try:
        with open(path, "rb", opener=regular) as file:
            while line := file.readline(LARGEST_TEXT):
                if key in line:
                    yield parse(path, line)
    except OSError as error:
        raise damaged(path) from error


def first_line(path: Path) -> str:
    """Return the first line without its line break, or an empty string if no line in UTF-8 can be read."""
    try:
        with open(path, "rb", opener=regular) as file:
            return file.readline(LARGEST_TEXT).rstrip(b"\n").decode()
    except (OSError, UnicodeDecodeError):
        return ""


def of_another_run(path: Path, first: str) -> bool:
    """Return whether the first row of the file has the same step as the line `first`, but other content.

    A power cut may remove rows, but cannot cause this.
    """
    found = first_line(path)
    if not first or found == first:
        return False
    with contextlib.suppress(UserError):
        return parse(path, found.encode()).get("step") == parse(path, first.encode()).get("step")
    return False


def last_rows(path: Path, count: int) -> list[dict]:
    """Return the last `count` complete rows in order. Only the end of the file is read."""
    found = []
    for line in lines_from_the_end(path):
        found.append(parse(path, line))
        if len(found) == count:
            break
    return found[::-1]


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of the file, for `parse`. Raises UserError if it is unreadable or larger than LARGEST."""
    try:
        with open(path, "rb", opener=regular) as file:
            if os.fstat(file.fileno()).st_size > LARGEST:
                raise UserError(f"{path} is damaged: it is larger than {LARGEST >> 30} GiB")
            return file.read().splitlines()
    except OSError as error:
        raise damaged(path) from error


def parse(path: Path, line: bytes) -> dict:
    """Return the row in a line.

    Raises UserError unless the line is a JSON object in which `step`, if there is one, is a whole number, and each
    value is a number or null or, under `sample`, text.
    """
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged(path) from error
    types = set(map(type, row.values())) if isinstance(row, dict) else {str}
    if str in types and isinstance(row, dict):
        types = {type(value) for key, value in row.items() if key != "sample"}
    if not (types <= {int, float, NoneType} and type(row.get("step", 0)) is int):
        raise damaged(path)
    return row


def damaged(path: Path) -> UserError:
    return UserError(f"{path} is damaged: resume=false trains the run anew")


def lines_from_the_end(path: Path) -> Iterator[bytes]:
    """Yield the lines from the last to the first, without an incomplete line at the end."""
    try:
        with open(path, "rb", opener=regular) as file:
            place, rest, torn = file.seek(0, io.SEEK_END), b"", True
            while place:
                length = min(CHUNK, place)
                place = file.seek(place - length)
                rest, *lines = (file.read(length) + rest).split(b"\n")
                for line in reversed(lines):
                    if not torn:
                        yield line
                    torn = False  # only the part after the last line break can be incomplete
                if len(rest) > LARGEST_TEXT:
                    raise damaged(path)
            if not torn:
                yield rest
    except OSError as error:
        raise damaged(path) from error


def repair(path: Path, file: BinaryIO, step: int, size: int) -> None:
    """Remove from metrics.jsonl, open as `file`, the rows after `step` and the lines that cannot be read.

    A power cut can leave such lines, most often of NUL bytes, or remove lines. If the remaining rows have fewer bytes
    than `size`, the size of the file at `step`, rows have been lost, and a message names the longest gap between step
    0, the remaining rows and `step`.
    """
    # The rows to keep have `kept` bytes in all and end at offset `end`. `unreadable` is the number of unreadable lines
    # so far, and `dropped` the number of those before `end`.
    kept, end, unreadable, dropped = 0, 0, 0, 0
    before, gap = 0, (0, 0)
    for place, line, reached in rows_in_place(path, file):
        if reached is None:
            unreadable += 1
        elif reached > step:
            break
        else:
            gap = max(gap, (before, reached), key=length)
            before, dropped, kept, end = reached, unreadable, kept + len(line), place
    gap = max(gap, (before, step), key=length)
    if dropped:
        with replacing(path) as temporary, open(temporary, "xb") as whole:
            rows = rows_in_place(path, file)
            whole.writelines(line for place, line, reached in rows if place <= end and reached is not None)
    else:
        file.truncate(end)
    what = "had unreadable lines, as after a power cut, which were removed" if dropped else None
    if kept < size:
        what = f"has lost rows, as in a power cut; the longest gap is from step {gap[0]} to step {gap[1]}"
    if what:
        print(f"{path} {what}: the run continues from its state after step {step}", flush=True)


def rows_in_place(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes, int | None]]:
    """Yield the offset of each line's end, the line, and its step, or None if it is not a complete row with a step."""
    place = file.seek(0)
    while line := file.readline(LARGEST_TEXT):
        place += len(line)
        if len(line) == LARGEST_TEXT:
            raise damaged(path)
        step = None
        if line.endswith(b"\n"):
            with contextlib.suppress(UserError):
                step = parse(path, line).get("step")
        yield place, line, step


def length(gap: tuple[int, int]) -> int:
    return gap[1] - gap[0]
