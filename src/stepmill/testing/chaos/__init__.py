"""Breaks the workers of pools at random, and checks every delivered transition against what a counting env must say.

`python -m stepmill.testing.chaos --seconds 60` does it from the command line; its exit status is 1 if anything was wrong.
Each kind of round (`kinds.py`) comes by turns, the one time with `step`, the next with `send` and `recv`, under every
start method: all three autoreset modes and policies, envs of one row and of several, spares, budgets of episodes, and
envs in processes, in threads and in line.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Sequence

from stepmill.testing.chaos.envs import HANG, KILL, RAISE, ChaosEnv
from stepmill.testing.chaos.kinds import KINDS, Kind
from stepmill.testing.chaos.report import ChaosReport
from stepmill.testing.chaos.rounds import Round

__all__ = ["HANG", "KILL", "RAISE", "ChaosEnv", "ChaosReport", "run_chaos"]

CONTEXTS = ("fork", "forkserver", "spawn")
MAX_GROWTH_BYTES = 16 << 20
MIN_ROUND_S = 0.2  # of a turn that a slow machine has left no time for


def run_chaos(
    seconds: float,
    seed: int = 0,
    *,
    round_s: float = 10.0,
    kinds: Sequence[Kind] = KINDS,
    tell: Callable[[ChaosReport], object] = lambda report: None,
) -> ChaosReport:
    """Break workers of pools of every kind by turns, each pool for up to `round_s` seconds, and report.

    The process must be the only one to signal those workers; what it breaks is drawn from `seed`, when it strikes depends
    on the machine. `tell` hears of the report when each kind has had its turn.
    """
    report = ChaosReport(seed)
    rng = random.Random(seed)
    begin = time.monotonic()
    held = Holdings()
    for number in itertools.count():
        now = time.monotonic()
        report.seconds = now - begin
        if number % len(kinds) == 0 and number != 0:
            held.compare(report, number // len(kinds) % 2)
            tell(report)
        if now >= begin + seconds and number >= len(kinds):
            break
        turn, place = divmod(number, len(kinds))
        kind, is_sync = kinds[place], (turn + place) % 2 == 0
        context = CONTEXTS[turn // 2 % len(CONTEXTS)]
        report.now = f"round {number}, {kind.name}, {'sync' if is_sync else 'async'}, {context}"
        report.rounds[kind.name] += 1
        # What one round takes too long the others go without, so that each has its turn.
        length_s = min(round_s, max((begin + seconds - now) / max(len(kinds) - number, 1), MIN_ROUND_S))
        Round(report, rng, kind, is_sync=is_sync, context=context).run(length_s)
    return report


class Holdings:
    """What this process holds between two rounds, when no pool is there: it must not grow from pass to pass."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, int, int]] = {}

    def compare(self, report: ChaosReport, form: int) -> None:
        """Complain of what has grown since the first time after turns of this form."""
        with open("/proc/self/statm") as file:
            num_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        now = num_bytes, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        report.held_mib.append(num_bytes >> 20)
        first = self._first.setdefault(form, now)
        limits = (first[0] + MAX_GROWTH_BYTES, first[1], first[2])
        for what, count, limit in zip(("bytes of memory", "descriptors", "threads"), now, limits, strict=True):
            if count > limit:
                report.complain(f"{count} {what} are held between two rounds, at most {limit} were expected")
