"""A kernel in Python that Numba compiles: a hunter on a plane catches a prey that moves at random.

python examples/kernels/pursuit.py
"""

import time
from typing import Any

import numpy as np
from gymnasium import spaces

import stepmill

NUM_ENVS = 1024
NUM_STEPS = 200


@stepmill.kernel(
    observation_space=spaces.Box(-np.inf, np.inf, (4,), np.float32),
    action_space=spaces.Box(-1.0, 1.0, (2,), np.float32),
    state=np.dtype([("hunter", "f8", (2,)), ("prey", "f8", (2,))]),
    max_episode_steps=300,
)
class Pursuit:
    def reset(state: Any, rng: Any, obs: Any) -> None:
        for axis in range(2):
            state.hunter[axis] = 0.0
            state.prey[axis] = rng.uniform(-5.0, 5.0)
            obs[axis] = 0.0
            obs[2 + axis] = state.prey[axis]

    def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
        distance = 0.0
        for axis in range(2):
            state.hunter[axis] += 0.2 * action[axis]
            state.prey[axis] += 0.1 * rng.normal()
            distance += (state.hunter[axis] - state.prey[axis]) ** 2
            obs[axis] = state.hunter[axis]
            obs[2 + axis] = state.prey[axis]
        return -distance, distance < 0.25, False

    def place_prey(state: Any, x: float, y: float) -> None:
        """Set the position of the prey: `pool.call("place_prey", 1.0, 2.0)`."""
        state.prey[:] = x, y


def main() -> None:
    with stepmill.Pool([Pursuit] * NUM_ENVS, backend="kernel") as pool:
        obs = pool.reset(seed=0).obs
        start_s, num_caught = time.perf_counter(), 0
        for _ in range(NUM_STEPS):
            batch = pool.step(np.clip(obs[:, 2:] - obs[:, :2], -1.0, 1.0))
            obs = batch.obs
            num_caught += int(batch.terminated.sum())
        seconds = time.perf_counter() - start_s
        print(f"{num_caught} caught; {NUM_ENVS * NUM_STEPS / seconds / 1e6:.1f} million steps per second")
        assert num_caught > NUM_ENVS


if __name__ == "__main__":
    main()
