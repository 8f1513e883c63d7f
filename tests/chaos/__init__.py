"""Injects random faults into pools, and checks every transition that they deliver.

`python -m tests.chaos --seconds 60` runs it from the command line; its exit status is 1 if anything was wrong.
The kinds of rounds take turns, alternately with `step` and with `send` and `recv`, under every start method. They cover all
autoreset modes and fault policies, envs of one row and of several, spares, episode budgets, and all backends.

    kinds            the kinds of rounds: pool options, and the faults to inject
    envs             envs that count their steps, and fail on demand
    rounds           one pool, driven by `step` or by `send` and `recv` while faults are injected
    starts           pools whose construction is interrupted by Ctrl-C
    fault_injection  signals, traps, breaking actions, calls and Ctrl-C
    storm            the calls of a round; `tests.pool_model` checks them
    mortal_envs      envs that end their process at a chosen command, and a learner that checks them
    report           counters and complaints of a run
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import time
from collections.abc import Callable, Sequence

from stepmill.backends.starter_client import STARTERS
from tests.chaos.envs import HANG, KILL, RAISE, ChaosEnv
from tests.chaos.kinds import KINDS, Kind
from tests.chaos.report import ChaosReport
from tests.chaos.rounds import Round
from tests.chaos.starts import StartRound
from tests.harness.interrupts import wait_for_threads

__all__ = ["HANG", "KILL", "RAISE", "ChaosEnv", "ChaosReport", "run_chaos"]

CONTEXTS = ("fork", "forkserver", "spawn")
MAX_GROWTH_BYTES = 16 << 20
MIN_ROUND_S = 0.2  # even if earlier rounds have used up the time


def run_chaos(
    seconds: float,
    seed: int = 0,
    *,
    round_s: float = 10.0,
    kinds: Sequence[Kind] = KINDS,
    on_pass: Callable[[ChaosReport], object] = lambda report: None,
    on_round: Callable[[ChaosReport], object] = lambda report: None,
) -> ChaosReport:
    """Inject faults into pools of every kind in turn, each pool for up to `round_s` seconds, and return a report.

    No other process may signal the workers. The faults are drawn from `seed`; their timing depends on the machine.
    `on_pass` is called with the report after each pass over all kinds, and `on_round` before each round.
    """
    report = ChaosReport(seed)
    rng = random.Random(seed)
    begin = time.monotonic()
    resources = ResourceCheck()
    for number in itertools.count():
        now = time.monotonic()
        report.seconds = now - begin
        if number % len(kinds) == 0 and number != 0:
            resources.compare(report, number // len(kinds) % 2)
            on_pass(report)
        if now >= begin + seconds and number >= len(kinds):
            break
        turn, place = divmod(number, len(kinds))
        kind, is_sync = kinds[place], (turn + place) % 2 == 0
        context = CONTEXTS[turn // 2 % len(CONTEXTS)]
        report.now = f"round {number}, {kind.name}, {'sync' if is_sync else 'async'}, {context}"
        report.rounds[kind.name] += 1
        on_round(report)
        # If one round takes too long, the rounds after it are shorter, so that each kind has its turn.
        length_s = min(round_s, max((begin + seconds - now) / max(len(kinds) - number, 1), MIN_ROUND_S))
        if kind.interrupts_starts:
            StartRound(report, rng, kind, context=context).run(length_s)
        else:
            Round(report, rng, kind, is_sync=is_sync, context=context).run(length_s)
    return report


class ResourceCheck:
    """Checks that memory, descriptors and threads of this process do not grow from pass to pass."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, int, int]] = {}

    def compare(self, report: ChaosReport, parity: int) -> None:
        """Report what has grown since the first pass of this parity. Call it while no pool exists."""
        STARTERS.close()  # some rounds have a starter, with two descriptors, and others have none
        wait_for_threads()
        gc.collect()  # an interrupt may leave a cycle of a frame and its exception, which holds what it used until the next collection
        with open("/proc/self/statm") as file:
            num_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        now = num_bytes, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        report.held_mib.append(num_bytes >> 20)
        first = self._first.setdefault(parity, now)
        limits = (first[0] + MAX_GROWTH_BYTES, first[1], first[2])
        for what, count, limit in zip(("bytes of memory", "descriptors", "threads"), now, limits, strict=True):
            if count > limit:
                report.complain(f"{count} {what} are held between two rounds, at most {limit} were expected")
