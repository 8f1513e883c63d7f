"""Evaluates four policies: one that does not know the task, two with memory, of which one is a torch network, and a model of SB3.

    python examples/evaluate.py [--bars FILE.csv]

The bandits are tasks of one env: a task says which arm pays. A policy that does not know the task must remember what an arm has paid.
"""

from __future__ import annotations

import argparse
import csv
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import stepmill

NUM_ARMS, NUM_PULLS = 4, 20


class Bandit(gymnasium.Env[Any, Any]):
    """Pays 1 for one arm, with a chance of 0.9, and 0 otherwise. It succeeds if it has paid in most pulls."""

    observation_space = spaces.Box(0, 1, (NUM_ARMS + 1,), np.float32)  # the last arm, and whether it paid
    action_space = spaces.Discrete(NUM_ARMS)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin; the option "arm" says which arm pays."""
        super().reset(seed=seed)
        self.arm = (options or {}).get("arm", 0)
        self.pulls, self.paid = 0, 0
        return np.zeros(NUM_ARMS + 1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Pull an arm."""
        pays = int(action) == self.arm and self.np_random.random() < 0.9
        self.pulls += 1
        self.paid += pays
        obs = np.zeros(NUM_ARMS + 1, np.float32)
        obs[[int(action), -1]] = 1, pays
        is_over = self.pulls == NUM_PULLS
        return obs, float(pays), is_over, False, {"is_success": self.paid > NUM_PULLS / 2} if is_over else {}


class Remembers:
    """Keeps the counts of each episode: pulls the arm that has paid most often, and tries the next one as long as none has."""

    def __init__(self) -> None:
        self.paid: dict[int, Any] = {}

    def __call__(self, obs: Any, episode_ids: Any, is_first: Any) -> Any:
        """Return the arms for these episodes."""
        actions = np.zeros(len(obs), np.int64)
        for row, episode_id in enumerate(episode_ids.tolist()):
            if is_first[row]:
                self.paid[episode_id] = np.zeros(NUM_ARMS)
            paid = self.paid[episode_id]
            last = int(obs[row, :-1].argmax())
            paid[last] += obs[row, -1] if not is_first[row] else 0
            actions[row] = paid.argmax() if paid.any() else (last + 1) % NUM_ARMS
        return actions


def imitate(cell: Any, head: Any) -> None:
    """Train a recurrent network to pull the arms that `Remembers` pulls, on 64 episodes with other seeds."""
    import torch

    envs, ids, teacher = [Bandit() for _ in range(64)], np.arange(64), Remembers()
    obs = np.stack([env.reset(seed=1000 + each, options={"arm": each % NUM_ARMS})[0] for each, env in enumerate(envs)])
    seen, pulled = [], []
    for time in range(NUM_PULLS):
        seen.append(torch.as_tensor(obs))
        pulled.append(torch.as_tensor(teacher(obs, ids, np.full(64, time == 0))))
        obs = np.stack([env.step(arm)[0] for env, arm in zip(envs, pulled[-1].tolist(), strict=True)])
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=0.01)
    for _ in range(150):
        state, loss = torch.zeros(64, cell.hidden_size), torch.zeros(())
        for each, arms in zip(seen, pulled, strict=True):
            state = cell(each, state)
            loss = loss + torch.nn.functional.cross_entropy(head(state), arms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def recurrent_policy() -> Any:
    """Return a torch policy with memory, with a state for each episode."""
    import torch

    torch.manual_seed(0)
    cell, head = torch.nn.GRUCell(NUM_ARMS + 1, 16), torch.nn.Linear(16, NUM_ARMS)
    imitate(cell, head)
    states: dict[int, Any] = {}

    @torch.inference_mode()
    def policy(obs: Any, episode_ids: Any, is_first: Any) -> Any:
        ids, nothing = episode_ids.tolist(), torch.zeros(16)
        before = [nothing if first else states.get(each, nothing) for each, first in zip(ids, is_first, strict=True)]
        after = cell(torch.as_tensor(obs), torch.stack(before))
        states.update(zip(ids, after, strict=True))
        return head(after).argmax(dim=1)

    return policy


def main() -> None:
    """Print a table for each policy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bars", help="write the success of each policy on the bandits, in percent, to this CSV file")
    args = parser.parse_args()
    tasks = {f"arm {arm}": {"arm": arm} for arm in range(NUM_ARMS)}
    results = {
        "without memory": stepmill.evaluate(
            lambda obs: np.zeros(len(obs), np.int64), Bandit, tasks=tasks, seeds=range(25)
        ),
        "with memory": stepmill.evaluate(Remembers(), Bandit, tasks=tasks, seeds=range(25)),
    }
    try:
        from stable_baselines3 import PPO
    except ImportError:
        PPO = None  # noqa: N806 - a class
    else:
        results["a recurrent torch policy, trained to imitate it"] = stepmill.evaluate(
            recurrent_policy(), Bandit, tasks=tasks, seeds=range(25), batch_size="fixed"
        )
    for name, result in results.items():
        print(f"{name}\n", result)
    blind, *remembering = (result.summary.success_rate or 0.0 for result in results.values())
    assert blind == 1 / NUM_ARMS
    assert min(remembering) > 0.8
    if args.bars:
        with open(args.bars, "w", encoding="utf-8", newline="") as file:
            success = [(name, f"{100 * result.summary.success_rate:.1f}") for name, result in results.items()]
            csv.writer(file, lineterminator="\n").writerows([("way of choosing an arm", "success, %"), *success])
    if PPO is None:
        print("Stable-Baselines3 is not installed")
        return
    model = PPO("MlpPolicy", gymnasium.make("CartPole-v1"), seed=0, device="cpu").learn(4096)
    print("PPO after 4096 steps\n", stepmill.evaluate(model, "CartPole-v1", seeds=range(40), num_envs=8))


if __name__ == "__main__":
    main()
