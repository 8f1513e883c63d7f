"""SkyRL-Gym's envs, stepped as SkyRL steps them: each in a thread of a pool; and the same envs for `stepmill.AsyncPool`.

SkyRL's generator makes an env for each episode, and awaits `init`, `step` and `close` in a `ThreadPoolExecutor` with `max_env_workers`
threads, 32 by default (`skyrl/train/generators/skyrl_gym_generator.py`, commit a956457). It imports torch and vLLM; `Generator` is its
part that has to do with envs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

DEFAULT_ENV_WORKERS = 32
SLEEPY = "sleepy"


class Sleepy(BaseTextEnv):  # type: ignore[misc]
    """Sleeps in each step, as if a tool were called."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        extras = extras or {}
        self._sleep_s, self.max_turns = extras["sleep_s"], extras["max_turns"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Sleep, and reply to the action."""
        self.turns += 1
        time.sleep(self._sleep_s)
        reply = [{"role": "user", "content": f"after {action}"}]
        return BaseTextEnvStepOutput(observations=reply, reward=0.0, done=self.turns >= self.max_turns, metadata={})


class AsGymnasium:
    """An env of SkyRL-Gym for `stepmill.AsyncPool`: all that a user has to write. The options of a reset are a row of the dataset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Make the env of an episode, as SkyRL does."""
        self._env = make_env(**options["make"])
        return self._env.init(options["prompt"])

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a turn."""
        output = self._env.step(action)
        return output["observations"], output["reward"], output["done"], False, output["metadata"]


def make_env(env_class: str, **extras: Any) -> BaseTextEnv:
    """Make an env; the registry is one of the process."""
    if SLEEPY not in skyrl_gym.registry:
        skyrl_gym.register(id=SLEEPY, entry_point=Sleepy)
    return skyrl_gym.make(env_class, env_config={}, extras=extras)


class Generator:
    """What SkyRLGymGenerator does with envs."""

    def __init__(self, max_env_workers: int) -> None:
        self.env_executor = ThreadPoolExecutor(max_env_workers, thread_name_prefix="skyrl-gym-env-")

    async def _run_in_executor_if_available(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.env_executor, function, *args)

    async def agent_loop(self, task: dict[str, Any]) -> None:
        """Play an episode; the policy says the same each time."""
        env = make_env(**task["make"])
        await self._run_in_executor_if_available(env.init, task["prompt"])
        is_done = False
        while not is_done:
            is_done = (await self._run_in_executor_if_available(env.step, "a"))["done"]
        await self._run_in_executor_if_available(env.close)


def task(sleep_s: float, num_steps: int) -> dict[str, Any]:
    """Return a row of the dataset."""
    prompt = [{"role": "user", "content": "begin"}]
    return {"prompt": prompt, "make": {"env_class": SLEEPY, "sleep_s": sleep_s, "max_turns": num_steps}}
