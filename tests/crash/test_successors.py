"""What a dead worker's successor is to do, and what neither of the two may: found by the model of the protocol."""

import os
import signal
import struct
from functools import partial

import numpy as np

import stepmill
from stepmill.testing.envs import CountingEnv
from tests.harness.slab_memory import write_slab
from tests.harness.spare_envs import KILL, Named, named_pool

FAST = {"max_restarts": 1000}
GUARD_S = 20.0
STATE_AT = 3 * 64  # of protocol.hpp: from a worker's own words on, the state of its first server
NONSENSE = 77


class Traitor(CountingEnv):
    """Overwrites the state word of its neighbour, and dies, when it is told to."""

    def __init__(self, identity):
        super().__init__(identity)
        self._at = None

    def plan(self, at):
        self._at = at

    def step(self, action):
        if self._at is not None:
            write_slab(self._at, struct.pack("<I", NONSENSE))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_a_worker_that_is_to_be_replaced_does_not_take_what_its_successor_is_commanded():
    with stepmill.Pool([CountingEnv], backend="process", options=stepmill.PoolOptions(context="fork")) as pool:
        pool.reset(seed=0)
        pool._state.begin_replacement(0, False)  # as when it was given up, and has not died yet
        pool.send([3])
        assert pool.get_attr("num_steps") == (0,)  # answered after all that it was commanded
        pool._state.cancel_replacement(0)
        assert pool.recv(1).reward.tolist() == [3.0]
        assert pool.get_attr("num_steps") == (1,)


def test_a_spare_that_the_successor_has_reset_is_not_reset_once_more():
    with named_pool(
        1, 1, backend="process", num_workers=1, env=partial(Named, length=1), on_fault="truncate", **FAST
    ) as pool:
        pool.reset(seed=0)
        assert pool.step([KILL]).truncated.tolist() == [True]
        seen = [pool.step([0]).obs[0, :3].tolist() for _ in range(5)]
        # Object 1 takes over at once. Each of the new objects is reset once for each of its episodes.
        assert seen == [[1, 1, 0], [1, 1, 1], [0, 1, 0], [0, 1, 1], [1, 2, 0]]
        assert pool.get_attr("num_resets", env_ids=[1]) == (2,)  # of object 0, in the queue: done
        assert pool.step([0]).obs[0, :3].tolist() == [1, 2, 1]
        assert pool.step([0]).obs[0, :3].tolist() == [0, 2, 0]


def test_what_was_commanded_before_a_death_is_not_done_by_the_successor_whatever_the_dead_have_scribbled():
    options = stepmill.PoolOptions(context="fork", on_fault="truncate", **FAST)
    with stepmill.Pool([partial(Traitor, env_id) for env_id in range(2)], num_workers=1, options=options) as pool:
        pool.reset(seed=0)
        at = dict(pool._running.slab.plan)["worker_words"][0] + STATE_AT + 4
        pool.call("plan", at, env_ids=[0])
        batch = pool.step([1, 1])  # env 0 comes first, and env 1 is never begun
        assert batch.truncated.tolist() == [True, True]
        assert pool.step([1, 1]).obs[:, 2].tolist() == [0, 0]
        assert np.array_equal(pool.step([4, 5]).reward, [4.0, 5.0])
