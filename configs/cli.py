"""Turn a command line into a config and run a command with it, or report a mistake in one line."""

import errno
import functools
import multiprocessing
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from configs.startup import ROOT, is_command

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from configs.arguments import command_line, quoted
from configs.checking import check_attention, check_values
from configs.folder import CONFIGS, composed, flat, with_choices
from configs.help import help_text
from configs.messages import MISTAKES, explain, unknown_key
from configs.naming import CHOSEN_BY_STUDIES, NOTHING_CHOSEN, run_name
from configs.process import end_with_parent, give_up, print_without_fail, process_count, tell_torchrun
from data.files import UserError, out_of_memory

# Keys whose values are folders or, for `out` of scripts.dashboard, a file.
FOLDERS = ("runs", "data.cache", "wandb.dir", "out", "results")
NO_PATH = (errno.ENAMETOOLONG, errno.EACCES)  # their cause is most likely a path that the user gave


def main(config_name: str, after_sweep: Callable[[list[Path]], None] | None = None) -> Callable:
    """Return a decorator that makes task(cfg) a command.

    The command takes `key=value` arguments, --help, and Hydra's options -m (a sweep) and --cfg job. Bad input ends it
    with one line on stderr and exit status 2. In a sweep every job runs, even after others have failed, with any
    launcher. If several jobs return a Result, `after_sweep` is then called with the folders of their runs. At the end
    the failed jobs are listed, and if there are any, the exit status is 1. The value that a task returns is passed to
    Hydra's sweeper. If torchrun started several processes, only the first one prints the line on bad input, and a
    failed job ends the sweep, because all processes must run the same jobs.
    """

    def decorate(task: Callable[[DictConfig], object]) -> Callable[[], None]:
        @functools.wraps(task)
        def job(cfg: DictConfig) -> object:
            return run_job(task, cfg, config_name)

        return functools.partial(run_command, job, config_name, after_sweep)

    return decorate


