"""Cut a text into random crops for training and fixed windows for evaluation."""

import numpy as np
import torch
from torch import Tensor

from data.files import UserError

ON_DEVICE = 1 << 28  # the largest number of ids that are moved to a GPU: 1 GiB of int32


def place(ids: np.ndarray, device: torch.device) -> np.ndarray | Tensor:
    """Return ids as a tensor on the GPU, or unchanged if `device` is the CPU or there are more than ON_DEVICE ids."""
    if device.type == "cpu" or len(ids) > ON_DEVICE:
        return ids
    return torch.from_numpy(ids.astype("int32")).to(device)


def crops(
    ids: np.ndarray | Tensor, context: int, batch: int, seed: int, step: int, row_length: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets [batch, context] of a step: crops of `ids` at uniformly random places.

    The places are multiples of `row_length`. They do not depend on earlier steps, so a continued run sees what it would
    have seen without a break.
    """
    places = (len(ids) - context) // row_length  # a crop has context + 1 ids
    starts = np.random.default_rng([seed, step]).integers(0, places, batch) * row_length
    if isinstance(ids, np.ndarray):
        window = torch.from_numpy(ids[starts[:, None] + np.arange(context + 1)].astype("int64"))
    else:
        first = torch.from_numpy(starts).to(ids.device, non_blocking=True)
        window = ids[first[:, None] + torch.arange(context + 1, device=ids.device)].long()
    return window[:, :-1], window[:, 1:]


def spread_windows(ids: np.ndarray, context: int, count: int) -> Tensor:
    """Return at most `count` windows of context + 1 ids, evenly spread over `ids`: [windows, context + 1]."""
    possible = (len(ids) - 1) // context
    places = np.unique(np.linspace(0, possible - 1, min(count, possible)).astype(np.int64)) * context
    return torch.from_numpy(np.stack([ids[p : p + context + 1] for p in places]))


def evaluation_text(ids: np.ndarray, context: int, count: int) -> Tensor:
    """Return `ids` as one row or, if they make more than `count` windows, `count` evenly spread windows as rows.

    The result is [rows, characters], in the integer type of `ids`.
    """
    whole = (len(ids) - 1) // context <= count
    return torch.from_numpy(np.array(ids[None])) if whole else spread_windows(ids, context, count)


def plain_windows(ids: Tensor, context: int) -> Tensor:
    """Cut ids [..., characters] into adjacent windows [windows, context + 1].

    The first target of a window follows the last target of the previous one. A rest that is shorter than a window is
    left out.
    """
    whole = (ids.shape[-1] - 1) // context * context + 1
    if whole == 1:
        return ids.new_empty(0, context + 1)
    return ids[..., :whole].unfold(-1, context + 1, context).flatten(0, -2)


def sliding_windows(ids: Tensor, context: int, stride: int) -> tuple[Tensor, Tensor]:
    """Return windows [N, context + 1] that advance by `stride` or less, and a mask [N, context] of counted targets.

    Every character but the first is counted in exactly one window. Each counted target, except those of the first
    window, has more than context - stride characters before it in its window.
    """
    last = len(ids) - 1 - context
    starts = torch.tensor([*range(0, last, stride), last])
    advances = starts.diff(prepend=starts[:1] - context)  # all targets of the first window are counted
    return ids.unfold(0, context + 1, 1)[starts], torch.arange(context) >= context - advances[:, None]


def answers(ids: Tensor, keys: Tensor) -> Tensor:
    """Return a mask [windows, context] that is True at each key that has already occurred in its window.

    The target there is an answer. ids [windows, context], keys [K]. In a row of a synthetic text, a key is always
    followed by the same character, so that the model can know the target.
    """
    sorted_ids, order = ids.sort(stable=True)
    repeats = (sorted_ids[:, 1:] == sorted_ids[:, :-1]) & torch.isin(sorted_ids[:, 1:], keys)
    return torch.zeros_like(ids, dtype=torch.bool).scatter_(1, order[:, 1:], repeats)


def check_length(training: int, heldout: int, context: int, row_length: int = 1) -> None:
    """Raise UserError if the training or held-out text is too short for one window, or if rows do not fit `context`.

    The arguments `training` and `heldout` are numbers of characters. Held-out text may be absent (0). `row_length` must
    be `context`, or 1 for a text without rows.
    """
    if row_length not in (1, context):
        raise UserError(
            f"data.length must be model.context={context}, so that every window is a row of the text: got {row_length}"
        )
    if training <= context:
        raise UserError(
            f"model.context={context} needs more than {context} characters to train on: without the held-out part, the "
            f"text has {training}: take a smaller context, a smaller data.holdout or a longer text"
        )
    if 0 < heldout <= context:
        raise UserError(
            f"model.context={context} needs more than {context} held-out characters, there are {heldout}: "
            "take a larger data.holdout, data.holdout=0, a smaller context or a longer text"
        )
