"""Early stopping: decide when to end a run whose held-out loss no longer falls, and keep its best weights."""

import math

from torch import Tensor, nn

from training.distributed import Processes, load_model


class EarlyStopping:
    """Keep a copy of the weights at the evaluation with the lowest held-out loss.

    Training is over when `patience` evaluations in a row, one every `every` steps, have found no lower loss (Prechelt
    1998, "Early Stopping - But When?"). With patience None, no weights are kept and training never ends early.
    """

    def __init__(self, patience: int | None, every: int):
        self.patience, self.every = patience, every
        self.step, self.loss = 0, math.inf  # those of the best evaluation
        self.weights: dict[str, Tensor] = {}  # if the model is sharded, only the part of this process

    def update(self, step: int, loss: float, model: nn.Module, processes: Processes) -> None:
        """Keep the weights in every process if in one of them `loss` is lower than all losses before.

        A process that does not evaluate must pass inf. With patience None, do nothing.
        """
        if self.patience is not None and processes.maximum(int(loss < self.loss)):
            self.keep(step, loss, model)

    def keep(self, step: int, loss: float, model: nn.Module) -> None:
        self.step, self.loss = step, loss
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def is_over(self, step: int) -> bool:
        """Return whether, after `step`, `patience` evaluations have followed the best one."""
        return self.patience is not None and step - self.step >= self.patience * self.every

    def load_best(self, model: nn.Module, step: int, last: int) -> None:
        """Load the best weights and print their step. Training has ended after `step` of `last` steps."""
        if step < last:
            where = f"after step {step} of {last}"
            print(
                f"training ends {where}: no lower held-out loss in train.patience={self.patience} evaluations",
                flush=True,
            )
        model.load_state_dict(self.weights)
        print(f"the run keeps the weights of step {self.step}, whose held-out loss is the lowest", flush=True)

    def state(self, processes: Processes) -> dict:
        """Return the best evaluation and its weights, as part of a run's state; {} if there was none."""
        if not self.weights:
            return {}
        return {"best": {"step": self.step, "loss": self.loss, "weights": processes.gather(self.weights)}}

    def restore(self, state: dict, model: nn.Module) -> None:
        """Restore the best evaluation from a run's state. The weights of `model` are overwritten."""
        if best := state.get("best"):
            load_model(model, best["weights"])  # this shards the weights if the model is sharded
            self.keep(best["step"], best["loss"], model)
