"""A program for each front-end, as type checkers see it. Nothing here runs; `make check` lets mypy and pyright read it.

Each ends in a typo of an option. Both checkers complain of a `type: ignore` that nothing needs, so the typo must be an error.
"""

from typing import Any

import stepmill
from stepmill.frontends.alf import FastParallelEnvironment, ProcessEnvironment
from stepmill.frontends.di_engine import BaseEnvManager, SyncSubprocessEnvManager
from stepmill.frontends.dm_env import DmEnvironment
from stepmill.frontends.mlagents import ManagerOptions, SubprocessEnvManager
from stepmill.frontends.multi_env import SubprocessEnv, create_subprocess_envs
from stepmill.frontends.pettingzoo import AgentVectorEnv, StepmillParallelEnv
from stepmill.frontends.ray_rollout import RayRollout
from stepmill.frontends.sb3 import SB3VecEnv
from stepmill.frontends.tianshou import StepmillVectorEnv
from stepmill.frontends.torchrl import StepmillEnv
from stepmill.testing import CountingEnv


def make_unity_env(worker_id: int, side_channels: list[Any]) -> Any:
    return worker_id, side_channels


def pool() -> None:
    with stepmill.Pool([CountingEnv] * 4, batch_size=2, on_fault="truncate") as envs:
        envs.reset_async(seed=0)
        batch = envs.recv()
        envs.send([0] * len(batch.env_id), batch.env_id)
    stepmill.Pool([CountingEnv], on_fualt="truncate")  # type: ignore[call-arg]
    stepmill.Pool([CountingEnv], on_fault="trunctate")  # type: ignore[arg-type]


def vector_env() -> None:
    """What stepmill.frontends.gymnasium has."""
    envs = stepmill.VectorEnv([CountingEnv] * 4, num_workers=2, autoreset_mode="SameStep")
    envs.reset(seed=0, options={"reset_mask": [True] * 4})
    envs.step([0] * 4)
    stepmill.VectorEnv([CountingEnv], num_worker=2)  # type: ignore[call-arg]
    stepmill.VectorEnv([CountingEnv], context="spwan")  # type: ignore[arg-type]


def make_vec(own: dict[str, Any]) -> None:
    stepmill.make_vec(
        "CartPole-v1", 4, "async", max_episode_steps=3, render_mode=None, env_kwargs={"sutton_barto_reward": True}
    )
    stepmill.make_vec("HalfCheetah-v5", 4, backend="process", crash_dir="crashes")
    stepmill.make_vec("Mine-v0", 4, env_kwargs={"size": 3}, vector_kwargs={"copy": True}, **own)
    stepmill.make_vec("CartPole-v1", 4, num_worker=2)  # type: ignore[call-arg]
    stepmill.make_vec("CartPole-v1", 4, backend="proces")  # type: ignore[arg-type]


def ray_rollout(policy: Any) -> None:
    with RayRollout([CountingEnv] * 4, 16, policy=policy, num_workers=2) as rollout:
        rollout.collect()
    RayRollout([CountingEnv], 16, policy=policy, num_worker=2)  # type: ignore[call-arg]


def alf() -> None:
    FastParallelEnvironment([CountingEnv], num_workers=2, start_method="spawn", crash_dir="crashes").reset()
    ProcessEnvironment(CountingEnv, as_tensors=False, step_timeout_s=3).start()
    FastParallelEnvironment([CountingEnv], num_worker=2)  # type: ignore[call-arg]
    ProcessEnvironment(CountingEnv, step_timeout=3)  # type: ignore[call-arg]


def di_engine() -> None:
    SyncSubprocessEnvManager([CountingEnv], {"max_retry": 2}, num_workers=2, step_timeout_s=3).launch()
    SyncSubprocessEnvManager([CountingEnv], num_worker=2)  # type: ignore[call-arg]
    BaseEnvManager([CountingEnv], crashdir="crashes")  # type: ignore[call-arg]


def dm_env() -> None:
    DmEnvironment(CountingEnv, backend="process", reset_timeout_s=3).reset()
    DmEnvironment(CountingEnv, reset_timeout=3)  # type: ignore[call-arg]


def mlagents() -> None:
    SubprocessEnvManager(make_unity_env, n_env=2, on_crash="reset_all", step_timeout_s=60).reset()
    SubprocessEnvManager(make_unity_env, options=ManagerOptions(seed=1), is_deterministic=True).close()
    SubprocessEnvManager(make_unity_env, n_env=2, on_crahs="reset_all")  # type: ignore[call-arg]
    SubprocessEnvManager(make_unity_env, n_env=2, on_crash="restart")  # type: ignore[arg-type]


def multi_env() -> None:
    create_subprocess_envs([CountingEnv] * 2, num_workers=2)
    SubprocessEnv(CountingEnv, step_timeout_s=3).start()
    create_subprocess_envs([CountingEnv], num_worker=2)  # type: ignore[call-arg]
    SubprocessEnv(CountingEnv, step_timeout=3)  # type: ignore[call-arg]


def pettingzoo() -> None:
    StepmillParallelEnv(CountingEnv, step_timeout_s=3).reset(seed=0)
    AgentVectorEnv([CountingEnv] * 2, num_workers=2).reset(seed=0)
    StepmillParallelEnv(CountingEnv, step_timeout=3)  # type: ignore[call-arg]
    AgentVectorEnv([CountingEnv], num_worker=2)  # type: ignore[call-arg]


def sb3() -> None:
    SB3VecEnv([CountingEnv] * 2, on_fault="truncate", start_method="fork")
    SB3VecEnv([CountingEnv], start_method="spawn", options=stepmill.PoolOptions(num_workers=2))
    SB3VecEnv([CountingEnv], on_fualt="truncate")  # type: ignore[call-arg]


def tianshou() -> None:
    StepmillVectorEnv([CountingEnv] * 2, wait_num=1, num_workers=2)
    StepmillVectorEnv([CountingEnv], num_worker=2)  # type: ignore[call-arg]


def torchrl() -> None:
    StepmillEnv([CountingEnv] * 2, num_workers=2, step_timeout_s=3)
    StepmillEnv([CountingEnv], step_timeout=3)  # type: ignore[call-arg]
