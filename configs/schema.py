"""The type and the range of each key.

A key of an object that Hydra builds has the type and the range that the constructor declares. Any other key has the
type of its default, unless KEYS gives another one, such as a range, choices, or a type that allows null.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attn.ranges import Range, Size

Count = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, below=2**63)]  # accepted by torch and numpy
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, below=1)]
Mirror = Literal["online", "offline", "disabled"]  # modes of wandb

# The types of keys: "key" for all commands, "command: key" for one. A key whose default is null may be null,
# even if its type here does not allow it.
KEYS = {
    "seed": Seed,
    **{f"model.{key}": Size for key in ("layers", "heads", "dim", "context")},
    "model.norm": Literal["pre", "post", "rezero"],
    "model.init_std": NotNegative,
    "model.output_scale": NotNegative,
    "model.dropout": Share,
    "optim.impl": Literal["fused", "package", "adamw", "muon"],
    "optim.lr": Positive,
    "optim.min_lr": NotNegative,
    "optim.warm_up": Count,
    "optim.betas": tuple[Share, Share],
    "optim.eps": Positive,
    "optim.weight_decay": NotNegative,
    "optim.clip": Positive | None,
    "train.steps": Count,
    "train.stop": int | None,
    "train.patience": Size | None,
    "train.init_from": str | None,
    **{f"train.{key}": Size for key in ("batch", "accumulate", "log_every")},
    "train.precision": Literal["auto", "float32", "bf16"],
    "train.parallel": Literal["ddp", "fsdp"],
    "train.compile": bool | None,
    "train.checkpoint_seconds": NotNegative,
    "data.path": str | list[str],
    "data.name": str,
    **{f"data.{key}": str | None for key in ("encoding", "config", "revision")},
    "data.vocab_size": Annotated[int, Range(2)] | None,
    "data.holdout": Share,
    **{f"data.{key}": Size for key in ("length", "sequences", "keys", "values", "pairs", "symbols")},
    "data.text_seed": Seed,
    "data.processes": Size | None,
    **{f"evaluation.{key}": Size for key in ("every", "windows", "final_windows", "stride")},
    "evaluation.sample": Count,
    "wandb.mode": Mirror,
    # keys of commands other than train.py
    **dict.fromkeys(("batch", "characters", "length", "repeats", "samples", "trials"), Size),
    **dict.fromkeys(("vocabulary", "steps.repeats", "steps.vocabulary", "layers.repeats"), Size),
    "layers.tokens": Size,
    "sizes": list[tuple[Size, Size, Size, Size]],
    "stop": Size | None,
    **dict.fromkeys(("warm_up", "steps.warm_up", "layers.warm_up"), Count),
    **dict.fromkeys(("context", "windows", "processes", "vocab_size"), Size | None),
    **dict.fromkeys(("contexts", "layers.lengths", "rungs", "keep"), list[Size]),
    **dict.fromkeys(("budget", "layers.limit", "seconds"), NotNegative),
    **dict.fromkeys(("seeds", "committed_seeds", "rate_seeds"), list[Seed]),
    "look_steps": list[Count],
    "replace": str | None,
    **dict.fromkeys(("learning_rates", "scales"), list[Positive]),
    "variants": list[str],
    "claims": list[str | int],
    "pages": list[str],
    "precisions": list[Literal["float32", "bf16"]],
    "sort": Literal["newest", "fit", "heldout", "tokens_per_second"],
    "wandb": Mirror,
    "stride": int | None,
    "top_k": Size | None,
    **dict.fromkeys(("top_p", "top_p_x", "min_p", "top_a"), float | None),
    "run": str,
    "entity": str,
    "benchmark: tier": Literal["cpu", "gpu"],
    "reproduce: tier": Literal["source", "novel", "small"],
    "compare: runs": str | None,
}


def types_of(config_name: str, key: str, usual: DictConfig) -> tuple:
    """Return the types that a key may have. A number's type may be Annotated with its Range; object allows any value.

    `usual` is the config with the defaults.
    """
    part, _, name = key.rpartition(".")
    if part.split(".")[0] in ("attn", "ffn", "data"):
        declared = constructor_types(OmegaConf.select(usual, f"{part}._target_")).get(name)
        if declared is not None:
            return tuple(kind for kind in kinds(declared) if outer(kind) is not Callable) or (object,)
    for known in (f"{config_name}: {key}", key):
        if known in KEYS:
            return kinds(KEYS[known])
    try:
        default = resolved(usual, key)
    except OmegaConfBaseException:  # the default refers to a key that has no value yet
        return (object,)
    if isinstance(default, list) and default:
        return (list[type(default[0])],)
    return (object if default is None else type(default),)


@functools.cache
def constructor_types(target: str | None) -> dict[str, object]:
    """Return the types of a target's arguments, or {} if importing fails; the error is raised later, in building it."""
    if target is None:
        return {}
    module, _, name = target.rpartition(".")
    try:
        called = getattr(importlib.import_module(module), name)
        return get_type_hints(called.__init__ if inspect.isclass(called) else called, include_extras=True)
    except Exception:  # importing a user's module may raise anything
        return {}


def kinds(hint: object) -> tuple:
    """Return the types of a union, or the one type."""
    return get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)


def outer(kind: object) -> object:
    """Return list for list[int], int for Annotated[int, Range(1)], Literal for Literal["a"], and int for int."""
    origin = get_origin(kind)
    return kind.__origin__ if origin is Annotated else origin or kind


def resolved(cfg: DictConfig, key: str) -> object:
    """Return the value of a key, with interpolations resolved."""
    value = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value
