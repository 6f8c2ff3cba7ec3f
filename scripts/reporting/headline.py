"""Write the pages that repeat the comparison of source article A with models of its size.

There is a page for each entry of `headline` in configs/report.yaml. It shows each row at its best learning rate, with
its lead over the reference, the source's figures and the curves; then each row at every rate of the yaml's
`learning_rates` with which all seeds are finished or one has diverged; then, if the entry has `tried`, the runs by
which the rates were chosen: each row at the rates and seeds given there. The best rate has the lowest mean log
perplexity on the training text.
"""

import contextlib
import math
import re
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker
from omegaconf import DictConfig, OmegaConf

from configs.cli import compose
from data.files import write_bytes
from scripts.reporting import figures, markdown
from scripts.reporting.claim_pages import linked
from scripts.reporting.claims import all_claims, benchmark_record, samples, tiers
from scripts.reporting.colours import colours_of_rows
from scripts.reporting.figures import NO_FIGURE, shown
from scripts.reporting.plots import BARS, end, end_of_lead, logarithmic, mean_line, measured_on, name_lines, save
from scripts.reporting.records import (
    MissingRecord,
    check_comparable,
    curves,
    curves_by_row,
    finished,
    label,
    name_of,
    record_of,
    state,
    steps_path,
    steps_record,
    words_of,
)
from scripts.reporting.starts import chosen_start
from scripts.reporting.table import row_of_timing
from scripts.reporting.tried import at_an_end
from scripts.reporting.variants import VOCABULARY
from training.record import Record

METRICS = {"fit_loss": "-", "heldout_loss": "--"}
MUCH = 0.1  # nats; models overfit if each row's final held-out losses are more than this above its lowest ones
RATE_HEADS = ["", "learning rate", "fit perplexity", "held-out perplexity at the end", "best held-out perplexity"]


class Trained(NamedTuple):
    """The runs of one row at one learning rate, one for each seed."""

    records: list[Record]
    summaries: list[dict]


Rates = dict[float, Trained]


def trained(cfg: DictConfig, row: str, runs: Path) -> Rates:
    """Return the row's runs by learning rate, for those of cfg.learning_rates with which all seeds are finished."""
    rates = {}
    for rate in cfg.learning_rates:
        records = records_at(cfg, row, rate, runs)
        summaries = [finished(record) for record in records]
        if None not in summaries:
            rates[rate] = Trained(records, summaries)
    return rates


def records_at(cfg: DictConfig, row: str, rate: float, runs: Path) -> list[Record]:
    """Return a record for each seed of a row at a learning rate; a run that was not trained has an empty one."""
    words = words_of(f"{row} {cfg.overrides} optim.lr={rate:g}", cfg.setup)
    return [record_of(runs, words, seed) for seed in cfg.seeds]


def diverging(cfg: DictConfig, row: str, runs: Path) -> list[float]:
    """Return the learning rates at which a run of the row has diverged."""
    return [rate for rate in cfg.learning_rates if "diverged" in map(state, records_at(cfg, row, rate, runs))]


def best(rates: Rates) -> float:
    return min(rates, key=lambda rate: figures.mean_loss(rates[rate].summaries))


def at_best_rate(rates_of: dict[str, Rates]) -> dict[str, Trained]:
    return {row: rates[best(rates)] for row, rates in rates_of.items()}


def all_summaries(rates_of: dict[str, Rates]) -> list[dict]:
    return [summary for rates in rates_of.values() for group in rates.values() for summary in group.summaries]


def rate_rows(rates_of: dict[str, Rates], failed: dict[str, list[float]]) -> list[list[str]]:
    """Return a line for each row and learning rate.

    `failed` holds the rates at which a run of a row has diverged, for every row. They come after the row's other rates.
    """
    lines = []
    for row in failed:
        rates = rates_of.get(row, {})
        for rate, (_, summaries) in rates.items():
            perplexities = [shown(figures.perplexity(summaries, text)) for text in ("fit", "heldout")]
            mark = " (best)" if len(rates) > 1 and rate == best(rates) else ""
            lines.append([name_of(row), f"{rate:g}{mark}", *perplexities, figures.best_heldout(summaries)])
        lines += [[name_of(row), f"{rate:g}", "diverged", NO_FIGURE, NO_FIGURE] for rate in failed[row]]
    return lines


