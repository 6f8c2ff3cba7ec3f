"""Cut text files into shards, which several processes can read at the same time."""

import codecs
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data.examine import CHUNK, open_bytes
from data.files import UserError, as_user_error

SHARD = 1 << 26  # bytes, about the most that a shard holds, unless it is a file that is not cut

# Files in these encodings are cut after line feeds. The byte of a line feed is never a part of another character there,
# and decoding can begin after it. A file in another encoding is not cut.
CUTTABLE = {"utf-8", "utf-8-sig", "ascii", "gb18030", "gbk", "gb2312", "big5", "big5hkscs", "cp950"}

# A function that yields a part of the text in pieces. dill, which datasets uses, must be able to pickle it.
Shard = Callable[[], Iterator[str]]


@dataclass(frozen=True)
class Part:
    """The bytes from `start` to before `stop` of a text file, and the text `before` to put in front of them.

    `before` is a newline at the start of every file but the first, and otherwise empty.
    """

    file: Path
    encoding: str
    start: int
    stop: int
    before: str


def shards_of(files: list[Path], encodings: list[str]) -> list[Shard]:
    """Return the shards of the text of the files, in which newlines join the files.

    A large file is cut into several shards if its encoding is in CUTTABLE. Successive small files share one shard.
    """
    groups, size = [[]], 0
    for number, (file, encoding) in enumerate(zip(files, encodings, strict=True)):
        for part in cut(file, codecs.lookup(encoding).name, "\n" if number else ""):
            if groups[-1] and size + part.stop - part.start > SHARD:
                groups.append([])
                size = 0
            groups[-1].append(part)
            size += part.stop - part.start
    return [partial(read, group) for group in groups]


def cut(file: Path, encoding: str, before: str) -> Iterator[Part]:
    """Yield the parts of a file. All but the last end with a line feed, so that no character or CR LF is cut in two."""
    with open_bytes(file) as stream:
        size = stream.seek(0, io.SEEK_END)
        start = stream.seek(0)
        if encoding == "utf-8-sig":
            start = len(codecs.BOM_UTF8) if stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
            encoding = "utf-8"
        while encoding in CUTTABLE and start + SHARD < size:
            stream.seek(start + SHARD)
            while (line := stream.readline(CHUNK)) and not line.endswith(b"\n"):
                pass
            yield Part(file, encoding, start, stream.tell(), before)
            start, before = stream.tell(), ""
        if start < size or before:
            yield Part(file, encoding, start, size, before)


def read(parts: list[Part]) -> Iterator[str]:
    """Yield the text of a shard in pieces, with every line end as LF.

    Raises UserError if bytes are not in the file's encoding or cannot be read.
    """
    for part in parts:
        yield part.before
        decoder = codecs.getincrementaldecoder(part.encoding)()
        line_ends = io.IncrementalNewlineDecoder(None, translate=True)
        with open_bytes(part.file) as stream:
            place = stream.seek(part.start)
            chunk = b"more"
            while chunk:
                with as_user_error(f"cannot read {part.file}"):
                    chunk = stream.read(min(CHUNK, part.stop - place))
                waiting = len(decoder.getstate()[0])  # bytes of a character that has not been read completely
                try:
                    text = decoder.decode(chunk, final=not chunk)
                except UnicodeError as error:
                    wrong = place - waiting + getattr(error, "start", 0)  # errors of the codec idna have no `start`
                    raise UserError(
                        f"{part.file} is not {part.encoding} at byte {wrong:,}: give data.encoding=..."
                    ) from error
                place += len(chunk)
                yield line_ends.decode(text, final=not chunk)
