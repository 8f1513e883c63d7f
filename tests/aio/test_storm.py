"""Minutes of random deaths, hangs, errors and cancellations: each reply belongs to its request, and each fault is an error or marked."""

from __future__ import annotations

import asyncio

import pytest

from tests.aio.storm import storm


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("has_coroutines", [False, True], ids=["plain", "coroutines"])
@pytest.mark.parametrize("on_fault", ["raise", "truncate", "replay"])
def test_replies_of_a_storm_belong_to_their_requests(on_fault: str, has_coroutines: bool) -> None:
    counts = asyncio.run(storm(240.0, on_fault, seed=1, has_coroutines=has_coroutines))
    assert counts["deaths"] > 100
    assert counts["episodes"] > 1000
    errors = {name for name in counts if name.endswith(("Error", "Died", "Timeout"))}
    assert errors == ({"EnvError", "WorkerDied", "EnvTimeout"} if on_fault == "raise" else set())
    assert (counts["marked"] > 100) == (on_fault == "truncate")
