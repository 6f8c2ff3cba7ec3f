"""A corpus: ids and a vocabulary, tokenised once, cached, and memory-mapped."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hydra.utils import instantiate
from omegaconf import DictConfig

from data.examine import digest, examine
from data.files import UserError, as_user_error, locked, out_of_memory, remove, sync
from data.reading import read_json
from data.shards import SHARD
from data.sources import Source
from data.tokenise import HASHED, Died, tokenise

FORMAT = 2  # version of the cached files: increase it when the same source and options give other files


@dataclass
class Corpus:
    """A text as ids. `vocabulary[i]` is the character of id i; None is the unknown symbol.

    `row_length` and `keys` are those of the `Source`.
    """

    name: str
    ids: np.ndarray  # uint16 or uint32, memory-mapped
    vocabulary: list[str | None]
    sha256: str  # of the text in UTF-8
    unique: int  # number of distinct characters in the text, including those that vocab_size leaves out
    unknown_bytes: float  # mean UTF-8 length of the characters that the unknown symbol stands for
    holdout: float  # share of the text, at its end, that is held out
    row_length: int = 1
    keys: str = ""

    @property
    def training(self) -> np.ndarray:
        return self.ids[: len(self.ids) - self.heldout_size]

    @property
    def heldout(self) -> np.ndarray:
        return self.ids[len(self.ids) - self.heldout_size :]

    @property
    def heldout_size(self) -> int:
        """The number of held-out characters, which are whole rows."""
        rows = len(self.ids) * self.holdout / self.row_length
        return int(rows + 1e-6) * self.row_length  # 1e-6, because 100 * 0.29 is 28.999999999999996

    def key_ids(self) -> list[int]:
        """Return the ids of `keys`."""
        return [i for i, symbol in enumerate(self.vocabulary) if symbol is not None and symbol in self.keys]

    def utf8_bytes(self) -> np.ndarray:
        """Return the UTF-8 length of each symbol, float32 [vocabulary].

        For the unknown symbol it is the mean over all those characters of the text for which this symbol stands, so
        that a sum over the whole text is exact.
        """
        known = [self.unknown_bytes if symbol is None else len(symbol.encode()) for symbol in self.vocabulary]
        return np.array(known, np.float32)

    def summary(self) -> dict:
        """Return the description of the text for the record of a run."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "characters": len(self.ids),
            "unique": self.unique,
            "vocabulary": len(self.vocabulary),
            "holdout": self.holdout,
        }


def load(cfg: DictConfig, vocabulary: list[str | None] | None = None) -> Corpus:
    """Return the corpus of a `data` config, from the cache or, if it is not there, tokenised and added to it.

    If `vocabulary` is given, the id of a character is its index in it. Otherwise a vocabulary is made from the text. A
    description of the corpus is printed.

    Raises UserError if the source cannot be read, the text is empty or changes meanwhile, the cache cannot be written,
    `vocabulary` lacks both a character of the text and the unknown symbol, or `check_rows` fails.
    """
    source: Source = instantiate(cfg.source)
    for note in source.notes:
        print(note, flush=True)
    options = {"format": FORMAT, "source": source.identity, "vocab_size": cfg.vocab_size}
    if vocabulary is not None:
        options["vocabulary"] = vocabulary
    folder = Path(cfg.cache) / digest(options)[:16]
    made = read(folder)
    if made is None or lock_of(folder).exists():  # a killed process leaves its lock file, which `make` removes
        make(source, cfg.vocab_size, folder, cfg.processes or core_count(), vocabulary)
        made = read(folder)
    if made is None:
        raise UserError(f"{folder} does not hold what was just written to it: check the disk")
    meta, symbols, ids = made
    facts = meta["sha256"], meta["unique"], meta["unknown_bytes"]
    corpus = Corpus(cfg.name, ids, symbols, *facts, cfg.holdout, source.row_length, source.keys)
    check_rows(corpus)
    print(describe(corpus, own=vocabulary is None), flush=True)
    if source.expected:
        print(compare(corpus, source.expected), flush=True)
    return corpus


