"""Measure the seconds per character of streaming and of recomputing, by the length of the context.

Streaming passes the last characters of a context one by one to `LM.step`, with a state that holds the earlier ones.
Recomputing runs the forward pass over the whole context for each character. The models are untrained and have the
source's size.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor

from configs.cli import compose
from data.files import UserError
from models.build import build_model
from models.lm import LM
from models.sampling import one_thread
from scripts.benchmarking.timing import in_turn
from scripts.reporting import decode
from scripts.reporting.records import write_record
from training.device import pick_device
from training.provenance import provenance


def count_timed(cfg: DictConfig, context: int) -> int:
    """Return the number of characters to stream in all rounds. Raises UserError if the context has fewer."""
    timed = cfg.characters * (cfg.warm_up + cfg.repeats)
    if timed > context:
        raise UserError(
            f"characters x (warm_up + repeats) = {timed} do not fit into a context of {context}: "
            "give fewer characters or a longer context"
        )
    return timed


def measure_context(cfg: DictConfig, context: int, device: torch.device) -> dict[str, dict[str, list[float]]]:
    """Return the seconds per character at the end of a context, one for each round.

    The result is {attention: {"streaming": [...], "recomputing": [...]}}.
    """
    functions, timed = {}, count_timed(cfg, context)
    for variant in cfg.variants:
        config = compose([f"attn={variant}", "experiment=source", f"model.context={context}"])
        model = build_model(config, cfg.vocabulary).to(device)
        ids = torch.randint(cfg.vocabulary, (context,), device=device)
        functions[variant, "streaming"] = streaming(model, ids, timed, cfg.characters)
        functions[variant, "recomputing"] = recomputing(model, ids)
    seconds = in_turn(functions, device, cfg.warm_up, cfg.repeats)
    per_character = {variant: {} for variant in cfg.variants}
    for (variant, kind), values in seconds.items():
        per_character[variant][kind] = [s / (cfg.characters if kind == "streaming" else 1) for s in values]
    return per_character


def streaming(model: LM, ids: Tensor, timed: int, characters: int) -> Callable[[], None]:
    """Stream all but the last `timed` characters of a context; return a function that streams the next `characters`."""
    state, remaining = model.begin(1), iter(ids[:, None])

    @torch.no_grad()
    def steps(count: int = characters) -> None:
        with one_thread():  # as in `models.sampling.generate`
            for _ in range(count):
                model.step(next(remaining), state)

    steps(len(ids) - timed)
    return steps


def recomputing(model: LM, ids: Tensor) -> Callable[[], Tensor]:
    """Return a function that runs the forward pass over the whole context."""
    return torch.no_grad()(lambda: model(ids[None]))


def measure(cfg: DictConfig, command: str) -> None:
    """Measure every context, and write the record and its page. Raises UserError if a context is too short."""
    count_timed(cfg, min(cfg.contexts))
    device = pick_device(cfg.device)
    record = {
        "what": "seconds per character at the end of a context, by LM.step and by a forward pass over all of it; every "
        "attention is timed once in each round",
        "dim": compose(["experiment=source"]).model.dim,
        "vocabulary": cfg.vocabulary,
        "precision": "float32",
        "contexts": {str(context): measure_context(cfg, context, device) for context in cfg.contexts},
        "provenance": provenance(device, command),
    }
    print(decode.page(record))
    write_record(Path(cfg.results), "decode", record, decode.page)
