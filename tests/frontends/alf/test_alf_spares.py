"""The front-end for ALF with spare envs: which env serves which slot, and which envs calls reach."""

from __future__ import annotations

import os
import signal
from collections import deque
from functools import partial
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.frontends.alf import BatchEnvironmentWrapper
from stepmill.spec.tree import map_nest
from tests.harness import leaks
from tests.harness.alf_envs import LAST, AlfCounter, GatedAlf, RandomAlf, Reference, Spec, actions, assert_same
from tests.harness.hangs import HANG_GUARD_S


class SpareReference(Reference):
    """What the slots have to return: those that ended join a queue, in their order, and are served from its front."""

    def __init__(self, constructors: list[Any], num_spares: int) -> None:
        super().__init__(constructors)
        self.num_slots = len(constructors) - num_spares

    def reset(self) -> Any:
        self.serving = list(range(self.num_slots))
        self.queue = deque(range(self.num_slots, len(self.envs)))
        self.ready = {i: env.reset() for i, env in enumerate(self.envs)}
        self.ended = [False] * self.num_slots
        return self._told([self.ready.pop(i) for i in self.serving])

    def step(self, action: Any) -> Any:
        rows = []
        for slot, has_ended in enumerate(self.ended):
            if has_ended:
                self.serving[slot] = self.queue.popleft()
                rows.append(self.ready.pop(self.serving[slot]))
            else:
                rows.append(self.envs[self.serving[slot]].step(action[slot]))
        return self._told(rows)

    def _told(self, rows: list[Any]) -> Any:
        self.ended = [bool(np.all(row.step_type == LAST)) for row in rows]
        for slot, has_ended in enumerate(self.ended):
            if has_ended:
                self.queue.append(self.serving[slot])
                self.ready[self.serving[slot]] = self.envs[self.serving[slot]].reset()
        return self._stacked(rows)


@pytest.mark.covers("A-12", "A-13", "A-14", "A-15")
@pytest.mark.parametrize("num_workers", [None, 2])
def test_finished_envs_queue_up_in_the_order_of_slots(env_of, num_workers):
    lengths = [1, 3, 2, 2, 1]
    constructors = [partial(AlfCounter, length=length) for length in lengths]
    env, reference = env_of(constructors, 2, num_workers=num_workers), SpareReference(constructors, 2)
    one, other = env.reset(), reference.reset()
    for i in range(40):
        assert_same(one, other)  # observation[:, 0] tells which object serves, env_id is the slot all the same
        one, other = env.step(actions(3, i)), reference.step(actions(3, i))
        if i == 25:
            one, other = env.reset(), reference.reset()


@pytest.mark.covers("A-13", "A-19")
def test_the_data_depend_on_seeds_and_not_on_timing(env_of):
    constructors = [RandomAlf] * 4
    env, reference = env_of(constructors, 2), SpareReference(constructors, 2)
    with pytest.raises(ValueError, match=r"Number of seeds should match the number of parallel_envs\."):
        env.seed([0, 1])
    assert env.seed([3, 1, 4, 5]) == reference.seed([3, 1, 4, 5]) == [30, 10, 40, 50]
    one, other = env.reset(), reference.reset()
    for _ in range(100):
        assert_same(one, other)
        one, other = env.step(one.prev_action), reference.step(other.prev_action)


@pytest.mark.covers("A-11", "A-12")
def test_a_step_after_last_does_not_wait_for_the_reset_of_the_env_that_ended(env_of, gate):
    env = env_of([partial(GatedAlf, reset_gate=gate.path, free_resets=1, length=1)] * 4, 2)
    env.reset()
    env.step(actions(2))
    gate.wait_arrivals(2)  # envs 0 and 1 are in their resets, and stay there
    time_step = env.step(actions(2))
    assert (time_step.step_type.tolist(), time_step.observation[:, 0].tolist()) == ([0, 0], [2, 3])
    assert env.step(actions(2)).step_type.tolist() == [2, 2]
    gate.open(4)
    assert env.step(actions(2)).observation[:, 0].tolist() == [0, 1]


@pytest.mark.covers("A-15")
def test_reset_does_not_wait_for_spares(env_of, gate):
    constructors = [AlfCounter] * 2 + [partial(GatedAlf, reset_gate=gate.path)] * 2
    env = env_of(constructors, 2)
    assert env.reset().step_type.tolist() == [0, 0]
    gate.wait_arrivals(2)
    assert env.step(actions(2)).step_type.tolist() == [1, 1]
    gate.open(2)


