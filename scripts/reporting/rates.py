"""Write rates.md, perplexity by learning rate for each attention, from the records of study=rates."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from omegaconf import DictConfig, OmegaConf

from configs.folder import CONFIGS
from data.files import UserError
from scripts.reporting import figures, markdown, row_rates
from scripts.reporting.colours import colour_of
from scripts.reporting.figures import NO_FIGURE
from scripts.reporting.plots import PLAIN, logarithmic, name_lines, write_with_plot
from scripts.reporting.records import MissingRecord, check_comparable, label
from scripts.reporting.tried import Tried, at_an_end, perplexity, rate_seeds, runs_by_rate
from scripts.reporting.variants import variants
from training.runs import all_folders, name_and_seed

RATES = CONFIGS / "rates"
USUAL = "adabelief"  # the default optimiser, which names of runs omit
HEADROOM = 1.4  # the top of a panel divided by the highest of the attentions' best perplexities

# {learning rate: mean log perplexity}, in ascending order of the rates.
Losses = dict[float, float]


def rate_file(setup: str, optimizer: str, variant: str) -> Path:
    """Return the path at which train.py looks for the learning rate that was chosen for an attention."""
    return RATES / setup / optimizer / f"{variant}.yaml"


def chosen_rate(setup: str, variant: str) -> float | None:
    """Return the learning rate that was chosen for an attention with the default optimiser; None if none was chosen."""
    path = rate_file(setup, USUAL, variant)
    return OmegaConf.load(path).lr if path.exists() else None


def check_rates(names: Iterable[str], setup: str, results: str) -> None:
    """Raise UserError if an attention has no chosen learning rate. The error gives the command that chooses it."""
    if without := [name for name in names if chosen_rate(setup, name) is None]:
        options = f" setup={setup}" * (setup != "small") + f" results={results}" * (results != "out")
        raise UserError(
            f"no learning rate is chosen for {', '.join(without)} at experiment={setup}: "
            f"python -m scripts.reproduce study=rates variants=[{','.join(without)}]{options} chooses it"
        )


def with_all_seeds(folders: list[Path], seeds: list[int]) -> list[Path]:
    """Return the folders whose name, apart from its seed, occurs with each of the seeds."""
    there = {name_and_seed(folder.name) for folder in folders}
    names = {folder: name_and_seed(folder.name)[0] for folder in folders}
    return [folder for folder, name in names.items() if all((name, seed) in there for seed in seeds)]


def runs_of(folders: list[Path], variant: str, seeds: list[int], optimizer: str) -> Tried:
    """Return an attention's runs that have ended and have one of these seeds. Raises UserError for one without a rate.

    Their settings, apart from the rate, are those of train.py for this attention and optimiser in the experiment of the
    folders, which is the same for all.
    """
    own = [f for f in folders if f.name.startswith(variant) and (optimizer == USUAL or f"-{optimizer}" in f.name)]
    if not own:  # cheaper than composing their config
        return {}
    words = (f"experiment={own[0].parent.name}", f"attn={variant}", "rates=none")
    if optimizer != USUAL:  # USUAL is the default; without naming it, a cached config can be used
        words = (*words, f"optim={optimizer}")
    return runs_by_rate(own, words, seeds)


def losses_of(by_rate: Tried, seeds: list[int], text: str = "fit") -> Losses:
    """Return the mean loss at each rate at which the runs of all seeds have ended, infinite if one has diverged.

    `text` is a part of the evaluation. Rates at which a finished run lacks it are left out.
    """
    found = {}
    for rate, group in by_rate.items():
        finished = [summary for summary in group.values() if summary["status"] == "finished"]
        losses = list(figures.losses(finished, text).values())
        if len(group) == len(seeds) and len(losses) == len(finished):
            found[rate] = statistics.mean(losses) if len(losses) == len(seeds) else math.inf
    return found


def losses(cfg: DictConfig, variant: str) -> Losses:
    """Return the losses that study=rates has found for an attention. Raises UserError for a record without a rate."""
    folders = all_folders(Path(cfg.results, "runs", cfg.setup))
    return losses_of(runs_of(folders, variant, cfg.seeds, cfg.optimizer), cfg.seeds)


def best_rates(tried: dict[str, Losses]) -> dict[str, float]:
    """Return the best rate of each attention, without attentions that have diverged at every rate."""
    return {v: min(losses, key=losses.get) for v, losses in tried.items() if math.isfinite(min(losses.values()))}


class Study(NamedTuple):
    """What was tried in one experiment with one optimiser."""

    setup: str
    optimizer: str
    seeds: list[int]
    finished: list[dict]  # the summaries of the finished runs of the attentions in `tried`
    tried: dict[str, Losses]  # on the training text, by attention, those with the lowest perplexity first
    heldout: dict[str, Losses]  # the lowest on held-out text during training, by attention

    def rates(self) -> list[float]:
        return sorted({rate for losses in self.tried.values() for rate in losses})


def studies(results: Path) -> list[Study]:
    """Return a study for every experiment and optimiser in which the runs of all seeds have ended at some rate.

    Experiments and optimisers in which all of these runs have diverged are left out.
    """
    found, seeds = [], rate_seeds()
    for runs in (results / "runs" / path.stem for path in sorted((CONFIGS / "experiment").glob("*.yaml"))):
        folders = with_all_seeds(all_folders(runs), seeds)  # composing the names of the others would take a minute
        for optimizer in sorted(path.stem for path in (CONFIGS / "optim").glob("*.yaml")):
            groups = {variant: runs_of(folders, variant, seeds, optimizer) for variant in variants()}
            tried = {v: losses for v, by_rate in groups.items() if (losses := losses_of(by_rate, seeds))}
            ended = [s for variant in tried for group in groups[variant].values() for s in group.values()]
            finished = [summary for summary in ended if summary["status"] == "finished"]
            if finished:
                check_comparable(finished)
                order = sorted(tried, key=lambda variant: min(tried[variant].values()))
                heldout = {v: losses_of(groups[v], seeds, "heldout_best") for v in order}
                found.append(Study(runs.name, optimizer, seeds, finished, {v: tried[v] for v in order}, heldout))
    return found


def finding(study: Study) -> str:
    """Return a list of the best rates, each with the attentions for which it is the best."""
    by_rate: dict[float, list[str]] = {}
    for variant, rate in best_rates(study.tried).items():
        by_rate.setdefault(rate, []).append(label(variant))
    return markdown.notes(
        *(f"Best at {rate:g}: {'; '.join(f'`{name}`' for name in names)}." for rate, names in sorted(by_rate.items()))
    )


def cell(loss: float | None, is_best: bool = False) -> str:
    """Return the table's cell for a loss: a perplexity, "diverged", or a dash for None; bold if it is the best."""
    text = NO_FIGURE if loss is None else perplexity(loss)
    return f"**{text}**" if is_best else text