def check_rows(corpus: Corpus) -> None:
    """Raise UserError if a text of rows has an unknown symbol in its vocabulary, or a `holdout` of less than one row.

    A `holdout` of 0 is allowed. A text consists of rows if `row_length` is above 1.
    """
    if corpus.row_length == 1:
        return
    if None in corpus.vocabulary:
        raise UserError(
            f"each of the {corpus.unique} characters of {corpus.name} needs an id: take data.vocab_size=null"
        )
    if corpus.holdout and not corpus.heldout_size:
        raise UserError(
            f"data.holdout={corpus.holdout} of {len(corpus.ids) // corpus.row_length:,} rows is less than one row: "
            "take a larger data.holdout, data.holdout=0 or a larger data.sequences"
        )


def read(folder: Path) -> tuple[dict, list[str | None], np.ndarray] | None:
    """Return meta.json, the vocabulary and the ids that `make` wrote; None if they are missing or damaged."""
    try:
        meta = read_json(folder / "meta.json")
        if meta.pop("digest") != digest(meta):
            return None
        hashes, _ = examine([folder / name for name in HASHED], str(folder.parent), encodings=False)
        if hashes != [meta["hashes"][name] for name in HASHED]:
            return None
        vocabulary = read_json(folder / "vocabulary.json")
        dtype = {"uint16": np.uint16, "uint32": np.uint32}[meta["dtype"]]
        # Read-only: Linux counts private writable mappings (mode "c") as memory, and refuses too large ones.
        ids = np.memmap(folder / "ids.bin", dtype=dtype, mode="r")
        good = len(ids) == meta["characters"]
    except (UserError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if out_of_memory(error):  # for example under ulimit -v, which limits the address space
            raise
        return None
    return (meta, vocabulary, ids) if good else None


def lock_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def make(
    source: Source, vocab_size: int | None, folder: Path, processes: int, vocabulary: list[str | None] | None = None
) -> None:
    """Turn a source into ids.bin, vocabulary.json and meta.json in `folder`, in bounded memory.

    Unfinished work is kept in a work folder beside `folder`. If this process or one that it started is killed, the next
    call continues the work. If another process is making the same corpus, wait for it.

    Raises UserError if tokenising fails, if the text changes meanwhile, or if the finished files cannot be put into
    `folder`. In the first two cases the work folder is removed, unless a process was killed.
    """
    work = folder.with_name(f".{folder.name}.{SHARD}.work")
    with (
        as_user_error(f"cannot write {folder}"),
        locked(
            lock_of(folder),
            unsafe=f"files in {folder.parent} cannot be locked: tokenise a text in one process at a time",
            waiting="another process is tokenising this corpus: waiting for it",
        ),
    ):
        if read(folder) is not None:  # another process made it meanwhile
            return
        if any(path.is_symlink() for path in (work, *work.rglob("*"))):
            remove(work)  # tokenise() makes no links
        try:
            tokenise(source, vocab_size, work, processes, vocabulary)
            if source.changed():
                raise UserError("the text changed while it was read: start again")
        except (UserError, OSError) as error:
            if not isinstance(error, Died):
                remove(work)
            raise
        sync(work)
        remove(folder)
        work.rename(folder)
        sync(folder.parent)


def core_count() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(corpus: Corpus, own: bool) -> str:
    """Return the line about a corpus that train.py prints; `own` is True if the vocabulary was made from its text."""
    unknown = corpus.unique - len(corpus.vocabulary) + 1
    cut = f", {unknown:,} rarest mapped to one unknown symbol" if None in corpus.vocabulary else ""
    if not own:
        pieces = (corpus.ids[start : start + SHARD] for start in range(0, len(corpus.ids), SHARD))
        unknown = sum(np.count_nonzero(piece == len(corpus.vocabulary) - 1) for piece in pieces)
        share = unknown / len(corpus.ids) if None in corpus.vocabulary else 0
        cut = f", {share:.2%} of the text unknown to the vocabulary of train.init_from"
    return (
        f"corpus {corpus.name}: {len(corpus.ids):,} characters, {corpus.unique:,} unique{cut}, "
        f"sha256 {corpus.sha256[:12]}, {corpus.heldout_size:,} held out"
    )


def compare(corpus: Corpus, expected: DictConfig) -> str:
    """Return a line that compares the sizes of a corpus with the expected sizes, `Source.expected`."""
    characters = len(corpus.ids) - expected.characters
    unique = corpus.unique - expected.unique
    if not characters and not unique:
        return f"as many characters and unique characters as {expected.what}"
    return (
        f"{expected.what} has {expected.characters:,} characters, {expected.unique:,} unique: "
        f"this copy is off by {characters:+,} ({characters / expected.characters:+.2%}) and {unique:+,}"
    )
