"""Trains a tiny policy on an env of texts, on the CPU, in an asyncio program.

    python examples/text_policy.py [--episodes 480] [--curve FILE.csv]

The env names a colour in a sentence; the answer must be its opposite. The policy is a table of logits, word by word, that REINFORCE
changes; in its place a language model would be awaited. Episodes are under way at once, each in an env that its task has leased, and
one worker is killed in the middle: with `on_fault="replay"` the returns are those of a run in which nothing dies. The program ends
with assertions: the policy learns, and both runs have the same returns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

import stepmill

OPPOSITES = {"red": "green", "green": "red", "blue": "orange", "orange": "blue", "black": "white", "white": "black"}
WORDS = tuple(OPPOSITES)
NUM_QUESTIONS = 4
BATCH = 16
RATE = 2.0


class OppositesEnv(gymnasium.Env[str, str]):
    """Asks for the opposite of colours; the reward of an answer is 1 if it is right."""

    observation_space = action_space = gymnasium.spaces.Text(200, charset="abcdefghijklmnopqrstuvwxyz ?", min_length=0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Ask the first question."""
        super().reset(seed=seed)
        self.num_asked = 0
        return self.ask(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge an answer, and ask the next question."""
        reward = float(action == OPPOSITES[self.asked])
        return self.ask(), reward, self.num_asked > NUM_QUESTIONS, False, {}

    def ask(self) -> str:
        """Choose a colour."""
        self.num_asked += 1
        self.asked = str(self.np_random.choice(WORDS))
        return f"what is the opposite of {self.asked}?"


class Policy:
    """Logits [word asked, word said]."""

    def __init__(self) -> None:
        self.logits = np.zeros((len(WORDS), len(WORDS)))

    def probabilities(self, asked: int) -> NDArray[np.float64]:
        """Return the chance of each word."""
        odds = np.exp(self.logits[asked] - self.logits[asked].max())
        return odds / odds.sum()

    async def answer(self, obs: str, rng: np.random.Generator) -> tuple[int, int]:
        """Return which word was asked and which is said."""
        await asyncio.sleep(0)  # a language model would take its time here
        asked = WORDS.index(obs.rstrip("?").split()[-1])
        return asked, int(rng.choice(len(WORDS), p=self.probabilities(asked)))

    def learn(self, episodes: list[list[tuple[int, int, float]]]) -> None:
        """Make answers that were better than the mean likelier."""
        steps = [step for episode in episodes for step in episode]
        mean = np.mean([reward for *_, reward in steps])
        gradient = np.zeros_like(self.logits)
        for asked, said, reward in steps:
            towards = -self.probabilities(asked)
            towards[said] += 1.0
            gradient[asked] += (reward - mean) * towards
        self.logits += RATE * gradient / len(episodes)


async def play(pool: stepmill.AsyncPool, policy: Policy, number: int) -> list[tuple[int, int, float]]:
    """Play one episode; its number decides questions and chances."""
    rng = np.random.default_rng(number)
    steps = []
    async with pool.lease() as env:
        obs, _ = await env.reset(seed=number)
        is_over = False
        while not is_over:
            asked, said = await policy.answer(obs, rng)
            obs, reward, is_over, _, _ = await env.step(WORDS[said])
            steps.append((asked, said, reward))
    return steps


async def train(num_episodes: int, *, is_killed: bool) -> list[float]:
    """Return the mean return of each batch of episodes."""
    policy, means = Policy(), []
    options: Any = {"num_workers": 2, "on_fault": "replay", "seeding": "per_episode"}
    async with stepmill.AsyncPool(OppositesEnv, num_envs=8, **options) as pool:
        for first in range(0, num_episodes, BATCH):
            tasks = [asyncio.create_task(play(pool, policy, first + place)) for place in range(BATCH)]
            if is_killed and first >= num_episodes // 2:
                is_killed = False
                await tasks[0]
                os.kill(pool.pool.stats().workers[0].pid, signal.SIGKILL)
            episodes = await asyncio.gather(*tasks)
            policy.learn(episodes)
            means.append(float(np.mean([sum(reward for *_, reward in episode) for episode in episodes])))
    return means


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=480)
    parser.add_argument("--curve", help="write the number of episodes and their mean return to this CSV file")
    args = parser.parse_args()
    means = asyncio.run(train(args.episodes, is_killed=False))
    print(
        "mean return of 16 episodes, first to last:",
        *(f"{mean:.2f}" for mean in means[::5]),
        f"{means[-1]:.2f} of {NUM_QUESTIONS}",
    )
    assert asyncio.run(train(args.episodes, is_killed=True)) == means, "a worker that was killed has changed the run"
    if args.curve:
        rows = [(BATCH * number, mean) for number, mean in enumerate(means, 1)]
        np.savetxt(args.curve, rows, "%.6g", ",", header="episodes,mean return of 16", comments="")
    if args.episodes >= 480:
        assert means[0] < 1.5
        assert means[-1] > 3.5


if __name__ == "__main__":
    main()
