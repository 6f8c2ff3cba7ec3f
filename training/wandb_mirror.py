"""Mirror a run's record in wandb."""

import contextlib
import hashlib
import html
import logging
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from data.files import UserError, first_line, remove
from training import metrics
from training.record import Record

ROOM = 2**20  # a disk with fewer free bytes is reported as full
LONGEST_TAG = 64  # the maximum number of characters that wandb allows


class Mirror:
    """Send the rows of a run's record to wandb. The default, wandb.mode=offline, writes them to <wandb.dir>/wandb.

    The mirror of a run that is continued holds each step once. Earlier offline mirrors of the run in wandb.dir, which
    may hold steps after the last saved state, are deleted. Offline, all rows of the record are then written again;
    online, only the rows that wandb lacks are sent.

    Raises UserError if wandb.dir cannot be written to or wandb cannot start.
    """

    def __init__(self, cfg, flat_config: dict, record: Record):
        self.run = None
        if cfg.wandb.mode == "disabled":
            return
        # The id is the run's name and experiment, cut to 110 characters, with a hash of its folder, because runs in
        # different folders may have the same name and experiment.
        place = hashlib.sha256(os.fsencode(record.folder.resolve())).hexdigest()[:6]
        identity = f"{re.sub(r'[^A-Za-z0-9_-]', '-', f'{cfg.job.name}-{cfg.job.experiment}')[:110]}-{place}"
        begun = record.metrics.stat().st_size > 0
        self.folder = Path(cfg.wandb.dir)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()  # if this fails, wandb would write elsewhere
            for stale in (self.folder / "wandb").glob(f"offline-run-????????_??????-{identity}"):
                delete_mirror(stale)
        except OSError as error:
            raise self.cannot_write(error) from error
        logging.raiseExceptions = False  # otherwise wandb's log prints a traceback for every line on a full disk
        try:
            import wandb

            self.run = wandb.init(
                project=cfg.wandb.project,
                mode=cfg.wandb.mode,
                dir=cfg.wandb.dir,
                id=identity,
                name=cfg.job.name,
                group=cfg.job.experiment,
                tags=[tag[:LONGEST_TAG] for tag in (cfg.job.attn, cfg.data.name) if tag],
                job_type="train",
                config=flat_config,
                resume="allow" if begun and cfg.wandb.mode == "online" else None,
                settings=wandb.Settings(
                    x_transaction_log_flush_interval=1,  # otherwise a killed run leaves an empty file
                    console="off",
                    silent=True,
                ),
            )
        except Exception as error:  # wandb's own errors, and those of a missing home or temporary folder
            less = "offline needs no account" if cfg.wandb.mode == "online" else "disabled needs no folder"
            raise UserError(f"wandb.mode={cfg.wandb.mode}: {first_line(error)}; wandb.mode={less}") from error
        self.link(f"{cfg.job.name}-{cfg.job.experiment}", identity)
        for metric in ("train/*", "eval/*"):
            self.run.define_metric(metric, step_metric="tokens")
        for row in metrics.each_row(record.metrics):
            if row["step"] >= self.run.starting_step:  # online, wandb already has the earlier rows
                self.log(row)

    def cannot_write(self, error: OSError) -> UserError:
        return UserError(f"cannot write wandb.dir={self.folder}: {error.strerror}; wandb.mode=disabled needs no folder")

    def link(self, name: str, identity: str) -> None:
        """Link wandb's folder of the run as <wandb.dir>/leet/run-<name>-<folder>.

        `wandb leet` shows only the beginnings of the names of folders. The names of wandb's own folders begin with
        `run-` or `offline-run-` and a date, which do not tell which run it is. The names of the links begin with
        `run-` and the name of the run.
        """
        folder, links = Path(self.run.dir).parent, self.folder / "leet"
        short = os.fsencode(name)[:100].decode(errors="ignore")
        with contextlib.suppress(OSError):  # not every file system has links
            links.mkdir(exist_ok=True)
            for stale in links.glob(f"run-*-{identity}"):
                stale.unlink()
            (links / f"run-{short}-{folder.name}").symlink_to(os.path.relpath(folder, links), target_is_directory=True)

    def log(self, row: dict) -> None:
        if self.run is not None:
            shown = {section(k) + k: v for k, v in row.items() if k not in ("step", "sample")}
            try:
                if "sample" in row:  # wandb shows the text as an HTML file
                    import wandb

                    shown["samples/text"] = wandb.Html(f"<pre>{html.escape(row['sample'])}</pre>", inject=False)
                self.run.log(shown, step=row["step"])
            except OSError as error:
                raise self.cannot_write(error) from error

    def summarise(self, figures: dict) -> None:
        if self.run is not None:
            self.run.summary.update(figures)

    def finish(self, exit_code: int) -> None:
        if self.run is not None:
            with contextlib.suppress(OSError):  # wandb cannot close its log on a full disk
                self.run.finish(exit_code=exit_code)
            self.run = None
            with contextlib.suppress(OSError):  # the folder may have been deleted
                if shutil.disk_usage(self.folder).free < ROOM:  # wandb does not report this
                    print(f"the disk is full: the wandb mirror in {self.folder} may lack something", flush=True)


def delete_mirror(folder: Path) -> None:
    """Delete a mirror. Retry for some seconds, since the wandb service of a killed run may still be writing to it."""
    for attempt in range(20):
        try:
            return remove(folder)
        except OSError:
            if attempt == 19:
                raise
            time.sleep(0.25)


def section(key: str) -> str:
    """Return the section of wandb's dashboard that shows a metric; "" for the metrics that serve as x axes."""
    if key in ("tokens", "seconds"):
        return ""
    return "eval/" if key.startswith(("fit_", "heldout_")) else "train/"
