"""Formulas against definitions, and estimators against simulations with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradstats.statistics._training import (
    RunningRatio,
    StepGradients,
    cosines_to_mean,
    fraction_against,
    gradient_diversity,
    inner_product_test,
    m_coherence,
    norm_test,
    orthogonality_test,
)
from tests.monitor.expected import metrics_of, weighted_tests


def of(rows: np.ndarray, weight: np.ndarray | None = None) -> StepGradients:
    """Return what a monitor knows of the gradients ``rows`` (N, d)."""
    count = len(rows)
    weight = np.full(count, 1 / count) if weight is None else weight / weight.sum()
    mean = weight @ rows
    return StepGradients(
        (rows**2).sum(1), weight, float(mean @ mean), np.zeros(count, int), rows @ mean
    )


def test_every_formula_against_its_definition():
    rows = np.random.default_rng(0).normal(0.3, 1, (7, 20))
    step, expected = of(rows), metrics_of(rows)
    spread, gradient = step.noise_scale
    got = {
        "gns/tr_sigma": spread,
        "gns/g2": gradient,
        "gradient_diversity": gradient_diversity(step),
        "m_coherence": m_coherence(step),
        "norm_test/theta": norm_test(step),
        "inner_test/theta": inner_product_test(step),
        "ortho_test/nu": orthogonality_test(step),
        "align/mean_cos_to_mean": cosines_to_mean(step).mean(),
        "align/fraction_negative": fraction_against(step),
    }
    for name, value in got.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-10, err_msg=name)


def test_unequal_weights():
    """Means are weighted, ḡ included; 1 / Σ w_i² stands for the number of examples."""
    rows = np.random.default_rng(0).normal(0.3, 1, (6, 20))
    weight = np.array([0.4, 0.3, 0.1, 0.1, 0.05, 0.05])
    step, expected = of(rows, weight), weighted_tests(rows, weight)
    assert inner_product_test(step) == pytest.approx(expected["inner_test/theta"], rel=1e-12)
    assert orthogonality_test(step) == pytest.approx(expected["ortho_test/nu"], rel=1e-12)
    equal = weighted_tests(rows, np.full(6, 1 / 6))
    for name, value in equal.items():
        assert value == pytest.approx(metrics_of(rows)[name], rel=1e-12)


def test_weights_by_which_most_examples_point_away_from_the_mean():
    """ḡ = 0.75; p = (0.75, −1.125, −1.125); all gradients lie along ḡ."""
    step = of(np.array([[1.0, 0.0], [-1.5, 0.0], [-1.5, 0.0]]), np.array([0.9, 0.05, 0.05]))
    spread = 0.9 * (0.75 - 0.5625) ** 2 + 0.1 * (-1.125 - 0.5625) ** 2
    theta = math.sqrt(spread / ((1 / 0.815 - 1) * 0.5625**2))
    assert inner_product_test(step) == pytest.approx(theta, rel=1e-12)
    assert orthogonality_test(step) == pytest.approx(0, abs=1e-6)


def test_one_example_that_has_all_the_weight():
    """To rounding there is one example only: nothing is known of the spread."""
    step = of(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([1.0, 1e-20]))
    assert all(map(math.isnan, step.noise_scale))
    assert math.isnan(inner_product_test(step)) and math.isnan(orthogonality_test(step))


def test_equal_and_orthogonal_gradients():
    equal, orthogonal = of(np.tile([1.0, 2.0], (5, 1))), of(2 * np.eye(5))
    assert m_coherence(equal) == pytest.approx(5) and m_coherence(orthogonal) == pytest.approx(1)
    assert equal.noise_scale == pytest.approx((0, 5))
    assert orthogonal.noise_scale == pytest.approx((4, 0))
    assert inner_product_test(equal) == 0 and orthogonality_test(equal) == 0
    assert fraction_against(equal) == 0


def test_one_example_has_no_noise_scale():
    assert all(map(math.isnan, of(np.ones((1, 3))).noise_scale))
    assert math.isnan(norm_test(of(np.ones((1, 3)))))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_noise_scale_is_unbiased(weighted):
    """Gradients N(μ, Σ): tr Σ and ‖μ‖² are known, and hit within four standard errors."""
    generator = np.random.default_rng(1)
    size, trials, width = 12, 4000, 10
    mean, deviation = np.full(width, 0.2), np.linspace(0.5, 1.5, width)
    weight = np.linspace(1, 3, size) if weighted else np.ones(size)
    draws = generator.normal(mean, deviation, (trials, size, width))
    estimates = np.array([of(rows, weight).noise_scale for rows in draws])
    error = estimates.std(0, ddof=1) / math.sqrt(trials)
    truth = np.array([(deviation**2).sum(), mean @ mean])
    assert (np.abs(estimates.mean(0) - truth) < 4 * error).all()
    assert (error < 0.02 * truth + 0.01).all()  # else the line above would accept anything
    assert (estimates[:, 1] < 0).mean() > 0.05  # single steps often have no meaning at all


@pytest.mark.parametrize("sizes", [(16,), (16, 16, 16, 3)], ids=["alike", "a short batch"])
def test_the_ratio_of_averages_finds_the_noise_scale_and_knows_its_error(sizes):
    """B_simple is known; the ratio of averages hits it and reports its own spread."""
    generator = np.random.default_rng(2)
    width, steps, runs = 10, 120, 150
    mean = np.full(width, 0.2)
    truth = width / (mean @ mean)
    values, errors, alike, naive = [], [], [], []
    for _ in range(runs):
        ratio, unweighted = RunningRatio(decay=0.98), RunningRatio(decay=0.98)
        single = []
        for number in range(steps):
            step = of(generator.normal(mean, 1, (sizes[number % len(sizes)], width)))
            estimate = step.noise_scale
            ratio.add(*estimate, step.effective_batch)
            unweighted.add(*estimate)
            single.append(estimate[0] / estimate[1])
        values.append(ratio.value)
        errors.append(ratio.standard_error)
        alike.append(unweighted.value)
        naive.append(np.mean(single))
    error = np.nanstd(values, ddof=1)
    assert abs(np.mean(values) / truth - 1) < 0.05
    assert 0.8 < np.median(errors) / error < 1.25
    covered = np.abs(np.array(values) - truth) < 2 * np.array(errors)
    assert covered.mean() > 0.88
    assert abs(np.median(naive) / truth - 1) > 0.3  # what one would get from averaged ratios
    if len(sizes) > 1:
        # Steps of few examples, such as the last of an epoch, spoil an average of all alike.
        assert error < 0.7 * np.nanstd(alike, ddof=1)


def test_a_ratio_without_meaning_is_nan():
    ratio = RunningRatio(0.5)
    assert math.isnan(ratio.value) and math.isnan(ratio.standard_error)
    ratio.add(1.0, -1.0)
    assert math.isnan(ratio.value)
    before = ratio.state_dict()
    ratio.add(math.nan, 1.0)
    ratio.add(1.0, math.inf)
    assert ratio.state_dict() == before
    ratio.add(1.0, 2.0)
    # weights 1/2 and 1: (1/2 + 1) / (−1/2 + 2)
    assert ratio.value == pytest.approx(1.0)
    again = RunningRatio(0.5)
    again.load_state_dict(ratio.state_dict())
    for each in (ratio, again):
        each.add(3.0, 4.0, 2.0)
    # (1/4 + 1/2 + 2 · 3) / (−1/4 + 1 + 2 · 4)
    assert ratio.value == pytest.approx(6.75 / 8.75)
    assert (again.value, again.standard_error) == (ratio.value, ratio.standard_error)


def test_a_ratio_of_one_step_has_a_value_and_no_error():
    ratio = RunningRatio(0.5)
    ratio.add(3.0, 2.0)
    assert ratio.value == 1.5 and math.isnan(ratio.standard_error)


def test_a_ratio_that_forgets_at_once_has_a_value_and_no_error():
    ratio = RunningRatio(decay=0.0)
    for numerator in (3.0, 4.0):
        ratio.add(numerator, 2.0)
    assert ratio.value == 2.0 and math.isnan(ratio.standard_error)
