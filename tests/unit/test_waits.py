"""The loop of a pool's waits, over a core that says what the test wants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from stepmill.pool.receiving import EVENT, MAX_LATE_ROUNDS, READY, TIMED_OUT, PoolWait
from stepmill.pool.recovery import News
from stepmill.spec.errors import RecvTimeout
from stepmill.spec.options import PoolOptions


def waits_of(outcomes: list[int]) -> tuple[PoolWait, list[int]]:
    """Return a PoolWait whose core returns these outcomes in turn, and a list that gets an item for each handled round."""
    handled: list[int] = []
    state = SimpleNamespace(states=list, wait=lambda *_, **__: outcomes.pop(0))
    recovery = SimpleNamespace(news=News(), handle=lambda *, has_faults: handled.append(has_faults))
    spec = SimpleNamespace(action=None, batch_size=1)
    return PoolWait(cast("Any", state), cast("Any", recovery), PoolOptions(), cast("Any", spec)), handled


def test_results_that_the_last_late_round_of_events_has_brought_are_there() -> None:
    num_rounds = MAX_LATE_ROUNDS + 1
    waits, handled = waits_of([*[EVENT] * num_rounds, READY])

    waits.wait(0.0, 1)

    assert len(handled) == num_rounds


def test_a_wait_whose_deadline_has_passed_leaves_further_events_to_a_later_call() -> None:
    outcomes = [EVENT] * 10
    waits, handled = waits_of(outcomes)

    with pytest.raises(RecvTimeout):
        waits.wait(0.0, 1)

    assert len(handled) == MAX_LATE_ROUNDS + 1
    assert len(outcomes) == 10 - len(handled) - 1


def test_a_wait_without_news_ends_at_its_deadline() -> None:
    waits, handled = waits_of([TIMED_OUT])

    with pytest.raises(RecvTimeout):
        waits.wait(0.0, 1)

    assert not handled
