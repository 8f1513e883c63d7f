"""Learns CartPole by PPO in plain PyTorch, from stepmill's rollouts.

    python examples/ppo_cartpole.py [--steps 150000] [--engine stepmill|gymnasium] [--workers 2] [--curve FILE.csv]

The training ends when the mean return of 40 episodes is 475 or more. The recorded run, with the default seed, needed 41,673 env-steps.
The program fails if `--steps` env-steps do not suffice; with fewer than 50,000, if the mean return is not higher than at the start.
`--engine gymnasium` uses Gymnasium's AsyncVectorEnv in the same loop, to compare the times.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

import stepmill

NUM_ENVS, NUM_STEPS, EPOCHS, SOLVED = 8, 32, 20, 475.0
GAMMA, LAMBDA, RATE, CLIP = 0.98, 0.8, 1e-3, 0.2


class Agent(nn.Module):
    """Two small networks: logits of the two actions, and the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    @torch.no_grad()
    def act(self, obs: Any, env_ids: Any) -> tuple[Any, dict[str, Any]]:
        """Return actions [B], with their log-probabilities as extras of the rollout."""
        policy = torch.distributions.Categorical(logits=self.actor(torch.from_numpy(obs)))
        action = policy.sample()
        return action.numpy(), {"log_prob": policy.log_prob(action).numpy()}

    @torch.no_grad()
    def values(self, obs: Any) -> Any:
        return self.critic(torch.as_tensor(obs)).squeeze(-1).numpy()


class GymnasiumRollout:
    """The same rollouts from Gymnasium's vector env, stacked by hand."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.envs = gymnasium.make_vec("CartPole-v1", NUM_ENVS, vectorization_mode="async")
        self.returns = np.zeros(NUM_ENVS)

    def reset(self, seed: int) -> None:
        self.obs, _ = self.envs.reset(seed=seed)
        self.is_over = np.zeros(NUM_ENVS, bool)

    def collect(self, policy: Any) -> stepmill.RolloutBatch:
        rows: dict[str, list[Any]] = {
            name: [] for name in ("obs", "action", "log_prob", "reward", "end", "cut", "valid")
        }
        episodes = []
        for t in range(self.num_steps):
            action, extras = policy(self.obs, None)
            rows["obs"].append(self.obs.copy())
            rows["valid"].append(~self.is_over)
            self.obs, reward, end, cut, _ = self.envs.step(action)
            self.is_over = end | cut
            self.returns += reward
            for name, value in (
                ("action", action),
                ("log_prob", extras["log_prob"]),
                ("reward", reward),
                ("end", end),
                ("cut", cut),
            ):
                rows[name].append(value)
            episodes += [{"t": t, "env_id": n, "r": self.returns[n], "l": 0} for n in np.flatnonzero(self.is_over)]
            self.returns[self.is_over] = 0
        rows["obs"].append(self.obs.copy())
        stacked = {name: np.stack(values) for name, values in rows.items()}
        return stepmill.RolloutBatch(
            stacked["obs"], stacked["action"], stacked["reward"].astype(np.float32), stacked["end"], stacked["cut"],
            stacked["valid"], np.zeros((0, 2), np.int64), np.zeros((0, 4), np.float32), {"log_prob": stacked["log_prob"]}, episodes,
        )  # fmt: skip


def learn(agent: Agent, optimizer: torch.optim.Optimizer, batch: Any, progress: float) -> None:
    """PPO's update on one rollout; `progress` from 0 to 1 anneals rate and clipping."""
    values = agent.values(batch.obs)
    advantages = batch.advantages(values, gamma=GAMMA, lam=LAMBDA)
    keep = torch.from_numpy(batch.valid)
    obs, action = torch.from_numpy(batch.obs[:-1])[keep], torch.from_numpy(batch.action)[keep]
    advantage, old = torch.from_numpy(advantages)[keep], torch.from_numpy(batch.extras["log_prob"])[keep]
    target = advantage + torch.from_numpy(values[:-1])[keep]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clip = CLIP * (1 - progress)
    optimizer.param_groups[0]["lr"] = RATE * (1 - progress)
    for _ in range(EPOCHS):
        ratio = (torch.distributions.Categorical(logits=agent.actor(obs)).log_prob(action) - old).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
        loss = 0.5 * (agent.critic(obs).squeeze(-1) - target).pow(2).mean() - gain
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150_000)
    parser.add_argument("--engine", choices=["stepmill", "gymnasium"], default="stepmill")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", help="write env-steps and mean returns to this CSV file")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=RATE, eps=1e-5)
    if args.engine == "stepmill":
        pool = stepmill.Pool([lambda: gymnasium.make("CartPole-v1")] * NUM_ENVS, num_workers=args.workers)
        rollout, close = stepmill.Rollout(pool, NUM_STEPS), pool.close
    else:
        rollout = GymnasiumRollout(NUM_STEPS)
        close = rollout.envs.close
    try:
        rollout.reset(seed=args.seed)
        returns: deque[float] = deque(maxlen=40)
        first, done, curve, start_s = None, 0, [], time.perf_counter()
        while done < args.steps and (len(returns) < 40 or np.mean(returns) < SOLVED):
            batch = rollout.collect(agent.act)
            done += int(batch.valid.sum())
            returns.extend(episode["r"] for episode in batch.episodes)
            first = np.mean(returns) if first is None and len(returns) == 40 else first
            curve.append((done, np.mean(returns) if returns else np.nan))
            learn(agent, optimizer, batch, min(done / args.steps, 0.95))
    finally:
        close()
    if args.curve:
        np.savetxt(args.curve, curve, "%.6g", ",", header="env-steps,mean return of 40 episodes", comments="")
    mean = float(np.mean(returns))
    print(f"{args.engine}: mean return {mean:.0f} after {done} env-steps and {time.perf_counter() - start_s:.1f} s")
    assert mean >= SOLVED if args.steps >= 50_000 else first is None or mean > first


if __name__ == "__main__":
    main()
