"""The random programs of the doors with the first numbers. `make soak` plays 2,000 of each."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from stepmill.evaluation.evaluate import Player
from stepmill.pool.port import PoolPort
from tests.fuzz.doors.__main__ import find_failure


@pytest.fixture(autouse=True)
def _no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "stepmill")


@pytest.mark.parametrize(
    ("door", "num_programs"),
    [
        ("evaluations", 20),
        ("leases", 15),
        ("vectors", 15),
        pytest.param("evaluations", 150, marks=pytest.mark.slow),
        pytest.param("leases", 150, marks=pytest.mark.slow),
        pytest.param("vectors", 150, marks=pytest.mark.slow),
    ],
)
def test_random_programs_do_what_the_model_says(door: str, num_programs: int) -> None:
    for number in range(num_programs):
        failure = find_failure(door, number)
        assert failure is None, failure


@pytest.mark.parametrize("door", ["evaluations", "leases"])
def test_wrong_values_are_found(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results_of, row_of = Player._results_of, PoolPort.row_of

    def late(player: Player, *args: Any) -> Any:
        player._return += 0.125
        return results_of(player, *args)

    monkeypatch.setattr(Player, "_results_of", late)
    monkeypatch.setattr(PoolPort, "row_of", lambda port, obs, row: row_of(port, obs, row) * 2)
    failure = find_failure(door, 3)
    assert failure is not None
    assert f"again: python -m tests.fuzz.doors --doors {door} --first 3 --programs 1" in failure
