"""Write recall.md, the accuracy of each attention at recall and induction, from the records of its runs."""

import statistics
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from configs.cli import compose
from scripts.reporting import claims, figures, leaderboard, markdown
from scripts.reporting.figures import NO_FIGURE, leads
from scripts.reporting.leaderboard_plots import Point, Scatter, draw
from scripts.reporting.plots import write_with_plot
from scripts.reporting.recall import (
    BY_VALUES,
    HARD,
    INDUCTION,
    INDUCTION_NO_SHIFT,
    NO_SHIFT,
    TASKS,
    USUAL,
    Row,
    accuracy_by_counts,
    read,
    rows,
    summaries,
)
from scripts.reporting.records import MissingRecord, label, of_two_units
from scripts.reporting.rule import REPRODUCED, compared, interval
from scripts.reporting.variants import same_in_one_block

COMMAND = "python -m scripts.reproduce study=recall"
CLAIMED = ("mha_plus", "gmlp", "aft")  # the attentions that, according to the source's claims, token shift helps
DELTA_RULES = ("deltanet", "gated_deltanet", "rwkv7")  # attentions that read the state before they add to it
WORTH = 5  # points: the finding names the attentions of which token shift changes the accuracy by more than this
ABLE = 95  # percent: an attention that answers more than this share of the queries counts as able to recall
FAR = 20  # points: a note names rows whose accuracy differs by more from that by which their rate was chosen
FEW = 8  # the finding names the attentions of a group if they are not more


def gains(found: dict[tuple[str, str], Row], variant: str) -> list[float]:
    """Return the points of accuracy that token shift adds, one for each seed; [] if one of the two rows is missing."""
    if not {(variant, USUAL), (variant, NO_SHIFT)} <= found.keys():
        return []
    with_shift, without = (found[variant, task].accuracies() for task in (USUAL, NO_SHIFT))
    return [with_shift[seed] - without[seed] for seed in with_shift]


def finding(found: dict[tuple[str, str], Row]) -> str:
    """Return sentences on what token shift does to recall, and on which attentions solve the other tasks."""
    many = {variant: mean(row) for (variant, task), row in found.items() if task == HARD}
    steps = max(summary["steps"] for row in found.values() for summary in row.summaries)
    able = [label(variant) for variant in sorted(many, key=many.get, reverse=True) if many[variant] > ABLE]
    parts = what_token_shift_adds(found)
    if many:
        who = f": {'; '.join(able)}" if 0 < len(able) <= FEW else ", the first ones of the table" if able else ""
        parts.append(
            f"With {HARD}, {len(able)} of the {len(many)} measured attentions answer more than {ABLE}% of the queries "
            f"on average after {steps} steps{who}"
        )
    parts += [text for task in (INDUCTION, INDUCTION_NO_SHIFT) if (text := at_induction(found, task))]
    return "".join(f"{part}. " for part in parts).strip()


def what_token_shift_adds(found: dict[tuple[str, str], Row]) -> list[str]:
    """Return sentences, without their full stops, on the attentions whose recall token shift changes."""
    gained = {variant: points for variant, _ in found if (points := gains(found, variant))}
    if not gained:
        return []
    helped, harmed, unsure, same = [], [], [], []
    for variant, points in gained.items():
        low, high = interval(compared(points), 0.95)[:2]  # unbounded for one seed
        clear = helped if low > 0 else harmed if high < 0 else unsure
        (clear if abs(statistics.mean(points)) > WORTH else same).append(label(variant))
    who = f": {'; '.join(helped)}" if 0 < len(helped) <= FEW else ""
    parts = [
        f"With {USUAL}, token shift adds more than {WORTH} points of accuracy to {len(helped)} of {len(gained)} "
        f"attentions{who}"
    ]
    parts += [f"It takes more than {WORTH} points from {'; '.join(harmed)}"] if harmed else []
    if unsure:
        why = "one seed gives no interval" if max(map(len, gained.values())) == 1 else "the interval includes 0"
        parts.append(f"The mean change is more than {WORTH} points, but {why}, for {'; '.join(unsure)}")
    return parts + [f"The mean change is at most {WORTH} points for {'; '.join(same)}"] * (0 < len(same) <= FEW)


