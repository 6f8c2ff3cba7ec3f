"""python -m scripts.reproduce: train and measure what a study lacks, and write its results.

Studies: claims (the sources' claims, with verdicts), rates (the best learning rate of each attention), leaderboard
(every attention that has a chosen rate), recall (every attention at associative recall and at induction), starts
(the effect of each initialisation), best_starts (every attention from the best of these starts), precision (bf16
against float32), samplers (the samplers on one checkpoint). Records and pages go to out/, which git ignores, or, with
results=results, to results/, which is committed. study=rates writes the rates that it chooses to configs/rates, and no
page. study=starts also writes the starts that it chooses to configs/starts.
"""

import configs.startup

from omegaconf import DictConfig

from configs.cli import main
from scripts.studies import best_starts, claims, leaderboard, precision, rates, recall, samplers, starts

STUDIES = {
    "claims": claims.reproduce,
    "rates": rates.choose,
    "leaderboard": leaderboard.reproduce,
    "recall": recall.compare,
    "starts": starts.compare,
    "best_starts": best_starts.reproduce,
    "precision": precision.compare,
    "samplers": samplers.compare,
}


@main("reproduce")
def run(cfg: DictConfig) -> None:
    STUDIES[cfg.study](cfg)


if __name__ == "__main__":
    run()
