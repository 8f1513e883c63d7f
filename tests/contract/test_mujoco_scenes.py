"""Several MuJoCo envs of one process draw their own scenes."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes.util import find_library

import pytest

from tests.harness.hangs import HANG_GUARD_S

_PROGRAM = """
import sys
import gymnasium, numpy as np, stepmill
from functools import partial

IDS = ["Ant-v5", "Hopper-v5", "Ant-v5"]
makers = [partial(gymnasium.make, name, render_mode="rgb_array", width=64, height=64) for name in IDS]
alone = []
for maker in makers:
    with stepmill.Pool([maker], backend="process", num_workers=1) as pool:
        pool.reset(seed=7)
        alone.append(pool.render()[0])
where = sys.argv[1]
workers = {} if where == "serial" else {"num_workers": 1}
spaces = gymnasium.spaces
class Picture(gymnasium.Wrapper):
    observation_space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = spaces.Discrete(2)
    def reset(self, **kwargs):
        return super().reset(**kwargs)[0] is None or self.render(), {}
with stepmill.Pool([lambda maker=maker: Picture(maker()) for maker in makers], backend=where, **workers) as pool:
    pool.reset(seed=[7, 7, 7])
    pictures = pool.reset(seed=[7, 7, 7]).obs
for own, together in zip(alone, pictures):
    assert own.std() > 0
    assert (own == together).mean() > 0.999, (own == together).mean()
print("own scenes")
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["serial", "thread", "process"])
@pytest.mark.parametrize(("gl", "library"), [("egl", "EGL"), ("osmesa", "OSMesa")])
def test_each_env_of_a_worker_draws_its_own_scene(gl, library, where):
    pytest.importorskip("mujoco")
    if find_library(library) is None:
        pytest.skip(f"this machine has no lib{library}")
    program = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM, where],
        env={**os.environ, "MUJOCO_GL": gl, "PYOPENGL_PLATFORM": gl},
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        check=False,
    )
    assert program.stdout.endswith("own scenes\n"), program.stderr
