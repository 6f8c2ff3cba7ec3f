"""The README's worked example, done as it says, in a copy of the repository."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT, TINY


@pytest.fixture
def copy(tmp_path):
    folder = tmp_path / "repository"
    ignored = shutil.ignore_patterns(".git", ".venv", "cache", "results", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


def test_an_attention_of_one_s_own(copy, text):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for kind, path in (("python", "attn/ema.py"), ("yaml", "configs/attn/ema.yaml")):
        assert f"`{path}`" in readme
        (block,) = re.findall(rf"```{kind}\n(.*?)```", readme, re.DOTALL)
        (copy / path).write_text(block, encoding="utf-8")

    def run(*arguments):
        return subprocess.run([sys.executable, *arguments], cwd=copy, capture_output=True, text=True)

    files = ["tests/test_variants.py", "tests/test_decode.py", "tests/test_house.py"]
    tested = run("-m", "pytest", "-n", "0", *files, "-k", "ema or imports or equation")
    assert tested.returncode == 0, tested.stdout
    assert int(re.search(r"(\d+) passed", tested.stdout)[1]) > 30
    linted = run("-m", "ruff", "check", "attn/ema.py")
    assert linted.returncode == 0, linted.stdout
    trained = run("train.py", "attn=ema", *TINY, "data=file", f"data.path={text}", "wandb.mode=disabled")
    assert trained.returncode == 0, trained.stderr
    assert "fit perplexity" in trained.stdout


def test_make_help_has_a_line_for_each_target():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^(\w+):", makefile, re.MULTILINE)
    assert "help" in targets
    assert sorted(targets) == sorted(re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split())
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert sorted(re.findall(r"^make (\w+): .", said.stdout, re.MULTILINE)) == sorted(targets)


def test_the_commands_of_the_readme_are_commands():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for script in set(re.findall(r"python ((?:scripts/)?\w+\.py)", readme)):
        assert (ROOT / script).exists(), script
    for path in set(re.findall(r"\]\((results/[^)]+)\)", readme)):
        assert (ROOT / path).exists(), path
