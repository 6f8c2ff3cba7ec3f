"""Test tokenising in several processes: the same bytes wherever the text is cut, killed processes, bounded memory."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from data import corpus, examine, shards, sources, tokenise
from data.batches import crops, place
from data.files import UserError
from data.sources import files, hub
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

LINES = "第一回\r\n\r\n話說天下大勢,\r分久必合\u2028合久必分。\x85\r\n\ufeff𠀀滚滚\r\n"


@pytest.fixture
def texts(tmp_path) -> tuple[list[Path], list[str], str]:
    """Return the paths of files in several encodings, their encodings, and the text of all files joined."""
    written = [
        (LINES * 3, "utf-8-sig"),
        ("长江东逝水\r\n浪花淘尽英雄\r\r\n" * 5 + "是非成败", "gb18030"),
        (LINES * 2, "utf-16"),
        ("", "utf-8"),
        ("一二三四五六七八九十" * 20, "utf-8"),  # no line end to cut at
        (LINES, "utf-8"),
        ("話說天下大勢\r\n" * 9, "big5hkscs"),
    ]
    paths = []
    for number, (text, encoding) in enumerate(written):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_bytes(text.encode(encoding))
    whole = "\n".join(text.replace("\r\n", "\n").replace("\r", "\n") for text, _ in written)
    return paths, [encoding for _, encoding in written], whole


def shard_size(monkeypatch, size: int) -> None:
    for module in (shards, sources, corpus):
        monkeypatch.setattr(module, "SHARD", size)


def source_of(texts) -> sources.Source:
    paths, encodings, _ = texts
    identity = {"files": [path.name for path in paths]}
    return sources.Source(identity, lambda: shards.shards_of(paths, encodings), [])


def check(folder: Path, text: str, vocab_size: int | None = None) -> None:
    """Assert that `folder` holds the ids of `text`, computed here in another way.

    Its parent must hold nothing else, except perhaps the folder `files`.
    """
    by_frequency = [c for c, _ in sorted(Counter(text).items(), key=lambda item: (-item[1], item[0]))]
    kept = by_frequency[: vocab_size and vocab_size - 1]
    ids = [kept.index(c) if c in kept else len(kept) for c in text]
    assert (folder / "ids.bin").read_bytes() == np.array(ids, np.uint16).tobytes()
    assert json.loads((folder / "vocabulary.json").read_text()) == kept + [None] * (vocab_size is not None)
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    rare = [len(c.encode()) for c in text if c not in kept]
    assert meta["unknown_bytes"] == pytest.approx(sum(rare) / max(1, len(rare)))
    assert (meta["characters"], meta["unique"], meta["dtype"]) == (len(text), len(set(text)), "uint16")
    assert sorted(path.name for path in folder.iterdir()) == ["ids.bin", "meta.json", "vocabulary.json"]
    assert {path.name for path in folder.parent.iterdir()} - {"files"} == {folder.name}


# The same text, however it is cut


def test_the_text_is_the_same_wherever_it_is_cut(texts, monkeypatch):
    paths, encodings, whole = texts
    found = set()
    for size in [*range(1, 60), 1000]:
        monkeypatch.setattr(shards, "SHARD", size)
        monkeypatch.setattr(shards, "CHUNK", 1 + size % 7)
        cut = shards.shards_of(paths, encodings)
        assert "".join(piece for shard in cut for piece in shard()) == whole
        found.add(len(cut))
    assert min(found) < 4
    assert max(found) > 20


@pytest.mark.parametrize("encoding", sorted(shards.CUTTABLE))
def test_a_line_feed_is_no_part_of_a_character(encoding):
    characters = "".join(chr(c) for c in range(0x30000) if c != 10 and not 0xD800 <= c < 0xE000)
    assert b"\n" not in characters.encode(encoding, errors="ignore")


@pytest.mark.parametrize(("processes", "size"), [(1, 20), (2, 20), (5, 100), (1, 1 << 26)])
def test_the_bytes_are_the_same_in_any_number_of_processes(texts, tmp_path, monkeypatch, processes, size):
    shard_size(monkeypatch, size)
    monkeypatch.setattr(tokenise, "BLOCK", 7)
    corpus.make(source_of(texts), 12, tmp_path / "cache/key", processes)
    check(tmp_path / "cache/key", texts[2], 12)


def test_a_dataset_is_cut_into_rows(tmp_path, monkeypatch):
    rows = [f"{number}\n回" * (number % 3) for number in range(50)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text("".join(json.dumps({"body": row}) + "\n" for row in rows))
    shard_size(monkeypatch, 100)
    monkeypatch.setattr(sources, "ROWS", 3)
    source = hub(str(tmp_path / "data"), "body", None, "train", None)
    assert len(source.shards()) > 3
    corpus.make(source, None, tmp_path / "cache/key", 2)
    check(tmp_path / "cache/key", "\n".join(rows))


# What goes wrong


def test_a_wrong_byte_is_named_by_its_place_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD", 100)
    monkeypatch.setattr(shards, "CHUNK", 10)
    content = "\ufeff天下大勢\n".encode() + "分久必合\n".encode() * 40
    for byte in range(400, 430):
        (tmp_path / "bad.txt").write_bytes(content[:byte] + b"\xff" + content[byte:])
        with pytest.raises(UserError) as error:
            list(files(str(tmp_path / "bad.txt"), "utf-8-sig").pieces())
        # The message names the first byte of the broken character or, if no character is broken, the wrong byte.
        start = byte - max(0, (byte - 3) % 13 % 3)
        assert f"is not utf-8 at byte {start}: " in str(error.value)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_wrong_byte_is_named_by_file_and_place(tmp_path, monkeypatch, capfd, processes):
    shard_size(monkeypatch, 1000)
    monkeypatch.setattr(shards, "CHUNK", 100)
    content = ("天下大勢\n" * 2000).encode()
    (tmp_path / "good.txt").write_bytes(content)
    (tmp_path / "bad.txt").write_bytes(content[:13003] + b"\xff" + content[13003:])
    source = files([str(tmp_path / "good.txt"), str(tmp_path / "bad.txt")], "utf-8")
    with pytest.raises(UserError, match=r"bad.txt is not utf-8 at byte 13,003: give data.encoding="):
        corpus.make(source, None, tmp_path / "cache/key", processes)
    assert not list(tmp_path.glob("cache/*.work"))
    assert not (tmp_path / "cache/key").exists()
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_disk_leaves_nothing(texts, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"cannot write .*key: No space left"):
        corpus.make(source_of(texts), None, tmp_path / "cache/key", 1)
    assert not list(tmp_path.glob("cache/*key*/*"))
    assert not list(tmp_path.glob("cache/*.work"))


def test_a_text_that_changes_meanwhile_is_refused(texts, tmp_path, monkeypatch):
    paths, choose = texts[0], tokenise.choose
    monkeypatch.setattr(tokenise, "choose", lambda *a: (paths[-1].write_bytes(b"short"), choose(*a))[1])
    with pytest.raises(UserError, match="changed while it was read"):
        corpus.make(source_of(texts), None, tmp_path / "cache/key", 1)


# Interrupted work, and two commands at once. SCRIPT runs as a command and tokenises text.txt into cache/key. Its first
# argument names the function that it slows down, and its second the process that is killed at shard 20: the first one,
# the one that reads this shard, or none.

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from data import corpus, shards, sources, tokenise

what, shot, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
for module in (shards, sources, corpus):
    module.SHARD = 300
first, do = os.getpid(), getattr(tokenise, what)

def slow(shard, number, **options):
    time.sleep(0.02)
    if number == 20 and shot != "none":
        os.kill(first if shot == "first" else os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return do(shard, number, **options)

setattr(tokenise, what, slow)
try:
    corpus.make(sources.files(str(folder / "text.txt"), "utf-8"), None, folder / "cache/key", 2)
except corpus.Died as error:
    sys.exit(str(error))
"""


