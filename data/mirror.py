"""The wandb mirror of a run's record."""

import re
from pathlib import Path

from data.files import UserError, remove
from data.record import Record


class Mirror:
    """Sends what the record holds to wandb; offline by default, into <dir>/wandb.

    A continued run is mirrored anew from its record: whatever the killed process had written
    past its last state is gone with its folder, so no step is missing or doubled.
    """

    def __init__(self, cfg, flat_config: dict, record: Record):
        self.run = None
        if cfg.wandb.mode == "disabled":
            return
        import wandb

        identity = re.sub(r"[^\w-]", "-", f"{cfg.job.name}-{cfg.job.experiment}")[-120:]
        rows = record.rows()
        Path(cfg.wandb.dir).mkdir(parents=True, exist_ok=True)
        for stale in Path(cfg.wandb.dir, "wandb").glob(f"offline-run-*-{identity}"):
            remove(stale)
        try:
            self.run = wandb.init(
                project=cfg.wandb.project,
                mode=cfg.wandb.mode,
                dir=cfg.wandb.dir,
                id=identity,
                name=cfg.job.name,
                group=cfg.job.experiment,
                tags=[cfg.job.attn, cfg.data.name],
                job_type="train",
                config=flat_config,
                resume="allow" if rows and cfg.wandb.mode == "online" else None,
                settings=wandb.Settings(
                    x_transaction_log_flush_interval=1,  # a killed run would leave an empty file
                    console="off",
                    silent=True,
                ),
            )
        except wandb.Error as error:
            line = str(error).strip().split("\n")[0]
            raise UserError(f"wandb.mode={cfg.wandb.mode}: {line}; wandb.mode=offline needs no account") from error
        for metric in ("train/*", "eval/*"):
            self.run.define_metric(metric, step_metric="tokens")
        for row in rows:
            self.log(row)

    def log(self, row: dict) -> None:
        if self.run is not None:
            self.run.log({section(k) + k: v for k, v in row.items() if k != "step"}, step=row["step"])

    def summarise(self, figures: dict) -> None:
        if self.run is not None:
            self.run.summary.update(figures)

    def finish(self, exit_code: int) -> None:
        if self.run is not None:
            self.run.finish(exit_code=exit_code)
            self.run = None


def section(key: str) -> str:
    """The dashboard's section of a metric; the x axes stand outside."""
    if key in ("tokens", "seconds"):
        return ""
    return "eval/" if key.startswith(("fit_", "heldout_")) else "train/"
