"""What a dead worker's successor is to do, and what neither of the two may: found by the model of the protocol."""

import os
import signal
import struct
import time
from functools import partial

import numpy as np

import stepmill
from stepmill import _native
from stepmill.pool.events import BeginRestart, CancelRestart, MarkNew, Remedy
from stepmill.testing.envs import CountingEnv
from tests.harness.pools import begun
from tests.harness.slab_memory import write_slab
from tests.harness.spare_envs import KILL, Named, named_pool

FAST = {"restarts": {"max_restarts": 1000}}
INVALID_STATE = 77


class NeighbourOverwriter(CountingEnv):
    """After `plan`, its step overwrites the state word of another env, and ends its process."""

    def __init__(self, identity):
        super().__init__(identity)
        self._at = None

    def plan(self, at):
        self._at = at

    def step(self, action):
        if self._at is not None:
            write_slab(self._at, struct.pack("<I", INVALID_STATE))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_a_worker_that_is_being_restarted_does_not_take_commands_for_its_successor():
    with begun(stepmill.Pool([CountingEnv], backend="process", options=stepmill.PoolOptions(context="fork"))) as pool:
        restart = BeginRestart(0, 0, Remedy.RAISE, {})  # as if it had exceeded a deadline and not died yet
        pool._state.apply([restart, MarkNew(0)])
        pool.reset_async()
        assert pool.get_attr("num_resets") == (1,)  # the reply comes after all commands that it has
        pool._state.apply([CancelRestart(0, 0)])
        pool.recv(1)
        assert pool.get_attr("num_resets") == (2,)


def test_a_spare_that_the_successor_has_reset_is_not_reset_once_more():
    with begun(
        named_pool(1, 1, backend="process", num_workers=1, env=partial(Named, length=1), on_fault="truncate", **FAST)
    ) as pool:
        assert pool.step([KILL]).truncated.tolist() == [True]
        seen = [pool.step([0]).obs[0, :3].tolist() for _ in range(5)]
        # Object 1 takes over at once. Each of the new objects is reset once for each of its episodes.
        assert seen == [[1, 1, 0], [1, 1, 1], [0, 1, 0], [0, 1, 1], [1, 2, 0]]
        assert pool.get_attr("num_resets", env_ids=[1]) == (2,)  # of object 0, in the queue: done
        assert pool.step([0]).obs[0, :3].tolist() == [1, 2, 1]
        assert pool.step([0]).obs[0, :3].tolist() == [0, 2, 0]


def test_what_was_commanded_before_a_death_is_not_done_by_the_successor_whatever_the_dead_have_scribbled():
    options = stepmill.PoolOptions(context="fork", on_fault="truncate", **FAST)
    with begun(
        stepmill.Pool([partial(NeighbourOverwriter, env_id) for env_id in range(2)], num_workers=1, options=options)
    ) as pool:
        of_first = dict(pool._runtime.slab.plan)["worker_words"][0] + _native.server_word_offsets(2)["state"]
        at = of_first + 4  # env 1's comes next
        pool.call("plan", at, env_ids=[0])
        batch = pool.step([1, 1])  # env 0 comes first, and env 1 is never begun
        assert batch.truncated.tolist() == [True, True]
        assert pool.step([1, 1]).obs[:, 2].tolist() == [0, 0]
        assert np.array_equal(pool.step([4, 5]).reward, [4.0, 5.0])


class Replaced(CountingEnv):
    """Three envs of one worker. In its second command env 0 raises, once; env 1 waits to go; env 2 says so, and hangs."""

    def __init__(self, identity, has_failed, go, is_next):
        super().__init__(identity, length=1 if identity == 0 else 10)
        self._has_failed, self._go, self._is_next = has_failed, go, is_next

    def reset(self, **arguments):
        if self.num_steps == 1 and self.identity == 0 and not self._has_failed.exists():
            self._has_failed.touch()
            raise ValueError("once")
        return super().reset(**arguments)

    def step(self, action):
        is_second = self.num_steps == 1
        if is_second and self.identity == 1:
            os.read(self._go, 1)
        if is_second and self.identity == 2:
            os.write(self._is_next, b"!")
            time.sleep(600)
        return super().step(action)


def test_an_env_that_steps_while_its_worker_is_about_to_be_replaced_is_lost_after_that_step(tmp_path, monkeypatch):
    go_read, go = os.pipe()
    next_read, is_next = os.pipe()
    env_fns = [partial(Replaced, env_id, tmp_path / "failed", go_read, is_next) for env_id in range(3)]
    options = stepmill.PoolOptions(
        context="fork", on_fault="truncate", seeding="per_episode", resets={"retries": 1, "retry_in": "new"}
    )
    with stepmill.Pool(env_fns, num_workers=1, options=options) as pool:
        backend = pool._runtime.backend
        end_worker = backend.end_worker

        def end_after_the_step_of_env_1(worker):
            monkeypatch.undo()
            os.write(go, b"!")
            os.read(next_read, 1)
            end_worker(worker)

        monkeypatch.setattr(backend, "end_worker", end_after_the_step_of_env_1)
        pool.reset(seed=0)
        pool.step([1, 1, 1])
        batch = pool.step([1, 1, 1])
        assert (batch.obs[:, 2].tolist(), batch.truncated.tolist()) == ([0, 2, 1], [False, False, True])

        batch = pool.step([1, 1, 1])

        assert (batch.obs[:, 2].tolist(), batch.truncated.tolist()) == ([1, 2, 0], [False, True, False])
        assert batch.info["fault"]["kind"][1] == "neighbour"
        assert pool.step([1, 1, 1]).obs[:, 2].tolist() == [0, 0, 1]
    for fd in (go_read, go, next_read, is_next):
        os.close(fd)