def timed_steps(results: Path, chosen: dict[str, Trained]) -> dict | None:
    """Return the record of training steps from which the speeds of the rows are taken; None if there is none.

    Two records can have the same precision as the runs: the record of claim 2 and that of the benchmark. The record of
    claim 2 has fewer attentions but more rounds. It is used unless the benchmark's record has more of the rows.
    """
    precision = next(iter(chosen.values())).summaries[0]["precision"]
    records = []
    with contextlib.suppress(MissingRecord):
        records.append(benchmark_record(all_claims()["speed"], "small", results))
    with contextlib.suppress(MissingRecord):
        records.append(steps_record(steps_path(results, precision)))
    in_precision = [record for record in records if record["provenance"]["precision"] == precision]
    rows = {row_of_timing(row) for row in chosen}
    return max(in_precision, key=lambda record: len(rows & record["seconds"].keys()), default=None)


def speed_over(seconds: dict[str, list[float]], row: str, reference: str) -> str:
    """Return the speed of a row's training step divided by the reference's; a dash if one was not timed."""
    ours, theirs = seconds.get(row_of_timing(row)), seconds.get(row_of_timing(reference))
    return f"{figures.paired_ratio(theirs, ours):.2f}" if ours and theirs else NO_FIGURE


def table_rows(cfg: DictConfig, chosen: dict[str, Trained], timed: dict | None) -> list[list[str]]:
    """Return a line for each row at its best rate. `timed` is the record of training steps."""
    reference, source, lines = chosen.get(cfg.ratio_to), compose([], "compare").source, []
    seconds = timed["seconds"] if timed else {}
    for row, (_, summaries) in chosen.items():
        ahead = figures.lead(summaries, reference.summaries) if reference and row != cfg.ratio_to else None
        line = [name_of(row), shown(figures.perplexity(summaries, "fit")), shown(ahead)]
        line.append(f"{source[row].perplexity:.2f}" if row in source else NO_FIGURE)
        bits = f"{figures.mean_loss(summaries) / math.log(2):.3f}"
        line += [shown(figures.source_lead(source, row, cfg.ratio_to)), figures.best_heldout(summaries), bits]
        speeds = [speed_over(seconds, row, cfg.ratio_to)]
        both = row in source and cfg.ratio_to in source
        speeds.append(f"{source[row].speed / source[cfg.ratio_to].speed:.2f}" if both else NO_FIGURE)
        lines.append([*line, f"{summaries[0]['parameters']:,}", *speeds])
    return lines


def reference_name(cfg: DictConfig) -> str:
    """Return the label of the reference's attention."""
    return label(cfg.ratio_to.split()[0])


def verdicts(cfg: DictConfig, results: Path) -> str:
    """Return a sentence with the verdicts on the claim that the rows test, by tier; "" if they test none."""
    if cfg.claim is None:
        return ""
    claim, pages = all_claims()[cfg.claim], {}
    for tier in tiers(claim):
        with contextlib.suppress(MissingRecord):
            pages[claim.name, tier] = samples(claim, tier, results)
    judged = "; ".join(f"{tier} tier, {linked(claim, tier, pages, '../claims')}" for tier in tiers(claim))
    rule = "[how a verdict is reached](../CLAIMS.md#how-a-verdict-is-reached)"
    return f'Verdicts on the claim "{claim.says}" ({rule}): {judged}.'


def finding(chosen: dict[str, Trained]) -> str:
    """Return the rows in the order of their perplexity, in one sentence without its full stop."""
    order = sorted(chosen, key=lambda row: figures.mean_loss(chosen[row].summaries))
    named = "; ".join(f"{name_of(row)} {shown(figures.perplexity(chosen[row].summaries, 'fit'))}" for row in order)
    first = chosen[order[0]].summaries[0]
    passes = figures.passes(first, first["tokens"])
    return f"Fit perplexity after {passes:.1f} passes over {first['data']['name']}: {named}"


