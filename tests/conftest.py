"""What the tests share: the variants found in configs/attn, tiny configs, a text that is made up."""

import functools
import gc
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from configs.folder import composed
from data.files import write_json
from training.packed import find

pytest.register_assert_rewrite("tests.helpers")

ROOT = Path(__file__).parents[1]
VARIANTS = sorted(path.stem for path in (ROOT / "configs/attn").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs/experiment").glob("*.yaml"))

# The tests run in parallel, one process per core. Each test, and each command that it starts, may therefore
# use only one thread.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
if not torch.cuda.is_available():  # Triton's kernels then run on the CPU
    os.environ["TRITON_INTERPRET"] = "1"

# A regular expression. A test that needs a package registry is skipped if an error message matches it.
NO_REGISTRY = "no package registry answers|registry answers with an error"

# Overrides that make the model and the run small, without the initialisations (starts) that were chosen for other
# sizes. Other keys keep their values in configs/.
TINY = [
    "starts=none",
    "model.dim=24",
    "model.heads=3",
    "model.context=16",
    "train.device=cpu",
    "train.precision=float32",
    "train.batch=2",
    "train.accumulate=1",
    "train.steps=4",
    "train.log_every=1",
    "evaluation.every=2",
    "evaluation.windows=2",
    "evaluation.final_windows=4",
    "evaluation.stride=8",
    "evaluation.sample=3",
]


@functools.cache
def small_config(variant: str, *overrides: str):
    small = ["starts=none", "model.dim=24", "model.heads=3", "model.context=131"]
    return composed("config", [f"attn={variant}", *small, *overrides])[0]  # without the checks of `compose`, for speed


def attn_config(variant: str, *overrides: str):
    return small_config(variant, *overrides).attn


def tensors() -> int:
    """Return the number of tensors that exist and were made after the tests were collected."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def mixer(variant: str, *overrides: str, dtype=torch.float64):
    """Return a mixer of 24 channels and 3 heads with random parameters, including those of the position weight."""
    return random_mixer(attn_config(variant, *overrides), dtype)


def random_mixer(config, dtype=torch.float64):
    torch.manual_seed(1)
    return randomised(instantiate(config)()).to(dtype)


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    linear = {id(p) for m in module.modules() if isinstance(m, torch.nn.Linear) for p in m.parameters()}
    with torch.no_grad():
        for p in module.parameters():
            if id(p) in linear:
                p.normal_(std=0.2)
            else:
                p.add_(torch.randn_like(p), alpha=0.1)
    return module


@pytest.fixture(autouse=True)
def own_wandb_service(monkeypatch):
    """Let each command that a test starts begin its own wandb service.

    Otherwise it would use an earlier test's service, and that service does not notice that a run was killed.
    """
    monkeypatch.delenv("WANDB_SERVICE", raising=False)


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """Return a file of 20,000 characters, 194 of them distinct. Each is followed by one of at most four."""
    rng = np.random.default_rng(0)
    followers = rng.integers(0, 200, (200, 4))
    ids = [0]
    for choice in rng.integers(0, 4, 19_999):
        ids.append(followers[ids[-1], choice])
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(chr(0x4E00 + i) for i in ids), encoding="utf-8")
    return path


@pytest.fixture
def tiny(text, tmp_path):
    """Return overrides for a run that takes seconds and keeps its files under tmp_path."""
    return tiny_run(text, tmp_path)


def tiny_run(text: Path, folder: Path) -> list[str]:
    """Return overrides for a run that trains on `text` in seconds and keeps its files under `folder`."""
    places = [f"runs={folder}/runs", f"wandb.dir={folder}", f"data.cache={folder}/cache"]
    return [*TINY, "data=file", f"data.path={text}", "wandb.mode=disabled", *places]


def unpacked(name: str, runs: Path) -> Path:
    """Unpack a committed run, such as small/aft-lr=0.002-seed0, below `runs`, without weights. Return its folder."""
    ours, folder = find(ROOT / "results/runs" / name), runs / name
    folder.mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(ours.read_config()), folder / "config.yaml")
    (folder / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in ours.lines()))
    for part in ours.parts.keys() - {"config", "metrics"}:
        write_json(folder / f"{part}.json", ours.parts[part])
    return folder


def command(script: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    """Run a script, or -m and a module, or -c and code, without a GPU. Return its exit status and output."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_TELEMETRY": "1"} | options.pop("env", {})
    line = [sys.executable, script, *arguments]
    options = {"timeout": 300} | options
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, **options)


@pytest.fixture(scope="session")
def committed(tmp_path_factory) -> Path:
    """Return a folder with the READMEs and results/ of the last commit, without later changes."""
    archive = subprocess.run(["git", "archive", "HEAD", "*README.md", "results"], cwd=ROOT, capture_output=True)
    if archive.returncode:
        pytest.skip("not a git checkout with results")
    folder = tmp_path_factory.mktemp("committed")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def pytest_addoption(parser):
    parser.addoption(
        "--faults",
        type=int,
        default=7,
        help="number of commands that the torture interrupts; it damages twice as many files",
    )


def pytest_collection_finish():
    """Exempt what exists after collection, the objects of thousands of tests, from garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture
def theirs_in_float64(monkeypatch):
    """Let other implementations, which convert some tensors to float32, convert them to float64 instead."""
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
