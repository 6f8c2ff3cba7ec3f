"""python -m scripts.list_runs: list the runs below `runs`, with a line for each group that differs only in its seed.

Perplexities are the mean ± standard deviation over the finished seeds of a group. The age of a group is the time since
its newest record or packed file was written; after git clone, since the clone.
"""

from pathlib import Path

import configs.startup

from omegaconf import DictConfig

from configs.cli import main
from training.packed import find
from training.runs import matching, print_runs, run_folders


@main("list_runs")
def run(cfg: DictConfig) -> None:
    print_runs(map(find, matching(run_folders(Path(cfg.runs)), cfg.match)), cfg.sort)


if __name__ == "__main__":
    run()
