"""Build the model of a config, or raise an error of one line that says why it cannot be built."""

import functools
import inspect
from collections.abc import Iterator

from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from attn.base import Attention
from configs.cli import compose
from configs.folder import CONFIGS
from data.files import UserError, out_of_memory
from models.lm import LM


def build_model(cfg: DictConfig, vocabulary: int) -> LM:
    """Build the model of a config.

    A config from somebody else's run could name any Python function as `_target_`. Only targets that a file in
    configs/attn or configs/ffn names are called.

    Raises UserError if another target is named, a key is missing or unknown, a class cannot be imported, a value is
    out of range or does not fit the others, or there is not enough memory.
    """
    for part in ("model", "attn", "ffn"):
        for key, target in targets(OmegaConf.to_container(cfg[part], resolve=True), part):
            if target not in known_targets():
                raise UserError(f"{key}={target} is refused: no file in configs/attn or configs/ffn names it")
    for part in ("attn", "ffn"):
        if cfg[part]:
            check_call(part, cfg[part])
            if (dim := cfg[part].get("dim", cfg.model.dim)) != cfg.model.dim:
                raise UserError(f"{part}.dim must be model.dim={cfg.model.dim}: got {dim}")
    check_heads(cfg.attn)
    try:
        model = instantiate_model(cfg, vocabulary)
    except (ValueError, HydraException) as error:
        raise UserError(reason(error)) from error
    except RuntimeError as error:
        if out_of_memory(error):
            raise UserError(f"model.dim={cfg.model.dim} and the other sizes need more memory than there is") from error
        raise
    for block in model.blocks:
        longest = block.attn.max_length
        if longest is not None and longest < cfg.model.context:
            raise UserError(
                f"this attn is defined for {longest} positions, fewer than model.context={cfg.model.context}: take "
                f"model.context={longest}, or do not set a smaller context in attn"
            )
    return model


def build(name: str, dim: int, heads: int, context: int, *overrides: str) -> Attention:
    """Return an attention for a model of one's own: y, carry = attention(x) maps [B, T, dim] to [B, T, dim].

    `name` is a file in configs/attn, such as "aft". Arguments besides the sizes have the values of this file, unless
    they are in `overrides`, such as "attn.gamma=false". Raises UserError if a name or a value is unusable.
    """
    sizes = {"dim": dim, "heads": heads, "context": context}
    # Without starts=none, the start that was chosen for the small model would replace some values.
    cfg = compose([f"attn={name}", "starts=none", *(f"model.{key}={size}" for key, size in sizes.items()), *overrides])
    check_heads(cfg.attn)
    try:
        return instantiate(cfg.attn)()
    except (ValueError, HydraException) as error:
        raise UserError(reason(error)) from error


def instantiate_model(cfg: DictConfig, vocab: int) -> LM:
    """Build the model of a config for a vocabulary of `vocab` symbols, without the checks of `build_model`.

    With ffn=attention, a block has a second attention with its own weights in place of the feed-forward. Models of
    gated attention units are built this way.
    """
    attn = instantiate(cfg.attn)
    ffn = instantiate(cfg.ffn) if cfg.ffn else attn
    return LM(
        vocab,
        cfg.model.dim,
        layers=cfg.model.layers,
        placement=cfg.model.norm,
        init_std=cfg.model.init_std,
        scaled_init=cfg.model.scaled_init,
        output_scale=cfg.model.output_scale,
        dropout=cfg.model.dropout,
        positions=cfg.model.context if cfg.model.position_embedding else 0,
        activation_checkpointing=bool(cfg.model.activation_checkpointing),
        attn=attn,
        ffn=ffn,
    )


def check_heads(attn: DictConfig) -> None:
    """Raise UserError if the position weight of an attention is made for another number of heads."""
    w = attn.get("position_weight") or {}
    if "heads" in w and w.heads != attn.heads:
        raise UserError(f"attn.position_weight.heads must be attn.heads={attn.heads}: got {w.heads}")


def check_call(part: str, node: DictConfig) -> None:
    """Raise UserError if a config of an attention or feed-forward lacks a key, or has one that its class does not take.

    A class that cannot be imported raises no error here, but when the model is built.
    """
    if "_target_" not in node or not node.get("_partial_"):
        raise UserError(f"the yaml of {part} needs the keys _target_, which names a class, and _partial_: true")
    try:
        called = get_object(node._target_)
    except Exception:  # importing a user's module may raise anything
        return
    try:
        inspect.signature(called).bind(**{key: None for key in node if key not in ("_target_", "_partial_")})
    except TypeError as error:
        raise UserError(f"the yaml of {part} does not fit {node._target_}: {error}") from error
    for key, child in node.items():
        if isinstance(child, DictConfig) and "_target_" in child:
            check_call(f"{part}.{key}", child)


def reason(error: Exception) -> str:
    """Return the first line of an error and, if Hydra could not import or call a target, of its cause."""
    cause = error
    while isinstance(error, HydraException) and cause.__cause__ is not None:
        cause = cause.__cause__
    what, why = (str(one).split("\n")[0] for one in (error, cause))
    return what if cause is error else f"{what.split(', set env')[0].rstrip(':')}: {type(cause).__name__}: {why}"


def targets(node: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the value of each `_target_` in a part of a config; `path` is the part's own key."""
    if isinstance(node, dict) and "_target_" in node:
        yield f"{path}._target_", str(node["_target_"])
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from targets(child, f"{path}.{key}")


@functools.cache
def known_targets() -> set[str]:
    """Return all values of `_target_` in configs/attn and configs/ffn. Raises UserError for a file that is not YAML."""
    found = set()
    files = (path for part in ("attn", "ffn") for path in (CONFIGS / part).rglob("*.yaml"))
    for path in files:
        try:
            node = OmegaConf.to_container(OmegaConf.load(path))
        except (YAMLError, OSError) as error:  # OmegaConf raises OSError for a file that holds one number
            raise UserError(f"{path} is not a config in YAML: {' '.join(str(error).split())}") from error
        found |= {target for _, target in targets(node, "")}
    return found
