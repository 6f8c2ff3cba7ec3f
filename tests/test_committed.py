"""Pages, plots, starts and learning rates that are committed come from the records that are committed."""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from omegaconf import OmegaConf

from configs.cli import compose
from configs.folder import CONFIGS
from scripts import report
from scripts.reporting import figures
from scripts.reporting import headline as headline_page
from scripts.reporting import starts as starts_page
from scripts.reporting.claims import all_claims, tiers
from scripts.reporting.rates import chosen_rate
from scripts.studies import rates, starts
from training.packed import PackedRecord, find
from training.runs import run_folders
from training.summaries import read_summary

pytestmark = pytest.mark.slow


def texts(folder: Path) -> dict[Path, str]:
    """Return the contents of the pages and tables of a folder."""
    return {p: p.read_text(encoding="utf-8") for p in folder.rglob("*") if p.suffix in (".md", ".csv", ".tex")}


def pictures(folder: Path) -> dict[Path, np.ndarray]:
    return {path: plt.imread(path)[..., :3] for path in folder.rglob("*.png")}


@pytest.mark.parametrize("name", report.PAGES)
def test_a_report_writes_the_committed_pages_and_plots(committed, name):
    pages, plots = texts(committed), pictures(committed)
    cfg = compose([f"results={committed}/results"], "report")
    report.PAGES[name](cfg, committed / "results")
    now = texts(committed)
    assert now.keys() == pages.keys()
    for path, text in pages.items():
        assert now[path] == text, path.relative_to(committed)
    now = pictures(committed)
    assert now.keys() == plots.keys()
    for path, plot in plots.items():
        assert now[path].shape == plot.shape, path.relative_to(committed)
        moved = (np.abs(now[path] - plot) > 0.3).any(-1).sum()
        # Machines round differently, so that a few pixels may differ. A dot that moves changes 20 pixels or more.
        assert moved < 20, path.relative_to(committed)


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


def test_the_rates_of_the_headline_are_the_best_of_those_tried_with_other_seeds(committed):
    runs = committed / "results/runs"
    for cfg in (entry for entry in compose([], "report").headline if entry.tried):
        assert not set(cfg.seeds) & set(cfg.tried.seeds)
        for row in cfg.rows:
            tried = headline_page.trained(OmegaConf.merge(cfg, cfg.tried), row, runs)
            assert [*headline_page.trained(cfg, row, runs)] == [headline_page.best(tried)], (cfg.name, row)


def test_the_rates_of_the_source_tier_are_the_best_of_those_tried_from_plain_starts(committed):
    (plain,) = (entry for entry in compose([], "report").headline if entry.name == "novel_plain_start")
    for path in CONFIGS.glob("rates/source/adabelief/*.yaml"):
        tried = {
            figures.mean_loss(group.summaries): rate
            for row in plain.rows
            if row.split()[0] == path.stem
            for rate, group in headline_page.trained(plain, row, committed / "results/runs").items()
        }
        assert chosen_rate("source", path.stem) == tried[min(tried)]


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
        assert rates.chosen(cfg, path.stem) == path.read_text()


def test_starts_come_from_the_committed_records(committed):
    cfg = compose(["study=starts", f"results={committed}/results"], "reproduce")
    found = {variant: starts.chosen(cfg, group) for variant, group in starts_page.starts(cfg).items()}
    files = {path.stem: path.read_text(encoding="utf-8") for path in CONFIGS.glob(f"starts/{cfg.setup}/*.yaml")}
    for variant in files.keys() - found.keys():  # these were not compared at this setup, and have the starts of small
        small = (CONFIGS / f"starts/small/{variant}.yaml").read_text(encoding="utf-8")
        same = [line for line in small.splitlines() if not line.startswith("#")]
        content = files.pop(variant)
        assert [line for line in content.splitlines() if not line.startswith("#")] == same
        assert "As in configs/starts/small" in content
    assert files == {variant: content for variant, content in found.items() if content is not None}


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
    # The limit holds for the files as they are. A clone downloads them compressed, in about a quarter of their size.
    assert sum(p.stat().st_size for p in (committed / "results/runs").rglob("*") if p.is_file()) < 35e6


@pytest.mark.parametrize("name", ["decode", "large", "samples", "precision"])
def test_a_committed_record_of_measurements_names_its_code(committed, name):
    record = json.loads((committed / f"results/{name}.json").read_text(encoding="utf-8"))
    assert record["provenance"]["commit"]
    assert not record["provenance"]["dirty"]
