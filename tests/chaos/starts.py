"""Interrupts the construction of pools at random moments, and checks that nothing leaks and nothing else is closed."""

from __future__ import annotations

import ctypes
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tests.chaos.fault_injection import Interrupter
from tests.chaos.kinds import Kind
from tests.chaos.report import ChaosReport
from tests.chaos.rounds import make_pool
from tests.harness.interrupts import find_damage
from tests.harness.leaks import Footprint

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


class StartRound:
    """Makes pools of one kind, one after another, and interrupts the construction of most."""

    def __init__(self, report: ChaosReport, rng: random.Random, kind: Kind, *, context: str) -> None:
        self._report = report
        self._rng = rng
        self._kind = kind
        self._context = context

    def run(self, seconds: float) -> None:
        """Make pools for this long."""
        until = time.monotonic() + seconds
        with tempfile.TemporaryDirectory(prefix="stepmill-chaos-") as folder, _adopted_orphans():
            begin = time.monotonic()
            self._use(folder)
            usual_s = time.monotonic() - begin
            before = Footprint.take()
            with Interrupter(self._rng) as interrupter:
                while time.monotonic() < until:
                    self._interrupt(folder, interrupter, usual_s)
                    self._check(before)
            self._use(folder)

    def _use(self, folder: str) -> None:
        """Make a pool without an interrupt, and reset it."""
        with make_pool(self._kind, self._context, folder) as pool:
            identities = pool.reset(seed=self._rng.randrange(2**31)).obs[:, 0]
            if not np.array_equal(identities, np.arange(pool.num_envs)):
                self._report.complain(
                    f"the first reset of a pool that was made after interrupted ones returned the identities {identities.tolist()}"
                )

    def _interrupt(self, folder: str, interrupter: Interrupter, within_s: float) -> None:
        pools = []
        try:
            with interrupter.interrupt(within_s):
                pools.append(make_pool(self._kind, self._context, folder))
        except KeyboardInterrupt:
            self._report.inflicted["Ctrl-C in a construction"] += 1
        for pool in pools:  # the construction ended before the signal came
            pool.close()

    def _check(self, before: Footprint) -> None:
        """Report what a construction has leaked, and descriptors of the program that it has closed."""
        damage = find_damage(before)
        if damage:
            self._report.complain(f"an interrupted construction has left or closed {damage}")


@contextmanager
def _adopted_orphans() -> Iterator[None]:
    """Make this process the parent of descendants whose own parent dies, so that all of them are found."""
    prctl = ctypes.CDLL(None).prctl
    was_adopting = ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was_adopting))
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, was_adopting.value)
