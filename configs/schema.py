"""Types and ranges of keys."""

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.folder import flat, without_overrides
from data.files import UserError

# What keys hold that have no default to go by.
WITHOUT_DEFAULT = {
    **dict.fromkeys(
        ("vocab_size", "key_size", "logit_heads", "value_heads", "hidden", "windows", "top_k"), (int, type(None))
    ),
    **dict.fromkeys(("encoding", "revision", "tier", "replace", "folder"), (str, type(None))),
    **dict.fromkeys(("top_p", "top_p_x", "min_p", "top_a"), (float, type(None))),
    **dict.fromkeys(("processes", "context", "stop", "stride"), (int, type(None))),
    **dict.fromkeys(("budget", "clip"), (float, type(None))),
    "compile": (bool, type(None)),
    **dict.fromkeys(("variants", "claims"), (list, type(None))),
    "time": (type(None),),
    "path": (str, list),
    "run": (str,),
}

# What the numbers of keys that end in these words are at least, those of a list too.
LEAST = {
    **dict.fromkeys(("batch", "characters", "context", "contexts", "jobs", "length", "lengths", "longer"), 1),
    **dict.fromkeys(("processes", "repeats", "rungs", "samples", "tokens", "trials", "vocabulary", "windows"), 1),
    **dict.fromkeys(("budget", "limit", "seconds", "seed", "seeds", "committed_seeds", "warm_up"), 0),
}

# Keys of a command that may be null though their default is not.
MAY_BE_NULL = {("table", "runs")}


def check_values(cfg: DictConfig, usual: DictConfig, config_name: str, choices: dict[str, str]) -> None:
    """Raise UserError for an overridden value that its key cannot have; make 1e4 steps a whole number.

    Where a list is wanted, one value is made a list of one.
    """
    given, base = flat(cfg), flat(usual)
    for key, default in base.items():
        if given[key] == default and type(given[key]) is type(default):
            continue
        if key.endswith("._partial_"):
            raise UserError(f"{key} is how a part is made, and cannot be set")
        kinds = kinds_of(key, default, usual)
        if given[key] is None and (config_name, key) in MAY_BE_NULL:
            continue
        if default is not None and given[key] is None and not null_without_experiment(key, config_name, choices):
            kinds = tuple(kind for kind in kinds if kind is not type(None))
        if list in kinds and str not in kinds and not fits(given[key], kinds):  # one value where a list is wanted
            given[key] = [given[key]]
            OmegaConf.update(cfg, key, given[key])
        if not fits_like(resolved(cfg, key), kinds, default):
            raise UserError(f"{key} must be {expected(kinds, default)}: got {given[key]}")
        check_numbers(key, given[key])
        if isinstance(given[key], float) and float not in kinds and int in kinds:
            OmegaConf.update(cfg, key, int(given[key]))  # 1e4 steps


def check_at_least(cfg: DictConfig, least: dict[str, int]) -> None:
    """Raise UserError for a number that is below what its key allows."""
    for key, number in least.items():
        if OmegaConf.select(cfg, key) < number:
            raise UserError(f"{key} must be {number} or more: got {OmegaConf.select(cfg, key)}")


def check_numbers(key: str, value: object) -> None:
    """Raise UserError for an empty list, and for a number, or one in a list, that is below what its key allows."""
    if value == []:
        raise UserError(f"{key} must not be empty")
    least = LEAST.get(key.rsplit(".", 1)[-1])
    numbers = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, (int, float))]
    if least is not None and not all(number >= least for number in numbers):
        raise UserError(f"{key} must be {least} or more: got {value}")


def check_types(cfg: DictConfig, usual: DictConfig, choices: dict, wrong: str) -> None:
    """Raise UserError for a value of a config, read from a file, that is not of the kind it is in the usual one."""
    values, defaults = flat(cfg, resolve=True), flat(usual, resolve=True)
    for part in {key.rpartition(".")[0] for key in defaults} & values.keys():
        raise UserError(f"{wrong}: {part} must hold keys of its own: it is {values[part]}")
    for key, default in defaults.items():
        if any(other.startswith(f"{key}.") for other in values) and default != {}:
            raise UserError(f"{wrong}: {key} must be one value, like {default}")
        if key not in values or default == "???":
            continue
        kinds = kinds_of(key, default, usual)
        if values[key] is None and default is not None and not null_without_experiment(key, "config", choices):
            kinds = tuple(kind for kind in kinds if kind is not type(None))
        if not fits_like(values[key], kinds, default):
            raise UserError(f"{wrong}: {key} must be {expected(kinds, default)}: it is {values[key]}")


def check_seed(seed: int) -> None:
    """Raise UserError for a seed that torch cannot take."""
    if seed >= 2**63:
        raise UserError(f"seed must be below 2^63: got {seed}")


def kinds_of(key: str, default: object, config: DictConfig) -> tuple[type, ...]:
    """What a key may hold, by its default; () where there is nothing to go by."""
    if default in (None, "???"):
        return WITHOUT_DEFAULT.get(key.rsplit(".", 1)[-1], ())
    if isinstance(default, str) and "${" in default:
        try:
            default = OmegaConf.select(config, key)
        except OmegaConfBaseException:  # it points at a key that is still missing
            return ()
    if default is None or isinstance(default, dict):
        return ()
    # An experiment may have set what was null.
    kinds = (type(default), *WITHOUT_DEFAULT.get(key.rsplit(".", 1)[-1], ()))
    return tuple(dict.fromkeys(kinds))


def null_without_experiment(key: str, config_name: str, choices: dict) -> bool:
    """Whether a key is null unless the chosen experiment sets it."""
    if "experiment" not in choices:
        return False
    groups = (
        f"{group}={choice}"
        for group, choice in choices.items()
        if "/" not in group and group not in ("experiment", "rates")
    )
    return OmegaConf.select(without_overrides(config_name, (*groups, "rates=none", "~experiment"))[0], key) is None


def resolved(cfg: DictConfig, key: str) -> object:
    """The value of a key, with what it points at in its place."""
    value = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value


def fits_like(value: object, kinds: tuple[type, ...], default: object) -> bool:
    """Whether a value is of one of the kinds; and if it is a list, its elements of the kind of the default's."""
    elements = value if isinstance(value, list) and isinstance(default, list) and default else []
    return fits(value, kinds) and all(fits(element, (type(default[0]),)) for element in elements)


def fits(value: object, kinds: tuple[type, ...]) -> bool:
    """Whether a value is of one of the kinds."""
    if not kinds or type(value) in kinds:
        return True
    if isinstance(value, int) and not isinstance(value, bool):
        return float in kinds
    return isinstance(value, float) and int in kinds and value.is_integer()


def expected(kinds: tuple[type, ...], default: object) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", list: "a list"}
    names |= {type(None): "null", dict: "a part with keys of its own"}
    what = " or ".join(names[kind] for kind in kinds)
    return what if default in (None, "???") else f"{what}, like {default}"
