"""python scripts/torture.py: kill runs, flip their bits, feed them rubbish, and say what was lost.

Every fault is made by a process of its own. Writes results/torture.json, continued by nothing, and from
it alone results/torture.md. Ends with exit status 1 where something was lost.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
from omegaconf import DictConfig
from tabulate import tabulate

from configs.cli import MISTAKES, compose, explain, flat, main
from data.batches import check_length
from data.corpus import load
from data.files import UserError, write_bytes, write_json
from data.record import Record, provenance
from evaluate import build_model, load_run
from scripts.records import commit
from train import check, train

SMALL = [
    "model.dim=16", "model.heads=2", "model.context=16", "train.batch=2", "train.steps=12", "train.log_every=1",
    "train.checkpoint_seconds=0", "train.compile=false", "train.device=cpu", "evaluation.every=3",
    "evaluation.windows=2", "evaluation.final_windows=4", "evaluation.stride=8", "evaluation.sample=2", "data=file",
]  # fmt: skip
WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
TIMED = ("seconds", "tokens_per_second")
HANG = 120  # seconds after which a run counts as hanging


def given(folder: Path) -> list[str]:
    """A run of a second whose every file lies in `folder`."""
    places = [f"runs={folder}/runs", f"wandb.dir={folder}", f"data.cache={folder}/cache"]
    return [*SMALL, f"data.path={folder}/text.txt", *places]


def write_text(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(chr(0x4E00 + int(rng.expovariate(0.05)) % 200) for _ in range(5000))
    (folder / "text.txt").write_text(text, encoding="utf-8")


def in_a_fork(task: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> tuple[int, str]:
    """Run a task in a copy of this process: its exit status, or minus the signal that ended it; and what it printed."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            signal.alarm(HANG)
            status = 1
            try:
                prepare()
                task()
                status = 0
            except MISTAKES as error:
                print(f"error: {error}", file=sys.stderr)
                status = 2
            except SystemExit as end:
                status = end.code
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read()


def killed_at_write(number: int) -> Callable[[], None]:
    """SIGKILL before this process opens, renames or removes its `number`th file."""
    left = number

    def look(event: str, arguments: tuple) -> None:
        nonlocal left
        writes = event in WRITES or (
            event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wa+")
        )
        left -= bool(writes)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(look)


def killed_after(seconds: float) -> Callable[[], None]:
    """An end without warning, after so many seconds: SIGALRM that nobody handles."""

    def prepare() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    return prepare


def what_differs(folder: Path, whole: Path) -> list[str]:
    """In what a run differs from one that was never stopped, and what lies about."""
    record, reference = (Record.of(compose(given(place))) for place in (folder, whole))
    found = []
    for name in ("model.safetensors", "windows.safetensors", "vocabulary.json"):
        if (record.folder / name).read_bytes() != (reference.folder / name).read_bytes():
            found.append(f"{name} differs")
    rows, expected = (
        [{k: v for k, v in row.items() if k not in TIMED} for row in r.rows()] for r in (record, reference)
    )
    if rows != expected:
        found.append("metrics.jsonl differs")
    if steps_in_wandb(folder) != [row["step"] for row in expected]:
        found.append("wandb's history differs")
    names = {path.name for path in record.folder.iterdir()} - {path.name for path in reference.folder.iterdir()}
    left = [path.name for path in folder.rglob("*.tmp")] + [path.name for path in folder.rglob("*.work")]
    return found + [f"{name} is left behind" for name in sorted({*names, *left})]


