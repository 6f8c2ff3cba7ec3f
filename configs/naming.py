"""A run's name: the attention, every difference to what the experiment says, and the seed."""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig

from configs.folder import flat, without_overrides

LONGEST = 200  # bytes of a run's name, before its seed: a file system has 255
# Keys that do not decide what a run is: the same run may be continued with others.
NOT_PART_OF_IDENTITY = (
    "job", "runs", "resume", "wandb",
    "data.cache", "data.processes", "data.source.cache", "data.source.downloads",
    "train.device", "train.compile", "train.log_every", "train.checkpoint_seconds",
    "train.parallel", "train.accumulate", "model.activation_checkpointing", "evaluation.sample",
)  # fmt: skip


def run_name(cfg: DictConfig, usual: DictConfig, config_name: str, choices: dict[str, str]) -> str:
    """The name of a run whose config is `cfg`, and was `usual` before keys were overridden.

    Where it is too long, or a value cannot be part of a folder's name as it stands, a hash of all differences is added.
    """
    _, defaults = without_overrides(config_name, (f"experiment={choices['experiment']}", f"attn={choices['attn']}"))
    groups = [group for group in choices if group != "rates" and not group.startswith("hydra/")]
    parts = [choices[group] for group in groups if choices[group] != defaults.get(group)]
    base = flat(usual)
    differences = {k: v for k, v in flat(cfg).items() if v != base[k] and k != "seed" and not not_part_of_identity(k)}
    short = short_names(base)
    parts += [f"{short[k]}={brief(v)}" for k, v in sorted(differences.items())]
    name = "-".join([choices["attn"], *parts])
    long = len(name) > 100 or len(name.encode(errors="replace")) > LONGEST
    if long or any(brief(v).lower() != str(v).lower() for v in differences.values()):
        exact = hashlib.sha256(json.dumps([parts, differences], sort_keys=True, default=str).encode()).hexdigest()
        cut = name[:100].encode(errors="replace")[:LONGEST].decode(errors="ignore")
        name = f"{cut}-{exact[:6]}"
    return f"{name}-seed{cfg.seed}"


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """A key's last word, where no earlier one ends in it: model.heads is heads, attn.heads stays."""
    first = {}
    for key in keys:
        first.setdefault(key.rsplit(".", 1)[-1], key)
    return {key: word if first[word] == key else key for key in keys for word in [key.rsplit(".", 1)[-1]]}


def brief(value: object) -> str:
    """A value as part of a folder's name."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return re.sub(r"[^\w.+-]+", "_", Path(text).stem if "/" in text else text)[:40]


def not_part_of_identity(key: str) -> bool:
    """Whether a key, or the part that it is in, is in NOT_PART_OF_IDENTITY."""
    return any(key == each or key.startswith(each + ".") for each in NOT_PART_OF_IDENTITY)
