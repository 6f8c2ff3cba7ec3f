"""Compare the first 20 losses of five attentions at a fixed seed with those in test_frozen_losses.json.

If a commit changes these losses, its message must say why. `python -m tests.test_frozen_losses` writes them again.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.cli import compose
from data.batches import crops
from models.build import build_model
from tests.conftest import TINY
from training.optimizer import learning_rate, optimizer_of, update

FROZEN = Path(__file__).with_suffix(".json")
ATTENTIONS = ["mha", "mha_tw", "mha_plus", "gmlp", "aft"]


def losses(variant: str) -> list[float]:
    cfg = compose([f"attn={variant}", *TINY, "model.layers=2", "optim.lr=1e-2", "optim.weight_decay=0.01"])
    torch.manual_seed(0)
    model = build_model(cfg, 100)
    optim = cfg.optim
    optimizer = optimizer_of(model, optim)
    ids = torch.from_numpy(np.random.default_rng(0).zipf(1.5, 5000) % 100)
    found = []
    for step in range(20):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, 20, optim)
        found.append(
            update(model.loss, optimizer, *crops(ids, 16, 4, 0, step), torch.device("cpu"), "float32")[0].item()
        )
    return found


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_the_losses_are_where_they_were(variant):
    assert losses(variant) == pytest.approx(json.loads(FROZEN.read_text())[variant], rel=1e-3)


if __name__ == "__main__":
    FROZEN.write_text(json.dumps({variant: losses(variant) for variant in ATTENTIONS}, indent=1) + "\n")
