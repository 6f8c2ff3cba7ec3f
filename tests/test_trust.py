"""Test runs in adverse surroundings: links, power cuts, locales, threads, signals, damaged files and dead parents."""

import errno
import json
import os
import pickle
import re
import select
import shutil
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra.errors import HydraException
from omegaconf import OmegaConf

import evaluate
import training.summary
from configs import process
from configs.cli import compose
from configs.messages import explain
from configs.process import print_without_fail
from data import corpus, sources
from data.files import UserError, out_of_memory, remove, write_bytes, write_json
from data.reading import WHOLE, misfit, read_json
from scripts import dashboard, reproduce
from scripts.reporting import table as table_page
from scripts.reporting.markdown import commit, trained_on
from scripts.reporting.records import speed_record
from scripts.studies import claims as claims_study
from scripts.studies import runner
from tests.conftest import ROOT, command
from tests.helpers.runs import flip, folder_of, train_for
from train import train
from training import checkpoint, metrics, provenance
from training.interruption import stop_signals
from training.loading import load_run
from training.record import Record, read_config
from training.trainer import Trainer
from training.wandb_mirror import Mirror

pytestmark = pytest.mark.slow


@pytest.fixture
def outside(tmp_path) -> Path:
    """Return a folder to which the links of a test point. Its contents must not change."""
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter").write_text("years of work")
    yield folder
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("chapter", "years of work")]


# Links


def test_remove_removes_links_and_not_their_targets(tmp_path, outside):
    (tmp_path / "inside").mkdir()
    for link in (tmp_path / "link", tmp_path / "inside/link"):
        link.symlink_to(outside)
    remove(tmp_path / "link")
    remove(tmp_path / "inside")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