@pytest.fixture
def text(tmp_path) -> str:
    text = "".join(f"第{number}回\n" for number in range(1000))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    return text


@pytest.fixture
def start():
    """Return a function that starts SCRIPT in a process, which is killed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments) -> subprocess.Popen:
            line = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            process = subprocess.Popen(line, cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}, **pipes)
            stack.callback(process.kill)
            return process

        yield start


@pytest.mark.parametrize(("what", "shot"), [("count", "first"), ("write_ids", "one")])
def test_what_is_killed_is_continued(tmp_path, text, monkeypatch, start, what, shot):
    process = start(what, shot, tmp_path)
    _, error = process.communicate(timeout=300)  # returns when all processes with the pipe have ended
    assert process.returncode == -9 if shot == "first" else "the same command continues" in error
    (work,) = (tmp_path / "cache").glob(".*.work")
    done = {int(path.name) for path in (work / what.replace("count", "counts").replace("write_", "")).glob("[0-9]*")}
    stale = tmp_path / "cache/.other.300.work"
    stale.mkdir()

    do, again = getattr(tokenise, what), []
    monkeypatch.setattr(tokenise, what, lambda *a, **o: (again.append(a[1]), do(*a, **o))[1])
    shard_size(monkeypatch, 300)
    corpus.make(files(str(tmp_path / "text.txt"), "utf-8"), None, tmp_path / "cache/key", 1)
    assert done
    assert sorted(again) == sorted(set(range(len(again) + len(done))) - done)
    assert not work.exists()
    stale.rmdir()  # fails if the folder was removed
    check(tmp_path / "cache/key", text)


def test_of_two_at_once_one_waits(tmp_path, text, start):
    pair = [start("count", "none", tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outputs
    assert sorted("waiting for it" in out for out, _ in outputs) == [False, True]
    check(tmp_path / "cache/key", text)


# Memory, progress


def test_memory_does_not_grow_with_the_text(tmp_path):
    text = "滚滚长江东逝水浪花淘尽英雄\n" * 1_000_000  # 40 MB, 14 million characters
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    script = """
import sys
import datasets, numpy
from data import corpus, sources
from pathlib import Path

