"""What a type checker knows about the public names. Nothing here runs; `make check` lets mypy read it.

A line that must be an error carries a `type: ignore` with its code: mypy in strict mode complains if the error is not there.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import stepmill
from stepmill.testing import CountingEnv, check_env


def pools_give_batches(pool: stepmill.Pool, actions: NDArray[np.int64]) -> None:
    assert_type(pool.reset(seed=0), stepmill.Batch)
    assert_type(pool.reset(seed=[1, None], env_ids=[0, 1], options={"level": 1}), stepmill.Batch)
    assert_type(pool.reset(seed={0: 1}, env_ids=np.array([0])), stepmill.Batch)
    assert_type(pool.step(actions), stepmill.Batch)
    assert_type(pool.recv(4, timeout_s=1.5), stepmill.Batch)
    assert_type(pool.recv(min_envs=1, max_envs=4), stepmill.Batch)
    pool.send(actions, [0, 1])
    assert_type(pool.spec, stepmill.EnvSpec)
    assert_type(pool.num_envs, int)


def batches_name_their_arrays(batch: stepmill.Batch) -> None:
    assert_type(batch.reward, NDArray[np.float64])
    assert_type(batch.terminated, NDArray[np.bool_])
    assert_type(batch.truncated, NDArray[np.bool_])
    assert_type(batch.env_id, NDArray[np.int64])
    assert_type(batch.num_rows, int)


def pools_are_made_of_functions(env_fns: Sequence[Any]) -> None:
    stepmill.Pool([CountingEnv, lambda: CountingEnv(3)], backend="process", num_workers=2)
    stepmill.Pool([CountingEnv], options=stepmill.PoolOptions(seeding=stepmill.Seeding.FIXED, tuning={"slots": 2}))
    stepmill.Pool([CountingEnv()])  # type: ignore[list-item]
    stepmill.Pool([CountingEnv], num_workers="two")  # type: ignore[arg-type]
    stepmill.PoolOptions(context="spawn", on_fault=stepmill.OnFault.TRUNCATE, resets={"retry_in": "new"})
    stepmill.PoolOptions(context="thread")  # type: ignore[arg-type]
    stepmill.Pool([CountingEnv], on_fault="truncate", step_timeout_s=2, batch_size=1)
    stepmill.Pool([CountingEnv], on_faul="truncate")  # type: ignore[call-arg]
    stepmill.Pool([CountingEnv], backend="proces")  # type: ignore[arg-type]
    with stepmill.Pool(env_fns) as pool:
        assert_type(pool, stepmill.Pool)


def vector_envs_are_gymnasiums(env_fns: Sequence[Any]) -> None:
    envs = stepmill.VectorEnv(env_fns, autoreset_mode="SameStep", copy=True)
    stepmill.VectorEnv(env_fns, autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED, shared_memory=False)
    stepmill.VectorEnv(env_fns, context=stepmill.Context.SPAWN, seeding="per_episode", on_fault="replay")
    stepmill.VectorEnv(env_fns, seeding="per_epsiode")  # type: ignore[arg-type]
    stepmill.VectorEnv(env_fns, nworkers=2)  # type: ignore[call-arg]
    as_gymnasium: gymnasium.vector.VectorEnv[Any, Any, NDArray[Any]] = envs
    assert_type(as_gymnasium.num_envs, int)
    assert_type(stepmill.make_vec("CartPole-v1", 4), stepmill.VectorEnv)
    assert_type(stepmill.make_vec("CartPole-v1", 4, on_fault="truncate", max_episode_steps=3), stepmill.VectorEnv)
    assert_type(
        stepmill.make_vec("CartPole-v1", 4, "async", env_kwargs={"sutton_barto_reward": True}), stepmill.VectorEnv
    )
    _, reward, terminated, _, _ = envs.step([0, 1])
    assert_type(reward, NDArray[np.float64])
    assert_type(terminated, NDArray[np.bool_])


def errors_carry_what_they_know(error: stepmill.StepmillError) -> None:
    if isinstance(error, stepmill.WorkerDied):
        assert_type(error.env_ids, tuple[int, ...])
        assert_type(error.signal_name, str | None)
    if isinstance(error, stepmill.EnvError):
        assert_type(error.env_id, int | None)
    assert_type(error.others, tuple[stepmill.StepmillError, ...])


def checks_take_env_functions() -> None:
    check_env(CountingEnv, seed=1)
    check_env(CountingEnv())  # type: ignore[arg-type]