def rates_table(tried: dict[str, Losses], rates: list[float]) -> str:
    """Return a table of perplexities, a row for each attention and a column for each rate."""
    best = best_rates(tried)
    rows = [
        [label(variant), *(cell(losses.get(rate), rate == best.get(variant)) for rate in rates)]
        for variant, losses in tried.items()
    ]
    return markdown.table(rows, ["", *(f"{rate:g}" for rate in rates)])


def section(study: Study) -> list[str]:
    """Return the paragraphs on one experiment and optimiser."""
    first, ends = study.finished[0], ends_of_ranges(study.tried)
    bounded = not ends and best_rates(study.tried).keys() == study.tried.keys()
    table = rates_table(study.tried, study.rates())
    options = f" setup={study.setup}" * (study.setup != "small")
    options += f" optimizer={study.optimizer}" * (study.optimizer != USUAL)
    notes = [
        f"{study.setup}: {figures.budget(first)}, {figures.seeds_in_words(study.seeds)}, which no verdict uses; "
        f"{markdown.vocabulary(first)}; {markdown.trained_on(study.finished)}.",
        "Perplexity on the whole training text, from the mean log perplexity over the seeds; the best is bold. "
        + "Lower and higher rates were added until the best lay between two others. " * bounded
        + "With so few seeds, small differences may be chance. A dash: not tried with all of these seeds. "
        "RWV is not listed: with its default settings it is AFT."
        + ' "diverged": at least one of the seeds has diverged.'
        * ("diverged" in table),
        f"`python -m scripts.reproduce study=rates variants=[{','.join(sorted(study.tried))}]{options}`.",
    ]
    notes.append(ends)
    if len({summary["precision"] for summary in study.finished}) > 1:
        in_float32 = sorted({label(s["attn"]) for s in study.finished if s["precision"] == "float32"})
        notes.append(f"Trained in float32, at least in part: {'; '.join(in_float32)}. The others were trained in bf16.")
    return [f"## {study.setup}, {study.optimizer}", finding(study), table, markdown.notes(*notes), *heldout(study)]


