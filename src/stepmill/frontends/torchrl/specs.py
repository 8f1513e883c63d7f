"""Gymnasium's spaces as TorchRL's specs, and conversions of their data; spaces may be nested to any depth.

A space that is one leaf has the key "observation" or "action". The keys of a Dict are kept; the children of a Tuple have the
keys "0", "1", …. (TorchRL's wrapper of EnvPool keeps the first level only, so that keys of deeper levels overwrite each other.)
Discrete and MultiDiscrete parts are numbers in observations; in actions they are one-hot, unless `is_categorical`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded

from stepmill.envs.torchrl import SpecSpace
from stepmill.frontends.torchrl.errors import MissingActionError
from stepmill.spec.errors import UsageError

Space: TypeAlias = spaces.Space[Any]
Key: TypeAlias = tuple[str, ...]

RESERVED = frozenset({"action", "reward", "done", "terminated", "truncated", "next", "_reset", "_step", "env_index"})


# ---- specs ------------------------------------------------------------------------------------------------------------


def observation_spec(each: Sequence[Space], device: torch.device | None) -> Any:
    """Return the Composite of N observations, each leaf [N, ...].

    Args:
        each: the observation space of each env; bounds and numbers of choices may differ.
        device: the device of the spec.
    Raises:
        UsageError: a part has no fixed size, or TorchRL reserves its key.
    """
    spec = _joined(each, "observation", is_one_hot=False)
    if not isinstance(each[0], spaces.Dict):
        return Composite(observation=spec, shape=(len(each),), device=device)
    taken = sorted(RESERVED & set(spec.keys()))
    if taken:
        raise UsageError(
            f"the observation space has keys {taken}, which TorchRL reserves; rename them, for example with a wrapper"
        )
    return spec if device is None else spec.to(device)


def with_infos(spec: Any, info_specs: Mapping[str, Any], num_envs: int) -> Any:
    """Return an observation spec with the specs of infos under "info".

    Args:
        spec: the spec of N observations.
        info_specs: the specs of one env's infos, by key.
        num_envs: N.
    """
    if not info_specs:
        return spec
    if "info" in spec.keys():  # noqa: SIM118  a Composite is not a dict
        raise UsageError("the observation has a key 'info', which info_specs need; rename it, or leave info_specs out")
    spec["info"] = Composite(
        {key: own.expand(num_envs, *own.shape) for key, own in info_specs.items()}, shape=(num_envs,)
    )
    return spec


def action_spec(each: Sequence[Space], device: torch.device | None, *, is_categorical: bool) -> Any:
    """Return the Composite of N actions under the key "action", each leaf [N, ...].

    Args:
        each: the action space of each env; bounds may differ, and with `is_categorical` the numbers of choices, too.
        device: the device of the spec.
        is_categorical: whether actions of Discrete and MultiDiscrete spaces are numbers; otherwise they are one-hot.
    Raises:
        UsageError: a part has no fixed size, or the spaces differ in shapes, dtypes or one-hot choices.
    """
    if not is_categorical:
        _check_choices(each)
    spec = _joined(each, "action", is_one_hot=not is_categorical)
    return Composite(action=spec, shape=(len(each),), device=device)


def _check_choices(each: Sequence[Space]) -> None:
    """Refuse one-hot actions of envs with different choices."""
    choices = [_choices(leaf) for leaf in _leaf_spaces(each[0])]
    for env_id, space in enumerate(each):
        if space is not each[0] and [_choices(leaf) for leaf in _leaf_spaces(space)] != choices:
            raise UsageError(
                f"env {env_id} has the action space {space}, env 0 {each[0]}: their one-hot vectors differ in length or "
                "meaning; make the env with categorical_action_encoding=True"
            )


def _choices(leaf: Space) -> Space | None:
    return leaf if isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete)) else None


def _leaf_spaces(space: Space) -> Iterator[Space]:
    children = _children(space)
    if children is None:
        yield space
    for _, _, child in children or ():
        yield from _leaf_spaces(child)


def _joined(each: Sequence[Space], what: str, *, is_one_hot: bool) -> Any:
    """Return one spec [N, ...] of the spaces of single envs."""
    distinct = {id(space): space for space in each}
    specs = {key: _spec_of(space, (what,), is_one_hot=is_one_hot) for key, space in distinct.items()}
    return _join([specs[id(space)] for space in each], what)


def _join(specs: Sequence[Any], what: str) -> Any:
    first, num = specs[0], len(specs)
    if all(spec is first or spec == first for spec in specs):
        return first.expand(num, *first.shape)
    if isinstance(first, Composite):
        keys = list(first.keys())
        return Composite({key: _join([spec[key] for spec in specs], f"{what}.{key}") for key in keys}, shape=(num,))
    if what.startswith("observation") and any(isinstance(spec, Unbounded) for spec in specs):
        return Unbounded((num, *first.shape), dtype=first.dtype)
    bounds = [_bounds(spec) for spec in specs]
    lows, highs = ([own[side] for own in bounds if own is not None] for side in (0, 1))
    if len(lows) != num:
        raise UsageError(
            f"{what} has the specs {_names(specs)} in envs of one pool, and no spec covers them all; make them equal "
            "with a wrapper, or make a StepmillEnv for each kind"
        )
    return Bounded(torch.stack(lows), torch.stack(highs), (num, *first.shape), dtype=first.dtype)


def _names(specs: Sequence[Any]) -> str:
    return ", ".join(sorted({type(spec).__name__ for spec in specs}))


def _bounds(spec: Any) -> tuple[Any, Any] | None:
    """Return the lower and the upper bound of a spec, in its shape and dtype; None without bounds."""
    if isinstance(spec, Bounded):
        low, high = spec.space.low, spec.space.high
    elif isinstance(spec, MultiCategorical):
        low, high = torch.zeros(spec.shape), spec.nvec - 1
    elif isinstance(spec, Categorical) and spec.dtype is not torch.bool:
        low, high = torch.zeros(spec.shape), torch.tensor(spec.space.n - 1)
    else:
        return None
    return low.to(spec.dtype).expand(spec.shape), high.to(spec.dtype).expand(spec.shape)


def _spec_of(space: Space, path: Key, *, is_one_hot: bool) -> Any:
    if isinstance(space, SpecSpace):  # of a TorchRL env
        return space.spec
    children = _children(space)
    if children is not None:
        own = [(key, _spec_of(child, (*path, key), is_one_hot=is_one_hot)) for key, _, child in children]
        if len(dict(own)) != len(own):
            raise UsageError(f"two keys of {'.'.join(path)} are the same as text; rename one of them")
        return Composite(dict(own))
    if isinstance(space, spaces.Box):
        return _box_spec(space)
    if isinstance(space, spaces.MultiBinary):
        return Binary(space.shape[-1], shape=space.shape, dtype=_torch_dtype(space.dtype, path))
    if isinstance(space, spaces.Discrete):
        return _discrete_spec(space, is_one_hot=is_one_hot)
    if isinstance(space, spaces.MultiDiscrete):
        return _multi_discrete_spec(space, is_one_hot=is_one_hot)
    raise UsageError(
        f"{'.'.join(path)} is a {type(space).__name__}, which has no fixed size and cannot be a tensor; remove it with a "
        "wrapper, or convert it to arrays"
    )


def _children(space: Space) -> list[tuple[str, Any, Space]] | None:
    """Return (key in the spec, key in the data, space) of each child of a space, or None for a leaf."""
    if isinstance(space, spaces.Dict):
        return [(str(key), key, child) for key, child in space.spaces.items()]
    if isinstance(space, spaces.Tuple):
        return [(str(index), index, child) for index, child in enumerate(space.spaces)]
    return None


def _torch_dtype(dtype: Any, path: Key) -> torch.dtype:
    try:
        return torch.from_numpy(np.zeros(1, dtype)).dtype
    except TypeError as exc:
        raise UsageError(
            f"{'.'.join(path)} has dtype {dtype}, which torch does not have; cast it with a wrapper"
        ) from exc


def _box_spec(space: spaces.Box) -> Any:
    dtype = _torch_dtype(space.dtype, ("a Box",))
    if dtype is torch.bool:
        return Categorical(2, shape=space.shape, dtype=torch.bool)
    if dtype.is_complex or dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch cannot compare these
        return Unbounded(space.shape, dtype=dtype)
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    is_free = bool(np.all(space.low <= info.min) and np.all(space.high >= info.max))
    if is_free:
        return Unbounded(space.shape, dtype=dtype)
    return Bounded(torch.as_tensor(space.low), torch.as_tensor(space.high), space.shape, dtype=dtype)


def _discrete_spec(space: spaces.Discrete, *, is_one_hot: bool) -> Any:
    if is_one_hot:
        return OneHot(int(space.n), dtype=torch.long)
    dtype = _torch_dtype(space.dtype, ("a Discrete",))
    if space.start == 0:
        return Categorical(int(space.n), dtype=dtype)
    return Bounded(int(space.start), int(space.start + space.n - 1), (), dtype=dtype)


def _multi_discrete_spec(space: spaces.MultiDiscrete, *, is_one_hot: bool) -> Any:
    dtype = _torch_dtype(space.dtype, ("a MultiDiscrete",))
    if space.nvec.ndim == 1 and is_one_hot:
        return MultiOneHot(space.nvec.tolist(), dtype=torch.long)
    if space.nvec.ndim == 1 and not space.start.any():
        return MultiCategorical(space.nvec.tolist(), dtype=dtype)
    low = torch.as_tensor(space.start, dtype=dtype)
    return Bounded(low, torch.as_tensor(space.start + space.nvec - 1, dtype=dtype), space.shape, dtype=dtype)


# ---- data -------------------------------------------------------------------------------------------------------------


def observation_packer(space: Space) -> Callable[[Any], dict[str, Any]]:
    """Return the function that converts arrays [B, ...] to a dict of tensors, nested as the spec, without copies."""
    if isinstance(space, spaces.Dict):
        return lambda obs: _pack(space, obs)
    if isinstance(space, spaces.Tuple):
        return lambda obs: {"observation": _pack(space, obs)}
    from_numpy = torch.from_numpy
    return lambda obs: {"observation": from_numpy(obs)}


def _pack(space: Space, obs: Any) -> Any:
    children = _children(space)
    if children is None:
        return torch.from_numpy(obs)
    return {key: _pack(child, obs[own]) for key, own, child in children}


class ActionReader:
    """Converts the action of a tensordict [B] to NumPy arrays [B, ...] in the structure of the action space."""

    def __init__(self, space: Space, *, is_categorical: bool) -> None:
        self._space = space
        self._is_one_hot = not is_categorical
        self._leaf = None if _children(space) is not None else self._reader(space)

    def read(self, tensordict: Any) -> Any:
        """Return the actions.

        Raises:
            MissingActionError: the tensordict has no "action".
            UsageError: its shape is wrong.
        """
        action = tensordict.get("action", None)
        if action is None:
            raise MissingActionError(
                "the tensordict has no 'action'; set it, for example by env.rand_action(tensordict)"
            )
        return self._leaf(action) if self._leaf is not None else self._walk(self._space, action)

    def _walk(self, space: Space, action: Any) -> Any:
        children = _children(space)
        if children is None:
            return self._reader(space)(action)
        values = {own: self._walk(child, action.get(key)) for key, own, child in children}
        return values if isinstance(space, spaces.Dict) else tuple(values.values())

    def _reader(self, space: Space) -> Callable[[Any], NDArray[Any]]:
        if isinstance(space, SpecSpace):
            own = space.spec.dtype
            return lambda action: _array(action.to(own))
        if isinstance(space, spaces.Discrete):
            return self._discrete_reader(space)
        if isinstance(space, spaces.MultiDiscrete) and self._is_one_hot and space.nvec.ndim == 1:
            sizes, start = space.nvec.tolist(), space.start
            return lambda action: _split_one_hot(_plain(action), sizes) + start
        dtype = np.dtype(space.dtype)
        if dtype.kind == "f":
            # Policies may use other float types, such as bfloat16, which NumPy does not have.
            wanted = _torch_dtype(dtype, ("action",))
            return lambda action: _array(action if action.dtype is wanted else action.to(wanted))
        return _array

    def _discrete_reader(self, space: spaces.Discrete) -> Callable[[Any], NDArray[Any]]:
        start, num = int(space.start), int(space.n)

        def read_numbers(action: Any) -> NDArray[Any]:
            # Shape [B], or [B, 1] from policies that use keepdim.
            if action.numel() != len(action):
                raise UsageError(
                    f"the action has shape {tuple(action.shape)} instead of {(len(action),)}; give a number for each env, or "
                    "make the env with categorical_action_encoding=False, for one-hot vectors"
                )
            return _array(action.reshape(len(action)))

        if not self._is_one_hot:
            return read_numbers

        def read(action: Any) -> NDArray[Any]:
            if action.ndim != 2 or action.shape[1] != num:
                raise UsageError(
                    f"the one-hot action has shape {tuple(action.shape)} instead of {(len(action), num)}; give one-hot "
                    "vectors, or make the env with categorical_action_encoding=True"
                )
            index = _array(action.argmax(-1) if action.dtype is not torch.bool else action.byte().argmax(-1))
            return index + start if start else index

        return read


def _plain(action: Any) -> Any:
    return action.byte() if action.dtype is torch.bool else action


def _array(action: Any) -> NDArray[Any]:
    # Usually detached and on the CPU already; these calls are faster than checks for that.
    array: NDArray[Any] = action.detach().cpu().numpy()
    return array


def _split_one_hot(action: Any, sizes: list[int]) -> NDArray[Any]:
    if action.shape[-1] != sum(sizes):
        raise UsageError(f"the one-hot action has {action.shape[-1]} entries instead of {sum(sizes)}")
    return np.stack([_array(part.argmax(-1)) for part in action.split(sizes, -1)], -1)
