"""Read files that may be damaged or come from elsewhere. Every error is a UserError of one line."""

import json
import reprlib
from pathlib import Path
from types import NoneType

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from data.files import UserError, as_user_error, regular

LARGEST_TEXT = 1 << 26  # bytes; every undamaged config, summary, vocabulary and line of metrics is far smaller

# Types for `misfit`, and their names in messages.
TEXT, WHOLE, NUMBER, OR_NULL = (str,), (int,), (int, float), (NoneType,)
TYPE_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
    dict: "an object",
    list: "a list",
}


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file of at most LARGEST_TEXT bytes."""
    with as_user_error(f"cannot read {path}"), open(path, "rb", opener=regular) as file:
        content = file.read(LARGEST_TEXT + 1)
    if len(content) > LARGEST_TEXT:
        raise UserError(f"{path} is damaged: it is larger than {LARGEST_TEXT >> 20} MiB")
    return content


def read_json(path: Path):
    """Return the value in a JSON file."""
    try:
        return json.loads(read_bytes(path).decode())  # json.loads would read bytes in UTF-16 too
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: it is not JSON") from error


def read_object(path: Path) -> dict:
    """Return the JSON object in a file."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object")
    return content


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a safetensors file."""
    try:
        with as_user_error(f"cannot read {path}"), open(path, "rb", opener=regular) as file:
            return load_tensors(file.read())
    except (SafetensorError, KeyError, TypeError) as error:  # the last two for types and sizes that torch lacks
        raise UserError(f"{path} is damaged: it is not a safetensors file") from error


def misfit(content: dict, types: dict, whole: bool = True) -> str | None:
    """Return a message about the first entry that has a wrong type or, if `whole`, is missing; None if there is none.

    `types` maps each key to a tuple of types, to a dict that describes an object, or to a list of one dict, which
    describes every element of a list. A key that ends in "?" may be missing.
    """
    for name, kinds in types.items():
        key = name.removesuffix("?")
        if key not in content:
            if whole and key == name:
                return f"it holds no {key}"
            continue
        value = content[key]
        if isinstance(kinds, list) and isinstance(value, list):
            wrong = (misfit(one, kinds[0], whole) if isinstance(one, dict) else "one is not an object" for one in value)
            if wrong := next(filter(None, wrong), None):
                return f"in {key}, {wrong}"
            continue
        if isinstance(kinds, dict) and isinstance(value, dict):
            if wrong := misfit(value, kinds, whole):
                return f"in {key}, {wrong}"
            continue
        kinds = kinds if isinstance(kinds, tuple) else (type(kinds),)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(TYPE_NAMES.get(kind, kind.__name__) for kind in kinds)
            return f"{key} must be {expected}: it is {reprlib.repr(value)[:40]}"
    return None
