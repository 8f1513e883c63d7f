"""The checks of envs whose runs with the same seed and the same actions must be equal."""

from __future__ import annotations

import copy
import math
import pickle
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, TypeVar

import numpy as np

from stepmill.observe.findings import Emit

NUM_COMPARED = 150
NUM_RUNS = 5  # one of them is beside another env
DIFFERENCES = {
    "non-deterministic": "two envs with the same seed and the same actions return different data",
    "state-survives-reset": "an env that was used before returns other data after a second reset(seed=...)",
    "shared-state": "an env returns other data while another env runs in the same process",
}

Item = TypeVar("Item")
EnvFn = Callable[[], Any]


def check_seeds(env_fn: EnvFn, emit: Emit, _num_steps: int, budget_s: float) -> None:
    """Compare runs with the same seed and the same actions: alone, again, and beside another env."""
    compare_runs(env_fn, emit, NUM_COMPARED, budget_s=budget_s)


def compare_runs(
    env_fn: EnvFn,
    emit: Emit,
    num_steps: int,
    seed: int = 0,
    ignore_info: Collection[str] | None = None,
    budget_s: float = math.inf,
) -> None:
    """Compare runs with the same seed and the same actions.

    Args:
        num_steps: the number of steps in each run.
        ignore_info: the keys of infos that may differ; None compares no infos.
        budget_s: about how long the comparison may take; if the env is slow, fewer steps are compared.
    """
    with ExitStack() as envs:

        def make_env() -> Any:
            return envs.enter_context(closing(env_fn()))

        first, second = make_env(), make_env()
        space = copy.deepcopy(first.action_space)
        space.seed(seed)
        actions = [space.sample() for _ in range(num_steps)]
        states = _global_generators()
        alone = _play(first, until(actions, budget_s / NUM_RUNS), seed, ignore_info)
        if _global_generators() != states:
            what = "reset() or step() uses a random generator of the whole process (np.random or random)"
            emit("global-generator", what, "reset(), step()")
            return
        emit_few_steps(emit, len(alone) - 1, num_steps)
        play = partial(_play, actions=actions[: len(alone) - 1], seed=seed, ignore_info=ignore_info)
        for check, what in DIFFERENCES.items():
            env = {"non-deterministic": second, "state-survives-reset": first}.get(check)
            later = play(make_env(), beside=make_env()) if env is None else play(env)
            if (step := _first_difference(alone, later)) is not None:
                emit(check, what, f"step {step}")
                return


def until(items: Iterable[Item], limit_s: float) -> Iterator[Item]:
    """Yield items, at least one, for about `limit_s` seconds."""
    began = time.monotonic()
    for count, item in enumerate(items):
        if count and time.monotonic() - began > limit_s:
            return
        yield item


def emit_few_steps(emit: Emit, num_played: int, num_steps: int) -> None:
    """Report it if the env was too slow for all the steps that should be compared."""
    if num_played < num_steps:
        steps = f"{num_played} of {num_steps} steps"
        emit("few-steps", "the env is slow", steps)


def _global_generators() -> tuple[bytes, object]:
    """Return the state of the generators of the process."""
    return pickle.dumps(np.random.get_state()), random.getstate()  # noqa: NPY002  it is what is checked


def _play(
    env: Any, actions: Iterable[Any], seed: int, ignore_info: Collection[str] | None, beside: Any | None = None
) -> list[Any]:
    """Return the results of the env. Between its steps, step another env with another seed, if there is one."""

    def result(*returned: Any) -> Any:
        *data, info = returned
        if ignore_info is not None:
            data.append({key: value for key, value in info.items() if key not in ignore_info})
        return copy.deepcopy(data)

    def advance(env: Any, action: Any) -> list[Any]:
        found = [result(*env.step(copy.deepcopy(action)))]
        return [*found, result(*env.reset())] if found[0][2] or found[0][3] else found

    results = [result(*env.reset(seed=seed))]
    if beside is not None:
        beside.reset(seed=seed + 1)
    for action in actions:
        if beside is not None:
            advance(beside, action)
        results.append(advance(env, action))
    return results


def _first_difference(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    return next((i for i, pair in enumerate(zip(left, right, strict=True)) if not is_equal(*pair)), None)


def is_equal(left: Any, right: Any) -> bool:
    """Whether two results have the same data; a NaN equals a NaN."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(is_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(is_equal, left, right))
    left, right = np.asarray(left), np.asarray(right)
    is_float = left.dtype.kind in "fc" and right.dtype.kind in "fc"
    return bool(np.array_equal(left, right, equal_nan=is_float))
