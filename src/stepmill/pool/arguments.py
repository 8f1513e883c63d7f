"""Checks of arguments of the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stepmill.spec.errors import UsageError
from stepmill.spec.tree import Node, iter_tree


def check_timeout(timeout_s: object) -> None:
    """Refuse a timeout that is not None or a number of seconds."""
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s >= 0:
        raise UsageError(
            f"timeout_s={timeout_s!r} must be a number of seconds, 0 or more, or None to wait for what is pending"
        )


def checked_fns(env_fns: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], ...]:
    """Return the functions that make the envs.

    Raises:
        UsageError: there is none, or one of them is not a function.
    """
    given: object = env_fns
    if callable(given) or isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(
            f"env_fns is a {type(env_fns).__name__}; give a list of functions that make envs, one per env: [make_env] * 8"
        )
    fns = tuple(env_fns)
    if not fns:
        raise UsageError("a pool needs at least one env; env_fns is empty")
    for env_id, fn in enumerate(fns):
        if not callable(fn):
            raise UsageError(f"env_fns[{env_id}] is a {type(fn).__name__}; give a function that makes the env")
    return fns


def checked_num_envs(num_fns: int, num_spares: int) -> int:
    """Return how many envs are stepped; the last `num_spares` functions make spares."""
    if num_spares < num_fns:
        return num_fns - num_spares
    raise UsageError(
        f"spare_envs={num_spares} of {num_fns} env_fns leaves no env to step; "
        "the last spare_envs of env_fns are the spares: give more functions, or fewer spares"
    )


def checked_batch_size(batch_size: object, num_envs: int) -> int | None:
    """Return `batch_size`, if it is None or from 1 to `num_envs`."""
    if batch_size is None or (isinstance(batch_size, int) and 1 <= batch_size <= num_envs):
        return batch_size
    raise UsageError(f"batch_size={batch_size!r} must be 1 to num_envs, which is {num_envs}")


def check_ids(env_ids: Sequence[int], num_envs: int, num_spares: int = 0) -> None:
    """Refuse ids of envs that do not exist. Ids from num_envs on are those of spares."""
    unknown = [env_id for env_id in env_ids if not 0 <= env_id < num_envs + num_spares]
    if unknown:
        raise UsageError(f"env ids {unknown} do not exist; this pool has envs 0 to {num_envs - 1}")


def check_leaves(observation: Node, own: Node) -> None:
    """Check the tree of a format of observations.

    Raises:
        UsageError: it has other leaves than the observations of the pool.
    """
    if list(iter_tree(observation)) != list(iter_tree(own)):
        raise UsageError(
            f"the leaves of {observation} differ from those of this pool's observations, {own}; give the same tree, with "
            "other factories"
        )