def overfitting(chosen: dict[str, Trained]) -> str | None:
    """Return a sentence with the final held-out perplexities; None unless all rows' losses rise by more than MUCH."""
    lowest, final = (
        {row: figures.losses(group.summaries, text).values() for row, group in chosen.items()}
        for text in ("heldout_best", "heldout")
    )
    if not all(lowest[row] and final[row] and min(final[row]) > max(lowest[row]) + MUCH for row in chosen):
        return None
    ends = "; ".join(f"{name_of(row)} {shown(figures.perplexity(chosen[row].summaries, 'heldout'))}" for row in chosen)
    told = f"The models overfit: at the end their held-out perplexity is {ends}."
    return f"{told} The lowest that each row had is in the column `best held-out perplexity`."


def at_the_source(cfg: DictConfig, chosen: dict[str, Trained]) -> str | None:
    """Return sentences on the leads at the point where the reference reaches the perplexity that the source states.

    Returns None if the reference has no runs, has no figure in the source, or does not pass that perplexity between its
    first and its last evaluation. The leads are read off the curves. Log perplexities are interpolated linearly between
    two evaluations.
    """
    reference, source = chosen.get(cfg.ratio_to), compose([], "compare").source
    if reference is None or cfg.ratio_to not in source:
        return None
    tokens, by_row = curves_by_row({row: group.records for row, group in chosen.items()}, "fit_loss")
    ahead, target = by_row[cfg.ratio_to], math.log(source[cfg.ratio_to].perplexity)
    if not ahead.mean(0)[-1] < target < ahead.mean(0)[0]:
        return None
    place = np.interp(-target, -ahead.mean(0), tokens)  # interp wants ascending values
    leads = []
    for row, own in by_row.items():
        if row != cfg.ratio_to:
            lead = figures.with_interval([float(np.interp(place, tokens, d)) for d in ahead - own], figures.percent)
            beside = figures.source_lead(source, row, cfg.ratio_to)
            leads.append(f"{name_of(row)} {lead.text}" + (f", in the source {beside.text}" if beside else ""))
    passes = figures.passes(reference.summaries[0], place)
    return (
        f"{reference_name(cfg)} reaches {source[cfg.ratio_to].perplexity:.2f}, its perplexity in the source, "
        f"after {passes:.1f} passes. At this point the leads over {reference_name(cfg)} are: {'; '.join(leads)}. These "
        "leads were added after the curves were known; no verdict rests on them."
    )


def of_the_source(chosen: dict[str, Trained]) -> bool:
    """Return whether the source has figures of one of the rows."""
    return any(row in compose([], "compare").source for row in chosen)


def notes(cfg: DictConfig, rates_of: dict[str, Rates], results: Path, timed: dict | None) -> list[str]:
    """Return the notes that the table cannot be read without. `timed` is the record of training steps."""
    summaries, chosen = all_summaries(rates_of), at_best_rate(rates_of)
    missing = [name_of(row) for row in cfg.rows if row not in rates_of]
    changed = f" with `{cfg.overrides}`" if cfg.overrides else ""
    written = [
        f"`experiment={cfg.setup}`{changed}: {figures.budget(summaries[0])}, "
        f"{figures.seeds_in_words(list(cfg.seeds))}; {markdown.vocabulary(summaries[0])}; "
        f"{markdown.trained_on(summaries)}.",
        f"Lead: {reference_name(cfg)}'s log perplexity on the training text minus the row's at the same seed, where "
        f"0.01 is called 1%; below 0 the row is behind. {spread_over_seeds(cfg, chosen)}",
    ]
    if of_the_source(chosen):
        written.append(
            "The source trained on another corpus, of 8.6 million characters with a vocabulary of 5,744, and states "
            "neither steps nor passes. Its order and its leads can be compared with ours, its perplexities cannot."
        )
    if timed:
        rounds, origin = min(map(len, timed["seconds"].values())), timed["provenance"]
        step = f"{timed['tokens']:,} characters, {'compiled' if timed['compiled'] else 'not compiled'}"
        more = steps_path(results, origin["precision"])
        steps = more.relative_to(results).with_suffix(".md")
        link = f" More attentions: [steps](../{steps}), whose ratios can differ from these." if more.exists() else ""
        written.append(
            f"Speed: {reference_name(cfg)}'s time of a training step ({step}) divided by the row's, the median of "
            f"{rounds} rounds in which each was timed once, with a vocabulary of {VOCABULARY:,}; "
            f"{markdown.origin(origin)}{link} In the other precision and on a GPU, the order of the speeds can be "
            "another ([speed](../README.md#speed))."
        )
    if missing:
        written.append(f"Not trained to the end: {'; '.join(missing)}.")
    return written


