"""Check that a model is causal before it is trained. A model that sees the next character would seem to be the best."""

import torch

from data.files import UserError
from models.lm import LM

LONGEST = 256  # characters of the texts that are compared
TOLERANCE = 1e-5  # relative to the largest logit; rounding errors are about 1e-7


@torch.no_grad()
def check_causal(model: LM, name: str, context: int, vocabulary: int) -> None:
    """Raise UserError if replacing the second half of a random text changes the logits in its first half.

    The check misses a leak that has no effect yet, such as one in front of weights that start at 0; `pytest -k NAME`
    tests each attention for leaks of any size. `name` is the attention's name, for the message.
    """
    T = min(context, LONGEST)
    half = (T - 1) // 4 * 2 + 1 if T > 1 else 0  # odd, so that a leak within chunks of positions crosses it
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    one = torch.randint(vocabulary, (1, T), generator=generator)
    other = torch.cat([one[:, :half], torch.randint(vocabulary, (1, T - half), generator=generator)], dim=1)
    training = model.training
    first, second = (model.eval()(ids.to(device))[:, :half] for ids in (one, other))
    model.train(training)
    if half and (first - second).abs().max() > TOLERANCE * first.abs().max():
        raise UserError(
            f"attn={name} is not causal: outputs before position {half} depend on inputs from there on; "
            f"python -m pytest -k {name} shows where"
        )
