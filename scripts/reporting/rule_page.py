"""How often the rule gives each verdict where the truth is known.

Draws the differences of many simulated experiments from normal distributions, and judges each by rule.py. The same
seed gives the same page.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tabulate import tabulate

from data.files import write_bytes
from scripts.reporting.rule import VERDICTS, Comparison, all_hold, judge_each

EXPERIMENTS = 2000
SEEDS = (3, 5)
NOISES = (0.003, 0.01)  # standard deviation of a pair's difference


def frequencies(
    relations: list[str], gaps: list[float], noise: float, n: int, experiments: int = EXPERIMENTS
) -> dict[str, float]:
    """How often each verdict is given on a claim that expects an order of rows, from 0 to 1.

    Each row is expected to be ahead of the next one by the relation between them. `gaps` are the true differences
    of neighbours, above 0 where the earlier row is ahead; `noise` is the standard deviation of a pair's difference.
    """
    generator = np.random.default_rng(0)
    truth = np.cumsum([0.0, *gaps])
    losses = truth + generator.normal(0, noise / np.sqrt(2), (experiments, n, len(truth)))
    differences = np.diff(losses)
    means, deviations = differences.mean(1).tolist(), differences.std(1, ddof=1).tolist()
    counts = Counter(
        all_hold(judge_each([Comparison(*found, n) for found in zip(relations, *experiment, strict=True)]))
        for experiment in zip(means, deviations, strict=True)
    )
    return {verdict: counts[verdict] / experiments for verdict in VERDICTS}


def table(heads: list[str], truths: dict[str, Callable[[float, int], dict[str, float]]]) -> str:
    """A row for each noise and truth, with the percentages of each verdict at 3 and 5 seeds."""
    rows = []
    for noise in NOISES:
        for truth, found in truths.items():
            cells = [f"{100 * found(noise, n)[verdict]:.1f}" for n in SEEDS for verdict in VERDICTS]
            rows.append([f"{100 * noise:g}%", truth, *cells])
    heads = ["noise", *heads, *(f"{verdict}, {n} seeds" for n in SEEDS for verdict in VERDICTS)]
    return tabulate(rows, heads, "github", colalign=["right"] * len(heads), disable_numparse=True)


def of(relations: list[str], gaps: list[float]) -> Callable[[float, int], dict[str, float]]:
    return lambda noise, n: frequencies(relations, gaps, noise, n)


def page() -> str:
    ahead = {f"{100 * gap:g}%": of(["<"], [gap]) for gap in (0, 0.003, 0.005, 0.01, 0.02, 0.05)}
    no_worse = {f"{100 * gap:g}%": of(["<="], [gap]) for gap in (0.005, 0, -0.005, -0.01, -0.02, -0.05)}
    steps = ((0.02, 0.02), (0.01, 0.01), (0.02, 0.0), (0.0, 0.0), (0.05, -0.01), (-0.01, -0.01), (-0.02, -0.02))
    order = {", ".join(f"{100 * gap:g}%" for gap in gaps): of(["<", "<"], list(gaps)) for gaps in steps}
    return "\n".join(
        [
            "# The rule, where the truth is known",
            "",
            f"How often scripts/reporting/rule.py gives each verdict, in percent of {EXPERIMENTS:,} simulated "
            "experiments. Noise is the standard deviation of the difference of a pair of runs that share a seed.",
            "",
            "## A < B",
            "",
            "By the true difference of log perplexity, B minus A. Where it is 0, every reproduced and every "
            "contradicted is false.",
            "",
            table(["B - A"], ahead),
            "",
            "## A <= B: A is no worse",
            "",
            "Where the true difference is -1%, every reproduced and every contradicted is false.",
            "",
            table(["B - A"], no_worse),
            "",
            "## A < B < C: an order, with one verdict",
            "",
            "The order is true where both differences are above 0, and false the other way round.",
            "",
            table(["B - A, C - B"], order),
            "",
            "`python -m scripts.report` writes this page.",
            "",
        ]
    )


def write(results: Path) -> None:
    """Write rule.md."""
    write_bytes(results / "rule.md", page().encode())
