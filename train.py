"""python train.py attn=aft: train one language model; python train.py --help lists what can be set.

torchrun --nproc-per-node=2 train.py attn=aft: the same run, by two processes.
"""

import itertools
import math
import os
import shutil
import signal
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import configs.startup

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from configs.cli import Result, check_at_least, check_seed, circumstance, flat, main
from configs.signals import Interrupted, hand_on, stop_signals, under_submitit
from data.batches import check_length, crops, evaluation_text, place, spread_windows
from data.corpus import Corpus, load
from data.examine import hash_of
from data.files import UserError, out_of_memory, write_json
from data.record import Record, code, provenance
from models.build import build_model
from models.costs import state_bytes, training_flops
from models.lm import LM, parameter_count
from models.sampling import Sampler, characters
from training.device import autocast, keep_freed_memory, pick_device, pick_precision
from training.distributed import (
    KINDS,
    PeerFailed,
    Processes,
    leave,
    load_model,
    load_optimizer,
    peer_is_gone,
    training_loss,
    unsynchronised,
)
from training.divergence import all_finite, first_not_finite
from training.evaluation import evaluate, perplexity, report, score
from training.loading import config_of
from training.optimizer import learning_rate, optimizer_of
from training.progress import Progress
from training.runs import print_runs
from training.wandb_mirror import Mirror

CPU_RATE = {"float32": 1.5e11, "bf16": 4e11}  # floating-point operations a second, for a first guess of hours
COMPILE_HOURS = 0.1  # of training that earn the minute of compiling back
MARGIN = 1.0  # nats a character by which a run that ends worse than guessing has diverged
RATES = 10_000  # logged rows, the last of a run, whose median is its speed
PROMPT = 16  # characters of the text that samples go on from
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
PEER_DIED = "another process of this run died: see what it said"


def train(cfg: DictConfig) -> dict | None:
    """Train the model that `cfg` describes and return its summary.

    The record lies in <runs>/<experiment>/<name>. A finished run is not run again, and one that
    holds a state is continued. With train.steps=0 the model is described, nothing is written,
    and None comes back. Of several processes the first one writes the record and has the summary.

    Errors: UserError for a config that makes no sense, a text that cannot be had or is too short,
    a damaged or foreign state, a full disk, too little memory, a loss that diverges; Interrupted after
    SIGINT, SIGTERM or SIGHUP, with the state saved; SystemExit when another process has failed.
    """
    keep_freed_memory()
    try:
        processes = Processes()
    except torch.distributed.DistNetworkError as error:
        raise UserError(f"the processes of this run cannot meet: {error}") from error
    try:
        return train_with(processes, cfg)
    except PeerFailed as error:
        end = end_with_the_others(str(error), processes)
    except RuntimeError as error:
        if not (processes.count > 1 and peer_is_gone(error)):
            raise
        end = end_with_the_others(PEER_DIED, processes)
    except EndWithTheOthers as error:
        end = error
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun ends those that are left
    raise end


class EndWithTheOthers(SystemExit):
    """How a process ends that has done nothing wrong itself."""


def end_with_the_others(message: str, processes: Processes) -> EndWithTheOthers:
    """How it ends; the first process says why."""
    if processes.first:
        print(f"error: {message}", file=sys.stderr, flush=True)
    return EndWithTheOthers(1)


