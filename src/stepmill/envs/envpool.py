"""EnvPool's pools (EnvPool 1.2 and newer): the specs of their envs, and the calls that step them.

    tasks = [EnvPoolTask("Pong-v5", num_threads=8)] * 64
    pool = stepmill.Pool(tasks, backend="envpool")

This module handles the requirements of EnvPool's interface:

- A synchronous pool orders its results by their index in one call: if two calls are pending, their results overwrite each
  other. Here the second call waits until the results of the first have been received, so that any subset of envs can be
  pending, with steps and resets mixed.
- An asynchronous pool returns blocks of `batch_size` results, and waits forever if fewer envs are pending. Here its batch
  size is always 1, and `Pool.recv` decides how many results make a batch. A given pool with another batch size is replaced
  by a new one of the same configuration.
- Seeds are fixed when a pool is made. A reset of all envs with a seed for each replaces the pool by a new one; a reset of
  some envs with seeds is refused.
- For a space without a lower bound EnvPool reports the smallest positive number; here the bound is -inf.
- Actions are cast to the dtypes that EnvPool's C++ code wants, in C order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, cast

import gymnasium
import numpy as np
from numpy.typing import NDArray

from stepmill.envs.gymnasium import pickle_spaces, tree_of
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError, needs_extra

_BOOKKEEPING_INFOS = frozenset({"env_id", "players"})  # they say which env a row belongs to, which the engine knows
_ENV_ID_NAMES = frozenset({"env_id", "players.env_id"})  # parts of an action that contain its env_id
_SEED_RANGE = range(-(2**31), 2**31)


@dataclass(frozen=True)
class EnvPoolTask:
    """The env function of every env of `Pool(..., backend="envpool")`: one EnvPool pool has all the envs.

    Attributes:
        task_id: the id for `envpool.make`.
        kwargs: other arguments of `envpool.make`, without `num_envs`, `env_type` and `batch_size`.
        is_async: whether each env's result is available as soon as it is ready. Otherwise envs that are sent together
            finish together, which is faster.
        has_infos: False drops EnvPool's infos, which cost time for every env in every step.
    """

    task_id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_async: bool = False
    has_infos: bool = True

    def make_pool(self, num_envs: int) -> tuple[EnvPoolDriver, EnvSpec]:
        """Make the pool.

        Raises:
            MissingExtraError: EnvPool is not installed.
            UsageError: there is no such task, or it has several players.
        """
        envpool = import_envpool()
        if self.task_id not in envpool.list_all_envs():
            raise UsageError(f"EnvPool has no task {self.task_id!r}; envpool.list_all_envs() names those it has")
        own = {"num_envs", "env_type", "batch_size", "task_id"} & set(self.kwargs)
        if own:
            raise UsageError(f"EnvPoolTask got {', '.join(sorted(own))}, which the pool chooses; leave it out")
        pool = envpool.make(
            self.task_id,
            env_type="gymnasium",
            num_envs=num_envs,
            batch_size=1 if self.is_async else num_envs,
            **self.kwargs,
        )
        return _make_driver(pool, has_infos=self.has_infos)

    def __call__(self) -> object:
        """Refuse to make an env, because other backends cannot run EnvPool's envs.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"EnvPool runs {self.task_id!r} in its own threads; use backend='envpool'")


