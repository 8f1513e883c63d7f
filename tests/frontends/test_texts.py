"""textarena's games and reasoning-gym's questions, as the libraries themselves play them, also if workers are killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import reasoning_gym
import textarena

import stepmill
from tests.harness.hangs import HANG_GUARD_S

MAX_STEPS = 30
ARROWS = ("[up]", "[left]", "[right]", "[down]")
GAMES: dict[str, tuple[int, Callable[[random.Random], str]]] = {
    "2048-v0": (1, lambda rng: rng.choice(ARROWS)),
    "FrozenLake-v0": (1, lambda rng: rng.choice(ARROWS)),
    "GuessTheNumber-v0": (1, lambda rng: f"[{rng.randint(1, 20)}]"),
    "Minesweeper-v0": (1, lambda rng: f"[{rng.randrange(8)} {rng.randrange(8)}]"),
    "TicTacToe-v0": (2, lambda rng: f"[{rng.randrange(9)}]"),
    "KuhnPoker-v0": (2, lambda rng: rng.choice(["[check]", "[bet]", "[call]", "[fold]"])),
}


def played_by_textarena(name: str, seed: int) -> list[Any]:
    num_players, act = GAMES[name]
    rng = random.Random(f"act {seed}")
    env = textarena.make(name)
    env.reset(num_players=num_players, seed=seed)
    turns, is_over = [env.get_observation()], False
    while not is_over and len(turns) <= MAX_STEPS:
        is_over, _ = env.step(action=act(rng))
        if not is_over:
            turns.append(env.get_observation())
    return [*turns, env.close()[0]] if is_over else turns


async def play(pool: stepmill.AsyncPool, name: str, seed: int, *, is_killer: bool) -> list[Any]:
    num_players, act = GAMES[name]
    rng = random.Random(f"act {seed}")
    async with pool.lease() as env:
        obs, info = await env.reset(seed=seed, options={"num_players": num_players})
        turns, is_over = [(info["player_id"], obs)], False
        while not is_over and len(turns) <= MAX_STEPS:
            if is_killer and len(turns) == 2:
                kill_a_worker(pool)
            obs, reward, is_over, is_cut, info = await env.step(act(rng))
            assert not is_cut, info
            if not is_over:
                turns.append((info["player_id"], obs))
        if not is_over:
            return turns
        rewards = {int(player): value for player, value in info["rewards"].items()}
        assert reward == (rewards[0] if num_players == 1 else 0.0)
        return [*turns, rewards]


def kill_a_worker(pool: stepmill.AsyncPool) -> None:
    os.kill(pool.pool.stats().workers[0].pid, signal.SIGKILL)


@pytest.mark.parametrize("name", GAMES)
def test_games_are_those_of_textarena_with_the_same_seeds_also_if_a_worker_is_killed(name: str) -> None:
    async def main() -> list[Any]:
        options: Any = {"on_fault": "replay", "seeding": "per_episode", "num_workers": 1}
        async with stepmill.AsyncPool(partial(textarena.make, name), num_envs=4, **options) as pool:
            games = [play(pool, name, seed, is_killer=seed == 5) for seed in range(8)]
            return await asyncio.wait_for(asyncio.gather(*games), HANG_GUARD_S)

    assert asyncio.run(main()) == [played_by_textarena(name, seed) for seed in range(8)]


def test_questions_of_reasoning_gym_are_asked_and_judged_by_the_dataset() -> None:
    dataset = reasoning_gym.create_dataset("leg_counting", size=50, seed=3)

    def answer(index: int) -> str:
        return dataset[index]["answer"] if index % 2 else "0"

    async def ask(pool: stepmill.AsyncPool, options: Any) -> tuple[Any, ...]:
        async with pool.lease() as env:
            question, info = await env.reset(seed=7, options=options)
            index = info["index"]
            _, score, is_over, _, info = await env.step(answer(index))
            return index, question, score, is_over, info["answer"]

    async def main() -> list[tuple[Any, ...]]:
        make = partial(reasoning_gym.create_dataset, "leg_counting", size=50, seed=3)
        async with stepmill.AsyncPool(make, num_envs=2, num_workers=1) as pool:
            chosen = [ask(pool, {"index": index}) for index in range(10)]
            return await asyncio.gather(*chosen, ask(pool, None), ask(pool, None))

    *chosen, drawn, again = asyncio.run(main())
    assert drawn == again
    for index, question, score, is_over, right in [*chosen, drawn]:
        entry = dataset[index]
        assert (question, right, is_over) == (entry["question"], entry["answer"], True)
        assert score == dataset.score_answer(answer(index), entry)
    assert [index for index, *_ in chosen] == list(range(10))
