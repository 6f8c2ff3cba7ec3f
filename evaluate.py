"""python evaluate.py run=FOLDER: perplexity of a trained model on fixed windows, and its speed."""

import functools
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import configs.startup

import torch
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from configs.cli import CONFIGS, check_types, command_line, compose, flat, main
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
    model: LM,
    text: dict[str, Tensor],
    context: int,
    stride: int,
    device: torch.device,
    fit_windows: int | None = None,
) -> dict:
    """Perplexities over a run's text in windows of `context` characters, and the speed of the forward pass.

    In float32, whatever the model was trained in.

    `text` holds `fit` [rows, characters] of the training text, `utf8_bytes` [vocabulary] of each symbol
    and, where text is held out, `heldout` [characters]. At most `fit_windows` windows of `fit`, evenly
    spread, are measured; None measures all.

    Returns for `fit` (unless its rows are shorter than a window), `heldout` (plain windows, each starting
    from nothing) and `sliding` (windows that advance by `stride`, so that all but the first characters
    see a past of context - stride or more): the mean loss in nats per character, its perplexity, the
    characters and UTF-8 bytes that it was measured on, bits per character and bits per byte. And
    `loss_by_position`: for `fit` and `heldout`, the mean loss at each of the `context` positions.
    """
    seconds: list[float] = []
    fit = plain_windows(text["fit"], context)
    if fit_windows is not None:
        fit = fit[torch.linspace(0, len(fit) - 1, min(fit_windows, len(fit))).long()]
    windows = {"fit": (fit, None)} if len(fit) else {}
    if len(text.get("heldout", ())) > context:
        windows["heldout"] = plain_windows(text["heldout"], context), None
        windows["sliding"] = sliding_windows(text["heldout"], context, stride)
    result, by_position = {}, {}
    for name, (cut, counted) in windows.items():
        scored = score(model, cut, counted, device, seconds)
        by_position[name] = [round(loss, 5) for loss in scored.pop("by_position")]
        targets = cut[:, 1:] if counted is None else cut[:, 1:][counted]
        result[name] = scored | bits(scored["loss"], targets, text["utf8_bytes"])
    result["loss_by_position"] = {name: by_position[name] for name in ("fit", "heldout") if name in by_position}
    # The first batches warm up, and the last of each text is smaller than the others.
    result["tokens_per_second"] = BATCH * context / statistics.median(seconds[1:]) if len(seconds) > 3 else None
    return result


def bits(loss: float, targets: Tensor, utf8_bytes: Tensor) -> dict:
    """The UTF-8 bytes of target ids, and a mean loss in nats per character as bits per character and per byte."""
    counts = targets.flatten().int().bincount(minlength=len(utf8_bytes))
    size = float(counts.double() @ utf8_bytes.double())
    per_character = loss / math.log(2)
    return {
        "bytes": round(size),
        "bits_per_character": per_character,
        "bits_per_byte": per_character * targets.numel() / size,
    }


@torch.no_grad()
def score(
    model: LM,
    windows: Tensor,
    counted: Tensor | None,
    device: torch.device,
    seconds: list[float] | None = None,
) -> dict:
    """Mean loss over windows [N, context + 1], or over those targets that `counted` [N, context] marks.

    `by_position` are the means at each position, NaN where none is counted.
    """
    training = model.training
    model.eval()
    context = windows.shape[1] - 1
    total = torch.zeros(context, dtype=torch.double, device=device)
    counts = torch.full((context,), len(windows)) if counted is None else counted.sum(0)
    for start in range(0, len(windows), BATCH):
        batch = windows[start : start + BATCH].to(device).long()
        began = time.perf_counter()
        losses = model.loss(batch[:, :-1], batch[:, 1:], mean=False)
        wait(device)
        if seconds is not None and len(batch) == BATCH:
            seconds.append(time.perf_counter() - began)
        if counted is not None:
            losses = losses.masked_fill(~counted[start : start + BATCH].to(device), 0)
        total += losses.double().sum(0)
    model.train(training)
    total, characters = total.cpu(), int(counts.sum())
    loss = total.sum().item() / characters
    by_position = (total / counts).tolist()
    return {"loss": loss, "perplexity": perplexity(loss), "characters": characters, "by_position": by_position}


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


def pick_precision(wish: str, device: torch.device) -> tuple[str, str]:
    """The precision of a training step's products, float32 or bf16, and why; `auto` is bf16 where that is faster."""
    if wish not in ("auto", "float32", "bf16"):
        raise UserError(f"train.precision must be auto, float32 or bf16: got {wish}")
    if wish != "auto":
        return wish, f"train.precision={wish}"
    by = bf16_instructions(device)
    where = "GPU" if device.type == "cuda" else "processor"
    return ("bf16", f"the {where} has {by}") if by else ("float32", f"the {where} has no bf16 instructions")


def bf16_instructions(device: torch.device) -> str:
    """By what a device multiplies bf16 numbers faster than float32 ones; empty where it does not."""
    if device.type == "cuda":
        return "bf16 tensor cores" if torch.cuda.is_bf16_supported(including_emulation=False) else ""
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else ""


