"""The rule that judges claims: its intervals, its verdicts, and how often it errs where the truth is known."""

import math

import numpy as np
import pytest
from scipy import stats

from scripts.reporting.rule import (
    ALPHA,
    Comparison,
    Interval,
    all_hold,
    compared,
    interval,
    intervals,
    judge,
    judge_each,
    one_holds,
    p_value,
    seeds_to_decide,
)
from scripts.reporting.rule_page import frequencies


def test_the_interval_and_the_p_value_are_student_s():
    d = [0.01, 0.03, -0.01, 0.04, 0.02]
    expected = stats.t.interval(0.95, 4, np.mean(d), stats.sem(d))
    assert interval(compared(d), 0.95)[:2] == pytest.approx(expected)
    assert p_value(compared(d)) == pytest.approx(stats.ttest_1samp(d, 0).pvalue)
    assert p_value(compared(d, "<=")) == pytest.approx(stats.ttest_1samp(d, -0.01).pvalue)
    for n in (12, 40):
        low, high, _ = interval(Comparison("<", 0.0, 1.0, n), 0.95)
        assert high - low == pytest.approx(2 * stats.t.ppf(0.975, n - 1) / math.sqrt(n))


@pytest.mark.parametrize(
    ("mean", "low", "high", "verdict"),
    [
        (0.006, 0.001, 0.011, "reproduced"),
        (0.006, 0.001, 0.009, "reproduced"),
        (0.004, 0.001, 0.007, "equivalent"),  # above 0, but the mean is below 0.5%
        (0.006, -0.001, 0.013, "undecided"),
        (0.0, -0.009, 0.009, "equivalent"),
        (0.0, -0.011, 0.011, "undecided"),
        (-0.004, -0.007, -0.001, "equivalent"),
        (-0.006, -0.011, -0.001, "contradicted"),
    ],
)
def test_the_verdict_follows_from_the_mean_and_the_interval(mean, low, high, verdict):
    assert judge(Comparison("<", mean, 0.01, 3), Interval(low, high, 0.95)) == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.009, 0.05, "reproduced"),
        (-0.009, -0.001, "reproduced"),
        (-0.011, 0.02, "undecided"),
        (-0.03, -0.011, "contradicted"),
    ],
)
def test_no_worse_is_judged_at_minus_one_percent(low, high, verdict):
    assert judge(Comparison("<=", (low + high) / 2, 0.01, 3), Interval(low, high, 0.95)) == verdict


def test_one_pair_decides_nothing_and_pairs_without_noise_decide_all():
    one = Comparison("<", 0.5, math.inf, 1)
    assert judge_each([one]) == ["undecided"]
    assert seeds_to_decide([one], all_hold) is None
    assert judge_each([Comparison("<", m, 0.0, 3) for m in (0.5, 0.0, -0.5)]) == [
        "reproduced",
        "equivalent",
        "contradicted",
    ]


def test_holm_s_intervals_get_lower_levels_step_by_step_until_one_contains_its_tested_value():
    """Three comparisons of 3 pairs with t = 20, 5, 1: p is 0.0025, 0.038, 0.42."""
    strong, middle, weak = (Comparison("<", t * 0.01 / math.sqrt(3), 0.01, 3) for t in (20, 5, 1))
    assert [found.level for found in intervals([weak, strong, middle])] == [1 - ALPHA / 2, 1 - ALPHA / 3, 1 - ALPHA / 2]
    assert intervals([weak, strong, middle])[2].low < 0 < intervals([middle])[0].low
    assert [found.level for found in intervals([strong, strong, weak])] == [1 - ALPHA / 3, 1 - ALPHA / 2, 1 - ALPHA]


def test_intervals_leave_out_the_tested_value_where_holm_s_test_rejects():
    generator = np.random.default_rng(1)
    for d in generator.normal(generator.normal(0, 0.02, (200, 4, 1)), 0.01, (200, 4, 3)):
        p = sorted(stats.ttest_1samp(d, 0, axis=1).pvalue)
        rejected = next((k for k in range(4) if p[k] > ALPHA / (4 - k)), 4)
        found = intervals([compared(row.tolist()) for row in d])
        assert sum(not i.low <= 0 <= i.high for i in found) == rejected


def test_a_claim_has_one_verdict():
    ahead, behind, same, open_ = "reproduced", "contradicted", "equivalent", "undecided"
    assert all_hold([ahead, ahead]) == one_holds([same, open_, ahead]) == ahead
    assert all_hold([ahead, open_, behind]) == one_holds([behind, behind]) == behind
    assert all_hold([ahead, same]) == one_holds([behind, same]) == same
    assert all_hold([ahead, same, open_]) == one_holds([behind, same, open_]) == open_


def test_the_seeds_that_would_decide():
    comparison = Comparison("<", 0.01, 0.01, 3)  # the interval is above 0 where t / sqrt(n) is below 1
    enough = next(n for n in range(3, 99) if stats.t.ppf(0.975, n - 1) / math.sqrt(n) < 1)
    assert seeds_to_decide([comparison], all_hold) == (enough, "reproduced") == (7, "reproduced")
    assert seeds_to_decide([comparison, comparison], all_hold)[0] > 7
    assert seeds_to_decide([Comparison("<", 0.0, 0.2, 3)], all_hold) is None
    assert seeds_to_decide([comparison, Comparison("<", -1.0, 0.01, 3)], one_holds)[0] > 3


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("noise", [0.003, 0.01, 0.1])
def test_false_verdicts_are_rare(n, noise):
    allowed = 0.035  # 2.5% plus three standard errors of a share of 2,000 experiments
    nothing = frequencies(["<"], [0.0], noise, n)
    assert max(nothing["reproduced"], nothing["contradicted"]) < allowed
    just_worse = frequencies(["<="], [-0.01], noise, n)
    assert max(just_worse["reproduced"], just_worse["contradicted"]) < allowed
    assert frequencies(["<"], [0.01], noise, n)["equivalent"] < allowed
    assert frequencies(["<", "<"], [-0.005, -0.005], noise, n)["reproduced"] < 0.001
    assert frequencies(["<", "<"], [0.005, 0.005], noise, n)["contradicted"] < allowed
    family = frequencies(["<"] * 6, [0.0] * 6, noise, n)
    assert family["reproduced"] + family["contradicted"] < 0.05


def test_true_differences_are_found():
    for n in (3, 5):
        assert frequencies(["<"], [0.02], 0.003, n)["reproduced"] > 0.99
        assert frequencies(["<"], [-0.02], 0.003, n)["contradicted"] > 0.99
    assert frequencies(["<"], [0.0], 0.003, 5)["equivalent"] > 0.99
    assert frequencies(["<", "<"], [0.02, 0.02], 0.003, 5)["reproduced"] > 0.99
