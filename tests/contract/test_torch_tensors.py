"""Tensors as actions and observations: without copies on the CPU, by overlapped copies through a DeviceCopier."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest

from stepmill import Pool, UsageError
from stepmill.testing.envs import CountingEnv, ImageEnv
from tests.harness.pools import begun

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from stepmill.torch import HostCopier, TensorPool  # noqa: E402 - needs torch


class Nested(gymnasium.Env):
    """A dict with a tuple in it; takes a dict."""

    observation_space = gymnasium.spaces.Dict(
        {
            "a": gymnasium.spaces.Box(0, 1, (3,), np.float32),
            "b": gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(4), gymnasium.spaces.MultiBinary(2))),
        }
    )
    action_space = gymnasium.spaces.Dict({"x": gymnasium.spaces.Box(-1, 1, (2,), np.float32)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(0.0), {}

    def step(self, action):
        return self._obs(float(action["x"].sum())), 0.5, False, False, {}

    def _obs(self, value):
        return {"a": np.full(3, value, np.float32), "b": (2, np.array([1, 0], np.int8))}


@pytest.mark.parametrize("device", ["cpu", HostCopier()])
def test_batches_hold_tensors_in_the_structure_of_the_spaces(pool_of, device):
    tensors = TensorPool(pool_of([Nested] * 3), device)
    obs = tensors.reset(seed=0).obs
    assert obs["b"][0].tolist() == [2, 2, 2]
    batch = tensors.step({"x": torch.full((3, 2), 0.25, requires_grad=True)})
    assert batch.obs["a"].tolist() == [[0.5] * 3] * 3
    assert batch.obs["b"][1].dtype == torch.int8
    assert (batch.reward.dtype, batch.reward.tolist()) == (torch.float32, [0.5] * 3)
    assert (batch.terminated.dtype, batch.env_id.tolist()) == (torch.bool, [0, 1, 2])


def test_some_envs_are_commanded_by_tensors_of_ids(pool_of):
    tensors = begun(TensorPool(pool_of([CountingEnv] * 4)))
    tensors.send(torch.tensor([1, 2]), torch.tensor([3, 1]))
    batch = tensors.recv(2)
    assert dict(zip(batch.env_id.tolist(), batch.reward.tolist(), strict=True)) == {3: 1.0, 1: 2.0}


def test_tensors_on_the_cpu_are_the_shared_memory_and_hold_their_lease(pool_of):
    pool = pool_of([ImageEnv] * 4)
    tensors = begun(TensorPool(pool))
    kept = [tensors.step(torch.zeros(4, dtype=torch.int64)).obs for _ in range(3)]
    assert pool.stats().leased_slots == 3
    values = [int(obs[0, 0, 0, 0]) for obs in kept]
    for _ in range(6):
        tensors.step(torch.zeros(4, dtype=torch.int64))
    assert [int(obs[0, 0, 0, 0]) for obs in kept] == values
    corner = kept[0][0, :2]
    del kept
    assert pool.stats().leased_slots == 1
    assert int(corner[0, 0, 0]) == values[0]


def test_a_lease_lives_until_its_copy_is_done_and_no_longer(pool_of):
    pool = pool_of([ImageEnv] * 4)
    is_done = []
    tensors = begun(TensorPool(pool, HostCopier(lambda: bool(is_done))))
    obs = tensors.step(torch.zeros(4, dtype=torch.int64)).obs
    assert pool.stats().leased_slots == 1
    seen = obs.clone()
    for _ in range(6):  # the envs go on, and do not write what is still being copied
        tensors.step(torch.zeros(4, dtype=torch.int64))
    assert tensors.num_held > 0
    assert pool.stats().leased_slots == pool.options.tuning.slots
    is_done.append(True)
    assert tensors.num_held == 0
    assert pool.stats().leased_slots == 0
    assert torch.equal(obs, seen)


def test_close_waits_for_copies_and_closes_the_pool():
    class Counting(HostCopier):
        num_finished = 0

        def finish(self):
            Counting.num_finished += 1

    with TensorPool(Pool([CountingEnv], backend="serial"), Counting()) as tensors:
        tensors.reset(seed=0)
    tensors.close()
    assert Counting.num_finished == 1
    with pytest.raises(UsageError, match="closed"):
        tensors.pool.reset()


def test_a_device_that_is_not_there_is_refused():
    with Pool([CountingEnv], backend="serial") as pool:
        with pytest.raises(UsageError, match="meta"):
            TensorPool(pool, "meta")
        if not torch.cuda.is_available():
            with pytest.raises(UsageError, match="cuda"):
                TensorPool(pool, "cuda")


def test_the_last_episodes_of_a_budget_end_as_in_a_pool(pool_of):
    fns = [partial(CountingEnv, length=length) for length in (1, 3)]
    pool = pool_of(fns, num_episodes=1)
    tensors = begun(TensorPool(pool))
    rewards = [tensors.step(torch.tensor([1, 1])).reward.tolist() for _ in range(3)]
    assert pool.exhausted.all()
    assert rewards == [[1, 1], [0, 1], [0, 1]]
