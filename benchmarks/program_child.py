"""Runs one training program with one vector env class: `python -m benchmarks.program_child PROGRAM CLASS SEED STEPS`.

See `benchmarks.programs`. Prints JSON: the seconds from the start of the process to the first rollout, in rollouts and in the learner, and a
hash of what was learned. The programs are those of the libraries' documentation, with their default hyperparameters unless a comment says why not.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym

from benchmarks.program_clock import Clock, make_sb3_callback


class Slow(gym.Wrapper[Any, Any, Any, Any]):
    """Computes for two milliseconds in each step, like a simulator."""

    def step(self, action: Any) -> Any:
        end_s = time.perf_counter() + 2e-3
        while time.perf_counter() < end_s:
            pass
        return super().step(action)


def make_slow() -> gym.Env[Any, Any]:
    return Slow(gym.make("Pendulum-v1"))


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
    algorithm: str,
    name: str,
    seed: int,
    steps: int,
    **of_algorithm: Any,
) -> None:
    import stable_baselines3
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    cls, kwargs = class_of(name)
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
    model.learn(steps, callback=make_sb3_callback()())
    envs.close()


def torchrl(env_id: str, num_envs: int, name: str, seed: int, steps: int) -> None:
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


def tianshou(env_id: str, num_envs: int, name: str, seed: int, steps: int) -> None:
    import numpy as np
    import tianshou.env
    import torch
    from tianshou.algorithm import PPO
    from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
    from tianshou.utils.torch_utils import policy_within_training_step

    np.random.seed(seed)  # noqa: NPY002 - Tianshou shuffles minibatches with the global generator
    torch.manual_seed(seed)
    if name == "stepmill":
        from stepmill.frontends.tianshou import StepmillVectorEnv

        cls: Any = StepmillVectorEnv
    else:
        cls = getattr(tianshou.env, name)
    envs = cls([partial(gym.make, env_id)] * num_envs)
    envs.seed(seed)
    shape, num_actions = envs.observation_space[0].shape, int(envs.action_space[0].n)
    actor = DiscreteActor(
        preprocess_net=Net(state_shape=shape, hidden_sizes=(64, 64)), action_shape=num_actions, softmax_output=False
    )
    policy = ProbabilisticActorPolicy(
        actor=actor,
        dist_fn=lambda logits: torch.distributions.Categorical(logits=logits),
        action_space=envs.action_space[0],
        action_scaling=False,
    )
    critic = DiscreteCritic(preprocess_net=Net(state_shape=shape, hidden_sizes=(64, 64)))
    algorithm = PPO(policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=3e-4))
    collector = Collector(algorithm, envs, VectorReplayBuffer(2048, num_envs))
    clock = Clock()
    clock.begin_rollout()
    collector.reset()
    for _ in range(0, steps, 2048):
        collector.collect(n_step=2048)
        clock.end_rollout()
        with policy_within_training_step(policy):
            algorithm.update(collector.buffer, batch_size=64, repeat=10)
        collector.reset_buffer(keep_statistics=True)
        clock.begin_rollout()
    clock.end_rollout()
    envs.close()
    clock.end(policy)


PROGRAMS: dict[str, Callable[[str, int, int], None]] = {
    "sb3-ppo-cartpole": partial(sb3, "CartPole-v1", 8, "PPO"),
    "sb3-ppo-halfcheetah": partial(sb3, "HalfCheetah-v5", 8, "PPO"),
    "sb3-ppo-pong": partial(sb3, "PongNoFrameskip-v4", 8, "PPO", n_steps=128, batch_size=256),
    "sb3-ppo-2ms": partial(sb3, make_slow, 8, "PPO", n_steps=256),
    "sb3-sac-n1": partial(sb3, "Pendulum-v1", 1, "SAC"),
    "sb3-sac-n4": partial(sb3, "Pendulum-v1", 4, "SAC"),
    "tianshou-ppo-cartpole": partial(tianshou, "CartPole-v1", 8),
    "torchrl-collector": partial(torchrl, "Pendulum-v1", 8),
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
