"""From a config to a model, or to one line that says why the config describes none."""

import functools
from collections.abc import Iterator

from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from configs.folder import CONFIGS
from data.files import UserError, out_of_memory
from models.lm import LM


def build_model(cfg: DictConfig, vocabulary: int) -> LM:
    """The model of a config; UserError where the config cannot be one.

    What the config names to be called, which may be anything in a run's folder that somebody else made,
    is called only where a file in configs/ names it too.
    """
    for part in ("model", "attn", "ffn"):
        for target in set(targets(OmegaConf.to_container(cfg[part], resolve=True))) - known_targets():
            raise UserError(f"{part}._target_={target} stands in no file of configs/{part}, and is not called")
    try:
        return instantiate_model(cfg, vocabulary)
    except (ValueError, HydraException) as error:
        raise UserError(reason(error)) from error
    except RuntimeError as error:
        if out_of_memory(error):
            raise UserError(f"model.dim={cfg.model.dim} and the rest need more memory than there is") from error
        raise


def instantiate_model(cfg: DictConfig, vocab: int) -> LM:
    """The model that a config describes, for a vocabulary of `vocab` symbols.

    ffn=again puts the attention into both slots of a block, as gated attention units want it.
    """
    attn = instantiate(cfg.attn)
    ffn = instantiate(cfg.ffn) if cfg.ffn else attn
    return LM(
        vocab,
        cfg.model.dim,
        cfg.model.layers,
        cfg.model.norm,
        cfg.model.init_std,
        bool(cfg.model.scaled_init),  # not in the config of an older run
        cfg.model.output_scale,
        bool(cfg.model.checkpointing),
        attn,
        ffn,
    )


def reason(error: Exception) -> str:
    """Its first line; where Hydra could not import or call a target, also what stood in the way."""
    cause = error
    while isinstance(error, HydraException) and cause.__cause__ is not None:
        cause = cause.__cause__
    what, why = (str(one).split("\n")[0] for one in (error, cause))
    return what if cause is error else f"{what.split(', set env')[0].rstrip(':')}: {type(cause).__name__}: {why}"


def targets(node: object) -> Iterator[str]:
    """Whatever a part of a config names for Hydra to call."""
    if isinstance(node, dict) and "_target_" in node:
        yield str(node["_target_"])
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from targets(child)


@functools.cache
def known_targets() -> set[str]:
    files = (path for part in ("attn", "ffn") for path in (CONFIGS / part).glob("*.yaml"))
    return {target for path in files for target in targets(OmegaConf.to_container(OmegaConf.load(path)))}
