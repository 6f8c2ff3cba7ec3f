"""python evaluate.py run=FOLDER: perplexity of a trained model on fixed windows, and its speed."""

import signal

if __name__ == "__main__":  # so that a Ctrl-C during the imports, which take seconds, has no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import functools
import math
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from configs.cli import CONFIGS, check_types, compose, flat, main
from data.batches import plain_windows, sliding_windows
from data.examine import hash_of
from data.files import UserError, out_of_memory, write_json
from data.record import Record, device_name, provenance, read_config, read_object, read_tensors
from models.lm import LM, build, parameter_count

BATCH = 64  # windows at a time
# Of a model's numbers; what else an attention takes may be 0 or less.
SIZES = ("dim", "heads", "context", "layers", "key_size", "logit_heads", "value_heads", "expansion", "hidden", "rank")
SIZES += ("window", "chunk")


def evaluate(
    model: LM, windows: dict[str, Tensor], context: int, stride: int, device: torch.device, precision: str
) -> dict:
    """Perplexities over the windows of a run, `context` characters long, and the speed of the forward pass.

    `windows` holds `fit` [windows, characters + 1], evenly spread over the training text, and, where
    text is held out, `heldout` [characters], its beginning. Returns for `fit` (unless its windows are
    shorter than the context), `heldout` (plain windows, each starting from nothing) and `sliding`
    (windows that advance by `stride`, so that all but the first characters see a past of
    context - stride or more) the mean loss in nats per character, its perplexity, and how many
    characters it is the mean of.
    """
    seconds: list[float] = []
    result, fit = {}, windows["fit"][:, : context + 1]
    if fit.shape[1] > context:
        result["fit"] = score(model, fit, None, device, precision, seconds)
    text = windows.get("heldout")
    if text is not None:
        result["heldout"] = score(model, plain_windows(text, context), None, device, precision, seconds)
        result["sliding"] = score(model, *sliding_windows(text, context, stride), device, precision, seconds)
    # The first batches warm up, and the last of each text is smaller than the others.
    result["tokens_per_second"] = BATCH * context / statistics.median(seconds[1:]) if len(seconds) > 3 else None
    return result


@torch.no_grad()
def score(
    model: LM,
    windows: Tensor,
    counted: Tensor | None,
    device: torch.device,
    precision: str,
    seconds: list[float] | None = None,
) -> dict:
    """Mean loss over windows [N, context + 1], or over those targets that `counted` [N, context] marks."""
    training = model.training
    model.eval()
    total, characters = 0.0, 0
    for start in range(0, len(windows), BATCH):
        batch = windows[start : start + BATCH].to(device).long()
        began = time.perf_counter()
        with autocast(device, precision):
            losses = model.loss(batch[:, :-1], batch[:, 1:], mean=False)
        wait(device)
        if seconds is not None and len(batch) == BATCH:
            seconds.append(time.perf_counter() - began)
        if counted is not None:
            losses = losses[counted[start : start + BATCH].to(device)]
        total += losses.double().sum().item()
        characters += losses.numel()
    model.train(training)
    return {"loss": total / characters, "perplexity": perplexity(total / characters), "characters": characters}


