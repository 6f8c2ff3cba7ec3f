"""Committed pages, plots, learning rates, and starts of the novel tier come from the committed records."""

import io
import json
import re
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from omegaconf import OmegaConf

from configs.cli import compose
from configs.folder import CONFIGS
from data.reading import read_json
from scripts import report
from scripts.reporting import figures
from scripts.reporting import headline as headline_page
from scripts.reporting import starts as starts_page
from scripts.reporting.claims import all_claims, tiers
from scripts.reporting.rates import chosen_rate, losses
from scripts.reporting.records import finished, record_of, words_of
from scripts.studies import rates, starts
from training.packed import PackedRecord, find
from training.runs import run_folders
from training.summaries import read_summary

pytestmark = pytest.mark.slow


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the contents of the pages and plots of a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.suffix in (".md", ".png")}


def moved(one: bytes, other: bytes) -> int:
    """Return how many pixels two PNG files have in different colours, or a large number if the sizes differ."""
    one, other = (plt.imread(io.BytesIO(png))[..., :3] for png in (one, other))
    return (np.abs(one - other) > 0.3).any(-1).sum() if one.shape == other.shape else one.size


@pytest.mark.parametrize("name", report.PAGES)
def test_a_report_writes_the_committed_pages_and_plots(committed, name):
    before = contents(committed)
    report.PAGES[name](compose([f"results={committed}/results"], "report"), committed / "results")
    after = contents(committed)
    assert after.keys() == before.keys()
    for path in [path for path, content in before.items() if after[path] != content]:
        if path.suffix == ".md":
            assert after[path].decode() == before[path].decode(), path.relative_to(committed)
        else:
            # Machines round differently, so that a few pixels may differ. A dot that moves changes 20 pixels or more.
            assert moved(after[path], before[path]) < 20, path.relative_to(committed)


def test_every_committed_section_plot_and_timing_belongs_to_a_claim(committed):
    folder = committed / "results/claims"
    pages, files = set(folder.glob("*.md")), list(folder.glob("*/*"))
    assert pages
    assert files
    for path in pages:
        for name in re.findall(r"^## <a id='(\w+)'>", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert path.stem in tiers(all_claims()[name]), name
    for path in files:
        assert path.parent.name in tiers(all_claims()[path.stem]), path
    for path in folder.glob("*.costs.json"):
        for name in read_json(path):
            assert path.name.removesuffix(".costs.json") in tiers(all_claims()[name]), (path, name)


def test_every_final_of_the_search_has_its_section(committed):
    page = (committed / "results/search.md").read_text(encoding="utf-8")
    for final in compose([], "search").finals:
        assert f"experiment={final.setup}, {figures.seeds_in_words(list(final.seeds))}\n" in page


def test_the_rates_of_the_headline_are_the_best_of_those_tried_with_other_seeds(committed):
    runs = committed / "results/runs"
    for cfg in (entry for entry in compose([], "report").headline if entry.tried):
        assert not set(cfg.seeds) & set(cfg.tried.seeds)
        for row in cfg.rows:
            tried = headline_page.trained(OmegaConf.merge(cfg, cfg.tried), row, runs)
            assert [*headline_page.trained(cfg, row, runs)] == [headline_page.best(tried)], (cfg.name, row)


def test_the_rates_of_the_source_tier_are_those_of_the_novel_tier():
    for path in CONFIGS.glob("rates/source/adabelief/*.yaml"):
        assert chosen_rate("source", path.stem) == chosen_rate("novel", path.stem)


def test_other_rates_come_from_the_committed_records(committed):
    for path in CONFIGS.glob("rates/*/*/*.yaml"):
        found = re.search(r"the mean of seeds ([\d, ]+), for each", path.read_text().replace("\n# ", " "))
        if found is None:
            assert path.parts[-3] == "source"  # the test above checks these
            continue
        seeds = found[1]
        given = [
            f"variants=[{path.stem}]",
            f"setup={path.parts[-3]}",
            f"optimizer={path.parts[-2]}",
            f"seeds=[{seeds}]",
        ]
        cfg = compose([*given, f"results={committed}/results", "study=rates"], "reproduce")
        assert rates.chosen(cfg, path.stem, rates.losses(cfg, path.stem)) == path.read_text()


def test_the_starts_of_the_novel_tier_come_from_the_committed_records(committed):
    cfg = compose(["study=starts", f"results={committed}/results"], "reproduce")
    groups = starts_page.starts(cfg)
    found = {variant: starts.chosen(cfg, group) for variant, group in groups.items()}
    files = {path.stem: path.read_text(encoding="utf-8") for path in CONFIGS.glob(f"starts/{cfg.setup}/*.yaml")}
    files.pop("talking_heads")  # the next test checks it
    for variant in [name for name, content in files.items() if "As in configs/starts/small" in content]:
        found.pop(variant, None)
        assert len(groups.get(variant, [])) < len(cfg.starts[variant])  # not all of its starts were tried here
        small = (CONFIGS / f"starts/small/{variant}.yaml").read_text(encoding="utf-8")
        same = [line for line in small.splitlines() if not line.startswith("#")]
        content = files.pop(variant)
        assert [line for line in content.splitlines() if not line.startswith("#")] == same
    assert files == {variant: content for variant, content in found.items() if content is not None}


def test_the_start_of_talking_heads_comes_from_the_committed_records(committed):
    given = ["study=rates", "variants=[talking_heads]", "setup=novel", f"results={committed}/results"]
    uniform = losses(compose(given, "reproduce"), "talking_heads")  # from the chosen start
    identity = {
        rate: statistics.mean(
            finished(record_of(committed / "results/runs", words_of(words, "novel"), seed))["evaluation"]["fit"]["loss"]
            for seed in (100, 101)
        )
        for rate in (2.5e-4, 5e-4, 1e-3, 2e-3)
        for words in [f"talking_heads attn.initial_head_mix=identity optim.lr={rate:g}"]
    }
    best, other = (min(tried, key=tried.get) for tried in (uniform, identity))
    assert uniform[best] < identity[other]
    text = (CONFIGS / "starts/novel/talking_heads.yaml").read_text(encoding="utf-8")
    assert f"identity {identity[other]:.4f} at {other:g}; from random values {uniform[best]:.4f} at {best:g}." in text


def test_committed_records_are_complete_and_small(committed):
    folders = run_folders(committed / "results/runs")
    assert all(isinstance(find(folder), PackedRecord) for folder in folders)
    for folder in folders:
        record = find(folder)
        summary = read_summary(record)
        assert summary["status"] in ("finished", "diverged"), folder
        assert summary["commit"], folder
        assert not summary["dirty"], folder
        assert record.read_config()["job"]["name"] == summary["name"] == folder.name
        assert record.rows()
    # The limit is on the mean size of a run, in the files as they are. A clone downloads them compressed, in about a
    # quarter of their size.
    size = sum(p.stat().st_size for p in (committed / "results/runs").rglob("*") if p.is_file())
    assert size < 14_000 * len(folders)


@pytest.mark.parametrize("name", ["decode", "large", "samples", "precision"])
def test_a_committed_record_of_measurements_names_its_code(committed, name):
    record = json.loads((committed / f"results/{name}.json").read_text(encoding="utf-8"))
    assert record["provenance"]["commit"]
    assert not record["provenance"]["dirty"]
