"""python -m scripts.benchmark: measure speed and memory on this machine, and write records and pages.

measure=attentions: training steps and single layers of every attention, and layers of public implementations.
measure=rows: training speeds of the attentions in the table of scripts.compare, written to <results>/speed.json without
    a page. scripts.compare reads the file that its key `speed` names, by default out/speed.json.
measure=decode: the speed of streaming, and of recomputing the whole context for each character.
measure=memory: the memory and time of a training step of the model of experiment=large.
"""

import sys

import configs.startup

from omegaconf import DictConfig

from configs.arguments import command_line
from configs.cli import main
from scripts.benchmarking import attentions, decode, memory_plan, rows


@main("benchmark")
def run(cfg: DictConfig) -> None:
    measures = {"attentions": attentions, "decode": decode, "memory": memory_plan, "rows": rows}
    # Records do not name the folder that they are written to, which may be a private one.
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("results=")]
    measures[cfg.measure].measure(cfg, command_line("python -m scripts.benchmark", arguments))


if __name__ == "__main__":
    run()
