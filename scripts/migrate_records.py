"""python scripts/migrate_records.py: give the keys in the committed records the names that they have now.

Commands and commits stay as they were, since they are those of an earlier version.
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from configs.startup import ROOT

from data.files import write_bytes
from data.reading import read_object
from training.packed import ENDING, file_of

ATTN = {"time": "position_weight", "carry": "residual_attention", "n": "divisor", "chunk": "chunk_size"}
MODEL = {"checkpointing": "activation_checkpointing"}
PARTS = {"time": "position_weight"}
EXTRAPOLATION = {"refuse": "error", "hold": "constant", "forget": "zero"}


def renamed(node: dict, names: dict[str, str]) -> dict:
    return {names.get(key, key): value for key, value in node.items()}


def migrated(run: dict) -> dict:
    """A run's parts with keys of now."""
    config = run["config"]
    attn = renamed(config["attn"], ATTN)
    w = attn.get("position_weight")
    if w is not None:
        w = renamed(w, {"beyond": "extrapolation"})
        w["_target_"] = w["_target_"].replace("attn.weightings.", "attn.position_weights.")
        if "extrapolation" in w:
            w["extrapolation"] = EXTRAPOLATION.get(w["extrapolation"], w["extrapolation"])
        attn["position_weight"] = w
    run["config"] = config | {"attn": attn, "model": renamed(config["model"], MODEL)}
    return renamed(run, PARTS)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for pack in sorted((ROOT / "results/runs").rglob(f"*{ENDING}")):
        write_bytes(pack, file_of({name: migrated(run) for name, run in read_object(pack).items()}))
        print(f"written to {pack.relative_to(ROOT)}")
