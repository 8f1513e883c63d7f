"""What a save and a restore cost: `python -m benchmarks.saves [--envs 64] [--steps 500]`.

Prints, for CartPole in the middle of its episodes: the time of a save to a file and in memory, the size of the file, and the time of a
restore beside that of the steps which it replays. Then the time to give the state of one env to 1,023 others, by stepmill and by what other
libraries offer. Then the speed at which the memory of a kernel with large states is saved and restored, beside memcpy.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np

import stepmill


class Endless(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole whose pole never falls, so that all episodes have the same length."""

    def step(self, action: Any) -> Any:
        obs, reward, _, _, info = self.env.step(action)
        self.unwrapped.state = np.clip(self.unwrapped.state, -0.1, 0.1)  # type: ignore[attr-defined]
        self.unwrapped.steps_beyond_terminated = None  # type: ignore[attr-defined]
        return obs, reward, False, False, info


def make() -> Any:
    return Endless(gymnasium.make("CartPole-v1", max_episode_steps=-1, disable_env_checker=True))


def best_of(num: int, function: Callable[[], object]) -> float:
    """Return the shortest time of several calls, in seconds."""
    times = []
    for _ in range(num):
        begun_s = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun_s)
    return min(times)


NUM_COPIES = 1023


def copy_kernel(name: str) -> float:
    """Give the state of one env of a kernel to the others."""
    with stepmill.Pool([stepmill.kernels.find(name)] * (1 + NUM_COPIES), backend="kernel") as pool:
        pool.reset(seed=0)
        saved = stepmill.save(pool, None, env_ids=[0])
        others = list(range(1, 1 + NUM_COPIES))
        return best_of(200, partial(stepmill.restore, pool, saved, env_ids=others))


def copy_mujoco_batch() -> float:
    """Give the state of one of MuJoCo's own batch of HalfCheetahs to the others."""
    import mujoco
    from mujoco.batch import Batch

    xml = os.path.join(os.path.dirname(gymnasium.__file__), "envs", "mujoco", "assets", "half_cheetah.xml")
    batch = Batch(mujoco.MjModel.from_xml_path(xml), 1 + NUM_COPIES, 1)
    batch.step()
    fields = [
        batch.bind(name) for name in ("time", "qpos", "qvel", "qacc_warmstart", "ctrl", "qfrc_applied", "xfrc_applied")
    ]

    def copy() -> None:
        for field in fields:
            field[1:] = field[0]

    return best_of(50, copy)


def copy_ale() -> float:
    """Give the state of one Pong to the others. There are 32 envs: the time is that of 1,023 copies."""
    import ale_py

    gymnasium.register_envs(ale_py)
    envs = [gymnasium.make("ALE/Pong-v5").unwrapped for _ in range(32)]
    for env in envs:
        env.reset(seed=0)

    def copy() -> None:
        state = envs[0].clone_state()  # type: ignore[attr-defined]
        for env in envs[1:]:
            env.restore_state(state)  # type: ignore[attr-defined]

    return best_of(20, copy) * NUM_COPIES / 31


def copy_sync_vector_env() -> float:
    """Copy the first CartPole of Gymnasium's vector env over the others."""
    envs = gymnasium.vector.SyncVectorEnv([partial(gymnasium.make, "CartPole-v1")] * (1 + NUM_COPIES))
    envs.reset(seed=0)

    def copy() -> None:
        envs.envs = [envs.envs[0], *(deepcopy(envs.envs[0]) for _ in range(NUM_COPIES))]

    return best_of(3, copy)


def print_copies() -> None:
    """Print the time of 1,023 copies of one state."""
    print(f"the state of one env in {NUM_COPIES:,} others:")
    for name, measure in (
        ("a kernel of CartPole", partial(copy_kernel, "CartPole-v1")),
        ("a kernel of HalfCheetah", partial(copy_kernel, "HalfCheetah-v5")),
        ("mujoco.batch of HalfCheetah", copy_mujoco_batch),
        ("clone_state, restore_state of ALE's Pong", copy_ale),
        ("copy.deepcopy in SyncVectorEnv of CartPole", copy_sync_vector_env),
    ):
        try:
            print(f"  {1e3 * measure():9.2f} ms  {name}")
        except ImportError as exc:
            print(f"          -     {name}: {exc}")


def reset_large(state: Any, rng: Any, obs: Any) -> None:
    state.table[0] = rng.integers(0, 200)
    obs[0] = state.table[0]


def step_large(state: Any, action: Any, _: Any, obs: Any) -> tuple[float, bool, bool]:
    state.table[0] += action
    obs[0] = state.table[0]
    return 0.0, False, False


large = stepmill.kernel(  # 1 MB of state
    observation_space=gymnasium.spaces.Box(0.0, 1.0, (1,), np.float64),
    action_space=gymnasium.spaces.Discrete(2),
    state=np.dtype([("table", "u1", (1 << 20,))]),
)(type("large", (), {"reset": reset_large, "step": step_large}))


def print_memory(num_envs: int = 64) -> None:
    """Print the speeds of a save and a restore of a kernel's memory, beside those of memcpy."""
    rows, target = np.ones((num_envs, 1 << 20), np.uint8), np.ones((num_envs, 1 << 20), np.uint8)
    with stepmill.Pool([large] * num_envs, backend="kernel") as pool:
        pool.reset(seed=0)
        saved = stepmill.save(pool, None)
        save_s, restore_s, copy_s, write_s = (np.inf,) * 4
        for _ in range(20):  # in turns, since other programs may run
            save_s = min(save_s, best_of(1, partial(stepmill.save, pool, None)))
            copy_s = min(copy_s, best_of(1, lambda: [row.tobytes() for row in rows]))
            restore_s = min(restore_s, best_of(1, partial(stepmill.restore, pool, saved)))
            write_s = min(write_s, best_of(1, partial(np.copyto, target, rows)))
    size_mb = num_envs * (1 << 20) / 1e6
    print(f"the memory of {num_envs} envs of 1 MB, in MB/s:")
    print(
        f"  save    {size_mb / save_s:7.0f}, memcpy to new memory {size_mb / copy_s:7.0f}: {copy_s / save_s:.2f} of it"
    )
    print(
        f"  restore {size_mb / restore_s:7.0f}, memcpy               {size_mb / write_s:7.0f}: {write_s / restore_s:.2f} of it"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    path = os.path.join(tempfile.mkdtemp(), "envs")
    options: dict[str, Any] = {"on_fault": "replay", "seeding": "per_episode", "num_workers": 2}
    actions = np.random.default_rng(0).integers(0, 2, (args.steps, args.envs))
    with stepmill.Pool([make] * args.envs, **options) as pool:
        pool.reset(seed=0)
        begun_s = time.perf_counter()
        for row in actions:
            pool.step(row)
        steps_s = time.perf_counter() - begun_s
        memory_s = best_of(20, partial(stepmill.save, pool, None))
        file_s = best_of(20, partial(stepmill.save, pool, path))
    with stepmill.Pool([make] * args.envs, **options) as pool:
        restore_s = best_of(1, partial(stepmill.restore, pool, path))
    print(
        f"{args.envs} envs after {args.steps} steps: save in memory {1e3 * memory_s:.1f} ms, to a file {1e3 * file_s:.1f} ms"
    )
    print(f"the file has {os.path.getsize(path):,} bytes")
    print(
        f"restore {1e3 * restore_s:.0f} ms, the steps took {1e3 * steps_s:.0f} ms: {steps_s / restore_s:.2f} of the speed of stepping"
    )
    print_copies()
    print_memory()


if __name__ == "__main__":
    main()