def wait(device: torch.device) -> None:
    """Until what was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def pick_device(wish: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wish)
    except RuntimeError as error:
        raise UserError(f"train.device must be auto, cpu or cuda: got {wish}") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"train.device must be auto, cpu or cuda: got {wish}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"train.device={wish}: this machine has {torch.cuda.device_count()} CUDA devices")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton launches its kernels on the current one
    return device


def pick_precision(wish: str, device: torch.device) -> str:
    """`auto` is bf16 on CUDA, float32 elsewhere."""
    if wish not in ("auto", "float32", "bf16"):
        raise UserError(f"train.precision must be auto, float32 or bf16: got {wish}")
    return ("bf16" if device.type == "cuda" else "float32") if wish == "auto" else wish


def build_model(cfg: DictConfig, vocabulary: int) -> LM:
    """The model of a config; UserError where the config cannot be one.

    What the config names to be called, which may be anything in a run's folder that somebody else made,
    is called only where a file in configs/ names it too.
    """
    for part in ("model", "attn", "ffn"):
        for target in set(targets(OmegaConf.to_container(cfg[part], resolve=True))) - known_targets():
            raise UserError(f"{part}._target_={target} stands in no file of configs/{part}, and is not called")
        for key, value in flat(cfg[part], resolve=True).items():
            if key.rsplit(".", 1)[-1] in SIZES and isinstance(value, int) and value < 1:
                raise UserError(f"{part}.{key} must be 1 or more: got {value}")
    if not 0 <= cfg.model.init_std < math.inf:
        raise UserError(f"model.init_std must be 0 or more: got {cfg.model.init_std}")
    try:
        return build(cfg, vocabulary)
    except (ValueError, HydraException) as error:
        raise UserError(reason(error)) from error
    except RuntimeError as error:
        if out_of_memory(error):
            raise UserError(f"model.dim={cfg.model.dim} and the rest need more memory than there is") from error
        raise


def reason(error: Exception) -> str:
    """Its first line; where Hydra could not import or call a target, also what stood in the way."""
    cause = error
    while isinstance(error, HydraException) and cause.__cause__ is not None:
        cause = cause.__cause__
    what, why = (str(one).split("\n")[0] for one in (error, cause))
    return what if cause is error else f"{what.split(', set env')[0].rstrip(':')}: {type(cause).__name__}: {why}"


def targets(node: object) -> Iterator[str]:
    """Whatever a part of a config names for Hydra to call."""
    if isinstance(node, dict) and "_target_" in node:
        yield str(node["_target_"])
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from targets(child)


@functools.cache
def known_targets() -> set[str]:
    files = (path for part in ("attn", "ffn") for path in (CONFIGS / part).glob("*.yaml"))
    return {target for path in files for target in targets(OmegaConf.to_container(OmegaConf.load(path)))}


def load_run(folder: Path) -> tuple[DictConfig, LM, dict[str, Tensor]]:
    """Config, model and evaluation windows of a run's folder, which is all that is needed.

    The model is the trained one, or that of the last state of a run that is not finished.
    """
    record = Record(folder)
    if not record.config.exists():
        raise UserError(f"{folder} holds no run: give the folder that train.py named at its end")
    if not record.model.exists() and not record.state.exists():
        raise UserError(f"{folder} holds no model: run the command in its summary.json")
    cfg = config_of(record)
    vocabulary = len(record.read_vocabulary())
    model = build_model(cfg, vocabulary)
    if not record.model.exists():
        state, ours = record.read_state(), f"{cfg.job.experiment}/{cfg.job.name}"
        if state.get("run", ours) != ours:
            raise UserError(f"{record.state} is the state of {state['run']}, not of {ours}")
        print(f"{folder} is not finished: this is its state after step {state['step']}", flush=True)
        load_weights(model, state["model"], record.state)
        return cfg, model, read_windows(record, vocabulary)
    load_weights(model, read_tensors(record.model), record.model)
    windows = read_windows(record, vocabulary)
    summary = read_object(record.summary) if record.summary.exists() else {}
    for path, what in ((record.model, "weights"), (record.vocabulary, "vocabulary"), (record.windows, "windows")):
        if summary.get(f"{what}_sha256") not in (None, hash_of(path)):
            raise UserError(f"{path} is damaged: its sha256 is not the one in {record.summary.name}")
    return cfg, model, windows


def config_of(record: Record) -> DictConfig:
    """The config of a run; keys that the project has only got since then have their defaults."""
    cfg = read_config(record.config)
    try:
        usual, known = compose([f"attn={cfg.job.attn}", f"experiment={cfg.job.experiment}"]), True
    except (HydraException, OmegaConfBaseException):  # it was of an attention that is not here any more
        usual, known = compose([]), False
    for part in ("model", "attn", "ffn", "optim", "train", "evaluation", "data"):
        if not isinstance(cfg.get(part), DictConfig):
            raise UserError(f"{record.config} is damaged: it holds no {part}")
    for part in ("model", "optim", "train", "evaluation", *(("attn", "ffn") if known else ())):
        missing = {key: value for key, value in usual[part].items() if key not in cfg[part]}
        cfg[part] = OmegaConf.merge(cfg[part], missing)
    choices = {"experiment": cfg.job.experiment} | ({"attn": cfg.job.attn} if known else {})
    check_types(cfg, usual, choices, f"{record.config} is damaged")
    return cfg


def read_windows(record: Record, vocabulary: int) -> dict[str, Tensor]:
    windows = read_tensors(record.windows)
    if "fit" not in windows:
        raise UserError(f"{record.windows} is damaged: it holds no windows of the training text")
    shapes = {"fit": 2, "heldout": 1}
    if any(ids.dtype != torch.int32 or ids.dim() != shapes.get(name) for name, ids in windows.items()):
        raise UserError(f"{record.windows} is damaged: it does not hold the ids of texts")
    if not all(ids.numel() and 0 <= ids.min() <= ids.max() < vocabulary for ids in windows.values()):
        raise UserError(f"{record.windows} is of another text: it holds characters that the model does not know")
    return windows


def load_weights(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"{path} holds the weights of another model") from error


def report(name: str, result: dict, parameters: int) -> str:
    """The figures of an evaluation, a line each."""
    rows = [("fit perplexity", "fit"), ("held-out perplexity", "heldout"), ("held-out, sliding", "sliding")]
    lines = [
        f"{label:22}{result[key]['perplexity']:10.3f}   over {result[key]['characters']:,} characters"
        for label, key in rows
        if key in result
    ]
    if result["tokens_per_second"]:
        lines.append(f"{'forward tokens/s':22}{result['tokens_per_second']:10,.0f}")
    lines.append(f"{'parameters':22}{parameters:10,}")
    return "\n".join([name, *lines])


@main("evaluate")
def run(cfg: DictConfig) -> None:
    folder = Path(cfg.run)
    trained, model, windows = load_run(folder)
    device = pick_device(cfg.device)
    precision = pick_precision(cfg.precision, device)
    context = cfg.context or trained.model.context
    longest = max(windows["fit"].shape[1], len(windows.get("heldout", ()))) - 1
    if not 0 < context <= longest:
        raise UserError(f"context must be from 1 to {longest}, the text that the run kept: got {context}")
    if not 0 < cfg.stride <= context:
        raise UserError(f"stride must be from 1 to the context, {context}: got {cfg.stride}")
    if cfg.windows is not None and cfg.windows < 1:
        raise UserError(f"windows must be 1 or more: got {cfg.windows}")
    windows["fit"] = windows["fit"][: cfg.windows]
    try:
        result = evaluate(model.to(device), windows, context, cfg.stride, device, precision)
    except ValueError as error:  # an attention that knows absolute positions, beyond them
        raise UserError(f"{folder} cannot be tested at context={context}: {error}") from error
    print(f"on {device_name(device)}, {precision}")
    print(report(str(folder), result, parameter_count(model)))
    path = folder / "evaluation.json"
    write_json(
        path,
        result
        | {"context": context, "stride": cfg.stride, "precision": precision}
        | provenance(device, shlex.join(["python", "evaluate.py", *sys.argv[1:]])),
    )
    print(f"written to {path}")


if __name__ == "__main__":
    run()