def steps_in_wandb(folder: Path) -> list[int]:
    """The steps in the history of the one mirror there is."""
    (log,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    wandb = Path(sys.executable).with_name("wandb")
    printed = subprocess.run([wandb, "leet", "inspect", "--json", log], capture_output=True, text=True, check=True)
    records = [json.loads(line) for line in printed.stdout.splitlines()]
    return [r["history"]["item"]["_step"] for r in records if r["type"] == "history"]


# What is done to them: each yields, fault by fault, what was lost by it, or None


def kills(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A run killed at a random write, or moment, goes on, sometimes to be killed again, and ends as if it never was."""
    whole = folder / "whole"
    write_text(whole)
    status, said = in_a_fork(lambda: train(compose(given(whole))))
    if status:
        raise UserError(f"a run that nobody disturbs fails: {said}")
    for number in range(cfg.kills):
        place = folder / str(number)
        write_text(place)
        again = partial(lambda place: train(compose(given(place))), place)
        status = 0
        while status == 0:  # a run that comes to its end was not killed; a finished one is not run again
            early = rng.random() < 0.5
            end = killed_at_write(rng.randint(1, 90)) if early else killed_after(rng.uniform(0.05, 1.5))
            status, _ = in_a_fork(again, end)
            if status == 0:
                shutil.rmtree(place)
                write_text(place)
        if rng.random() < 0.3:
            in_a_fork(again, killed_at_write(rng.randint(1, 60)))
        status, said = in_a_fork(again)
        lost = [f"exit status {status}: {said[-300:]}"] if status else what_differs(place, whole)
        yield f"kill {number}: {'; '.join(lost)}" if lost else None
        shutil.rmtree(place)


def states(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A state that is cut or has a bit turned over is refused in one line, or it is the same state."""
    record = half_done(folder / "states")
    whole, rows = record.state.read_bytes(), record.metrics.read_bytes()
    good = record.load_state()
    for number in range(cfg.states):
        record.state.write_bytes(harmed(whole, rng))
        try:
            if not same(record.load_state(), good):
                yield f"state {number}: another state was loaded"
                continue
        except Exception as error:
            if not refused(error):
                yield f"state {number}: {type(error).__name__}: {error}"
                continue
        record.metrics.write_bytes(rows)
        yield None


def weights(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """Weights that are cut or have a bit turned over are refused in one line."""
    place = folder / "weights"
    write_text(place)
    in_a_fork(lambda: train(compose([*given(place), "wandb.mode=disabled"])))
    record = Record.of(compose(given(place)))
    whole = record.model.read_bytes()
    for number in range(cfg.weights):
        record.model.write_bytes(harmed(whole, rng))
        try:
            load_run(record.folder)
            yield f"weights {number}: they were loaded"
        except Exception as error:
            yield None if refused(error) else f"weights {number}: {type(error).__name__}: {error}"


def corpora(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """Bytes that may be no text at all are read to the character, or refused in one line."""
    place = folder / "corpora"
    write_text(place)
    for number in range(cfg.corpora):
        content = rubbish(rng)
        (place / "text.txt").write_bytes(content)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                corpus = load(compose([*given(place), "data.processes=1"]).data)
            text = "".join(corpus.vocabulary[i] for i in corpus.ids.tolist())
            if corpus.sha256 != hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest():
                yield f"corpus {number}: it is not its ids"
                continue
        except Exception as error:
            if not refused(error):
                yield f"corpus {number} ({content[:40]!r}): {type(error).__name__}: {error}"
                continue
        yield None


def overrides(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A command line with rubbish in it describes a model, or is refused in one line."""
    place = folder / "overrides"
    write_text(place)
    keys = [*flat(compose([])), "attn", "ffn", "data", "model", "experiment", "atn", "model.dims", "train.", ".", "a b"]
    values = [
        "", "null", "-1", "0", "1", "1e9", "1e400", "nan", "-inf", "0.5", "true", "x", "[1,2]", "{a: 1}", "'", "∞",
        "${seed}", "${nothing}", "aft", "gmlp", "../x", "9" * 40, "\x00", "é", "???",
    ]  # fmt: skip
    for _ in range(cfg.overrides):
        line = [f"{rng.choice(keys)}={rng.choice(values)}" for _ in range(rng.randint(1, 3))]
        run = partial(lambda line: described(compose([*given(place), *line])), line)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                run()
        except Exception as error:
            if not refused(error):
                yield f"{shlex.join(line)}: {type(error).__name__}: {str(error)[:200]}"
                continue
        yield None


KINDS = {f.__name__: f for f in (kills, states, weights, corpora, overrides)}


def refused(error: Exception) -> bool:
    """Whether a command that meets this error ends with one line and exit status 2."""
    return isinstance(error, (*MISTAKES, ValueError)) and "\n" not in explain(error, "config")


def described(cfg: DictConfig) -> None:
    """As far as train.py goes with train.steps=0, in little memory."""
    check(cfg, processes=1)
    cfg.data.processes = 1
    corpus = load(cfg.data)
    check_length(len(corpus.training), len(corpus.heldout), cfg.model.context)
    with torch.device("meta"):
        build_model(cfg, len(corpus.vocabulary))


def half_done(place: Path) -> Record:
    """A run that was killed in its middle."""
    write_text(place)
    cfg = compose([*given(place), "wandb.mode=disabled"])
    record = Record.of(cfg)
    for writes in range(40, 200, 4):
        in_a_fork(lambda: train(cfg), killed_at_write(writes))
        if record.state.exists():
            return record
    raise UserError("no kill left a state behind")


def harmed(whole: bytes, rng: random.Random) -> bytes:
    """A file cut anywhere, or with one bit turned over."""
    place = rng.randrange(len(whole))
    if rng.random() < 0.5:
        return whole[:place]
    return whole[:place] + bytes([whole[place] ^ (1 << rng.randrange(8))]) + whole[place + 1 :]


def same(one: object, other: object) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def rubbish(rng: random.Random) -> bytes:
    """A file that is, or is not quite, or is not at all, text."""
    length = rng.choice([0, 1, 2, 17, 300, 3000])
    text = "".join(rng.choice("一二三\n\r\0\t aé\u0301👨\u200d👩\ufeff\u2028𠀀") for _ in range(length))
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(length)
    content = text.encode(rng.choice(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "gb18030", "utf-32"]))
    if kind == 1:
        return content[: rng.randrange(len(content) + 1)]
    if kind == 2 and content:
        return harmed(content, rng)
    return content + (b"\xed\xa0\x80" if kind == 3 else b"")  # a lone surrogate


def page(record: dict) -> str:
    """results/torture.md, from the record."""
    rows = []
    for kind, found in record["kinds"].items():
        what = " ".join(KINDS[kind].__doc__.split()) if kind in KINDS else ""
        rows.append([kind, what, f"{found['tried']:,}", str(len(found["lost"])) if found["lost"] else "nothing"])
    origin = record["provenance"]
    lost = [f"- {one}" for found in record["kinds"].values() for one in found["lost"]]
    return "\n".join(
        [
            "# Faults, and what they cost",
            "",
            tabulate(rows, ["", "", "tried", "lost"], "github", colalign=["left", "left", "right", "right"]),
            "",
            *lost,
            f"- {origin['device']}, torch {origin['versions']['torch']}; commit {commit(origin)}; "
            f"seed {record['seed']}; `{origin['command']}`.",
            "",
        ]
    )


@main("torture")
def run(cfg: DictConfig) -> None:
    torch.set_num_threads(1)  # a fork has but one thread
    command = shlex.join(["python", "scripts/torture.py", *sys.argv[1:]])
    record = {"seed": cfg.seed, "kinds": {}, "provenance": provenance(torch.device("cpu"), command)}
    for name, kind in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            outcomes = list(kind(cfg, Path(folder), random.Random(cfg.seed)))
        record["kinds"][name] = {"tried": len(outcomes), "lost": [lost for lost in outcomes if lost]}
        print(f"{name}: {len(outcomes):,} tried, {len(record['kinds'][name]['lost'])} lost", flush=True)
    write_json(Path(cfg.out).with_suffix(".json"), record)
    write_bytes(Path(cfg.out).with_suffix(".md"), page(record).encode())
    print(f"written to {cfg.out}.md")
    if any(found["lost"] for found in record["kinds"].values()):
        raise UserError("something was lost")


if __name__ == "__main__":
    run()
