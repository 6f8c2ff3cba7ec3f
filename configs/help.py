"""Write the text of --help: what a command does, its groups of files, and its keys with defaults and meanings.

The meaning of a key is the comment beside it in a YAML file. Its range comes from configs/schema.py.
"""

import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import yaml

from configs.checking import shown
from configs.folder import CONFIGS, composed, flat, group_meanings
from configs.schema import outer, types_of

COLUMN = 36  # where the meanings begin
POINTER = r"\$\{([\w.]+)\}"  # a value that refers to another key, such as ${model.dim}


def help_text(config_name: str, overrides: list[str]) -> str:
    """Return the help of a command, with the keys of the files that these overrides choose."""
    cfg, choices = composed(config_name, overrides)
    groups = [group for group in choices if "/" not in group]
    path = CONFIGS / f"{config_name}.yaml"
    text = [re.match(r"(#.*\n)+", path.read_text(encoding="utf-8"))[0].replace("# ", "").replace("#", "")]
    if groups:
        text.append("Groups, GROUP=CHOICE:")
        for group, meaning in group_meanings(path).items():
            files = ", ".join(file.stem for file in choosable(group))
            text.append(row(f"{group}={choices[group]}", f"{meaning}: {files}"))
        if "experiment" in groups:
            launchers = ", ".join(file.stem for file in choosable("hydra/launcher"))
            meaning = "run all combinations of comma-separated values; hydra/launcher=CHOICE runs them in parallel"
            inner = [group for group in choices if "/" in group and not group.startswith("hydra/")]
            text += [row(f"{group}={choices[group]}", ", ".join(f.stem for f in choosable(group))) for group in inner]
            text.append(row("-m", f"{meaning}: {launchers}"))
        text.append("")
    text.append("Keys, KEY=VALUE:")
    for key, (value, meaning) in key_meanings(config_name, cfg, choices).items():
        limits = allowed(types_of(config_name, key, cfg), meaning)
        text.append(row(f"{key}={value}", f"{meaning} [{limits}]" if limits else meaning))
    return "\n".join(text)


def row(left: str, right: str) -> str:
    """Return text in two columns. If the left text is too long, the right column begins on the next line."""
    width = min(shutil.get_terminal_size((120, 0)).columns, 120)
    first = f"  {left}".ljust(COLUMN - 1) + " "
    begin, right = (f"{first.rstrip()}\n" + " " * COLUMN, right) if len(first) > COLUMN else (first, right)
    lines = textwrap.wrap(right, max(width - COLUMN, 30), break_long_words=False, break_on_hyphens=False)
    return begin + f"\n{' ' * COLUMN}".join(lines)


def choosable(group: str) -> list[Path]:
    """Return the files of a group."""
    return sorted((CONFIGS / group).glob("*.yaml"))


def key_meanings(config_name: str, cfg: dict, choices: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Return the value and the meaning of each key, {key: (value, meaning)}.

    If a key has no comment, but a section that contains it has one, the section is returned in its place, with the
    value {...}.
    """
    comments = {}
    for group in (group for group in choices if "/" not in group):
        order = {name: place for place, name in enumerate(inheritance(group, choices[group]))}
        files = (CONFIGS / group).rglob("*.yaml")
        for file in sorted(files, key=lambda file: (order.get(file.stem, len(order)), str(file))):
            is_global = file.read_text(encoding="utf-8").startswith("# @package _global_")
            part = "" if is_global else ".".join(file.relative_to(CONFIGS).parent.parts)
            for key, comment in comments_of(file):
                comments.setdefault(f"{part}.{key}".lstrip("."), comment)
    comments |= dict(comments_of(CONFIGS / f"{config_name}.yaml"))
    found = {}
    for key, value in flat(cfg).items():
        parts = [key.rsplit(".", cut)[0] for cut in range(key.count(".") + 1)]
        name = next((part for part in parts if part in comments), key)
        if not key.endswith("_") and value != {} and key not in choices:  # _target_ and _partial_ are Hydra's
            text = shown(value) if str(value).isprintable() else repr(value)
            meaning = comments.get(name, "")
            if pointed_at := re.fullmatch(POINTER, meaning):  # such as attn.dim, which has the meaning of model.dim
                meaning = comments.get(pointed_at[1], "")
            found.setdefault(name, (text if name == key else "{...}", meaning))
    return found


def inheritance(group: str, choice: str) -> list[str]:
    """Return a choice of a group and the choices that its file inherits from, the nearest first."""
    path = CONFIGS / group / f"{choice}.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    defaults = config.get("defaults", ()) if config else ()  # a file that has only comments is read as None
    bases = [base for base in defaults if isinstance(base, str) and base != "_self_"]
    return [choice, *(name for base in bases for name in inheritance(group, base))]


def comments_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the keys of a YAML file that have a comment beside them, with the comments.

    If a key has no comment, and its value refers to another key, such as ${model.dim}, the reference is yielded
    instead of a comment.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()

    def walk(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, str]]:
        for key, value in node.value:
            inline = value.start_mark.line == value.end_mark.line
            end = value.end_mark if inline else key.end_mark
            comment = re.match(r"[^#]*?\s#\s*(.*)", lines[end.line][end.column :] if end.line < len(lines) else "")
            if comment:
                yield f"{prefix}{key.value}", comment[1]
            elif re.fullmatch(POINTER, str(value.value)):
                yield f"{prefix}{key.value}", value.value
            if isinstance(value, yaml.MappingNode):
                yield from walk(value, f"{prefix}{key.value}.")

    if (root := yaml.compose(text)) is not None:  # it is None if the file has only comments
        yield from walk(root, "")


def allowed(types: tuple, meaning: str) -> str:
    """Return, as text, the ranges of a key's value, and the choices for it that `meaning` does not name."""
    words = []
    for kind in types:
        inner = get_args(kind)[0] if outer(kind) in (list, tuple) and get_args(kind) else kind
        if get_origin(inner) is Annotated:
            words.append(str(inner.__metadata__[0]))
        elif get_origin(inner) is Literal:
            words += [choice for choice in get_args(inner) if choice not in meaning]
    return ", ".join(words)
