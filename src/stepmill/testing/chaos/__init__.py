"""Breaks the workers of pools at random, and checks every delivered transition against what a counting env must say.

`python -m stepmill.testing.chaos --seconds 60` does it from the command line; its exit status is 1 if anything was wrong.
Each kind of round (`kinds.py`) comes by turns, with `step` and with `send` and `recv`, under every start method.
"""

from __future__ import annotations

import itertools
import os
import random
import time

from stepmill.testing.chaos.envs import HANG, KILL, RAISE, ChaosEnv
from stepmill.testing.chaos.kinds import KINDS
from stepmill.testing.chaos.report import ChaosReport
from stepmill.testing.chaos.rounds import Round

__all__ = ["HANG", "KILL", "RAISE", "ChaosEnv", "ChaosReport", "run_chaos"]

CONTEXTS = ("fork", "forkserver", "spawn")
NUM_FORMS = 2 * len(KINDS)  # each kind in sync and async


def run_chaos(seconds: float, seed: int = 0, *, round_s: float = 10.0) -> ChaosReport:
    """Break workers of pools of every kind by turns, each pool for up to `round_s` seconds, and report.

    The process must be the only one to signal those workers; what it breaks is drawn from `seed`, when it strikes depends
    on the machine.
    """
    report = ChaosReport(seed)
    rng = random.Random(seed)
    begin = time.monotonic()
    held: int | None = None
    for number in itertools.count():
        now = time.monotonic()
        if now >= begin + seconds:
            break
        kind, is_sync = KINDS[number // 2 % len(KINDS)], number % 2 == 0
        context = CONTEXTS[number // NUM_FORMS % len(CONTEXTS)]
        report.now = f"round {number}, {kind.name}, {'sync' if is_sync else 'async'}, {context}"
        report.rounds[kind.name] += 1
        # What one round takes too long the others go without, so that each has its turn.
        length_s = min(round_s, (begin + seconds - now) / max(NUM_FORMS - number, 1))
        Round(report, rng, kind, is_sync=is_sync, context=context).run(min(now + length_s, begin + seconds))
        num_fds = len(os.listdir("/proc/self/fd"))
        held = num_fds if held is None else held
        if num_fds > held:
            report.complain(f"{num_fds - held} descriptors are left")
    report.seconds = time.monotonic() - begin
    return report
