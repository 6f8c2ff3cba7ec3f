"""How well a model predicts text: perplexity and bits per byte in fixed windows, and the forward pass's speed."""

import math
import statistics
import time

import numpy as np
import torch
from torch import Tensor

from data.batches import evaluation_text, plain_windows, sliding_windows
from data.corpus import Corpus
from models.lm import LM
from training.device import wait

BATCH = 64  # windows at a time


def evaluate(
    model: LM,
    text: dict[str, Tensor],
    context: int,
    stride: int,
    device: torch.device,
    fit_windows: int | None = None,
) -> dict:
    """Measure perplexities over a run's text in windows of `context` characters, and the forward pass's speed.

    The forward pass is in float32, whatever the model was trained in.

    `text` holds ids of the training text, `fit` [rows, characters], the UTF-8 length of each symbol, `utf8_bytes`
    [vocabulary], and, if text is held out, its ids, `heldout` [characters]. At most `fit_windows` evenly spread windows
    of `fit` are measured; None measures all.

    Returns a dict. `fit` and `heldout` are measured in windows side by side; `sliding` is measured on the held-out text
    in windows that advance by `stride`, so that all but the first characters have at least context - stride characters
    before them. Each holds the mean loss in nats per character, its perplexity, the numbers of characters and UTF-8
    bytes, bits per character and bits per byte; a text that is shorter than a window is left out. `loss_by_position`
    holds, for `fit` and `heldout`, the mean loss at each of the `context` positions. `tokens_per_second` is the median
    over batches, None if there are too few.
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


def final_text(corpus: Corpus, context: int, count: int) -> dict[str, Tensor]:
    """Return what a run's last evaluation measures: both texts, of long ones `count` windows of `context` characters.

    It is what `evaluate` takes as `text`.
    """
    text = {"fit": evaluation_text(corpus.training, context, count)}
    if corpus.heldout_size:
        text["heldout"] = torch.from_numpy(np.array(corpus.heldout[: count * context + 1]))
    return text | {"utf8_bytes": torch.from_numpy(corpus.utf8_bytes())}


def curve_point(model: LM, windows: dict[str, Tensor], device: torch.device) -> dict:
    """Return loss and perplexity on a few fixed windows [N, context + 1] of each text, as metrics.jsonl has them."""
    point = {}
    for name, cut in windows.items():
        result = score(model, cut, None, device)
        point |= {f"{name}_loss": result["loss"], f"{name}_perplexity": result["perplexity"]}
    return point


def bits(loss: float, targets: Tensor, utf8_bytes: Tensor) -> dict:
    """Return the UTF-8 bytes of target ids, and a mean loss in nats as bits per character and per byte."""
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
    """Return the mean loss over windows [N, context + 1], or over the targets in the mask `counted` [N, context].

    `by_position` holds the mean at each position, NaN where no target is counted. The seconds of each whole batch are
    appended to `seconds`.
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


def perplexity(loss: float) -> float:
    """Return exp(loss), infinity where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def report(name: str, result: dict, parameters: int) -> str:
    """Return the figures of an evaluation as text, a line each."""
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
