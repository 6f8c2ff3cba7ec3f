"""Append, read and repair the rows that a run logs in metrics.jsonl, which has one JSON object per line."""

import contextlib
import itertools
import json
import math
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import NoneType

from data.files import UserError, regular, replacing, unlinked
from data.reading import LARGEST_TEXT


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if the loss is NaN or at least 700; exp overflows near 710."""
    return math.exp(loss) if loss < 700 else math.inf


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


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines in order. Raises UserError if the file cannot be read or a line is too long for a row."""
    try:
        with open(path, "rb", opener=regular) as file:
            while line := file.readline(LARGEST_TEXT):
                if len(line) == LARGEST_TEXT:
                    raise damaged(path)
                yield line
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def each_row(path: Path, having: str | None = None) -> Iterator[dict]:
    """Yield the rows in order, or only those with the key `having`, without parsing the others.

    Raises UserError if the file cannot be read, or if a parsed row is damaged.
    """
    key = b"" if having is None else json.dumps(having).encode()
    return (parse(path, line) for line in lines_of(path) if key in line)


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


def complete_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines in order, without a last one that was cut short."""
    return (line for line in lines_of(path) if line.endswith(b"\n"))


def last_rows(path: Path, count: int) -> list[dict]:
    """Return the last `count` complete rows in order. No other rows are parsed."""
    return [parse(path, line) for line in deque(complete_lines(path), count)]


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


def repair(path: Path, step: int, size: int) -> None:
    """Remove from metrics.jsonl the rows after `step` and the lines that cannot be read.

    A power cut can leave such lines, most often of NUL bytes, or remove lines. If the remaining rows have fewer bytes
    than `size`, the size of the file at `step`, rows have been lost, and a message names the longest stretch of
    steps without a row; here, step 0 and `step` count as rows.
    """
    kept, steps = 0, [0]  # the bytes and the steps of the rows to keep
    with replacing(path) as temporary, open(temporary, "xb") as whole:
        for line, reached in lines_with_steps(path):
            if reached is None:
                continue
            if reached > step:
                break
            steps.append(reached)
            kept += whole.write(line)
    if kept < size:
        start, end = max(itertools.pairwise([*steps, step]), key=lambda pair: pair[1] - pair[0])
        what = f"has lost rows, as in a power cut; the longest gap is from step {start} to step {end}"
        print(f"{path} {what}: the run continues from its state after step {step}", flush=True)


def lines_with_steps(path: Path) -> Iterator[tuple[bytes, int | None]]:
    """Yield each line and its step, or None if it is not a complete row with a step."""
    for line in lines_of(path):
        step = None
        if line.endswith(b"\n"):
            with contextlib.suppress(UserError):
                step = parse(path, line).get("step")
        yield line, step
