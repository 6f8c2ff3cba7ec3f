"""A run's name: the attention, the seed, and all differences from the experiment's config that make it another run."""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig

from configs.folder import flat, with_choices

# Maximum size of a run's name without hash and seed. File systems allow 255 bytes.
MOST_CHARACTERS, MOST_BYTES = 100, 200
# Studies write the files of these groups and may change them. The name of a run therefore contains the values that it
# takes from such a file, and not the name of the file.
CHOSEN_BY_STUDIES = ("starts", "rates")
NOTHING_CHOSEN = tuple(f"{group}=none" for group in CHOSEN_BY_STUDIES)
# Keys that are not part of a run's identity: other values do not make it another run.
NOT_PART_OF_IDENTITY = (
    "job", "runs", "resume", "wandb",
    "data.cache", "data.processes", "data.source.cache", "data.source.downloads",
    "train.device", "train.compile", "train.log_every", "train.checkpoint_seconds",
    "train.parallel", "train.accumulate", "model.activation_checkpointing", "evaluation.sample",
)  # fmt: skip


def run_name(cfg: DictConfig, usual: DictConfig, config_name: str, choices: dict[str, str]) -> str:
    """Return the name of the run with config `cfg`.

    `usual` is composed from the same config files, without overrides of keys and without the starts and rates that
    studies have chosen. A hash of all changed values and chosen files is added if the name is too long and has to be
    cut. It is also added if `brief` shortens a value or replaces characters in it; a change from upper to lower case
    does not count.
    """
    # The name has the values that starts and rates set, and not which of their files are chosen. As `usual` is composed
    # with NOTHING_CHOSEN too, `with_choices` often has this config in its cache.
    main = (f"experiment={choices['experiment']}", f"attn={choices['attn']}")
    _, defaults = with_choices(config_name, (*main, *NOTHING_CHOSEN))
    parts = [
        choice
        for group, choice in choices.items()
        if group not in CHOSEN_BY_STUDIES and not group.startswith("hydra/") and choice != defaults.get(group)
    ]
    base = flat(usual)
    differences = {k: v for k, v in flat(cfg).items() if v != base[k] and k != "seed" and not not_part_of_identity(k)}
    short = short_names(base)
    parts += [f"{short[k]}={brief(v)}" for k, v in sorted(differences.items())]
    name = "-".join([choices["attn"], *parts])
    long = len(name) > MOST_CHARACTERS or len(name.encode(errors="replace")) > MOST_BYTES
    if long or any(brief(v).lower() != str(v).lower() for v in differences.values()):
        exact = hashlib.sha256(json.dumps([parts, differences], sort_keys=True, default=str).encode()).hexdigest()
        cut = name[:MOST_CHARACTERS].encode(errors="replace")[:MOST_BYTES].decode(errors="ignore")
        name = f"{cut}-{exact[:6]}"
    return f"{name}-seed{cfg.seed}"


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Map each key to its last part, or to itself if an earlier key has the same last part.

    For example, model.heads becomes heads, and attn.heads, which comes later, stays attn.heads.
    """
    first = {}
    for key in keys:
        first.setdefault(key.rsplit(".", 1)[-1], key)
    return {key: word if first[word] == key else key for key in keys for word in [key.rsplit(".", 1)[-1]]}


def brief(value: object) -> str:
    """Return a value as at most 40 characters that the name of a folder can hold."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if "/" in text:
        # A suffix such as .txt is left out, but not .002 in a folder's name lr=0.002: a letter must follow the dot.
        text = re.sub(r"(?<=.)\.[A-Za-z]\w*\W*$", "", Path(text).name)
    return re.sub(r"[^\w.+-]+", "_", text)[:40]


def not_part_of_identity(key: str) -> bool:
    """Return whether a key, or a part of the config that contains it, is in NOT_PART_OF_IDENTITY."""
    return any(key == each or key.startswith(each + ".") for each in NOT_PART_OF_IDENTITY)
