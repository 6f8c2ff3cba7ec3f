"""Links that lead out of a run's folder, a folder of pages or the cache, planted where a run will write or remove."""

import random
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from configs.cli import compose
from data.files import remove
from scripts import dashboard
from tests.torture.folders import Case, make_cases
from tests.torture.kills import fresh, one_run
from tests.torture.small import as_command, fell, given, in_a_fork
from training.record import Record

TEMPORARIES = (".x.tmp", ".evaluation.json.x.tmp", ".state.pt.x.tmp", ".summary.json.x.tmp")
WRITTEN = (".lock", "metrics.jsonl", "state.pt", "summary.json", "config.yaml", "vocabulary.json", "evaluation.json")


def links(cfg: DictConfig, folder: Path, rng: random.Random) -> Iterator[str | None]:
    """A link in a run's folder, in the cache or beside a page leads to a folder or a file: a command comes to its end
    or refuses it in one line, and what the link leads to is as it was."""
    cases, outside = make_cases(folder), folder / "outside"
    outside.mkdir()
    (outside / "chapter").write_text("years of work", encoding="utf-8")
    plants = {"a run": in_a_run, "the cache": in_the_cache, "pages": beside_a_page}
    where = dict.fromkeys(plants, 0)
    for number in range(cfg.links):
        kind = list(plants)[number % len(plants)]
        where[kind] += 1
        target = rng.choice([outside, outside / "chapter"])
        what, wrong = plants[kind](cases, folder / "place", target, rng)
        if {path.name: path.read_text(encoding="utf-8") for path in outside.iterdir()} != {"chapter": "years of work"}:
            yield f"link {number}, {what}: what it leads to was changed"
            return where
        yield f"link {number}, {what}: {wrong}" if wrong else None
    return where


def in_a_run(cases: dict[str, Case], place: Path, target: Path, rng: random.Random) -> tuple[str, str | None]:
    case, name = cases[rng.choice(list(cases))], rng.choice([*TEMPORARIES, *WRITTEN])
    command = rng.choice(list(case.commands))
    again = ["resume=false"] * (command == "train" and rng.random() < 0.5)
    case.put_back()
    remove(case.record.folder / name)
    (case.record.folder / name).symlink_to(target)
    wrong = fell(*as_command(*case.commands[command], *again))
    return f"{name} in a {case.kind} run, {command} {' '.join(again)}", wrong


def in_the_cache(cases: dict[str, Case], place: Path, target: Path, rng: random.Random) -> tuple[str, str | None]:
    fresh(place)
    in_a_fork(lambda: one_run(place, "wandb.mode=disabled"))
    (made,) = (path for path in (place / "cache").iterdir() if path.name != "files")
    work = f".{made.name}.67108864.work"
    name = rng.choice([made.name, f".{made.name}.lock", work, f"{work}/counts", f"{work}/ids.bin"])
    for path in (made, made.with_name("files")):
        remove(path)
    link = made.parent / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target)
    remove(Record.of(compose(given(place))).folder)
    return f"{name} in the cache", fell(*in_a_fork(lambda: one_run(place, "wandb.mode=disabled")))


def beside_a_page(cases: dict[str, Case], place: Path, target: Path, rng: random.Random) -> tuple[str, str | None]:
    remove(place)
    place.mkdir()
    name = rng.choice([".all.html.x.tmp", "all.html"])
    (place / name).symlink_to(target)
    case = cases["whole"]
    case.put_back()
    status, said = as_command(dashboard.run, f"runs={case.record.folder.parent}", f"out={place}/all.html")
    return f"{name} beside a page", fell(status, said)
