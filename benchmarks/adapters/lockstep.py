"""What an engine could reach in lockstep: `ceiling/lockstep.c` with the measured times of the envs and of the learner.

Options: `wait`, "futex", "yield" or "pinned", or "none": no program runs, and a step is computed as the learner's time and that of the
slower half of the envs, so that the number does not depend on what else the machine does; `is_caller_used`, whether the learner runs the first half of the envs itself.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.adapters.bare import Engine as Bare
from benchmarks.adapters.base import Round

SOURCE = Path(__file__).parent.parent / "ceiling" / "lockstep.c"
NUM_SHARES = 2
MEASURED_S = 1.0
MIN_STEPS, MAX_STEPS = 200, 20_000
CALLS = 10_000


class Engine(Bare):
    """Measures the envs at the start; each round is a run of the program."""

    def start(self) -> None:
        super().start()
        program = Path(tempfile.mkdtemp(prefix="lockstep-", dir=Path.cwd()), "lockstep")  # the driver's own folder
        subprocess.run([os.environ.get("CC", "cc"), "-O2", "-o", program, SOURCE], check=True)
        self._learner_ns = self._measure_learner_ns()
        self._durations = self._measure_shares()
        wait, caller = self.job.options["wait"], str(int(self.job.options["is_caller_used"]))
        self._command = [str(program), wait, caller]

    def _measure_learner_ns(self) -> float:
        """Return the nanoseconds that the program itself needs for a step: it takes actions and reads an element."""
        obs, _ = self.envs[0].reset()
        start = time.thread_time_ns()
        for _ in range(CALLS):
            self.next_actions()
            obs.item(0)
        return (time.thread_time_ns() - start) / CALLS

    def _measure_shares(self) -> str:
        """Return the nanoseconds of each half of the envs, a line for each step, of the thread's CPU time."""
        clock = time.thread_time_ns
        clock_ns = statistics.median(-clock() + clock() for _ in range(CALLS))
        share = self.num_envs // NUM_SHARES
        parts = [range(first, first + share) for first in range(0, self.num_envs, share)]
        lines: list[str] = []
        end = time.perf_counter() + MEASURED_S
        while len(lines) < MIN_STEPS or (time.perf_counter() < end and len(lines) < MAX_STEPS):
            actions = self.next_actions()
            taken = [self._step_share(part, actions) - clock_ns for part in parts]
            lines.append(" ".join(str(max(0, ns)) for ns in taken))
        return "\n".join(lines)

    def _step_share(self, part: range, actions: Any) -> int:
        """Step some envs, and return the nanoseconds."""
        envs = [(self.envs[i], actions[i]) for i in part]
        start = time.thread_time_ns()
        for env, action in envs:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        return time.thread_time_ns() - start

    def run(self, seconds: float) -> Round:
        if self.job.options["wait"] == "none":
            slowest_ns = [max(map(float, line.split())) for line in self._durations.splitlines()]
            return Round(self.num_envs * len(slowest_ns), 1e-9 * (sum(slowest_ns) + self._learner_ns * len(slowest_ns)))
        command = [*self._command, str(seconds), str(self._learner_ns), str(NUM_SHARES)]
        done = subprocess.run(command, input=self._durations, capture_output=True, text=True, check=True)
        steps, wall_s = done.stdout.split()
        return Round(int(steps) * self.num_envs, float(wall_s))
