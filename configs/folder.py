"""Compose configs from the YAML files of this folder with Hydra."""

import contextlib
import copy
import functools
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

CONFIGS = Path(__file__).parent

# Hydra warns that the files in configs/hydra/launcher/ have the names of the launchers' own configs.
warnings.filterwarnings("ignore", r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")


@contextlib.contextmanager
def ready() -> Iterator[None]:
    """Let Hydra read this folder in the body of a `with`.

    In a command of this repository, Hydra reads this folder already, and nothing changes. If a program has set Hydra up
    for configs of its own, this is restored afterwards.
    """
    program = GlobalHydra.instance().hydra
    if program and any(source.path == str(CONFIGS) for source in program.config_loader.get_sources()):
        yield
        return
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = program


def composed(config_name: str, overrides: list[str]) -> tuple[DictConfig, dict[str, str]]:
    """Return the config that Hydra composes from overrides, and the file chosen in each group. Values are not checked.

    Hydra takes 0.1 s to compose a config. The overrides that choose files, such as attn=aft, are therefore composed
    only once. If all other overrides only set existing keys, these keys are then set in a copy of the result.
    """
    groups = tuple(override for override in overrides if (CONFIGS / override.partition("=")[0]).is_dir())
    keys = [override for override in overrides if override not in groups]
    if all(re.match(r"(?!hydra\.)[\w.]+=", override) for override in keys):
        cfg, choices = with_choices(config_name, groups)
        with contextlib.suppress(HydraException, OmegaConfBaseException):  # composed_by_hydra then raises Hydra's error
            return with_keys(cfg, keys), dict(choices)
    return composed_by_hydra(config_name, overrides)


def composed_by_hydra(config_name: str, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """Return what `composed` returns, always composed anew by Hydra."""
    with ready():
        whole = hydra.compose(config_name, list(overrides), return_hydra_config=True)
    return OmegaConf.masked_copy(whole, [key for key in whole if key != "hydra"]), whole.hydra.runtime.choices


def with_choices(config_name: str, groups: tuple[str, ...]) -> tuple[DictConfig, dict[str, str]]:
    """Return what `composed` returns for choices of files alone, like ("attn=aft",). It is cached; do not modify it."""
    if all(re.match(r"[\w/]+=", group) for group in groups):  # then the order of different groups does not matter
        groups = tuple(sorted(groups, key=lambda group: group.partition("=")[0]))
    return composed_once(config_name, groups)


composed_once = functools.cache(composed_by_hydra)


def with_keys(cfg: DictConfig, overrides: list[str]) -> DictConfig:
    """Return a copy of `cfg` with these overrides.

    Raises an error of Hydra or OmegaConf if `cfg` lacks a key, or if an override has several values.
    """
    cfg = copy.deepcopy(cfg)
    with flag_override(cfg, "struct", True):  # raises errors for keys that `cfg` lacks
        for override in map(parsed, overrides):
            if override.is_sweep_override():
                raise HydraException(f"{override.input_line} has several values")
            OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
    return cfg


@functools.cache
def parsed(override: str) -> Override:
    """Return an override as Hydra reads it. It is cached, because a sweep's jobs share most of their overrides."""
    return OverridesParser.create().parse_override(override)


def group_meanings(path: Path) -> dict[str, str]:
    """Return the groups in the defaults list of a config, in order, with the comments beside them, {group: comment}.

    The comment is "" if there is none.
    """
    return dict(
        re.findall(r"^  - (?:optional )?(\w+): \S+(?: # (.*))?$", path.read_text(encoding="utf-8"), re.MULTILINE)
    )


def flat(cfg: DictConfig | dict, resolve: bool = False) -> dict:
    """Return a config as {"model.dim": 512, ...}, with lists and empty dicts as values."""

    def walk(node: dict, prefix: str):
        for key, value in node.items():
            if isinstance(value, dict) and value:
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return dict(walk(OmegaConf.to_container(cfg, resolve=resolve) if isinstance(cfg, DictConfig) else cfg, ""))
