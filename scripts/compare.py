"""python -m scripts.compare rows=[mha_plus,aft]: compare finished runs with the committed ones and the source.

The command writes table.md, table.csv, table.tex, and the curves of the runs that were trained here.
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
