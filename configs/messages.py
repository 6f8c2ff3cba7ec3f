"""Describe any error in one line, especially a mistake on the command line."""

import difflib
import os
import re
import sys

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from configs.folder import CONFIGS, composed, flat, group_meanings
from configs.process import without_controls
from configs.schema import KEYS, outer
from data.files import UserError

MISTAKES = (UserError, HydraException, OmegaConfBaseException)


def explain(error: BaseException, config_name: str) -> str:
    """Describe an error in one line. Control characters, which may come from a damaged record, are replaced."""
    return without_controls(" ".join(what_is_wrong(error, config_name).splitlines()))


def what_is_wrong(error: BaseException, config_name: str) -> str:
    if isinstance(error.__cause__, UserError):  # raised in a constructor that Hydra called
        error = error.__cause__
    if isinstance(error, MissingConfigException) and error.options:
        group = re.search("Available options in '(.*)':", str(error))[1]
        choice = error.missing_cfg_file.removeprefix(f"{group}/")
        close = nearest(choice, error.options)
        own = f"; for a text of your own, give data=file data.path={choice}" if group == "data" and not close else ""
        return f"there is no {group}={choice}{close}; there are {', '.join(error.options)}{own}"
    there = re.match(
        r"Could not append to config\. An item is already at '([^']+)'|Multiple values for (\S+)\. ", str(error)
    )
    if isinstance(error, ConfigCompositionException) and there:
        name = there[there.lastindex]
        return f"{name} exists already: give {name}=... without +"
    key = re.match(r"Could not (override|append|delete)[^']*'([^']+)'", str(error))
    if isinstance(error, ConfigCompositionException) and key:
        name, known = key[2].split("=")[0], known_keys(config_name)
        if key[1] == "delete" and name in known:
            return f"{name} is needed and cannot be deleted"
        return unknown_key(name, known)
    several = re.match(r"Ambiguous value for argument '(.*?)'\n1", str(error), re.DOTALL)
    if several:
        key, _, values = several[1].partition("=")
        declared = KEYS.get(f"{config_name}: {key}", KEYS.get(key))
        if isinstance(known_keys(config_name).get(key), list) or outer(declared) is list:
            return f"{key} is a list: give {key}=[{values}]"
        return f"{several[1]} gives several values: -m {several[1]} makes a run of each"
    given = error.override if isinstance(error, OverrideParseException) else None
    if given is not None and ("=" not in given or os.path.exists(given)):
        known = known_keys(config_name)
        right = f"give {given}=..." if given in known else "--help lists the keys"
        right = f"give run={given}" if "run" in known and os.path.exists(given) else right
        return f"arguments are key=value: got {given}; {right}"
    if "Unknown plugin class" in str(error):
        return f"{error}: pip install -r requirements-extra.txt, or -r requirements-ray.txt for Ray"
    message = str(error).split("\n-----")[0]  # submitit appends all output of the job
    text = "\n".join(line for line in message.splitlines() if "See https" not in line)
    return text if isinstance(error, (*MISTAKES, ValueError)) else f"{type(error).__name__}: {text}"


def unknown_key(key: str, known: dict) -> str:
    """Return the message for a key that does not exist.

    It names the choices with which the key exists, or the most similar key, or the keys of the same section. If there
    are none of these, it refers to --help.
    """
    if having := choices_with_group(key):
        group = key.rpartition("/")[0]
        return f"there is no {key} with this {group}; it exists with {' or '.join(having)}"
    part, _, rest = key.partition(".")
    inside = [k.removeprefix(f"{part}.") for k in known if k.startswith(f"{part}.") and not k.endswith("_")]
    grouped = part in known and part in group_meanings(CONFIGS / "config.yaml")
    having = choices_with(part, rest) if grouped and rest else []
    having = [f"{part}={name}" for name in having if name != known[part]]
    if having:
        return f"there is no key {key} with this {part}; it exists with {' or '.join(having)}"
    there = f"; {part} has {', '.join(inside)}" if inside else "; --help lists the keys"
    return f"there is no key {key}{nearest(key, list(known)) or there}"


def choices_with(group: str, key: str) -> list[str]:
    """Return the choices of a group whose configs have a key in the section that is named like the group, if any."""
    folder, word = CONFIGS / group, key.rpartition(".")[2]
    if not any(f"{word}:" in path.read_text(encoding="utf-8") for path in folder.rglob("*.yaml")):
        return []  # composing all configs would take seconds
    if group not in composed("config", [])[0]:  # such as rates, whose files set keys of other sections
        return []
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    return [name for name in names if key in flat(composed("config", [f"{group}={name}"])[0][group])]


def choices_with_group(key: str) -> list[str]:
    """Return the choices, like attn=rwv, with which a group inside a group exists, like attn/position_weight."""
    group, _, inner = key.rpartition("/")
    files = sorted((CONFIGS / group).glob("*.yaml")) if group else []
    found = (path for path in files if re.search(rf"^  - {re.escape(inner)}: ", path.read_text("utf-8"), re.MULTILINE))
    return [f"{group}={path.stem}" for path in found]


def nearest(word: str, words: list[str]) -> str:
    """Return ", did you mean X?" for the most similar of the words, or "" if none is similar.

    The last parts of dotted words must be similar; the parts before them count less.
    """
    part, _, end = word.lower().rpartition(".")
    scores = {}
    for other in words:
        its_part, _, its_end = other.lower().rpartition(".")
        likeness = difflib.SequenceMatcher(None, end, its_end).ratio()
        of_hydra = its_end.endswith("_")  # such as _target_
        if likeness >= (0.5 if part and part == its_part else 0.6) and not of_hydra:
            weight = 0.5 if part else 0.1
            scores[other] = likeness + weight * difflib.SequenceMatcher(None, part, its_part).ratio()
    return f", did you mean {max(scores, key=scores.get)}?" if scores else ""


def known_keys(config_name: str) -> dict:
    """Return the groups and keys, with their values, of the config that the command line chooses.

    If a choice on the command line does not exist, they are those of the default config.
    """
    given = [a for a in sys.argv[1:] if re.match(r"[\w/]+=\w+$", a) and (CONFIGS / a.partition("=")[0]).is_dir()]
    for overrides in (given, []):
        try:
            cfg, choices = composed(config_name, overrides)
        except HydraException:
            continue
        return {group: choice for group, choice in choices.items() if "/" not in group} | flat(cfg)
    return {}
