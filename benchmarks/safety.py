"""What safety costs when nothing fails: `python -m benchmarks.safety`.

Section 1 runs each engine in its own process, which therefore has its own memory layout: two runs of the same pool differ there
by a tenth. Here all pools of a size live in one process and take rounds in turn, and they are rebuilt a few times. Each round is
compared with the adjacent round of the plain pool. A second plain pool shows the noise floor.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from typing import Any

import stepmill
from benchmarks.envs import action_ring, env_fns

SIZES = (2, 8, 32, 128)
PLAIN = "plain"
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "plain again": {},
    "deadlines": {"step_timeout_s": 10.0, "reset_timeout_s": 60.0},
    "replay": {"on_fault": "replay", "seeding": "per_episode"},
}
STEPS_PER_CLOCK_READ = 20


def time_round(envs: stepmill.VectorEnv[Any, Any], actions: list[Any], seconds: float) -> float:
    """Return the microseconds per step, measured for this long."""
    clock = time.perf_counter
    steps = 0
    start = now = clock()
    while now - start < seconds:
        for turn in range(STEPS_PER_CLOCK_READ):
            envs.step(actions[turn])
        steps += STEPS_PER_CLOCK_READ
        now = clock()
    return (now - start) / steps * 1e6


def measure(num_envs: int, builds: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return, by variant, the microseconds per step of each round; the rounds i of all variants were adjacent in time."""
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    actions = action_ring("noop", num_envs)
    for build in range(builds):
        turn = build % len(VARIANTS)
        order = [*list(VARIANTS)[turn:], *list(VARIANTS)[:turn]]
        with contextlib.ExitStack() as stack:
            pools = {name: stack.enter_context(contextlib.closing(_build(num_envs, VARIANTS[name]))) for name in order}
            for name in order * rounds:
                times[name].append(time_round(pools[name], actions, seconds))
    return times


def _build(num_envs: int, options: dict[str, Any]) -> stepmill.VectorEnv[Any, Any]:
    chosen = stepmill.PoolOptions(**options)
    envs = stepmill.VectorEnv(env_fns("noop", num_envs), backend="process", num_workers=2, options=chosen)
    envs.reset(seed=0)
    return envs


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--builds", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.15)
    chosen = parser.parse_args()
    lines = [f"| us per step, 2 workers | {' | '.join(VARIANTS)} |", "|---" * (1 + len(VARIANTS)) + "|"]
    for num_envs in SIZES:
        times = measure(num_envs, chosen.builds, chosen.rounds, chosen.seconds)
        cells = [f"{statistics.median(times[PLAIN]):.1f}"]
        for name in list(VARIANTS)[1:]:
            speeds = [plain / own for plain, own in zip(times[PLAIN], times[name], strict=True)]
            cells.append(f"{statistics.median(times[name]):.1f} ({statistics.median(speeds):.2f} of the speed)")
        lines.append(f"| no-op env, n={num_envs} | {' | '.join(cells)} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
