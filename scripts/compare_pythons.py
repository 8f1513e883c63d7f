"""Compare envs of `stepmill.foreign` with the same envs in their own interpreter, bit for bit.

    python scripts/compare_pythons.py PYTHON MODULE:FUNCTION [--kwargs JSON] [--steps 2000]

The interpreter PYTHON, which has the env's packages and no stepmill, plays the env alone. Then this interpreter plays it on each of the
backends serial, thread and process, with the same seeds and actions. Observations, rewards and ends of all steps are compared. Exits with 1 if any
differs. Envs of old Gym and of Gymnasium are taken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np

import stepmill

# It is run by the other interpreter, so its syntax is that of Python 3.6.
ALONE = r"""
import hashlib, importlib, json, sys
import numpy as np
name, function, kwargs, steps, has_seed = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "1"
env = getattr(importlib.import_module(name), function)(**kwargs)
sys.stderr.write("python %s numpy %s\n" % (sys.version.split()[0], np.__version__))

def digest(obs, reward, is_over):
    obs = np.ascontiguousarray(obs)
    parts = [obs.dtype.str, str(obs.shape), obs.tobytes(), np.float64(reward).tobytes(), str(bool(is_over))]
    return hashlib.sha256(b"|".join(p if isinstance(p, bytes) else p.encode() for p in parts)).hexdigest()

def reset(seed):
    if has_seed and hasattr(env, "seed"):
        env.seed(seed)
        found = env.reset()
    else:
        found = env.reset(seed=seed) if has_seed else env.reset()
    return found[0] if isinstance(found, tuple) else found

lines, episode, is_over = [], 0, True
for step in range(steps):
    if is_over:
        lines.append(digest(reset(episode), 0.0, False))
        episode, is_over = episode + 1, False
        continue
    results = env.step(step * 7919 % 104729 % env.action_space.n)
    obs, reward, is_over = results[0], results[1], any(results[2:-1])
    lines.append(digest(obs, reward, is_over))
print("\n".join(lines))
"""


def digest(obs: Any, reward: float, *, is_over: bool) -> str:
    """Return a text that is equal for equal results, as the other interpreter does."""
    obs = np.ascontiguousarray(obs)
    parts = [obs.dtype.str.encode(), str(obs.shape).encode(), obs.tobytes(), np.float64(reward).tobytes()]
    return hashlib.sha256(b"|".join([*parts, str(bool(is_over)).encode()])).hexdigest()


def play(make: Any, backend: Any, num_steps: int, *, has_seed: bool) -> list[str]:
    """Return a text per result of an env in a pool."""
    found, episode, is_over = [], 0, True
    with stepmill.Pool([make], backend=backend, autoreset_mode="Disabled") as pool:
        num_actions = int(pool.single_action_space.n)  # type: ignore[attr-defined]
        for step in range(num_steps):
            if is_over:
                found.append(digest(pool.reset(seed=episode if has_seed else None).obs[0], 0.0, is_over=False))
                episode, is_over = episode + 1, False
                continue
            batch = pool.step(np.array([step * 7919 % 104729 % num_actions]))
            is_over = bool(batch.terminated[0] or batch.truncated[0])
            found.append(digest(batch.obs[0], batch.reward[0], is_over=is_over))
    return found


def main() -> None:
    """Compare, and print the number of results that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("make")
    parser.add_argument("--kwargs", default="{}")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--no-seed", action="store_true", help="for envs that get their seed as an argument")
    given = parser.parse_args()
    command = [
        given.python,
        "-c",
        ALONE,
        *given.make.split(":"),
        given.kwargs,
        str(given.steps),
        str(int(not given.no_seed)),
    ]
    wanted = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.split()
    make = partial(stepmill.foreign, given.make, python=given.python, **json.loads(given.kwargs))
    num_different = 0
    for backend in ("serial", "thread", "process"):
        found = play(make(), backend, given.steps, has_seed=not given.no_seed)
        different = sum(one != other for one, other in zip(found, wanted, strict=True))
        num_different += different
        print(f"{given.make} {given.kwargs} on {backend}: {len(found)} results, {different} differ")
    sys.exit(num_different != 0)


if __name__ == "__main__":
    main()
