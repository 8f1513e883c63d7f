"""DI-engine envs: `ding.envs.BaseEnv` and objects with its methods. Neither ding nor gym is imported here.

Such an env has `reset() -> obs`, `step(action) -> (obs, reward, done, info)`, `seed(seed, dynamic_seed)`, `close()` and
three spaces, of gym or of gymnasium. A Pool steps it through `DingSteppable`. `GymnasiumAsDing` is for the other
direction: it gives a Gymnasium env the methods of a DI-engine env.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import cloudpickle
import numpy as np

from stepmill.envs.env_adapter import EnvAdapter
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.spec.tree import PLAIN_DTYPE_KINDS, DictNode, Leaf, LeafKind, Node, Opaque, TupleNode

_SPACE_LIBRARIES = ("gym", "gymnasium")
DYNAMIC_STEP = 100  # DI-engine's envs draw the seed of an episode as seed + 100 * (1 … 999)
DYNAMIC_RANGE = 1000


class BaseEnvTimestep(NamedTuple):
    """The result of a step if ding is not imported, with the fields of ding's BaseEnvTimestep."""

    obs: Any
    reward: Any
    done: Any
    info: Any


def timestep_class() -> type[Any]:
    """Return ding's BaseEnvTimestep if ding is imported, else that of this module."""
    found: type[Any] = getattr(sys.modules.get("ding.envs.env.base_env"), "BaseEnvTimestep", BaseEnvTimestep)
    return found


# ---- the adapter of a plain Pool -------------------------------------------------------------------------------------


def describe(env: object, _like: EnvSpec | None) -> EnvSpec:
    """Return the spec of a DI-engine env."""
    pair = [_read_space(env, name) for name in ("observation_space", "action_space")]
    return EnvSpec(observation=tree_of_any(pair[0]), action=tree_of_any(pair[1]), spaces=dump_spaces(tuple(pair)))


def tree_of_any(space: object) -> Node:
    """Return the tree of a gym or gymnasium space. Spaces of no fixed size and other objects are opaque."""
    names = {cls.__name__ for cls in type(space).__mro__ if cls.__module__.partition(".")[0] in _SPACE_LIBRARIES}
    children: Any = getattr(space, "spaces", None)
    if "Dict" in names and children:
        return DictNode(tuple((key, tree_of_any(child)) for key, child in children.items()))
    if "Tuple" in names and children:
        return TupleNode(tuple(tree_of_any(child) for child in children))
    if names.isdisjoint({"Box", "Discrete", "MultiDiscrete", "MultiBinary"}):
        return Opaque()
    dtype, shape = getattr(space, "dtype", None), getattr(space, "shape", None)
    if shape is None or dtype is None or np.dtype(dtype).kind not in PLAIN_DTYPE_KINDS:
        return Opaque()
    kind = LeafKind.DISCRETE if "Discrete" in names else LeafKind.ARRAY if shape else LeafKind.SCALAR
    return Leaf(np.dtype(dtype).newbyteorder("="), tuple(int(size) for size in shape), kind)


def dump_spaces(spaces: tuple[object, ...]) -> bytes:
    """Pickle spaces. Generators that cannot be loaded are left out, as with gym 0.25 and NumPy 1.24 or newer."""
    data: bytes = cloudpickle.dumps(spaces)
    try:
        cloudpickle.loads(data)
    except Exception:  # loading a broken pickle may raise anything
        data = cloudpickle.dumps(tuple(_without_generator(space) for space in spaces))
    return data


def _without_generator(space: Any) -> Any:
    bare = copy.copy(space)
    if getattr(bare, "_np_random", None) is not None:
        bare._np_random = None
    children = getattr(bare, "spaces", None)
    kind: Any = type(children)
    if isinstance(children, Mapping):
        bare.spaces = kind((key, _without_generator(child)) for key, child in children.items())
    elif children is not None:
        bare.spaces = kind(_without_generator(child) for child in children)
    return bare


def _read_space(env: object, name: str) -> object:
    space = getattr(env, name, None)
    if space is None:
        raise UsageError(f"a {type(env).__name__} has no {name}; set it in the env's constructor")
    return space


