"""EnvPool: what its pools say of their envs, and the calls that drive them (EnvPool 1.2 and newer).

    tasks = [EnvPoolTask("Pong-v5", num_threads=8)] * 64
    pool = stepmill.Pool(tasks, backend="envpool")

What EnvPool's own interface leaves to its user is looked after here:

- A synchronous pool sorts its results by their place in one call: with two calls at work, results overwrite each other.
  Here the second waits until the first has been received, so any subset of envs can be at work, steps and resets mixed.
- An asynchronous pool hands out blocks of `batch_size` results, and waits for ever when fewer envs are at work. Here it is
  always one of batch size 1: how many results make a batch is `recv`'s business. A pool that was given with another batch
  size is made anew with its own configuration.
- Seeds are fixed when a pool is made. A reset of all envs with a seed for each makes the pool anew, and lets the old one
  go; a reset of some with seeds is refused.
- Where a space has no lower bound, EnvPool says it is the smallest positive number; here it is -inf.
- Actions are cast to the dtypes that the C++ side wants, and laid out in C order.
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
from stepmill.spec.errors import MissingExtraError, UsageError

_OWN_INFOS = frozenset({"env_id", "players"})  # EnvPool's bookkeeping: which env a row is of is known without
_WHO = frozenset({"env_id", "players.env_id"})  # parts of an action that say whose it is; an env has one player
_SEED_RANGE = range(-(2**31), 2**31)


@dataclass(frozen=True)
class EnvPoolTask:
    """Stands for each env function of `Pool(..., backend="envpool")`: one EnvPool pool serves all of them.

    Attributes:
        task_id: as for `envpool.make`.
        kwargs: its other arguments, without `num_envs`, `env_type` and `batch_size`.
        is_async: envs answer one by one, as they get ready. Otherwise those commanded together answer together, which is
            faster.
        has_infos: False leaves EnvPool's infos behind, which cost time for every env in every step.
    """

    task_id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_async: bool = False
    has_infos: bool = True

    def make_pool(self, num_envs: int) -> tuple[EnvPoolDriver, EnvSpec]:
        """Make the pool.

        Raises:
            MissingExtraError: EnvPool is not installed.
            UsageError: there is no such task, or it is one of several players.
        """
        envpool = import_envpool()
        if self.task_id not in envpool.list_all_envs():
            raise UsageError(f"EnvPool has no task {self.task_id!r}; envpool.list_all_envs() names those it has")
        own = {"num_envs", "env_type", "batch_size", "task_id"} & set(self.kwargs)
        if own:
            raise UsageError(f"{', '.join(sorted(own))} of an EnvPoolTask is chosen by the pool; leave it out")
        pool = envpool.make(
            self.task_id,
            env_type="gymnasium",
            num_envs=num_envs,
            batch_size=1 if self.is_async else num_envs,
            **self.kwargs,
        )
        return _drive(pool, has_infos=self.has_infos)

    def __call__(self) -> object:
        """Refuse: an EnvPool task is no env.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"EnvPool's {self.task_id!r} is run by its own threads; use backend='envpool'")


@dataclass(frozen=True)
class GivenEnvPool:
    """The same for an EnvPool pool that exists. While it is used here, nobody else may use it; it is not ended here."""

    pool: Any
    has_infos: bool = True

    @property
    def is_async(self) -> bool:
        """Whether its envs answer one by one."""
        return self.pool.config["batch_size"] not in (0, self.num_envs)

    @property
    def num_envs(self) -> int:
        """How many envs it has; give so many env functions."""
        return int(self.pool.config["num_envs"])

    def make_pool(self, num_envs: int) -> tuple[EnvPoolDriver, EnvSpec]:
        """Take the pool; an asynchronous one is made anew with batch size 1.

        Raises:
            UsageError: its number of envs is another one.
        """
        if num_envs != self.num_envs:
            raise UsageError(
                f"the EnvPool pool has {self.num_envs} envs, and {num_envs} are wanted; give one function for each"
            )
        has_blocks = self.is_async and self.pool.config["batch_size"] != 1
        return _drive(_remake(self.pool, batch_size=1) if has_blocks else self.pool, has_infos=self.has_infos)

    def __call__(self) -> object:
        """Refuse: an EnvPool pool is no env.

        Raises:
            UsageError: always.
        """
        raise UsageError("an EnvPool pool is run by its own threads; use backend='envpool'")


