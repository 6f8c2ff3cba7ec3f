"""Quote the arguments of a command line as Hydra's grammar needs them, and undo this to print a command."""

import os
import re
import shlex

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from configs.folder import CONFIGS, group_meanings
from data.files import UserError

TEXTS = ("prompt", "replace", "match")  # keys whose value is text, even if it is 1998 or a,b
PARSED = r"null|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""  # null or quoted text, which `quoted` leaves as it is

INTERPOLATION = r"(\\*)\$\{"  # ${ and the backslashes before it
ESCAPED = "\\${"  # what Hydra reads as the characters ${
ELEMENT = rf"(?:^|,)(\s*(?:{PARSED})\s*(?=,|$)|[^,]*)"  # an element of a list; commas in quoted text do not end it


def quoted(argument: str, config_name: str = "config") -> str:
    """Return an argument of the command that reads configs/<config_name>.yaml, with its value quoted where necessary.

    The value of a key in TEXTS is quoted unless PARSED matches it, and ${ in it is escaped. The value of any other key
    is quoted only if Hydra cannot parse it, as with (1).txt or 金庸.txt. If such a value is a list, the elements that
    PARSED does not match are quoted. Any other such value is quoted as a whole, so that its commas do not separate the
    values of a sweep. A ~ at the beginning of an unquoted path is replaced by the user's home folder. Raises UserError
    if the key is a config group and its value is empty, null or a list.
    """
    key, equals, value = argument.partition("=")
    # An argument that is only a path is left as it is, even if the path contains "=". If Hydra cannot parse it, the
    # error message, which comes from configs/messages.py, tells the user to give key=value.
    if not equals or argument.startswith("-") or os.path.exists(argument):
        return argument
    if (value in ("", "null") or value.startswith("[")) and key in group_meanings(CONFIGS / f"{config_name}.yaml"):
        raise UserError(f"{key} must be one of the files in configs/{key}: got {value or 'nothing'}")
    if not re.fullmatch(PARSED, value, re.DOTALL):
        if key in TEXTS:
            return f"{key}={quote(re.sub(INTERPOLATION, lambda m: 2 * m[1] + ESCAPED, value))}"
        value = re.sub(r"(^|[\[,]\s*)~(?=/|$)", lambda m: m[1] + os.path.expanduser("~"), value)
    try:
        OverridesParser.create().parse_override(f"{key}={value}")
        return f"{key}={value}"
    except HydraException:
        if value.startswith("[") and value.endswith("]"):
            elements = [element.strip() for element in re.findall(ELEMENT, value[1:-1], re.DOTALL)]
            return f"{key}=[{','.join(v if re.fullmatch(PARSED, v, re.DOTALL) else quote(v) for v in elements)}]"
        return f"{key}={quote(value)}"


def quote(value: str) -> str:
    """Return a value in single quotes.

    Single quotes inside the value are escaped. Backslashes are doubled if they stand directly before a single quote or
    at the end of the value.
    """
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), value) + "'"


def command_line(start: str, arguments: list[str]) -> str:
    """Return the command `start` with these arguments as a user types it, without the quotes that quoted() adds."""
    return " ".join([start, *map(in_a_shell, map(unquoted, arguments))])


def unquoted(argument: str) -> str:
    """Return an argument without its quotes if quoted() would add them again, or else unchanged."""
    key, _, value = argument.partition("=")
    if "'" not in value:
        return argument
    try:
        value = OverridesParser.create().parse_override(argument).value()
    except HydraException:
        return argument
    short = f"{key}=[{','.join(map(str, value))}]" if isinstance(value, list) else f"{key}={value}"
    return short if quoted(short) == argument else argument


def in_a_shell(word: str) -> str:
    """Return a word with the quotes that a shell needs. A word with single quotes gets double ones if possible."""
    return f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)
