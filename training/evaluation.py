"""Measure a model on fixed windows of text: perplexity, bits per byte, accuracy and the speed of the forward pass."""

import math
import statistics
import time

import numpy as np
import torch
from torch import Tensor

from data.batches import answers, evaluation_text, plain_windows, sliding_windows
from data.corpus import Corpus
from models.lm import LM, cross_entropy
from training.device import wait
from training.metrics import perplexity

WINDOWS, CHARACTERS = 64, 2**15  # most windows in a batch, and most characters unless a single window has more


def evaluate(
    model: LM,
    text: dict[str, Tensor],
    context: int,
    stride: int,
    device: torch.device,
    fit_windows: int | None = None,
) -> dict:
    """Measure perplexities over a run's text in windows of `context` characters, and the speed of the forward pass.

    The forward pass is in float32, whatever the precision of training was.

    `text` holds `fit`, ids of the training text [rows, characters]; `utf8_bytes`, the UTF-8 length of each symbol
    [vocabulary]; and, if text is held out, `heldout`, its ids [characters]. At most `fit_windows` evenly spread windows
    of `fit` are measured; None measures all. If the corpus has keys to recall, as data=recall has, `text` also holds
    `keys`, their ids [K], and `context` must be data.length, the length of the corpus's rows. The rows of `fit`
    are not those of the corpus: there is one, the whole training text, or several, which are windows of it.

    Returns a dict. `fit` and `heldout` are measured in windows whose targets do not overlap; `sliding` is measured on
    the held-out text in windows that advance by `stride`, so that all but the first characters have more than
    context - stride characters before them. Each of the three holds the mean loss in nats per character, its
    perplexity, the numbers of characters and UTF-8 bytes, bits per character and bits per byte; a text without a
    piece longer than `context` is left out. If `text` has `keys`, `fit` and `heldout` also hold `accuracy` and
    `answers` (see `score`), and there is no `sliding`, because its windows would not be rows of the corpus.
    `loss_by_position` holds, for `fit` and `heldout`, the mean loss at each of the `context` positions.
    `tokens_per_second` is the median over full batches, timed with the loss, or None if there are too few of them.
    """
    seconds: list[float] = []
    fit = plain_windows(text["fit"], context)
    if fit_windows is not None:
        fit = fit[torch.linspace(0, len(fit) - 1, min(fit_windows, len(fit)), dtype=torch.float64).long()]
    windows = {"fit": (fit, None)} if len(fit) else {}
    if len(text.get("heldout", ())) > context:
        windows["heldout"] = plain_windows(text["heldout"], context), None
        if "keys" not in text:
            windows["sliding"] = sliding_windows(text["heldout"], context, stride)
    result, by_position = {}, {}
    for name, (cut, counted) in windows.items():
        scored = score(model, cut, counted, device, seconds, text.get("keys"))
        by_position[name] = [round(loss, 5) for loss in scored.pop("by_position")]
        targets = cut[:, 1:] if counted is None else cut[:, 1:][counted]
        result[name] = scored | bits(scored["loss"], targets, text["utf8_bytes"])
    by_position.pop("sliding", None)
    result["loss_by_position"] = by_position
    # The first batch is a warm-up. `seconds` holds the times of full batches only.
    result["tokens_per_second"] = (
        batch_size(context) * context / statistics.median(seconds[1:]) if len(seconds) > 3 else None
    )
    return result


def final_text(corpus: Corpus, context: int, count: int) -> dict[str, Tensor]:
    """Return the `text` on which `evaluate` measures a run at its end: the training text and the held-out text.

    If a text is longer than `count` windows, `count` windows of it are taken: evenly spread windows of the training
    text, and the first windows of the held-out text. The entries of the result are described in `evaluate`.
    """
    text = {"fit": evaluation_text(corpus.training, context, count)}
    if corpus.heldout_size:
        text["heldout"] = torch.from_numpy(np.array(corpus.heldout[: count * context + 1]))
    if corpus.keys:
        text["keys"] = torch.tensor(corpus.key_ids(), dtype=torch.int32)
    return text | {"utf8_bytes": torch.from_numpy(corpus.utf8_bytes())}


