"""Runs one training program with one vector env class: `python -m benchmarks.program_child PROGRAM CLASS SEED`; see `benchmarks.programs`.

Prints JSON: the seconds from the start of the process to the first rollout, in rollouts and in the learner, and a hash of what was learned.
The programs are those of the libraries' documentation, with their default hyperparameters unless a comment says why not.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym

BEGUN_S = float(os.environ.get("PROGRAM_BEGUN_S", time.time()))


class Slow(gym.Wrapper[Any, Any, Any, Any]):
    """Computes for two milliseconds in each step, like a simulator."""

    def step(self, action: Any) -> Any:
        end_s = time.perf_counter() + 2e-3
        while time.perf_counter() < end_s:
            pass
        return super().step(action)


def make_slow() -> gym.Env[Any, Any]:
    return Slow(gym.make("Pendulum-v1"))


class Clock:
    """Adds up the seconds of rollouts, and those in between, which are the learner's."""

    def __init__(self) -> None:
        self.start_s = self.rollout_s = self.learner_s = 0.0
        self._last_s = 0.0

    def begin_rollout(self) -> None:
        now_s = time.time()
        if self._last_s:
            self.learner_s += now_s - self._last_s
        else:
            self.start_s = now_s - BEGUN_S
        self._last_s = now_s

    def end_rollout(self) -> None:
        now_s = time.time()
        self.rollout_s += now_s - self._last_s
        self._last_s = now_s

    def end(self, learned: bytes) -> None:
        """Print the result. What comes after the last rollout is the learner's."""
        self.learner_s += time.time() - self._last_s
        digest = hashlib.sha256(learned).hexdigest()[:16]
        print(json.dumps({**{k: v for k, v in vars(self).items() if k[0] != "_"}, "learned": digest}))


def class_of(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a vector env class for Stable-Baselines3, and its arguments."""
    if name == "stepmill":
        from stepmill.frontends.sb3 import SB3VecEnv

        return SB3VecEnv, {}
    from stable_baselines3.common import vec_env

    return getattr(vec_env, name), {"start_method": "fork"} if name == "SubprocVecEnv" else {}


def sb3(
    env_id: str | Callable[[], Any],
    num_envs: int,
    steps: int,
    algorithm: str,
    name: str,
    seed: int,
    **of_algorithm: Any,
) -> None:
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    cls, kwargs = class_of(name)
    clock = Clock()

    class Callback(BaseCallback):  # type: ignore[misc]  # mypy does not see the library
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            clock.begin_rollout()

        def _on_rollout_end(self) -> None:
            clock.end_rollout()

    is_atari = isinstance(env_id, str) and "NoFrameskip" in env_id
    if is_atari:
        import ale_py

        gym.register_envs(ale_py)
    make = make_atari_env if is_atari else make_vec_env
    envs = make(env_id, n_envs=num_envs, seed=seed, vec_env_cls=cls, vec_env_kwargs=kwargs)
    envs = VecFrameStack(envs, 4) if is_atari else envs
    model = getattr(stable_baselines3, algorithm)(
        "CnnPolicy" if is_atari else "MlpPolicy", envs, seed=seed, device="cpu", **of_algorithm
    )
    model.learn(steps, callback=Callback())
    learned = b"".join(each.detach().numpy().tobytes() for each in model.policy.parameters())
    envs.close()
    clock.end(learned)


def torchrl(env_id: str, num_envs: int, steps: int, name: str, seed: int) -> None:
    import torch
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv, ParallelEnv, SerialEnv

    torch.manual_seed(seed)
    make = partial(GymEnv, env_id)
    if name == "ParallelEnv":
        envs: Any = ParallelEnv(num_envs, make)
    elif name == "SerialEnv":
        envs = SerialEnv(num_envs, make)
    else:
        from stepmill.frontends.torchrl import ParallelEnv as OurParallelEnv

        envs = OurParallelEnv(num_envs, make)
    envs.set_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1), torch.nn.Tanh())
    policy = TensorDictModule(net, ["observation"], ["action"])
    clock = Clock()
    digest = hashlib.sha256()
    collector = Collector(envs, policy, frames_per_batch=100 * num_envs, total_frames=steps)
    clock.begin_rollout()
    for batch in collector:
        digest.update(batch["next", "observation"].numpy().tobytes())
        clock.end_rollout()
        clock.begin_rollout()
    clock.end_rollout()
    collector.shutdown()
    clock.end(digest.digest())


PROGRAMS: dict[str, tuple[list[str], Callable[[str, int], None]]] = {
    "sb3-ppo-cartpole": (["DummyVecEnv", "SubprocVecEnv", "stepmill"], partial(sb3, "CartPole-v1", 8, 40_000, "PPO")),
    "sb3-ppo-halfcheetah": (
        ["DummyVecEnv", "SubprocVecEnv", "stepmill"],
        partial(sb3, "HalfCheetah-v5", 8, 32_000, "PPO"),
    ),
    "sb3-ppo-pong": (
        ["DummyVecEnv", "SubprocVecEnv", "stepmill"],
        partial(sb3, "PongNoFrameskip-v4", 8, 4_096, "PPO", n_steps=128, batch_size=256),
    ),
    "sb3-ppo-2ms": (
        ["DummyVecEnv", "SubprocVecEnv", "stepmill"],
        partial(sb3, make_slow, 8, 8_000, "PPO", n_steps=256),
    ),
    "sb3-sac-n1": (["DummyVecEnv", "stepmill"], partial(sb3, "Pendulum-v1", 1, 1_500, "SAC")),
    "sb3-sac-n4": (["DummyVecEnv", "SubprocVecEnv", "stepmill"], partial(sb3, "Pendulum-v1", 4, 4_000, "SAC")),
    "torchrl-collector": (["SerialEnv", "ParallelEnv", "stepmill"], partial(torchrl, "Pendulum-v1", 8, 16_000)),
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]][1](sys.argv[2], int(sys.argv[3]))
