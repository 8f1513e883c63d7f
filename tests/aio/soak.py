"""Storms of every kind, one after the other, each ended by Ctrl-C at a random moment; the sum of what happened, or what went wrong.

    python -m tests.aio.soak [--seconds 3600] [--seed 0]

Storms are of tests/aio/storm.py: under each fault policy, of blocking envs and coroutine envs, with a free and with a full event loop.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

MIN_STORM_S, MAX_STORM_S, MAX_END_S = 2.0, 40.0, 60.0
KINDS = list(itertools.product(("raise", "truncate", "replay"), ((), ("--coroutines",)), ((), ("--full-loop",))))


def run_storm(arguments: list[str], seconds: float) -> dict[str, int]:
    """Run one storm, press Ctrl-C after `seconds`, and return what it counted."""
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "tests.aio.storm", *arguments]
    # A process group of its own: as in a terminal, Ctrl-C reaches the workers, too.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=MAX_END_S)
    if process.returncode != 0:
        raise SystemExit(f"{arguments} failed after {seconds:.1f} s: {process.returncode}\n{output}")
    counts: dict[str, int] = json.loads(output.splitlines()[-1])
    return counts


def check(on_fault: str, counts: dict[str, int]) -> None:
    """Assert that faults were seen in the form that the policy promises, and no other, and that Ctrl-C arrived."""
    errors = {name for name in counts if name[0].isupper()}
    assert errors <= ({"EnvError", "WorkerDied", "EnvTimeout"} if on_fault == "raise" else set()), counts
    reasons = sum(counts[name] for name in counts if name.startswith("not replayed: "))
    assert on_fault == "truncate" or counts.get("marked", 0) == reasons, counts
    assert counts["interrupted"] == 1, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # `nohup` and `&` of a shell have it ignored, which storms would inherit
    rng, total = random.Random(given.seed), Counter[str]()
    deadline = time.monotonic() + given.seconds
    for number, (on_fault, envs, loop) in enumerate(itertools.cycle(KINDS)):
        if time.monotonic() >= deadline:
            break
        seconds = rng.uniform(MIN_STORM_S, MAX_STORM_S)
        arguments = [
            "--on-fault",
            on_fault,
            *envs,
            *loop,
            "--seconds",
            str(2 * MAX_STORM_S),
            "--seed",
            str(given.seed + number),
        ]
        counts = run_storm(arguments, seconds)
        check(on_fault, counts)
        total.update(counts)
        print(f"{seconds:4.1f} s of {on_fault} {' '.join(envs + loop)}: {counts}", flush=True)
    print("sum", dict(total))
    if given.seconds >= 600.0:  # long enough for each kind of fault, many times
        assert total["deaths"] > 100
        assert total["episodes"] > 1000
        assert total["marked"] > 100
        assert {name for name in total if name[0].isupper()} == {"EnvError", "WorkerDied", "EnvTimeout"}


if __name__ == "__main__":
    main()
