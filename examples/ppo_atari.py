"""Trains a policy for Atari Pong by PPO. The envs are in two halves: one steps while the policy computes for the other.

    python examples/ppo_atari.py [--env ALE/Pong-v5] [--steps 3000000] [--envs 8] [--device cpu|cuda]

Only the first 260,000 env-steps of a training were tried. On two busy CPU cores the program made about 55 env-steps per second, so
the default number would take 15 hours there; use a GPU if you have one. The workers write each observation into shared memory, and it
is copied once, into the rollout that the network reads. The assertions at the end check that the loss is finite and that the policy
is still random enough to explore.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from typing import Any

import ale_py
import gymnasium
import numpy as np
import torch
from torch import nn

import stepmill

NUM_STEPS, EPOCHS, MINIBATCH = 128, 4, 256
GAMMA, LAMBDA, RATE, CLIP = 0.99, 0.95, 2.5e-4, 0.1


def make_env(name: str) -> gymnasium.Env[Any, Any]:
    """Pong with the usual preprocessing: gray, 84x84, frame skip 4, four frames stacked."""
    gymnasium.register_envs(ale_py)
    env = gymnasium.make(name, frameskip=1)
    env = gymnasium.wrappers.AtariPreprocessing(env)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


class Agent(nn.Module):
    """The network of Mnih et al. 2015, with a head for actions and one for the value."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(),
        )  # fmt: skip
        self.policy, self.value = nn.Linear(512, num_actions), nn.Linear(512, 1)

    def forward(self, obs: torch.Tensor) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        hidden = self.trunk(obs.float() / 255.0)
        return torch.distributions.Categorical(logits=self.policy(hidden)), self.value(hidden).squeeze(-1)


class Learner:
    """An agent, its optimizer, and the device they are on."""

    def __init__(self, num_actions: int, device: str) -> None:
        self.device = torch.device(device)
        self.agent = Agent(num_actions).to(self.device)
        self.shuffler = np.random.default_rng(1)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=RATE, eps=1e-5)

    @torch.no_grad()
    def act(self, obs: Any, env_ids: Any) -> tuple[Any, dict[str, Any]]:
        """Return actions, with their log-probabilities and values as extras of the rollout."""
        policy, value = self.agent(torch.from_numpy(obs).to(self.device))
        action = policy.sample()
        extras = {"log_prob": policy.log_prob(action).cpu().numpy(), "value": value.cpu().numpy()}
        return action.cpu().numpy(), extras

    @torch.no_grad()
    def last_values(self, obs: Any) -> Any:
        return self.agent(torch.from_numpy(obs).to(self.device))[1].cpu().numpy()

    def learn(self, batch: Any) -> tuple[float, float]:
        """PPO's update; returns the last loss and entropy."""
        values = np.concatenate([batch.extras["value"], self.last_values(batch.obs[-1])[None]])
        advantages = batch.advantages(values, gamma=GAMMA, lam=LAMBDA)
        keep = np.argwhere(batch.valid)
        loss = entropy = torch.zeros(())
        for _ in range(EPOCHS):
            for part in np.array_split(self.shuffler.permutation(keep), max(len(keep) // MINIBATCH, 1)):
                at = part[:, 0], part[:, 1]
                policy, value = self.agent(self._take(batch.obs[at]))
                advantage = self._take(advantages[at])
                target = advantage + self._take(values[at])
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                ratio = (policy.log_prob(self._take(batch.action[at])) - self._take(batch.extras["log_prob"][at])).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
                entropy = policy.entropy().mean()
                loss = 0.5 * (value - target).pow(2).mean() - gain - 0.01 * entropy
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
                self.optimizer.step()
        return float(loss.detach()), float(entropy.detach())

    def _take(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="ALE/Pong-v5")
    parser.add_argument("--steps", type=int, default=3_000_000)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(1)
    options = stepmill.PoolOptions(on_fault="truncate")  # a crashed emulator must not end a night's run
    num_steps = min(NUM_STEPS, max(args.steps // args.envs, 1))
    with stepmill.Pool([lambda: make_env(args.env)] * args.envs, options=options) as pool:
        actions = make_env(args.env).action_space
        learner = Learner(int(actions.n), args.device)  # type: ignore[attr-defined]
        rollout = stepmill.Rollout(pool, num_steps, is_double_buffered=True)
        rollout.reset(seed=1)
        returns: deque[float] = deque(maxlen=20)
        done, start_s = 0, time.perf_counter()
        while done < args.steps:
            batch = rollout.collect(learner.act)
            done += batch.reward.size
            returns.extend(episode["r"] for episode in batch.episodes)
            loss, entropy = learner.learn(batch)
            mean = np.mean(returns) if returns else float("nan")
            print(
                f"{done} steps, {done / (time.perf_counter() - start_s):.0f}/s, mean return {mean:.1f}, loss {loss:.3f}"
            )
    assert np.isfinite(loss)
    assert entropy > 0.01


if __name__ == "__main__":
    main()
