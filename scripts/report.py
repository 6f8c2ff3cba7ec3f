"""python -m scripts.report: write tables, pages, plots and the included parts of READMEs from the committed records.

results=out writes the pages of your own records instead, except table.md, which scripts.compare writes. Pages, and
parts of pages, whose records are missing are left out, and in most cases a printed line says so. CLAIMS.md lists all
claims in any case.
"""

from pathlib import Path

import configs.startup

from omegaconf import DictConfig

from configs.cli import compose, main
from data.files import UserError, write_bytes
from scripts.reporting import (
    benchmark_pages,
    claim_pages,
    decode,
    headline,
    leaderboard_page,
    memory,
    precision,
    rates,
    readme,
    recall_page,
    rule_page,
    samples,
    search,
    starts,
    table,
)
from scripts.reporting.records import MissingRecord, write_page
from training.provenance import ROOT

# The READMEs come last, since they include other pages.
PAGES = {
    "rule": lambda _, results: write_bytes(results / "rule.md", rule_page.page().encode()),
    "headline": lambda cfg, results: headline.write(cfg.headline, results),
    "claims": lambda _, results: claim_pages.write(results),  # after the headline, whose plots they show
    "search": lambda _, results: search.write(compose([f"results={results}"], "search")),
    "table": lambda _, out: table.write(compose(["runs=null", f"committed={out}", f"out={out}"], "compare")),
    "rates": lambda _, results: rates.write(results),
    "leaderboard": lambda _, results: leaderboard_page.write_all(results),
    "recall": lambda _, results: recall_page.write(compose(["study=recall", f"results={results}"], "reproduce")),
    "starts": lambda _, results: starts.write_all(results),
    "precision": lambda _, results: write_page(results, "precision", precision.page),
    "samples": lambda _, results: write_page(results, "samples", samples.page),
    "benchmark": lambda _, results: benchmark_pages.write(results),
    "decode": lambda _, results: write_page(results, "decode", decode.page),
    "memory": lambda _, results: write_page(results, "large", memory.page),
    "readme": lambda _, results: readme.write(results.parent),
}
OF_THE_REPOSITORY = ("rule", "table", "readme")  # about this repository; written only with results=results


def chosen(cfg: DictConfig) -> list[str]:
    """Return the names of the pages to write, in the order of PAGES. Raises UserError if one cannot be written."""
    committed = Path(cfg.results).resolve() == ROOT / "results"
    for name in cfg.pages or ():
        if name not in PAGES:
            raise UserError(f"there is no page {name}; there are {', '.join(PAGES)}")
        if name == "table" and not committed:
            raise UserError("python -m scripts.compare writes the table of your own runs")
        if name in OF_THE_REPOSITORY and not committed:
            raise UserError(f"the page {name} belongs to the repository: it is written only with results=results")
    return [name for name in PAGES if name in (cfg.pages or PAGES) and (committed or name not in OF_THE_REPOSITORY)]


@main("report")
def run(cfg: DictConfig) -> None:
    results = Path(cfg.results)
    for name in chosen(cfg):
        try:
            PAGES[name](cfg, results)
            print(f"{name}: written", flush=True)
        except MissingRecord as error:
            print(f"{name}: not all written, {error}", flush=True)


if __name__ == "__main__":
    run()
