"""The remedy MASK, which no option chooses: the rows of an env that has failed are empty until its next reset."""

from __future__ import annotations

from functools import partial

import pytest

import stepmill
from stepmill.pool.events import Remedy
from stepmill.pool.policies import POLICIES, FaultPolicy
from stepmill.pool.port import PoolPort
from stepmill.spec.options import EnvState, OnFault
from stepmill.testing.envs import CountingEnv
from stepmill.testing.faulty import RaisingEnv
from tests.harness.pools import kill_worker, make_pool

MODES = ["NextStep", "SameStep", "Disabled"]


@pytest.fixture(autouse=True)
def mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pools with on_fault="truncate" mask envs."""
    monkeypatch.setitem(POLICIES, OnFault.TRUNCATE, FaultPolicy(Remedy.MASK, "their rows are empty until a reset"))


@pytest.mark.parametrize("mode", MODES)
def test_the_envs_of_a_killed_worker_are_masked_until_they_are_reset_while_others_go_on(mode: str) -> None:
    fns = [partial(CountingEnv, i, 50) for i in range(3)]
    with make_pool("fork", fns, num_workers=3, on_fault="truncate", autoreset_mode=mode) as pool:
        pool.reset(seed=0)
        pool.step([1, 2, 3])
        kill_worker(pool, 1)

        cut = pool.step([1, 2, 3])
        masked = [pool.step([1, 2, 3]) for _ in range(2)]
        newest = PoolPort(pool).step_obs([1, 2, 3])

        assert cut.truncated.tolist() == [False, True, False]
        assert [batch.reward.tolist() for batch in masked] == [[1, 0, 3]] * 2
        assert [batch.truncated.tolist() for batch in masked] == [[False] * 3] * 2
        assert newest[:, 2].tolist() == [5, 1, 5]  # a masked row has its last observation
        assert pool.states[1] is EnvState.EXHAUSTED
        with pytest.raises(stepmill.UsageError, match=r"envs \[1\] are exhausted and take no more steps"):
            pool.send([2], env_ids=[1])

        pool.reset(env_ids=[1], seed=7)
        again = pool.step([1, 2, 3])
        assert again.reward.tolist() == [1, 2, 3]
        assert again.obs[:, 2].tolist() == [6, 1, 6]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["serial", "thread", "fork"])
def test_an_env_that_raised_is_masked_until_it_is_reset(where: str, mode: str) -> None:
    fns = [partial(RaisingEnv, at=2), partial(CountingEnv, 1, 50)]
    with make_pool(where, fns, on_fault="truncate", autoreset_mode=mode) as pool:
        pool.reset(seed=0)
        batches = [pool.step([1, 1]) for _ in range(3)]

        assert [batch.truncated.tolist() for batch in batches] == [[False, False], [True, False], [False, False]]
        assert [batch.reward.tolist() for batch in batches] == [[1, 1], [0, 1], [0, 1]]
        pool.reset(env_ids=[0])
        assert pool.step([5, 1]).reward.tolist() == [5, 1]
