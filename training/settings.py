"""Check that the values of a config's keys are compatible, and compare the configs of two runs."""

from omegaconf import DictConfig

from configs.folder import flat
from configs.naming import not_part_of_identity
from data.files import UserError

NO_HELDOUT = "train.patience needs held-out text to evaluate: give a larger data.holdout"


def check(cfg: DictConfig, processes: int) -> None:
    """Raise UserError if values of the config are not compatible with one another or with the number of processes."""
    if cfg.train.stop is not None and not 1 <= cfg.train.stop <= cfg.train.steps:
        raise UserError(f"train.stop must be 1 to train.steps={cfg.train.steps}, or null: got {cfg.train.stop}")
    if cfg.train.batch % (processes * cfg.train.accumulate):
        several = f"{processes} processes x " if processes > 1 else ""
        raise UserError(
            f"train.batch must be divisible by {several}train.accumulate={cfg.train.accumulate}: got {cfg.train.batch}"
        )
    if processes > 1 and cfg.train.parallel == "fsdp" and cfg.model.norm == "rezero":
        raise UserError("train.parallel=fsdp cannot shard the scalar parameters of model.norm=rezero: take ddp")
    if cfg.evaluation.stride > cfg.model.context:
        raise UserError(
            f"evaluation.stride must be at most model.context={cfg.model.context}: got {cfg.evaluation.stride}"
        )
    if cfg.train.patience is not None and not cfg.data.holdout:
        raise UserError(NO_HELDOUT)
    if cfg.optim.impl in ("adamw", "muon") and cfg.optim.rectify:
        raise UserError(f"optim.rectify=true needs AdaBelief: optim.impl={cfg.optim.impl} does not have it")


def last_step(cfg: DictConfig) -> int:
    """Return the most steps that a run can take. The learning rate depends on train.steps, and not on train.stop."""
    return cfg.train.steps if cfg.train.stop is None else cfg.train.stop


def differing(one: DictConfig, other: DictConfig) -> list[str]:
    """Return the keys whose values make two configs different runs."""
    a, b = flat(one, resolve=True), flat(other, resolve=True)
    return [k for k in a | b if not not_part_of_identity(k) and a.get(k) != b.get(k)]


def readable(cfg: DictConfig) -> dict:
    """Return the config for wandb, flat: the attention's name, and the keys of a run's identity.

    The keys _target_ and _partial_ are left out.
    """
    values = {k: v for k, v in flat(cfg, resolve=True).items() if not (not_part_of_identity(k) or k.endswith("_"))}
    return values | {"attn": cfg.job.attn}
