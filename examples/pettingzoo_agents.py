"""Learns one policy for several agents whose episodes end at different times: REINFORCE in NumPy.

    python examples/pettingzoo_agents.py [--rounds 60] [--seed 1] [--curve FILE.csv]

`Errands` is a PettingZoo parallel env: three walkers on a line, each with a goal of its own. A walker that arrives is terminated,
and after LIMIT steps the others are truncated. `StackedAgents` makes the agents a dimension of the arrays, and `Batch.players` has
one row for each agent that is present. The program ends with assertions: walkers ended at different times, and the shared policy
learnt to reach the goals.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

import stepmill
from stepmill.envs.pettingzoo import StackedAgents

NUM_ENVS, NUM_AGENTS, LIMIT, GAMMA, RATE = 16, 3, 25, 0.95, 0.3
OBSERVATION = spaces.Box(-1, 1, (3,), np.float32)
ACTION = spaces.Discrete(2)


class Errands(ParallelEnv[str, Any, Any]):
    """The reward is -0.1 per step and 1 at the goal. Observed: the distance to the goal, its direction, and a constant."""

    metadata = {"name": "errands"}

    def __init__(self) -> None:
        self.possible_agents = [f"walker_{i}" for i in range(NUM_AGENTS)]
        self.agents: list[str] = []
        self.random = np.random.default_rng()

    def observation_space(self, agent: str) -> spaces.Box:
        return OBSERVATION

    def action_space(self, agent: str) -> spaces.Discrete:
        return ACTION

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents = self.possible_agents[:]
        self.t = 0
        ways = self.random.integers(2, 9, NUM_AGENTS) * self.random.choice([-1, 1], NUM_AGENTS)
        self.way = dict(zip(self.agents, ways.tolist(), strict=True))
        return self._observe(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.t += 1
        acting = self.agents
        for agent in acting:
            self.way[agent] -= 1 if actions[agent] == 1 else -1
        home = {agent: self.way[agent] == 0 for agent in acting}
        late = {agent: self.t == LIMIT and not home[agent] for agent in acting}
        self.agents = [agent for agent in acting if not home[agent] and not late[agent]]
        rewards = {agent: 1.0 if home[agent] else -0.1 for agent in acting}
        return self._observe(acting), rewards, home, late, {agent: {} for agent in acting}

    def _observe(self, agents: list[str]) -> dict[str, Any]:
        ways = {agent: self.way[agent] for agent in agents}
        return {
            agent: np.array([np.clip(way / 40, -1, 1), np.sign(way), 1.0], np.float32) for agent, way in ways.items()
        }


class Episode:
    """Observation, action and reward of each walker and step, [LIMIT, NUM_ENVS, NUM_AGENTS]; `acted` marks the valid ones."""

    def __init__(self) -> None:
        shape = (LIMIT, NUM_ENVS, NUM_AGENTS)
        self.obs = np.zeros((*shape, *OBSERVATION.shape), np.float32)
        self.action, self.chance, self.reward = np.zeros(shape, np.int64), np.zeros(shape), np.zeros(shape)
        self.acted = np.zeros(shape, bool)

    def gradient(self) -> Any:
        """Return REINFORCE's gradient of the shared weights; the baseline is the mean return of each step."""
        returns, later = np.zeros_like(self.reward), np.zeros(self.reward.shape[1:])
        for t in reversed(range(LIMIT)):
            later = self.reward[t] + GAMMA * later
            returns[t] = later
        counts = np.maximum(self.acted.sum(axis=(1, 2)), 1)
        baseline = (returns * self.acted).sum(axis=(1, 2)) / counts
        pull = (self.action - self.chance) * (returns - baseline[:, None, None])
        return (self.obs * pull[..., None])[self.acted].mean(axis=0)


def play(pool: stepmill.Pool, weights: Any, random: np.random.Generator) -> Episode:
    """Play one episode in every env. Once all walkers of an env have ended, its actions have no effect on the episode."""
    episode = Episode()
    batch = pool.reset()
    is_first_episode = np.ones(NUM_ENVS, bool)
    for t in range(LIMIT):
        players = batch.players
        acting = players.alive & is_first_episode[players.row]
        row, slot, obs = players.row[acting], players.slot[acting], players.obs[acting]
        chance = 1 / (1 + np.exp(-obs @ weights))  # one matrix product for the walkers of all envs
        actions = np.zeros((NUM_ENVS, NUM_AGENTS), np.int64)
        actions[row, slot] = random.random(len(chance)) < chance
        batch = pool.step(actions)
        episode.obs[t, row, slot], episode.chance[t, row, slot] = obs, chance
        episode.action[t, row, slot] = actions[row, slot]
        episode.reward[t, row, slot] = batch.reward[row, slot]
        episode.acted[t, row, slot] = True
        is_first_episode &= batch.alive.any(axis=1)  # type: ignore[union-attr]  # these envs have agents
    return episode


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", help="write rounds and mean returns to this CSV file")
    args = parser.parse_args()
    random = np.random.default_rng(args.seed)
    weights, returns, lengths = np.zeros(3), [], set()
    with stepmill.Pool([lambda: StackedAgents(Errands())] * NUM_ENVS, num_workers=2) as pool:
        pool.reset(seed=args.seed)
        for _ in range(args.rounds):
            episode = play(pool, weights, random)
            weights += RATE * episode.gradient() * 10
            returns.append(episode.reward.sum() / (NUM_ENVS * NUM_AGENTS))
            lengths |= set(episode.acted.sum(axis=0).ravel().tolist())
    if args.curve:
        rows = list(enumerate(returns, 1))
        np.savetxt(args.curve, rows, "%.6g", ",", header="round,mean return of a walker", comments="")
    first, last = np.mean(returns[:3]), np.mean(returns[-3:])
    print(
        f"mean return of a walker {first:.2f} at the start, {last:.2f} at the end; episodes of {sorted(lengths)} steps"
    )
    assert len(lengths) > 3, "walkers should end at different times"
    assert last > (0.3 if args.rounds >= 40 else first), "the walkers should reach their goals"


if __name__ == "__main__":
    main()