def ends_of_ranges(tried: dict[str, Losses]) -> str:
    """Return a sentence on attentions whose best rate is the lowest or the highest that was tried; "" if none."""
    return at_an_end([label(v) for v, rate in best_rates(tried).items() if rate in (min(tried[v]), max(tried[v]))])


def heldout(study: Study) -> list[str]:
    """Return the paragraphs on held-out text in one experiment and with one optimiser, none if it has no such text."""
    measured = {variant: losses for variant, losses in study.heldout.items() if losses}
    if not measured:
        return []
    return [
        heldout_heading(study.setup, study.optimizer),
        "The lowest held-out perplexity during training, by rate, with the same seeds. No rate was chosen by it.",
        rates_table(measured, study.rates()),
        ends_of_ranges(measured),
    ]


def heldout_heading(setup: str, optimizer: str) -> str:
    return f"### {setup}, {optimizer}, held-out"


def draw(found: list[Study]) -> plt.Figure:
    """Plot perplexity against the learning rate: a panel for each experiment and optimiser, a line for each attention.

    The best rate has a dot. The title counts the attentions by their best rate. The vertical axis ends at HEADROOM
    times the highest of the attentions' best perplexities, because perplexities at too high rates are many times as
    high as the best ones.
    """
    figure, axes = plt.subplots(math.ceil(len(found) / 2), 2, layout="constrained", squeeze=False)
    figure.set_size_inches(15, 8.5 * len(axes))
    for axis in axes.flat[len(found) :]:
        axis.remove()
    for axis, study in zip(axes.flat, found, strict=False):
        best, rates, ends, colours = best_rates(study.tried), study.rates(), {}, {}
        highest = HEADROOM * max((math.exp(study.tried[variant][rate]) for variant, rate in best.items()), default=1)
        for variant, rate in best.items():
            curve = {at: math.exp(loss) for at, loss in study.tried[variant].items() if math.isfinite(loss)}
            axis.plot(list(curve), list(curve.values()), color=colour_of(variant), linewidth=1.2)
            axis.plot(rate, curve[rate], "o", color=colour_of(variant), markersize=5)
            last = max(at for at, perplexity in curve.items() if perplexity <= highest)
            ends[label(variant)], colours[label(variant)] = (last, curve[last]), colour_of(variant)
        axis.set_xscale("log", base=2)
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.set_xlim(left=rates[0] / 1.15)
        axis.set_xlabel("learning rate; dots: the best of each attention")
        logarithmic(axis, minor=PLAIN)
        axis.set_ylim(top=highest)
        axis.set_ylabel("perplexity on the training text; higher ones are cut off")
        counts = Counter(best.values())
        words = ", ".join(f"{counts[rate]} at {rate:g}" for rate in sorted(counts))
        title = f"{study.setup}, {study.optimizer}; attentions by best rate: {words}"
        axis.set_title(title, fontsize=10)
        name_lines(axis, ends, colours)
    return figure


def write(results: Path) -> None:
    """Write rates.md and its plot. Raises MissingRecord if `studies` finds none."""
    found = studies(results)
    if not found:
        raise MissingRecord(f"{results}/runs lacks finished runs of python -m scripts.reproduce study=rates")
    title = ["# Perplexity by learning rate", "![perplexity by learning rate](rates.png)"]
    sections = [paragraph for study in found for paragraph in section(study)]
    page = markdown.page(*title, *sections, *row_rates.sections(results))
    write_with_plot(results, "rates", page, draw(found))