class DingSteppable(EnvAdapter):
    """A DI-engine env in the engine's API.

    A seed is passed to the env unchanged (`dynamic_seed=False`). Later episodes, until the next seed, get seeds from a
    generator of this object; DI-engine's envs draw them from NumPy's global generator.
    """

    _has_wrappers = False
    _episode_seeds: np.random.Generator | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> tuple[object, Any]:
        """Reset the env with a seed. The options are keyword arguments of the env's `reset`."""
        if seed is not None:
            self._episode_seeds = np.random.default_rng(seed)
        elif self._episode_seeds is not None:
            seed = int(self._episode_seeds.integers(2**31))
        if seed is not None:
            seed_env(self.env, seed, dynamic_seed=False)
        return self.env.reset(**(options or {})), {}

    def step(self, action: object) -> tuple[object, object, object, object, Mapping[str, object]]:
        """Step the env. A reward of shape (1,) becomes a number; `done` becomes `truncated` if a time limit ended the
        episode, else `terminated`.
        """
        obs, reward, done, info, *_ = self.env.step(action)
        is_cut = bool(done) and isinstance(info, Mapping) and bool(info.get("TimeLimit.truncated", False))
        return obs, np.asarray(reward).item(), bool(done) and not is_cut, is_cut, info


adapt = DingSteppable


def seed_env(env: Any, seed: int, dynamic_seed: bool | None) -> None:
    """Call `env.seed`, with `dynamic_seed` if it is not None and the env has that parameter."""
    if dynamic_seed is None or not _takes_dynamic_seed(env):
        env.seed(seed)
    else:
        env.seed(seed, dynamic_seed)


def _takes_dynamic_seed(env: Any) -> bool:
    try:
        parameters = inspect.signature(env.seed).parameters.values()
    except (TypeError, ValueError):
        return True
    positional = [parameter for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    return len(positional) >= 2 or any(parameter.kind is parameter.VAR_POSITIONAL for parameter in positional)


# ---- a Gymnasium env in DI-engine's API -------------------------------------------------------------------------------


def as_ding_env(env: object) -> Any:
    """Return a Gymnasium env wrapped in `GymnasiumAsDing`, and any other env as it is."""
    is_gymnasium = any(f"{cls.__module__}.{cls.__qualname__}" == "gymnasium.core.Env" for cls in type(env).__mro__)
    return GymnasiumAsDing(env) if is_gymnasium and not hasattr(env, "reward_space") else env


class GymnasiumAsDing:
    """A Gymnasium env with the API that DI-engine's managers expect.

    Rewards are float32 of shape (1,). The info of an episode's last step has "eval_episode_return", and
    "TimeLimit.truncated" if the episode was truncated. All other attributes are the env's own.
    """

    def __init__(self, env: object) -> None:
        self._env: Any = cast("Any", env)
        self.observation_space = self._env.observation_space
        self.action_space = self._env.action_space
        self.reward_space = _reward_space(self.observation_space)
        self._is_discrete = any(cls.__name__ == "Discrete" for cls in type(self.action_space).__mro__)
        self._seed: int | None = None
        self._seed_offsets: np.random.RandomState | None = None
        self._return = 0.0

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        """Set the seed of the next episodes. With `dynamic_seed=False` all use it; otherwise each draws one from it."""
        self._seed = int(seed)
        self._seed_offsets = None if dynamic_seed is False else np.random.RandomState(self._seed % 2**32)

    def reset(self, **kwargs: Any) -> Any:
        """Begin an episode. The keyword arguments are those of the env's `reset`."""
        self._return = 0.0
        if self._seed is not None:
            offset = 0 if self._seed_offsets is None else DYNAMIC_STEP * self._seed_offsets.randint(1, DYNAMIC_RANGE)
            kwargs.setdefault("seed", self._seed + int(offset))
        return self._env.reset(**kwargs)[0]

    def step(self, action: Any) -> Any:
        """Step the env. An action for a Discrete space may be a number or an array of one number."""
        if self._is_discrete:
            action = int(np.asarray(action).reshape(-1)[0])
        obs, reward, terminated, truncated, info = self._env.step(action)
        self._return += float(reward)
        done = bool(terminated or truncated)
        if done:
            info = {**info, "eval_episode_return": self._return}
            if truncated and not terminated:
                info.setdefault("TimeLimit.truncated", True)
        return timestep_class()(obs, np.array([reward], np.float32), done, info)

    def close(self) -> None:
        """Close the env."""
        self._env.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_env":
            raise AttributeError(name)
        return self._env.get_wrapper_attr(name)

    def __repr__(self) -> str:
        return repr(self._env)


def _reward_space(like: object) -> object:
    """Return a Box of shape (1,) from the library of the env's spaces."""
    spaces = sys.modules[f"{type(like).__module__.partition('.')[0]}.spaces"] if like is not None else None
    box: Any = getattr(spaces, "Box", None)
    return None if box is None else box(-np.inf, np.inf, (1,), np.float32)