def at_induction(found: dict[tuple[str, str], Row], task: str) -> str:
    """Return a sentence, without its full stop, on how many attentions solve a task of induction; "" if none ran."""
    measured = {variant: mean(row) for (variant, name), row in found.items() if name == task}
    if not measured:
        return ""
    able = [variant for variant, accuracy in measured.items() if accuracy > ABLE]
    rest = [variant for variant in measured if variant not in able]
    few = sorted(min(able, rest, key=len), key=measured.get, reverse=True)
    named = "; ".join(f"{label(v)} {measured[v]:.1f}%" for v in few)
    which = "the others" if len(rest) < len(able) else "these"
    where = f"At induction {'with' if task == INDUCTION else 'without'} token shift"
    return (
        f"{where}, {len(able)} of {len(measured)} attentions give more than {ABLE}% of the answers"
        f"{f'; {which}: {named}' if 0 < len(few) <= FEW else ''}"
    )


class Change(NamedTuple):
    """What leaving out an attention's token shift changes in the perplexity on a novel."""

    row: str  # the row with token shift, in a claim
    fit: float  # the mean change of the log perplexity on the training text, where 0.01 is called 1%
    verdict: str  # on the claim's statement that the perplexity rises
    heldout: list[float]  # the changes of the log of the lowest held-out perplexity, by seed


def changes(name: str, tier: str, results: Path) -> list[Change]:
    """Return the changes that a claim's runs at a tier show. Raises MissingRecord if runs are missing."""
    claim = claims.all_claims()[name]
    found = []
    for outcome, (row, _, other) in zip(
        claims.outcomes(claim, claims.samples(claim, tier, results)), claim.expects, strict=True
    ):
        if "shift" in other:
            heldout = leads(*(claims.summaries(claim, r, tier, results / "runs") for r in (row, other)), "heldout_best")
            found.append(Change(row, outcome.comparison.mean, outcome.verdict, heldout))
    return found


def on_a_novel(results: Path) -> str:
    """Return what token shift changes in the perplexity on a novel, by claims 4 and 19; "" if runs are missing."""
    sizes = {"small": "in small models", "novel": "at the source's size"}
    try:
        shift = {tier: changes("token_shift", tier, results) for tier in sizes}
        parts = [
            (text, f"claims/{tier}.md#{name}", changes(name, tier, results)[0])
            for text, name, tier in (
                ("in small models", "aft_parts", "small"),
                ("in small models after twice the steps", "aft_shift_longer", "small"),
                ("at the source's size", "aft_parts", "novel"),
            )
        ]
    except MissingRecord:
        return ""
    fits = ", and ".join(
        f"by {', '.join(f'{each.fit:+.1%} ({each.row})' for each in shift[tier])} {place}"
        for tier, place in sizes.items()
    )
    verdicts = " and ".join(
        f"[{claims.combined(claims.all_claims()['token_shift'], [each.verdict for each in found])}]"
        f"(claims/{tier}.md#token_shift) {sizes[tier]}"
        for tier, found in shift.items()
    )
    fourth = ", ".join(
        f"{each.fit:+.1%} {text} ([this comparison]({link}): {each.verdict})" for text, link, each in parts
    )
    every = [*chain.from_iterable(shift.values()), *(each for _, _, each in parts)]
    bounds = [interval(compared(each.heldout), 0.95) for each in every]
    lower, higher = sum(each.low > 0 for each in bounds), sum(each.high < 0 for each in bounds)
    judged = {each.verdict for each in chain.from_iterable(shift.values())}
    fit_alone = (
        " So on a novel, token shift helps a model to fit its training text, and these runs do not show that it lowers "
        "the perplexity on other text. The accuracies at recall, by contrast, are those on held-out rows."
    )
    return (
        "On a novel, leaving token shift out changes the log perplexity on the training text, where a difference of "
        f"0.01 is called 1%, {fits}; claim 19 is {verdicts}. With f from 1, as claim 4 tests it, the change for AFT is "
        f"{fourth}. No verdict rests on held-out text. There, the lowest perplexity during training is lower with "
        f"token shift than without it in {lower} of these {len(every)} comparisons, and higher in {higher}; in the "
        "others the 95% interval includes 0."
        f"{fit_alone if judged == {REPRODUCED} and not lower else ''}"
    )


