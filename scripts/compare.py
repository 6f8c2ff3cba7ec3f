"""python -m scripts.compare rows=[mha_plus,aft]: compare your runs with the committed ones and the source's figures.

The command writes table.md, table.csv, table.tex and, unless runs=null, the curves of your runs.
"""

from pathlib import Path

import configs.startup

from omegaconf import DictConfig

from configs.cli import main
from scripts.reporting import curves, table
from scripts.reporting.plots import save


@main("compare")
def run(cfg: DictConfig) -> None:
    print(table.write(cfg))
    written = "table.md, table.csv, table.tex"
    if cfg.runs is not None:
        save(curves.draw(cfg), Path(cfg.out), "curves", dpi=150)
        written += ", curves.png, curves.svg"
    print(f"written to {cfg.out}: {written}")


if __name__ == "__main__":
    run()
