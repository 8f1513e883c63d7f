"""Learns CartPole from whichever envs are ready, with V-trace: an IMPALA-style learner in one process.

    python examples/impala_async.py [--steps 60000] [--seed 1] [--curve FILE.csv]

`recv` returns the envs that finished first, `send` gives each its next action immediately, and no env waits for a slower one. The
steps of each env are collected in a row of its own; the learner uses a row when it has LENGTH steps. By then the policy has
changed, which V-trace corrects (Espeholt et al. 2018). The program ends with assertions: every env was stepped, and the returns
grew.
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

import stepmill

NUM_ENVS, BATCH_SIZE, LENGTH, ROWS, GAMMA = 16, 8, 16, 4, 0.98


class Agent(nn.Module):
    """Logits of the two actions and the value of a state, from one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.policy, self.value = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, obs: torch.Tensor) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        hidden = self.trunk(obs)
        return torch.distributions.Categorical(logits=self.policy(hidden)), self.value(hidden).squeeze(-1)


def v_trace(ratio: Any, reward: Any, discount: Any, valid: Any, values: Any) -> tuple[Any, Any]:
    """Return targets of the values and advantages, both [T, R]; `values` is [T+1, R], the rest [T, R]."""
    rho = ratio.clamp(max=1.0)
    deltas = rho * (reward + discount * values[1:] - values[:-1]) * valid
    targets, later = torch.zeros_like(values), torch.zeros_like(values[0])
    for t in reversed(range(len(reward))):
        later = deltas[t] + discount[t] * rho[t] * later
        targets[t] = values[t] + later
    targets[-1] = values[-1]
    return targets[:-1], rho * (reward + discount * targets[1:] - values[:-1])


def learn(agent: Agent, optimizer: torch.optim.Optimizer, rows: list[dict[str, Any]]) -> None:
    """Take one gradient step on ROWS rows of LENGTH steps each."""
    stacked = {name: torch.from_numpy(np.stack([row[name] for row in rows], axis=1)) for name in rows[0]}
    policy, values = agent(stacked["obs"])
    log_prob = torch.distributions.Categorical(logits=policy.logits[:-1]).log_prob(stacked["action"])
    with torch.no_grad():
        ratio = (log_prob - stacked["log_prob"]).exp()
        targets, advantage = v_trace(ratio, stacked["reward"], stacked["discount"], stacked["valid"], values)
    valid = stacked["valid"]
    gain = (log_prob * advantage * valid).sum() / valid.sum()
    miss = ((values[:-1] - targets).pow(2) * valid).sum() / valid.sum()
    loss = 0.5 * miss - gain - 0.01 * policy.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
    optimizer.step()


class Rows:
    """Collects the steps of each env in rows of LENGTH steps."""

    def __init__(self) -> None:
        self.unfinished = [self.empty() for _ in range(NUM_ENVS)]
        self.is_over = np.zeros(NUM_ENVS, bool)
        self.num_steps = np.zeros(NUM_ENVS, int)
        self.full: list[dict[str, Any]] = []

    @staticmethod
    def empty() -> dict[str, list[Any]]:
        return {name: [] for name in ("obs", "action", "log_prob", "reward", "discount", "valid")}

    def add(self, batch: stepmill.Batch, action: Any, log_prob: Any) -> None:
        """Store the results of some envs, and the actions that follow them."""
        for i, n in enumerate(batch.env_id):
            row = self.unfinished[n]
            if row["action"]:  # this is the result of the last action in the row
                self._end_step(row, n, batch.reward[i], is_terminated=bool(batch.terminated[i]))
            self.is_over[n] = batch.terminated[i] or batch.truncated[i]
            row["obs"].append(batch.obs[i].copy())
            if len(row["reward"]) == LENGTH:
                self.full.append({name: np.stack(values) for name, values in row.items()})
                self.unfinished[n] = row = self.empty()
                row["obs"].append(batch.obs[i].copy())
            row["action"].append(action[i])
            row["log_prob"].append(log_prob[i])

    def _end_step(self, row: dict[str, list[Any]], n: int, reward: float, *, is_terminated: bool) -> None:
        # NEXT_STEP autoreset: the step after the end of an episode only resets.
        is_reset = self.is_over[n]
        row["reward"].append(np.float32(reward))
        row["discount"].append(np.float32(0.0 if is_terminated or is_reset else GAMMA))
        row["valid"].append(np.float32(not is_reset))
        self.num_steps[n] += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", help="write env-steps and mean returns to this CSV file")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2e-3)
    rows = Rows()
    returns: list[float] = []
    curve: list[tuple[int, float]] = []
    with stepmill.Pool(
        [lambda: gymnasium.make("CartPole-v1")] * NUM_ENVS, num_workers=2, batch_size=BATCH_SIZE
    ) as pool:
        pool.reset_async(seed=args.seed)
        while rows.num_steps.sum() < args.steps:
            batch = pool.recv()
            with torch.no_grad():
                policy, _ = agent(torch.from_numpy(batch.obs))
                action = policy.sample()
                log_prob = policy.log_prob(action).numpy()
            pool.send(action.numpy(), batch.env_id)  # these envs step while the learner continues
            rows.add(batch, action.numpy(), log_prob)
            ended = batch.terminated | batch.truncated
            if ended.any():
                returns += batch.info["episode"]["r"][ended].tolist()
            if len(rows.full) >= ROWS:
                learn(agent, optimizer, rows.full)
                curve.append((int(rows.num_steps.sum()), float(np.mean(returns[-50:])) if returns else np.nan))
                rows.full = []
    if args.curve:
        np.savetxt(args.curve, curve[::10], "%.6g", ",", header="env-steps,mean return of 50 episodes", comments="")
    first, last = np.mean(returns[:50]), np.mean(returns[-50:])
    print(
        f"mean return {first:.0f} at the start, {last:.0f} at the end; {rows.num_steps.min()} to {rows.num_steps.max()} steps per env"
    )
    assert rows.num_steps.min() > 0
    assert last > (2 * first if args.steps >= 50_000 else 0)


if __name__ == "__main__":
    main()
