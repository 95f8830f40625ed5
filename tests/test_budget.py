"""A budget asks for checkpoints in time, and halts once it has them. Clocks are ours here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.tune.experiment import Trial
from ray.tune.result import DONE, SHOULD_CHECKPOINT

from tune_study import budget as module
from tune_study.budget import Budget


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def halted():
    return []


@pytest.fixture
def budget(halted):
    return Budget(100.0, lambda: halted.append(1))


def trial(name):
    return SimpleNamespace(trial_id=name, status=Trial.RUNNING)


def report(budget, clock, trial, at, **row):
    clock.now, result = at, dict(row)
    budget.on_trial_result(0, [], trial, result)
    return result.get(SHOULD_CHECKPOINT, False)


def test_it_halts_when_every_running_cell_has_saved(budget, clock, halted):
    a, b = trial("a"), trial("b")
    for at in (10, 40, 70):  # reports take 30 s: the end is near from 70 on
        asked = [report(budget, clock, t, at) for t in (a, b)]
        budget.on_step_end(0, [a, b])
    assert asked == [True, True]
    budget.on_checkpoint(0, [], a, None)
    budget.on_step_end(0, [a, b])
    assert not halted
    budget.on_checkpoint(0, [], b, None)
    budget.on_step_end(0, [a, b])
    budget.on_step_end(0, [a, b])
    assert halted == [1]
    assert budget.over


def test_a_cell_that_ends_needs_no_checkpoint(budget, clock, halted):
    a, b = trial("a"), trial("b")
    assert not report(budget, clock, a, 99)
    assert report(budget, clock, b, 99.5) is False
    assert report(budget, clock, a, 99.7)
    assert report(budget, clock, b, 99.8, **{DONE: True}) is False
    b.status = Trial.TERMINATED
    budget.on_checkpoint(0, [], a, None)
    budget.on_step_end(0, [a, b])
    assert halted == [1]


def test_at_the_end_it_halts_whatever_is_saved(budget, clock, halted):
    a = trial("a")
    report(budget, clock, a, 10)
    clock.now = 99.9
    budget.on_step_end(0, [a])
    assert not halted
    clock.now = 100.0
    budget.on_step_end(0, [a])
    assert halted == [1]


def test_without_a_budget_nothing_is_asked(clock, halted):
    budget = Budget(None, lambda: halted.append(1))
    assert not report(budget, clock, trial("a"), 1e9)
    budget.on_step_end(0, [trial("a")])
    assert not halted
    assert not budget.over