def peak(): return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

folder = Path(sys.argv[1])
before = peak()
corpus.make(sources.files(str(folder / "text.txt"), None), None, folder / "cache", 1)
print((peak() - before) // 1024)
"""
    line = [sys.executable, "-c", script, str(tmp_path)]
    run = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."})
    assert int(run.stdout.split()[-1]) < 50, run.stderr  # MiB; all code points would take 53, and all ids 27 more


def test_ids_larger_than_memory_can_be_read(tmp_path, monkeypatch):
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with open(tmp_path / "ids.bin", "wb") as file:
        file.truncate(2 * memory)  # takes no room
    (tmp_path / "vocabulary.json").write_text("[]")
    meta = {"dtype": "uint16", "characters": memory, "unique": 0, "sha256": "0" * 64}
    meta |= {"hashes": dict.fromkeys(corpus.HASHED, "x")}
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"digest": examine.digest(meta)}))
    monkeypatch.setattr(corpus, "examine", lambda *_, **__: (["x", "x"], []))  # examining the file would take minutes
    ids = corpus.read(tmp_path)[2]
    assert place(ids, torch.device("cuda")) is ids
    x, y = crops(ids, 16, 8, seed=0, step=0)
    assert x.shape == y.shape == (8, 16)


def test_a_line_now_and_then_says_how_far_it_is(texts, tmp_path, monkeypatch, capsys):
    shard_size(monkeypatch, 20)
    monkeypatch.setattr(tokenise, "QUIET", -1)
    corpus.make(source_of(texts), None, tmp_path / "cache/key", 1)
    output = capsys.readouterr().out
    assert "shards in 1 processes" in output
    assert "counting characters: 100%, about 0.0 min left" in output
    assert "writing ids: 100%" in output


# What is remembered of files


def test_an_unchanged_file_is_not_read_again(tmp_path, monkeypatch):
    path, cache = tmp_path / "a.txt", str(tmp_path / "cache")
    read, read_through = [], examine.read_through
    monkeypatch.setattr(examine, "read_through", lambda file: (read.append(file), read_through(file))[1])
    monkeypatch.setattr(examine, "RACY", 3600)
    path.write_text("甲乙", encoding="utf-8")
    first = files(str(path), None, cache=cache)
    assert files(str(path), None, cache=cache).identity == first.identity
    assert len(read) == 2  # a file so young may change again in the same tick of the clock
    monkeypatch.setattr(examine, "RACY", -60)
    for _ in range(3):
        assert files(str(path), None, cache=cache).identity == first.identity
    assert len(read) == 3
    times = path.stat()
    for content in ("甲丙", "甲乙丙", "丁丙"):
        path.write_text(content, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        changed = files(str(path), None, cache=cache)
        assert changed.identity["files"] == [hashlib.sha256(content.encode()).hexdigest()]
    path.write_bytes("汉朝自高祖斩白蛇而起义，一统天下，后来光武中兴".encode("gb18030"))
    assert files(str(path), None, cache=cache).identity["encodings"] == ["gb18030"]
    assert files(str(path), "gbk", cache=cache).identity["encodings"] == ["gbk"]
    assert len(read) == 7
    path.write_text("戊己", encoding="utf-8")
    for encoding in ("utf-8", None, None):  # the first call detects no encoding, and stores only the hash
        files(str(path), encoding, cache=cache)
    assert len(read) == 8


def test_a_damaged_cache_of_hashes_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(examine, "RACY", -60)
    path, cache = tmp_path / "a.txt", str(tmp_path / "cache")
    path.write_text("甲乙", encoding="utf-8")
    first = files(str(path), None, cache=cache)
    (store,) = (tmp_path / "cache/files").glob("*.json")
    store.write_bytes(store.read_bytes()[:-9])
    assert files(str(path), None, cache=cache).identity == first.identity