def for_the_claims(found: dict[tuple[str, str], Row]) -> str:
    """Return what the runs say about the source's claims that token shift helps; "" if they say nothing."""
    both = [variant for variant in CLAIMED if gains(found, variant)]
    if not both:
        return ""
    accuracies = ((label(v), mean(found[v, USUAL]), mean(found[v, NO_SHIFT])) for v in both)
    compared = (f"{name} {there:.1f}% with it and {gone:.1f}% without" for name, there, gone in accuracies)
    alone = {row.variant: mean(row) for (_, task), row in found.items() if task == NO_SHIFT}
    falling = sorted(alone, key=alone.get, reverse=True)
    members = BY_VALUES[USUAL]
    above = [f"{label(v)} {alone[v]:.1f}%" for v in falling if alone[v] > members + WORTH]
    below = [f"{label(v)} {alone[v]:.1f}%" for v in falling if alone[v] < members - WORTH]
    exceptions = (
        f" Without token shift, {len(above)} of {len(alone)} attentions are more than {WORTH} points above this "
        f"model's {members:.1f}%: {'; '.join(above)}."
    )
    delta = [label(v) for v in DELTA_RULES if alone.get(v, 0) > members + WORTH]
    rule = (
        f" A delta rule ({'; '.join(delta)}) can make this possible: what it adds to the state depends on what the "
        "state holds already, and therefore on earlier characters."
    )
    behind = f" Without token shift, these are more than {WORTH} points below {members:.1f}%: {'; '.join(below)}."
    return (
        "Claims 4 and 19 of [CLAIMS.md](CLAIMS.md) say that token shift helps; they are judged by perplexity on a "
        f"novel. Recall of 8 pairs shows what it is for: {'; '.join(compared)}. In a row of the text, a value follows "
        "its key. In a single layer without token shift (the notes name the attentions that have two in a block), K "
        "and V of a position depend on its own character only. A value then does not tell which key stands before it, "
        f"and {len(alone) - len(above)} of {len(alone)} attentions are at most {WORTH} points above a model that knows "
        "which values are in its row, but not to which keys they belong. Such a model reaches "
        f"{members:.1f}% with {USUAL} and {BY_VALUES[HARD]:.1f}% with {HARD} "
        "([data/README.md](../data/README.md#synthetic-texts-recall-and-induction))."
        f"{exceptions if above else ''}{rule if delta else ''}{behind if below else ''}"
    )


