"""Runs in locales that are not UTF-8."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from data.reading import read_json
from tests.torture.kills import fresh, one_run
from tests.torture.small import HANG, Untried, fell, given, in_a_fork
from training.provenance import ROOT
from training.record import Record

# Names, and what localedef makes them of; C is everywhere.
LOCALES = {
    "C": None,
    "zh_CN.GBK": ("zh_CN", "GBK"),
    "zh_TW.BIG5": ("zh_TW", "BIG5"),
    "de_DE.ISO-8859-1": ("de_DE", "ISO-8859-1"),
}
TEXTS = ("text.txt", "\u6587\u672c.txt", "t\u00e9xt.txt")


def locales(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A run, an evaluation and a sample in the locale C, or in one of GBK, Big5 or ISO-8859-1, in a folder of a Chinese
    name and with a text of any name: all is as in UTF-8, and what one writes the other reads."""
    whole = fresh(folder / "whole")
    in_a_fork(lambda: one_run(whole, "wandb.mode=disabled"))
    (folder / "locales").mkdir()
    for number in range(cfg.locales):
        name, text = list(LOCALES)[number % len(LOCALES)], TEXTS[number // len(LOCALES) % len(TEXTS)]
        if not made(name, folder / "locales"):
            yield Untried(f"locale {number}: this machine has no localedef, or no {name}")
            continue
        place = fresh(folder / f"\u8fd0\u884c{number}")
        (place / "text.txt").rename(place / text)
        wrong = in_locale(name, folder / "locales", place, text, whole)
        yield f"locale {number}, {name}, {text!a}: {wrong}" if wrong else None
        shutil.rmtree(place)


def made(name: str, folder: Path) -> bool:
    """Whether there is a locale in the folder, or one can be made."""
    if LOCALES[name] is None or (folder / name).exists():
        return True
    locale, charmap = LOCALES[name]
    line = ["localedef", "--no-archive", "-i", locale, "-f", charmap, folder / name]
    try:
        subprocess.run(line, capture_output=True)  # which warns of much and makes it all the same
    except OSError:
        return False
    return (folder / name).exists()


def in_locale(name: str, made_in: Path, place: Path, text: str, whole: Path) -> str | None:
    """What is wrong with commands in a locale, and with what they wrote."""
    environment = os.environ | {"LC_ALL": name, "LOCPATH": str(made_in), "PYTHONUTF8": "0", "OMP_NUM_THREADS": "1"}

    def command(*line: str) -> tuple[int, str]:
        options = {"cwd": ROOT, "env": environment, "timeout": HANG, "stdout": subprocess.PIPE}
        done = subprocess.run([sys.executable, *line], stderr=subprocess.STDOUT, **options)
        return done.returncode, done.stdout.decode("utf-8", "replace")

    line = given(place, f"data.path={place}/{text}", "wandb.mode=disabled")
    status, said = command("train.py", *line)
    if status or "Traceback" in said:
        return f"exit status {status}: {said[-300:]}"
    (run,) = place.glob("runs/*/*")
    (reference,) = whole.glob("runs/*/*")
    for file in ("model.safetensors", "text.safetensors", "vocabulary.json"):
        if (run / file).read_bytes() != (reference / file).read_bytes():
            return f"{file} differs"
    sha256, expected = (read_json(Record(one).summary)["data"]["sha256"] for one in (run, reference))
    if sha256 != expected:
        return "the text differs"
    run = run.rename(place / "moved")
    status, said = command("evaluate.py", f"run={run}", "stride=8")
    if wrong := fell(status, said) or (said if status else None):
        return wrong
    prompt = read_json(run / "vocabulary.json")[0]
    return fell(*command("-m", "scripts.sample", f"run={run}", "length=3", f"prompt={prompt}"))
