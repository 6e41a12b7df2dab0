"""Cumulative targets: monotone, never above the budget, and on it exactly at the end."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparsify.core.schedule import SHAPES, Schedule
from sparsify.errors import SparsifyError
from sparsify.strategies.strategy import resolve_schedule

schedules = st.builds(
    Schedule,
    shape=st.sampled_from(sorted(SHAPES)),
    every=st.integers(1, 20),
    until=st.one_of(st.sampled_from([1.0, 1, 0.5, 0.1, 1 / 3]), st.floats(0.01, 1)),
)


@settings(max_examples=150)
@given(schedule=schedules, steps=st.integers(1, 120), budget=st.integers(1, 10_000_000), more=st.integers(0, 10))
@example(schedule=Schedule("cosine", every=7, until=0.3), steps=50, budget=3, more=0)
def test_targets_grow_to_the_budget_and_land_on_it_and_nothing_is_unmasked_ahead_of_them(schedule, steps, budget, more):
    targets = [schedule.target(step, steps, budget) for step in range(steps + 5)]
    assert all(isinstance(target, int) for target in targets)
    assert targets[0] >= 0
    assert targets == sorted(targets)
    assert max(targets) == targets[steps - 1] == budget
    for step, target in enumerate(targets):
        known = 0 if step >= steps else target + more  # more than planned, as after loading a fuller state
        assert schedule.quota(step, steps, budget, unmasked=known) == 0


def test_shares_that_floats_cannot_hold_lose_no_entry():
    # 0.7 * 10 steps and thirds are exact, so that no floor falls one short
    assert Schedule(until=0.7).target(6, steps=10, budget=10**15) == 10**15
    assert Schedule().target(0, steps=3, budget=3 * 10**15) == 10**15


def test_an_unknown_shape_names_the_nearest():
    with pytest.raises(SparsifyError, match=r"unknown schedule 'cosin'; expected one of uniform, .*mean 'cosine'\?"):
        Schedule("cosin")
    with pytest.raises(SparsifyError, match=r"unknown schedule 'zzz'; expected one of [a-z, ]+\.$"):
        Schedule("zzz")


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"every": every}, r"every=.* steps; expected an int of at least 1") for every in (0, 1.5, "2", True)]
    + [({"until": until}, r"until=.*share of the steps in \(0, 1\]") for until in (0, -0.5, 1.01, math.nan, "0.5")],
    ids=str,
)
def test_every_is_a_whole_number_of_steps_and_until_a_share(settings, text):
    with pytest.raises(SparsifyError, match=text):
        Schedule(**settings)


def test_a_schedule_or_its_name_is_a_schedule():
    schedule = Schedule("cubic", every=3)
    assert resolve_schedule(schedule) is schedule
    assert resolve_schedule("linear") == Schedule("linear")
    assert resolve_schedule("early") == Schedule(until=0.2)
    for other in (None, 3, ["uniform"], "earl"):
        with pytest.raises(SparsifyError, match=r"expected a name \(early, uniform, linear, cubic, cosine\) or a Sch"):
            resolve_schedule(other)
