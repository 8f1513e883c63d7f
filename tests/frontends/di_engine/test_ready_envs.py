"""DI-engine's managers: which envs need an action, for loops that never read `ready_obs`, and for rows of V2 managers."""

from __future__ import annotations

from typing import Any

import pytest

from stepmill.frontends.di_engine import (
    SubprocessEnvManagerV2,
)
from stepmill.testing.gates import Gate
from tests.frontends.di_engine.conftest import MakeManager
from tests.harness.hangs import HANG_GUARD_S


@pytest.mark.covers("D-6", "D-32", "D-38")
@pytest.mark.timeout(HANG_GUARD_S)
@pytest.mark.parametrize("question", ["random_action", "ready_env", "ready_obs_id", "active_env"])
def test_a_loop_that_never_reads_ready_obs_goes_on_after_each_reset(
    cls: Any, launched: MakeManager, question: str
) -> None:
    manager = launched(cls)
    count = 0
    while count < 30:  # ten episodes
        answer = getattr(manager, question)
        actions = dict.fromkeys(answer, 1) if isinstance(answer, list) else answer()
        ready = {env_id: 1 for env_id in actions if env_id not in manager._unreturned_steps()}
        count += len(manager.step(ready))
    manager.reset()
    assert sum(len(resets) for resets in manager.resets) >= 10


@pytest.mark.covers("D-8", "D-38")
def test_a_step_is_accepted_as_soon_as_the_reset_is_over(cls: Any, launched: MakeManager) -> None:
    manager = launched(cls, length=1)
    manager.step({0: 1})
    assert len(manager.resets[0]) == 2  # calls run after the reset that was begun
    assert list(manager.step({0: 1})) == [0]


@pytest.mark.covers("D-6", "D-B13", "D-38")
def test_ready_obs_id_after_ready_obs_names_its_envs_and_then_those_of_now(launched: MakeManager, gate: Gate) -> None:
    manager = launched(SubprocessEnvManagerV2, length=1, gate=gate)
    manager._reset_param[0] = {"stat": "gate"}
    manager.step({0: 1})
    gate.wait_arrivals()
    assert len(manager.ready_obs) == 1
    gate.open()
    assert len(manager.resets[0]) == 2
    assert manager.ready_obs_id == [1]
    assert manager.ready_obs_id == [0, 1]
    assert len(manager.ready_obs) == 2
    assert [int(timestep["env_id"]) for timestep in manager.step([1, 1])] == [0, 1]


@pytest.mark.covers("D-28/actions", "D-B13", "D-38")
@pytest.mark.parametrize("reads_ids", [False, True])
def test_the_rows_of_a_v2_step_are_those_of_the_observations_that_were_read(
    launched: MakeManager, reads_ids: bool, gate: Gate
) -> None:
    manager = launched(SubprocessEnvManagerV2, length=2, gate=gate)
    manager._reset_param[0] = {"stat": "gate"}
    for _ in range(2):
        manager.step({0: 1})
    gate.wait_arrivals()
    assert len(manager.ready_obs) == 1
    assert not reads_ids or manager.ready_obs_id == [1]
    gate.open()
    assert len(manager.resets[0]) == 2
    (timestep,) = manager.step([1])  # and not a UsageError because env 0 is ready, too
    assert int(timestep["env_id"]) == 1
