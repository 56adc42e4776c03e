import math

import pytest

from ds_vcycle.train.lr import LrSchedule, learning_rate


def schedule(kind="cosine", *, peak=1.0, minimum=0.1, warmup_steps=4, steps=10):
    return LrSchedule(peak=peak, minimum=minimum, warmup_steps=warmup_steps, kind=kind, steps=steps)


def curve(lr):
    return [learning_rate(lr, step) for step in range(lr.steps)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_warm_up_starts_above_zero_and_ends_at_the_peak(kind):
    assert curve(schedule(kind))[:4] == [0.25, 0.5, 0.75, 1.0]


def test_linear_falls_by_equal_amounts_to_the_minimum_on_the_last_step():
    assert curve(schedule("linear"))[3:] == pytest.approx([1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1])


def test_cosine_is_half_way_in_the_middle_and_flat_at_both_ends():
    values = curve(schedule("cosine", warmup_steps=0, steps=101, minimum=0.0))
    assert values[0] == 1.0
    assert values[50] == pytest.approx(0.5)
    assert values[25] == pytest.approx(0.5 + math.sqrt(0.5) / 2)
    assert values[100] == 0.0
    assert values[0] - values[1] < 0.001 > values[99] - values[100]


def test_constant_stays_at_the_peak():
    assert curve(schedule("constant"))[4:] == [1.0] * 6


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_without_warm_up_the_first_step_is_at_the_peak(kind):
    assert learning_rate(schedule(kind, warmup_steps=0), 0) == 1.0


@pytest.mark.parametrize(("kind", "last"), [("cosine", 0.1), ("linear", 0.1), ("constant", 1.0)])
def test_the_last_value_holds_beyond_the_planned_steps(kind, last):
    assert learning_rate(schedule(kind), 25) == pytest.approx(last)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_a_phase_that_is_all_warm_up_ends_at_the_peak(kind):
    assert curve(schedule(kind, warmup_steps=5, steps=5)) == [0.2, 0.4, 0.6, 0.8, 1.0]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_a_phase_of_one_step_is_at_the_peak(kind):
    assert curve(schedule(kind, warmup_steps=0, steps=1)) == [1.0]
