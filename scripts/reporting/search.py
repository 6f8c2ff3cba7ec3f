"""Write search.md, every rung of the search over the forms of attn=rwv, from the records of its runs."""

import itertools
import math
import re
import shlex
from pathlib import Path

from omegaconf import DictConfig

from data.files import write_bytes
from scripts.reporting import figures, markdown
from scripts.reporting.figures import NO_FIGURE
from scripts.reporting.leaderboard import Gap, judged
from scripts.reporting.records import MissingRecord, finished, finished_runs, record_of
from training.packed import find
from training.record import Record, read_config
from training.runs import all_folders

Form = tuple[str, ...]  # overrides of train.py
TEXTS = {"fit": "training", "heldout": "held-out"}


def named(cfg: DictConfig) -> dict[str, Form]:
    return {name: tuple(shlex.split(words)) for name, words in cfg.named.items()}


def overrides(form: Form, steps: int, rate: float) -> tuple[str, ...]:
    """Return the overrides of train.py for a run of the search, without the seed."""
    return "experiment=search", *form, f"train.steps={steps}", f"optim.lr={rate:g}"


def records_of(form: Form, steps: int, cfg: DictConfig) -> dict[float, Record]:
    """Return {learning rate: record} of a form. A record says where a run is stored, and the run may be missing."""
    runs = Path(cfg.results, "runs")
    return {rate: record_of(runs, overrides(form, steps, rate), cfg.seed) for rate in cfg.learning_rates}


def loss_of(form: Form, steps: int, cfg: DictConfig) -> float | None:
    """Return the lowest loss on the training text over the learning rates; None if no run has finished."""
    summaries = [finished(record) for record in records_of(form, steps, cfg).values()]
    return min((fit(summary) for summary in summaries if summary is not None), default=None)


def rungs(cfg: DictConfig) -> dict[int, list[dict]]:
    """Return, for the steps of each rung, the summary of the best run of each form, the best form first."""
    of_form: dict[int, dict[str, dict]] = {steps: {} for steps in cfg.rungs}
    for folder in all_folders(Path(cfg.results, "runs/search")):
        record = find(folder)
        summary = finished(record)
        if summary is None or summary["seed"] != cfg.seed or summary["lr"] not in cfg.learning_rates:
            continue
        if summary["steps"] in of_form:
            best, form = of_form[summary["steps"]], str(read_config(record).attn)
            best[form] = min(best.get(form, summary), summary, key=fit)
    return {steps: sorted(best.values(), key=fit) for steps, best in of_form.items()}


def fit(summary: dict) -> float:
    return summary["evaluation"]["fit"]["loss"]


def form_in_words(command: str) -> str:
    """Return the form that a run's command trains, in words: its settings, after its attention if that is not rwv."""
    words = [word for word in shlex.split(command) if word.startswith("attn") and word != "attn=rwv"]
    return ", ".join(re.sub(r"^attn[./]", "", word) for word in words)


def write(cfg: DictConfig) -> None:
    """Write the page. `cfg` is configs/search.yaml. Raises MissingRecord if no run of the first rung is finished."""
    ranked = rungs(cfg)
    if not ranked[cfg.rungs[0]]:
        raise MissingRecord(
            f"{cfg.results}/runs/search has no finished run of the first rung: python -m scripts.search trains them all"
        )
    write_bytes(Path(cfg.results, "search.md"), page(cfg, ranked).encode())


def page(cfg: DictConfig, ranked: dict[int, list[dict]]) -> str:
    """Return the page: a table for each rung, and a section for each of cfg.finals whose runs are finished."""
    names = {
        record.folder.name: name
        for name, form in named(cfg).items()
        for steps in cfg.rungs
        for record in records_of(form, steps, cfg).values()
    }
    parts, runs = [], [summary for summaries in ranked.values() for summary in summaries]
    for steps, summaries in ranked.items():
        rows = []
        for place, summary in enumerate(summaries, 1):
            name = names.get(summary["name"])
            heldout = summary["evaluation"].get("heldout")
            form = f"**{name}**" if name else form_in_words(summary["command"])
            cells = [place, form, f"{math.exp(fit(summary)):.2f}"]
            cells += [f"{heldout['perplexity']:.2f}" if heldout else NO_FIGURE, f"{summary['lr']:g}"]
            rows.append([*cells, f"{summary['parameters']:,}", f"{summary['training_seconds']:.0f}"])
        heads = ["", "form", "fit perplexity", "held-out", "learning rate", "parameters", "seconds"]
        parts += [f"## {steps:,} steps: {len(summaries)} forms", markdown.table(rows, heads, left=(1,))]
    first = runs[0]
    rates = f"learning rate {cfg.learning_rates[0]:g}"
    if len(cfg.learning_rates) > 1:
        rates = f"learning rates {' and '.join(f'{rate:g}' for rate in cfg.learning_rates)}, of which the best is shown"
    finals = [part for final in cfg.finals for part in final_section(final, Path(cfg.results, "runs"))]
    return markdown.page(
        "# The search over R, W and token shift",
        finding(cfg, len(ranked[cfg.rungs[0]])),
        *parts,
        markdown.notes(
            f"Seed {cfg.seed}, which no verdict uses; {rates}. Corpus {first['data']['name']}, "
            f"{markdown.vocabulary(first)}; {markdown.trained_on(runs)}; "
            "`python -m scripts.search`.",
            "Bold forms are the named ones of configs/search.yaml, which train in every rung. All others are forms of "
            "attn=rwv that Optuna chose, shown by what they set. Other settings are those of configs/attn/rwv.yaml, "
            "such as V=linear and gamma=true; attn/rwv.py says what their names mean. Of the forms that Optuna chose, "
            "the later rungs have those that fit best in the rung before.",
            "The seconds are those of training. Runs may have shared the machine, or may have been paused.",
            "The best form is a candidate, not a result: it was chosen by the figures that are shown.",
        ),
        *finals,
    )