def train_with(processes: Processes, cfg: DictConfig) -> dict | None:
    with processes.together():
        check(cfg, processes.count)
        if "SLURM_RESTART_COUNT" in os.environ:  # Slurm queued the job again, to go on with what it began
            cfg.resume = True
        if not processes.first:
            cfg.wandb.mode = "disabled"  # the first one mirrors
        device = own_device(cfg.train.device, processes)
        precision, reason = pick_precision(cfg.train.precision, device)
        if cfg.attn.get("impl") == "triton" and device.type == "cpu" and "TRITON_INTERPRET" not in os.environ:
            raise UserError("attn.impl=triton needs a GPU: take attn.impl=torch")
    corpus = processes.in_turn(lambda: load(cfg.data))
    with processes.together():
        check_length(len(corpus.training), len(corpus.heldout), cfg.model.context)
        torch.manual_seed(cfg.seed)
        model = build_model(cfg, len(corpus.vocabulary)).to(device)
        record = Record.of(cfg)
        summary = record.finished() if cfg.resume and cfg.train.steps else None
        if summary is not None and summary["data"]["sha256"] != corpus.sha256:
            raise UserError(f"{record.folder} was trained on another text: resume=false trains it anew")
        if summary is not None and (differs := differing(config_of(record), cfg)):
            raise UserError(f"{record.folder} was trained with another {differs[0]}: resume=false trains it anew")
        if cfg.resume and cfg.train.steps and summary is None and record.without_weights():
            raise UserError(f"{record.folder} is a finished run without its weights: resume=false trains it anew")

    parameters = parameter_count(model)
    several = f", {processes.count} processes ({cfg.train.parallel})" if processes.count > 1 else ""
    how = f"impl {implementation(cfg, model)}, on {device}, {precision} ({reason}){several}"
    print(f"{cfg.job.attn}: {parameters:,} parameters, {how}", flush=True)
    if cfg.model.layers == 1 and cfg.attn.get("carry", "none") != "none":
        print("with one layer there is none to carry from: model.layers=2 or more makes a difference", flush=True)
    if cfg.train.steps == 0:
        return None
    if summary is not None:
        if processes.first:
            record.tidy()
        same = "earlier_code" not in summary and all(summary.get(key) == value for key, value in code().items())
        note = "" if same else " by other code than this (resume=false trains it anew)"
        print(f"finished before{note}: {headline(summary)}, {record.folder}")
        return summary
    with ExitStack() as held:
        with processes.together():
            if processes.first:
                held.enter_context(record.alone())
            if cfg.resume and record.finished() is not None:
                raise UserError(f"{record.folder} was finished by another process a moment ago")
        try:
            return Run(cfg, record, corpus, model, device, precision, processes).go()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise UserError(
                f"there is not enough memory for this run: train.accumulate={2 * cfg.train.accumulate} and "
                "model.checkpointing=true need less, and so does a smaller model; the same command continues it"
            ) from error


def implementation(cfg: DictConfig, model: LM) -> str:
    """attn.impl, and where it leaves a choice to measured rules, what they choose at this context."""
    impl = str(cfg.attn.get("impl"))
    algorithms = model.algorithms(cfg.model.context)
    return f"{impl} ({', '.join(sorted(algorithms))})" if impl == "torch" and algorithms else impl


def own_device(wish: str, processes: Processes) -> torch.device:
    """This process's device: of several processes each has a GPU of its own."""
    device = pick_device(wish)
    if processes.count == 1 or device.type == "cpu":
        return device
    if device.index is not None:
        raise UserError(f"train.device={wish} is one GPU for {processes.count} processes: take train.device=cuda")
    return pick_device(f"cuda:{processes.local_rank}")


