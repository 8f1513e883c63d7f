"""`Engine`: resets and steps of a pool in NumPy arrays, for all of TorchRL's front-ends.

The pool does not reset envs automatically (DISABLED): TorchRL requests resets with a mask, and an env whose episode has ended
is reset once. A step of such an env is refused, so that the data contain no empty transitions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.frontends.gymnasium.spaces import read_spaces
from stepmill.frontends.pool_options import options_of
from stepmill.frontends.torchrl.errors import translated
from stepmill.frontends.torchrl.makers import EnvMakers, Kwargs
from stepmill.frontends.torchrl.states import States
from stepmill.pool.pool import Pool
from stepmill.pool.port import Options, PoolPort, Seed, choose_backend, spread_seed
from stepmill.spec.batch import Batch
from stepmill.spec.closing import close_on_error
from stepmill.spec.errors import SpecMismatch, StepmillError, UsageError, raising_as
from stepmill.spec.options import AutoresetMode, BackendName, EnvState, PoolOptions
from stepmill.spec.tree import map_nest

Mask = NDArray[np.bool_]
Rows = tuple[Any, NDArray[np.float64], Mask, Mask]  # observations, rewards, terminated, truncated: [N, ...] each


def torchrl_options(options: PoolOptions | None, keywords: Mapping[str, Any], **defaults: object) -> PoolOptions:
    """Return options of a pool without automatic resets, which TorchRL requests; the arguments are those of `merge_options`."""
    fixed = {"autoreset_mode": AutoresetMode.DISABLED, "episode_stats": False}
    return options_of("TorchRL", options, keywords, fixed, **defaults)


def with_deadlines(options: PoolOptions, env_fns: Sequence[Callable[[], object]]) -> PoolOptions:
    """Return options with the deadlines of BATCHED_PIPE_TIMEOUT, if they have none and the backend supports deadlines.

    Raises:
        UsageError: the variable is not a positive number of seconds.
    """
    text = os.environ.get("BATCHED_PIPE_TIMEOUT", "")
    if not text or options.step_timeout_s is not None or options.reset_timeout_s is not None:
        return options
    choice = choose_backend(env_fns, options)
    if choice not in (BackendName.THREAD, BackendName.PROCESS):
        return options
    try:
        limit_s = float(text)
        return replace(options, step_timeout_s=limit_s, reset_timeout_s=limit_s)
    except ValueError as exc:
        raise UsageError(f"the environment variable BATCHED_PIPE_TIMEOUT is {text!r}; give seconds, above 0") from exc


class Engine:
    """A pool that can be closed and opened again, with the flags and infos of its envs.

    Attributes:
        num_envs: N.
        spaces: (observation space, action space) of each env.
        frame_skip: the number of times that `step` applies an action.
        infos: for each key, the newest value of each env, [N, ...]. The owner sets the keys. The arrays are never
            modified.
        seeds: the seeds of the next resets, by env.
        states: the object that reads and loads the state of the envs.
        makers: the env functions from which `open_pool` makes envs; None if the pool was given.
        begins_resets: whether `step` begins to reset the envs whose episodes end. `wait_resets` waits for them.
    """

    def __init__(self, open_pool: Callable[[], Pool], *, frame_skip: int = 1, makers: EnvMakers | None = None) -> None:
        self._open_pool = open_pool
        self.makers = makers
        self._is_outdated = False  # update_kwargs() has changed the arguments since the pool was made
        self.states = States()
        self.frame_skip = _checked_skip(frame_skip)
        self._port: PoolPort | None = None
        self.seeds: dict[int, int] = {}
        self.infos: dict[str, NDArray[Any]] = {}
        self.begins_resets = False
        self._resetting: Mask | None = None
        pool = self.open()
        self.num_envs = pool.num_envs
        self.spaces = read_spaces(self.port.env_specs)

    # ---- open and closed ---------------------------------------------------------------------------------------------

    @property
    def pool(self) -> Pool:
        """The pool.

        Raises:
            UsageError: the env is closed.
        """
        return self.port.pool

    @property
    def port(self) -> PoolPort:
        """The port of the pool, with the same errors as `pool`."""
        if self._port is None:
            raise UsageError("the env is closed; reset() opens it again")
        return self._port

    def open(self) -> Pool:
        """Return the pool, and make it if there is none."""
        if self._port is None:
            try:
                pool = self._open_pool()
            except SpecMismatch as exc:
                raise translated(exc) from None
            self._check_spaces(pool)
            if pool.options.autoreset_mode is not AutoresetMode.DISABLED:
                pool.close()
                raise UsageError("TorchRL requests the resets; make the pool with autoreset_mode='Disabled'")
            if pool.spec.is_batched:
                pool.close()
                raise UsageError("the envs are batched, but TorchRL's masks select single envs; give single envs")
            self._port, self._is_outdated = PoolPort(pool), False
            self._fresh = np.ones(pool.num_envs, np.bool_)  # envs that have not been reset yet
            self.terminated = np.zeros(pool.num_envs, np.bool_)
            self.truncated = np.zeros(pool.num_envs, np.bool_)
            with close_on_error(self.close):
                self.states.load_again(pool)
        return self._port.pool

    def start(self) -> None:
        """Make the pool, with the newest keyword arguments, if it does not exist."""
        self._open_for(self.num_envs)

    def _open_for(self, num_resets: int) -> Pool:
        """Return the pool for a reset of `num_resets` envs: a new one if these are all and the arguments changed."""
        if self._is_outdated and num_resets == self.num_envs:
            self.close()
        return self.open()

    def _check_spaces(self, pool: Pool) -> None:
        if not self._is_outdated:
            return
        differing = [
            (env_id, now, before)
            for env_id, (now, before) in enumerate(zip(read_spaces(PoolPort(pool).env_specs), self.spaces, strict=True))
            if now != before
        ]
        if differing:
            pool.close()
            env_id, now, before = differing[0]
            raise UsageError(
                f"the new keyword arguments change the spaces of env {env_id} from {before} to {now}; make a new env, "
                "or call update_kwargs() with arguments that do not change the spaces"
            )

    def update_kwargs(self, kwargs: Kwargs | Sequence[Kwargs]) -> None:
        """Change the keyword arguments of the env functions; the next reset of all envs makes a new pool."""
        if self.makers is None:
            raise UsageError(
                "this env was made of an existing pool, whose env functions are not known; make a new pool with "
                "the new arguments, and a new env of it"
            )
        self.makers.update(kwargs)
        self._is_outdated = self._is_outdated or bool(kwargs)

    def close(self) -> None:
        """Close the pool. Idempotent."""
        port, self._port = self._port, None
        if port is not None:
            port.pool.close()

    # ---- seeds -------------------------------------------------------------------------------------------------------

    def set_seed(self, seed: Seed) -> None:
        """Set the seed of each env's next reset: s gives env i the seed s + i; a list or dict has one per env."""
        seeds = spread_seed(seed, list(range(self.num_envs)), self.num_envs, 1)
        self.seeds = {env_id: own for env_id, own in enumerate(seeds) if isinstance(own, int)}

    def _take_seeds(self, ids: Sequence[int], seed: Seed) -> dict[int, int | None] | None:
        if seed is not None:
            for env_id in ids:
                self.seeds.pop(env_id, None)
            given = spread_seed(seed, list(ids), self.num_envs, 1)
            return {env_id: own for env_id, own in zip(ids, given, strict=True) if not isinstance(own, list)}
        seeds: dict[int, int | None] = {env_id: self.seeds.pop(env_id) for env_id in list(ids) if env_id in self.seeds}
        return seeds or None

    @property
    def is_envpool(self) -> bool:
        """Whether the envs are EnvPool's, which can only be seeded all together."""
        return self._port is not None and self.pool.options.backend is BackendName.ENVPOOL

    # ---- resets ------------------------------------------------------------------------------------------------------

    def reset(self, mask: Mask | None, seed: Seed = None, options: Options = None) -> Any:
        """Reset the envs of a mask [N], or all; return the newest observations of all envs in new arrays."""
        if mask is None or (self.seeds and self.is_envpool):
            mask = np.ones(self.num_envs, np.bool_)
        self._open_for(int(mask.sum()))
        seeds = self._take_seeds(np.flatnonzero(mask).tolist(), seed)
        with raising_as(translated):
            obs, info = self.port.reset_rows(mask, seeds, options)
        self.mark_reset(mask)
        self.store_infos(info)
        return obs

    def reset_each(self, mask: Mask | None, kwargs: Sequence[Mapping[str, Any]]) -> Any:
        """Reset envs with different arguments: `kwargs[i]` has "seed" and "options" of env i."""
        if len(kwargs) != self.num_envs:
            raise UsageError(f"list_of_kwargs has {len(kwargs)} entries for {self.num_envs} envs; give one for each")
        mask = np.ones(self.num_envs, np.bool_) if mask is None else mask
        unknown = sorted({name for own in kwargs for name in own} - {"seed", "options"})
        if unknown:
            raise UsageError(f"list_of_kwargs has {unknown}; an env's reset takes seed and options")
        ids = np.flatnonzero(mask).tolist()
        given = {env_id: kwargs[env_id]["seed"] for env_id in ids if kwargs[env_id].get("seed") is not None}
        seeds = {**(self._take_seeds(ids, None) or {}), **given}
        return self.reset(mask, seeds or None, [own.get("options") for own in kwargs])

    def reset_async(self, ids: NDArray[np.int64]) -> None:
        """Begin resets; the caller receives the results from the pool."""
        pool = self._open_for(len(ids))
        pool.reset_async(seed=self._take_seeds(ids.tolist(), None), env_ids=ids)

    def mark_restored(self, batch: Batch) -> None:
        """Go on with restored envs, whose newest results these are."""
        self._fresh = np.array([state is EnvState.NEEDS_RESET for state in self.pool.states])
        self.terminated, self.truncated = batch.terminated, batch.truncated
        self.store_infos(batch.info)

    def mark_reset(self, mask: Any) -> None:
        """Clear the flags of envs, given by a mask or by ids, that have been reset."""
        self._fresh[mask] = False
        self._copy_flags()
        self.terminated[mask] = False
        self.truncated[mask] = False

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self, actions: Any, mask: Mask | None = None) -> Rows:
        """Step all envs, or those of a mask; return rows of all N envs.

        Envs that are not stepped have their last row with reward 0.

        With a frame skip, the action is applied up to `frame_skip` times, until the episode ends. The row has the last
        observation and the sum of the rewards.
        """
        if self._fresh.any():
            self.reset(self._fresh.copy())  # the first step of an env resets it first
        try:
            if mask is None and self.frame_skip == 1:
                obs, reward, terminated, truncated, info = self.port.step_fast(actions)
                self.terminated, self.truncated = terminated, truncated
                self.store_infos(info)
                self._begin_resets()
                return obs, reward, terminated, truncated
            return self._step_some(actions, mask)
        except StepmillError as exc:
            raise translated(exc) from exc

    def _step_some(self, actions: Any, mask: Mask | None) -> Rows:
        ids = np.flatnonzero(np.ones(self.num_envs, np.bool_) if mask is None else mask)
        reward = self._repeat(select_rows(actions, ids), ids)
        obs = self.port.observe()
        self._begin_resets()
        return obs, reward, self.terminated, self.truncated

    def _repeat(self, actions: Any, ids: NDArray[np.intp]) -> NDArray[np.float64]:
        """Apply actions, [B] in the order of ids, `frame_skip` times. Return the sums of the rewards of all N envs."""
        reward = np.zeros(self.num_envs)
        self._copy_flags()
        for _ in range(self.frame_skip):
            if not ids.size:
                break
            self.pool.send(actions, ids)
            batch = self.pool.recv(env_ids=ids)
            env_ids = batch.env_id
            self.store_infos(batch.info, env_ids)
            reward[env_ids] += batch.reward
            self.terminated[env_ids], self.truncated[env_ids] = batch.terminated, batch.truncated
            going = ~(self.terminated | self.truncated)[ids]
            actions, ids = select_rows(actions, going), ids[going]
        return reward

    def _begin_resets(self) -> None:
        if not self.begins_resets:
            return
        ended = self.terminated | self.truncated
        if not ended.any():
            return
        self._resetting = ended
        if not self._needs_full_reset(ended):
            self.pool.reset_async(mask=ended)

    def _needs_full_reset(self, ended: Mask) -> bool:
        """Whether a reset of these envs must go through `reset`: seeds are set, or a new pool must be made."""
        return bool(self.seeds) or (self._is_outdated and bool(ended.all()))

    def wait_resets(self) -> Any:
        """Wait for the resets that the last `step` began; return the newest observations of all envs, or None without resets."""
        mask, self._resetting = self._resetting, None
        if mask is None:
            return None
        if self._needs_full_reset(mask):
            return self.reset(mask)
        with raising_as(translated):
            obs, info = self.port.reset_wait()
        self.mark_reset(mask)
        self.store_infos(info)
        return obs

    def store_infos(self, info: Mapping[str, Any], ids: NDArray[np.int64] | None = None) -> None:
        """Store the infos with the keys of `infos`; rows are of all envs, or of `ids`."""
        for key, column in self.infos.items():
            if key not in info:
                continue
            mask = info.get(f"_{key}")  # infos of a fixed shape have none
            has = np.arange(len(info[key])) if mask is None else np.flatnonzero(mask)
            fresh = column.copy()  # the old array belongs to a tensordict that was returned
            fresh[has if ids is None else ids[has]] = info[key][has]
            self.infos[key] = fresh

    def _copy_flags(self) -> None:
        # The arrays of the last step belong to a tensordict that was returned.
        self.terminated, self.truncated = self.terminated.copy(), self.truncated.copy()

    def step_ids(self, actions: Any, ids: NDArray[np.int64], mask: Mask | None = None) -> Rows:
        """Step some envs, or those of them that `mask` has. Actions, the mask and rows are [B], in the order of ids.

        The frame skip, and the rows of envs that are not stepped, are those of `step`.
        """
        if self._fresh[ids].any():
            self.reset(self._fresh.copy())
        chosen = slice(None) if mask is None else mask
        with raising_as(translated):
            reward = self._repeat(select_rows(actions, chosen), ids[chosen])
        return self.port.observe(ids), reward[ids], self.terminated[ids], self.truncated[ids]

    def store_flags(self, ids: NDArray[np.int64], terminated: Mask, truncated: Mask) -> None:
        """Store the flags that steps of some envs returned."""
        self._copy_flags()
        self.terminated[ids], self.truncated[ids] = terminated, truncated


def select_rows(actions: Any, ids: NDArray[np.intp] | Mask | slice) -> Any:
    """Return some rows of actions, in their structure."""
    return map_nest(lambda column: column[ids], actions)


def _checked_skip(frame_skip: object) -> int:
    if isinstance(frame_skip, bool) or not isinstance(frame_skip, int) or frame_skip < 1:
        raise UsageError(f"frame_skip must be an integer of 1 or more, got {frame_skip!r}")
    return frame_skip
