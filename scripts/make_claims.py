"""python scripts/make_claims.py: what became of each of the sources' claims, from the records alone."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from omegaconf import DictConfig

from configs.cli import main
from data.files import UserError
from scripts.claims import TIERS, all_claims, outcomes, samples, verdict


def write(results: Path) -> None:
    """Write what the records give."""
    for tier in TIERS:
        for name, claim in all_claims().items():
            try:
                found = outcomes(claim, samples(claim, tier, results))
            except UserError:
                continue
            print(f"{tier} {claim.number:2} {name}: {verdict(found)}")


@main("claims")
def run(cfg: DictConfig) -> None:
    write(Path(cfg.results))


if __name__ == "__main__":
    run()
