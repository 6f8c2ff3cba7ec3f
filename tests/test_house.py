"""Test imports between modules, lengths of functions and files, docstrings of attentions, and what is committed."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.reporting.variants import header
from tests.conftest import ROOT, VARIANTS

FILES = sorted(
    p for f in ("attn", "configs", "data", "models", "scripts", "training") for p in (ROOT / f).rglob("*.py")
)
FILES += [ROOT / "train.py", ROOT / "evaluate.py"]
OURS = {"attn", "configs", "data", "models", "training", "scripts", "train", "evaluate", "results", "tests"}
BELOW = ("training", "models", "data", "configs")
MAY_IMPORT = {
    "scripts": {"scripts", "train", "training", "models", "data", "configs"},  # commands
    "scripts.studies": {"scripts.studies", "scripts.benchmarking", "scripts.reporting", "train", *BELOW},
    "scripts.benchmarking": {"scripts.benchmarking", "scripts.reporting", *BELOW},
    "scripts.reporting": {"scripts.reporting", *BELOW},
    "train": {"training", "models", "data", "configs"},
    "evaluate": {"training", "models", "data", "configs"},
    "training": {"training", "models", "data", "configs"},
    "models": {"models", "attn.base", "attn.parts", "attn.ranges", "attn.streaming"},
    "models.sampling": {"models", "data.files"},
    "models.build": {"models", "configs", "data.files", "attn.base"},
    "configs": {"configs", "data.files", "attn.ranges"},
    "data": {"data"},
    "attn.base": {"attn.parts", "attn.unified", "attn.streaming", "attn.position_weights"},
    "attn.parts": {"attn.kernels"},
    "attn.ranges": set(),
    "attn.unified": set(),
    "attn.streaming": {"attn.position_weights", "attn.kernels"},
    "attn.kernels": {"attn.kernels"},
    "attn.position_weights": {"attn.parts", "attn.ranges", "attn.kernels"},
    "attn.contents": {"attn.parts", "attn.kernels"},
    "attn.decays": {"attn.position_weights", "attn.ranges", "attn.kernels"},
    "attn.shifts": set(),
    "attn.recurrence": {"attn.base", "attn.decays", "attn.parts", "attn.ranges", "attn.unified", "attn.kernels"},
    "attn": {
        *(f"attn.{part}" for part in ("base", "parts", "position_weights", "ranges", "unified", "streaming")),
        *(f"attn.{part}" for part in ("recurrence", "decays", "contents", "shifts", "kernels")),
    },  # attentions
}


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def within(name: str, group: str) -> bool:
    return name == group or name.startswith(group + ".")


def imports(path: Path) -> set[str]:
    """Return the modules of this repository that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {n for n in names if (ROOT / Path(*n.split("."))).with_suffix(".py").exists()} or {node.module}
    return {name for name in found if name.split(".")[0] in OURS}


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_go_one_way(path):
    group = max((g for g in MAY_IMPORT if within(module(path), g)), key=len)
    for name in imports(path):
        assert any(within(name, allowed) for allowed in MAY_IMPORT[group]), f"{module(path)} imports {name}"


def test_no_test_imports_from_another_and_no_file_changes_the_search_path():
    for path in (ROOT / "tests").rglob("*.py"):
        assert not any(name.startswith("tests.test_") for name in imports(path)), path
    for path in (*FILES, *(ROOT / "tests").rglob("*.py")):
        assert not re.search(r"^\s*sys\.path\b", path.read_text(encoding="utf-8"), re.MULTILINE), path


def test_configs_startup_comes_first_in_every_command():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if '\nif __name__ == "__main__"' in text:
            names = [n for node in ast.parse(text).body for n in imported(node)]
            own = [name for name in names if name.split(".")[0] not in sys.stdlib_module_names]
            assert own[0] == "configs.startup", path


@pytest.mark.parametrize("path", [path for path in FILES if "kernels" not in path.parts], ids=module)
def test_functions_and_classes_are_short(path):
    limits = {ast.FunctionDef: 50, ast.ClassDef: 250}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if type(node) in limits:
            assert node.end_lineno - node.lineno < limits[type(node)], node.name


@pytest.mark.parametrize(("command", "limit"), [("train.py", 150), ("evaluate.py", 100)])
def test_commands_are_short(command, limit):
    assert len((ROOT / command).read_text(encoding="utf-8").splitlines()) <= limit


def imported(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_the_docstring_of_an_attention_begins_with_its_equation():
    for path in (ROOT / "attn").glob("*.py"):
        classes = [n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)]
        for found in classes:
            if any(isinstance(base, ast.Name) and base.id in ("Attention", "Recurrent") for base in found.bases):
                assert ast.get_docstring(found).startswith("ATT[t,c] = "), found.name


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_has_a_complete_header(variant):
    missing = [name for name, text in header(variant).items() if not text]
    assert not missing, f"configs/attn/{variant}.yaml lacks the comments {missing}"
    own = header(variant)["label"]
    assert own != variant, f"configs/attn/{variant}.yaml lacks the comment label"
    same = [other for other in VARIANTS if other != variant and header(other)["label"] == own]
    assert not same, f"configs/attn/{variant}.yaml has the label of {', '.join(same)}"


def test_no_corpus_and_few_weights_are_committed():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = list(filter(None, listed.stdout.split("\0")))
    assert sum(name.startswith("results/") for name in names) < 150  # runs are packed, many in a file
    for name in names:
        whole = re.fullmatch(r"results/runs/\w+\.runs\.json", name)  # all runs of an experiment
        runs = 9_000_000 if whole else 4_000_000
        most = runs if name.endswith(".runs.json") else 1_000_000
        small_weights = re.fullmatch(r"results/weights/\w+/model\.safetensors", name)
        assert small_weights or not name.endswith((".safetensors", ".pt", ".bin", ".txt.gz", ".whl", ".wandb")), name
        assert (ROOT / name).stat().st_size < (1_600_000 if small_weights else most), name
