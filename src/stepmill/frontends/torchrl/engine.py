"""What all front-ends of TorchRL do with a pool: rows in NumPy, no tensors yet.

The pool never resets an env by itself (DISABLED): TorchRL says when, by a mask, and an env that ended is reset once. A
step of an env whose episode is over is refused, so that no empty transition gets among the data (T-B3).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.frontends.gymnasium.spaces import read_spaces
from stepmill.frontends.torchrl.errors import translated
from stepmill.frontends.torchrl.makers import EnvMakers, Kwargs
from stepmill.frontends.torchrl.states import States
from stepmill.pool.pool import Pool
from stepmill.pool.resets import Seed, spread_seed
from stepmill.pool.start import choose_backend
from stepmill.spec.errors import SpecMismatch, StepmillError, UsageError
from stepmill.spec.options import AutoresetMode, BackendName, PoolOptions, merge_options

Mask = NDArray[np.bool_]
Rows = tuple[Any, NDArray[np.float64], Mask, Mask]  # observations, rewards, terminated, truncated: [N, ...] each


def torchrl_options(options: PoolOptions | None, keywords: Mapping[str, Any], **defaults: object) -> PoolOptions:
    """Return options for a pool that leaves resets to TorchRL; the arguments are those of `merge_options`.

    Raises:
        UsageError: they ask for automatic resets.
    """
    options = merge_options(options, keywords, **defaults)
    if options.autoreset_mode is AutoresetMode.SAME_STEP:
        raise UsageError("TorchRL resets envs itself; leave autoreset_mode out of the options")
    return replace(options, autoreset_mode=AutoresetMode.DISABLED, episode_stats=False)


def with_deadlines(options: PoolOptions, num_envs: int) -> PoolOptions:
    """Return options with the deadlines that BATCHED_PIPE_TIMEOUT sets, if they set none and the backend can keep them.

    Raises:
        UsageError: it is no number of seconds.
    """
    text = os.environ.get("BATCHED_PIPE_TIMEOUT", "")
    if not text or options.step_timeout_s is not None or options.reset_timeout_s is not None:
        return options
    choice = choose_backend(num_envs, options)
    if choice not in (BackendName.THREAD, BackendName.PROCESS):
        return options
    try:
        limit_s = float(text)
        return replace(options, step_timeout_s=limit_s, reset_timeout_s=limit_s)
    except ValueError as exc:
        raise UsageError(f"the environment variable BATCHED_PIPE_TIMEOUT is {text!r}; give seconds, above 0") from exc


class Engine:
    """A pool that can be opened again, and the newest rows of all its envs.

    Attributes:
        num_envs: N.
        spaces: (observation space, action space) of each env.
        frame_skip: how often `step` repeats an action.
        infos: by key, the newest value that each env gave, [N, ...]; the keys are set by the owner. Never written again.
        states: of the envs, to be saved and loaded.
        makers: what `open_pool` makes envs of; None if the pool was given.
        begins_resets: `step` commands resets of the envs that it finds done, for `wait_resets`.
    """

    def __init__(self, open_pool: Callable[[], Pool], *, frame_skip: int = 1, makers: EnvMakers | None = None) -> None:
        self._open_pool = open_pool
        self.makers = makers
        self._is_outdated = False  # the pool's envs were made with other arguments than its successor's will be
        self.states = States()
        self.frame_skip = _checked_skip(frame_skip)
        self._pool: Pool | None = None
        self._seeds: dict[int, int] = {}
        self.infos: dict[str, NDArray[Any]] = {}
        self.begins_resets = False
        self._resetting: Mask | None = None
        pool = self.open()
        self.num_envs = pool.num_envs
        self.spaces = read_spaces(pool.env_specs)

    # ---- open and closed ------------------------------------------------------------------------------------------

    @property
    def pool(self) -> Pool:
        """The pool.

        Raises:
            UsageError: it is closed.
        """
        if self._pool is None:
            raise UsageError("the env is closed; reset() opens it again")
        return self._pool

    def open(self) -> Pool:
        """Return the pool; make one if it is closed."""
        if self._pool is None:
            try:
                pool = self._open_pool()
            except SpecMismatch as exc:
                raise translated(exc) from None
            self._check_spaces(pool)
            if pool.options.autoreset_mode is not AutoresetMode.DISABLED:
                pool.close()
                raise UsageError("TorchRL resets envs itself; make the pool with autoreset_mode='Disabled'")
            if pool.spec.is_batched:
                pool.close()
                raise UsageError("the envs are batched, and TorchRL's masks are of single ones; give single envs")
            self._pool, self._is_outdated = pool, False
            self._fresh = np.ones(pool.num_envs, np.bool_)  # never reset so far
            self.terminated = np.zeros(pool.num_envs, np.bool_)
            self.truncated = np.zeros(pool.num_envs, np.bool_)
            try:
                self.states.load_again(pool)
            except BaseException:
                self.close()
                raise
        return self._pool

    def _open_for(self, num_resets: int) -> Pool:
        """Return the pool for a reset of so many envs. If that is all, and `update_kwargs` has been called, a new one."""
        if self._is_outdated and num_resets == self.num_envs:
            self.close()
        return self.open()

    def _check_spaces(self, pool: Pool) -> None:
        if not self._is_outdated:
            return
        differing = [
            (env_id, now, before)
            for env_id, (now, before) in enumerate(zip(read_spaces(pool.env_specs), self.spaces, strict=True))
            if now != before
        ]
        if differing:
            pool.close()
            env_id, now, before = differing[0]
            raise UsageError(
                f"with the new keyword arguments env {env_id} has the spaces {now}, and {before} before; make a new env, "
                "or call update_kwargs() with arguments that leave them as they were"
            )

    def update_kwargs(self, kwargs: Kwargs | Sequence[Kwargs]) -> None:
        """Change what envs are made with, for the pool that the next reset of all envs makes."""
        if self.makers is None:
            raise UsageError(
                "this env was made of a pool that exists, and how its envs are made is not known here; make a new pool with "
                "the new arguments, and a new env of it"
            )
        self.makers.update(kwargs)
        self._is_outdated = self._is_outdated or bool(kwargs)

    def close(self) -> None:
        """Close the pool. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    # ---- seeds ------------------------------------------------------------------------------------------------------

    def set_seed(self, seed: Seed) -> None:
        """Remember the seed of each env's next reset: s gives env i the seed s + i; a list or dict gives each its own."""
        seeds = spread_seed(seed, list(range(self.num_envs)), self.num_envs, 1)
        self._seeds = {env_id: own for env_id, own in enumerate(seeds) if isinstance(own, int)}

    def _take_seeds(self, ids: Sequence[int], seed: Seed) -> dict[int, int | None] | None:
        if seed is not None:
            for env_id in ids:
                self._seeds.pop(env_id, None)
            given = spread_seed(seed, list(ids), self.num_envs, 1)
            return {env_id: own for env_id, own in zip(ids, given, strict=True) if not isinstance(own, list)}
        seeds: dict[int, int | None] = {
            env_id: self._seeds.pop(env_id) for env_id in list(ids) if env_id in self._seeds
        }
        return seeds or None

    @property
    def is_envpool(self) -> bool:
        """Whether the envs are EnvPool's, which are seeded all at once or not at all."""
        return self._pool is not None and self._pool.options.backend is BackendName.ENVPOOL

    # ---- resets -----------------------------------------------------------------------------------------------------

    def reset(self, mask: Mask | None, seed: Seed = None, options: Mapping[str, Any] | None = None) -> Any:
        """Reset the envs of a mask [N], or all; return the newest observations of all envs, fresh arrays."""
        if mask is None or (self._seeds and self.is_envpool):
            mask = np.ones(self.num_envs, np.bool_)
        self._open_for(int(mask.sum()))
        ids = [int(env_id) for env_id in np.flatnonzero(mask)]
        seeds = self._take_seeds(ids, seed)
        try:
            obs, info = self.pool.reset_rows(mask, seeds, options)
        except StepmillError as exc:
            raise translated(exc) from exc
        self.note_reset(mask)
        self.note_infos(info)
        return obs

    def reset_each(self, mask: Mask | None, kwargs: Sequence[Mapping[str, Any]]) -> Any:
        """Reset envs with arguments of their own: `kwargs[i]` has "seed" and "options" of env i."""
        if len(kwargs) != self.num_envs:
            raise UsageError(f"list_of_kwargs has {len(kwargs)} entries for {self.num_envs} envs; give one for each")
        mask = np.ones(self.num_envs, np.bool_) if mask is None else mask
        unknown = sorted({name for own in kwargs for name in own} - {"seed", "options"})
        if unknown:
            raise UsageError(f"list_of_kwargs has {unknown}; an env's reset takes seed and options")
        ids = [int(env_id) for env_id in np.flatnonzero(mask)]
        pool = self._open_for(len(ids))
        for env_id in ids:
            own = kwargs[env_id]
            seeds = self._take_seeds([env_id], None if own.get("seed") is None else {env_id: own["seed"]})
            pool.reset_async(seed=seeds, options=own.get("options"), env_ids=[env_id])
        try:
            batch = pool.recv(len(ids))
        except StepmillError as exc:
            raise translated(exc) from exc
        self.note_reset(mask)
        self.note_infos(batch.info, batch.env_id)
        return pool.observe()

    def reset_async(self, ids: NDArray[np.int64]) -> None:
        """Command resets, whose results the caller receives from the pool."""
        pool = self._open_for(len(ids))
        pool.reset_async(seed=self._take_seeds(ids.tolist(), None), env_ids=ids)

    def note_reset(self, mask: Any) -> None:
        """The envs of a mask, or with these ids, have begun an episode."""
        self._fresh[mask] = False
        self._own_flags()
        self.terminated[mask] = False
        self.truncated[mask] = False

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(self, actions: Any, mask: Mask | None = None) -> Rows:
        """Step all envs, or those of a mask; rows of all N. What is not stepped keeps its row, with reward 0.

        With a frame skip the action is repeated until the episode ends: last observation, summed reward.
        """
        if self._fresh.any():
            self.reset(self._fresh.copy())  # a step before any reset begins with one
        try:
            if mask is None and self.frame_skip == 1:
                obs, reward, terminated, truncated, info = self.pool.step_fast(actions)
                self.terminated, self.truncated = terminated, truncated
                self.note_infos(info)
                self._begin_resets()
                return obs, reward, terminated, truncated
            return self._step_some(actions, mask)
        except StepmillError as exc:
            raise translated(exc) from exc

    def _step_some(self, actions: Any, mask: Mask | None) -> Rows:
        pool = self.pool
        left = np.ones(self.num_envs, np.bool_) if mask is None else mask.copy()
        reward = np.zeros(self.num_envs)
        self._own_flags()
        for _ in range(self.frame_skip):
            ids = np.flatnonzero(left)
            if not ids.size:
                break
            pool.send(take_rows(actions, ids), ids)
            batch = pool.recv(len(ids))
            _, more, terminated, truncated, info = batch
            env_ids = batch.env_id
            self.note_infos(info, env_ids)
            reward[env_ids] += more
            self.terminated[env_ids], self.truncated[env_ids] = terminated, truncated
            left[env_ids[terminated | truncated]] = False
        obs = pool.observe()
        self._begin_resets()
        return obs, reward, self.terminated, self.truncated

    def _begin_resets(self) -> None:
        if not self.begins_resets:
            return
        ended = self.terminated | self.truncated
        if not ended.any():
            return
        self._resetting = ended
        if not self._takes_long_way(ended):
            self.pool.reset_async(mask=ended)

    def _takes_long_way(self, ended: Mask) -> bool:
        """Whether a seed that was set, or new arguments of all, wait for the reset of these envs."""
        return bool(self._seeds) or (self._is_outdated and bool(ended.all()))

    def wait_resets(self) -> Any:
        """Wait for the envs that the last `step` found done; the newest observations of all envs, or None if none was."""
        mask, self._resetting = self._resetting, None
        if mask is None:
            return None
        if self._takes_long_way(mask):
            return self.reset(mask)
        try:
            obs, info = self.pool.reset_wait()
        except StepmillError as exc:
            raise translated(exc) from exc
        self.note_reset(mask)
        self.note_infos(info)
        return obs

    def note_infos(self, info: Mapping[str, Any], ids: NDArray[np.int64] | None = None) -> None:
        """Remember what infos say under our keys; rows are of all envs, or of `ids`."""
        for key, column in self.infos.items():
            if key not in info:
                continue
            has = np.flatnonzero(info[f"_{key}"])
            fresh = column.copy()  # the last one is in somebody's tensordict
            fresh[has if ids is None else ids[has]] = info[key][has]
            self.infos[key] = fresh

    def _own_flags(self) -> None:
        # Those of the last step lie in somebody's tensordict, which is not ours to change (T-B4).
        self.terminated, self.truncated = self.terminated.copy(), self.truncated.copy()

    def step_ids(self, actions: Any, ids: NDArray[np.int64]) -> Rows:
        """Step some envs; actions and rows [B] in the order of ids."""
        if self._fresh[ids].any():
            self.reset(self._fresh.copy())
        try:
            self.pool.send(actions, ids)
            batch = self.pool.recv(len(ids))
            obs, reward, terminated, truncated, info = batch
            order = batch.env_id
        except StepmillError as exc:
            raise translated(exc) from exc
        self.note_infos(info, order)
        self.note_step(order, terminated, truncated)
        place = np.argsort(order)[
            np.argsort(np.argsort(ids))
        ]  # `send` returns rows in the order of ids, whichever that is
        return take_rows(obs, place), reward[place], terminated[place], truncated[place]

    def note_step(self, ids: NDArray[np.int64], terminated: Mask, truncated: Mask) -> None:
        """Remember how steps of some envs ended."""
        self._own_flags()
        self.terminated[ids], self.truncated[ids] = terminated, truncated


def take_rows(actions: Any, ids: NDArray[np.intp]) -> Any:
    """Return some rows of actions, in their structure."""
    if isinstance(actions, dict):
        return {key: take_rows(value, ids) for key, value in actions.items()}
    if isinstance(actions, tuple):
        return tuple(take_rows(value, ids) for value in actions)
    return actions[ids]


def _checked_skip(frame_skip: object) -> int:
    if isinstance(frame_skip, bool) or not isinstance(frame_skip, int) or frame_skip < 1:
        raise UsageError(f"frame_skip must be an integer of 1 or more, got {frame_skip!r}")
    return frame_skip
