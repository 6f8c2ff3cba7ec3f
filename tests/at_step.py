"""torchrun -m tests.at_step RANK STEP WHAT ...: run train.py, and let one process fail before a step.

WHAT is what the process of rank RANK does before step STEP: `kill` and `term` send SIGKILL or SIGTERM to the process
itself, `raise` raises an exception.
"""

import itertools
import os
import signal
import sys

from configs.cli import main
from train import train
from training.distributed import leave

rank, step, what = sys.argv[1:4]
del sys.argv[1:4]


steps = itertools.count(1)  # each process counts its own steps


def eventful(_trainer):
    if next(steps) == int(step) and os.environ["RANK"] == rank:
        if what == "raise":
            raise RuntimeError("the sky is falling")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM}[what])


@main("config")
def run(cfg):
    train(cfg, eventful)


run()
leave()
