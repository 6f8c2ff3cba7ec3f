"""Test the READMEs: included pages, links and commands. Follow the worked example in a copy of the repository."""

import json
import math
import re
import shlex
import shutil
import statistics
import subprocess
import sys

import pytest
import torch
import yaml

from attn.base import Attention
from configs.cli import compose
from scripts.reporting.claims import all_claims, heldout_differences, summaries
from scripts.reporting.findings import COMPARISONS, findings
from scripts.reporting.readme import excerpt, readmes
from tests.conftest import ROOT, TINY

PAGES = [*readmes(ROOT), ROOT / "INSTALL.md"]
RESULTS = sorted({*(ROOT / "results").rglob("*.md")} - {*PAGES})
COMMAND = re.compile(r"(?:python|torchrun [^`\n]*?) (?:-m )?(scripts\.\w+|\w+\.py)([^`\n\"#;|)]*)")


@pytest.fixture
def copy(tmp_path):
    folder = tmp_path / "repository"
    ignored = shutil.ignore_patterns(".git", ".venv", "cache", "results", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


@pytest.mark.slow
def test_the_worked_example_passes_the_tests_and_trains(copy, text):
    readme = (ROOT / "attn/README.md").read_text(encoding="utf-8")
    for kind, path in (("python", "attn/ema.py"), ("yaml", "configs/attn/ema.yaml")):
        assert f"`{path}`" in readme
        (block,) = re.findall(rf"```{kind}\n(.*?)```", readme, re.DOTALL)
        (copy / path).write_text(block, encoding="utf-8")
    for path in (copy / "configs/attn").glob("*.yaml"):
        if path.stem not in ("aft", "ema"):  # the tests of other attentions need not be collected; aft is the default
            path.unlink()

    def run(*arguments):
        return subprocess.run([sys.executable, *arguments], cwd=copy, capture_output=True, text=True)

    files = [f"tests/test_{name}.py" for name in ("variants", "decode", "house", "cli", "precision")]
    tested = run("-m", "pytest", "-n", "0", *files, "-k", "ema or imports or begins_with_its_equation")
    assert tested.returncode == 0, tested.stdout
    assert int(re.search(r"(\d+) passed", tested.stdout)[1]) > 30
    linted = run("-m", "ruff", "check", "attn/ema.py")
    assert linted.returncode == 0, linted.stdout
    trained = run("train.py", "attn=ema", *TINY, "data=file", f"data.path={text}", "wandb.mode=disabled")
    assert trained.returncode == 0, trained.stderr
    assert "fit perplexity" in trained.stdout


def test_an_attention_and_a_trained_run_are_used_as_the_readme_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    section = re.search(r"## In a model of your own\n(.*?)\n## ", (ROOT / "attn/README.md").read_text(), re.DOTALL)[1]
    names = {"x": torch.randn(2, 9, 64)}
    exec("\n".join(re.findall(r"^    (.*)", section, re.MULTILINE)), names)
    assert names["y"].shape == (2, 9, 64)
    torch.testing.assert_close(torch.cat(names["streamed"], 1), names["y"])
    assert names["run"].write("却说曹操", 5).startswith("却说曹操")


def test_the_members_in_the_contract_exist():
    contract = re.search(r"## The contract\n(.*?)\n## ", (ROOT / "attn/README.md").read_text(), re.DOTALL)[1]
    members = re.findall(r"^\| `(\w+)` \|", contract, re.MULTILINE)
    assert {"terms", "mix"} <= set(members)
    for member in members:
        assert hasattr(Attention, member), member


def test_make_help_has_a_line_for_each_target():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^(\w+):", makefile, re.MULTILINE)
    assert "help" in targets
    assert sorted(targets) == sorted(re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split())
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"^make (\w+): .", done.stdout, re.MULTILINE)) == sorted(targets)


def test_the_first_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150


def test_findings_follow_the_pages(tmp_path):
    shutil.copytree(ROOT / "results", tmp_path / "results", ignore=shutil.ignore_patterns("runs"))

    def change(name, before, after):
        path = tmp_path / "results" / name
        content = path.read_text(encoding="utf-8")
        assert before in content
        path.write_text(content.replace(before, after), encoding="utf-8")

    def count(text, verdict):
        return int(re.search(rf"on the novel tier: [^;.]*?(\d+) {verdict}", text)[1])

    overview = (ROOT / "results/CLAIMS.md").read_text(encoding="utf-8")
    verdict, link = re.search(r"\[(reproduced|contradicted)\](\(claims/novel\.md#token_shift\))", overview).groups()
    other = "reproduced" if verdict == "contradicted" else "contradicted"
    change("CLAIMS.md", f"[{verdict}]{link}", f"[{other}]{link}")
    costs = json.loads((ROOT / "results/claims/small.costs.json").read_text())
    seconds = costs["speed"]["seconds"]
    seconds["aft"] = [second / 9.87 for second in seconds["mha_plus"]]
    (tmp_path / "results/claims/small.costs.json").write_text(json.dumps(costs))
    before, after = findings(ROOT), findings(tmp_path)
    assert count(after, verdict) == count(before, verdict) - 1
    assert count(after, other) == count(before, other) + 1
    changed = "AFT 9.87 (9.87 to 9.87) in bf16 ("
    assert changed in after
    assert changed not in before


