"""python evaluate.py run=FOLDER: perplexity of a trained model on fixed windows, and its speed."""

import sys
from pathlib import Path

import configs.startup

from omegaconf import DictConfig

from configs.arguments import command_line
from configs.cli import main
from data.files import UserError, write_json
from models.lm import parameter_count
from training.device import pick_device, without_triton
from training.evaluation import evaluate, report
from training.loading import load_run
from training.provenance import device_name, provenance


@main("evaluate")
def run(cfg: DictConfig) -> None:
    folder = Path(cfg.run)
    trained, model, text, _ = load_run(folder)
    if not text:
        raise UserError(
            f"{folder} holds no text to evaluate on, because committed weights are kept without it: "
            "run the command in its summary.json, and evaluate the new run"
        )
    device = pick_device(cfg.device)
    context = trained.model.context if cfg.context is None else cfg.context
    if "keys" in text and context != trained.model.context:
        length = trained.model.context
        raise UserError(f"context must be {length}, the length of a row of the text that the run kept: got {context}")
    longest = max(text["fit"].shape[1], len(text.get("heldout", ()))) - 1
    if context > longest:
        raise UserError(
            f"context must be at most {longest}, one less than the length of the longest piece of text that the run "
            f"kept: got {context}"
        )
    usual = min(trained.evaluation.stride, context)
    stride = usual if cfg.stride is None else cfg.stride
    if not 0 < stride <= context:
        raise UserError(f"stride must be from 1 to the context, {context}: got {stride}")
    if device.type == "cpu":
        without_triton(model)
    try:
        result = evaluate(model.to(device), text, context, stride, device, cfg.windows)
    except ValueError as error:  # the context is longer than the model's max_length
        raise UserError(f"{folder} cannot be tested at context={context}: {error}") from error
    print(f"on {device_name(device)}, in float32")
    print(report(str(folder), result, parameter_count(model)))
    settings = {"context": context, "stride": stride, "windows": cfg.windows}
    own = {"context": trained.model.context, "stride": usual, "windows": None}
    others = [f"{key}={value}" for key, value in settings.items() if value != own[key]]
    path = folder / f"{'-'.join(['evaluation', *others])}.json"
    write_json(path, result | settings | provenance(device, command_line("python evaluate.py", sys.argv[1:])))
    print(f"written to {path}")


if __name__ == "__main__":
    run()