class Run:
    """One training run, from its start or its last state to its summary."""

    def __init__(
        self,
        cfg: DictConfig,
        record: Record,
        corpus: Corpus,
        model: LM,
        device: torch.device,
        precision: str,
        processes: Processes,
    ):
        self.cfg, self.record, self.corpus, self.model = cfg, record, corpus, model
        self.device, self.precision, self.processes = device, precision, processes
        self.origin = provenance(device, cfg.job.command)
        self.trained_by = [
            {"from_step": 0} | {key: self.origin[key] for key in ("commit", "dirty", "changes")}
        ]  # one more wherever other code went on
        self.threads_used = [{"from_step": 0, "threads": torch.get_num_threads()}]  # likewise
        self.hours = hours_on_a_cpu(cfg, model, precision) if device.type == "cpu" else 0.0
        self.compiled = pick_compile(cfg.train.compile, device, self.hours)
        if self.compiled:
            torch.compiler.reset()  # a sweep's earlier runs count towards torch's limit of compilations
        self.loss = training_loss(model, cfg.train.parallel, processes, device, self.compiled, cfg.model.context)
        self.optimizer = optimizer_of(model, cfg.optim, self.compiled)
        self.ids = place(corpus.training, device)
        self.costs = counted_costs(cfg, len(corpus.vocabulary)) if processes.first else {}
        self.text = self.cut_text()
        self.curve_windows = {
            name: spread_windows(ids, cfg.model.context, cfg.evaluation.windows)
            for name, ids in (("fit", corpus.training), ("heldout", corpus.heldout))
            if len(ids)
        }
        self.step, self.seconds = 0, 0.0
        self.loss_sum, self.loss_count = torch.zeros((), device=device), 0
        self.came: list[signal.Signals] = []  # the signals that ask it to stop

        going_on = processes.agree(int(cfg.resume and record.state.exists()))
        with processes.together():
            if going_on:
                self.restore()
            elif processes.first:
                record.start(cfg)
            if processes.first:  # anew where a run goes on too: then they are there, and whole
                record.save_text(corpus.vocabulary, self.text)
        where = f"continuing {record.folder} after step {self.step}" if going_on else f"training {record.folder}"
        print(where, flush=True)

    def cut_text(self) -> dict[str, Tensor]:
        """What is measured at the end: all of both texts, but of long ones evaluation.final_windows windows."""
        corpus, context, count = self.corpus, self.cfg.model.context, self.cfg.evaluation.final_windows
        text = {"fit": evaluation_text(corpus.training, context, count)}
        if corpus.heldout_size:
            text["heldout"] = torch.from_numpy(np.array(corpus.heldout[: count * context + 1]))
        return text | {"utf8_bytes": torch.from_numpy(corpus.utf8_bytes())}

    def go(self) -> dict:
        if self.step == 0:
            self.warn_of_hours()
        if under_submitit():
            with self.mirrored() as mirror:
                self.loop_under_submitit(mirror)
                return self.finish(mirror)
        with stop_signals() as self.came, self.mirrored() as mirror:  # wandb neither begins nor ends by half
            try:
                self.loop(mirror)
            except RuntimeError as error:
                if self.processes.count > 1 and peer_is_gone(error):  # said before torchrun's SIGTERM counts again
                    raise end_with_the_others(PEER_DIED, self.processes) from error
                if not (self.came and compiler_failed(error)):
                    raise
                mirror.finish(128 + self.came[0])
                raise self.interrupted(self.came[0], "the same command continues it") from error
            self.save()
            self.write_summary({"status": "interrupted"})  # until it is finished
            cut = self.stopped()
            summary = None if cut else self.finish(mirror)
            if cut:
                mirror.finish(128 + cut)
        stop = self.stopped()
        if stop:
            raise self.interrupted(stop, "the same command continues it" if cut else "the run is finished")
        return summary

    @contextmanager
    def mirrored(self):
        """The run's mirror, which says that it failed unless it was finished."""
        mirror = Mirror(self.cfg, readable(self.cfg) | {"parameters": parameter_count(self.model)}, self.record)
        try:
            yield mirror
        finally:
            mirror.finish(exit_code=1)

    def interrupted(self, number: int, what: str) -> "Interrupted":
        """How the run ends after a signal; says so, and what is to be done."""
        where = f"after step {self.step} of {last_step(self.cfg)}"
        print(f"\nstopped by {signal.Signals(number).name} {where}; {what}", flush=True)
        print(f"records: {self.record.folder}", flush=True)
        return Interrupted(128 + number)

    def stopped(self) -> int:
        """The signal that came to any of the processes, or 0: all of them stop at the same step."""
        return self.processes.agree(int(self.came[0]) if self.came else 0)

    def loop_under_submitit(self, mirror: Mirror) -> None:
        """The loop, which hands signals on to submitit once the state is saved.

        SIGUSR2 comes before Slurm ends the job: submitit queues it again and exits, and the run goes on from
        here. Of SIGTERM, which may come first, or alone where Slurm queues the job again itself, submitit makes
        nothing, and the loop goes on until SIGUSR2 or SIGKILL.
        """
        while self.step < last_step(self.cfg):
            with stop_signals(submitit=True) as self.came:
                self.loop(mirror)
                self.save()
                self.write_summary({"status": "interrupted"})
            for number in dict.fromkeys(self.came):
                print(f"{number.name} after step {self.step} of {last_step(self.cfg)}: the state is saved", flush=True)
                hand_on(number)

    def loop(self, mirror: Mirror) -> None:
        cfg, model, context = self.cfg, self.model, self.cfg.model.context
        last, every = last_step(cfg), cfg.train.log_every
        progress = Progress(self.step, last, cfg.train.batch * context, shown=self.processes.first)
        model.train()
        saved = began = time.perf_counter()
        count = 0  # steps since `began`
        while self.step < last and not self.stopped():
            loss, norm = self.take_step()
            self.loss_sum += loss
            self.loss_count += 1
            self.step += 1
            count += 1

            evaluating = self.step % cfg.evaluation.every == 0 or self.step == last
            logging = self.step % every == 0 or self.step == last
            if not (evaluating or logging or progress.needs_rate()):
                progress.advance()
                continue
            mean = self.processes.average(self.loss_sum / self.loss_count).item()  # waits for the device
            if not math.isfinite(perplexity(mean)):
                raise self.diverged(mean)
            taken = time.perf_counter() - began
            rate = count * cfg.train.batch * context / taken
            progress.advance(f"loss {mean:.3f}, perplexity {perplexity(mean):.1f}", rate)
            if not (evaluating or logging):
                continue
            self.seconds += taken
            row = {
                "step": self.step,
                "tokens": self.step * cfg.train.batch * context,
                "seconds": round(self.seconds, 3),
            }
            lr = learning_rate(self.step - 1, cfg.train.steps, cfg.optim)
            row |= {"loss": mean, "perplexity": perplexity(mean), "lr": lr, "tokens_per_second": round(rate, 1)}
            if norm is not None:
                row["gradient_norm"] = float(norm)  # of the last step, before it was clipped
                if not math.isfinite(row["gradient_norm"]):
                    raise self.diverged(math.nan)
            self.loss_sum.zero_()
            self.loss_count = 0
            if evaluating and self.evaluates:
                row |= self.curve_point()
                losses = [value for key, value in row.items() if key.endswith("loss")]
                if not all(math.isfinite(perplexity(value)) for value in losses):
                    raise self.diverged(*losses)
                if cfg.evaluation.sample:
                    row["sample"] = self.sample()
            if self.processes.first:
                self.record.log(row)
                mirror.log(row)
            due = time.perf_counter() - saved > cfg.train.checkpoint_seconds and self.step < last
            if self.processes.agree(int(due)):
                self.save()
                saved = time.perf_counter()
            began, count = time.perf_counter(), 0
        progress.close()
        if count:
            self.seconds += time.perf_counter() - began

    def batch(self) -> tuple[Tensor, Tensor]:
        """This process's share of the next step's inputs and targets."""
        cfg = self.cfg
        cut = crops(self.ids, cfg.model.context, cfg.train.batch, cfg.seed, self.step)
        return tuple(self.processes.share(ids).to(self.device) for ids in cut)

    def take_step(self) -> tuple[Tensor, Tensor | None]:
        """The next step: its loss, and the norm of its gradient where that is clipped."""
        cfg = self.cfg
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, cfg.train.steps, cfg.optim)
        inputs, targets = self.batch()
        return update(
            self.loss,
            self.optimizer,
            inputs,
            targets,
            self.device,
            self.precision,
            cfg.train.accumulate,
            cfg.optim.clip,
        )

    def diverged(self, *losses: float) -> UserError:
        """The error that ends a run in which a loss is not finite, or far above that of a guess; its state stays.

        Where a loss is not finite, one process takes the steps since that state again, to see where it began, until
        a signal comes.
        """
        self.write_summary({"status": "diverged"})
        advice = "try a lower optim.lr, optim.warm_up=500 or optim.clip=1.0"
        reached, where = self.step, "it"
        if all(map(math.isfinite, losses)):
            return UserError(
                f"the run has diverged: after step {reached} the loss is {max(losses):.4g}, where guessing gives "
                f"{self.loss_of_a_guess:.4g}, at optim.lr={self.cfg.optim.lr:g}; {advice}"
            )
        if self.processes.count == 1:
            print(f"the loss is not finite after step {reached}: looking for where that began", flush=True)
            self.rewind()
            start, wrong = self.step, self.first_wrong_step(reached)
            good = self.step if self.came else start  # as far as it came
            where = f"{wrong} at step {self.step + 1}" if wrong else f"it between steps {good} and {reached}"
        lr = learning_rate(min(self.step, reached - 1), self.cfg.train.steps, self.cfg.optim)
        last = f"its last good state stays in {self.record.folder}; " if self.record.state.exists() else ""
        return UserError(
            f"the loss is not finite after step {reached}: {where} became inf or NaN, at a learning rate of {lr:.2g}; "
            f"{last}{advice}"
        )

    @property
    def loss_of_a_guess(self) -> float:
        """The loss, in nats a character, of a model that gives all symbols the same probability."""
        return math.log(len(self.corpus.vocabulary))

    def rewind(self) -> None:
        """Back to the last state, or to the start."""
        if self.record.state.exists():
            return self.restore()
        torch.manual_seed(self.cfg.seed)
        fresh = build_model(self.cfg, len(self.corpus.vocabulary))
        self.model.load_state_dict(fresh.state_dict())
        self.optimizer = optimizer_of(self.model, self.cfg.optim, self.compiled)
        self.step = 0

    def first_wrong_step(self, reached: int) -> str | None:
        """What is the first not to be finite before step `reached` ends; stays before the step where that is."""
        while self.step < reached and not self.came:
            before = {name: value.clone() for name, value in self.model.state_dict().items()}
            loss, _ = self.take_step()
            if not (loss.isfinite() and all_finite(self.model)):
                self.model.load_state_dict(before)
                parts = zip(*(ids.chunk(self.cfg.train.accumulate) for ids in self.batch()), strict=True)
                with autocast(self.device, self.precision):
                    found = (first_not_finite(self.model, self.model.loss, *part) for part in parts)
                    return next(filter(None, found), "a weight")
            self.step += 1
        return None

    @property
    def sharded(self) -> bool:
        """Whether no process has the whole model."""
        return self.processes.count > 1 and self.cfg.train.parallel == "fsdp"

    @property
    def evaluates(self) -> bool:
        """The first process does; all do with a sharded model, whose forward pass gathers the weights."""
        return self.processes.first or self.sharded

    def curve_point(self) -> dict:
        """Perplexity on a few fixed windows of each text."""
        point = {}
        for name, windows in self.curve_windows.items():
            result = score(self.model, windows, None, self.device)
            point |= {f"{name}_loss": result["loss"], f"{name}_perplexity": result["perplexity"]}
        return point

    def best_heldout(self) -> dict | None:
        """The evaluation during training at which the held-out loss was lowest, beside the last one.

        None where no text is held out, or a power cut took all the rows.
        """
        if "heldout" not in self.curve_windows:
            return None
        best = last = None
        for last in self.record.each_row(having="heldout_loss"):
            if best is None or last["heldout_loss"] < best["heldout_loss"]:
                best = last
        if best is None:
            return None
        return {
            "step": best["step"],
            "loss": best["heldout_loss"],
            "perplexity": best["heldout_perplexity"],
            "last_perplexity": last["heldout_perplexity"],
            "characters": self.curve_windows["heldout"][:, 1:].numel(),
        }

    def sample(self) -> str | None:
        """What the model writes after the first characters of the training text; None in all but the first process."""
        model = self.plain_model()
        if model is None:
            return None
        prompt, length = self.corpus.training[:PROMPT].tolist(), self.cfg.evaluation.sample
        vocabulary, context = self.corpus.vocabulary, self.cfg.model.context
        drawn = characters(model, vocabulary, [prompt], length, Sampler(top_a=0.02), self.cfg.seed, context)
        return "".join([*(vocabulary[i] or UNKNOWN for i in prompt), *(new for (new,) in drawn)])

    def plain_model(self) -> LM | None:
        """The model as streaming wants it, which has no part in FSDP.

        A sharded one is gathered by all into a copy that the first process alone has: for as long as it
        samples, it holds the whole model beside its share.
        """
        if not self.sharded:
            return self.model
        weights = self.processes.whole(self.model.state_dict())
        if not self.processes.first:
            return None
        with torch.device("meta"):  # parameters without memory; what a model has besides is made as it runs
            model = build_model(self.cfg, len(self.corpus.vocabulary))
        model.load_state_dict({name: value.to(self.device) for name, value in weights.items()}, assign=True)
        return model

    def warn_of_hours(self) -> None:
        """On a CPU, say before the first step when this will take hours."""
        if self.hours > 0.5:
            print(f"on a CPU this takes about {self.hours:.1f} hours; experiment=small takes a minute", flush=True)

    def save(self) -> None:
        """The same state whatever the number of processes, so that any number continues it; a good one stays."""
        if self.processes.agree(int(not all_finite(self.model))):
            raise self.diverged(math.nan)
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "loss_sum": self.processes.average(self.loss_sum),
            "loss_count": self.loss_count,
            "model": self.processes.whole(self.model.state_dict()),
            "optimizer": self.processes.whole(self.optimizer.state_dict()),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "data": self.corpus.sha256,
            "precision": self.precision,
            "threads_used": self.threads_used,
            "trained_by": self.trained_by,
        }
        if self.processes.first:
            self.record.save_state(state)

    def restore(self) -> None:
        differs = differing(config_of(self.record), self.cfg)
        if differs:
            raise UserError(f"{self.record.folder} was begun with another {differs[0]}: resume=false starts it again")
        state = self.record.load_state()
        if state["data"] != self.corpus.sha256:
            raise UserError(f"{self.record.folder} was begun on another text: resume=false starts it again")
        if not 0 <= state["step"] <= self.cfg.train.steps:
            raise UserError(f"{self.record.state} is damaged, it is of step {state['step']}: resume=false starts again")
        try:
            load_model(self.model, state["model"])
            load_optimizer(self.optimizer, state["optimizer"])
            torch.set_rng_state(state["rng"])
            self.loss_sum.copy_(state["loss_sum"])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.record.state} is of another model: resume=false starts the run again") from error
        if state["cuda_rng"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)
        self.step, self.seconds = state["step"], state["seconds"]
        begun_in = state.get("precision", self.precision)  # absent from the state of an older version
        if begun_in != self.precision:  # train.precision=auto, on a machine of another kind
            print(f"this run was begun in {begun_in}, and continues in it", flush=True)
            self.precision = begun_in
        self.say_what_changed(state)
        self.loss_count = state["loss_count"]

    def say_what_changed(self, state: dict) -> None:
        """Of a run that goes on: other code and another number of threads; both are kept for the summary."""
        threads = torch.get_num_threads()
        used = [one for one in state.get("threads_used", []) if one["from_step"] < self.step]
        changed = bool(used) and used[-1]["threads"] != threads
        if used:
            self.threads_used = [*used, {"from_step": self.step, "threads": threads}] if changed else used
        if changed and self.device.type == "cpu":
            until_now = " then ".join(str(one["threads"]) for one in used)
            advice = f", unless OMP_NUM_THREADS={until_now} is set" if len(used) == 1 else ""
            print(
                f"it was trained with {until_now} threads and goes on with {threads}: the weights will differ in "
                f"their last bits from those of a run in one go{advice}",
                flush=True,
            )
        before, (now,) = state.get("trained_by", []), self.trained_by[-1:]
        if before and before[-1] == now | {"from_step": before[-1]["from_step"]}:
            self.trained_by = before
        elif before:
            print(f"it goes on by other code than that of commit {before[-1]['commit']}: both are recorded", flush=True)
            self.trained_by = [*before, now | {"from_step": self.step}]

    def finish(self, mirror: Mirror) -> dict | None:
        context, stride = self.cfg.model.context, self.cfg.evaluation.stride
        if self.evaluates:
            size = sum(self.text[name].numel() for name in self.curve_windows)
            print(f"evaluating on {size:,} characters", flush=True)
            result = evaluate(self.model, self.text, context, stride, self.device)
            if not result["fit"]["loss"] < self.loss_of_a_guess + MARGIN:
                raise self.diverged(result["fit"]["loss"])
        weights = self.processes.whole(self.model.state_dict())
        if not self.processes.first:
            return None
        sha256 = self.record.save_model(weights)
        hashes = {"weights_sha256": sha256} | {
            f"{path.stem}_sha256": hash_of(path) for path in (self.record.vocabulary, self.record.text)
        }
        f = weights.get("blocks.0.attn.time.f")  # of the first layer; the logarithm where w is kept positive
        if f is not None:
            self.record.save_f(f.double().exp() if self.cfg.attn.time.positive else f)
        if best := self.best_heldout():
            result["heldout_best"] = best
        write_json(self.record.positions, result.pop("loss_by_position"))
        summary = self.summary({"status": "finished", "evaluation": result, **self.costs, **hashes})
        mirror.summarise(
            {
                f"{text}_{key}": figures[key]
                for text, figures in result.items()
                if isinstance(figures, dict)
                for key in ("perplexity", "bits_per_character", "bits_per_byte", "step")
                if key in figures
            }
            | {key: summary[key] for key in ("tokens_per_second", "parameters", "flops_per_step", "state_bytes")}
        )
        mirror.finish(exit_code=0)  # before the record says so: killed in between, the run is mirrored anew
        self.record.save_summary(summary)
        self.record.state.unlink(missing_ok=True)
        print(report(f"\n{self.cfg.job.experiment}/{self.cfg.job.name}", result, summary["parameters"]))
        if summary["tokens_per_second"]:
            print(f"{'training tokens/s':22}{summary['tokens_per_second']:10,.0f}")
        print(f"{'training FLOPs/step':22}{summary['flops_per_step']:10.3g}")
        print(f"{'streaming state, bytes':22}{summary['state_bytes']:10,}")
        print(f"records: {self.record.folder}", flush=True)
        return summary

    def write_summary(self, outcome: dict) -> None:
        if self.processes.first:
            self.record.save_summary(self.summary(outcome))

    def summary(self, outcome: dict) -> dict:
        rows = self.record.rows(last=RATES + 1)
        # The first interval holds the warm-up.
        rates = [row["tokens_per_second"] for row in rows[1:]]
        tokens = self.step * self.cfg.train.batch * self.cfg.model.context
        on_cpu = self.device.type == "cpu"
        return {
            "experiment": self.cfg.job.experiment,
            "name": self.cfg.job.name,
            "attn": self.cfg.job.attn,
            "seed": self.cfg.seed,
            "lr": self.cfg.optim.lr,
            "steps": self.step,
            "tokens": tokens,
            "parameters": parameter_count(self.model),
            "tokens_per_second": statistics.median(rates) if rates else None,
            "training_seconds": round(self.seconds, 1),
            "precision": self.precision,
            "compiled": self.compiled,
            "processes": self.processes.count,
            "data": self.corpus.summary(),
            **outcome,
            **self.origin,
            **({"earlier_code": self.trained_by[:-1]} if len(self.trained_by) > 1 else {}),
            **({"earlier_threads": self.threads_used[:-1]} if on_cpu and len(self.threads_used) > 1 else {}),
        }


