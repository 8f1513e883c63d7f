"""Random tasks that lease envs. An observation names its env, episode, step and action, so that each reply is checked by its content."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import stepmill
from tests.chaos.envs import KILL, LENGTH, RAISE, ChaosEnv
from tests.harness.hangs import HANG_GUARD_S

MOVES = {"reset": 3, "step": 14, "call": 4, "cancel": 1, "raise": 0.5, "kill": 0.3, "misuse": 1, "leave": 1}


def read_clock(env: Any) -> int:
    return int(env.unwrapped._clock)


class Task:
    """One lease after the other, and what its env must say.

    Attributes:
        clock: the number of steps since the reset; None if the env needs a reset, or if a cancelled command may have been sent.
        is_refused: whether a step is certainly refused.
    """

    def __init__(self, pool: stepmill.AsyncPool, rng: random.Random, moves: list[str], *, can_die: bool) -> None:
        self._pool, self._rng, self._moves, self._can_die = pool, rng, moves, can_die

    async def run(self) -> None:
        while self._moves:
            async with self._pool.lease() as env:
                self._env, self._clock, self._tag, self._action, self._is_refused = env, None, 0, -1, True
                while self._moves and (name := self._moves.pop()) != "leave":
                    await asyncio.sleep(0)
                    await self._make(name)

    async def _make(self, name: str) -> None:
        try:
            await getattr(self, f"_{name}")()
        except stepmill.WorkerDied:
            assert self._can_die, "a worker died, and nobody has killed one"
            self._clock, self._is_refused = None, True

    async def _reset(self) -> None:
        seed = self._rng.randrange(2**20)
        self._clock, self._is_refused = None, True
        obs, info = await self._env.reset(seed=seed)
        self._is_refused = False
        self._clock, self._tag, self._action = 0, int(ChaosEnv(0).reset(seed=seed)[0][1]), -1
        self._check(obs, info)

    async def _step(self) -> None:
        if self._is_refused or self._clock == LENGTH:
            with suppress(stepmill.EnvError):  # the fault of the step before
                await self._refused()
        if self._clock is None or self._clock == LENGTH:
            return
        action = self._rng.randrange(9)
        clock, self._clock, self._is_refused = self._clock, None, True
        obs, reward, terminated, truncated, info = await self._env.step(action)
        self._clock, self._action = clock + 1, action
        self._is_refused = False
        assert (reward, terminated, truncated) == (self._clock, False, self._clock == LENGTH)
        self._check(obs, info)

    async def _refused(self) -> None:
        try:
            await self._env.step(1)
        except stepmill.UsageError:
            return
        raise AssertionError("a step without a reset was taken")

    async def _call(self) -> None:
        if self._clock is not None:  # otherwise an env on demand may not be built
            assert await self._env.call(read_clock) == self._clock

    async def _cancel(self) -> None:
        if self._clock is None or self._clock == LENGTH:
            return
        self._clock = None
        task = asyncio.ensure_future(self._rng.choice([partial(self._env.step, 1), self._env.reset])())
        for _ in range(self._rng.randrange(3)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _raise(self) -> None:
        await self._fail(RAISE)

    async def _kill(self) -> None:
        if self._can_die:
            await self._fail(KILL)

    async def _fail(self, action: int) -> None:
        if self._clock is None or self._clock == LENGTH:
            return
        self._clock, self._is_refused = None, True
        try:
            await self._env.step(action)
        except (stepmill.EnvError, stepmill.WorkerDied):
            return
        raise AssertionError(f"action {action} did not fail")

    async def _misuse(self) -> None:
        step = asyncio.ensure_future(self._env.call(read_clock))
        await asyncio.sleep(0)
        if not step.done():
            try:
                await self._env.step(1)
            except (stepmill.BusyEnvError, stepmill.UsageError):
                pass
            else:
                raise AssertionError("two tasks used one lease at once")
        await asyncio.gather(step, return_exceptions=True)

    def _check(self, obs: Any, info: dict[str, Any]) -> None:
        wanted = [self._env.env_id, self._tag, self._clock, self._action]
        assert obs.tolist() == wanted, (obs.tolist(), wanted)
        assert info == {}


def play(number: int, folder: Path) -> None:
    """Play the tasks of a number."""
    rng = random.Random(number)
    is_process = rng.random() < 0.2
    num_envs = rng.randint(1, 5)
    options: dict[str, Any] = {"backend": "process", "context": "fork"} if is_process else {"backend": "thread"}
    options |= {"num_workers": rng.randint(1, min(2, num_envs))}
    options["restarts"] = {"restart_window_s": 0.02, "max_restarts": 10**6, "max_env_errors": 10**6}
    if rng.random() < 0.3:
        options["idle_s"] = rng.choice([0.001, 1e4])
    can_die = is_process and rng.random() < 0.7
    plans = [
        rng.choices(list(MOVES), list(MOVES.values()), k=rng.randint(2, 40))
        for _ in range(rng.randint(1, 2 * num_envs))
    ]

    async def main() -> None:
        async with stepmill.AsyncPool([partial(ChaosEnv, i) for i in range(num_envs)], **options) as pool:
            tasks = [
                Task(pool, random.Random(f"{number} {place}"), ["leave", *moves], can_die=can_die).run()
                for place, moves in enumerate(plans)
            ]
            await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(main(), HANG_GUARD_S))
