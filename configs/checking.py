"""Check the values of a config against the types of configs/schema.py, and describe the ones that do not fit."""

import json
from types import NoneType
from typing import Annotated, Literal, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attn.ranges import Range
from configs.folder import flat
from configs.schema import kinds, outer, resolved, types_of
from data.files import UserError


def check_values(cfg: DictConfig, usual: DictConfig, config_name: str) -> None:
    """Raise UserError if a value in `cfg` that differs from the one in `usual` is not allowed for its key.

    `usual` is the config with the defaults. `cfg` is changed in place: if a key needs a list, a single value becomes a
    list of one, and if it needs a whole number, 1e4 becomes 10000.
    """
    given = flat(cfg)
    for key, default in flat(usual).items():
        value = given[key]
        if repr(value) == repr(default):  # not ==, because [1.0] == [1]
            continue
        if key.endswith("._partial_"):
            raise UserError(f"{key} belongs to the config files and cannot be set")
        types = types_of(config_name, key, usual)
        wanted = {outer(kind) for kind in types} - {NoneType}
        if not isinstance(value, list | NoneType) and wanted == {list}:
            value = [value]
        value = whole(value, types)
        if repr(value) != repr(given[key]):
            OmegaConf.update(cfg, key, value)
        if problem := misfit(resolved(cfg, key), types, example_of(usual, key, default)):
            raise UserError(f"{key} must {problem}: got {shown(value)}")


def example_of(usual: DictConfig, key: str, written: object) -> object:
    """Return the default of a key, which a message shows as an example or as a value that is allowed, or else ???.

    `written` is the default before its references to other keys are resolved.
    """
    try:
        default = written if written == "???" else resolved(usual, key)
    except OmegaConfBaseException:  # it refers to a key that has no value
        return "???"
    return "???" if isinstance(default, str) and not default.strip() else default


def check_attention(usual: DictConfig, config_name: str) -> None:
    """Raise UserError if a value in the config file of an attention, which a user may have written, is not allowed.

    `usual` is the config with the defaults.
    """
    for key in flat(usual):
        if key.startswith("attn.") and not key.endswith(("._partial_", "._target_")):
            value = resolved(usual, key)
            if value != "???" and (problem := misfit(value, types_of(config_name, key, usual), "???")):
                raise UserError(f"{key} must {problem}: in configs/attn it is {shown(value)}")


def check_recorded(cfg: DictConfig, usual: DictConfig, wrong: str) -> None:
    """Check a config that was read from a file.

    Raises UserError if a value does not fit its key; the message begins with `wrong`.
    """
    values, defaults = flat(cfg, resolve=True), flat(usual, resolve=True)
    for part in {key.rpartition(".")[0] for key in defaults} & values.keys():
        raise UserError(f"{wrong}: {part} must be a section with keys: it is {shown(values[part])}")
    for key, default in defaults.items():
        if any(other.startswith(f"{key}.") for other in values) and default != {}:
            raise UserError(f"{wrong}: {key} must be one value, like {shown(default)}")
        if key in values and (problem := misfit(values[key], types_of("config", key, usual), default)):
            raise UserError(f"{wrong}: {key} must {problem}: it is {shown(values[key])}")


def misfit(value: object, types: tuple, default: object) -> str | None:
    """Return what a value must be, as the words that follow "KEY must" in a message, or None if it is allowed.

    A value is allowed if it fits one of the types, or if it and the default are both null.
    """
    if value is None and default is None:
        return None
    if problem := misfit_of_type(value, types):
        return problem
    return None if problem is None else f"be {expected(types, default)}"


def misfit_of_type(value: object, types: tuple) -> str | None:
    """Check a value against several types.

    Returns None if the value fits one of them. If it has one of the types, but a number is out of range or a list is
    empty, the result is a phrase, such as "be 1 or more" or "not be empty". Otherwise, and for a pair with a number out
    of range, the result is "".
    """
    problems = [misfit_of_kind(value, kind) for kind in types]
    return None if None in problems else max(problems)  # max prefers a phrase to ""


def misfit_of_kind(value: object, kind: object) -> str | None:
    """Check a value against one type, and return what `misfit_of_type` returns."""
    limits = kind.__metadata__[0] if get_origin(kind) is Annotated else Range()
    kind, inner = outer(kind), get_args(kind)
    if kind is Literal:
        return None if value in inner else ""
    if kind in (list, tuple) and isinstance(value, list):
        if not value:
            return "not be empty"
        problems = {misfit_of_type(each, kinds(inner[0]) if inner else (object,)) for each in value} - {None}
        if kind is tuple and (problems or len(value) != len(inner)):
            return ""
        return min(problems, default=None)
    if kind is int and type(value) is float and value.is_integer():
        kind = float
    if kind in (int, float) and type(value) in (int, kind):
        problem = limits.problem(value)
        return problem and f"be {problem}"
    return None if kind is object or type(value) is kind else ""


def whole(value: object, types: tuple) -> object:
    """Convert a float like 1e4 to an int if the types allow int but not float, also inside lists; keep other values."""
    if isinstance(value, list):
        inner = [kinds(get_args(kind)[0]) for kind in types if outer(kind) in (list, tuple) and get_args(kind)]
        return [whole(each, inner[0]) for each in value] if inner else value
    wanted = {outer(kind) for kind in types}
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole and int in wanted and float not in wanted else value


def expected(types: tuple, default: object) -> str:
    """Describe the values that the types allow, for a message: "a whole number or null, like 2048"."""
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", list: "a list"}
    names |= {NoneType: "null", dict: "a section with keys"}
    several = {int: "whole numbers", float: "numbers", str: "words"}
    words = []
    for kind in types:
        if outer(kind) is Literal:
            words += get_args(kind)
        elif outer(kind) is tuple:
            words.append(f"two numbers {get_args(kind)[0].__metadata__[0]}")
        elif outer(kind) is list and get_args(kind) and outer(get_args(kind)[0]) is Literal:
            words.append(f"a list of {expected(get_args(kind), '???')}")
        elif outer(kind) is list and get_args(kind) and outer(get_args(kind)[0]) in several:
            words.append(f"a list of {several[outer(get_args(kind)[0])]}")
        else:
            words.append(names.get(outer(kind), str(outer(kind))))
    if default is None and "null" not in words:
        words.append("null")
    text = " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    by_example = default not in (None, "???") and any(outer(kind) not in (Literal, tuple) for kind in types)
    by_example &= not (isinstance(default, list) and any(isinstance(entry, dict) for entry in default))  # too long
    return f"{text}, like {shown(default)}" if by_example else text


def shown(value: object) -> str:
    """Return a value as messages show it: null, true and false as in YAML, others as Python's str."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
