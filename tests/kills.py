"""Programs that are killed after a save, and go on elsewhere: `python -m tests.kills [--moments 20] [--steps 10000] [--minutes 20]`.

For each kind of env and each backend, a program plays until a random moment, saves its envs to a file and ends itself by SIGKILL. A new pool, on
the same backend or another one, is restored from the file, and its next steps are compared with those of a run that was never ended, on the serial
backend. Prints how many steps were compared and how many differ. `make soak` runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import marshal
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Generator
from typing import Any, NoReturn

import numpy as np

import stepmill
from tests.contract.test_saved_kinds import KINDS, make_pool, sample
from tests.contract.test_saving import BACKENDS, record

WORKERS: dict[str, Any] = {**dict(BACKENDS), "kernel": {}}


NUM_RUNS = 4  # undisturbed runs of each kind, which all its kills share
MAX_MOMENT = 400


def begin(kind: str, backend: str, seed: int) -> Generator[tuple[stepmill.Pool, Any, Any]]:
    """Play without end: a pool, its actions, and the batch that they led to; None for the actions of a reset."""
    pool, numbers = make_pool(kind, backend, WORKERS[backend]), np.random.default_rng(seed)
    with pool:
        if not pool.spec.agents:
            pool.single_action_space.seed(seed)
        yield pool, None, pool.reset(seed=seed)
        while True:
            actions = sample(pool, numbers)
            yield pool, actions, pool.step(actions)


def backends_of(kind: str) -> list[str]:
    return ["kernel"] if kind == "kernel" else list(dict(BACKENDS))


def digest(batch: Any) -> bytes:
    return hashlib.blake2b(marshal.dumps(record(batch), 2), digest_size=16).digest()


@functools.cache
def play_undisturbed(kind: str, seed: int, num_steps: int) -> list[tuple[Any, bytes]]:
    """Return the actions and the digest of the batch of each step; the first is that of the reset."""
    run = begin(kind, "kernel" if kind == "kernel" else "serial", seed)
    with contextlib.closing(run):
        return [(actions, digest(batch)) for _, actions, batch in itertools.islice(run, 1 + num_steps)]


def save_and_end(kind: str, backend: str, seed: int, moment: int, path: str) -> NoReturn:
    """Play until this moment, save the envs, and end this process by SIGKILL."""
    try:
        run = begin(kind, backend, seed)
        pool, _, _ = next(itertools.islice(run, moment, None))
        stepmill.save(pool, path)
        os.kill(os.getpid(), signal.SIGKILL)
    finally:
        traceback.print_exc()
        os._exit(1)


def compare(kind: str, killed: str, restored: str, seed: int, moment: int, num_steps: int) -> tuple[int, int]:
    """Return how many batches were compared, and how many differ."""
    undisturbed = play_undisturbed(kind, seed, MAX_MOMENT + num_steps)[moment : moment + 1 + num_steps]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "envs")
        pid = os.fork()  # before a pool of this process is open
        if pid == 0:
            save_and_end(kind, killed, seed, moment, path)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        with make_pool(kind, restored, WORKERS[restored]) as pool:
            num_different = int(digest(stepmill.restore(pool, path)) != undisturbed[0][1])
            for actions, expected in undisturbed[1:]:
                num_different += digest(pool.step(actions)) != expected
    return len(undisturbed), num_different


def main() -> None:
    """Compare, and exit with 1 if a batch differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), help=f"of {', '.join(KINDS)}; none is all")
    parser.add_argument("--moments", type=int, default=20, help="kills per kind and backend")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of all envs after a kill")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no comparison after this time")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    until_s = time.monotonic() + 60 * given.minutes
    total = dict.fromkeys(given.kinds, (0, 0, 0))
    cases = [(kind, backends) for kind in given.kinds for backends in enumerate(backends_of(kind))]
    for number, (kind, (place, backend)) in itertools.product(range(given.moments), cases):
        if time.monotonic() > until_s:
            break
        moments = random.Random(f"{given.seed} {number} {kind} {backend}")
        restored = backends_of(kind)[(place + number) % len(backends_of(kind))]
        seed, moment = given.seed + number % NUM_RUNS, moments.randrange(1, MAX_MOMENT)
        found = compare(kind, backend, restored, seed, moment, given.steps)
        print(
            f"{kind} {backend}, restored on {restored}, moment {number}: {found[0]} batches compared, {found[1]} differ",
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
