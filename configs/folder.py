"""The YAML files of this folder, as Hydra composes them."""

import contextlib
import functools
import warnings
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

CONFIGS = Path(__file__).parent

# The files in configs/hydra/launcher/ have the names of the launchers' own configs, about which Hydra warns.
warnings.filterwarnings("ignore", r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")


def ready() -> contextlib.AbstractContextManager:
    """Return a context in which Hydra reads our config folder. Within a command Hydra is already initialised."""
    if GlobalHydra.instance().is_initialized():
        return contextlib.nullcontext()
    return hydra.initialize_config_dir(str(CONFIGS), version_base="1.3")


def composed(config_name: str, overrides: list[str]) -> tuple[DictConfig, dict[str, str]]:
    """Return the config that Hydra composes from overrides, without checking it, and the file chosen in each group."""
    with ready():
        whole = hydra.compose(config_name, overrides, return_hydra_config=True)
    return OmegaConf.masked_copy(whole, [key for key in whole if key != "hydra"]), whole.hydra.runtime.choices


@functools.cache
def without_overrides(config_name: str, groups: tuple[str, ...]) -> tuple[DictConfig, dict[str, str]]:
    """Return the config in which only files are chosen, such as ("attn=aft",). It is cached; do not modify it."""
    return composed(config_name, list(groups))


def flat(cfg: DictConfig | dict, resolve: bool = False) -> dict:
    """Return a config as {"model.dim": 512, ...}, with lists as values."""

    def walk(node: dict, prefix: str):
        for key, value in node.items():
            if isinstance(value, dict) and value:
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return dict(walk(OmegaConf.to_container(cfg, resolve=resolve) if isinstance(cfg, DictConfig) else cfg, ""))
