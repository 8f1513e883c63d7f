"""Learns CartPole by Stable-Baselines3's PPO on stepmill's vector env, and shows that nothing else has changed.

    python examples/sb3_ppo.py [--steps 20000] [--curve FILE.csv]

The same seeds give the same curve on SB3's own DummyVecEnv; the program asserts it, and prints the time that each took.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from stepmill.frontends.sb3 import SB3VecEnv


class Returns(BaseCallback):
    """Records the mean return of the last 100 episodes whenever experience is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.curve: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        returns = [float(episode["r"]) for episode in self.model.ep_info_buffer or ()]
        self.curve.append((self.num_timesteps, float(np.mean(returns))))


def learn(vec_env_cls: Any, num_steps: int) -> tuple[list[tuple[int, float]], float]:
    """Return env-steps and mean returns, and the seconds that learning took."""
    envs = make_vec_env("CartPole-v1", n_envs=8, seed=3, vec_env_cls=vec_env_cls)
    try:
        model = PPO("MlpPolicy", envs, seed=3, n_steps=128, batch_size=256, n_epochs=4, device="cpu")
        returns, start_s = Returns(), time.perf_counter()
        model.learn(num_steps, callback=returns)
        return returns.curve, time.perf_counter() - start_s
    finally:
        envs.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--curve", help="write env-steps and mean returns to this CSV file")
    args = parser.parse_args()
    curves = {}
    for vec_env_cls in (DummyVecEnv, SubprocVecEnv, SB3VecEnv):
        curves[vec_env_cls], taken_s = learn(vec_env_cls, args.steps)
        num_steps, mean = curves[vec_env_cls][-1]
        print(f"{vec_env_cls.__name__}: mean return {mean:.1f} after {num_steps} steps, {taken_s:.1f} s")
    if args.curve:
        header = "env-steps,mean return of 100 episodes"
        np.savetxt(args.curve, curves[SB3VecEnv], "%.6g", ",", header=header, comments="")
    assert curves[SB3VecEnv] == curves[DummyVecEnv] == curves[SubprocVecEnv]


if __name__ == "__main__":
    main()