@dataclass(frozen=True)
class GivenEnvPool:
    """Like `EnvPoolTask`, for an EnvPool pool that exists. Nothing else may use that pool meanwhile. The Pool does not close it."""

    pool: Any
    has_infos: bool = True

    @property
    def is_async(self) -> bool:
        """Whether the result of each env is available as soon as it is ready."""
        return self.pool.config["batch_size"] not in (0, self.num_envs)

    @property
    def num_envs(self) -> int:
        """The number of envs. A Pool needs as many env functions."""
        return int(self.pool.config["num_envs"])

    def make_pool(self, num_envs: int) -> tuple[EnvPoolDriver, EnvSpec]:
        """Use the given pool, or a new one with batch size 1 if the given pool is asynchronous with another batch size.

        Raises:
            UsageError: the pool has another number of envs.
        """
        if num_envs != self.num_envs:
            raise UsageError(
                f"the EnvPool pool has {self.num_envs} envs, but got {num_envs} env functions; give one for each env"
            )
        has_blocks = self.is_async and self.pool.config["batch_size"] != 1
        return _make_driver(
            _rebuild_pool(self.pool, batch_size=1) if has_blocks else self.pool, has_infos=self.has_infos
        )

    def __call__(self) -> object:
        """Refuse to make an env, because other backends cannot run EnvPool's envs.

        Raises:
            UsageError: always.
        """
        raise UsageError("an EnvPool pool runs its envs in its own threads; use backend='envpool'")


def import_envpool() -> Any:
    """Return EnvPool.

    Raises:
        MissingExtraError: EnvPool is not installed.
    """
    with needs_extra("envpool", "envpool"):
        return import_module("envpool")


def describe_pool(pool: Any) -> EnvSpec:
    """Return the spec of one env of a pool.

    Raises:
        UsageError: the pool has several players per env, or was not made for Gymnasium.
    """
    config = pool.config
    if config.get("max_num_players", 1) != 1:
        raise UsageError(
            f"this EnvPool task has up to {config['max_num_players']} players in an env; use a task with one player"
        )
    observation, action = getattr(pool, "observation_space", None), getattr(pool, "action_space", None)
    if not isinstance(observation, gymnasium.Space) or not isinstance(action, gymnasium.Space):
        raise UsageError("the EnvPool pool has no Gymnasium spaces; make it with env_type='gymnasium'")
    observation, action = _fix_bounds(observation), _fix_bounds(action)
    return EnvSpec(
        observation=tree_of(observation, "observation_space"),
        action=tree_of(action, "action_space"),
        render_mode=getattr(pool, "_render_mode", None),
        metadata={"render_modes": ["rgb_array", "human"]},
        spaces=pickle_spaces(observation, action, None),
    )


