"""Managers of Unity envs that crash all the time, in every way: no step is lost, doubled or mixed up, and nothing hangs."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest

from stepmill.frontends.mlagents import RestartLimits, UnityTimeOutException
from tests.frontends.mlagents.parts import Policy, die, ended, raise_, wait, walking
from tests.harness.unity_envs import ScriptedBehaviors

NUM_WORKERS = 4
HANG_S = 100.0


class ChaoticUnity(ScriptedBehaviors):
    """Sees its worker's id, the process it runs in and the time; sometimes it crashes."""

    ENDS = (die, lambda env: os._exit(3), raise_(lambda: UnityTimeOutException("too late")), lambda env: signal.pause())

    def __init__(self, worker_id: int, chance: float) -> None:
        super().__init__({"walk": [[worker_id]]})
        self.random = random.Random(os.getpid())
        self.chance = chance

    def step(self) -> None:
        super().step()
        if self.random.random() < self.chance:
            self.random.choice(self.ENDS)(self)

    def _obs(self, agents: Any) -> list[Any]:
        return [np.array([[agent, os.getpid(), self.time] for agent in agents], np.float32).reshape(-1, 3)]


class Witness:
    """Follows one worker's steps, each of which must be the one after the last."""

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        self.last: tuple[int, int] | None = None  # process and time
        self.num_crashes = 0

    def see(self, step: Any) -> None:
        decision, terminal = step.current_all_step_result["walk"]
        if len(terminal):
            assert ended(step) == {self.worker_id: True}
            assert self.last is not None
            assert terminal.obs[0][0].tolist() == [self.worker_id, *map(float, self.last)]
            self.last = None
            self.num_crashes += 1
            return
        worker_id, process, now = map(int, decision.obs[0][0])
        assert worker_id == self.worker_id
        if self.last is None:
            assert (now, step.brain_name_to_action_info) == (0, {})
        else:
            assert (process, now) == (self.last[0], self.last[1] + 1)
            assert step.brain_name_to_action_info["walk"].agent_ids == [worker_id]
        self.last = (process, now)


@pytest.mark.covers("U-14", "U-4/actions", "U-B4", "U-B9")
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_no_step_is_lost_or_mixed_up_while_envs_crash(started_of, is_deterministic):
    manager = started_of(
        lambda worker_id, channels: ChaoticUnity(worker_id, 0.03),
        NUM_WORKERS,
        step_timeout_s=0.2,
        restarts=RestartLimits(-1, -1),
        is_deterministic=is_deterministic,
    )
    manager.set_policy("walk", Policy())
    witnesses = [Witness(worker_id) for worker_id in range(NUM_WORKERS)]
    for step in manager.first_step_infos:
        witnesses[step.worker_id].see(step)
    manager.first_step_infos = []

    deadline = time.monotonic() + HANG_S
    while sum(witness.num_crashes for witness in witnesses) < 12:
        assert time.monotonic() < deadline
        for step in manager.get_steps():
            witnesses[step.worker_id].see(step)

    assert manager.restart_counts == [witness.num_crashes for witness in witnesses]
    assert manager.reset() == NUM_WORKERS


@pytest.mark.covers("U-12", "G-2")
def test_ctrl_c_ends_a_wait_and_the_manager_can_be_closed(started_of, script, gate):
    manager = started_of(walking(script, hooks={("step", 1): wait(gate.path)}), 2)
    interrupter = os.fork()
    if interrupter == 0:
        try:
            gate.wait_arrivals(2)
            os.kill(os.getppid(), signal.SIGINT)
        finally:
            os._exit(0)
    with pytest.raises(KeyboardInterrupt):
        manager.get_steps()
    os.waitpid(interrupter, 0)
    gate.open(2)
    assert {step.worker_id for _ in range(2) for step in manager.get_steps()} <= {0, 1}
    manager.close()


@pytest.mark.covers("U-15/policies")
def test_a_policy_that_raises_leaves_the_envs_as_they_were(started_of, script):
    class Shy(Policy):
        def get_action(self, steps: Any, worker_id: int) -> Any:
            if len(self.asked) == 1:
                self.asked.append(([], worker_id))
                raise ValueError("not now")
            return super().get_action(steps, worker_id)

    manager = started_of(walking(script), 2, is_deterministic=True)
    manager.set_policy("walk", Shy())
    with pytest.raises(ValueError, match="not now"):
        manager.get_steps()
    assert [step.worker_id for step in manager.get_steps()] == [0, 1]
    assert [each["step"] for each in manager._pool.get_attr("counts")] == [1, 1]


@pytest.mark.covers("U-12", "G-2")
@pytest.mark.parametrize("after", ["send", "receive"])
def test_ctrl_c_between_a_command_and_its_note_loses_no_env(started_of, script, monkeypatch, after):
    manager = started_of(lambda worker_id, channels: script({"walk": [[1], [1], [1]]}), 2, is_deterministic=True)
    manager.set_policy("walk", Policy(1.0))
    do = getattr(manager._pool, after)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        do(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(manager._pool, after, interrupted)
    with pytest.raises(KeyboardInterrupt):
        manager.get_steps()
    monkeypatch.undo()

    steps = manager.get_steps()
    if after == "receive":  # results that were received are lost: their agents' episodes end, and the envs are reset
        assert [ended(step) for step in steps] == [{1: True}, {}] * 2
        assert [bool(step.brain_name_to_action_info) for step in steps] == [True, False] * 2
    assert [each["step"] for each in manager._pool.get_attr("counts")] == [1, 1]
    assert [step.worker_id for step in manager.get_steps()] == [0, 1]
