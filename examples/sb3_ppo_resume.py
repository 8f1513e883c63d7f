"""Stable-Baselines3's PPO goes on after the program was killed, with the numbers of a run that was never killed.

    python examples/sb3_ppo_resume.py FILE [--steps 20000] [--every 4] [--stop-at STEPS]

Run it again with the same file to go on. A callback writes one file every few rollouts, and on SIGTERM, which a preempted machine
gets before its end: the model (network, optimiser, counts), the envs in the middle of their episodes, and the random generators.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

import stepmill
from stepmill.frontends.sb3 import SB3VecEnv


class Checkpoint(BaseCallback):
    """Writes all that the training needs, at the start of a rollout: between the updates of the network."""

    def __init__(self, path: Path, every: int, stop_at: int) -> None:
        super().__init__()
        self.path, self.every, self.stop_at, self.count = path, every, stop_at, 0
        self.is_preempted = False
        signal.signal(signal.SIGTERM, self._preempt)

    def _preempt(self, *_: Any) -> None:
        self.is_preempted = (
            True  # the rollout and the update go on to their end, which takes less than the grace period
        )

    def _on_rollout_start(self) -> None:
        self.count += 1
        if self.is_preempted or self.count % self.every == 0:
            write(self.path, self.model)
        if self.is_preempted or self.num_timesteps >= self.stop_at:
            os._exit(143)  # as if the machine were gone

    def _on_step(self) -> bool:
        return True


def write(path: Path, model: Any) -> None:
    """Write the file as a whole or not at all."""
    network = io.BytesIO()
    model.save(network)
    generators = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002 - SB3 uses it
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        pickle.dump((network.getvalue(), stepmill.save(model.env, None), generators), file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def resume(path: Path, envs: Any) -> Any:
    """Return the model of the file, on envs that go on."""
    network, saved, (torch_state, numpy_state) = pickle.loads(path.read_bytes())  # our own file
    # The model has the last observations; with force_reset it would reset the envs.
    model = PPO.load(io.BytesIO(network), env=envs, force_reset=False, device="cpu")
    stepmill.restore(model.env, saved)
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)  # noqa: NPY002
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=4, help="rollouts between two files")
    parser.add_argument("--stop-at", type=int, default=10**9, help="end like a killed program after this many steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    options = {"on_fault": "replay", "seeding": "per_episode"}
    envs = make_vec_env("CartPole-v1", n_envs=8, seed=3, vec_env_cls=SB3VecEnv, vec_env_kwargs=options)
    try:
        if args.file.exists():
            model = resume(args.file, envs)
        else:
            model = PPO("MlpPolicy", envs, seed=3, n_steps=128, batch_size=256, n_epochs=4, device="cpu")
        left = args.steps - model.num_timesteps
        model.learn(left, callback=Checkpoint(args.file, args.every, args.stop_at), reset_num_timesteps=False)
    finally:
        envs.close()
    weights = b"".join(each.detach().numpy().tobytes() for each in model.policy.parameters())
    returns = [float(episode["r"]) for episode in model.ep_info_buffer]
    print(
        f"mean return {np.mean(returns):.1f} after {model.num_timesteps} steps, weights {hashlib.sha256(weights).hexdigest()[:16]}"
    )


if __name__ == "__main__":
    main()
