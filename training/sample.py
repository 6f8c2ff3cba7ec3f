"""Sample text from a model during training."""

from typing import TYPE_CHECKING

import torch

from models.build import build_model
from models.lm import LM
from models.sampling import DEFAULT, characters

if TYPE_CHECKING:
    from training.trainer import Trainer

PROMPT = 16  # characters of the training text that a sample continues
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def sample(trainer: "Trainer") -> str | None:
    """Return the first characters of the training text and what the model writes after them.

    If the model is sharded, all processes must call this function, and all but the first return None.
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
    """Return a model that holds all weights, because a sharded model cannot write text character by character.

    A sharded model is gathered into a copy on the first process. Until the sample is written, the copy takes memory in
    addition to the shard. The other processes return None.
    """
    if not trainer.sharded:
        return trainer.model
    weights = trainer.processes.gather(trainer.model.state_dict())
    if not trainer.processes.first:
        return None
    with torch.device("meta"):  # allocates no memory: load_state_dict assigns all tensors
        model = build_model(trainer.cfg, len(trainer.corpus.vocabulary))
    model.load_state_dict({name: value.to(trainer.device) for name, value in weights.items()}, assign=True)
    return model
