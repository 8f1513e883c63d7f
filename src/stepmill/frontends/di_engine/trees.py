"""Makes the tree arrays of the V2 managers: those of DI-treetensor, or, without it, dicts with keys as attributes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stepmill.spec.errors import UsageError

logger = logging.getLogger("stepmill.di_engine")


class Tree(dict[str, Any]):
    """A dict whose keys are also attributes: a nested dict of arrays, or settings in installations without EasyDict."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this tree has no {name!r}; it has {sorted(self)}") from None

    __setattr__ = dict.__setitem__


def _library() -> Any:
    """Return treetensor.numpy, or None if it is not installed."""
    try:
        import treetensor.numpy as library
    except ImportError:
        return None
    return library


def make_tree(value: Any) -> Any:
    """Return a dict as a tree of arrays; anything else as an array."""
    library = _library()
    if library is not None:
        return library.array(value)
    if isinstance(value, Mapping):
        return Tree({key: make_tree(child) for key, child in value.items()})
    return tuple(make_tree(child) for child in value) if isinstance(value, tuple) else np.asarray(value)


def stack_trees(values: Sequence[Any]) -> Any:
    """Stack trees of one structure along a new first dimension; return an empty array for no trees."""
    if not values:
        return np.array([])
    library = _library()
    if library is not None:
        return library.stack([library.array(value) for value in values])
    if isinstance(values[0], Mapping):
        return Tree({key: stack_trees([value[key] for value in values]) for key in values[0]})
    if isinstance(values[0], tuple):
        return tuple(stack_trees(column) for column in zip(*values, strict=True))
    return np.stack(values)


def rows_of_tree(value: Any) -> list[Any]:
    """Return the B rows of a list, of an array [B, ...], or of a tree of arrays [B, ...]."""
    if isinstance(value, (list, tuple, np.ndarray)):
        return list(value)
    if isinstance(value, Tree):
        columns = {key: rows_of_tree(child) for key, child in value.items()}
        return [Tree(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [value[row] for row in range(value.shape[0])]


def as_identifier(key: str) -> str:
    """Return a key of an info as an identifier: dots become underscores, and a leading digit is preceded by one."""
    return (f"_{key}" if key[:1].isdigit() else key).replace(".", "_")


class TreeManager:
    """The part in which the V2 managers differ: observations are one tree array, and `step` returns a list of tree arrays.

    Observations of the envs that need an action are stacked, in the order of `ready_obs_id`. A timestep has obs, reward,
    done, info and env_id; the keys of its info are made identifiers. Strings cannot be in an array: they are omitted, and
    each omitted key is logged once.
    """

    _omitted: frozenset[str] = frozenset()

    @property
    def ready_obs(self) -> Any:
        """Stacked observations of the envs that need an action. Waits until an env needs one; it is empty if no env can."""
        observations: Mapping[int, Any] = super().ready_obs  # type: ignore[misc]  # of the manager
        return stack_trees(list(observations.values()))

    def step(self, actions: Any) -> list[Any]:
        """Step the envs that need an action.

        Args:
            actions: a list, or a tree array [B, ...], one per env of `ready_obs_id`; or a dict by env_id.
        Returns:
            One tree array per env.
        Raises:
            UsageError: the number of actions is not the number of envs.
        """
        self._check_closed()  # type: ignore[attr-defined]  # of the manager
        timesteps: Mapping[int, Any] = super().step(self._by_id(actions))  # type: ignore[misc]  # of the manager
        return [self._tree(env_id, timestep) for env_id, timestep in timesteps.items()]

    def _by_id(self, actions: Any) -> Mapping[int, Any]:
        if isinstance(actions, Mapping) and not isinstance(actions, Tree):
            return actions
        if self._offered_ids is None:  # type: ignore[has-type]  # of the manager
            # An env whose reset has ended since the caller asked has no row.
            self._offered_ids = self._known_ready_ids()  # type: ignore[attr-defined]
        env_ids = list(self.ready_obs_id)  # type: ignore[attr-defined]
        rows = rows_of_tree(actions)
        if len(rows) != len(env_ids):
            raise UsageError(
                f"got {len(rows)} actions for {len(env_ids)} envs; give one for each of ready_obs_id, which is {env_ids}"
            )
        return dict(zip(env_ids, rows, strict=True))

    def _tree(self, env_id: int, timestep: Any) -> Any:
        obs, reward, done, info, *_ = timestep
        kept = {as_identifier(key): value for key, value in info.items() if not isinstance(value, str)}
        omitted = frozenset(key for key, value in info.items() if isinstance(value, str)) - self._omitted
        if omitted:
            self._omitted |= omitted
            logger.warning("strings cannot be in a tree array: the info keys %s are omitted", sorted(omitted))
        return make_tree({"obs": obs, "reward": reward, "done": done, "info": kept, "env_id": env_id})