def _fix_bounds(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """Return a space with infinite bounds where EnvPool's specs have the smallest positive, or the largest, number."""
    if isinstance(space, gymnasium.spaces.Dict):
        return gymnasium.spaces.Dict({key: _fix_bounds(child) for key, child in space.spaces.items()})
    if not isinstance(space, gymnasium.spaces.Box) or space.dtype.kind != "f":
        return space
    limits = np.finfo(space.dtype)
    low = np.where(space.low == limits.tiny, -np.inf, space.low).astype(space.dtype)
    high = np.where(space.high == limits.max, np.inf, space.high).astype(space.dtype)
    return gymnasium.spaces.Box(low, high, space.shape, space.dtype.type)


def _make_driver(pool: Any, *, has_infos: bool) -> tuple[EnvPoolDriver, EnvSpec]:
    spec = describe_pool(pool)
    return EnvPoolDriver(pool, has_infos=has_infos), spec


def _rebuild_pool(pool: Any, **changes: Any) -> Any:
    """Return a new pool with the configuration of `pool`, except for `changes`."""
    config = pool.spec.config
    unknown = sorted(set(changes) - set(config._fields))
    if unknown:
        raise UsageError(f"this version of EnvPool has no pool setting {', '.join(unknown)}; use EnvPool 1.2 or newer")
    fresh = type(pool)(type(pool.spec)(config._replace(**changes)))
    for name, value in vars(pool).items():
        if name.startswith("_render_") and not name.startswith("_render_window"):
            setattr(fresh, name, value)
    return fresh


class EnvPoolDriver:
    """Runs one EnvPool pool as a `stepmill.backends.external_pool.ExternalPool`, which documents the methods."""

    def __init__(self, pool: Any, *, has_infos: bool) -> None:
        self._pool = pool
        self._has_infos = has_infos
        self._num_envs = int(pool.config["num_envs"])
        self._read_result = None if has_infos else _make_reader(pool)
        self._is_sync = pool.config["batch_size"] in (0, self._num_envs)
        self._queued_calls: deque[Callable[[], None]] = deque()  # synchronous: calls that wait for the pending one
        self._is_call_pending = False  # synchronous: the results of a call have not been received
        self._is_stale = False  # the results of the pending call are to be discarded
        specs = pool.spec.action_array_spec
        self._action_names = tuple(specs)  # in the order that EnvPool's C++ code wants
        names = [name for name in specs if name not in _ENV_ID_NAMES]
        self._actions = {name: (np.dtype(specs[name].dtype), _tail(specs[name].shape)) for name in names}

    def send(self, servers: NDArray[np.int32], actions: Any) -> None:
        """Start steps."""
        flat = _flatten(actions) if isinstance(actions, dict) else dict.fromkeys(self._actions, actions)
        arrays = [
            servers if name in _ENV_ID_NAMES else _fit(flat[name], *self._actions[name]) for name in self._action_names
        ]
        self._begin(lambda: self._pool._send(arrays))

    def reset(self, commands: Sequence[tuple[int, Any, Any]]) -> None:
        """Start resets. See the module for seeds."""
        if any(options for _, _, options in commands):
            raise UsageError("EnvPool's envs take no reset options; give them to EnvPoolTask instead")
        seeds = [seed for _, seed, _ in commands]
        if any(seed is not None for seed in seeds):
            self._reseed(seeds)
        servers = np.array([server for server, _, _ in commands], np.int32)
        self._begin(lambda: self._pool._reset(servers))

    def recv(self) -> tuple[Any, ...]:
        """Wait for the results of all envs of the pending call, or of one env if the pool is asynchronous."""
        if self._read_result is not None:
            return self._read_result(self._recv())
        obs, reward, terminated, truncated, info = unpack_result(self._recv())
        servers = info["env_id"]
        infos = (
            {key: value for key, value in info.items() if key not in _BOOKKEEPING_INFOS} if self._has_infos else None
        )
        return servers, obs, reward, terminated, truncated, infos

    def env_handle(self, server: int) -> object:
        """Return the object that serves calls for one env."""
        return EnvPoolEnv(self, server)

    @property
    def pool(self) -> Any:
        """The current pool, which a reset with seeds replaces."""
        return self._pool

    def close(self) -> None:
        """Drop the reference to the pool. Its threads end when there is no other reference."""
        self._pool = None

    def drop(self) -> None:
        """Discard pending calls. Only synchronous pools need this: others run in a thread without signal handlers."""
        self._queued_calls.clear()
        self._is_stale, self._is_call_pending = self._is_sync, False

    def _begin(self, call: Callable[[], None]) -> None:
        if self._is_sync and (self._is_call_pending or self._queued_calls):
            self._queued_calls.append(call)
        else:
            self._call(call)

    def _call(self, call: Callable[[], None]) -> None:
        if self._is_stale:  # a synchronous pool must be received from before the next call
            self._pool.recv()
        self._is_stale, self._is_call_pending = True, True
        call()
        self._is_stale = False

    def _recv(self) -> Any:
        if self._is_sync and not self._is_call_pending and self._queued_calls:
            self._call(self._queued_calls.popleft())
        self._is_stale = self._is_sync
        result = self._pool.recv() if self._read_result is None else self._pool._recv()
        self._is_stale = self._is_call_pending = False
        return result

    def _reseed(self, seeds: Sequence[int | None]) -> None:
        known = [seed for seed in seeds if seed is not None]
        if len(known) != self._num_envs:
            raise UsageError(
                f"got {len(known)} seeds for {self._num_envs} envs, and EnvPool can only seed all envs at once; "
                "reset all envs with a seed for each, or these envs without seeds"
            )
        outside = [seed for seed in known if seed not in _SEED_RANGE]
        if outside:
            raise UsageError(f"seed {outside[0]} does not fit in the 32 bits of EnvPool's seeds; give a smaller one")
        first = known[0]
        is_consecutive = known == list(range(first, first + self._num_envs))
        # envpool.make(seed=first) gives its envs consecutive seeds.
        changes = {"seed": first, "env_seed": []} if is_consecutive else {"seed": 0, "env_seed": known}
        if is_consecutive and "env_seed" not in self._pool.spec.config._fields:
            del changes["env_seed"]
        self._pool = _rebuild_pool(self._pool, **changes)


class EnvPoolEnv:
    """One env of an EnvPool pool, for calls: it has `env_id` and `render`; other attributes are the pool's."""

    def __init__(self, driver: EnvPoolDriver, server: int) -> None:
        self._driver = driver
        self.env_id = server

    @property
    def pool(self) -> Any:
        """EnvPool's pool."""
        return self._driver.pool

    def render(self) -> Any:
        """Return the env's image."""
        frames = self._driver.pool.render(env_ids=np.array([self.env_id], np.int32))
        return None if frames is None else frames[0]

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether `get_wrapper_attr` finds the attribute."""
        return hasattr(self, name) or hasattr(self._driver.pool, name)

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of this env, or of the pool."""
        return getattr(self if name in ("env_id", "render", "has_wrapper_attr") else self._driver.pool, name)

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Set an attribute of the pool."""
        setattr(self._driver.pool, name, value)


# ---- arrays -----------------------------------------------------------------------------------------------------------


def unpack_result(result: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Return (observation, reward, terminated, truncated, info) of a step's 4 or 5 values.

    Of 4 values, as in old gym, the third is `done`, which is returned as terminated; truncated is the info's
    "TimeLimit.truncated".

    Raises:
        TypeError: there are neither 4 nor 5 values.
    """
    if len(result) == 4:
        obs, reward, done, info = result
        return obs, reward, done, info.get("TimeLimit.truncated", np.zeros_like(done)), info
    if len(result) == 5:
        return cast("tuple[Any, Any, Any, Any, dict[str, Any]]", tuple(result))
    raise TypeError(f"The output of step had {len(result)} elements, but only 4 or 5 are supported.")


def _make_reader(pool: Any) -> Callable[[Sequence[Any]], tuple[Any, ...]] | None:
    """Return a function that makes a result without infos from the arrays of `pool._recv`, much faster than `pool.recv`.

    Return None if the pool's `recv` is not EnvPool's own.
    """
    keys = list(getattr(pool, "_state_keys", ()))
    own = import_module("envpool.python.envpool").EnvPoolMixin
    if type(pool).recv is not own.recv or not {"reward", "done", "trunc", "info:env_id"} <= set(keys):
        return None
    at = {key: index for index, key in enumerate(keys)}
    paths = [
        (key.removeprefix("obs").lstrip(":").replace(":", ".").split("."), at[key])
        for key in keys
        if key.startswith("obs")
    ]
    is_leaf = not isinstance(pool.observation_space, gymnasium.spaces.Dict)

    def read(arrays: Sequence[Any]) -> tuple[Any, ...]:
        truncated = arrays[at["trunc"]]
        obs: Any = arrays[paths[0][1]] if is_leaf else _nested([(path, arrays[index]) for path, index in paths])
        return arrays[at["info:env_id"]], obs, arrays[at["reward"]], arrays[at["done"]] & ~truncated, truncated, None

    return read


def _nested(leaves: Sequence[tuple[Sequence[str], Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in leaves:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def _tail(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one env's action. A leading -1 is the dimension of players; an env has one player."""
    sizes = tuple(int(size) for size in shape)
    return sizes[1:] if sizes[:1] == (-1,) else sizes


def _fit(action: NDArray[Any], dtype: np.dtype[Any], tail: tuple[int, ...]) -> NDArray[Any]:
    return np.ascontiguousarray(action, dtype).reshape(len(action), *tail)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by EnvPool's names for them: the keys, joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
