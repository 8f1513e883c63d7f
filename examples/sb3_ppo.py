"""Learns CartPole by Stable-Baselines3's PPO on stepmill's vector env, and shows that nothing else has changed.

    python examples/sb3_ppo.py [--steps 20000]

The same seeds give the same curve on SB3's own DummyVecEnv; the program asserts it, and prints the time that each took.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from stepmill.frontends.sb3 import SB3VecEnv


def learn(vec_env_cls: Any, num_steps: int) -> tuple[list[float], float]:
    """Return the last returns of episodes, and the seconds that learning took."""
    envs = make_vec_env("CartPole-v1", n_envs=8, seed=3, vec_env_cls=vec_env_cls)
    try:
        model = PPO("MlpPolicy", envs, seed=3, n_steps=128, batch_size=256, n_epochs=4, device="cpu")
        start_s = time.perf_counter()
        model.learn(num_steps)
        return [float(episode["r"]) for episode in model.ep_info_buffer or ()], time.perf_counter() - start_s
    finally:
        envs.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    num_steps = parser.parse_args().steps
    curves = {}
    for vec_env_cls in (DummyVecEnv, SubprocVecEnv, SB3VecEnv):
        curves[vec_env_cls], taken_s = learn(vec_env_cls, num_steps)
        mean = sum(curves[vec_env_cls]) / len(curves[vec_env_cls])
        print(f"{vec_env_cls.__name__}: mean return {mean:.1f} after {num_steps} steps, {taken_s:.1f} s")
    assert curves[SB3VecEnv] == curves[DummyVecEnv] == curves[SubprocVecEnv]


if __name__ == "__main__":
    main()