def final_runs(final: DictConfig, runs: Path) -> dict[str, list[dict]]:
    """Return the summaries of final.candidates and final.against, by form; {} if runs are missing."""
    forms = {**final.candidates, **final.against}
    groups = {
        name: finished_runs(runs, (*shlex.split(words), f"experiment={final.setup}"), final.seeds)
        for name, words in forms.items()
    }
    return groups if all(len(group) == len(final.seeds) for group in groups.values()) else {}


def final_section(final: DictConfig, runs: Path) -> list[str]:
    """Return the section that compares final.candidates with final.against, or [] if runs are missing."""
    groups = final_runs(final, runs)
    if not groups:
        return []
    ordered = sorted(groups, key=lambda name: figures.mean_loss(groups[name]))
    rows = [
        [
            f"**{name}**" if name in final.against else name,
            *(figures.shown(figures.perplexity(groups[name], text)) for text in TEXTS),
            f"{groups[name][0]['lr']:g}",
            f"{groups[name][0]['parameters']:,}",
        ]
        for name in ordered
    ]
    summaries = [summary for group in groups.values() for summary in group]
    parts = [
        f"## The best forms, experiment={final.setup}, {figures.seeds_in_words(list(final.seeds))}",
        markdown.table(rows, ["form", "fit perplexity", "held-out", "learning rate", "parameters"]),
    ]
    if len(final.seeds) > 1:
        leads = judged_leads(final, groups)
        parts.append(leads_table(leads))
    return [*parts, markdown.notes(final.note, f"{markdown.trained_on(summaries)}.")]


def judged_leads(final: DictConfig, groups: dict[str, list[dict]]) -> dict[tuple[str, str, str], Gap]:
    """Return {(candidate, form of final.against, text): lead}, judged together."""
    keys = itertools.product(final.candidates, final.against, TEXTS)
    return judged({(form, other, t): figures.leads(groups[form], groups[other], t) for form, other, t in keys})


def ahead(final: DictConfig, leads: dict[tuple[str, str, str], Gap]) -> str:
    """Return which forms of final.against each candidate is ahead of on both texts."""
    found = []
    for candidate in final.candidates:
        behind = [form for form in final.against if all(leads[candidate, form, t].word == "ahead" for t in TEXTS)]
        found.append(f"{candidate} is ahead of {' and '.join(behind) or 'none'}")
    return ", and ".join(found)


def finding(cfg: DictConfig, count: int) -> str:
    """Return sentences on what came out of the search; `count` is the number of forms in the first rung."""
    found = [
        f"With experiment={final.setup}, {ahead(final, judged_leads(final, groups))}."
        for final in cfg.finals
        if len(final.seeds) > 1 and (groups := final_runs(final, Path(cfg.results, "runs")))
    ]
    told = f"The search, by successive halving, begins with {count} forms, some of which are named ones such as AFT."
    if found:
        judged = (final for final in cfg.finals if len(final.seeds) > 1)
        candidates = {name: words for final in judged for name, words in final.candidates.items()}
        forms = "; ".join(f"{name} (`{form_in_words(words)}`)" for name, words in candidates.items())
        told += f" The best of the others, which were then compared with named forms, are {forms}. A form is called "
        told += f"ahead if it is so on the training text and also on the held-out text. {' '.join(found)}"
    return (
        f"{told} By configs/search.yaml, a form wins if, with experiment=novel, every named form whose training step "
        "takes at most 1.05 times as long is behind it on both texts."
    )


def leads_table(leads: dict[tuple[str, str, str], Gap]) -> str:
    rows = []
    for (candidate, other, text), lead in leads.items():
        bounds = f"{lead.interval.low:+.2%} to {lead.interval.high:+.2%}"
        rows.append([candidate, other, TEXTS[text], f"{lead.comparison.mean:+.2%}", bounds, lead.word])
    return markdown.table(
        rows, ["form", "over", "text", "lead", "interval, Holm's method", "the form is"], left=(0, 1, 2)
    )
