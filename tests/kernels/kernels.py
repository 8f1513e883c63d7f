"""Kernels for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

import stepmill

SPACE = spaces.Box(-np.inf, np.inf, (3,), np.float64)


@stepmill.kernel(
    observation_space=SPACE,
    action_space=spaces.Discrete(5),
    state=np.dtype([("place", "f8"), ("steps", "i8"), ("target", "f4"), ("calls", "i8")]),
)
class walk:  # noqa: N801
    """Walks at random until it is at its target, or 5 below zero; the episode is truncated where action 4 is given."""

    def reset(state: Any, rng: Any, obs: Any) -> None:
        state.place = rng.uniform(0.0, 1.0)
        state.target = 2.0 + rng.integers(0, 4)
        state.steps = 0
        obs[0] = state.place
        obs[1] = state.target
        obs[2] = 0.0

    def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
        state.place += 0.5 * (action - 1) + 0.1 * rng.normal()
        state.steps += 1
        obs[0] = state.place
        obs[1] = state.target
        obs[2] = state.steps
        return state.place, state.place > state.target or state.place < -5.0, action == 4

    def jump(state: Any, by: float) -> float:
        state.place += by
        state.calls += 1
        return float(state.place)


walk_limited = stepmill.kernel(
    observation_space=SPACE, action_space=spaces.Discrete(5), state=walk.state, max_episode_steps=7
)(type("walk_limited", (), {"reset": walk.reset, "step": walk.step}))


@stepmill.kernel(
    observation_space=spaces.Dict({"a": spaces.Discrete(9), "b": spaces.Box(0.0, 9.0, (2,), np.float32)}),
    action_space=spaces.Dict({"by": spaces.Discrete(3), "scale": spaces.Box(0.0, 2.0, (), np.float64)}),
    state=np.dtype([("count", "i8"), ("sums", "f4", (2,))]),
)
class parts:  # noqa: N801
    """Has observations and actions of several parts."""

    def reset(state: Any, rng: Any, obs: Any) -> None:
        state.count = 0
        state.sums[0] = 0.0
        state.sums[1] = 0.0
        obs.a = 0
        obs.b[0] = 0.0
        obs.b[1] = 0.0

    def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
        state.count += action.by
        state.sums[0] += action.scale
        state.sums[1] += 1.0
        obs.a = state.count % 9
        obs.b[0] = state.sums[0]
        obs.b[1] = state.sums[1]
        return action.scale, state.count >= 6, False


@stepmill.kernel(observation_space=SPACE, action_space=spaces.Discrete(5), state=np.dtype([("count", "i8")]))
class endless:  # noqa: N801
    """Does not return from a step with action 4."""

    def reset(state: Any, rng: Any, obs: Any) -> None:
        state.count = 0
        obs[:] = 0.0

    def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
        state.count += 1
        while action == 4 and rng.random() < 2.0:
            state.count += 1
        obs[:] = state.count
        return 0.0, False, False


@stepmill.kernel(
    observation_space=SPACE,
    action_space=spaces.Discrete(5),
    state=np.dtype([("count", "i8"), ("items", "f8", (4,))]),
    debug=True,
)
class faulty:  # noqa: N801
    """Fails in different ways: action 1 divides by zero, 2 raises, 3 reads out of bounds."""

    def reset(state: Any, rng: Any, obs: Any) -> None:
        state.count = 0
        obs[:] = 0.0

    def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
        state.count += 1
        obs[:] = state.count
        zero = 0 if action >= 0 else 1
        if action == 1:
            return 1.0 / zero, False, False
        if action == 2:
            raise ValueError("no such move")
        if action == 3:
            return state.items[3 + state.count], False, False
        return 1.0, False, False
