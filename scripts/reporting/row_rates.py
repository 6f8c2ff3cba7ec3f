"""Find the learning rates that were tried with the settings of claims' rows, and write the part of rates.md on them."""

import math
from pathlib import Path
from statistics import mean, mode

from scripts.reporting import claims, markdown
from scripts.reporting.figures import NO_FIGURE, budget
from scripts.reporting.records import composed, name_of
from scripts.reporting.tried import Tried, at_an_end, perplexity, rate_seeds, runs_by_rate, without_rate
from training.runs import all_folders


def tried(runs: Path, words: tuple[str, ...]) -> Tried:
    """Return the runs with these overrides of train.py, whatever their learning rate, and with one of `rate_seeds`."""
    return runs_by_rate(all_folders(runs / composed(words).job.experiment), words, rate_seeds())


def loss(summary: dict) -> float:
    """Return the log perplexity on the training text, infinite if the run has diverged."""
    return summary["evaluation"]["fit"]["loss"] if summary["status"] == "finished" else math.inf


def best_rate(rates: Tried) -> float:
    """Return the rate with the lowest mean log perplexity over the seeds that it was tried with."""
    return min(rates, key=lambda rate: mean(map(loss, rates[rate].values())))


def in_words(rates: Tried, used: float) -> str:
    """Return which of the rates that were tried is the best: "best of 0.001, 0.002, 0.004" if it is the one in use."""
    among, best = ", ".join(f"{rate:g}" for rate in rates), best_rate(rates)
    return f"best of {among}" if best == used else f"{best:g} is the best of {among}"


def changes_settings(words: tuple[str, ...]) -> bool:
    """Return whether overrides of train.py change other settings than the attention, the optimiser and its rate."""
    usual = composed(tuple(word for word in words if word.split("=")[0] in ("experiment", "attn", "optim")))
    return without_rate(composed(words).job.name) != without_rate(usual.job.name)


def rows_of_claims(tier: str, runs: Path) -> dict[str, Tried]:
    """Return what was tried with each row that changes settings, {name: rates}, in the order of the claims."""
    found, seen = {}, set()
    for claim in claims.choose(None, tier).values():
        for row in claim.rows if claim.measure in claims.TRAINED else ():
            words = claims.overrides(claim, row, tier)
            model = without_rate(composed(words).job.name)
            if model not in seen and changes_settings(words) and (rates := tried(runs, words)):
                found[row_name(words)] = rates
            seen.add(model)
    return found


def row_name(words: tuple[str, ...]) -> str:
    """Return the name of a row in pages, without its learning rate: "AFT, gamma=false"."""
    attn = next(word.removeprefix("attn=") for word in words if word.startswith("attn="))
    others = (word for word in words if word.split("=")[0] not in ("experiment", "attn", "optim.lr"))
    return name_of(" ".join([attn, *others]))


def cell(runs: dict[int, dict], is_best: bool) -> str:
    """Return the perplexity with each seed, in ascending order of the seeds; a dash without runs."""
    text = ", ".join(perplexity(loss(runs[seed])) for seed in sorted(runs))
    return f"**{text}**" if is_best else text or NO_FIGURE


def budgets_in_words(runs: list[dict]) -> str:
    """Return the budget of most runs and, if other runs have another one, that the names of rows give it."""
    budgets = [budget(summary) for summary in runs]
    others = ", unless a row's name sets other steps, or a context and batch that give a step more characters"
    return mode(budgets) + others * (len({*budgets}) > 1)


def sections(results: Path) -> list[str]:
    """Return the paragraphs on the rows of claims, a section for each tier at which rates were tried with some row."""
    told = []
    first, second = rate_seeds()
    for tier in claims.TIERS:
        rows = rows_of_claims(tier, results / "runs")
        summaries = [s for of_row in rows.values() for runs in of_row.values() for s in runs.values()]
        finished = [summary for summary in summaries if summary["status"] == "finished"]
        if not finished:
            continue
        rates = sorted({rate for of_row in rows.values() for rate in of_row})
        cells = [
            [name, *(cell(of_row.get(rate, {}), rate == best_rate(of_row)) for rate in rates)]
            for name, of_row in rows.items()
        ]
        ends = [f"`{name}`" for name, of_row in rows.items() if best_rate(of_row) in (min(of_row), max(of_row))]
        told += [
            f"## {tier}, rows of claims",
            "Rows of [claims](CLAIMS.md) that change settings of their attention.",
            markdown.table(cells, ["", *(f"{rate:g}" for rate in rates)]),
            markdown.notes(
                f"Perplexity on the whole training text with seeds {first} and {second}, which no verdict uses; a "
                f"single figure is that with seed {first}. The best rate, by the mean log perplexity over its seeds, "
                "is bold. A dash: not tried.",
                at_an_end(ends),
                f"{budgets_in_words(finished)}; {markdown.vocabulary(finished[0])}; {markdown.trained_on(finished)}.",
                f"`python train.py experiment={tier} attn=... optim.lr=... seed=...`; the sections on the claims have "
                "the other words of each row's command.",
            ),
        ]
    return told
