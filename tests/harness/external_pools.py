"""A pool of envs that is not stepmill's, for tests: counts in NumPy, returns results in an order of its own, and logs the calls to it.

An observation is (env id, steps in this episode, number of the episode). An episode has `length` steps, the reward is the
action. As EnvPool's, an env that is stepped after its episode's end is reset by that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.spec.env import EnvSpec
from stepmill.spec.tree import Leaf, LeafKind

SPEC = EnvSpec(
    observation=Leaf(np.dtype(np.float32), (3,)),
    action=Leaf(np.dtype(np.int64), (), LeafKind.DISCRETE),
    render_mode="rgb",
)


@dataclass
class Script:
    """What the pool does beside counting.

    Attributes:
        is_async: `recv` returns one env at a time, the one told last first.
        send_error, recv_error: raised once by that call.
        obs_shape: of a row in results.
        info_bytes: size of an array in each info; None for no infos.
        log: the calls to the pool, in order: ("send" | "reset", env ids).
    """

    length: int = 3
    is_async: bool = False
    send_error: BaseException | None = None
    recv_error: BaseException | None = None
    obs_shape: tuple[int, ...] = (3,)
    info_bytes: int | None = None
    log: list[tuple[str, list[int]]] = field(default_factory=list)
    is_closed: bool = False

    def make_pool(self, num_envs: int) -> tuple[CountingPool, EnvSpec]:
        self.is_closed = False
        return CountingPool(num_envs, self), SPEC

    def __call__(self) -> object:
        raise AssertionError("a maker of a pool is not called")


class CountingPool:
    """The pool; see the module."""

    def __init__(self, num_envs: int, script: Script) -> None:
        self._script = script
        self._time = np.zeros(num_envs, np.int64)
        self._episode = np.full(num_envs, -1, np.int64)
        self._at_work: list[tuple[int, float]] = []  # env id, reward

    def send(self, servers: NDArray[np.int32], actions: NDArray[np.int64]) -> None:
        error, self._script.send_error = self._script.send_error, None
        if error is not None:
            raise error
        self._script.log.append(("send", servers.tolist()))
        for env_id, action in zip(servers.tolist(), actions.tolist(), strict=True):
            if self._episode[env_id] < 0 or self._time[env_id] >= self._script.length:
                self._begin(env_id)
                self._at_work.append((env_id, 0.0))
            else:
                self._time[env_id] += 1
                self._at_work.append((env_id, float(action)))

    def reset(self, orders: Sequence[tuple[int, Any, Any]]) -> None:
        self._script.log.append(("reset", [server for server, _, _ in orders]))
        for server, seed, options in orders:
            if options is not None and "fail" in options:
                raise RuntimeError("no such options")
            self._begin(server)
            if seed is not None:
                self._episode[server] = seed
            self._at_work.append((server, 0.0))

    def recv(self) -> tuple[Any, ...]:
        error, self._script.recv_error = self._script.recv_error, None
        if error is not None:
            self._at_work.clear()
            raise error
        assert self._at_work, "recv() with nothing at work would wait without limit"
        num = 1 if self._script.is_async else len(self._at_work)
        done = [self._at_work.pop() for _ in range(num)]
        ids = np.array([env_id for env_id, _ in done])
        obs = np.stack([ids, self._time[ids], self._episode[ids]], 1).astype(np.float32)
        obs = np.resize(obs, (num, *self._script.obs_shape))
        over = self._time[ids] >= self._script.length
        return ids, obs, np.array([reward for _, reward in done]), over, np.zeros(num, np.bool_), self._infos(ids)

    def drop(self) -> None:
        self._at_work.clear()

    def env_handle(self, server: int) -> object:
        return Seat(self, server)

    def close(self) -> None:
        assert not self._at_work, "the pool is ended while envs are at work"
        self._script.is_closed = True

    def time_of(self, env_id: int) -> int:
        return int(self._time[env_id])

    def _begin(self, env_id: int) -> None:
        self._time[env_id] = 0
        self._episode[env_id] += 1

    def _infos(self, ids: NDArray[Any]) -> dict[str, Any] | None:
        if self._script.info_bytes is None:
            return None
        blob = np.zeros((len(ids), self._script.info_bytes), np.uint8) + ids[:, None].astype(np.uint8)
        return {"time": self._time[ids], "deep": {"blob": blob}, "version": "1"}


class Seat:
    """One env of it."""

    def __init__(self, pool: CountingPool, server: int) -> None:
        self._pool = pool
        self.env_id = server

    def time(self) -> int:
        return self._pool.time_of(self.env_id)

    def render(self) -> str:
        return f"picture of {self.env_id} at {self.time()}"
