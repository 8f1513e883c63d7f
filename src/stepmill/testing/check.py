"""Executable contracts for your own env or backend; the one for front-ends is in `vector.py`.

Each check raises `CheckFailed` or returns None.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from stepmill.observe.compared_runs import compare_runs
from stepmill.observe.doctor_probe import check_steps
from stepmill.observe.findings import Severity, make_finding
from stepmill.testing.compare import find_difference
from stepmill.testing.envs import CountingEnv
from stepmill.testing.faulty import RaisingEnv

if TYPE_CHECKING:
    from stepmill.pool.pool import Pool

    EnvFn = Callable[[], gymnasium.Env[Any, Any]]
    MakePool = Callable[[Sequence[EnvFn]], Pool]

NUM_STEPS = 40


class CheckFailed(AssertionError):
    """The object under test violates its contract. The message says which clause it violates, and where."""


def check_env(env_fn: EnvFn, *, seed: int = 0, num_steps: int = 200, ignore_info: Collection[str] = ()) -> None:
    """Check that an env's data fit its spaces and depend only on its seed and its actions, as replay and seeded runs require.

    The checks are part of those of `stepmill doctor`, which also runs checks in separate processes. Its warnings are not failures here.

    Args:
        env_fn: a function that builds the env. It is called a few times.
        seed: the seed of the compared runs and of their random actions.
        num_steps: the number of steps in each run.
        ignore_info: info keys that may differ, such as wall-clock times.

    Raises:
        CheckFailed: the env is not deterministic, leaves something behind, violates the Gymnasium step API, or cannot be checked.
    """

    def emit(*found: str) -> None:
        finding = make_finding(*found)
        if finding.severity is Severity.ERROR:
            raise CheckFailed(f"{finding.check}: {finding.what} ({finding.where}); {finding.cure}")

    check_steps(env_fn, emit, num_steps, math.inf)
    compare_runs(env_fn, emit, num_steps, seed, ignore_info)


def check_backend(make_pool: MakePool) -> None:
    """Check that the pools of `make_pool(env_fns)` fulfil the contract of every backend: data, calls, faults, close.

    Args:
        make_pool: a function that builds a Pool on the backend under test, with automatic resets at the next step.

    Raises:
        CheckFailed: names the clause that is violated.
    """
    _check_data(make_pool)
    _check_calls(make_pool)
    _check_raising_env(make_pool)


def draw_actions(space: gymnasium.Space[Any], count: int, seed: int) -> list[Any]:
    """Return `count` samples of a space, and do not change the space."""
    space = copy.deepcopy(space)
    space.seed(seed)
    return [space.sample() for _ in range(count)]


def fail_if(problem: str | None, clause: str) -> None:
    """Raise CheckFailed if there is a problem."""
    if problem is not None:
        raise CheckFailed(f"{clause}: {problem}")


def _check_data(make_pool: MakePool) -> None:
    lengths = [3, 4, 5]
    env_fns = [partial(CountingEnv, i, n) for i, n in enumerate(lengths)]
    with make_pool(env_fns) as pool:
        batch = pool.reset(seed=0)
        _expect("the observation after reset", batch.obs, np.array([[i, 0, 0] for i in range(3)]))
        for clock in range(1, NUM_STEPS):
            actions = np.array([clock, 10 + clock, 20 + clock]) % 100
            batch = pool.step(actions)
            # An episode of n steps takes n + 1 commands: the last is the reset, which ignores its action.
            positions = [divmod(clock, length + 1) for length in lengths]
            _expect(
                f"the observation after step {clock}",
                batch.obs,
                np.array([[i, episode, t] for i, (episode, t) in enumerate(positions)]),
            )
            acted = np.array([t > 0 for _, t in positions])
            _expect(f"the reward of step {clock}", batch.reward, np.where(acted, actions, 0).astype(np.float64))
            ends = np.array([t == length for (_, t), length in zip(positions, lengths, strict=True)])
            _expect(f"terminated of step {clock}", batch.terminated, ends)
            _expect(f"truncated of step {clock}", batch.truncated, np.zeros(3, bool))
            _expect(f"env_id of step {clock}", batch.env_id, np.arange(3, dtype=batch.env_id.dtype))


def _check_calls(make_pool: MakePool) -> None:
    with make_pool([partial(CountingEnv, i) for i in range(3)]) as pool:
        pool.reset(seed=0)
        _expect("the results of a call", list(pool.call("add", 1.0, right=2.0)), [3.0, 4.0, 5.0])
        pool.set_attr("weight", [5.0, 6.0, 7.0])
        _expect("the attribute that was set", list(pool.get_attr("weight")), [5.0, 6.0, 7.0])
    pool.close()


def _check_raising_env(make_pool: MakePool) -> None:
    from stepmill.spec.errors import EnvError

    env_fns = [partial(RaisingEnv, "step", at, identity=i) for i, at in enumerate((2, 99))]
    with make_pool(env_fns) as pool:
        pool.reset(seed=0)
        pool.step(np.array([1, 1]))
        try:
            pool.step(np.array([1, 1]))
        except EnvError as error:
            _expect("the env that an EnvError names", error.env_id, 0)
            fail_if(None if "a deliberate failure" in str(error) else str(error), "an EnvError must carry the cause")
        else:
            raise CheckFailed("an env that raises must cause an EnvError: nothing was raised")
        batch = pool.reset(env_ids=[0])
        _expect("the env that is reset after a fault", batch.env_id.tolist(), [0])


def _expect(what: str, actual: object, expected: object) -> None:
    fail_if(find_difference(actual, expected, what), "the pool returns the wrong data")