def leads(runs: list[list[dict]], row: int, text: str) -> float:
    """Return the mean lead of a row's runs over those of the first row, on a text."""
    ours, theirs = ({run["seed"]: math.log(run["evaluation"][text]["perplexity"]) for run in runs[i]} for i in (row, 0))
    return statistics.mean(theirs[seed] - ours[seed] for seed in ours)


def test_findings_show_each_comparison_once_with_the_leads_of_its_runs(committed):
    found = findings(committed)
    table, _, others = found.rpartition("|\n")
    for (name, tier), (_, page) in COMPARISONS.items():
        (row,) = re.findall(rf"^\| \[.+\]\(results/{re.escape(page)}\) .*$", table, re.MULTILINE)
        assert f"(results/claims/{tier}.md#{name})" in row
        runs = [
            summaries(all_claims()[name], label, tier, committed / "results/runs") for label in ("MHA+", "gMLP", "AFT")
        ]
        level = statistics.mean(run["evaluation"]["heldout_best"]["perplexity"] for run in runs[0])
        assert float(row.split("|")[3].split()[0]) == pytest.approx(level, abs=0.006)
        shown = [float(cell.split("%")[0]) for cell in row.split("|")[4:8]]
        assert shown == pytest.approx(
            [100 * leads(runs, i, text) for i in (1, 2) for text in ("fit", "heldout_best")], abs=0.06
        )
        assert f"{tier}.md#{name})" not in others
    named = re.findall(r"claims/(\w+)\.md#(\w+)\)", others.partition("have the other order: ")[2])
    assert ("novel", "token_shift") in named
    assert ("novel", "time_weighting") not in named
    for tier, name in named:
        found = heldout_differences(all_claims()[name], tier, committed / "results")
        assert min(difference.value for difference in found if difference is not None) < 0


def test_a_page_is_included_up_to_its_first_section(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    lead = "![x](x.png) [y](../y.md) [z](https://z.z/z.md)"
    (tmp_path / "a/b/page.md").write_text(f"# Title\n\n{lead}\n\n## More\n\nno\n")
    assert excerpt(tmp_path / "a/b/page.md", tmp_path) == "![x](a/b/x.png) [y](a/y.md) [z](https://z.z/z.md)\n"
    assert excerpt(tmp_path / "a/b/page.md", tmp_path / "a") == "![x](b/x.png) [y](y.md) [z](https://z.z/z.md)\n"


@pytest.mark.parametrize("page", PAGES + RESULTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_targets_of_links_exist(page):
    for link in re.findall(r"\]\((?!https?:)([^)]*)\)", page.read_text(encoding="utf-8")):
        path, _, section = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if section:
            text = target.read_text(encoding="utf-8")
            heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            anchors = re.findall(r"<a id='(\w+)'>", text)
            assert section in anchors + [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads], link


@pytest.mark.parametrize("page", PAGES + RESULTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_all_rows_of_a_table_have_the_same_number_of_cells(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert len(set(cells)) == 1, table.splitlines()[0]


@pytest.mark.slow
@pytest.mark.parametrize("readme", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist_and_take_their_arguments(readme):
    """Check the commands of a README, except in included pages."""
    written = re.sub(r"<!-- include.*?<!-- end -->", "", readme.read_text(encoding="utf-8"), flags=re.DOTALL)
    for script, rest in COMMAND.findall(written):
        path = ROOT / f"{script.removesuffix('.py').replace('.', '/')}.py"
        known = re.search(r"@main\(\"(\w+)\"", path.read_text(encoding="utf-8"))
        words = shlex.split(rest.replace("NAME", "aft"))  # NAME stands for the name of a new attention
        arguments = [word for word in words if not word.startswith(("hydra", "-"))]
        if known and arguments:
            sweep = " -m " in rest
            compose([re.sub(r",(?![^\[]*\]).*", "", word) if sweep else word for word in arguments], known[1])


def test_the_citation_is_complete():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert all(citation[key] for key in ("message", "title", "authors"))
    assert citation["license"] == "MIT"
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").startswith("MIT License\n")
    assert len(citation["references"]) == 5
    for reference in citation["references"]:
        assert reference.keys() >= {"type", "title", "authors"}
        assert all("name" in author or "family-names" in author for author in reference["authors"])
