"""The checks of envs whose runs with the same seed and the same actions must be equal."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import numpy as np

NUM_COMPARED = 150

EnvFn = Callable[[], Any]
Emit = Callable[[str, str, str, str, str], None]  # check, severity, what, where, cure


def check_seeds(env_fn: EnvFn, emit: Emit, _num_steps: int, _budget_s: float) -> None:
    """Compare runs with the same seed and the same actions: alone, again, and beside another env."""
    compare_runs(env_fn, emit, NUM_COMPARED)


def compare_runs(
    env_fn: EnvFn, emit: Emit, num_steps: int, seed: int = 0, ignore_info: Collection[str] | None = None
) -> None:
    """Compare runs with the same seed and the same actions; infos too, if `ignore_info` names those that may differ."""
    with ExitStack() as envs:

        def make_env() -> Any:
            return envs.enter_context(closing(env_fn()))

        first, second = make_env(), make_env()
        actions = _sample_actions(first.action_space, num_steps, seed)
        states = _global_generators()
        play = partial(_play, actions=actions, seed=seed, ignore_info=ignore_info)
        alone = play(first)
        if _global_generators() != states:
            emit(
                "global-generator",
                "error",
                "reset() or step() uses a random generator of the whole process (np.random or random)",
                "reset(), step()",
                "use self.np_random, which reset(seed=...) seeds; then check again",
            )
        elif (step := _first_difference(alone, play(second))) is not None:
            emit(
                "non-deterministic",
                "error",
                "two envs with the same seed and the same actions return different data",
                f"step {step}",
                "draw all random numbers from self.np_random; do not use the clock, the order of sets, or a space that was not seeded",
            )
        elif (step := _first_difference(alone, play(first))) is not None:
            emit(
                "state-survives-reset",
                "error",
                "an env that was used before returns other data after reset(seed=...)",
                f"step {step} after the second reset",
                "set all state in reset()",
            )
        elif (step := _first_difference(alone, play(make_env(), beside=make_env()))) is not None:
            emit(
                "shared-state",
                "error",
                "an env returns other data while another env runs in the same process",
                f"step {step}",
                "keep state in self, not in the class or module; until then, use envs_per_worker=1",
            )


def _global_generators() -> tuple[bytes, object]:
    """Return the state of the generators of the process."""
    return pickle.dumps(np.random.get_state()), random.getstate()  # noqa: NPY002  it is what is checked


def _sample_actions(space: Any, count: int, seed: int) -> list[Any]:
    space = copy.deepcopy(space)
    space.seed(seed)
    return [space.sample() for _ in range(count)]


def _play(
    env: Any, actions: Sequence[Any], seed: int, ignore_info: Collection[str] | None, beside: Any | None = None
) -> list[Any]:
    """Return what the env returns. Between its steps step another env with another seed, if there is one."""

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
