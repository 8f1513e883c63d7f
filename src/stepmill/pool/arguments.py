"""Checks the arguments of a pool and its methods."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np

from stepmill.spec.errors import ArgumentTypeError, UsageError
from stepmill.spec.tree import Node, iter_tree, map_tree


def check_timeouts(**timeouts: object) -> None:
    """Refuse a timeout that is not None or a number of seconds. The keywords are the names of the arguments."""
    for name, value in timeouts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
            raise UsageError(
                f"{name}={value!r} must be a number of seconds, 0 or more, or None to wait for what is pending"
            )


def checked_fns(env_fns: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], ...]:
    """Return the functions that make the envs.

    Raises:
        UsageError: there are no functions.
        ArgumentTypeError: one of them is not a function, or this is not a list.
    """
    given: object = env_fns
    if isinstance(given, str):
        raise ArgumentTypeError(
            f"env_fns is the string {given!r}; give a list of functions that make envs, one per env, or for an id of "
            f"Gymnasium use stepmill.make_vec({given!r}, num_envs=8)"
        )
    if callable(given) or not isinstance(given, Iterable):
        raise ArgumentTypeError(
            f"env_fns is {_a_type(given)}; give a list of functions that make envs, one per env: [make_env] * 8"
        )
    fns: tuple[object, ...] = tuple(given)
    if not fns:
        raise UsageError("a pool needs at least one env; env_fns is empty")
    for env_id, fn in enumerate(fns):
        if not callable(fn):
            made = f"lambda: gymnasium.make({fn!r})" if isinstance(fn, str) else "a class, or a lambda"
            raise ArgumentTypeError(f"env_fns[{env_id}] is {_a_type(fn)}; give a function that makes the env: {made}")
    return cast("tuple[Callable[[], object], ...]", fns)


def _a_type(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def checked_count(num_envs: object) -> int:
    """Return a number of envs as an int.

    Raises:
        UsageError: it is not a whole number, or less than 1.
    """
    try:
        count = 0 if isinstance(num_envs, bool) else operator.index(cast("Any", num_envs))
    except TypeError:
        count = 0
    if count < 1:
        raise UsageError(f"num_envs={num_envs!r} must be a whole number, 1 or more")
    return count


def checked_num_envs(num_fns: int, num_spares: int) -> int:
    """Return the number of envs without spares. The last `num_spares` functions make spares."""
    if num_spares < num_fns:
        return num_fns - num_spares
    raise UsageError(
        f"resets.spare_envs={num_spares} of {num_fns} env_fns leaves no env to step; the last resets.spare_envs of env_fns "
        f"are the spares: for {num_fns} envs give {num_fns + num_spares} functions, or give fewer spares"
    )


def checked_batch_size(batch_size: object, num_envs: int) -> int | None:
    """Return `batch_size`, which must be None or from 1 to `num_envs`."""
    if batch_size is None or (isinstance(batch_size, int) and 1 <= batch_size <= num_envs):
        return batch_size
    raise UsageError(f"batch_size={batch_size!r} must be 1 to num_envs, which is {num_envs}")


def whole_ids(env_ids: object) -> list[int]:
    """Return ids as ints, in their order: the rule of all front-ends. NumPy's integers are ids; bools and floats, also 1.0, are not.

    Raises:
        UsageError: an id is not a whole number.
    """
    try:
        given = env_ids.tolist() if isinstance(env_ids, np.ndarray) else list(cast("Iterable[Any]", env_ids))
        if set(map(type, given)) == {int}:  # the other checks take ten times as long
            return given
        if any(isinstance(env_id, (bool, np.bool_)) for env_id in given):
            raise UsageError(f"env_ids={env_ids!r} is a mask; name the envs by number: env_ids=np.flatnonzero(mask)")
        return [operator.index(env_id) for env_id in given]
    except TypeError:
        raise UsageError(f"env_ids={env_ids!r} must be a list or array of integers, one per env") from None


def checked_ids(env_ids: object, num_envs: int, num_spares: int = 0) -> list[int]:
    """Return the ids of envs as ints, in their order. Ids from num_envs on are those of spares.

    Raises:
        UsageError: an id is not a whole number, or names an env that does not exist.
    """
    ids = whole_ids(env_ids)
    unknown = [env_id for env_id in ids if not 0 <= env_id < num_envs + num_spares]
    if unknown:
        raise UsageError(f"env ids {unknown} do not exist; this pool has envs 0 to {num_envs - 1}")
    return ids


def check_leaves(observation: Node, own: Node) -> None:
    """Check the tree of an observation format.

    Raises:
        UsageError: the tree has other leaves than the observations of the pool.
    """
    if list(iter_tree(observation)) != list(iter_tree(own)):
        raise UsageError(
            f"the leaves of {observation} differ from those of this pool's observations, {own}; give the same tree, with "
            "other factories"
        )


def select_rows(node: Node, actions: Any, rows: Sequence[int], num_rows: int) -> Any:
    """Return copies of some of `num_rows` actions, in the structure of the tree.

    Raises:
        UsageError: the actions do not have the structure of the tree, or their number is not `num_rows`.
    """

    def select(_: Node, column: Any) -> Any:
        if len(column) != num_rows:
            raise UsageError(f"got {len(column)} actions for {num_rows} envs; give one for each env")
        return column[list(rows)] if isinstance(column, np.ndarray) else [column[row] for row in rows]

    try:
        return map_tree(select, node, actions)
    except (KeyError, IndexError, TypeError) as exc:
        raise UsageError(
            f"the actions do not have the structure of the action space: {type(exc).__name__}: {exc}; "
            "give an element of action_space"
        ) from exc
