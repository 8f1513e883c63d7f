"""Envs whose methods are coroutines, and the same envs without."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from stepmill.testing import gates
from tests.harness.hangs import DEADLINE_S

LENGTH = 4
Orders = Callable[[Any, Any], Coroutine[Any, Any, None]]


class PlainTurns:
    """Counts turns; an observation says from which episode, turn and action it comes, and has a random number."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Discrete(10)

    def __init__(self) -> None:
        self.episode, self.turn, self.random = -1, 0, random.Random(0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.random = random.Random(seed)
        self.episode, self.turn = self.episode + 1, 0
        return self._observe(-1), {"draw": self.random.random(), **(options or {})}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return self._observe(action), float(action), self.turn == LENGTH, False, {"turn": self.turn}

    def _observe(self, action: Any) -> Any:
        return np.array([self.episode, self.turn, action, self.random.random()])


class NoSpaces:
    def reset(self) -> tuple[str, Any]:
        return "hello", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Any]:
        return action, 0.0, False, False, {}

    def close(self) -> None: ...


class Turns:
    """The same with coroutines. `orders(env, action)` is awaited in each step; `closed` gets the number of its tasks."""

    observation_space, action_space = PlainTurns.observation_space, PlainTurns.action_space

    def __init__(self, orders: Orders | None = None, closed: Path | None = None) -> None:
        self.turns, self.orders, self.closed = PlainTurns(), orders, closed
        self.tasks: set[Any] = set()

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        await self.num_tasks()
        return self.turns.reset(seed=seed, options=options)

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        await self.num_tasks()
        if self.orders is not None:
            await self.orders(self, action)
        return self.turns.step(action)

    async def close(self) -> None:
        num_tasks = await self.num_tasks()
        if self.closed is not None:
            self.closed.write_text(str(num_tasks))

    async def num_tasks(self) -> int:
        await asyncio.sleep(0)
        self.tasks.add(asyncio.current_task())
        return len(self.tasks)

    async def wait_here(self) -> None:
        await asyncio.Event().wait()

    async def num_cancellations(self) -> int:
        task: Any = asyncio.current_task()
        return int(task.cancelling())

    def pid(self) -> int:
        return os.getpid()


def is_first(flag: Path) -> bool:
    """Whether the file did not exist. It is made."""
    if flag.exists():
        return False
    flag.touch()
    return True


class LateOnce(Turns):
    """Does not return from its first `reset` until it is cancelled."""

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self.flag = flag

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        if is_first(self.flag):
            await asyncio.Event().wait()
        return await super().reset(seed=seed, options=options)


class FailsOnce(Turns):
    """Raises in its first `reset`, after which a callback cancels the task of the env."""

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self.flag = flag

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        if is_first(self.flag):
            await cancel_later(self, None)
            raise ValueError("no luck")
        return await super().reset(seed=seed, options=options)


class Fails(Turns):
    """Waits at a gate in each `reset`, where it blocks its event loop, and raises."""

    def __init__(self, gate: Path, closed: Path) -> None:
        super().__init__(closed=closed)
        self.gate = gate

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        gates.wait_at(self.gate)
        raise ValueError("no luck")


# ---- orders ------------------------------------------------------------------------------------------------------------


async def wait_forever(_env: Turns, _action: Any) -> None:
    await asyncio.Event().wait()


async def wait_longer_than_calls(_env: Turns, _action: Any) -> None:
    await asyncio.sleep(2 * DEADLINE_S)


async def refuse_to_end(_env: Turns, _action: Any) -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


async def block(_env: Turns, _action: Any) -> None:
    signal.pause()


async def exit_in_step(_env: Turns, _action: Any) -> None:
    raise SystemExit(3)


async def cancel_itself(_env: Turns, _action: Any) -> None:
    raise asyncio.CancelledError


async def cancel_later(_env: Turns, _action: Any) -> None:
    task = asyncio.current_task()
    asyncio.get_running_loop().call_soon(task.cancel)  # the step ends before


async def die_once(flag: Path, env: Turns, _action: Any) -> None:
    if env.turns.turn == 2 and is_first(flag):
        os.kill(os.getpid(), signal.SIGKILL)


async def wait_at(gate: Path, _env: Turns, _action: Any) -> None:
    await asyncio.get_running_loop().run_in_executor(None, gates.wait_at, gate)


_MEETING: list[asyncio.Event] = []


async def wait_for_others(num_envs: int, _env: Turns, _action: Any) -> None:
    """Wait until `num_envs` envs of this process are here."""
    _MEETING.append(asyncio.Event())
    if len(_MEETING) == num_envs:
        for event in _MEETING:
            event.set()
    await _MEETING[-1].wait()


def with_orders(orders: Orders, num_envs: int = 3) -> list[Callable[[], Turns]]:
    """Return env_fns; only env 0 takes the orders."""
    return [partial(Turns, orders if env_id == 0 else None) for env_id in range(num_envs)]


class Remote:
    """The client of a server that is slow at first. A reply belongs to the oldest request of the connection that has none."""

    def __init__(self) -> None:
        self.connection: asyncio.Queue[str] = asyncio.Queue()
        self.name = "unnamed"

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Any]:
        return await self._ask(f"reset {seed} of {self.name}"), {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, Any]:
        return await self._ask(action), 0.0, False, False, {}

    async def _ask(self, request: str) -> str:
        self.connection.put_nowait(f"reply to {request}")
        if request == "slow":
            await asyncio.Event().wait()
        return await self.connection.get()