def page(cfg: DictConfig, found: dict[tuple[str, str], Row], with_plot: bool) -> str:
    """Return the contents of recall.md."""
    lines, tasks = [], [task for task in TASKS if any(task == name for _, name in found)]
    for variant in sorted(dict.fromkeys(variant for variant, _ in found), key=lambda v: rank(found, v), reverse=True):
        by_task = [found.get((variant, task)) for task in tasks]
        cells = [NO_FIGURE if row is None else shown(row) for row in by_task]
        gained = figures.with_interval(gains(found, variant), "{:+.1f}".format)
        state = next(filter(None, by_task)).summaries[0].get("state_bytes")
        cells += [figures.shown(gained), NO_FIGURE if state is None else f"{state:,}"]
        rates = ", ".join(NO_FIGURE if row is None else f"{row.rate:g}" for row in by_task)
        lines.append([label(variant), *cells, rates])
    gain = f"token shift adds to {USUAL}, points"
    heads = ["", *(f"{task}, %" for task in tasks), gain, "state, bytes", "learning rates"]
    runs = [summary for row in found.values() for summary in row.summaries]
    variants = sorted({variant for variant, _ in found})
    return markdown.page(
        f"# Recall{' and induction' if INDUCTION in tasks else ''}: finding a value in the context",
        finding(found),
        for_the_claims(found),
        on_a_novel(Path(cfg.results)),
        "![Recall against state, and against perplexity](recall.png)" * with_plot,
        markdown.table(lines, heads),
        markdown.notes(
            "Multi-query associative recall (data/README.md): each row has 8 pairs, with 8 possible keys and values, "
            "or 16 pairs, with 16. Figures are the share of the queries in held-out rows whose value is predicted: the "
            "mean over seeds, and the lowest and highest. Models have the plain start (starts=none), token shift "
            "unless the column says otherwise, and one block of 128 dimensions. The points that token shift adds are "
            "given with Student's 95% interval.",
            of_two_units(variants, "recall"),
            about_induction() if INDUCTION in tasks else "",
            "State: as in [leaderboard.md](leaderboard.md), where models without token shift need a little less.",
            f"An attention that fails with {HARD} may succeed after more steps: AFT does ([QUALITY.md](QUALITY.md)). "
            f"Not measured: {HARD} without token shift, and more pairs (data.pairs=64, for one).",
            f"{figures.budget(runs[0])}, {figures.seeds_in_words(list(cfg.seeds))}. "
            "The models are trained to predict every character.",
            "" if "rwv" in variants else "RWV is not measured: with its default settings it is AFT.",
            same_in_one_block(variants),
            "The learning rates are those of the accuracies, in the order of their columns. Each is the rate, among "
            f"{', '.join(f'{rate:g}' for rate in cfg.learning_rates)}, with the highest accuracy in runs with "
            f"{figures.seeds_in_words(list(cfg.rate_seeds))}; if several rates tie, it is the first of these.",
            far_from_the_choice(cfg, found),
            at_an_end(cfg, found),
            in_bf16(found),
            f"{markdown.trained_on(runs)}; `{COMMAND}`.",
        ),
    )


def about_induction() -> str:
    """Return a note on the induction heads task."""
    data = compose(["experiment=recall", *TASKS[INDUCTION], "attn=mha"]).data
    letters = data.length - 3  # before the answer, without the two triggers
    return (
        f"Induction, or the induction heads task (data/README.md): a row has {data.length} characters, drawn from "
        f"{data.symbols} letters, but at two places it has the trigger ⊢. The answer is the last character, the letter "
        f"that followed the first trigger. Guessing gives {100 / data.symbols:.1f}%, and always giving the "
        f"row's most frequent letter {accuracy_by_counts(letters, data.symbols):.1f}%. The text and the steps have as "
        "many characters as those of recall."
    )


def far_from_the_choice(cfg: DictConfig, found: dict[tuple[str, str], Row]) -> str:
    """Return a sentence that names rows whose runs chose a rate by an accuracy that other seeds do not have."""
    named = []
    for (variant, task), row in found.items():
        choice = mean(Row(variant, task, row.rate, summaries(cfg, variant, task, row.rate, cfg.rate_seeds)))
        if abs(choice - mean(row)) > FAR:
            named.append(f"{label(variant)} ({task}) {choice:.1f}%, {mean(row):.1f}%")
    return (
        f"Where the accuracy depends much on the seed, a rate can be chosen by chance. In these rows, the accuracy by "
        f"which the rate was chosen, given first, is more than {FAR} points from that of the table: {'; '.join(named)}."
        if named
        else ""
    )


