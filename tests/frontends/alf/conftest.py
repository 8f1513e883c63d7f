from __future__ import annotations

import pytest

from stepmill.frontends.alf import FastParallelEnvironment
from tests.harness.pools import keep_closed


@pytest.fixture
def env_of():
    """Makes environments without tensors, closed at the end of the test."""

    def make(constructors, num_spares=0, **arguments):
        chosen = {"as_tensors": False, "num_spare_envs_for_reload": num_spares, **arguments}
        return FastParallelEnvironment(constructors, **chosen)

    yield from keep_closed(make)