def details(cfg: DictConfig, chosen: dict[str, Trained], with_leads: bool) -> list[str]:
    """Return how the figures were chosen and measured; `with_leads` adds a note on the leads of `at_the_source`."""
    at_start = [f"{name_of(row)} `{words}`" for row in chosen if (words := chosen_start(cfg.setup, row))]
    written = [f"Starts: {'; '.join(at_start)}."] if at_start else []
    written += [
        cfg.note,
        "The best held-out perplexity is the lowest point of a curve, which is measured on few windows of the held-out "
        "text; it and the passes until then are means over the seeds. As the lowest of many measured values, it tends "
        "to be a little too low. The held-out perplexity at the end is measured on all of the held-out text, not on "
        "these few windows, and can thus be lower than this best one.",
    ]
    if with_leads:
        written.append(
            f"The leads at the point where {reference_name(cfg)} reaches the perplexity that the source states for it "
            "are read off the curves, before the learning rate's schedule has ended. The corpora differ, so that this "
            "perplexity may belong to an earlier or later point of training in the source than it does here. The leads "
            "at the ends of the curves differ from those in the table, which are measured on the whole text (dots in "
            "the plot)."
        )
    return written


def spread_over_seeds(cfg: DictConfig, chosen: dict[str, Trained]) -> str:
    """Return what ± and intervals mean, and the leads of each seed."""
    if len(cfg.seeds) == 1:
        return "One seed gives no interval."
    ahead = {
        name_of(row): figures.leads(group.summaries, chosen[cfg.ratio_to].summaries)
        for row, group in chosen.items()
        if row != cfg.ratio_to and cfg.ratio_to in chosen
    }
    by_seed = "; ".join(f"{name} {', '.join(map(figures.percent, leads))}" for name, leads in ahead.items())
    return (
        "Mean and Student's 95% interval (verdicts can have wider ones); ± is a standard deviation over seeds."
        + f" The leads of {figures.seeds_in_words(list(cfg.seeds))}: {by_seed}." * bool(by_seed)
    )


def choice_of_rates(cfg: DictConfig, runs: Path) -> tuple[str, str]:
    """Return a sentence on the runs that chose the learning rates, and a table of these runs."""
    tried = OmegaConf.merge(cfg, cfg.tried)
    rates_of = {row: trained(tried, row, runs) for row in cfg.rows}
    failed, ends = {row: diverging(tried, row, runs) for row in cfg.rows}, []
    for row, rates in rates_of.items():
        ended = [*rates, *failed[row]]
        if rates and len(ended) > 1 and best(rates) in (min(ended), max(ended)):
            ends.append(f"{name_of(row)} at {best(rates):g}")
    told = f"{at_an_end(ends)} Runs with {figures.seeds_in_words(list(tried.seeds))} chose the learning rates:"
    return told.lstrip(), markdown.table(rate_rows(rates_of, failed), RATE_HEADS)


def page(cfg: DictConfig, rates_of: dict[str, Rates], results: Path) -> str:
    """Return the contents of <name>.md."""
    chosen = at_best_rate(rates_of)
    timed, leads = timed_steps(results, chosen), at_the_source(cfg, chosen)
    failed = {row: diverging(cfg, row, results / "runs") for row in cfg.rows}
    reference = reference_name(cfg)
    heads = ["", "fit perplexity", f"lead over {reference}", "source", "source's lead", "best held-out perplexity"]
    heads += ["fit, bits per character", "parameters", f"speed over {reference}'s on a CPU", "source's speed"]
    rows, columns = table_rows(cfg, chosen, timed), range(len(heads))
    if not of_the_source(chosen):
        columns = [i for i in columns if not heads[i].startswith("source")]
    return markdown.page(
        f"# The source's comparison at the source's size: {cfg.title}",
        " ".join(filter(None, [f"{finding(chosen)}.", overfitting(chosen), leads])),
        f"![Perplexity against passes over the text]({cfg.name}.png)",
        markdown.table([[row[i] for i in columns] for row in rows], [heads[i] for i in columns]),
        markdown.notes(*notes(cfg, rates_of, results, timed)),
        *(["## Verdicts", judged] if (judged := verdicts(cfg, results)) else []),
        "## How the figures were chosen and measured",
        markdown.notes(*details(cfg, chosen, leads is not None)),
        "## Learning rates",
        markdown.table(rate_rows(rates_of, failed), RATE_HEADS),
        *(choice_of_rates(cfg, results / "runs") if cfg.tried else ()),
        "## Commands, and training times on a shared machine",
        markdown.COMMANDS,
        markdown.notes(*(f"`{s['command']}` ({s['training_seconds']:,.0f} s)" for s in all_summaries(rates_of))),
    )