def update(
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    device: torch.device,
    precision: str,
    accumulate: int = 1,
    clip: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One step: forward and backward of each of `accumulate` parts of the batch, optimiser.

    `clip` is the most that the norm of the gradient may be. Returns the mean loss, and the norm before
    it was clipped, on the device, without waiting for it.
    """
    optimizer.zero_grad()
    parts = list(zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True))
    total = 0
    for number, part in enumerate(parts, start=1):
        with nullcontext() if number == len(parts) else unsynchronised(loss):
            with autocast(device, precision):
                value = loss(*part) / accumulate
            value.backward()
        total = total + value.detach()
    norm = None
    if clip is not None:
        norm = nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
    optimizer.step()
    return total, norm


def counted_costs(cfg: DictConfig, vocabulary: int) -> dict:
    """FLOPs of a training step, and bytes of the state of streaming in float32 after model.context characters.

    They are counted on a copy of the model on the CPU, so that they are the same wherever it was trained.
    """
    copy = cfg.copy()
    copy.model.checkpointing = False  # what is computed again is no part of the model
    if copy.attn.get("impl") == "triton":
        copy.attn.impl = "torch"
    with torch.random.fork_rng(devices=[]):
        model = build_model(copy, vocabulary)
    context = cfg.model.context
    return {
        "flops_per_step": cfg.train.batch * training_flops(model, context),
        "state_bytes": state_bytes(model, context),
    }


def last_step(cfg: DictConfig) -> int:
    """The step that a run ends after; the learning rate follows the schedule of all train.steps."""
    return cfg.train.steps if cfg.train.stop is None else cfg.train.stop


def hours_on_a_cpu(cfg: DictConfig, model: LM, precision: str) -> float:
    """A first guess, from the matrix products of all steps."""
    tokens = last_step(cfg) * cfg.train.batch * cfg.model.context
    return 6 * parameter_count(model) * tokens / CPU_RATE[precision] / 3600


def pick_compile(wish: bool | None, device: torch.device, hours: float) -> bool:
    """Whether to train through torch.compile; None does where it pays and can be done.

    It needs Python's headers and a compiler, on a CPU of C++ and on a GPU of C, without which torch raises
    at the first call; on a CPU also about a minute, which a run of minutes does not earn back.
    """
    on_cpu = device.type == "cpu"
    if wish is False or (wish is None and on_cpu and hours < COMPILE_HOURS):
        return False
    known = (os.environ.get("CXX"), "g++", "clang++") if on_cpu else (os.environ.get("CC"), "gcc", "clang")
    compiler = any(map(shutil.which, filter(None, known)))
    if compiler and Path(sysconfig.get_path("include"), "Python.h").exists():
        return True
    missing = "Python's headers" if compiler else f"a {'C++' if on_cpu else 'C'} compiler"
    if wish is True:
        raise UserError(f"train.compile=true needs {missing}, which this machine lacks")
    print(f"training without torch.compile, on a CPU 1.2 times slower: {missing} would be needed", flush=True)
    return False


def compiler_failed(error: RuntimeError) -> bool:
    """Whether it is torch.compile's. Ctrl-C also ends the C++ compiler, at a process's first step: nothing is lost."""
    from torch._dynamo.exc import BackendCompilerFailed  # takes a second, unless it was used

    return isinstance(error, BackendCompilerFailed)


def headline(summary: dict) -> str:
    return f"{summary['name']}, fit perplexity {summary['evaluation']['fit']['perplexity']:.2f}"


def check(cfg: DictConfig, processes: int) -> None:
    """Raise UserError for numbers that no run, or none with so many processes, can have."""
    check_at_least(
        cfg,
        {
            "train.steps": 0,
            "train.batch": 1,
            "train.log_every": 1,
            "train.accumulate": 1,
            "seed": 0,
            "optim.warm_up": 0,
            "evaluation.every": 1,
            "evaluation.windows": 1,
            "evaluation.final_windows": 1,
            "evaluation.stride": 1,
            "evaluation.sample": 0,
        },
    )
    if cfg.train.stop is not None and not 1 <= cfg.train.stop <= cfg.train.steps:
        raise UserError(f"train.stop must be 1 to train.steps={cfg.train.steps}, or null: got {cfg.train.stop}")
    if cfg.train.batch % (processes * cfg.train.accumulate):
        several = f"{processes} processes x " if processes > 1 else ""
        raise UserError(
            f"train.batch must be divisible by {several}train.accumulate={cfg.train.accumulate}: got {cfg.train.batch}"
        )
    if cfg.train.parallel not in KINDS:
        raise UserError(f"train.parallel must be {' or '.join(KINDS)}: got {cfg.train.parallel}")
    if processes > 1 and cfg.train.parallel == "fsdp" and cfg.model.norm == "rezero":
        raise UserError("train.parallel=fsdp cannot shard the single numbers of model.norm=rezero: take ddp")
    if cfg.evaluation.stride > cfg.model.context:
        raise UserError(
            f"evaluation.stride must be at most model.context={cfg.model.context}: got {cfg.evaluation.stride}"
        )
    check_seed(cfg.seed)
    for key in ("optim.lr", "optim.eps"):
        if not 0 < OmegaConf.select(cfg, key) < math.inf:
            raise UserError(f"{key} must be above 0: got {OmegaConf.select(cfg, key)}")
    if cfg.optim.clip is not None and not 0 < cfg.optim.clip < math.inf:
        raise UserError(f"optim.clip must be above 0: got {cfg.optim.clip}")
    for key in ("optim.min_lr", "optim.weight_decay", "train.checkpoint_seconds"):
        if not 0 <= OmegaConf.select(cfg, key) < math.inf:
            raise UserError(f"{key} must be 0 or more: got {OmegaConf.select(cfg, key)}")
    if len(cfg.optim.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.optim.betas):
        raise UserError(f"optim.betas must be two numbers from 0 to below 1: got {list(cfg.optim.betas)}")
    if cfg.optim.impl not in ("fused", "package", "adamw"):
        raise UserError(f"optim.impl must be fused, package or adamw: got {cfg.optim.impl}")
    if cfg.optim.impl == "adamw" and cfg.optim.rectify:
        raise UserError("optim.rectify=true is an option of AdaBelief: optim.impl=adamw has none")
    if cfg.wandb.mode not in ("online", "offline", "disabled"):
        raise UserError(f"wandb.mode must be online, offline or disabled: got {cfg.wandb.mode}")


def readable(cfg: DictConfig) -> dict:
    """The config as wandb shows it: flat, the attention by its name, without the machinery."""
    values = {k: v for k, v in flat(cfg, resolve=True).items() if not (circumstance(k) or k.endswith("_"))}
    return values | {"attn": cfg.job.attn}


def differing(one: DictConfig, other: DictConfig) -> list[str]:
    """The keys in which two configs are not the same run."""
    a, b = flat(one, resolve=True), flat(other, resolve=True)
    return [k for k in itertools.chain(a, b) if not circumstance(k) and a.get(k) != b.get(k)]


def print_sweep(folders: list[Path]) -> None:
    """Print the runs that a sweep has finished, the best fit first."""
    print("\nthe runs of this sweep that are finished, by fit perplexity:\n")
    print_runs(dict.fromkeys(folders), "fit")


@main("config", after_sweep=print_sweep)
def run(cfg: DictConfig) -> Result | None:
    """Train, and give the fit loss, for sweepers that search."""
    summary = train(cfg)
    return None if summary is None else Result(summary["evaluation"]["fit"]["loss"], Record.of(cfg).folder)


if __name__ == "__main__":
    run()
    leave()
