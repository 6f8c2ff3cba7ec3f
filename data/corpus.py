"""A corpus: ids and a vocabulary, made once, cached by what they were made from, memory-mapped."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig

from data.files import UserError, replacing, write_json
from data.sources import Source

FORMAT = 1  # raise it when the same source and options give other ids
BLOCK = 1 << 20  # characters at a time
CODE_POINTS = 0x110000


@dataclass
class Corpus:
    """A text as ids. `vocabulary[i]` is the character of id i; None is the unknown symbol."""

    name: str
    ids: np.ndarray  # uint16 or uint32, memory-mapped
    vocabulary: list[str | None]
    sha256: str  # of the text in UTF-8
    unique: int  # characters in the text, before vocab_size cuts
    holdout: float

    @property
    def training(self) -> np.ndarray:
        return self.ids[: len(self.ids) - self.heldout_size]

    @property
    def heldout(self) -> np.ndarray:
        return self.ids[len(self.ids) - self.heldout_size :]

    @property
    def heldout_size(self) -> int:
        return int(len(self.ids) * self.holdout)

    def summary(self) -> dict:
        """What a run's record says of its text."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "characters": len(self.ids),
            "unique": self.unique,
            "vocabulary": len(self.vocabulary),
            "holdout": self.holdout,
        }


def load(cfg: DictConfig) -> Corpus:
    """The corpus of a `data` config: from the cache, or made and put there.

    Errors: UserError for a source that cannot be had, an empty text, or options that make no sense.
    """
    if not 0 <= cfg.holdout < 1:
        raise UserError(f"data.holdout is a share of the text from 0 up to 1: got {cfg.holdout}")
    if cfg.vocab_size is not None and cfg.vocab_size < 2:
        raise UserError(f"data.vocab_size must be 2 or more: got {cfg.vocab_size}")
    source: Source = instantiate(cfg.source)
    for note in source.notes:
        print(note, flush=True)
    options = {"format": FORMAT, "source": source.identity, "vocab_size": cfg.vocab_size}
    key = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(cfg.cache) / key
    made = read(folder)
    if made is None:
        make(source, cfg.vocab_size, folder)
        made = read(folder)
    meta, vocabulary, ids = made
    corpus = Corpus(cfg.name, ids, vocabulary, meta["sha256"], meta["unique"], cfg.holdout)
    print(describe(corpus), flush=True)
    if source.expected:
        print(compare(corpus, source.expected), flush=True)
    return corpus


def read(folder: Path) -> tuple[dict, list[str | None], np.ndarray] | None:
    """What `make` left in a folder; None where that is nothing, or damaged."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        vocabulary = json.loads((folder / "vocabulary.json").read_text())
        # Copy-on-write: torch wants memory that it may write to; the file never changes.
        ids = np.memmap(folder / "ids.bin", dtype=meta["dtype"], mode="c")
    except (OSError, ValueError, KeyError):
        return None
    return (meta, vocabulary, ids) if len(ids) == meta["characters"] else None


def make(source: Source, vocab_size: int | None, folder: Path) -> None:
    """Turn a source into ids.bin, vocabulary.json and meta.json in `folder`, in bounded memory."""
    try:
        with replacing(folder) as temporary:
            temporary.mkdir()
            code_points = temporary / "code_points.bin"
            counts = np.zeros(CODE_POINTS, np.int64)
            digest = hashlib.sha256()
            with open(code_points, "wb") as file:
                for block in blocks(source.pieces()):
                    points = np.frombuffer(block.encode("utf-32-le", "surrogatepass"), np.uint32)
                    counts += np.bincount(points, minlength=CODE_POINTS)
                    digest.update(block.encode("utf-8", "surrogatepass"))
                    file.write(points.tobytes())
            if not counts.any():
                raise UserError("the text is empty")

            unique = int(np.count_nonzero(counts))
            by_frequency = np.argsort(-counts, kind="stable")  # ties in the order of code points
            cut = vocab_size is not None and vocab_size < unique
            kept = by_frequency[: vocab_size - 1 if cut else unique]
            vocabulary: list[str | None] = [chr(point) for point in kept]
            table = np.full(CODE_POINTS, len(kept), np.uint32)  # the unknown symbol comes last
            table[kept] = np.arange(len(kept))
            if cut:
                vocabulary.append(None)
            dtype = np.uint16 if len(vocabulary) <= 1 << 16 else np.uint32
            points = np.memmap(code_points, np.uint32, mode="r")
            with open(temporary / "ids.bin", "wb") as file:
                for start in range(0, len(points), BLOCK):
                    file.write(table[points[start : start + BLOCK]].astype(dtype).tobytes())
            code_points.unlink()
            write_json(temporary / "vocabulary.json", vocabulary)
            meta = {
                "characters": len(points),
                "unique": unique,
                "dtype": np.dtype(dtype).name,
                "sha256": digest.hexdigest(),
                "source": source.identity,
            }
            write_json(temporary / "meta.json", meta)
    except UserError:
        if read(folder) is None:  # else another process made it meanwhile
            raise


def blocks(pieces: Iterator[str]) -> Iterator[str]:
    """The same text in pieces of at least BLOCK characters, but for the last."""
    gathered, size = [], 0
    for piece in pieces:
        gathered.append(piece)
        size += len(piece)
        if size >= BLOCK:
            yield "".join(gathered)
            gathered, size = [], 0
    yield "".join(gathered)


def describe(corpus: Corpus) -> str:
    unknown = corpus.unique - len(corpus.vocabulary) + 1
    cut = f", {unknown:,} rarest mapped to one unknown symbol" if None in corpus.vocabulary else ""
    return (
        f"corpus {corpus.name}: {len(corpus.ids):,} characters, {corpus.unique:,} unique{cut}, "
        f"sha256 {corpus.sha256[:12]}, {corpus.heldout_size:,} held out"
    )


def compare(corpus: Corpus, expected: DictConfig) -> str:
    """How far a copy is from the text it should be."""
    characters = len(corpus.ids) - expected.characters
    unique = corpus.unique - expected.unique
    if not characters and not unique:
        return f"as many characters and unique characters as {expected.what}"
    return (
        f"{expected.what} has {expected.characters:,} characters, {expected.unique:,} unique: "
        f"this copy is off by {characters:+,} ({characters / expected.characters:+.2%}) and {unique:+,}"
    )