def draw(cfg: DictConfig, rates_of: dict[str, Rates]) -> plt.Figure:
    """Plot each row at its best rate against passes: perplexity above, the lead over the reference below."""
    chosen = at_best_rate(rates_of)
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 8), layout="constrained", sharex=True, height_ratios=(3, 2))
    reference, source = chosen.get(cfg.ratio_to), compose([], "compare").source
    colours, ends = dict(zip(chosen, colours_of_rows(chosen), strict=True)), {upper: {}, lower: {}}
    for row, group in chosen.items():
        colour = colours[row]
        for metric, style in METRICS.items():
            tokens, values = curves(group.records, metric)
            x = [figures.passes(group.summaries[0], n) for n in tokens]
            mean_line(upper, x, np.exp(values), colour, style)
            if metric == "fit_loss":
                fits = [s["evaluation"]["fit"]["perplexity"] for s in group.summaries]
                ends[upper][name_of(row)] = end(upper, x[-1], fits, colour)
        if row in source:
            upper.axhline(source[row].perplexity, color=colour, linestyle=":", linewidth=1)
        if reference and row != cfg.ratio_to:
            tokens, by_row = curves_by_row({row: group.records, cfg.ratio_to: reference.records}, "fit_loss")
            leads = 100 * (by_row[cfg.ratio_to] - by_row[row])
            x = [figures.passes(group.summaries[0], n) for n in tokens]
            mean_line(lower, x, leads, colour)
            last = figures.leads(group.summaries, reference.summaries)
            ends[lower][name_of(row)] = end_of_lead(lower, x[-1], last, colour)
            if source_lead := figures.source_lead(source, row, cfg.ratio_to):
                lower.axhline(100 * source_lead.value, color=colour, linestyle=":", linewidth=1)
    logarithmic(upper, ticker.StrMethodFormatter("{x:g}"))
    dotted = "\ndotted: the source's, another corpus" * of_the_source(chosen)
    upper.set_ylabel(f"perplexity: training text —, held-out text - -{dotted}")
    lower.axhline(0, color="black", linewidth=0.8)
    lower.set_ylabel(f"lead over {reference_name(cfg)}, %\n(log perplexity, training text)")
    lower.set_xlabel("passes over the training text")
    spread = f"; {BARS}" * (len(cfg.seeds) > 1)
    figure.supxlabel(measured_on(next(iter(chosen.values())).records[0]) + spread, fontsize=9)
    lower.grid(which="both", alpha=0.25)
    upper.set_title(re.sub(r"(.{80}\S*) ", r"\1\n", finding(chosen)), fontsize=10)
    for axis, points in ends.items():
        name_lines(axis, points, {name_of(row): colour for row, colour in colours.items()})
    return figure


def write(entries: list[DictConfig], results: Path) -> None:
    """Write the page and plot of each entry that has a row whose seeds have all finished at one learning rate.

    If an entry has no such row, the pages of the others are written first, and MissingRecord is raised at the end.
    Raises UserError if runs cannot be compared.
    """
    missing, runs = [], results / "runs"
    for cfg in entries:
        rates_of = {row: rates for row in cfg.rows if (rates := trained(cfg, row, runs))}
        if not rates_of:
            missing.append(
                f"{runs}/{cfg.setup} holds no row with all seeds finished at one rate: {', '.join(cfg.rows)}"
            )
            continue
        check_comparable(all_summaries(rates_of))
        write_bytes(results / f"headline/{cfg.name}.md", page(cfg, rates_of, results).encode())
        save(draw(cfg, rates_of), results / "headline", cfg.name, dpi=130)
    if missing:
        raise MissingRecord("; ".join(missing))
