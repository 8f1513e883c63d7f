"""Workers are broken at random, and no transition is lost, doubled, or given to the wrong env."""

from __future__ import annotations

import numpy as np
import pytest

from stepmill.testing.chaos import run_chaos
from stepmill.testing.chaos.books import Book, Books, Result
from stepmill.testing.chaos.kinds import KINDS, Kind
from stepmill.testing.chaos.report import ChaosReport


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_transition_is_right_while_workers_die_stop_and_hang() -> None:
    report = run_chaos(25.0, seed=1)

    assert report.num_wrong == 0, str(report)
    assert set(report.rounds) == {kind.name for kind in KINDS}, report
    assert min(report.inflicted.values()) > 0, report
    assert report.broken > 0, report
    assert report.capsules > 0, report
    assert report.transitions > 500, report
    assert report.replays > 100, report
    assert report.calls > report.calls_failed, report


# ---- the examiner is examined ---------------------------------------------------------------------------------------

OBS = [3, 777, 5, 2, 0, 0]  # identity, tag, clock, action, level, bumps
NEXT = [3, 777, 6, 4, 0, 0]
FIRST = [3, 888, 0, -1, 0, 0]


def complaint_of(
    obs: list[int], reward: float, *, kind: str = "truncate", is_ended: bool = False, **flags: object
) -> str:
    """What the books say of a result of row 3, which was at OBS and told action 4."""
    books = Books(kind_of(kind), ChaosReport(0))
    books.rows = [Book(np.array([row, 0, 0, 0, 0, 0])) for row in range(8)]
    books.rows[3] = Book(np.array(OBS), is_ended=is_ended)
    books.command(3, [4])
    chosen = {"terminated": False, "truncated": False, "fault": None, **flags}
    return books._find_wrong(books.rows[3], Result(3, np.array(obs), reward, **chosen)) or ""  # type: ignore[arg-type]


def kind_of(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


def test_the_checks_of_chaos_let_right_results_pass() -> None:
    assert complaint_of(NEXT, 6.0) == ""
    assert complaint_of(FIRST, 0.0, is_ended=True) == ""
    assert complaint_of(OBS, 0.0, truncated=True, fault="died") == ""
    assert complaint_of([9, *FIRST[1:]], 0.0, is_ended=True, kind="spares") == ""


@pytest.mark.parametrize(
    ("obs", "reward", "flags"),
    [
        ([4, *NEXT[1:]], 6.0, {}),  # another env's
        ([3, 778, *NEXT[2:]], 6.0, {}),  # of another episode
        ([3, 777, 7, 4, 0, 0], 7.0, {}),  # one was lost
        (OBS, 5.0, {}),  # doubled
        ([3, 777, 6, 2, 0, 0], 6.0, {}),  # another action's
        (NEXT, 5.0, {}),
        (NEXT, 6.0, {"truncated": True}),
        (NEXT, 6.0, {"terminated": True}),
        ([*NEXT[:4], 1, 0], 6.0, {}),  # an attribute that nobody has set
        ([*NEXT[:4], 0, 1], 6.0, {}),  # a call that nobody has made
        (NEXT, 6.0, {"fault": "died"}),  # broken, and not marked
        (OBS, 0.0, {"fault": "died", "truncated": True, "kind": "replay"}),  # broken, and must not be
        (NEXT, 6.0, {"is_ended": True}),  # the old episode goes on
        ([4, *FIRST[1:]], 0.0, {"is_ended": True}),
        ([5, *FIRST[1:]], 0.0, {"is_ended": True, "kind": "spares"}),  # its object serves another env
    ],
)
def test_the_checks_of_chaos_find_wrong_results(obs: list[int], reward: float, flags: dict[str, object]) -> None:
    assert complaint_of(obs, reward, **flags) != ""  # type: ignore[arg-type]
