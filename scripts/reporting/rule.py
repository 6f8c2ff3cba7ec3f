"""The rule that judges claims, version 2.

Two rows A and B are compared over pairs of runs that share a seed. d is the log perplexity of B minus
that of A: above 0 where A is ahead, and 0.01 is called one percent. From the n values of d follows
Student's interval of their mean, mean ± t·s/√n, with s their standard deviation. A comparison expects
A to be ahead (`<`) or to be no worse (`<=`), and gets one of four verdicts:

              A < B                                             A <= B
reproduced    interval above 0 and mean at least 0.5%           interval above -1%
contradicted  interval below 0 and mean at most -0.5%           interval below -1%
equivalent    none of these, and interval within ±1%            never: it would be reproduced
undecided     all else                                          all else

Holm's correction within a claim, turned into intervals. Each of a claim's m comparisons has a two-sided
p-value of Student's test that the mean of d is 0, or -1% for `<=`. They are sorted, smallest first. The
k-th of them has the interval of level 1 - 0.05 / (m - k + 1): 1 - 0.05 / m for the first, 95% for the
last. At the first interval that holds its tested value the steps end, and all later ones have its level.
So an interval leaves out the tested value exactly where Holm's test at 5% rejects it, and the chance of
any false reproduced or contradicted in a claim is at most 5%. A claim of one comparison has the plain 95%.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from scipy.special import stdtr, stdtrit  # Student's t: its distribution function, and the inverse of that

LEAST = 0.005  # a mean difference below this is not called a difference
MARGIN = 0.01  # differences below this are equivalent
ALPHA = 0.05
MOST_SEEDS = 100  # more than these are not looked for

REPRODUCED, CONTRADICTED, EQUIVALENT, UNDECIDED = "reproduced", "contradicted", "equivalent", "undecided"
VERDICTS = (REPRODUCED, CONTRADICTED, EQUIVALENT, UNDECIDED)


class Comparison(NamedTuple):
    """What a comparison expects, and what was found: mean and standard deviation of d over n pairs."""

    relation: str  # "<" or "<="
    mean: float
    deviation: float  # infinite where one pair leaves it unknown
    n: int


class Interval(NamedTuple):
    """Where the mean of d lies, at a level of confidence from 0 to 1."""

    low: float
    high: float
    level: float


def tested_value(comparison: Comparison) -> float:
    return 0.0 if comparison.relation == "<" else -MARGIN


def p_value(comparison: Comparison) -> float:
    """Two-sided, of Student's test that the mean of d is the tested value."""
    distance = abs(comparison.mean - tested_value(comparison))
    if comparison.n < 2 or distance == 0:
        return 1.0
    if comparison.deviation == 0:
        return 0.0
    return 2 * float(stdtr(comparison.n - 1, -distance * math.sqrt(comparison.n) / comparison.deviation))


def interval(comparison: Comparison, level: float) -> Interval:
    """Student's interval; all numbers where there is only one pair."""
    if comparison.n < 2:
        return Interval(-math.inf, math.inf, level)
    t = float(stdtrit(comparison.n - 1, (1 + level) / 2))
    half = t * comparison.deviation / math.sqrt(comparison.n)
    return Interval(comparison.mean - half, comparison.mean + half, level)


def intervals(comparisons: list[Comparison]) -> list[Interval]:
    """The intervals of a claim's comparisons, after Holm's correction."""
    p_values = [p_value(comparison) for comparison in comparisons]
    found: dict[int, Interval] = {}
    remaining = len(comparisons)
    for i in sorted(range(len(comparisons)), key=p_values.__getitem__):
        level = ALPHA / remaining
        found[i] = interval(comparisons[i], 1 - level)
        if p_values[i] <= level:
            remaining -= 1
    return [found[i] for i in range(len(comparisons))]


def judge(comparison: Comparison, interval: Interval) -> str:
    """The verdict on one comparison."""
    if comparison.relation == "<=":
        if interval.low > -MARGIN:
            return REPRODUCED
        return CONTRADICTED if interval.high < -MARGIN else UNDECIDED
    if interval.low > 0 and comparison.mean >= LEAST:
        return REPRODUCED
    if interval.high < 0 and comparison.mean <= -LEAST:
        return CONTRADICTED
    return EQUIVALENT if -MARGIN < interval.low and interval.high < MARGIN else UNDECIDED


def judge_each(comparisons: list[Comparison]) -> list[str]:
    """The verdicts on a claim's comparisons."""
    return [judge(c, i) for c, i in zip(comparisons, intervals(comparisons), strict=True)]


def all_hold(verdicts: list[str]) -> str:
    """One verdict for a claim that expects all of its comparisons, as an order A < B < C does.

    One that is contradicted contradicts the claim. Else one that is undecided leaves the claim undecided, and
    one that is equivalent makes the claim equivalent: what it puts in an order is in part the same.
    """
    return next(v for v in (CONTRADICTED, UNDECIDED, EQUIVALENT, REPRODUCED) if v in verdicts)


def one_holds(verdicts: list[str]) -> str:
    """One verdict for a claim that something exists for which a comparison holds.

    One that is reproduced is enough. Else one that is undecided leaves the claim undecided; where the best is
    as good as what it has to beat, the claim is equivalent, and where all are behind, contradicted.
    """
    return next(v for v in (REPRODUCED, UNDECIDED, EQUIVALENT, CONTRADICTED) if v in verdicts)


def seeds_to_decide(comparisons: list[Comparison], combine: Callable[[list[str]], str]) -> int | None:
    """The number of seeds that would decide an undecided claim, if means and deviations stayed as they are.

    None where they are more than MOST_SEEDS, or unknown because there is one pair only. `combine` makes one
    verdict of those on the comparisons: all_hold or one_holds.
    """
    for n in range(comparisons[0].n, MOST_SEEDS + 1):
        if combine(judge_each([comparison._replace(n=n) for comparison in comparisons])) != UNDECIDED:
            return n
    return None
