"""Runs programs that a model wrote, each in a subprocess with limits, and gives them rewards.

    python examples/text_sandbox.py

The action of `SandboxEnv` is a Python program, and the observation is what it printed, or why it was ended. Programs that hang, eat
memory or crash are answers like others, with reward 0. A program that ends the worker itself is not: its step raises, and no reward
is counted. The program ends with assertions about each of these.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import gymnasium

import stepmill

NUM_ENVS = 4
TASKS = {"square": ("print(int(input()) ** 2)", "12", "144"), "reverse": ("print(input()[::-1])", "abc", "cba")}
LIMIT_CPU_S, LIMIT_BYTES, LIMIT_S = 1, 512 << 20, 10.0

BAD_PROGRAMS = {
    "hangs": "while True: pass",
    "eats memory": "x = bytearray(1 << 40)",
    "crashes": "import os; os.abort()",
    "is no program": "def",
}
ENDS_THE_WORKER = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"


# Runs before the program, in its process.
LIMITS = f"""
import resource
resource.setrlimit(resource.RLIMIT_CPU, ({LIMIT_CPU_S}, {LIMIT_CPU_S + 1}))
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT_BYTES}, {LIMIT_BYTES}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
"""


class SandboxEnv(gymnasium.Env[str, str]):
    """One task per episode, one attempt per step, until the output is right."""

    observation_space = action_space = gymnasium.spaces.Text(10_000, min_length=0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin the task of `options["task"]`."""
        super().reset(seed=seed)
        self.task = (options or {})["task"]
        _, given, wanted = TASKS[self.task]
        return f"Write a program that reads {given!r} and prints {wanted!r}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run the program, and compare what it prints."""
        _, given, wanted = TASKS[self.task]
        command = [sys.executable, "-I", "-c", LIMITS + action]
        program = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = program.communicate(given + "\n", timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            output, _ = program.communicate()
        is_right = program.returncode == 0 and output.strip() == wanted
        return output[-1000:], float(is_right), is_right, False, {"exit_code": program.returncode}


async def solve(pool: stepmill.AsyncPool, task: str, attempts: list[str]) -> tuple[float, list[int]]:
    """Try programs in turn, as a model would; return the reward and the exit codes."""
    async with pool.lease() as env:
        await env.reset(options={"task": task})
        total, codes = 0.0, []
        for program in attempts:
            _, reward, is_over, _, info = await env.step(program)
            total += reward
            codes.append(info["exit_code"])
            if is_over:
                break
        return total, codes


async def main() -> None:
    """Play all tasks with every bad program before the right one, and beside them programs that end their worker."""
    options: Any = {"envs_per_worker": 1, "step_timeout_s": 2 * LIMIT_S}
    async with stepmill.AsyncPool(SandboxEnv, num_envs=NUM_ENVS, **options) as pool:
        good = [solve(pool, task, [*BAD_PROGRAMS.values(), TASKS[task][0]]) for task in TASKS]
        wicked = [solve(pool, task, [ENDS_THE_WORKER]) for task in TASKS]
        results = await asyncio.gather(*good, *wicked, return_exceptions=True)
    for task, result in zip([*TASKS, *TASKS], results, strict=True):
        print(f"{task:8} {result if isinstance(result, tuple) else type(result).__name__}")
    for result in results[: len(TASKS)]:
        assert isinstance(result, tuple), result
        total, codes = result
        assert total == 1.0
        assert codes[-1] == 0
        assert 0 not in codes[:-1]
    assert all(isinstance(result, stepmill.WorkerDied) for result in results[len(TASKS) :])


if __name__ == "__main__":
    asyncio.run(main())
