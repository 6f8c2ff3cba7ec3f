"""Make rule.md, which shows how often the rule gives each verdict when the true differences are known.

The differences of many simulated experiments are drawn from normal distributions, always with the same seed, and judged
by rule.py.
"""

from collections import Counter

import numpy as np

from scripts.reporting import markdown
from scripts.reporting.rule import UNDECIDED, VERDICTS, Comparison, all_hold, judge_each, seeds_to_decide

EXPERIMENTS = 2000
SEEDS = (2, 3, 5)
NOISES = (0.003, 0.01, 0.05, 0.1)  # standard deviations of a pair's difference
AHEAD = [(0,), (0.003,), (0.005,), (0.01,), (0.02,), (0.05,)]  # true differences
NO_WORSE = [(0.005,), (0,), (-0.005,), (-0.01,), (-0.02,), (-0.05,)]
ORDERS = [(0.02, 0.02), (0.01, 0.01), (0.02, 0), (0, 0), (0.05, -0.01), (-0.01, -0.01), (-0.02, -0.02)]
LONG = 5  # comparisons of a long order
LONG_ORDERS = [(gap,) * LONG for gap in (0.05, 0.02, 0.01, 0, -0.01)]


def frequencies(relations: list[str], gaps: list[float], noise: float, n: int) -> dict[str, float]:
    """Return the frequency, from 0 to 1, of each verdict on a claim that expects an order of rows.

    `relations` holds `<` where a row is expected to be ahead of the next one, and `<=` where it is expected to be no
    worse. `gaps` are the true differences of neighbours, positive if the earlier row is ahead. `noise` is the standard
    deviation of a pair's difference.
    """
    generator = np.random.default_rng(0)
    truth = np.cumsum([0.0, *gaps])
    losses = truth + generator.normal(0, noise / np.sqrt(2), (EXPERIMENTS, n, len(truth)))
    differences = np.diff(losses)
    means, deviations = differences.mean(1).tolist(), differences.std(1, ddof=1).tolist()
    counts = Counter(
        all_hold(judge_each([Comparison(*figures, n) for figures in zip(relations, *experiment, strict=True)]))
        for experiment in zip(means, deviations, strict=True)
    )
    return {verdict: counts[verdict] / EXPERIMENTS for verdict in VERDICTS}


def table(head: str, relation: str, truths: list[tuple[float, ...]]) -> str:
    """Return a table with a row for each noise and truth: the percentages of each verdict, by the number of seeds."""
    rows = []
    for noise in NOISES:
        for gaps in truths:
            by_seeds = [frequencies([relation] * len(gaps), list(gaps), noise, n) for n in SEEDS]
            cells = [share(found[verdict]) for found in by_seeds for verdict in VERDICTS]
            shown = [f"{100 * gap:g}%" for gap in gaps]
            rows.append([f"{100 * noise:g}%", shown[0] if len(gaps) == LONG else ", ".join(shown), *cells])
    heads = ["noise", head, *(f"{verdict}, {n} seeds" for n in SEEDS for verdict in VERDICTS)]
    return markdown.table(rows, heads, left=())


def seeds_table() -> str:
    """Return a table of the seeds that would decide A < B, and of the percentage of experiments that they decide."""
    rows = []
    for noise in NOISES:
        for (gap,) in AHEAD[3:]:
            decided = seeds_to_decide([Comparison("<", gap, noise, 3)], all_hold)
            if decided and decided[0] > 3:  # not those that 3 seeds decide already
                verdicts = frequencies(["<"], [gap], noise, decided[0])
                rows.append([f"{100 * noise:g}%", f"{100 * gap:g}%", str(decided[0]), share(1 - verdicts[UNDECIDED])])
    return markdown.table(rows, ["noise", "B - A", "seeds", "decided"], left=())


def share(frequency: float) -> str:
    return f"{100 * frequency:.1f}"


def page() -> str:
    """Return the contents of rule.md."""
    return markdown.page(
        "# How often the rule errs",
        f"How often scripts/reporting/rule.py gives each verdict, in percent of {EXPERIMENTS:,} simulated experiments "
        "whose true differences are known. Noise is the standard deviation of the difference of a pair of runs that "
        "share a seed. It is larger in models of the size that the source article uses than in small models, as the "
        "intervals on the claims' pages show. 1% stands for 0.01 in log perplexity. The frequencies are those of one "
        "claim: among many claims, some errors are to be expected. The number of seeds is fixed in advance here. If "
        "seeds, or rounds of timings, are added because a claim was undecided, errors are more frequent.",
        "## A < B",
        "B - A is the true difference of log perplexity. If it is 0, the verdicts reproduced and contradicted are "
        "errors. If it is above 0, contradicted is an error. If it is 1% or more, equivalent is an error too.",
        table("B - A", "<", AHEAD),
        "## A <= B: A is no worse",
        "A is no worse if B - A is above -1%, and worse if it is below. At -1%, reproduced and contradicted are both "
        "errors.",
        table("B - A", "<=", NO_WORSE),
        "## A < B < C: an order, with one verdict",
        "Reproduced is right if both differences are positive, and contradicted if at least one is negative.",
        table("B - A, C - B", "<", ORDERS),
        "## An order of six rows",
        f"A claim with {LONG} comparisons, all of whose true differences are equal.",
        table("each difference", "<", LONG_ORDERS),
        "## Seeds that would decide",
        "Pages give the number of seeds that would decide an undecided claim if its mean and its deviation stayed as "
        "they are. In the column `seeds`, this number is calculated from the true difference and deviation. The column "
        "`decided` shows in what percentage of simulated experiments, each with that many seeds, the verdict on A < B "
        "is not undecided. The table has true differences of 1% or more, without those that 3 seeds decide or that "
        "would take more than 100.",
        seeds_table(),
        "`python -m scripts.report` writes this page.",
    )