def test_a_temporary_that_is_a_link_is_not_followed(tmp_path, outside):
    (tmp_path / ".a.json.x.tmp").symlink_to(outside)
    (tmp_path / ".a.json.y.tmp").mkdir()  # our temporaries are never folders
    write_json(tmp_path / "a.json", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.json.y.tmp", "a.json", "thesis"]


@pytest.mark.parametrize("name", [".x.tmp", ".lock", "metrics.jsonl", "state.pt", "summary.json", "model.safetensors"])
@pytest.mark.parametrize("leads_to", ["folder", "file"])
@pytest.mark.parametrize("resume", ["true", "false"])
def test_links_in_a_run_s_folder_do_no_harm(tiny, outside, name, leads_to, resume):
    cfg = compose([*tiny, "train.steps=9", "train.checkpoint_seconds=0", f"resume={resume}"])
    train_for(5, cfg)
    path = folder_of(cfg) / name
    path.unlink(missing_ok=True)
    path.symlink_to(outside if leads_to == "folder" else outside / "chapter")
    try:
        train(cfg)
    except UserError as error:
        assert name in str(error)  # noqa: PT017
    else:
        assert not path.is_symlink()


@pytest.mark.parametrize("leads_to", ["chapter", "nowhere"])
@pytest.mark.parametrize("script", [evaluate, dashboard])
def test_a_link_in_the_place_of_a_command_s_output_does_no_harm(tiny, outside, monkeypatch, script, leads_to):
    cfg = compose(tiny)
    train(cfg)
    name = {evaluate: "evaluation.json", dashboard: "dashboard.html"}[script]
    path = folder_of(cfg) / name
    path.symlink_to(outside / leads_to)
    arguments = [f"run={path.parent}", "stride=8"] if script is evaluate else [f"runs={cfg.runs}", f"out={path}"]
    monkeypatch.setattr("sys.argv", [name, *arguments])
    script.run()
    assert path.is_file()
    assert not path.is_symlink()


class Trap:
    """An object that creates a file when it is unpickled, which shows that code in a file was executed."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["state.pt", "model.safetensors", "text.safetensors"])
@pytest.mark.parametrize("zipped", [True, False, None], ids=["torch", "older torch", "pickle"])
def test_code_in_a_file_of_a_run_is_not_executed(tiny, tmp_path, name, zipped):
    cfg = compose([*tiny, "train.steps=9", "train.checkpoint_seconds=0"])
    half_done = name == "state.pt"
    if half_done:
        train_for(5, cfg)
    else:
        train(cfg)
    harmful = {"step": 1, "model": Trap(tmp_path / "executed"), "optimizer": {}, "metrics_bytes": 0}
    if zipped is None:
        (folder_of(cfg) / name).write_bytes(pickle.dumps(harmful))
    else:
        torch.save(harmful, folder_of(cfg) / name, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=re.escape(name)):
        load_run(folder_of(cfg))
    if half_done:
        with pytest.raises(UserError, match=re.escape(name)):
            train(cfg)
    assert not (tmp_path / "executed").exists()


def test_a_link_in_a_finished_run_s_folder_does_no_harm(tiny, outside):
    cfg = compose(tiny)
    train(cfg)
    (folder_of(cfg) / ".evaluation.json.x.tmp").symlink_to(outside)
    train(cfg)
    assert not list(folder_of(cfg).glob(".*"))


@pytest.mark.parametrize("link", ["{key}", ".{key}.lock", ".{key}.67108864.work", ".{key}.67108864.work/counts"])
def test_links_in_the_cache_do_no_harm(tiny, tmp_path, outside, link):
    cfg = compose(tiny).data
    whole = corpus.load(cfg)
    (made,) = (path for path in (tmp_path / "cache").iterdir() if path.name != "files")
    path = made.parent / link.format(key=made.name)
    remove(made)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(outside / "chapter" if link.endswith("lock") else outside)
    try:
        again = corpus.load(cfg)
    except UserError as error:
        assert "It is a link, which is not followed" in str(error)  # noqa: PT017
    else:
        assert (again.ids == whole.ids).all()


def test_only_regular_files_are_read_and_replaced(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(UserError, match="Not a regular file"):
            read_json(path)
        with pytest.raises(UserError, match="Not a regular file"):
            sources.files(str(path), None)
    with pytest.raises(UserError, match=r"cannot write .*fifo: Not a regular file"):
        write_json(tmp_path / "fifo", {})


@pytest.mark.parametrize("name", ["{key}/meta.json", "files/*.json", ".{key}.67108864.work/ids.bin"])
def test_a_fifo_in_the_cache_is_not_waited_for(tiny, tmp_path, name):
    cfg = compose(tiny).data
    corpus.load(cfg)
    (made,) = (path for path in (tmp_path / "cache").iterdir() if path.name != "files")
    path = made.parent / name.format(key=made.name)
    if path.name == "*.json":
        path = next(path.parent.iterdir())
    elif path.name == "ids.bin":
        remove(made)
        path.parent.mkdir()
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    signal.alarm(60)  # ends the process if it waits for the FIFO
    try:
        assert corpus.load(cfg).unique
    except UserError as error:
        assert "cannot write" in str(error)  # noqa: PT017
    finally:
        signal.alarm(0)
    assert corpus.load(cfg).unique


# Power cuts


@pytest.mark.parametrize("holdout", [0.05, 0])
def test_a_run_that_lost_all_rows_before_its_end_can_be_finished(tiny, monkeypatch, holdout):
    cfg = compose([*tiny, f"data.holdout={holdout}"])
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "finish", raise_stopped)
        with pytest.raises(Stopped):
            train(cfg)
    Record.of(cfg).metrics.write_bytes(b"")
    summary = train(cfg)
    assert summary["status"] == "finished"
    assert "heldout_best" not in summary["evaluation"]


class Stopped(Exception): ...


def raise_stopped(*_):
    raise Stopped


def test_files_are_synced_before_they_are_renamed_and_their_folders_afterwards(tiny, monkeypatch):
    """In a run, the metrics are synced before each state and summary too."""
    cfg, done = compose([*tiny, "train.checkpoint_seconds=0"]), []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda f: (done.append(("sync", os.readlink(f"/proc/self/fd/{f}"))), fsync(f))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(("name", str(b), str(a))), replace(a, b))[1])
    train(cfg)
    names = [i for i, one in enumerate(done) if one[0] == "name" and cfg.runs in one[1]]
    assert {Path(done[i][1]).name for i in names} >= {"state.pt", "summary.json", "model.safetensors", "config.yaml"}
    for i in names:
        assert done[i - 1] == ("sync", done[i][2])
        assert done[i + 1] == ("sync", str(Path(done[i][1]).parent))
        if done[i][1].endswith(("state.pt", "summary.json")):
            assert done[i - 2] == ("sync", str(folder_of(cfg) / "metrics.jsonl"))


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    write_json(tmp_path / "a.json", {"a": [float("inf"), float("nan"), 1.5], "b": -float("inf")})
    assert json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail) == {
        "a": [None, None, 1.5],
        "b": None,
    }


def test_the_parents_of_new_folders_are_synced(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda f: (synced.append(os.readlink(f"/proc/self/fd/{f}")), fsync(f))[1])
    write_json(tmp_path / "a/b/c.json", {})
    assert synced[:2] == [str(tmp_path), str(tmp_path / "a")]


# Locales


@pytest.mark.parametrize("given", [[], ["data.name=三国"]])
def test_a_run_is_the_same_in_another_locale(tiny, text, given):
    cfg = compose([*tiny, *given])
    train(cfg)
    whole = Record.of(cfg).model.read_bytes()
    remove(Path(cfg.data.cache))
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = command("train.py", *tiny, *given, "resume=false", env=locale)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder_of(cfg).parent.iterdir()] == [cfg.job.name]
    assert Record.of(cfg).model.read_bytes() == whole
    load_run(folder_of(cfg))


def test_arguments_that_python_cannot_encode_in_the_locale(tiny, tmp_path):
    """UTF-8 arguments are read as GBK: the C library decodes some to characters that Python cannot encode in GBK."""
    made = ["localedef", "--no-archive", "-i", "zh_CN", "-f", "GBK", tmp_path / "zh_CN.GBK"]
    if shutil.which("localedef") is None or subprocess.run(made, capture_output=True).returncode > 1:
        pytest.skip("this machine cannot make locales")
    locale = {"LC_ALL": "zh_CN.GBK", "LOCPATH": str(tmp_path), "PYTHONUTF8": "0"}
    done = command("train.py", *tiny, "data.name=一", "train.steps=0", env=locale)
    assert done.returncode == 0, done.stderr


def test_a_record_names_its_experiment_though_its_folder_was_given_without_it(tmp_path, monkeypatch):
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path / "small")
    assert Record(Path("gau-seed1")).name == "small/gau-seed1"


def test_a_name_that_the_locale_cannot_read_is_kept(tmp_path):
    name = "\udce6\udc96\udc87"  # a name in UTF-8, as it is read in the locale C
    Record(tmp_path).start(OmegaConf.create({"data": {"path": name}, "job": {"name": "x"}}))
    assert read_config(Record(tmp_path)).data.path == name
    write_json(tmp_path / "summary.json", {"command": name})
    assert read_json(tmp_path / "summary.json") == {"command": name}


# The tokenised cache


def reverse(path: Path) -> None:
    write_json(path, read_json(path)[::-1])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("ids.bin", lambda path: flip(path, 7)),
        ("vocabulary.json", reverse),
        ("vocabulary.json", lambda path: path.write_text("[")),
        ("meta.json", lambda path: path.write_text("[]")),
        ("meta.json", lambda path: path.write_text("[" * 100_000)),
        ("meta.json", lambda path: write_json(path, read_json(path) | {"dtype": "int16"})),
        ("meta.json", lambda path: write_json(path, read_json(path) | {"dtype": "O"})),
        ("meta.json", lambda path: write_json(path, read_json(path) | {"sha256": None})),
        ("meta.json", lambda path: write_json(path, read_json(path) | {"hashes": "x"})),
        ("meta.json", lambda path: write_json(path, read_json(path) | {"sha256": "0" * 64})),
        ("meta.json", lambda path: write_json(path, {k: v for k, v in read_json(path).items() if k != "unique"})),
        ("meta.json", lambda path: write_json(path, read_json(path) | {"unknown_bytes": "x"})),
    ],
)
def test_a_damaged_cache_is_made_again(tiny, tmp_path, name, damage):
    cfg = compose(tiny).data
    whole = corpus.load(cfg)
    ids = np.array(whole.ids)
    (path,) = (tmp_path / "cache").glob(f"*/{name}")
    damage(path)
    again = corpus.load(cfg)
    assert (again.ids == ids).all()
    assert (again.vocabulary, again.sha256, again.unique) == (whole.vocabulary, whole.sha256, whole.unique)


@pytest.mark.parametrize("content", ["[]", "{}", '{"x": 3}', "[" * 100_000])
def test_damaged_stores_of_hashes_are_ignored(tiny, tmp_path, content):
    cfg = compose(tiny).data
    whole = corpus.load(cfg)
    for store in (tmp_path / "cache/files").iterdir():
        store.write_text(content)
    assert corpus.load(cfg).sha256 == whole.sha256


# Threads, code, signals, printing


@pytest.mark.parametrize(("threads", "warned"), [(1, False), (2, True)])
def test_another_number_of_threads_is_reported(tiny, capsys, threads, warned):
    cfg = compose([*tiny, "train.steps=9", "train.checkpoint_seconds=0"])
    train_for(5, cfg)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        train(cfg)
    finally:
        torch.set_num_threads(before)
    message = "the number of CPU threads was 1 and is now 2"
    assert (f"{message}: " in (printed := capsys.readouterr().out)) == ("set OMP_NUM_THREADS=1" in printed) == warned


def test_all_numbers_of_threads_are_recorded(tiny, capsys):
    cfg = compose([*tiny, "train.steps=9", "train.checkpoint_seconds=0"])
    train_for(3, cfg)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        train_for(2, cfg)
        torch.set_num_threads(1)
        summary = train(cfg)
    finally:
        torch.set_num_threads(before)
    assert summary["threads"] == 1
    assert summary["earlier_threads"] == [{"from_step": 0, "threads": 1}, {"from_step": 3, "threads": 2}]
    printed = capsys.readouterr().out
    assert "the number of CPU threads was 1 then 2 and is now 1: the weights of this run will differ" in printed
    assert printed.count("set OMP_NUM_THREADS") == 1
    assert Record.of(cfg).read_summary() == summary


def test_a_run_that_other_code_continued_names_both(tiny, monkeypatch, capsys):
    cfg, now = compose([*tiny, "train.steps=9", "train.checkpoint_seconds=0"]), provenance.code()
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "code", lambda: now | {"commit": "a" * 40, "dirty": False})
        train_for(3, cfg)
    train_for(2, cfg)
    summary = train(cfg)
    assert capsys.readouterr().out.count("the code has changed since this run was trained at commit aaaa") == 1
    assert [(one["from_step"], one["commit"]) for one in summary["earlier_code"]] == [(0, "a" * 40)]
    assert commit(summary) == f"{'a' * 12} (continued at {commit(now)})"
    train(cfg)
    assert "finished before with other code" in capsys.readouterr().out


def test_a_process_names_the_code_that_it_began_with(monkeypatch):
    now = provenance.code()
    monkeypatch.setattr(provenance, "git", lambda *_: "b" * 40)
    assert provenance.read_code() != now
    assert provenance.code() == now


def test_a_run_that_another_device_continued_names_both(tiny, monkeypatch, capsys):
    cfg, here = (
        compose([*tiny, "train.steps=9", "train.checkpoint_seconds=0"]),
        provenance.device_name(torch.device("cpu")),
    )
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "device_name", lambda _: "another CPU")
        train_for(3, cfg)
    train_for(2, cfg)
    summary = train(cfg)
    there = {"device": "another CPU", "torch": torch.__version__}
    assert summary["earlier_devices"] == [{"from_step": 0} | there]
    assert summary["device"] == here
    assert capsys.readouterr().out.count("this run was trained on another CPU with torch") == 1
    devices = [f"{name}, {summary['precision']}, torch {torch.__version__}" for name in ("another CPU", here)]
    assert trained_on([summary]).startswith("; ".join(devices))
    assert Record.of(cfg).read_summary() == summary


def test_code_that_took_no_step_of_a_run_is_not_named():
    before, between = ({"commit": name, "dirty": False, "changes": None} for name in "ab")
    here = [{"from_step": 0, "device": "a CPU", "torch": "2"}]
    now = SimpleNamespace(step=3, device=torch.device("cpu"), trained_by=[{"from_step": 0} | before], devices_used=here)
    now.threads_used = [{"from_step": 0, "threads": 1}]
    checkpoint.note_changes(now, {"trained_by": [{"from_step": 0} | before, {"from_step": 3} | between]})
    assert now.trained_by == [{"from_step": 0} | before]


def test_a_copy_inside_another_repository_has_no_commit(tmp_path, monkeypatch):
    for line in (["init", "-q"], ["-c", "user.email=a@b", "-c", "user.name=a", "commit", "-qm1", "--allow-empty"]):
        subprocess.run(["git", *line], cwd=tmp_path, check=True)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.read_code()["commit"]
    (tmp_path / "copy").mkdir()
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "copy")
    assert provenance.read_code() == {"commit": None, "dirty": False, "changes": None}


def test_a_closed_terminal_stops_a_run_as_sigterm_does(tiny, capsys):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit, match=str(128 + signal.SIGHUP)):
            train(compose(tiny), twice_hung_up)
        assert "stopped by SIGHUP after step 1 of 4; the same command continues the run" in capsys.readouterr().out
        with pytest.raises(SystemExit):
            train(compose([*tiny, "resume=false"]), twice_hung_up)
        assert "; the same command without resume=false continues the run" in capsys.readouterr().out
        assert train(compose(tiny))["status"] == "finished"
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        with stop_signals() as received:
            signal.raise_signal(signal.SIGHUP)
        assert received == []
    finally:
        signal.signal(signal.SIGHUP, before)


def twice_hung_up(_trainer):
    for _ in range(2):  # the first from the shell, the second from the kernel
        signal.raise_signal(signal.SIGHUP)


@pytest.mark.parametrize("gone", ["reader", "disk", "room"])
def test_printing_never_fails(monkeypatch, gone):
    read, write = os.pipe()
    if gone == "room":
        os.set_blocking(write, False)
        while select.select([], [write], [], 0)[1]:
            os.write(write, bytes(4096))
    else:
        os.close(read)
    if gone == "disk":
        os.dup2(os.open("/dev/full", os.O_WRONLY), write)
    with os.fdopen(write, "w", encoding="ascii") as stream:
        for name in ("stdout", "__stdout__"):
            monkeypatch.setattr(sys, name, stream)
        print_without_fail()
        assert sys.stdout is not stream
        print("三国 \udcff", flush=True)
        sys.stdout.close()


def test_a_terminal_gets_no_control_characters(monkeypatch):
    leader, terminal = os.openpty()
    with os.fdopen(terminal, "w", encoding="utf-8") as stream:
        for name in ("stdout", "__stdout__"):
            monkeypatch.setattr(sys, name, stream)
        print_without_fail()
        print("a\x1b]0;x\x07\x9bb\tc", flush=True)
        assert os.read(leader, 100).decode() == "a\ufffd]0;x\ufffd\ufffdb\tc\r\n"
    os.close(leader)


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_stream_ends_no_run(monkeypatch, closed):
    monkeypatch.setattr(sys, closed, None)
    monkeypatch.setattr(sys, f"__{closed}__", None)
    print_without_fail()
    stream = getattr(sys, closed)
    assert not stream.isatty()
    print("x", file=stream, flush=True)
    stream.close()


def test_error_messages_have_no_control_characters():
    assert explain(UserError("a\x1b[31m\nb"), "config") == "a\ufffd[31m b"


def test_a_copy_reached_by_a_link_has_no_commit(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "big/copy").mkdir(parents=True)
    line = ["git", "-c", "user.email=a@b", "-c", "user.name=a", "commit", "-qm1", "--allow-empty"]
    for argument in (["git", "init", "-q"], line):
        subprocess.run(argument, cwd=tmp_path / "big", check=True)
    (tmp_path / "link").symlink_to(tmp_path / "big/copy")
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "link")
    assert provenance.read_code()["commit"] is None


# Values and paths


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("train.steps=${data.name}", "train.steps must be a whole number, like 1500: got ${data.name}"),
        ("train.steps=${model}", "train.steps must be a whole number"),
        ("optim.betas=[${data.name},0.9]", "optim.betas must be two numbers"),
        ("model.context=null", "model.context must be a whole number"),
        ("evaluation.windows=null", "evaluation.windows must be a whole number"),
        ("attn.position_weight=null", "attn.position_weight holds several keys"),
        ("attn.context=null", "attn.context must be a whole number"),
        ("attn._partial_=false", "attn._partial_ belongs to the config files and cannot be set"),
        ("data.path=", "data.path is empty"),
    ],
)
def test_values_that_a_key_cannot_have_are_refused(tiny, given, message):
    with pytest.raises((UserError, HydraException), match=re.escape(message)):
        train(compose([*(a for a in tiny if a.split("=")[0] != given.split("=")[0]), given]))


def test_interpolations_are_taken_where_they_fit():
    assert compose(["optim.clip=${optim.eps}", "optim.warm_up=${seed}"]).optim.warm_up == 0


def test_long_names_are_cut_by_bytes(tiny, tmp_path, text):
    place = tmp_path / ("字" * 80 + ".txt")
    place.write_bytes(text.read_bytes())
    name = "文" * 70
    given = [a for a in tiny if not a.startswith(("data.path", "wandb.mode"))]
    cfg = compose([*given, f"data.path={place}", f"data.name={name}"])
    assert len(cfg.job.name.encode()) < 256
    assert train(cfg)["status"] == "finished"


@pytest.mark.parametrize("folder", ["x" * 300, "closed/x"])
def test_a_path_that_is_too_long_or_forbidden_is_refused_in_one_line(tmp_path, monkeypatch, capsys, folder):
    """os.stat is replaced, so that it forbids the second path even to root."""
    inner = os.stat

    def stat(path, *given, **options):
        if "closed/x" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return inner(path, *given, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(sys, "argv", ["dashboard", f"runs={tmp_path}", f"out={tmp_path}/{folder}/page.html"])
    with pytest.raises(SystemExit) as ended:
        dashboard.run()
    output = capsys.readouterr().err
    assert ended.value.code == 2
    assert re.fullmatch(rf"error: cannot \w+ {tmp_path}/{folder}\S*: .+\n", output)


def test_a_loop_of_links_gives_a_file_once(tmp_path):
    (tmp_path / "text/deep").mkdir(parents=True)
    (tmp_path / "text/a.txt").write_text("一二三", encoding="utf-8")
    (tmp_path / "text/deep/loop").symlink_to(tmp_path / "text")
    os.link(tmp_path / "text/a.txt", tmp_path / "text/b.txt")
    source = sources.files(f"{tmp_path}/text/**/*.txt", None)
    assert "".join(source.pieces()) == "一二三"
    assert "paths that name one of these files again, such as " in source.notes[-1]
    assert "".join(sources.files([f"{tmp_path}/text/a.txt"] * 2, None).pieces()) == "一二三"


def test_several_loops_of_links_are_walked_once(tmp_path, monkeypatch):
    """The links give each file at least 2^40 paths."""
    for name in ("a.txt", "deep/b.txt", ".hidden/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for name in ("x", "y", "deep/z"):
        (tmp_path / name).symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    signal.alarm(60)
    try:
        for pattern in (f"{tmp_path}/**/*.txt", f"{tmp_path}/**", "**/*.txt", f"{tmp_path}/**/**/[ab].txt"):
            once, again = sources.find(pattern)
            assert [path.name for path in once] == ["a.txt", "b.txt"]
            assert again
    finally:
        signal.alarm(0)


# Memory


def test_a_state_is_written_without_a_copy_of_it(tmp_path):
    run, weights = Record(tmp_path), torch.zeros(1 << 22)
    run.metrics.touch()
    tracemalloc.start()
    run.save_state({"step": 1, "model": {"x": weights}, "optimizer": {}})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < weights.nbytes / 2
    assert run.read_state()["model"]["x"].shape == weights.shape


def test_a_run_whose_folder_is_gone_is_named_when_it_is_saved(tmp_path):
    gone = Record(tmp_path / "gone")
    with pytest.raises(UserError, match=r"cannot write \S+/gone/state\.pt: No such file or directory"):
        gone.save_state({"step": 1})
    with pytest.raises(UserError, match=r"cannot write \S+/gone/summary\.json: No such file or directory"):
        gone.save_summary({})


def test_an_infinite_f_is_null_in_its_file(tmp_path):
    run = Record(tmp_path)
    run.save_f(torch.tensor([[torch.inf, 0.5]]))
    assert json.loads(run.f.read_text(), parse_constant=pytest.fail) == {"f": [[None, 0.5]]}


def test_an_error_that_a_memory_error_caused_counts_as_out_of_memory():
    def fail():
        try:
            raise MemoryError
        except MemoryError:
            raise RuntimeError("the archive cannot be finished")  # noqa: B904, as a library does

    with pytest.raises(RuntimeError) as caught:
        fail()
    assert out_of_memory(caught.value)
    assert not out_of_memory(RuntimeError("another"))


# Damaged records


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data", None),
        ("data", {"sha256": 3}),
        ("evaluation", {"fit": []}),
        ("steps", "x"),
        ("tokens", True),
        ("seed", None),
        ("earlier_code", 3),
        ("earlier_code", [{}]),
    ],
)
def test_a_summary_with_wrong_types_is_refused(tiny, key, value):
    cfg = compose(tiny)
    train(cfg)
    path = Record.of(cfg).summary
    write_json(path, read_json(path) | {key: value})
    with pytest.raises(UserError, match=rf"summary\.json is damaged: .*{key}"):
        train(cfg)


@pytest.mark.parametrize(
    "changed",
    [
        {"loss_sum": torch.zeros(3)},
        {"trained_by": 3},
        {"trained_by": [3]},
        {"trained_by": [{}]},
        {"step": -1},
        {"step": 10},
    ],
    ids=str,
)
def test_a_state_with_wrong_types_or_steps_is_refused(tiny, changed):
    cfg = compose([*tiny, "train.steps=9", "train.checkpoint_seconds=0"])
    train_for(5, cfg)
    path = Record.of(cfg).state
    torch.save(torch.load(path) | changed, path)
    with pytest.raises(UserError, match=r"state\.pt is (damaged|of another model)"):
        train(cfg)


def test_an_error_message_does_not_write_out_a_large_value():
    bomb = ["x"]
    for _ in range(7):
        bomb = [bomb] * 9
    tracemalloc.start()
    assert misfit({"step": bomb}, {"step": WHOLE}).startswith("step must be a whole number: it is [[")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5e6


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "x: !!binary aGVsbG8=\njob: {name: a}"),
        ("config.yaml", "x: 2001-12-14\ny: !!timestamp 2001-12-14\njob: {name: a}"),
        ("config.yaml", f"x: 0x{'f' * 5000}\njob: {{name: a}}"),
        ("metrics.jsonl", f'{{"step": 1, "tokens": 1, "seconds": 1, "perplexity": {10**400}}}\n'),
        ("f.json", f'{{"f": [[{10**400}]]}}'),
        ("metrics.jsonl", 1 << 42),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_dashboard_leaves_out_a_record_that_it_cannot_show(tmp_path, name, content, monkeypatch):
    monkeypatch.setattr(dashboard, "get_plotlyjs", str)  # which takes time to compress
    for folder in ("good", "bad"):
        (tmp_path / folder).mkdir()
        write_json(tmp_path / folder / "summary.json", {"status": "interrupted"})
    with open(tmp_path / "bad" / name, "wb") as file:
        file.truncate(content) if isinstance(content, int) else file.write(content.encode())
    data = dashboard.collect(tmp_path, tmp_path)
    dashboard.page(data)
    assert [row["folder"] for row in data["runs"]] == ["good/"]
    assert name in data["damaged"][0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.dim", "x"),
        ("model.context", None),
        ("attn.gamma", 3),
        ("model", None),
        ("job.attn", 3),
        ("ffn.dim", {"a": 1}),
        ("attn.position_weight", []),
    ],
)
def test_a_config_with_wrong_types_is_refused(tiny, key, value):
    cfg = compose(tiny)
    train(cfg)
    path = folder_of(cfg) / "config.yaml"
    changed = OmegaConf.load(path)
    OmegaConf.update(changed, key, value, merge=False)
    OmegaConf.save(changed, path)
    with pytest.raises(UserError, match=r"config\.yaml is damaged: "):
        load_run(folder_of(cfg))


def test_files_that_would_need_too_much_memory_are_refused(tmp_path):
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 12)]
    for text in ("\n".join(["l0: &l0 [x]", *levels, "job: {name: x}"]), "x: " + "[" * 900 + "]" * 900):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=r"config.yaml is damaged: it is not YAML"):
            read_config(Record(tmp_path))
    with zipfile.ZipFile(tmp_path / "state.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 24))
    with pytest.raises(UserError, match=r"state.pt is damaged"):
        Record(tmp_path).read_state()
    with open(tmp_path / "summary.json", "wb") as file:
        file.truncate(1 << 40)  # a sparse file
    with pytest.raises(UserError, match=r"summary.json is damaged: it is larger than 64 MiB"):
        Record(tmp_path).read_summary()


# Many rows


def test_rows_are_read_from_the_end_and_repaired(tmp_path):
    run = tmp_path / "metrics.jsonl"
    rows = [{"step": i, "loss": i / 7} for i in range(1, 20_001)]
    write_bytes(run, "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert list(metrics.each_row(run)) == rows
    for last in (1, 2, 999, 20_000, 30_000):
        assert metrics.last_rows(run, last) == rows[-last:]
    with open(run, "ab") as file:
        file.write(b'{"step": 20001, "lo')
    assert metrics.last_rows(run, 2) == rows[-2:]
    lines = run.read_bytes().splitlines(keepends=True)
    for step in (20_000, 15_000, 1, 0):
        metrics.repair(run, step, 0)
        assert run.read_bytes() == b"".join(lines[:step])


def test_continuing_a_run_parses_few_rows(tiny, monkeypatch):
    """Cutting the rows back to the saved state parses none of them.

    The end of the run parses the rows with evaluations, and the last few rows for the speed.
    """
    cfg = compose([*tiny, "train.steps=60", "train.checkpoint_seconds=0", "evaluation.every=30"])
    cfg.evaluation.sample = 0
    train_for(55, cfg)
    parsed, parse = [], metrics.parse
    monkeypatch.setattr(metrics, "parse", lambda *given: (parsed.append(row := parse(*given)), row)[1])
    monkeypatch.setattr(training.summary, "RATES", 3)
    assert train(cfg)["evaluation"]["heldout_best"]["step"] in (30, 60)
    assert {row["step"] for row in parsed} == {30, 57, 58, 59, 60}


def test_the_mirror_is_sent_only_the_rows_that_it_lacks(tiny, tmp_path, monkeypatch):
    cfg, sent = compose(tiny), []
    train(cfg)
    cfg.wandb.mode = "online"
    online = SimpleNamespace(
        starting_step=3,
        dir=str(tmp_path / "wandb/run-20261123_000000-x/files"),
        define_metric=lambda *_, **__: None,
        log=lambda _, step: sent.append(step),
    )
    monkeypatch.setattr("wandb.init", lambda **_: online)
    Mirror(cfg, {}, Record.of(cfg))
    assert sent == [3, 4]


# Parents


@pytest.mark.parametrize("importing", [False, True])
def test_a_process_ends_with_its_parent(tmp_path, importing):
    """The process gets SIGTERM, and ends after handling it, also if its parent died while it was importing."""
    early = "import configs.startup\nos.close(write)\nwhile os.getppid() == parent: pass"
    script = (
        "import os, signal, sys, time\n"
        "parent, (read, write) = os.getpid(), os.pipe()\n"
        "if os.fork():\n"
        "    os.close(write)\n"
        "    os.read(read, 1)\n"  # until the child closes `write`
        "    os._exit(0)\n"
        f"{early if importing else ''}\n"
        "from configs.process import end_with_parent\n"
        "from training.interruption import stop_signals\n"
        "with stop_signals() as received:\n"
        "    end_with_parent()\n"
        f"    {'' if importing else 'os.close(write)'}\n"
        "    deadline = time.monotonic() + 30\n"
        "    while not received and time.monotonic() < deadline:\n"
        "        time.sleep(0.05)\n"
        f"    open({str(tmp_path / 'received')!r}, 'w').write(f'{{received}}')\n"
        "time.sleep(60)\n"
        f"open({str(tmp_path / 'lives')!r}, 'w')\n"
    )
    read, write = os.pipe()  # reading waits until all processes with `write` have ended
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, pass_fds=[write])
    os.close(write)
    process.wait()
    assert os.read(read, 1) == b""
    os.close(read)
    assert "SIGTERM" in (tmp_path / "received").read_text()
    assert not (tmp_path / "lives").exists()


def test_a_process_ends_if_its_parent_died_while_it_started(monkeypatch):
    """When the process that started a worker has died, the worker has another parent: it notices this at once."""
    done = []

    class Ended(Exception): ...

    def end(_):
        raise Ended

    monkeypatch.setattr(process.multiprocessing, "parent_process", lambda: SimpleNamespace(pid=os.getppid() + 1))
    monkeypatch.setattr(process.threading, "Thread", lambda target, daemon: SimpleNamespace(start=target))
    monkeypatch.setattr(process.os, "kill", lambda *given: done.append(given))
    monkeypatch.setattr(process.time, "sleep", end)  # not called, because the parent is already gone
    monkeypatch.setattr(process.os, "_exit", end)
    monkeypatch.setattr(process.signal, "getsignal", lambda _: signal.SIG_DFL)
    with pytest.raises(Ended):
        process.end_with_parent.__wrapped__()
    assert done == [(os.getpid(), signal.SIGTERM)]


def test_the_exit_status_reports_failed_runs(tmp_path, monkeypatch, capsys):
    jobs = [runner.Job((), Record(tmp_path), 1)]
    monkeypatch.setattr(claims_study, "missing_runs", lambda *_: jobs)
    monkeypatch.setattr(runner, "as_they_end", lambda *_: [(jobs[0], 1.0, "no")])
    monkeypatch.setattr(runner.multiprocessing, "get_context", lambda _: SimpleNamespace(Queue=Queue, Process=Idle))
    monkeypatch.setattr(claims_study.claim_pages, "write", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["reproduce", "claims=[headline]", "tier=small", f"results={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        reproduce.run()
    assert ended.value.code == "error: 1 of the runs failed"
    assert "failed: no" in capsys.readouterr().out


class Queue:
    def put(self, _): ...

    def cancel_join_thread(self): ...


class Idle:
    exitcode = 0

    def __init__(self, **_): ...

    def start(self): ...

    terminate = kill = start

    def join(self, _): ...


# Tables


def test_a_line_break_in_a_command_stays_in_the_comment_of_the_latex_table(monkeypatch):
    monkeypatch.setattr(table_page, "columns", lambda _: [])
    monkeypatch.setattr(table_page, "table_lines", lambda *_: [("fit perplexity", "aft", [None])])
    monkeypatch.setattr(table_page, "full_size", lambda _: "None.")
    monkeypatch.setattr(table_page, "origins", lambda *_: ["Commands: `a\n\\input{b}\rc`."])
    contents = table_page.render(OmegaConf.create({"runs": None}))
    _, comment, table = contents["table.tex"].split("\n", 2)
    assert comment == "% Commands: `a \\input{b} c`."
    assert table.startswith("\\begin{tabular}")
    assert contents["table.md"].splitlines()[-3:] == ["None.", "", "- Commands: `a \\input{b} c`."]


def test_the_name_of_a_row_is_escaped_in_latex_and_csv(monkeypatch):
    """The names come from the user."""
    monkeypatch.setattr(table_page, "columns", lambda _: [])
    monkeypatch.setattr(table_page, "table_lines", lambda *_: [("=1+1 & 50%", "=aft_$x$#1", [None])])
    monkeypatch.setattr(table_page, "label", lambda row: row)
    monkeypatch.setattr(table_page, "full_size", lambda _: "None.")
    monkeypatch.setattr(table_page, "origins", lambda *_: [])
    contents = table_page.render(OmegaConf.create({"runs": None}))
    assert r"50\%" in contents["table.tex"]
    assert r"=aft\_\$x\$\#1" in contents["table.tex"]
    assert "'=aft_$x$#1" in contents["table.csv"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("speed", []), ("speed", {"aft": 3}), ("speed", {"aft": {"tokens_per_second": "x"}}), ("batch", None)],
)
def test_a_record_of_speed_with_wrong_types_is_refused(tmp_path, key, value):
    origin = {"device": "a CPU", "command": "x", "commit": None, "dirty": False}
    whole = {"what": "steps", "precision": "float32", "batch": 2, "context": 16, "vocabulary": 9, "provenance": origin}
    path = tmp_path / "speed.json"
    write_json(path, whole | {"speed": {"aft": {"tokens_per_second": 1.0, "seconds": [1.0]}}})
    assert speed_record(path)["batch"] == 2
    write_json(path, whole | {"speed": {}} | {key: value})
    with pytest.raises(UserError, match=r"speed\.json is damaged: "):
        speed_record(path)


@pytest.mark.parametrize("script", [["evaluate.py"], ["-m", "scripts.reproduce", "study=unknown"]])
def test_ctrl_c_while_a_command_is_imported_has_no_traceback(script):
    # A shell that runs the tests in the background makes them and their child processes ignore SIGINT.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    arguments = [sys.executable, "-X", "importtime", *script]
    process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, preexec_fn=heed)
    for line in process.stderr:  # a line is printed after each import
        if b"| torch" in line or b"|     torch" in line or b"numpy" in line:
            break
    process.send_signal(signal.SIGINT)
    output = process.stderr.read()
    assert process.wait() == -signal.SIGINT
    assert b"Traceback" not in output