def build_model(cfg: DictConfig, vocabulary: int) -> LM:
    """The model of a config; UserError where the config cannot be one.

    What the config names to be called, which may be anything in a run's folder that somebody else made,
    is called only where a file in configs/ names it too.
    """
    for part in ("model", "attn", "ffn"):
        for target in set(targets(OmegaConf.to_container(cfg[part], resolve=True))) - known_targets():
            raise UserError(f"{part}._target_={target} stands in no file of configs/{part}, and is not called")
        for key, value in flat(cfg[part], resolve=True).items():
            if key.rsplit(".", 1)[-1] in SIZES and isinstance(value, int) and not 1 <= value < 2**31:
                raise UserError(f"{part}.{key} must be 1 or more{', and below 2^31' * (value > 1)}: got {value}")
    for key in ("init_std", "output_scale"):
        if not 0 <= cfg.model[key] < math.inf:
            raise UserError(f"model.{key} must be 0 or more: got {cfg.model[key]}")
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
    """Config, model and text of a run's folder, which is all that is needed.

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
        return cfg, model, read_text(record, vocabulary)
    load_weights(model, read_tensors(record.model), record.model)
    text = read_text(record, vocabulary)
    summary = read_object(record.summary) if record.summary.exists() else {}
    for path, what in ((record.model, "weights"), (record.vocabulary, "vocabulary"), (record.text, "text")):
        if summary.get(f"{what}_sha256") not in (None, hash_of(path)):
            raise UserError(f"{path} is damaged: its sha256 is not the one in {record.summary.name}")
    return cfg, model, text


def config_of(record: Record) -> DictConfig:
    """The config of a run; keys that the project has only got since then have their defaults."""
    cfg = read_config(record.config)
    try:
        usual, known = compose([f"attn={cfg.job.attn}", f"experiment={cfg.job.experiment}"]), True
    except (HydraException, OmegaConfBaseException, ValueError):  # it was of an attention that is not here any more
        usual, known = compose([]), False
    for part in ("model", "attn", "ffn", "optim", "train", "evaluation", "data"):
        if not isinstance(cfg.get(part), DictConfig):
            raise UserError(f"{record.config} is damaged: it holds no {part}")
    if not cfg.ffn:  # ffn=again
        usual.ffn = {}
    for part in ("model", "optim", "train", "evaluation", *(("attn", "ffn") if known else ())):
        add_missing(cfg[part], usual[part])
    choices = {"experiment": cfg.job.experiment} | ({"attn": cfg.job.attn} if known else {})
    check_types(cfg, usual, choices, f"{record.config} is damaged")
    return cfg


def add_missing(given: DictConfig, usual: DictConfig) -> None:
    """Give a part of a config the keys that it lacks, those of the parts within it too."""
    for key, value in usual.items():
        if key not in given:
            given[key] = value
        elif isinstance(value, DictConfig) and isinstance(given[key], DictConfig):
            add_missing(given[key], value)


def read_text(record: Record, vocabulary: int) -> dict[str, Tensor]:
    text = read_tensors(record.text)
    dims = {name: tensor.dim() for name, tensor in text.items() if tensor.numel()}
    whole = not any(tensor.is_floating_point() for name, tensor in text.items() if name != "utf8_bytes")
    if not whole or dims not in ({"fit": 2, "utf8_bytes": 1}, {"fit": 2, "heldout": 1, "utf8_bytes": 1}):
        raise UserError(f"{record.text} is damaged: it does not hold the training text and the bytes of its symbols")
    ids = [text[name].int() for name in text.keys() - {"utf8_bytes"}]
    if len(text["utf8_bytes"]) != vocabulary or not all(0 <= each.min() <= each.max() < vocabulary for each in ids):
        raise UserError(f"{record.text} is of another text: it holds characters that the model does not know")
    return text


def load_weights(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"{path} holds the weights of another model") from error


def report(name: str, result: dict, parameters: int) -> str:
    """The figures of an evaluation, a line each."""
    rows = [("fit perplexity", "fit"), ("held-out perplexity", "heldout"), ("held-out, sliding", "sliding")]
    lines = [
        f"{label:22}{result[key]['perplexity']:10.3f}   {result[key]['bits_per_character']:.4f} bits per character, "
        f"{result[key]['bits_per_byte']:.4f} per byte, over {result[key]['characters']:,} characters"
        for label, key in rows
        if key in result
    ]
    if "heldout_best" in result:
        best = result["heldout_best"]
        lines.append(
            f"{'best held-out':22}{best['perplexity']:10.3f}   at step {best['step']:,}, over {best['characters']:,} "
            f"characters, on which the last step has {best['last_perplexity']:.3f}"
        )
    if result["tokens_per_second"]:
        lines.append(f"{'forward tokens/s':22}{result['tokens_per_second']:10,.0f}")
    lines.append(f"{'parameters':22}{parameters:10,}")
    return "\n".join([name, *lines])


@main("evaluate")
def run(cfg: DictConfig) -> None:
    folder = Path(cfg.run)
    trained, model, text = load_run(folder)
    device = pick_device(cfg.device)
    context = trained.model.context if cfg.context is None else cfg.context
    longest = max(text["fit"].shape[1], len(text.get("heldout", ()))) - 1
    if context > longest:
        raise UserError(f"context must be at most {longest}, the text that the run kept: got {context}")
    usual = min(trained.evaluation.stride, context)
    stride = usual if cfg.stride is None else cfg.stride
    if not 0 < stride <= context:
        raise UserError(f"stride must be from 1 to the context, {context}: got {stride}")
    try:
        result = evaluate(model.to(device), text, context, stride, device, cfg.windows)
    except ValueError as error:  # an attention that knows absolute positions, beyond them
        raise UserError(f"{folder} cannot be tested at context={context}: {error}") from error
    print(f"on {device_name(device)}, in float32")
    print(report(str(folder), result, parameter_count(model)))
    settings = {"context": context, "stride": stride, "windows": cfg.windows}
    own = {"context": trained.model.context, "stride": usual, "windows": None}
    others = [f"{key}={value}" for key, value in settings.items() if value != own[key]]
    path = folder / f"{'-'.join(['evaluation', *others])}.json"
    write_json(
        path,
        result | settings | provenance(device, command_line("python evaluate.py", sys.argv[1:])),
    )
    print(f"written to {path}")


if __name__ == "__main__":
    run()
