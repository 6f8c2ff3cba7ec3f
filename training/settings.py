"""What a run's config says beyond single keys: whether it can be run, and whether two are the same run."""

import itertools
import math

from omegaconf import DictConfig, OmegaConf

from configs.cli import check_at_least, check_seed, circumstance, flat
from data.files import UserError
from training.distributed import KINDS


def check(cfg: DictConfig, processes: int) -> None:
    """Raise UserError for settings that no run, or no run of so many processes, can have."""
    check_at_least(
        cfg,
        {
            "train.steps": 0,
            "train.batch": 1,
            "train.log_every": 1,
            "train.accumulate": 1,
            "seed": 0,
            "optim.warm_up": 0,
            "evaluation.every": 1,
            "evaluation.windows": 1,
            "evaluation.final_windows": 1,
            "evaluation.stride": 1,
            "evaluation.sample": 0,
        },
    )
    if cfg.train.stop is not None and not 1 <= cfg.train.stop <= cfg.train.steps:
        raise UserError(f"train.stop must be 1 to train.steps={cfg.train.steps}, or null: got {cfg.train.stop}")
    if cfg.train.batch % (processes * cfg.train.accumulate):
        several = f"{processes} processes x " if processes > 1 else ""
        raise UserError(
            f"train.batch must be divisible by {several}train.accumulate={cfg.train.accumulate}: got {cfg.train.batch}"
        )
    if cfg.train.parallel not in KINDS:
        raise UserError(f"train.parallel must be {' or '.join(KINDS)}: got {cfg.train.parallel}")
    if processes > 1 and cfg.train.parallel == "fsdp" and cfg.model.norm == "rezero":
        raise UserError("train.parallel=fsdp cannot shard the single numbers of model.norm=rezero: take ddp")
    if cfg.evaluation.stride > cfg.model.context:
        raise UserError(
            f"evaluation.stride must be at most model.context={cfg.model.context}: got {cfg.evaluation.stride}"
        )
    check_seed(cfg.seed)
    for key in ("optim.lr", "optim.eps"):
        if not 0 < OmegaConf.select(cfg, key) < math.inf:
            raise UserError(f"{key} must be above 0: got {OmegaConf.select(cfg, key)}")
    if cfg.optim.clip is not None and not 0 < cfg.optim.clip < math.inf:
        raise UserError(f"optim.clip must be above 0: got {cfg.optim.clip}")
    for key in ("optim.min_lr", "optim.weight_decay", "train.checkpoint_seconds"):
        if not 0 <= OmegaConf.select(cfg, key) < math.inf:
            raise UserError(f"{key} must be 0 or more: got {OmegaConf.select(cfg, key)}")
    if len(cfg.optim.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.optim.betas):
        raise UserError(f"optim.betas must be two numbers from 0 to below 1: got {list(cfg.optim.betas)}")
    if cfg.optim.impl not in ("fused", "package", "adamw"):
        raise UserError(f"optim.impl must be fused, package or adamw: got {cfg.optim.impl}")
    if cfg.optim.impl == "adamw" and cfg.optim.rectify:
        raise UserError("optim.rectify=true is an option of AdaBelief: optim.impl=adamw has none")
    if cfg.wandb.mode not in ("online", "offline", "disabled"):
        raise UserError(f"wandb.mode must be online, offline or disabled: got {cfg.wandb.mode}")


def last_step(cfg: DictConfig) -> int:
    """Return the step after which a run ends; the learning rate follows the schedule of all train.steps."""
    return cfg.train.steps if cfg.train.stop is None else cfg.train.stop


def differing(one: DictConfig, other: DictConfig) -> list[str]:
    """Return the keys whose values make two configs different runs."""
    a, b = flat(one, resolve=True), flat(other, resolve=True)
    return [k for k in itertools.chain(a, b) if not circumstance(k) and a.get(k) != b.get(k)]


def readable(cfg: DictConfig) -> dict:
    """Return the config as wandb shows it: flat, with the attention's name, without keys that do not change the run."""
    values = {k: v for k, v in flat(cfg, resolve=True).items() if not (circumstance(k) or k.endswith("_"))}
    return values | {"attn": cfg.job.attn}
