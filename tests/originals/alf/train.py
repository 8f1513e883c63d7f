"""ALF's own actor-critic on CartPole: `python -m tests.originals.alf.train WHOSE ITERATIONS`, in an empty folder.

WHOSE is "ours" or "original". The settings are those of ALF's example ac_cart_pole. Prints, as its last line, JSON: what
was trained, env steps, the average return at the end, seconds, and the learning curve. Fails if the return did not rise.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

NUM_ENVS = 8
UNROLL = 10
LEARNED = 30  # a random policy's average return is 20


def load_cart_pole(env_name: str, env_id: int | None = None) -> Any:
    """Return gym's CartPole as an ALF env. ALF's wrapper needs the API of gym 0.15; gym 0.26 is installed."""
    import gym
    from alf.environments.alf_gym_wrapper import AlfGymWrapper
    from alf.environments.alf_wrappers import TimeLimit

    class OldApi(gym.Wrapper):  # type: ignore[misc, unused-ignore]
        def seed(self, seed: int) -> None:
            self.env.reset(seed=seed)

        def reset(self) -> Any:
            return self.env.reset()[0]

        def step(self, action: Any) -> tuple[Any, ...]:
            obs, reward, terminated, truncated, info = self.env.step(action)
            return obs, reward, terminated or truncated, info

    env = OldApi(gym.make(env_name).unwrapped)
    return TimeLimit(AlfGymWrapper(env, env_id=env_id, discount=1.0))


def configure(whose: str, num_iterations: int) -> Any:
    """Configure ALF as its example does, and the class of the parallel environment; return that class."""
    import alf
    from alf.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
    from alf.algorithms.data_transformer import RewardScaling
    from alf.environments import fast_parallel_environment, utils  # noqa: F401 - registers configurables

    if whose == "ours":
        from stepmill.frontends.alf import FastParallelEnvironment

        cls = FastParallelEnvironment
        alf.config("create_environment", start_serially=False)
    else:
        cls = fast_parallel_environment.FastParallelEnvironment
    alf.config(
        "create_environment",
        env_name="CartPole-v1",
        env_load_fn=load_cart_pole,
        num_parallel_environments=NUM_ENVS,
        parallel_environment_ctor=cls,
    )
    alf.config("TimeLimit", duration=500)  # used by envs only
    alf.config("RewardScaling", scale=0.01)
    alf.config("ActorDistributionNetwork", fc_layer_params=(100,))
    alf.config("ValueNetwork", fc_layer_params=(100,))
    alf.config("ActorCriticAlgorithm", optimizer=alf.optimizers.Adam(lr=1e-3, gradient_clipping=10.0))
    alf.config("ActorCriticLoss", entropy_regularization=1e-4, gamma=0.98, use_gae=True, use_td_lambda_return=True)
    alf.config(
        "TrainerConfig",
        algorithm_ctor=ActorCriticAlgorithm,
        data_transformer_ctor=RewardScaling,
        unroll_length=UNROLL,
        num_iterations=num_iterations,
        num_checkpoints=1,
        evaluate=False,
        random_seed=1,
        debug_summaries=False,
        summarize_grads_and_vars=False,
        summary_interval=50,
    )
    return cls


def main(whose: str, num_iterations: int) -> None:
    """Train, and print the result."""
    cls = configure(whose, num_iterations)
    from alf.trainers.policy_trainer import RLTrainer, TrainerConfig

    trainer = RLTrainer(TrainerConfig(root_dir=str(Path.cwd())))
    alf = importlib.import_module("alf")
    assert isinstance(alf.get_env(), cls), alf.get_env()
    curve: list[tuple[int, float]] = []
    train_iter = trainer._algorithm.train_iter

    def average_return() -> float:
        metrics = {type(metric).__name__: metric for metric in trainer._algorithm.get_metrics()}
        return float(metrics["AverageReturnMetric"].result())

    def train_and_note() -> Any:
        found = train_iter()
        curve.append(((len(curve) + 1) * UNROLL * NUM_ENVS, average_return()))
        return found

    trainer._algorithm.train_iter = train_and_note
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    reward = average_return()
    assert reward > LEARNED, f"the average return is {reward}"
    result = {
        "what": f"actor-critic on CartPole-v1, {NUM_ENVS} envs in processes",
        "steps": num_iterations * UNROLL * NUM_ENVS,
        "reward": round(reward, 1),
        "seconds": seconds,
        "curve": curve,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