def run_command(job: Callable, config_name: str, after_sweep: Callable[[list[Path]], None] | None) -> None:
    """Run the job, or the jobs of a sweep, that sys.argv describes."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises its errors and does not print them
    print_without_fail()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by configs.startup for the time of the imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            # sys.exit raises an exception, so that files are closed and locks are released.
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        sys.argv[1:] = [quoted(argument, config_name) for argument in sys.argv[1:]]
        if {"--help", "-h"} & set(sys.argv):
            given = (each for each in sys.argv[1:] if not each.startswith("-"))
            first = [re.sub(r"^([\w/.]+=[^,\[{]+)(,[^,]+)+$", r"\1", each) for each in given]  # of a sweep's values
            return print(help_text(config_name, first))
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(job)()
        if after_sweep and len(Result.folders) > 1:
            after_sweep(Result.folders)
    except (*MISTAKES, ValueError) as error:  # Hydra raises bare ValueErrors too
        give_up(explain(error, config_name), status=2)
    except KeyboardInterrupt:
        give_up("interrupted", status=130)
    except Exception as error:  # raised by a launcher that could not start a job, or lost it
        give_up("\n  ".join([explain(error, config_name), *Failure.known]), status=1)
    if Failure.known:
        give_up("\n  ".join([f"{len(Failure.known)} of the sweep's jobs failed:", *Failure.known]), status=1)


def run_job(task: Callable[[DictConfig], object], cfg: DictConfig, config_name: str) -> object:
    """Return task(cfg). If it fails, end the process, or in a sweep without torchrun return a Failure."""
    settings = HydraConfig.get()
    overrides = settings.overrides.task
    print_without_fail()  # again, because a launcher may run the job in another process
    of_a_launcher = multiprocessing.parent_process() is not None  # true in joblib's workers
    if of_a_launcher or process_count() > 1:
        end_with_parent()
    try:
        cfg = complete(cfg, settings.runtime.choices, config_name, overrides)
        say_where(cfg, overrides)
        return task(cfg)
    except Exception as error:
        if out_of_memory(error) and not isinstance(error, MISTAKES):
            error = UserError(f"there is not enough memory: {explain(error, config_name)}")
        if isinstance(error, OSError) and error.filename and error.errno in NO_PATH:
            error = UserError(f"cannot use {error.filename}: {error.strerror}")
        if not isinstance(error, MISTAKES):
            traceback.print_exc()
        line = explain(error, config_name)
        if settings.mode == RunMode.MULTIRUN and process_count() == 1:
            line = f"{' '.join(overrides)}: {line}"
            print(f"failed: {line}", file=sys.stderr, flush=True)
            return Failure(line)
        if isinstance(error, MISTAKES):
            give_up(line, status=2)
        tell_torchrun(line)
        sys.exit(1)


def say_where(cfg: DictConfig, overrides: list[str]) -> None:
    """If a command was not started in ROOT, print which of FOLDERS do not exist, except those that arguments set."""
    values = flat(cfg)
    keys = [key for key in FOLDERS if key in values and not any(each.startswith(f"{key}=") for each in overrides)]
    missing = [f"{key}={values[key]}" for key in keys if values[key] is not None and not Path(values[key]).exists()]
    first = os.environ.get("RANK", "0") == "0"
    if missing and first and is_command() and (here := Path.cwd()) != ROOT:
        print(
            f"this command was started in {here}, not in {ROOT}; here, these paths do not exist: {', '.join(missing)}",
            flush=True,
        )


class Failure(Exception):
    """What a failed job of a sweep returns.

    Each instance adds its line to `known`, also when it is unpickled from a launcher's worker.
    """

    known: ClassVar[list[str]] = []

    def __init__(self, line: str):  # also called by unpickling
        super().__init__(line)
        self.known.append(line)


class Result(float):
    """What a successful job returns: a number for Hydra's sweeper, and the folder of the job's run.

    Each instance adds its folder to `folders`, also when it is unpickled from a launcher's worker.
    """

    folders: ClassVar[list[Path]] = []

    def __new__(cls, value: float, folder: Path):  # also called by unpickling
        self = super().__new__(cls, value)
        self.folder = folder
        cls.folders.append(folder)
        return self

    def __getnewargs__(self) -> tuple[float, Path]:
        return float(self), self.folder


def compose(overrides: list[str], config_name: str = "config") -> DictConfig:
    """Return the config of a command line with these overrides, for scripts and tests."""
    overrides = [quoted(override, config_name) for override in overrides]
    return complete(*composed(config_name, overrides), config_name, overrides)


def complete(cfg: DictConfig, choices: dict[str, str], config_name: str, overrides: list[str]) -> DictConfig:
    """Check keys and values, convert values that need it, and return the config, with `job` added if it is for a run.

    `job` holds the experiment, the attention, the run's name and its command. The name contains the seed and every
    difference from the config of `experiment=... attn=...` alone, except in the keys of `naming.NOT_PART_OF_IDENTITY`.
    Values that come from configs/starts and configs/rates count as differences, so that the name stays true if a study
    later chooses other values.
    """
    for group, choice in choices.items():
        if "/" not in group and group not in CHOSEN_BY_STUDIES and "/" in str(choice):  # a file of a subfolder
            raise UserError(f"there is no {group}={choice}: --help lists what there is")
    for group in set(CHOSEN_BY_STUDIES) & {o.partition("=")[0].lstrip("+") for o in overrides} & choices.keys():
        if not (CONFIGS / group / f"{choices[group]}.yaml").exists():  # Hydra ignores this in optional groups
            raise UserError(f"there is no {group}={choices[group]}: give a file in configs/{group}, or {group}=none")
    groups = [o for o in overrides if o.split("=")[0].lstrip("+~") in choices.keys() - set(CHOSEN_BY_STUDIES)]
    if "experiment" in choices:
        groups += NOTHING_CHOSEN
    usual = checked_defaults(config_name, tuple(groups))
    check_keys(cfg, usual)
    check_values(cfg, usual, config_name)
    if "experiment" in choices:
        start = "python" if process_count() == 1 else f"torchrun --nproc-per-node={process_count()}"
        with open_dict(cfg):
            cfg.job = {
                "experiment": choices["experiment"],
                "attn": choices["attn"],
                "name": run_name(cfg, usual, config_name, choices),
                "command": command_line(f"{start} train.py", overrides),
            }
    return cfg


@functools.cache
def checked_defaults(config_name: str, groups: tuple[str, ...]) -> DictConfig:
    """Return the config for these choices of files. It is cached; do not modify it.

    Raises UserError if the attention's config file has a value that its key does not allow.
    """
    usual, _ = with_choices(config_name, groups)
    check_attention(usual, config_name)
    return usual


def check_keys(cfg: DictConfig, usual: DictConfig) -> None:
    """Raise UserError for a key that has no value, that does not exist, or that was deleted."""
    given, known = flat(cfg), flat(usual)
    for key, value in given.items():
        if value == "???":
            raise UserError(f"{key} is missing: give {key}=...")
    for key in given:
        if key not in known:
            inside = [k for k in known if k.startswith(key + ".") and not k.endswith("_")]
            raise UserError(f"{key} holds several keys: give {inside[0]}=..." if inside else unknown_key(key, known))
    for key in known:
        if key not in given:
            raise UserError(f"{key} is needed and cannot be deleted")
