"""python scripts/time_decode.py: characters/s of one growing text, streamed and recomputed, by context.

At each context every variant steps through its last characters (`LM.step`, with the state of all
before them) and, for comparison, runs the forward pass over the whole context, which is what a
character costs without a state. One text, untrained models of the source's size, variants in turn,
medians. Writes the record, and from it alone the table.
"""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import configs.startup

import torch
from omegaconf import DictConfig
from tabulate import tabulate
from torch import Tensor

from configs.arguments import command_line
from configs.cli import compose, main
from data.files import UserError, write_bytes, write_json
from models.build import build_model
from models.lm import LM
from models.sampling import one_thread
from scripts.records import commit, label
from scripts.timing import in_turn
from training.device import pick_device
from training.provenance import provenance


def measure(cfg: DictConfig, context: int, device: torch.device) -> dict[str, dict[str, list[float]]]:
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


def table(record: dict) -> str:
    """Characters/s of streaming, and how many times those of recomputing they are, by context."""
    contexts = record["contexts"]
    rows = []
    for variant in next(iter(contexts.values())):
        row = [label(variant)]
        for cells in contexts.values():
            median = {kind: statistics.median(seconds) for kind, seconds in cells[variant].items()}
            row += [f"{1 / median['streaming']:,.0f}", f"{median['recomputing'] / median['streaming']:,.1f}"]
        rows.append(row)
    heads = ["characters/s", *(head for context in contexts for head in (f"context {int(context):,}", "× recomputing"))]
    came = record["provenance"]
    threads = f", {came['threads']} threads" if came["threads"] else ""
    return "\n".join(
        [
            tabulate(rows, heads, "github", colalign=["left"] + ["right"] * (len(heads) - 1), disable_numparse=True),
            "",
            f"- One text, {record['dim']} dim, vocabulary {record['vocabulary']:,}: the steps at the end of a context, "
            "against the forward pass over the whole of it, head and all. Variants in turn; medians.",
            f"- {came['device']}{threads}, {record['precision']}, torch {came['versions']['torch']}; "
            f"commit {commit(came)}; `{came['command']}`.",
            "",
        ]
    )


@main("decode")
def run(cfg: DictConfig) -> None:
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
        "contexts": {str(context): measure(cfg, context, device) for context in cfg.contexts},
        "provenance": provenance(device, command_line("python scripts/time_decode.py", sys.argv[1:])),
    }
    out = Path(cfg.out)
    write_json(out.with_suffix(".json"), record)
    write_bytes(out.with_suffix(".md"), table(record).encode())
    print(table(record))
    print(f"written to {out.with_suffix('.json')}, {out.with_suffix('.md')}")


if __name__ == "__main__":
    run()
