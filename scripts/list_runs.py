"""python -m scripts.list_runs: list the runs below `runs`, with one line for all runs that differ only in their seed.

Perplexities are the mean ± standard deviation over the finished runs of a line. The age is the time since the last
write to the metrics.jsonl or the summary.json of a run of the line, finished or not. Packed runs have no age.
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