def at_an_end(cfg: DictConfig, found: dict[tuple[str, str], Row]) -> str:
    """Return a sentence that names failing rows whose best rate is the lowest or highest that was tried.

    A row fails if its mean accuracy is at most ABLE. Returns "" if none is.
    """
    ends = min(cfg.learning_rates), max(cfg.learning_rates)
    failing = [row for row in found.values() if mean(row) <= ABLE and row.rate in ends]
    if not failing:
        return ""
    by_task = {task: [label(row.variant) for row in failing if row.task == task] for task in TASKS}
    named = ". ".join(f"Of {task}: {'; '.join(names)}" for task, names in by_task.items() if names)
    return (
        f"These give at most {ABLE}% of the answers, and their best rate is the lowest or the highest of "
        f"{', '.join(f'{rate:g}' for rate in cfg.learning_rates)}, so that another rate might do better. {named}."
    )


def in_bf16(found: dict[tuple[str, str], Row]) -> str:
    """Return a note that names the rows trained in bf16; "" if all runs have the same precision."""
    precisions = {
        f"{label(variant)} ({task})": {summary["precision"] for summary in row.summaries}
        for (variant, task), row in found.items()
    }
    return markdown.in_bf16(precisions)


def rank(found: dict[tuple[str, str], Row], variant: str) -> list[float]:
    """Return an attention's accuracies, those of the hardest task first, by which the table is sorted."""
    rows = [found.get((variant, task)) for task in (HARD, USUAL, NO_SHIFT)]
    return [-1.0 if row is None else mean(row) for row in rows]


def mean(row: Row) -> float:
    return statistics.mean(row.accuracies().values())


def shown(row: Row) -> str:
    return figures.with_interval(list(row.accuracies().values()), "{:.1f}".format, figures.extremes).text


def scatters(cfg: DictConfig, found: dict[tuple[str, str], Row]) -> list[Scatter]:
    """Return the plots of accuracy at the hardest task, against the state and against the leaderboard's perplexity."""
    states, perplexities = [], []
    many = {variant: row for (variant, task), row in found.items() if task == HARD}
    settings = compose(["study=leaderboard", f"results={cfg.results}"], "reproduce")
    board = leaderboard.read(settings, list(many))
    for variant, row in many.items():
        # Rounded as in tables, because smaller differences are chance and should not decide which points have rings.
        quality = round(mean(row), 1), *figures.extremes(list(row.accuracies().values()))
        if "state_bytes" in row.summaries[0]:
            states.append(Point(variant, row.summaries[0]["state_bytes"], *quality))
        if (beside := board.row(variant)) is not None:
            perplexities.append(Point(variant, beside.fit().value, *quality))
    recall = (f"recall of {HARD}, %; bars: lowest to highest seed", 1)
    state = ("state of streaming, bytes", -1)
    novel = ("perplexity of small models on their training text, a novel", -1)
    by_values = BY_VALUES[HARD], "a model that knows which values are in a row, but not their keys"
    plots = [
        Scatter(states, *state, *recall, "No other beats these in both state and recall", by_values),
        Scatter(perplexities, *novel, *recall, "No other beats these in both fit and recall", by_values),
    ]
    return [scatter for scatter in plots if scatter.points]


def write(cfg: DictConfig) -> None:
    """Write recall.md and its plot, with all attentions that are trained by default or that cfg.variants names.

    Raises MissingRecord if `read` finds no rows.
    """
    usual = rows(OmegaConf.merge(cfg, {"variants": None}), [USUAL])
    attentions = list(dict.fromkeys([*(variant for variant, _ in usual), *(cfg.variants or ())]))
    cfg = OmegaConf.merge(cfg, {"variants": attentions})
    results, found = Path(cfg.results), read(cfg)
    if not found:
        command = COMMAND + f" results={results}" * (cfg.results != "out")
        raise MissingRecord(f"{results}/runs/recall lacks finished runs: {command} trains them")
    plots = scatters(cfg, found)
    write_with_plot(results, "recall", page(cfg, found, bool(plots)), draw(plots) if plots else None)
