"""What a model writes while it is trained."""

from typing import TYPE_CHECKING

import torch

from models.build import build_model
from models.lm import LM
from models.sampling import DEFAULT, characters

if TYPE_CHECKING:
    from training.trainer import Trainer

PROMPT = 16  # characters of the training text that a sample goes on from
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def sample(trainer: "Trainer") -> str | None:
    """Return the first characters of the training text and what the model writes after them.

    None in all processes but the first; all of them call it.
    """
    model = whole_model(trainer)
    if model is None:
        return None
    corpus, context = trainer.corpus, trainer.cfg.model.context
    prompt, length = corpus.training[:PROMPT].tolist(), trainer.cfg.evaluation.sample
    model.eval()
    drawn = characters(model, corpus.vocabulary, [prompt], length, DEFAULT, trainer.cfg.seed, context)
    text = "".join([*(corpus.vocabulary[i] or UNKNOWN for i in prompt), *(new for (new,) in drawn)])
    model.train()
    return text


def whole_model(trainer: "Trainer") -> LM | None:
    """Return the model without FSDP, which streaming needs; where it is sharded, None in all but the first process.

    All processes gather a sharded model into a copy in the first one, which holds it beside its own share until it
    has sampled.
    """
    if not trainer.sharded:
        return trainer.model
    weights = trainer.processes.gather(trainer.model.state_dict())
    if not trainer.processes.first:
        return None
    with torch.device("meta"):  # parameters without memory; what a model has besides is made as it runs
        model = build_model(trainer.cfg, len(trainer.corpus.vocabulary))
    model.load_state_dict({name: value.to(trainer.device) for name, value in weights.items()}, assign=True)
    return model