def import_envpool() -> Any:
    """Return EnvPool.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return import_module("envpool")
    except ModuleNotFoundError as exc:
        raise MissingExtraError(module="envpool", extra="envpool") from exc


def describe_pool(pool: Any) -> EnvSpec:
    """Return what a pool says of one of its envs.

    Raises:
        UsageError: it has several players per env, or is no pool for Gymnasium.
    """
    config = pool.config
    if config.get("max_num_players", 1) != 1:
        raise UsageError(
            f"this EnvPool task has up to {config['max_num_players']} players in an env; only those with one can be run"
        )
    observation, action = getattr(pool, "observation_space", None), getattr(pool, "action_space", None)
    if not isinstance(observation, gymnasium.Space) or not isinstance(action, gymnasium.Space):
        raise UsageError("the EnvPool pool does not speak Gymnasium; make it with env_type='gymnasium'")
    observation, action = _mend(observation), _mend(action)
    return EnvSpec(
        observation=tree_of(observation, "observation_space"),
        action=tree_of(action, "action_space"),
        render_mode=getattr(pool, "_render_mode", None),
        metadata={"render_modes": ["rgb_array", "human"]},
        spaces=pickle_spaces(observation, action, None),
    )


def _mend(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """Return a space with honest bounds: "no lower bound" is the smallest positive number in EnvPool's specs."""
    if isinstance(space, gymnasium.spaces.Dict):
        return gymnasium.spaces.Dict({key: _mend(child) for key, child in space.spaces.items()})
    if not isinstance(space, gymnasium.spaces.Box) or space.dtype.kind != "f":
        return space
    limits = np.finfo(space.dtype)
    low = np.where(space.low == limits.tiny, -np.inf, space.low).astype(space.dtype)
    high = np.where(space.high == limits.max, np.inf, space.high).astype(space.dtype)
    return gymnasium.spaces.Box(low, high, space.shape, space.dtype.type)


def _drive(pool: Any, *, has_infos: bool) -> tuple[EnvPoolDriver, EnvSpec]:
    spec = describe_pool(pool)
    return EnvPoolDriver(pool, has_infos=has_infos), spec


def _remake(pool: Any, **changes: Any) -> Any:
    """Return a new pool with this one's configuration but for what changes."""
    config = pool.spec.config
    unknown = sorted(set(changes) - set(config._fields))
    if unknown:
        raise UsageError(
            f"this version of EnvPool cannot change {', '.join(unknown)} of a pool; use EnvPool 1.2 or newer"
        )
    fresh = type(pool)(type(pool.spec)(config._replace(**changes)))
    for name, value in vars(pool).items():
        if name.startswith("_render_") and not name.startswith("_render_window"):
            setattr(fresh, name, value)
    return fresh


class EnvPoolDriver:
    """Drives one pool for the proxy; see `stepmill.backends.foreign.ForeignPool` for the methods."""

    def __init__(self, pool: Any, *, has_infos: bool) -> None:
        self._pool = pool
        self._has_infos = has_infos
        self._num_envs = int(pool.config["num_envs"])
        self._reader = None if has_infos else _reader_of(pool)
        self._is_sync = pool.config["batch_size"] in (0, self._num_envs)
        self._waiting: deque[Callable[[], None]] = deque()  # synchronous: calls for which another must be over
        self._is_at_work = False  # synchronous: a call has begun, and was not received
        self._is_stale = False  # its result is nobody's any more
        specs = pool.spec.action_array_spec
        self._names = tuple(specs)  # in the order in which the C++ side wants them
        names = [name for name in specs if name not in _WHO]
        self._actions = {name: (np.dtype(specs[name].dtype), _tail(specs[name].shape)) for name in names}

    def send(self, servers: NDArray[np.int32], actions: Any) -> None:
        """Begin steps."""
        flat = _flatten(actions) if isinstance(actions, dict) else dict.fromkeys(self._actions, actions)
        arrays = [servers if name in _WHO else _fit(flat[name], *self._actions[name]) for name in self._names]
        self._begin(lambda: self._pool._send(arrays))

    def reset(self, orders: Sequence[tuple[int, Any, Any]]) -> None:
        """Begin resets; see the module for seeds."""
        if any(options for _, _, options in orders):
            raise UsageError("EnvPool's envs take no reset options; give them to EnvPoolTask instead")
        seeds = [seed for _, seed, _ in orders]
        if any(seed is not None for seed in seeds):
            self._reseed(seeds)
        servers = np.array([server for server, _, _ in orders], np.int32)
        self._begin(lambda: self._pool._reset(servers))

    def recv(self) -> tuple[Any, ...]:
        """Wait for results: of all envs at work, or of one if the pool is asynchronous."""
        if self._reader is not None:
            return self._reader(self._recv())
        obs, reward, terminated, truncated, info = unpack_result(self._recv())
        servers = info["env_id"]
        infos = {key: value for key, value in info.items() if key not in _OWN_INFOS} if self._has_infos else None
        return servers, obs, reward, terminated, truncated, infos

    def seat(self, server: int) -> object:
        """Return what calls on one env reach: the pool's attributes, and its own picture."""
        return EnvPoolSeat(self, server)

    @property
    def pool(self) -> Any:
        """The pool of now; a seeded reset makes a new one."""
        return self._pool

    def close(self) -> None:
        """Let go of the pool, whose threads end with it unless somebody else holds it."""
        self._pool = None

    def drop(self) -> None:
        """Forget what was begun and not received. An asynchronous pool has a thread of its own, where no signal handler runs."""
        self._waiting.clear()
        self._is_stale, self._is_at_work = self._is_sync, False

    def _begin(self, call: Callable[[], None]) -> None:
        if self._is_sync and (self._is_at_work or self._waiting):
            self._waiting.append(call)
        else:
            self._call(call)

    def _call(self, call: Callable[[], None]) -> None:
        if self._is_stale:  # a synchronous pool has something to receive, or gives nothing
            self._pool.recv()
        self._is_stale, self._is_at_work = True, True
        call()
        self._is_stale = False

    def _recv(self) -> Any:
        if self._is_sync and not self._is_at_work and self._waiting:
            self._call(self._waiting.popleft())
        self._is_stale = self._is_sync
        result = self._pool.recv() if self._reader is None else self._pool._recv()
        self._is_stale = self._is_at_work = False
        return result

    def _reseed(self, seeds: Sequence[int | None]) -> None:
        known = [seed for seed in seeds if seed is not None]
        if len(known) != self._num_envs:
            raise UsageError(
                f"EnvPool can only seed all of its {self._num_envs} envs at once, and {len(known)} seeds are given; "
                "reset all envs with a seed for each, or these without"
            )
        outside = [seed for seed in known if seed not in _SEED_RANGE]
        if outside:
            raise UsageError(f"EnvPool's seeds have 32 bits, and {outside[0]} has more; give smaller ones")
        first = known[0]
        is_run = known == list(range(first, first + self._num_envs))
        # A run of seeds is what envpool.make(seed=first) gives its envs.
        changes = {"seed": first, "env_seed": []} if is_run else {"seed": 0, "env_seed": known}
        if is_run and "env_seed" not in self._pool.spec.config._fields:
            del changes["env_seed"]
        self._pool = _remake(self._pool, **changes)


