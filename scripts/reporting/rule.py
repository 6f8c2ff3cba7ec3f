"""The rule that judges claims, version 2.

Two rows A and B are compared over pairs of runs that share a seed, or of timings in the same round. d is a figure of B,
such as its log perplexity or log cost, minus that of A: it is positive if A is ahead, and 0.01 is called one percent.
The n values of d give Student's interval of their mean, mean ± t·s/√n, where s is their standard deviation. A
comparison expects A to be ahead (`<`) or to be no worse (`<=`), and gets one of four verdicts:

              A < B                                             A <= B
reproduced    interval above 0 and mean at least 0.5%           interval above -1%
contradicted  interval below 0 and mean at most -0.5%           interval below -1%
equivalent    neither, and interval within ±1%                  never: it would be reproduced
undecided     otherwise                                         otherwise

The intervals of a claim are corrected by Holm's method. Each of its m comparisons has the two-sided p-value of
Student's test that the mean of d is 0, or -1% for `<=`. The p-values are sorted in ascending order, and the k-th
comparison has the interval of level 1 - 0.05 / (m - k + 1): 1 - 0.05 / m for the first, 95% for the last. The first
interval that contains its tested value ends the procedure: all later intervals have its level. So an interval excludes
the tested value exactly if Holm's test at 5% rejects it, and the chance of any false reproduced or contradicted in a
claim is at most 5%. A claim with one comparison has the plain 95% interval.

Peak memory is measured once, and this value is used in every round. With two or more rounds, s is then 0, so that
comparisons of peak memory are judged as if they were exact. As their p-values are 0, unless the mean is exactly the
tested value, they come first in Holm's order and do not widen the other intervals.
"""

import functools
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

from scipy.special import stdtr, stdtrit  # Student's t: the distribution function and its inverse

LEAST = 0.005  # the smallest mean difference that counts
MARGIN = 0.01  # an interval within ±MARGIN is equivalent, and `<=` tests -MARGIN
ALPHA = 0.05  # the level of Holm's test
MOST_SEEDS = 100  # the largest number of seeds that seeds_to_decide tries

REPRODUCED, CONTRADICTED, EQUIVALENT, UNDECIDED = "reproduced", "contradicted", "equivalent", "undecided"
VERDICTS = (REPRODUCED, CONTRADICTED, EQUIVALENT, UNDECIDED)


class Comparison(NamedTuple):
    """What a comparison expects, and the mean and standard deviation of d over n pairs."""

    relation: str  # "<" or "<="
    mean: float
    deviation: float  # infinite for a single pair
    n: int


class Interval(NamedTuple):
    """A confidence interval of the mean of d, at a level from 0 to 1."""

    low: float
    high: float
    level: float


def compared(d: list[float], relation: str = "<") -> Comparison:
    """Return the comparison whose mean and standard deviation are those of the differences `d`."""
    return Comparison(relation, statistics.mean(d), statistics.stdev(d) if len(d) > 1 else math.inf, len(d))


def tested_value(comparison: Comparison) -> float:
    return 0.0 if comparison.relation == "<" else -MARGIN


def p_value(comparison: Comparison) -> float:
    """Return the two-sided p-value of Student's test that the mean of d is the tested value."""
    distance = abs(comparison.mean - tested_value(comparison))
    if comparison.n < 2 or distance == 0:
        return 1.0
    if comparison.deviation == 0:
        return 0.0
    return 2 * float(stdtr(comparison.n - 1, -distance * math.sqrt(comparison.n) / comparison.deviation))


def interval(comparison: Comparison, level: float) -> Interval:
    """Return Student's interval of the mean of d, unbounded for a single pair."""
    if comparison.n < 2:
        return Interval(-math.inf, math.inf, level)
    half = quantile(comparison.n - 1, (1 + level) / 2) * comparison.deviation / math.sqrt(comparison.n)
    return Interval(comparison.mean - half, comparison.mean + half, level)


@functools.cache
def quantile(freedom: int, level: float) -> float:
    """Return the quantile of Student's t with `freedom` degrees of freedom. It is cached for simulations."""
    return float(stdtrit(freedom, level))


def intervals(comparisons: list[Comparison]) -> list[Interval]:
    """Return the intervals of a claim's comparisons, corrected by Holm's method."""
    p_values = [p_value(comparison) for comparison in comparisons]
    corrected: dict[int, Interval] = {}
    remaining = len(comparisons)
    for i in sorted(range(len(comparisons)), key=p_values.__getitem__):
        level = ALPHA / remaining
        corrected[i] = interval(comparisons[i], 1 - level)
        if p_values[i] <= level:
            remaining -= 1
    return [corrected[i] for i in range(len(comparisons))]


def judge(comparison: Comparison, interval: Interval) -> str:
    """Return the verdict on one comparison."""
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
    """Return the verdicts on a claim's comparisons."""
    return [judge(c, i) for c, i in zip(comparisons, intervals(comparisons), strict=True)]


def all_hold(verdicts: list[str]) -> str:
    """Return the verdict on a claim that expects all of its comparisons to hold, such as an order A < B < C."""
    return next(v for v in (CONTRADICTED, UNDECIDED, EQUIVALENT, REPRODUCED) if v in verdicts)


def one_holds(verdicts: list[str]) -> str:
    """Return the verdict on a claim that expects at least one of its comparisons to hold."""
    return next(v for v in (REPRODUCED, UNDECIDED, EQUIVALENT, CONTRADICTED) if v in verdicts)


def seeds_to_decide(comparisons: list[Comparison], combine: Callable[[list[str]], str]) -> tuple[int, str] | None:
    """Return the number of seeds that would decide a claim, and the verdict, if means and deviations stayed the same.

    Returns None if the number is larger than MOST_SEEDS, or unknown because there is only one pair. `combine` turns the
    verdicts on the comparisons into one verdict, as all_hold and one_holds do.
    """
    for n in range(comparisons[0].n, MOST_SEEDS + 1):
        verdict = combine(judge_each([comparison._replace(n=n) for comparison in comparisons]))
        if verdict != UNDECIDED:
            return n, verdict
    return None
