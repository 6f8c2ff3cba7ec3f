"""Find the hashes and encodings of text files, and remember them while the files stay the same."""

import codecs
import contextlib
import hashlib
import json
import os
import re
import time
import warnings
from pathlib import Path
from typing import NoReturn

from data.files import UserError, as_user_error, regular, write_json

CHUNK = 1 << 20  # number of bytes that are read at a time
# chardet chooses among these.
DETECTED = ["gb18030", "big5hkscs", "utf-16-le", "utf-16-be"]
LARGE = 1 << 30  # bytes that take seconds to read
RACY = 2.0  # seconds; a file that changed more recently than this may change again without a new time stamp


def examine(files: list[Path], cache: str | None, encodings: bool = True) -> tuple[list[str], list[str | None]]:
    """Return the sha256 of each file and, with `encodings`, its detected encoding.

    A `cache` folder keeps the results for each list of files. A file is read again if its size or times changed, or if
    its result was not kept, for example because the file had just changed or the folder cannot be written to.
    """
    paths = [str(file.absolute()) for file in files]
    store = cache and Path(cache, "files", hashlib.sha256(os.fsencode("\0".join(paths))).hexdigest()[:16] + ".json")
    before = recall(store) if store else {}
    now = {path: dict(before.get(path, {})) for path in paths}
    old_enough = (time.time() - RACY) * 1e9
    for file, path in zip(files, paths, strict=True):
        stamp = stamp_of(file)
        if now[path].get("stamp") != stamp:
            now[path] = {"stamp": stamp}
        if encodings and "encoding" not in now[path]:
            announce(file, stamp[0], "its encoding and hash")
            sha256, utf8 = read_through(file)
            now[path] |= {"sha256": sha256, "encoding": detect(file, utf8)}
        elif "sha256" not in now[path]:
            announce(file, stamp[0], "its hash")
            now[path]["sha256"] = hash_of(file)
    if store and now != before:
        with contextlib.suppress(UserError):
            found = {path: entry for path, entry in now.items() if max(entry["stamp"][1:]) < old_enough}
            write_json(store, {"files": found, "sha256": digest(found)})
    return [now[path]["sha256"] for path in paths], [now[path].get("encoding") for path in paths]


def recall(store: Path) -> dict[str, dict]:
    """Return what the cache holds, {path: result}; {} if it is missing or damaged."""
    try:
        with open(store, "rb", opener=regular) as file:
            kept = json.loads(file.read())
        return kept["files"] if kept["sha256"] == digest(kept["files"]) else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


def digest(found: dict) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def stamp_of(file: Path) -> list[int]:
    """Return numbers that change with a file.

    They are its size in bytes, and the times in ns when its content (mtime) and its inode (ctime) last changed.
    """
    with as_user_error(f"cannot read {file}"):
        stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def announce(file: Path, size: int, what: str) -> None:
    if size >= LARGE:
        print(f"reading {file}, {size / 1e9:.1f} GB, for {what}", flush=True)


def read_through(file: Path) -> tuple[str, bool]:
    """Return the sha256 of a file's bytes and whether they are UTF-8, reading it once."""
    sha256, decoder, utf8 = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")(), True
    with open_bytes(file) as stream:
        while True:
            chunk = stream.read(CHUNK)
            sha256.update(chunk)
            if utf8:
                try:
                    decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError:
                    utf8 = False
            if not chunk:
                return sha256.hexdigest(), utf8


def detect(file: Path, utf8: bool) -> str:
    """Return the codec that a text file is written in; `utf8` says whether it is valid UTF-8.

    UTF-8 is recognised with or without a byte order mark (BOM). UTF-16 and UTF-32 are recognised by their BOM. In other
    files, chardet recognises Big5 and GB18030, which includes GBK and GB2312. It also recognises UTF-16 if at least 3%
    of the first 2,000 characters are ASCII, such as line ends. A file in UTF-16 without a BOM is refused if all of its
    characters are ASCII: its bytes are valid UTF-8, but half of them are zeros, which text does not have.
    """
    import chardet

    with open_bytes(file) as stream:
        head = stream.read(CHUNK)
    if not head:
        raise UserError(f"{file} is empty")
    if utf8:
        guess = "utf-8-sig" if head.startswith(codecs.BOM_UTF8) else "utf-8"
        return guess if looks_like_text(head.decode(guess, errors="ignore")) else refuse(file)
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"  # checked before UTF-16, because BOM_UTF32_LE begins with BOM_UTF16_LE
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    with warnings.catch_warnings(action="ignore"):  # chardet warns that its default, cp1252, is excluded
        guess = chardet.detect(head, max_bytes=CHUNK, include_encodings=DETECTED)["encoding"]
    guess = (guess or "").lower()
    guess = {"big5": "big5hkscs"}.get(guess, guess)  # Big5-HKSCS contains Big5
    fits = guess and looks_like_text(head.decode(guess, errors="ignore")) and decodes(file, guess)
    return guess if fits else refuse(file)


def refuse(file: Path) -> NoReturn:
    """Raise UserError, because the file does not look like text."""
    raise UserError(
        f"{file} does not look like text in UTF-8, GB18030 or Big5, or in UTF-16 or UTF-32 with a byte order mark: "
        "if it is text, give its encoding with data.encoding=..."
    )


def looks_like_text(text: str) -> bool:
    """Return whether at most one character in 1,000 has a code below 32 and is not white space (9 to 13)."""
    return len(re.findall(r"[\x00-\x08\x0e-\x1f]", text)) <= len(text) // 1000


def decodes(file: Path, encoding: str) -> bool:
    """Return whether the whole file is valid in `encoding`."""
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        with open_bytes(file) as stream:
            while chunk := stream.read(CHUNK):
                decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def hash_of(file: Path) -> str:
    """Return the sha256 of a file's bytes."""
    with open_bytes(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def open_bytes(file: Path):
    with as_user_error(f"cannot read {file}"):
        return open(file, "rb", opener=regular)