class EnvPoolSeat:
    """One env of a pool, as calls see it."""

    def __init__(self, driver: EnvPoolDriver, server: int) -> None:
        self._driver = driver
        self.env_id = server

    def render(self) -> Any:
        """Return the env's picture."""
        frames = self._driver.pool.render(env_ids=np.array([self.env_id], np.int32))
        return None if frames is None else frames[0]

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether `get_wrapper_attr` finds it."""
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

    Of 4 values, as gym had them, the third is `done`: terminated, and truncated is what "TimeLimit.truncated" says.

    Raises:
        TypeError: there is another number of values.
    """
    if len(result) == 4:
        obs, reward, done, info = result
        return obs, reward, done, info.get("TimeLimit.truncated", np.zeros_like(done)), info
    if len(result) == 5:
        return cast("tuple[Any, Any, Any, Any, dict[str, Any]]", tuple(result))
    raise TypeError(f"The output of step had {len(result)} elements, but only 4 or 5 are supported.")


def _reader_of(pool: Any) -> Callable[[Sequence[Any]], tuple[Any, ...]] | None:
    """Return what makes a result without infos of the C++ side's arrays, in a fraction of the time that `recv` takes.

    None if the pool's `recv` is not EnvPool's own.
    """
    keys = list(getattr(pool, "_state_keys", ()))
    own = import_module("envpool.python.envpool").EnvPoolMixin
    if type(pool).recv is not own.recv or not {"reward", "done", "trunc", "info:env_id"} <= set(keys):
        return None
    at = {key: place for place, key in enumerate(keys)}
    paths = [
        (key.removeprefix("obs").lstrip(":").replace(":", ".").split("."), at[key])
        for key in keys
        if key.startswith("obs")
    ]
    is_leaf = not isinstance(pool.observation_space, gymnasium.spaces.Dict)

    def read(arrays: Sequence[Any]) -> tuple[Any, ...]:
        truncated = arrays[at["trunc"]]
        obs: Any = arrays[paths[0][1]] if is_leaf else _nested([(path, arrays[place]) for path, place in paths])
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
    """Return the shape of one env's action; -1 in front stands for players, of which there is one."""
    sizes = tuple(int(size) for size in shape)
    return sizes[1:] if sizes[:1] == (-1,) else sizes


def _fit(action: NDArray[Any], dtype: np.dtype[Any], tail: tuple[int, ...]) -> NDArray[Any]:
    return np.ascontiguousarray(action, dtype).reshape(len(action), *tail)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts under EnvPool's names, joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
