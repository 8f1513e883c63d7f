"""Install each extra alone into an empty environment, and run a program there that needs it.

Usage: check_extras.py [EXTRA ...]. Without arguments, all extras for users are tested.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
FOR_DEVELOPERS = frozenset({"test", "check", "build", "dev"})

_STEP = """
envs.reset(seed=0)
for _ in range(10):
    envs.step(envs.action_space.sample())
"""
PROGRAMS = {
    "atari": """
import ale_py, gymnasium, stepmill
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

def make():
    return FrameStackObservation(AtariPreprocessing(gymnasium.make("ALE/Pong-v5", frameskip=1)), 4)

envs = stepmill.VectorEnv([make] * 2, num_workers=2)
"""
    + _STEP
    + "envs.close()",
    "mujoco": """
import stepmill
for render_mode in (None, "rgb_array"):
    envs = stepmill.make_vec("HalfCheetah-v5", 2, num_workers=2, render_mode=render_mode)
"""
    + _STEP.replace("\n", "\n    ")
    + "envs.close()",
    "sb3": """
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stepmill.frontends.sb3 import SB3VecEnv
envs = make_vec_env("CartPole-v1", n_envs=2, vec_env_cls=SB3VecEnv)
PPO("MlpPolicy", envs, n_steps=32, batch_size=32).learn(64)
envs.close()
""",
    "tianshou": """
import gymnasium
from tianshou.data import Batch
from stepmill.frontends.tianshou import StepmillVectorEnv
envs = StepmillVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
envs.reset()
envs.step([0, 1])
envs.close()
""",
    "torch": """
import gymnasium, torch, stepmill, stepmill.torch
with stepmill.torch.TensorPool(stepmill.Pool([lambda: gymnasium.make("CartPole-v1")] * 2)) as pool:
    pool.reset(seed=0)
    assert isinstance(pool.step(torch.tensor([0, 1])).obs, torch.Tensor)
""",
    "jax": """
import gymnasium, stepmill, stepmill.jax
with stepmill.Pool([lambda: gymnasium.make("CartPole-v1")] * 2) as pool:
    assert stepmill.jax.as_jax(pool.reset(seed=0)).obs.shape == (2, 4)
    handle, recv, send, step = stepmill.jax.xla(pool)
""",
    "envpool": """
import stepmill
envs = stepmill.make_vec("CartPole-v1", 2, backend="envpool")
"""
    + _STEP
    + "envs.close()",
    "numba": """
import stepmill
envs = stepmill.make_vec("CartPole-v1", 2, backend="kernel")
"""
    + _STEP
    + "envs.close()",
    "torchrl": """
import gymnasium
from stepmill.frontends.torchrl import StepmillEnv
env = StepmillEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
assert env.rollout(4, break_when_any_done=False).shape == (2, 4)
env.close()
""",
    "dm-env": """
import gymnasium
from stepmill.frontends.dm_env import DmEnvironment
with DmEnvironment(lambda: gymnasium.make("CartPole-v1")) as env:
    env.reset()
    env.step(0)
""",
    "pettingzoo": """
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from stepmill.frontends.pettingzoo import StepmillParallelEnv

class Two(ParallelEnv):
    metadata = {"name": "two"}
    possible_agents = agents = ["a", "b"]

    def observation_space(self, agent):
        return spaces.Box(0, 1, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return {agent: np.zeros(1, np.float32) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions):
        zeros = dict.fromkeys(self.agents, False)
        return self.reset()[0], dict.fromkeys(self.agents, 1.0), zeros, zeros, {agent: {} for agent in self.agents}

env = StepmillParallelEnv(Two)
env.reset(seed=0)
assert env.step({"a": 0, "b": 1})[1] == {"a": 1.0, "b": 1.0}
env.close()
""",
    "video": """
import pathlib, subprocess, sys
pathlib.Path("drawn.py").write_text('''
import gymnasium, numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

class Drawn(CartPoleEnv):
    def render(self):
        return np.zeros((64, 64, 3), np.uint8)

gymnasium.register("Drawn-v0", Drawn)
''')
command = [sys.executable, "-m", "stepmill", "run", "drawn:Drawn-v0", "--num-envs", "2", "--seconds", "1", "--video", "out.mp4"]
subprocess.run(command, check=True)
assert pathlib.Path("out.mp4").stat().st_size > 0
""",
    "ray": """
import gymnasium, stepmill
with stepmill.Pool([lambda: gymnasium.make("CartPole-v1")] * 2, backend="ray") as pool:
    pool.reset(seed=0)
    pool.step([0, 1])
""",
}


def extras() -> list[str]:
    """Return the extras for users in pyproject.toml. Each must have a program here."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = [name for name in named if name not in FOR_DEVELOPERS]
    if set(found) != set(PROGRAMS):
        raise SystemExit(
            f"extras: {sorted(set(found) ^ set(PROGRAMS))} must be both in pyproject.toml and in {__file__}"
        )
    return found


def try_extra(extra: str, wheel: Path, folder: Path) -> str:
    """Test an extra in an empty environment, and return the error text, or an empty string."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    for command in (
        [python, "-m", "pip", "install", "-q", f"{wheel}[{extra}]"],
        [python, "-W", "ignore", "-c", PROGRAMS[extra]],
    ):
        done = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip()[-2000:]
    return ""


def main(asked: list[str]) -> int:
    """Test the extras that were named, or all. The exit status is 1 after a failure."""
    chosen = [extra for extra in extras() if not asked or extra in asked]
    failed = []
    with tempfile.TemporaryDirectory(prefix="stepmill-extras-") as temporary:
        base = Path(temporary)
        subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", str(base), str(ROOT)], check=True)
        (wheel,) = base.glob("*.whl")
        for extra in chosen:
            problem = try_extra(extra, wheel, base / extra)
            print(f"extras: {extra}: {problem or 'works'}", flush=True)
            failed += [extra] if problem else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