def curve_point(model: LM, windows: dict[str, Tensor], device: torch.device, keys: Tensor | None = None) -> dict:
    """Return loss, perplexity and, if `keys` is given, accuracy on fixed windows [N, context + 1] of each text.

    `keys` holds the ids of the corpus's keys. The figures are named as in metrics.jsonl, such as fit_loss.
    """
    point = {}
    for name, cut in windows.items():
        result = score(model, cut, None, device, keys=keys)
        point |= {f"{name}_{key}": result[key] for key in ("loss", "perplexity", "accuracy") if key in result}
    return point


def bits(loss: float, targets: Tensor, utf8_bytes: Tensor) -> dict:
    """Return the number of UTF-8 bytes of `targets`, and their mean loss in bits per character and in bits per byte.

    `loss` is the mean loss of `targets` in nats per character.
    """
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
    keys: Tensor | None = None,
) -> dict:
    """Return a dict of the model's figures on windows [N, context + 1].

    It holds `loss`, the mean loss in nats; `perplexity`; `characters`, the number of targets; and `by_position`, the
    mean loss at each position, which is NaN where no target is counted. If `counted` [N, context] is given, only the
    targets where it is True are counted. If `keys`, the ids of the corpus's keys, are given, `answers` is the number of
    targets that follow a key which has already occurred in their window, and `accuracy` is the share of these targets
    that have the largest logit; without such targets, both are missing. The seconds that each full batch takes are
    appended to `seconds`.
    """
    training = model.training
    model.eval()
    context = windows.shape[1] - 1
    total = torch.zeros(context, dtype=torch.double, device=device)
    correct, answer_count = torch.zeros((), dtype=torch.long, device=device), 0
    keys = None if keys is None else keys.to(device)
    counts = torch.full((context,), len(windows)) if counted is None else counted.sum(0)
    size = batch_size(context)
    for start in range(0, len(windows), size):
        batch = windows[start : start + size].to(device).long()
        began = time.perf_counter()
        losses, hits = losses_and_hits(model, batch[:, :-1], batch[:, 1:], keys)
        wait(device)
        if seconds is not None and len(batch) == size:
            seconds.append(time.perf_counter() - began)
        if counted is not None:
            losses = losses.masked_fill(~counted[start : start + size].to(device), 0)
        total += losses.double().sum(0)
        if hits is not None:
            correct += hits.sum()
            answer_count += len(hits)
    model.train(training)
    total, characters = total.cpu(), int(counts.sum())
    loss = total.sum().item() / characters
    by_position = (total / counts).tolist()
    result = {"loss": loss, "perplexity": perplexity(loss), "characters": characters, "by_position": by_position}
    if answer_count:
        result |= {"accuracy": correct.item() / answer_count, "answers": answer_count}
    return result


def batch_size(context: int) -> int:
    """Return the number of windows in a batch."""
    return min(WINDOWS, max(1, CHARACTERS // context))


def losses_and_hits(model: LM, ids: Tensor, targets: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the loss of each target, [N, context], and whether each answer has the largest logit, [answers].

    The second result is None if `keys` is None.
    """
    logits = model(ids)
    losses = cross_entropy(logits, targets)
    return losses, None if keys is None else (logits.argmax(-1) == targets)[answers(ids, keys)]


def report(name: str, result: dict, parameters: int) -> str:
    """Return the figures of an evaluation as text: `name`, and then one line for each figure."""
    rows = [("fit perplexity", "fit"), ("held-out perplexity", "heldout"), ("held-out, sliding", "sliding")]
    lines = [
        f"{label:22}{result[key]['perplexity']:10.3f}   {result[key]['bits_per_character']:.4f} bits per character, "
        f"{result[key]['bits_per_byte']:.4f} per byte, over {result[key]['characters']:,} characters"
        for label, key in rows
        if key in result
    ]
    lines += [
        f"{label:22}{result[key]['accuracy']:10.4f}   over {result[key]['answers']:,} answers"
        for label, key in (("fit accuracy", "fit"), ("held-out accuracy", "heldout"))
        if "accuracy" in result.get(key, {})
    ]
    if "heldout_best" in result:
        best = result["heldout_best"]
        lines.append(
            f"{'best held-out':22}{best['perplexity']:10.3f}   at step {best['step']:,}, over {best['characters']:,} "
            f"characters, on which the last step has a perplexity of {best['last_perplexity']:.3f}"
        )
    if result["tokens_per_second"]:
        lines.append(f"{'forward tokens/s':22}{result['tokens_per_second']:10,.0f}")
    lines.append(f"{'parameters':22}{parameters:10,}")
    return "\n".join([name, *lines])
