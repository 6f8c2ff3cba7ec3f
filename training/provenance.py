"""Describe where a result comes from: the command, the commit, the device and the versions of packages."""

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

from configs.startup import ROOT

import torch

from data.examine import hash_of

PACKAGES = ("torch", "numpy", "adabelief-pytorch", "hydra-core", "datasets", "triton", "wandb")


def provenance(device: torch.device, command: str) -> dict:
    """Return what is needed to reproduce a result: the command, the commit, the device and the versions."""
    return {
        "command": command,
        **code(),
        "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "versions": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
    }


def read_code() -> dict:
    """Return the commit, whether there are uncommitted changes outside results/, and a hash of them.

    The hash covers the names of all changed files, and the contents of Python and YAML files.
    """
    here = ("-z", "--", ".", ":!results")
    listed = (
        git("diff", "--name-only", "--no-renames", "HEAD", *here),
        git("ls-files", "--others", "--exclude-standard", *here),
    )
    names = sorted({name for names in listed for name in (names or "").split("\0") if name})
    contents = {name: hash_of(ROOT / name) if is_code(ROOT / name) else None for name in names}
    changes = hashlib.sha256(json.dumps(contents).encode()).hexdigest() if names else None
    # If git cannot list the changes, the code may differ from the commit, which is then not named.
    commit = None if None in listed else git("rev-parse", "HEAD")
    return {"commit": commit, "dirty": bool(names), "changes": changes}


# A process keeps the code that it has imported, whatever is committed or edited while it trains several runs.
code = functools.cache(read_code)


def place_of(origin: dict) -> dict:
    """Return the device and the version of torch in what `provenance` returned."""
    return {"device": origin["device"], "torch": origin["versions"]["torch"]}


def same_code(summary: dict) -> bool:
    """Return whether a run was trained from its first to its last step by the code that is running now.

    If git names no commit now and named none for the run, True means only that no difference is known.
    """
    return "earlier_code" not in summary and all(summary.get(key) == value for key, value in code().items())


def is_code(path: Path) -> bool:
    return path.suffix in (".py", ".yaml") and path.is_file()


def git(*arguments: str) -> str | None:
    """Return git's output for this repository. If git fails or ROOT is not the root of a repository, return None."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(ROOT.resolve().parent)
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, env=environment, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return os.fsdecode(done.stdout).rstrip("\n")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("model name")).split(":", 1)[1].strip()
    except (OSError, StopIteration, IndexError):
        return platform.machine()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
