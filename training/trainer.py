"""Train one model from its start or its last saved state, and write its record."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from omegaconf import DictConfig
from torch import Tensor

from data.batches import crops, place, spread_windows
from data.corpus import Corpus
from models.lm import LM, parameter_count
from training import checkpoint
from training.device import guess_hours, pick_compile
from training.distributed import Processes, training_loss
from training.divergence import all_finite, check_final, diverged
from training.early_stopping import EarlyStopping
from training.evaluation import curve_point, evaluate, final_text
from training.interruption import (
    PEER_DIED,
    Interrupted,
    exit_with_peers,
    peer_is_gone,
    raise_for_submitit,
    stop_signals,
    under_submitit,
)
from training.metrics import append_row, perplexity
from training.optimizer import learning_rate, optimizer_of, seed_step, update
from training.progress import Progress
from training.provenance import place_of, provenance
from training.record import Record
from training.sample import sample
from training.settings import last_step, readable
from training.summary import counted_costs, finish, write_summary
from training.wandb_mirror import Mirror


class Trainer:
    """Train a model, and hold everything that changes during training.

    `on_step`, if given, is called with the trainer before every step, also when a search for the first NaN repeats it.
    """

    def __init__(
        self,
        cfg: DictConfig,
        record: Record,
        corpus: Corpus,
        model: LM,
        device: torch.device,
        precision: str,
        processes: Processes,
        on_step: Callable[["Trainer"], None] | None = None,
    ):
        self.cfg, self.record, self.corpus, self.model = cfg, record, corpus, model
        self.device, self.precision, self.processes, self.on_step = device, precision, processes, on_step
        self.origin = provenance(device, cfg.job.command)
        # A run that continues with other code, on another device or with other threads appends to one of these lists.
        self.trained_by = [{"from_step": 0} | {key: self.origin[key] for key in ("commit", "dirty", "changes")}]
        self.devices_used = [{"from_step": 0} | place_of(self.origin)]
        self.threads_used = [{"from_step": 0, "threads": torch.get_num_threads()}]
        tokens = last_step(cfg) * cfg.train.batch * cfg.model.context
        self.hours = guess_hours(parameter_count(model), tokens, precision) if device.type == "cpu" else 0.0
        self.compiled = pick_compile(cfg.train.compile, device, self.hours)
        if self.compiled:
            torch.compiler.reset()  # otherwise earlier runs of this process count towards torch's compilation limit
        self.loss = training_loss(model, cfg.train.parallel, processes, device, self.compiled, cfg.model.context)
        self.optimizer = optimizer_of(model, cfg.optim, self.compiled)
        self.ids = place(corpus.training, device)
        self.costs = counted_costs(cfg, len(corpus.vocabulary)) if processes.first else {}
        self.text = final_text(corpus, cfg.model.context, cfg.evaluation.final_windows)
        self.curve_windows = {
            name: spread_windows(ids, cfg.model.context, cfg.evaluation.windows)
            for name, ids in (("fit", corpus.training), ("heldout", corpus.heldout))
            if len(ids)
        }
        self.step, self.seconds = 0, 0.0
        self.loss_sum, self.loss_count = torch.zeros((), device=device), 0  # since the last logged step
        self.early_stopping = EarlyStopping(cfg.train.patience, cfg.evaluation.every)
        self.received_signals: list[signal.Signals] = []  # signals that ask the run to stop

    def begin(self) -> None:
        """Begin the record of the run, or continue from the state in it."""
        continuing = self.processes.maximum(int(self.cfg.resume and self.record.state.exists()))
        with self.processes.together():
            if continuing:
                checkpoint.restore(self)
                self.record.summary.unlink(missing_ok=True)  # the status of a run that had stopped
            elif self.processes.first:
                self.record.start(self.cfg)
            if self.processes.first:  # also when a run continues: the files may have been lost
                self.record.save_text(self.corpus.vocabulary, self.text)
        after = f" after step {self.step}" if continuing else ""
        print(f"{'continuing' if continuing else 'training'} {self.record.folder}{after}", flush=True)

    def fit(self) -> dict | None:
        """Train, and return the summary in the first process. A signal raises Interrupted, except under submitit."""
        self.begin()
        if self.step == 0 and self.hours > 0.5:
            print(f"on a CPU this takes about {self.hours:.1f} hours; experiment=small takes a few minutes", flush=True)
        if under_submitit():
            with self.mirrored() as mirror:
                self.loop_under_submitit(mirror)
                return self.finish(mirror)
        # The first signal raises no exception before wandb has finished, so it does not interrupt wandb's start or end.
        with stop_signals() as self.received_signals, self.mirrored() as mirror:
            try:
                self.loop(mirror)
            except RuntimeError as error:
                if self.processes.count > 1 and peer_is_gone(error):
                    # The reason must be printed before torchrun ends this process.
                    raise exit_with_peers(PEER_DIED, self.processes.first) from error
                if not (self.received_signals and compiler_failed(error)):
                    raise
                mirror.finish(128 + self.received_signals[0])
                raise self.interrupted(self.received_signals[0], how_to_continue(self.cfg)) from error
            self.save()
            write_summary(self, "interrupted")  # the status until `finish` has written another
            cut = self.stopped()
            summary = None if cut else self.finish(mirror)
            if cut:
                mirror.finish(128 + cut)
        if stop := self.stopped():
            raise self.interrupted(stop, how_to_continue(self.cfg) if cut else "the run is finished")
        return summary

    @contextmanager
    def mirrored(self) -> Iterator[Mirror]:
        """Mirror the run in wandb during a block. wandb marks it as failed unless the block calls Mirror.finish(0)."""
        mirror = Mirror(self.cfg, readable(self.cfg) | {"parameters": parameter_count(self.model)}, self.record)
        try:
            yield mirror
        finally:
            mirror.finish(exit_code=1)

    def interrupted(self, number: int, advice: str) -> Interrupted:
        """Print the step after which a signal has stopped the run, and return the exception to raise."""
        where = f"{signal.Signals(number).name} after step {self.step} of {last_step(self.cfg)}"
        print(f"\nstopped by {where}; {advice}\nrecords: {self.record.folder}", flush=True)
        return Interrupted(128 + number)

    def stopped(self) -> int:
        """Return the largest number among the first signals of all processes, or 0 if none has received a signal."""
        return self.processes.maximum(int(self.received_signals[0]) if self.received_signals else 0)

    def loop_under_submitit(self, mirror: Mirror) -> None:
        """Train to the end, and pass signals on to submitit once the state is saved.

        Slurm sends SIGUSR2 before it ends the job, and submitit then queues the job again. Slurm may also send SIGTERM;
        submitit ignores it, and training continues.
        """
        while not self.done:
            with stop_signals(submitit=True) as self.received_signals:
                self.loop(mirror)
                self.save()
                write_summary(self, "interrupted")
            for number in dict.fromkeys(self.received_signals):
                print(f"{number.name} after step {self.step} of {last_step(self.cfg)}: the state is saved", flush=True)
                raise_for_submitit(number)

    @property
    def done(self) -> bool:
        """Whether the last step is done or early stopping has ended training."""
        return self.step >= last_step(self.cfg) or self.early_stopping.is_over(self.step)

    def loop(self, mirror: Mirror) -> None:
        """Train until the last step, early stopping or a signal, with logging, evaluations and checkpoints."""
        cfg, last, tokens = self.cfg, last_step(self.cfg), self.cfg.train.batch * self.cfg.model.context
        progress = Progress(self.step, last, shown=self.processes.first)
        if self.compiled and not self.done:
            progress.say("the first step compiles the model, which takes about a minute")
        self.model.train()
        saved = began = time.perf_counter()
        count = 0  # steps since `began`
        while not self.done and not self.stopped():
            loss, norm = self.take_step()
            self.loss_sum += loss
            self.loss_count += 1
            self.step += 1
            count += 1
            evaluating = self.step % cfg.evaluation.every == 0 or self.step == last
            logging = evaluating or self.step % cfg.train.log_every == 0
            if not (logging or progress.needs_rate()):
                progress.advance()
                continue
            mean = self.mean_loss()  # waits for the device
            taken = time.perf_counter() - began
            progress.advance(f"loss {mean:.3f}, perplexity {perplexity(mean):.1f}", count * tokens / taken)
            if not logging:
                continue
            self.seconds += taken
            row = self.row(mean, count * tokens / taken, norm) | (self.evaluated() if evaluating else {})
            if evaluating:
                progress.say(f"step {self.step}/{last}: {in_words(row)}")
                self.early_stopping.update(self.step, row.get("heldout_loss", math.inf), self.model, self.processes)
            if self.processes.first:
                append_row(self.record.metrics, row)
                mirror.log(row)
            due = time.perf_counter() - saved > cfg.train.checkpoint_seconds and not self.done
            if self.processes.maximum(int(due)):
                self.save()
                saved = time.perf_counter()
            began, count = time.perf_counter(), 0
        progress.close()
        if count:
            self.seconds += time.perf_counter() - began

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return this process's share of the inputs and targets of the next step, [B / processes, T] each."""
        cfg = self.cfg
        cut = crops(self.ids, cfg.model.context, cfg.train.batch, cfg.seed, self.step, self.corpus.row_length)
        return tuple(self.processes.share(ids).to(self.device) for ids in cut)

    def take_step(self) -> tuple[Tensor, Tensor | None]:
        """Take the next step. Return its loss and, if gradients are clipped, their norm before clipping, else None."""
        if self.on_step is not None:
            self.on_step(self)
        seed_step(self.cfg, self.step, self.processes.rank)
        train, optim, batch = self.cfg.train, self.cfg.optim, self.batch()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, train.steps, optim)
        return update(self.loss, self.optimizer, *batch, self.device, self.precision, train.accumulate, optim.clip)

    def mean_loss(self) -> float:
        """Return the mean loss since the last logged step. Raises UserError if its perplexity is not finite."""
        mean = self.processes.average(self.loss_sum / self.loss_count).item()
        if not math.isfinite(perplexity(mean)):
            raise diverged(self, mean)
        return mean

    def row(self, mean: float, rate: float, norm: Tensor | None) -> dict:
        """Return the row of metrics.jsonl for this step, and reset the mean loss. `rate` is in characters/s."""
        self.loss_sum.zero_()
        self.loss_count = 0
        row = {
            "step": self.step,
            "tokens": self.step * self.cfg.train.batch * self.cfg.model.context,
            "seconds": round(self.seconds, 3),
            "loss": mean,
            "perplexity": perplexity(mean),
            "lr": learning_rate(self.step - 1, self.cfg.train.steps, self.cfg.optim),
            "tokens_per_second": round(rate, 1),
        }
        if norm is None:
            return row
        if not norm.isfinite():
            raise diverged(self, math.nan)
        return row | {"gradient_norm": float(norm)}  # the norm of the last step's gradient before clipping

    def evaluated(self) -> dict:
        """Return figures on windows of each text, and a sample if the config asks for one; {} if not self.evaluates."""
        if not self.evaluates:
            return {}
        point = curve_point(self.model, self.curve_windows, self.device, self.text.get("keys"))
        losses = [value for key, value in point.items() if key.endswith("loss")]
        if not all(math.isfinite(perplexity(value)) for value in losses):
            raise diverged(self, *losses)
        return point | ({"sample": sample(self)} if self.cfg.evaluation.sample else {})

    @property
    def sharded(self) -> bool:
        """Whether the weights are sharded, so that no process has the whole model."""
        return self.processes.count > 1 and self.cfg.train.parallel == "fsdp"

    @property
    def evaluates(self) -> bool:
        """Whether this rank takes part in evaluation: rank 0 does, and every rank if the model is sharded."""
        return self.processes.first or self.sharded

    def save(self) -> None:
        """Save the state. Raises UserError, and keeps the last state, if a weight is not finite."""
        if self.processes.maximum(int(not all_finite(self.model))):
            raise diverged(self, math.nan)
        checkpoint.save(self)

    def finish(self, mirror: Mirror) -> dict | None:
        """Evaluate the trained model, write the final files, and return the summary; None in ranks other than 0."""
        result = {}
        if self.early_stopping.weights:
            self.early_stopping.load_best(self.model, self.step, last_step(self.cfg))
        if self.evaluates:
            size = sum(self.text[name].numel() for name in self.curve_windows)
            print(f"evaluating on {size:,} characters", flush=True)
            result = evaluate(self.model, self.text, self.cfg.model.context, self.cfg.evaluation.stride, self.device)
            check_final(self, result)
        weights = self.processes.gather(self.model.state_dict())
        return finish(self, result, weights, mirror) if self.processes.first else None


def in_words(row: dict) -> str:
    """Return the perplexities and accuracies of the evaluation in a row of metrics.jsonl, as text."""
    parts = []
    for figure, digits in (("perplexity", 2), ("accuracy", 4)):
        values = {name: row.get(f"{key}_{figure}") for key, name in (("fit", "fit"), ("heldout", "held-out"))}
        shown = [f"{name} {value:.{digits}f}" for name, value in values.items() if value is not None]
        parts += [f"{figure} {', '.join(shown)}"] if shown else []
    return "; ".join(parts)


def compiler_failed(error: RuntimeError) -> bool:
    """Return whether torch.compile raised the error, as it does when Ctrl-C also ends the C++ compiler."""
    from torch._dynamo.exc import BackendCompilerFailed  # imported here because this takes a second

    return isinstance(error, BackendCompilerFailed)


def how_to_continue(cfg: DictConfig, command: str = "the same command") -> str:
    return f"{command} {'' if cfg.resume else 'without resume=false '}continues the run"