@pytest.mark.covers("A-B6", "A-20", "A-24")
def test_calls_reach_the_env_that_serves_the_slot_and_progress_reaches_all(env_of):
    env = env_of([partial(AlfCounter, length=1)] * 4, 2)
    env.reset()
    assert [handle.made_with for handle in env.envs] == [0, 1]
    env.sync_progress({"steps": 1})
    env.step(actions(2))
    env.step(actions(2))
    assert [handle.made_with for handle in env.envs] == [2, 3]
    assert [made_with for made_with, *_ in env.call_envs_with_same_args("whoami")] == [2, 3]
    assert env.render()[0].tolist() == np.full((2, 2, 3), 2).tolist()
    assert env.envs[1].call("whoami")()[0] == 3
    assert [handle.progress for handle in env.envs] == [{"steps": 1}] * 2  # they were spares when it was sent
    assert len(env.envs) == env.num_envs == env.batch_size == 2
    assert env.num_spare_envs_for_reload == 2


@pytest.mark.covers("A-2", "A-3", "A-21")
def test_spares_are_numbered_on_and_closed_too(env_of, tmp_path):
    with env_of([partial(AlfCounter, folder=tmp_path)] * 3, 1) as env:
        env.reset()
    assert (tmp_path / "made").read_bytes() == b"..."
    assert (tmp_path / "closed").read_bytes() == b"..."


@pytest.mark.covers("A-B7", "A-5")
def test_specs_of_spares_are_checked(env_of):
    class Odd(AlfCounter):
        observation = Spec((4,), maximum=3.0)

    with pytest.raises(ValueError, match=r"All environments must have the same time_step_spec\. Env 2"):
        env_of([AlfCounter, AlfCounter, Odd], 1)
    Odd.observation = Spec((5,))
    with pytest.raises(ValueError, match=r"All environments must have the same time_step_spec\. Env 2"):
        env_of([AlfCounter, AlfCounter, Odd], 1)


@pytest.mark.covers("A-B7")
@pytest.mark.parametrize("num_spares", [2, 3, -1])
def test_spares_that_leave_no_env_are_refused(env_of, num_spares):
    with pytest.raises(stepmill.UsageError, match="leaves no env to step"):
        env_of([AlfCounter] * 2, num_spares)


@pytest.mark.covers("A-7")
def test_spares_beside_batched_envs_are_refused(env_of):
    def pair(env_id):
        return BatchEnvironmentWrapper([AlfCounter(env_id)] * 2)

    text = r"num_spare_envs != 0 is not supported when batch_size_per_env > 0\. batch_size_per_env=2, num_spare_envs=1"
    with pytest.raises(RuntimeError, match=text):
        env_of([pair] * 3, 1)


class PairReference(SpareReference):
    """The same of batched envs: what leaves its slots is an env all of whose rows ended in one step."""

    def _stacked(self, rows: list[Any]) -> Any:
        whole = map_nest(lambda *leaves: np.concatenate(leaves), *rows)
        return whole._replace(env_id=np.arange(len(whole.env_id), dtype=np.int32))


def pair_of(lengths: tuple[int, int], env_id: int) -> BatchEnvironmentWrapper:
    return BatchEnvironmentWrapper([AlfCounter(10 * env_id + k, length=length) for k, length in enumerate(lengths)])


@pytest.mark.covers("A-B11", "A-16")
def test_a_batched_env_whose_rows_end_together_is_replaced_by_a_spare(env_of):
    constructors = [partial(pair_of, lengths) for lengths in ((2, 2), (1, 3), (1, 1))]
    env = env_of(constructors, 0, options=stepmill.PoolOptions(resets={"spare_envs": 1}))
    reference = PairReference(constructors, 1)
    assert (env.num_envs, env.batch_size, env.num_spare_envs_for_reload) == (2, 4, 1)
    one, other = env.reset(), reference.reset()
    seen = set()
    for i in range(30):
        assert_same(one, other)
        seen.update(one.observation[:, 0].tolist())
        one, other = env.step(actions(4, i)), reference.step(actions(4, i).reshape(2, 2))
    assert seen == {0, 1, 10, 11, 20, 21}


@pytest.mark.covers("A-B1", "A-B6")
def test_a_spare_that_is_killed_is_reported_when_its_turn_comes_and_a_reset_repairs_it(env_of):
    env = env_of([partial(AlfCounter, length=1)] * 3, 1)
    env.reset()
    pid = env.envs[1].call("whoami")()[1]
    env.step(actions(2))
    assert env.step(actions(2)).observation[:, 0].tolist() == [2, 0]  # env 1 waits for its turn
    os.kill(pid, signal.SIGKILL)
    assert not leaks.wait_until_gone([pid], timeout_s=HANG_GUARD_S)

    def step_on():
        for _ in range(6):
            env.step(actions(2))

    with pytest.raises(RuntimeError, match="SIGKILL"):
        step_on()
    assert env.reset().observation[:, 0].tolist() == [0, 1]
    step_on()
