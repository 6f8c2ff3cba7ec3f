"""A run of a second, in a process of its own, for faults to be tried on."""

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra

from configs.messages import MISTAKES, explain

SMALL = [
    "model.dim=16", "model.heads=2", "model.context=16", "train.batch=2", "train.steps=12", "train.log_every=1",
    "train.checkpoint_seconds=0", "train.compile=false", "train.device=cpu", "evaluation.every=3",
    "evaluation.windows=2", "evaluation.final_windows=4", "evaluation.stride=8", "evaluation.sample=2", "data=file",
]  # fmt: skip
HANG = 120  # seconds after which a run counts as hanging


class Untried(str):
    """Why a fault was not tried."""


def given(folder: Path, *more: str) -> list[str]:
    """A run of a second whose every file lies in `folder`; `more` is said instead of what it would be, or beside it."""
    places = [f"runs={folder}/runs", f"wandb.dir={folder}", f"data.cache={folder}/cache"]
    changed = {override.partition("=")[0] for override in more}
    if "data" in changed:
        changed.add("data.path")
    usual = [*SMALL, f"data.path={folder}/text.txt", *places]
    return [*(override for override in usual if override.partition("=")[0] not in changed), *more]


def write_text(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(chr(0x4E00 + int(rng.expovariate(0.05)) % 200) for _ in range(5000))
    (folder / "text.txt").write_text(text, encoding="utf-8")


class Fork:
    """A task in a copy of this process, which goes on beside it."""

    def __init__(self, task: Callable[[], object], prepare: Callable[[], object] = lambda: None):
        self.said = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115, closed by end()
        self.child = os.fork()
        if self.child:
            return
        multiprocessing.process._parent_process = None  # the torture's, which is not that of this copy of a worker
        os.dup2(self.said.fileno(), 1)
        os.dup2(self.said.fileno(), 2)
        signal.alarm(HANG)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
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

    def end(self) -> tuple[int, str]:
        """Its exit status, or minus the signal that ended it; and what it printed."""
        _, status = os.waitpid(self.child, 0)
        with self.said:
            self.said.seek(0)
            return os.waitstatus_to_exitcode(status), self.said.read()


def in_a_fork(task: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> tuple[int, str]:
    """Run a task in a copy of this process: its exit status, or minus the signal that ended it; and what it printed."""
    return Fork(task, prepare).end()


def refused(error: Exception) -> bool:
    """Whether a command that meets this error ends with one line and exit status 2."""
    return isinstance(error, MISTAKES) and "\n" not in explain(error, "config")


def fell(status: int, said: str) -> str | None:
    """How a command ended that neither succeeded nor ended with one line and exit status 2; None for one that did."""
    last = said.rstrip().rsplit("\n", 1)[-1]
    if status == 0 or (status == 2 and last.startswith("error: ") and "Traceback" not in said):
        return None
    return f"exit status {status}: {said[-300:]}"


def as_command(run: Callable[[], None], *arguments: str) -> tuple[int, str]:
    """What a script does with these arguments: its exit status, and what it printed."""

    def task() -> None:
        GlobalHydra.instance().clear()  # the torture's own, with which every command would be refused
        sys.argv = ["script", *arguments]
        run()

    return in_a_fork(task)


@contextlib.contextmanager
def no_hang():
    """TimeoutError where the block takes too long."""

    def late(*_) -> None:
        raise TimeoutError(f"a hang: it takes more than {HANG} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(HANG)
    try:
        yield
    finally:
        signal.alarm(0)


def harmed(whole: bytes, rng: random.Random) -> bytes:
    """A file cut anywhere, or with one bit turned over."""
    place = rng.randrange(len(whole))
    if rng.random() < 0.5:
        return whole[:place]
    return whole[:place] + bytes([whole[place] ^ (1 << rng.randrange(8))]) + whole[place + 1 :]
