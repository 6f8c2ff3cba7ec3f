"""Synthetic texts that test recall: rows in which some characters follow from earlier characters of the row.

Files of configs/data name the functions `recall` and `induction`, which return a `Source`. Their arguments alone
determine the text. All rows have the same length, and nothing separates them. No row ends with a key, so that the
character after a key is in the same row.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from data.files import UserError
from data.sources import Source

BLOCK = 1024  # number of rows that are generated at a time
# a to z, then other lower-case letters, such as à and α, that have one capital letter of their own.
LOWER = [c for c in map(chr, range(0x590)) if c != c.upper() and len(c.upper()) == 1 and c.upper().lower() == c]
UPPER = [letter.upper() for letter in LOWER]
TRIGGER = "⊢"


def recall(length: int, sequences: int, keys: int, values: int, pairs: int, seed: int) -> Source:
    """Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927): `sequences` rows of `length` characters.

    A row is k_1 v_1 ... k_P v_P q_1 a_1 q_2 a_2 ..., where P = `pairs`. The keys k_i are different letters, drawn
    from the first `keys` lower-case letters; their values v_i are drawn with repetition from the first `values` capital
    letters. The queries q_j, up to the end of the row, are drawn with repetition from the row's keys, and a_j is the
    value of q_j. In the article's experiments, other tokens separate the queries, and each key is queried once. Here,
    queries follow the pairs without gaps, and a key may be queried several times or never.

    Raises UserError if the length is odd, there are fewer keys than pairs, a row has no room for a query, or a number
    is out of range (`check`).
    """
    check(sequences, seed, keys=keys, values=values, pairs=pairs)
    if pairs > keys:
        raise UserError(f"data.pairs must be at most data.keys={keys}: got {pairs}")
    if length % 2:
        raise UserError(f"data.length must be even, since rows consist of keys and values: got {length}")
    if 2 * pairs >= length:
        raise UserError(
            f"data.length={length} must be more than twice data.pairs={pairs}, so that rows have queries too: "
            f"take model.context={2 * pairs + 2} or more"
        )
    numbers = {"length": length, "keys": keys, "values": values, "pairs": pairs}
    identity = {"recall": numbers | {"sequences": sequences, "seed": seed}}
    shard = partial(pieces, partial(recall_rows, **numbers), sequences, seed)
    return Source(identity, lambda: [shard], [], row_length=length, keys="".join(LOWER[:keys]))


def induction(length: int, sequences: int, symbols: int, seed: int) -> Source:
    """Induction heads (Fu et al. 2022, arXiv 2212.14052, section 3.1): `sequences` rows of `length` characters.

    A row is drawn at random from the first `symbols` lower-case letters. At a random place, one letter is replaced by
    the trigger ⊢. The row ends with the trigger and the letter that follows the first trigger. So each row has one
    answer, its last character, as in the article's task. Olsson et al. 2022, arXiv 2209.11895, describe the attention
    heads that solve this task.

    Raises UserError if rows have fewer than 4 characters, or a number is out of range (`check`).
    """
    check(sequences, seed, symbols=symbols)
    if length < 4:
        raise UserError(f"data.length must be 4 or more, to hold the trigger and its answer twice: got {length}")
    numbers = {"length": length, "symbols": symbols}
    identity = {"induction": numbers | {"sequences": sequences, "seed": seed}}
    shard = partial(pieces, partial(induction_rows, **numbers), sequences, seed)
    return Source(identity, lambda: [shard], [], row_length=length, keys=TRIGGER)


def check(sequences: int, seed: int, **letters: int) -> None:
    """Raise UserError if the number of sequences, the seed or a number of letters is out of range."""
    if sequences < 1:
        raise UserError(f"data.sequences must be 1 or more: got {sequences}")
    if seed < 0:
        raise UserError(f"data.text_seed must be 0 or more: got {seed}")
    for name, count in letters.items():
        if not 1 <= count <= len(LOWER):
            raise UserError(f"data.{name} must be from 1 to {len(LOWER)}, the number of letters: got {count}")


def pieces(make: Callable[[np.random.Generator, int], np.ndarray], sequences: int, seed: int) -> Iterator[str]:
    """Yield the text of `sequences` rows in pieces; make(generator, count) draws the next rows, [count, length]."""
    generator = np.random.default_rng(seed)
    for start in range(0, sequences, BLOCK):
        yield "".join(make(generator, min(BLOCK, sequences - start)).ravel().tolist())


def recall_rows(
    generator: np.random.Generator, count: int, length: int, keys: int, values: int, pairs: int
) -> np.ndarray:
    """Return `count` rows of `recall` as characters, [count, length]."""
    row_keys = generator.permuted(np.tile(np.arange(keys), (count, 1)), axis=1)[:, :pairs]
    queries = np.take_along_axis(row_keys, generator.integers(pairs, size=(count, length // 2 - pairs)), 1)
    key = np.concatenate([row_keys, queries], 1)
    value = np.take_along_axis(generator.integers(values, size=(count, keys)), key, 1)
    return np.stack([np.array(LOWER)[key], np.array(UPPER)[value]], -1).reshape(count, length)


def induction_rows(generator: np.random.Generator, count: int, length: int, symbols: int) -> np.ndarray:
    """Return `count` rows of `induction` as characters, [count, length]."""
    rows = np.array(LOWER)[generator.integers(symbols, size=(count, length))]
    each, place = np.arange(count), generator.integers(length - 3, size=count)
    rows[each, place] = rows[:, -2] = TRIGGER
    rows[:, -1] = rows[each, place + 1]
    return rows
