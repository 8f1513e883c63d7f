"""Injects faults into a running pool: signals, traps, breaking actions and Ctrl-C; and makes calls, which must still work."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from stepmill.pool.pool import Pool
from stepmill.spec.errors import StepmillError
from tests.chaos.envs import Traps
from tests.chaos.kinds import MAX_FAILED_BUILDS, Kind
from tests.chaos.report import ChaosReport
from tests.pool_model.envs import HANG, IDENTITY, KILL, LEVEL, ONCE, RAISE, SCRIBBLE, SEED, UNREADABLE
from tests.pool_model.records import Env
from tests.pool_model.results import named_in, require

if TYPE_CHECKING:
    from typing_extensions import Self

    from tests.chaos.storm import StormCalls

DELAYS_S = (0.0, 0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.015)
_NAMES = {KILL: "killed itself", RAISE: "raised", HANG: "hung", SCRIBBLE: "scribbled"}
_WEIGHTS = {KILL: 5, RAISE: 5, HANG: 1}


class FaultInjector:
    """Injects faults and calls envs, at random."""

    def __init__(self, kind: Kind, calls: StormCalls, report: ChaosReport, rng: random.Random, folder: str) -> None:
        self._kind = kind
        self._calls, self._model = calls, calls.model
        self._report = report
        self._rng = rng
        self._traps = Traps(folder)
        self._trapped: dict[tuple[str, int], int] = {}  # number of the loop in which a trap was set last
        self._loops = 0
        self._hung_at = -1000

    def actions(self, num_rows: int) -> list[int]:
        """Draw actions; at most one of them makes its env fail."""
        actions = [self._rng.randrange(10**6) * ONCE for _ in range(num_rows)]
        if self._kind.has_unreadable:
            actions = [action + UNREADABLE * (self._rng.random() < 0.1) for action in actions]
        if self._kind.fatal and self._rng.random() < 0.04:
            how = self._rng.choices(self._kind.fatal, [_WEIGHTS[how] for how in self._kind.fatal])[0]
            actions[self._rng.randrange(num_rows)] = how
            self._report.inflicted[_NAMES[how]] += 1
        return actions

    def inject(self, pool: Pool) -> None:
        """Signal workers or set traps, sometimes."""
        self._loops += 1
        if self._kind.has_processes and self._rng.random() < 0.02:
            self._signal(pool)
        kind = self._kind
        traps = (("step", kind.steps), ("reset", kind.resets), ("call", kind.calls), ("build", kind.builds))
        for where, ways in traps:
            if ways and self._rng.random() < 0.02:
                self._set_trap(where, self._rng.choice(ways))

    def _signal(self, pool: Pool) -> None:
        number = self._rng.choices([signal.SIGKILL, signal.SIGSTOP], [4, 1])[0]
        if number is signal.SIGSTOP and not self._may_hang():
            return
        self._send(pool, number)

    def kill_one(self, pool: Pool) -> None:
        """Kill one or two workers."""
        if self._kind.has_processes:
            self._send(pool, signal.SIGKILL)

    def _send(self, pool: Pool, number: signal.Signals) -> None:
        workers = self._rng.sample(pool.stats().workers, self._rng.choice([1, 1, 1, 2]))
        for worker in workers:
            try:
                os.kill(worker.pid, number)
            except ProcessLookupError:
                continue  # it is dead already
            self._report.inflicted[number.name] += 1

    def _may_hang(self) -> bool:
        """Whether something may hang now. Under replay an env that hangs twice in one step is not replayed again."""
        if self._kind.is_replayed and self._loops - self._hung_at < 100:
            return False
        self._hung_at = self._loops
        return True

    def _set_trap(self, where: str, how: int) -> None:
        identity = self._rng.randrange(len(self._model.objects))
        # One at a time: a replay does not repair a step that fails repeatedly.
        if self._loops - self._trapped.get((where, identity), -1000) < 100:
            return
        if how == HANG and not self._may_hang():
            return
        self._trapped[where, identity] = self._loops
        self._traps.set(where, identity, how, self._rng.randint(1, MAX_FAILED_BUILDS) if where == "build" else 1)
        self._report.inflicted[f"{_NAMES[how]} in {where}"] += 1

    # ---- calls --------------------------------------------------------------------------------------------------

    def call(self, pool: Pool) -> None:
        """Call, render, or set an attribute of envs."""
        if self._kind.rows_each > 1 or self._rng.random() > 0.03:
            return
        what = self._rng.choice([self._bump, self._bump, self._stumble, self._render, self._set_level])
        self._report.calls += 1
        try:
            what(pool, self._model.envs[self._rng.randrange(self._kind.num_envs)])
        except StepmillError as error:
            self._report.calls_failed += 1
            self._calls.adopt({})
            self._model.named |= named_in(error)

    def _bump(self, pool: Pool, env: Env) -> None:
        try:
            identity, bumps = pool.call("bump", env_ids=[env.env_id])[0]
        except StepmillError:
            self._model.record_failed_bump(env)
            raise
        require(self._model.may_be(env, identity), f"a call of env {env.env_id} was answered by object {identity}")
        self._model.record_bump(identity, bumps)

    def _stumble(self, pool: Pool, env: Env) -> None:
        self._model.record_failed_bump(env)
        pool.call("stumble", env_ids=[env.env_id])
        require(False, f"a call of env {env.env_id} that always raises has returned")

    def _render(self, pool: Pool, env: Env) -> None:
        seen = tuple(pool.render(env_ids=[env.env_id])[0].tolist())
        (row,) = env.rows
        is_same = seen[:LEVEL] == row.place.obs[:LEVEL]
        is_known = env.command is None and not row.is_over
        is_early = seen[SEED] == -1  # rebuilt, and not replayed yet
        require(
            (is_same or is_early or not is_known) and self._model.may_be(env, seen[IDENTITY]),
            f"env {env.env_id} was at {row.place.obs}, and rendered {seen}",
        )

    def _set_level(self, pool: Pool, _: Env) -> None:
        level = self._rng.randrange(1000)
        try:
            pool.set_attr("level", level)
        except StepmillError:
            self._model.record_level(level, is_certain=False)
            raise
        self._model.record_level(level, is_certain=True)


class Interrupter:
    """Sends SIGINT to this process; its handler raises KeyboardInterrupt only in code of the engine. For the main thread."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._is_armed = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        while self._is_armed and frame is not None:
            path = frame.f_code.co_filename
            if "/stepmill/" in path and "/stepmill/testing/" not in path:
                raise KeyboardInterrupt
            frame = frame.f_back

    @contextmanager
    def interrupt(self, within_s: float | None = None) -> Iterator[None]:
        """Interrupt the block at a random time, at most `within_s` seconds or a few milliseconds after it begins."""
        longest_s = 2 * self._rng.choice(DELAYS_S) if within_s is None else within_s
        delay_s = longest_s * self._rng.random()
        thread = threading.Thread(target=_interrupt, args=(delay_s,), name="stepmill-chaos-ctrl-c")
        thread.start()
        self._is_armed = True
        try:
            yield
        finally:
            self._is_armed = False
            thread.join()


def _interrupt(delay_s: float) -> None:
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGINT)
