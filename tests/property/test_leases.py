"""Arrays that are lent: held, sliced, converted, dropped, written to, forked and closed over, in any order.

The model is simple: an array that the caller holds never changes after it was received. Slots are never lost: a
pool whose results were all dropped lends again.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import warnings
from functools import partial

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import stepmill
from stepmill.testing.envs import ImageEnv
from tests.harness.effort import examples
from tests.harness.pools import begun, make_pool

HAS_TORCH = importlib.util.find_spec("torch") is not None
NUM_ENVS = 3
SHAPE = (84, 84, 4)
SLICES = [np.s_[0], np.s_[1:], np.s_[:, ::2], np.s_[..., 1], np.s_[::-1, 3:5], np.s_[2, 5, 5]]


class Leases(RuleBasedStateMachine):
    """Holds arrays of one pool, and knows what each must show."""

    where = "serial"

    @initialize(slots=st.integers(1, 4))
    def open(self, slots: int) -> None:
        env_fns = [partial(ImageEnv, i, SHAPE, length=7) for i in range(NUM_ENVS)]
        self.pool: stepmill.Pool | None = make_pool(self.where, env_fns, tuning={"slots": slots})
        self.clock = [-1] * NUM_ENVS
        self.held: list[tuple[object, np.ndarray]] = []  # an array or tensor, and a copy of what it showed
        self._take(self.pool.reset(seed=0))

    def _take(self, batch: stepmill.Batch) -> None:
        for row, env_id in enumerate(batch.env_id.tolist()):
            self.clock[env_id] += 1
            assert (batch.obs[row] == ImageEnv.colour(env_id, self.clock[env_id])).all()
        self.held.append((batch.obs, batch.obs.copy()))

    def _pick(self, number: int) -> int:
        return number % len(self.held)

    @precondition(lambda self: self.pool is not None)
    @rule()
    def step(self) -> None:
        self._take(self.pool.step([0] * NUM_ENVS))

    @precondition(lambda self: self.pool is not None)
    @rule(count=st.integers(1, NUM_ENVS), first=st.integers(0, NUM_ENVS - 1))
    def step_some(self, count: int, first: int) -> None:
        ids = sorted((first + k) % NUM_ENVS for k in range(count))
        self.pool.send([0] * count, ids)
        self._take(self.pool.recv(count))

    @precondition(lambda self: self.pool is not None)
    @rule(env_id=st.integers(0, NUM_ENVS - 1))
    def reset_one(self, env_id: int) -> None:
        self._take(self.pool.reset(env_ids=[env_id]))

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99), where=st.sampled_from(SLICES))
    def slice(self, number: int, where: object) -> None:
        array, shown = self.held[self._pick(number)]
        if isinstance(array, np.ndarray) and array.ndim == 4:
            try:
                self.held.append((array[where], np.array(shown[where])))
            except IndexError:
                return

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99))
    def cast(self, number: int) -> None:
        array, shown = self.held[self._pick(number)]
        if isinstance(array, np.ndarray):
            self.held.append((memoryview(array) if array.ndim else array, shown))

    @precondition(lambda self: HAS_TORCH and self.held)
    @rule(number=st.integers(0, 99))
    def convert(self, number: int) -> None:
        import torch

        array, shown = self.held[self._pick(number)]
        if isinstance(array, np.ndarray) and min(array.strides, default=0) >= 0:
            self.held.append((torch.as_tensor(array), shown))

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99))
    def drop(self, number: int) -> None:
        self.held.pop(self._pick(number))

    @rule()
    def drop_all(self) -> None:
        self.held.clear()

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99))
    def look_from_a_forked_child(self, number: int) -> None:
        array, shown = self.held[self._pick(number)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            code = 1
            try:
                same = np.array_equal(np.asarray(array), shown)
                self.held.clear()
                del array
                gc.collect()
                if self.pool is not None:
                    self.pool.close()
                code = 0 if same else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    @precondition(lambda self: self.pool is not None)
    @rule()
    def close(self) -> None:
        self.pool.close()
        self.pool = None

    @precondition(lambda self: self.pool is None)
    @rule(slots=st.integers(1, 4))
    def open_another(self, slots: int) -> None:
        held = self.held
        self.open(slots)
        self.held = held + self.held

    @invariant()
    def what_is_held_is_not_overwritten(self) -> None:
        for array, shown in getattr(self, "held", ()):
            assert np.array_equal(np.asarray(array), shown)

    def teardown(self) -> None:
        pool, self.pool = getattr(self, "pool", None), None
        if pool is not None:
            self.held.clear()
            if not any(state.name == "FAULTED" for state in pool.states):
                _assert_lends(pool)
            pool.close()


def _assert_lends(pool: stepmill.Pool) -> None:
    """No slot is lost: with nothing held, results are lent without a copy, in slots that were used before.

    The newest result of an env pins its slot: the first results may be copies, and with one slot every other one is.
    """
    addresses = []
    for _ in range(14):
        images = pool.step([0] * NUM_ENVS).obs
        addresses.append(images.ctypes.data if not images.flags.owndata else None)
        del images
    lent = [address for address in addresses[4:] if address is not None]
    slots = pool.options.tuning.slots
    assert len(lent) >= (10 if slots > 1 else 4)
    assert len(set(lent)) <= slots


class ThreadLeases(Leases):
    """The same with threads."""

    where = "thread"


class ForkLeases(Leases):
    """The same with processes."""

    where = "fork"


TestSerialLeases = Leases.TestCase
TestSerialLeases.settings = settings(max_examples=examples(30), stateful_step_count=30)
TestThreadLeases = ThreadLeases.TestCase
TestThreadLeases.settings = settings(max_examples=examples(12), stateful_step_count=30)
TestForkLeases = ForkLeases.TestCase
TestForkLeases.settings = settings(max_examples=examples(8), stateful_step_count=30)


def test_a_reward_that_is_kept_pins_no_slot():
    pool = begun(make_pool("serial", [partial(ImageEnv, i, SHAPE) for i in range(NUM_ENVS)], tuning={"slots": 1}))
    kept = []
    for _ in range(20):
        batch = pool.step([0] * NUM_ENVS)
        kept += [batch.reward, batch.terminated, batch.truncated, batch.env_id]
        del batch
    _assert_lends(pool)
    assert all(array.flags.owndata or array.base is not None for array in kept)
    pool.close()
