"""torchrun -m tests.helpers.at_step RANK STEP WHAT ...: run train.py, and disturb one process before a step.

Before the STEP-th step since its start, the process of rank RANK raises an exception if WHAT is `raise`, or sends
itself SIGKILL (`kill`) or SIGTERM (`term`).
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


steps = itertools.count(1)  # the steps since this process started


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
