"""Programs that are killed after a save, and go on elsewhere: `python -m tests.kills [--moments 20] [--steps 10000] [--minutes 20]`.

For each kind of env and each backend, a program plays until a random moment, saves its envs to a file and ends itself by SIGKILL. A new pool is
restored from the file, and its next steps are compared with those of a pool that was never ended. Prints how many steps were compared and how
many differ. `make soak` runs it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

import stepmill
from tests.contract.test_saved_kinds import KINDS, make_pool, record, sample
from tests.contract.test_saving import BACKENDS

WORKERS: dict[str, Any] = {**dict(BACKENDS), "kernel": {}}


def begin(kind: str, backend: str, seed: int, num_steps: int) -> tuple[stepmill.Pool, np.random.Generator, Any]:
    """Return a pool after this many steps, the generator of its actions, and the newest batch."""
    pool, numbers = make_pool(kind, backend, WORKERS[backend]), np.random.default_rng(seed)
    if not pool.spec.agents:
        pool.single_action_space.seed(seed)
    batch = pool.reset(seed=seed)
    for _ in range(num_steps):
        batch = pool.step(sample(pool, numbers))
    return pool, numbers, batch


def compare(kind: str, backend: str, seed: int, moment: int, num_steps: int) -> tuple[int, int]:
    """Return how many batches were compared, and how many differ."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "envs")
        command = [sys.executable, "-m", "tests.kills", "--killed", kind, backend, str(seed), str(moment), path]
        assert subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
        pool, numbers, newest = begin(kind, backend, seed, moment)
        other = make_pool(kind, backend, WORKERS[backend])
        with pool, other:
            num_different = int(record(stepmill.restore(other, path)) != record(newest))
            for _ in range(num_steps):
                actions = sample(pool, numbers)
                num_different += record(other.step(actions)) != record(pool.step(actions))
    return 1 + num_steps, num_different


def main() -> None:
    """Compare, and exit with 1 if a batch differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), help=f"of {', '.join(KINDS)}; none is all")
    parser.add_argument("--killed", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--moments", type=int, default=20, help="kills per kind and backend")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of all envs after a kill")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no comparison after this time")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.killed:
        kind, backend, seed, moment, path = given.killed
        pool, _, _ = begin(kind, backend, int(seed), int(moment))
        stepmill.save(pool, path)
        os.kill(os.getpid(), signal.SIGKILL)
    until_s = time.monotonic() + 60 * given.minutes
    total = dict.fromkeys(given.kinds, (0, 0, 0))
    cases = [
        (kind, backend) for kind in given.kinds for backend in (["kernel"] if kind == "kernel" else dict(BACKENDS))
    ]
    for number, (kind, backend) in itertools.product(range(given.moments), cases):
        if time.monotonic() > until_s:
            break
        moments = random.Random(f"{given.seed} {number} {kind} {backend}")
        found = compare(kind, backend, moments.randrange(1000), moments.randrange(1, 400), given.steps)
        print(
            f"{kind} {backend} moment {number}: {found[0]} batches compared, {found[1]} differ",
            file=sys.stderr,
            flush=True,
        )
        kills, compared, different = total[kind]
        total[kind] = kills + 1, compared + found[0], different + found[1]
    for kind, (kills, compared, different) in total.items():
        print(f"{kind:10} {kills:5} kills {compared:10,} batches of all envs compared {different:6} differ")
    sys.exit(any(different for _, _, different in total.values()))


if __name__ == "__main__":
    main()
