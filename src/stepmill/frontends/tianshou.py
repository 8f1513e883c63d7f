"""`StepmillVectorEnv`: Tianshou's vector env (2.x) on top of `Pool`.

    from stepmill.frontends.tianshou import StepmillVectorEnv
    envs = StepmillVectorEnv([lambda: gym.make("CartPole-v1")] * 64)

There are intended differences from `SubprocVectorEnv`. Many envs share a worker. Spaces are read without a worker.
Rebuilt envs get the attributes that were set. After `timeout`, `step` waits for only one result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from stepmill.frontends.batch_rows import stack_rows, view_row
from stepmill.frontends.gymnasium.spaces import SpacePair, read_spaces
from stepmill.frontends.pool_options import options_of
from stepmill.pool.pool import Pool
from stepmill.pool.port import PoolPort, checked_fns, checked_ids, rows_of
from stepmill.spec.batch import Batch
from stepmill.spec.closing import close_on_error
from stepmill.spec.errors import RecvTimeout, UsageError, needs_extra
from stepmill.spec.options import AutoresetMode, EnvState, OptionKeywords, PoolOptions
from stepmill.spec.stats import PoolStats
from stepmill.spec.tree import DictNode, TupleNode

with needs_extra("tianshou", "tianshou", ImportError):
    from tianshou.env import BaseVectorEnv

if TYPE_CHECKING:
    from typing_extensions import Unpack

EnvIds: TypeAlias = int | Sequence[int] | NDArray[np.integer[Any]] | None
StepResult: TypeAlias = tuple[NDArray[Any], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], NDArray[Any]]
_Columns = TypeVar("_Columns", bound=tuple[NDArray[Any], ...])

_SPACES = ("observation_space", "action_space")


class StepmillVectorEnv(BaseVectorEnv):
    """Runs many Gymnasium envs for Tianshou. They are not reset automatically: Tianshou's Collector calls `reset(env_id)`.

    Args:
        env_fns: functions that make the envs. Each runs in the worker that owns its env.
        wait_num: `step` returns as soon as at least this number of envs have results; None waits for all. A number below the
            number of envs makes the vector env asynchronous.
        timeout: seconds after which `step` returns with fewer results, but at least one. It makes the vector env asynchronous.
        options: how the envs are run. The autoreset mode is DISABLED.
        **keywords: fields of PoolOptions by name, in place of `options` or in addition.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        wait_num: int | None = None,
        timeout: float | None = None,
        *,
        options: PoolOptions | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> None:
        # super().__init__() is not called: it makes a worker for each env.
        self._env_fns = checked_fns(env_fns)
        self.env_num = len(self._env_fns)
        self.wait_num = wait_num or self.env_num
        assert 1 <= self.wait_num <= self.env_num, (
            f"wait_num={wait_num} must be 1 to {self.env_num}, the number of envs"
        )
        assert timeout is None or timeout > 0, f"timeout={timeout} must be a positive number of seconds, or None"
        self.timeout = timeout
        self.is_async = self.wait_num != self.env_num or timeout is not None
        self.is_closed = False
        self.waiting_id: list[int] = []
        self._all_ids = list(range(self.env_num))
        self.ready_id = [*self._all_ids]
        fixed = {"autoreset_mode": AutoresetMode.DISABLED, "episode_stats": False}
        chosen = options_of("StepmillVectorEnv", options, keywords, fixed)
        self._pool = Pool(env_fns, options=chosen)
        with close_on_error(self._pool.close):
            pairs = read_spaces(PoolPort(self._pool).env_specs, allows_vectors=True)
            self._spaces: list[SpacePair] = [deepcopy(pair) for pair in pairs]  # `seed` gives each another seed
            if isinstance(self._spaces[0][0], spaces.Tuple):
                raise TypeError("Tuple observation space is not supported. Please change it to array or dict space")
            if self._pool.spec.is_batched:
                raise UsageError("env_fns make vector envs; give StepmillVectorEnv functions that make single envs")

    # ---- stepping and resetting ------------------------------------------------------------------------------------

    def reset(self, env_id: EnvIds = None, **kwargs: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """Reset some envs, or all.

        Args:
            env_id: the envs to reset; None means all.
            **kwargs: `seed` and `options`, the same for each env.

        Returns:
            observations [B, ...] in the order of the ids, or an object array [B] of dicts; infos [B], dicts.
        """
        ids = self._idle_ids(env_id)
        seed = kwargs.pop("seed", None)
        options = kwargs.pop("options", None)
        if kwargs:
            raise UsageError(f"reset() got unknown arguments {sorted(kwargs)}; give seed and options only")
        batch = self._pool.reset(seed=None if seed is None else dict.fromkeys(ids, seed), options=options, env_ids=ids)
        if self.is_async:
            self._mark_idle(ids)  # an env that had a fault may still be listed as stepping
        return _in_order((self._as_array(batch.obs, len(ids)), _own_infos(batch)), ids)

    def step(self, action: Any, id: EnvIds = None) -> StepResult:  # noqa: A002  Tianshou's name
        """Step some envs, or all, and wait for all of them. An asynchronous vector env returns the envs that have results.

        Args:
            action: [B, ...] in the order of the ids. None only waits for envs that are stepping, in an asynchronous vector env.
            id: the envs to step; None means all.

        Returns:
            observations [B, ...], rewards [B], terminated [B], truncated [B], infos [B], dicts with "env_id".
        """
        if not self.is_async:
            return self._step_all(action, id)
        self._assert_is_not_closed()
        if action is not None:
            ids = self._idle_ids(id)
            self._pool.send(self._batched(action, ids), ids)
            self.waiting_id = self.waiting_id + ids
            sent = set(ids)
            self.ready_id = [each for each in self.ready_id if each not in sent]
        try:
            batch = self._receive()
        except BaseException:
            # An env with a fault is not stepping; reset() repairs it.
            states = self._pool.states
            self._mark_idle([each for each in self.waiting_id if states[each] not in (EnvState.BUSY, EnvState.READY)])
            raise
        self._mark_idle(batch.env_id.tolist())
        return self._as_tianshou(batch)

    def _step_all(self, action: Any, id: EnvIds) -> StepResult:  # noqa: A002
        """Step some envs, or all, and wait for all of them. Hot path."""
        ids = self._idle_ids(id)
        if action is None:
            raise ValueError("action must be not-None for non-async")
        actions = self._batched(action, ids)
        if ids == self._all_ids:
            batch = self._pool.step(actions)
        else:
            self._pool.send(actions, ids)
            batch = self._pool.recv(env_ids=ids)
        return _in_order(self._as_tianshou(batch), ids)

    def _as_tianshou(self, batch: Batch) -> StepResult:
        infos = _own_infos(batch)
        for info, env_id in zip(infos, batch.env_id.tolist(), strict=True):
            info["env_id"] = env_id
        return self._as_array(batch.obs, len(infos)), batch.reward, batch.terminated, batch.truncated, infos

    def _as_returned(self, batch: Batch) -> StepResult:
        """Return what `stepmill.restore` returns: the newest results of all envs."""
        if self.is_async:
            states = self._pool.states
            self.waiting_id = [env_id for env_id in self._all_ids if states[env_id] in (EnvState.BUSY, EnvState.READY)]
            self.ready_id = [env_id for env_id in self._all_ids if env_id not in self.waiting_id]
        return self._as_tianshou(batch)

    def _batched(self, action: Any, ids: Sequence[int]) -> Any:
        """Return one action per env as a batch."""
        assert len(action) == len(ids), f"got {len(action)} actions for {len(ids)} envs; give one for each env"
        node = self._pool.spec.action
        if isinstance(node, (DictNode, TupleNode)) and not isinstance(action, (dict, tuple)):
            return stack_rows(node, list(action))  # Tianshou has one dict or tuple per env
        return action

    def _mark_idle(self, ids: Sequence[int]) -> None:
        """Move envs from `waiting_id` to `ready_id`, in the order of their results."""
        idle, waiting = set(ids), set(self.waiting_id)
        self.ready_id += [each for each in ids if each in waiting]
        self.waiting_id = [each for each in self.waiting_id if each not in idle]

    def _receive(self) -> Batch:
        least = min(self.wait_num, len(self.waiting_id))
        try:
            return self._pool.recv(min_envs=least, max_envs=self.env_num, timeout_s=self.timeout)
        except RecvTimeout:
            return self._pool.recv(min_envs=1, max_envs=self.env_num)

    # ---- everything slow -------------------------------------------------------------------------------------------

    def get_env_attr(self, key: str, id: EnvIds = None) -> list[Any]:  # noqa: A002
        """Return an attribute of the envs at `id`, through wrappers. Spaces need no call to the workers."""
        if key in _SPACES:
            self._assert_is_not_closed()
            return [self._spaces[each][_SPACES.index(key)] for each in self._ids(id)]
        return list(self._pool.get_attr(key, env_ids=self._idle_ids(id)))

    def set_env_attr(self, key: str, value: Any, id: EnvIds = None) -> None:  # noqa: A002
        """Set an attribute of the envs at `id` to one value, on the wrapper that has it. Rebuilt envs get it, too."""
        ids = self._idle_ids(id)
        self._pool.set_attr(key, [value] * len(ids), env_ids=ids)

    def seed(self, seed: int | Sequence[int | None] | None = None) -> list[list[int | None]]:
        """Reset every env with a seed: an int s gives env i the seed s + i; a list has one seed per env. Return [[seed], ...]."""
        self._assert_is_not_closed()
        seeds: list[int | None] = [None] * self.env_num
        if seed is not None:
            seeds = [seed + each for each in range(self.env_num)] if isinstance(seed, int) else list(seed)
        self._pool.reset(seed=seeds)
        for (_, action_space), each in zip(self._spaces, seeds, strict=True):
            action_space.seed(each)
        return [[each] for each in seeds]

    def render(self, **kwargs: Any) -> list[Any]:
        """Return the result of each env's `render`."""
        self._assert_is_not_closed()
        if self.waiting_id:
            raise RuntimeError(
                f"envs {self.waiting_id} are still stepping; call step(None) until it has returned them, then render()"
            )
        return list(self._pool.call("render", **kwargs)) if kwargs else list(self._pool.render())

    def stats(self) -> PoolStats:
        """Return how each worker has spent its time since the start."""
        return self._pool.stats()

    def close(self) -> None:
        """Close the envs and end the workers within 2 s; the serial backend has no limit."""
        self._assert_is_not_closed()
        self._pool.close()
        self.is_closed = True

    def _ids(self, given: EnvIds) -> list[int]:
        return checked_ids(self._wrap_id(given), self.env_num)

    def _idle_ids(self, given: EnvIds) -> list[int]:
        self._assert_is_not_closed()
        ids = self._ids(given)
        if self.is_async:
            self._assert_id(ids)
        return ids

    def _as_array(self, obs: Any, num_rows: int) -> NDArray[Any]:
        """Return observations as Tianshou's vector envs do: an array, or an object array with one dict or tuple per env."""
        if isinstance(obs, np.ndarray):
            return obs
        rows = np.empty(num_rows, dtype=object)
        for row in range(num_rows):
            rows[row] = view_row(self._pool.spec.observation, obs, row)
        return rows


def _in_order(columns: _Columns, ids: list[int]) -> _Columns:
    """Return columns [B] that are in the order of ascending ids in the order of `ids`, which is that of Tianshou's results."""
    if ids == sorted(ids):
        return columns
    places = np.argsort(np.argsort(ids))
    return cast("_Columns", tuple(column[places] for column in columns))


def _own_infos(batch: Batch) -> NDArray[Any]:
    """Return each env's info as the env returned it, in an object array [B] of dicts."""
    infos = np.empty(batch.num_rows, dtype=object)
    for row in range(batch.num_rows):
        infos[row] = {}
    for row, info in rows_of(batch.info):
        infos[row].update(info)
    return infos
