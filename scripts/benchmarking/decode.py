"""Characters per second of one growing text, streamed and recomputed, by context.

At each context every variant steps through its last characters (`LM.step`, with the state of all
before them) and, for comparison, runs the forward pass over the whole context, which is what a
character costs without a state. One text, untrained models of the source's size, variants in turn,
medians.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor

from configs.cli import compose
from data.files import UserError, write_json
from models.build import build_model
from models.lm import LM
from models.sampling import one_thread
from scripts.benchmarking.timing import in_turn
from scripts.reporting import decode
from training.device import pick_device
from training.provenance import provenance


def measure_context(cfg: DictConfig, context: int, device: torch.device) -> dict[str, dict[str, list[float]]]:
    """Seconds a character of each variant, streamed and recomputed, at the end of a context."""
    functions = {}
    for variant in cfg.variants:
        model = build_model(
            compose([f"attn={variant}", "experiment=source", f"model.context={context}"]), cfg.vocabulary
        ).to(device)
        ids = torch.randint(cfg.vocabulary, (context,), device=device)
        timed = cfg.characters * (cfg.warm_up + cfg.repeats)
        functions[variant, "streaming"] = streaming(model, ids, timed, cfg.characters)
        functions[variant, "recomputing"] = recomputing(model, ids)
    seconds = in_turn(functions, device, cfg.warm_up, cfg.repeats)
    return {
        v: {
            "streaming": [s / cfg.characters for s in seconds[v, "streaming"]],
            "recomputing": seconds[v, "recomputing"],
        }
        for v in cfg.variants
    }


def streaming(model: LM, ids: Tensor, timed: int, characters: int) -> Callable[[], None]:
    """A function that takes the next `characters` steps, of the last `timed` of the context."""
    state, rest = model.initial_state(1), iter(ids[:, None])

    @torch.no_grad()
    def steps(count: int = characters) -> None:
        with one_thread():  # as when sampling
            for _ in range(count):
                model.step(next(rest), state)

    steps(len(ids) - timed)
    return steps


def recomputing(model: LM, ids: Tensor) -> Callable[[], None]:
    """A function that computes the logits after the context from nothing."""

    @torch.no_grad()
    def forward() -> None:
        model(ids[None])

    return forward


def measure(cfg: DictConfig, command: str) -> None:
    """Measure every context, and write the record and its page."""
    timed = cfg.characters * (cfg.warm_up + cfg.repeats)
    if timed > min(cfg.contexts):
        raise UserError(
            f"characters x (warm_up + repeats) = {timed} do not fit into a context of {min(cfg.contexts)}: "
            "give fewer or a longer context"
        )
    device = pick_device(cfg.device)
    record = {
        "what": "seconds a character at the end of a context: steps, and the whole forward pass; variants in turn",
        "dim": compose(["experiment=source"]).model.dim,
        "vocabulary": cfg.vocabulary,
        "precision": "float32",
        "contexts": {str(context): measure_context(cfg, context, device) for context in cfg.contexts},
        "provenance": provenance(device, command),
    }
    results = Path(cfg.results)
    write_json(results / "decode.json", record)
    decode.write(results)
    print(f"{decode.table(record)}\nwritten to {results}: decode.json, decode.md")
