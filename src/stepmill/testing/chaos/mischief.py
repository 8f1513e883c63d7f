"""What is done to a pool while it works: signals, traps, actions that break; and calls, which must go on all the same."""

from __future__ import annotations

import os
import random
import signal

from stepmill.pool.pool import Pool
from stepmill.spec.errors import StepmillError
from stepmill.testing.chaos.books import Books
from stepmill.testing.chaos.envs import CLOCK, HANG, IDENTITY, KILL, RAISE, SCRIBBLE, TAG, Traps
from stepmill.testing.chaos.kinds import MAX_FAILED_BUILDS, Kind
from stepmill.testing.chaos.report import ChaosReport
from stepmill.testing.chaos.results import named_in

_NAMES = {KILL: "killed itself", RAISE: "raised", HANG: "hung", SCRIBBLE: "scribbled"}
_WEIGHTS = {KILL: 5, RAISE: 5, HANG: 1}


class Mischief:
    """Breaks things, and calls envs, now and then."""

    def __init__(self, kind: Kind, books: Books, report: ChaosReport, rng: random.Random, folder: str) -> None:
        self._kind = kind
        self._books = books
        self._report = report
        self._rng = rng
        self._traps = Traps(folder)
        self._trapped: dict[tuple[str, int], int] = {}  # when a trap was laid last, in loops
        self._loops = 0
        self._hung_at = -1000

    def actions(self, num_rows: int) -> list[int]:
        """Draw actions, of which one may break its env."""
        actions = [self._rng.randrange(10) for _ in range(num_rows)]
        if self._kind.fatal and self._rng.random() < 0.04:
            action = self._rng.choices(self._kind.fatal, [_WEIGHTS[how] for how in self._kind.fatal])[0]
            actions[self._rng.randrange(num_rows)] = action
            self._report.inflicted[_NAMES[action]] += 1
        return actions

    def strike(self, pool: Pool) -> None:
        """Signal workers, or lay a trap."""
        self._loops += 1
        if self._kind.backend == "process" and self._rng.random() < 0.02:
            self._signal(pool)
        kind = self._kind
        traps = (("step", kind.steps), ("reset", kind.resets), ("call", kind.calls), ("build", kind.builds))
        for where, ways in traps:
            if ways and self._rng.random() < 0.02:
                self._lay(where, self._rng.choice(ways))

    def _signal(self, pool: Pool) -> None:
        number = self._rng.choices([signal.SIGKILL, signal.SIGSTOP], [4, 1])[0]
        if number is signal.SIGSTOP and not self._may_hang():
            return
        self._send(pool, number)

    def kill_one(self, pool: Pool) -> None:
        """Kill a worker or two."""
        if self._kind.backend == "process":
            self._send(pool, signal.SIGKILL)

    def _send(self, pool: Pool, number: signal.Signals) -> None:
        victims = self._rng.sample(pool.stats()["workers"], self._rng.choice([1, 1, 1, 2]))
        for victim in victims:
            try:
                os.kill(victim["pid"], number)
            except ProcessLookupError:
                continue  # it is dead already
            self._report.inflicted[number.name] += 1

    def _may_hang(self) -> bool:
        """Whether something may hang now. Who hangs twice in the same step is not played a third time, whatever held it up."""
        if self._kind.is_replayed and self._loops - self._hung_at < 100:
            return False
        self._hung_at = self._loops
        return True

    def _lay(self, where: str, how: int) -> None:
        identity = self._rng.randrange(len(self._books.memories))
        # One at a time: what fails at the same place again and again is not mended by playing it again.
        if self._loops - self._trapped.get((where, identity), -1000) < 100:
            return
        if how == HANG and not self._may_hang():
            return
        self._trapped[where, identity] = self._loops
        self._traps.lay(where, identity, how, self._rng.randint(1, MAX_FAILED_BUILDS) if where == "build" else 1)
        self._report.inflicted[f"{_NAMES[how]} in {where}"] += 1

    # ---- calls --------------------------------------------------------------------------------------------------

    def call(self, pool: Pool) -> None:
        """Call, render, or set an attribute of envs."""
        if self._kind.rows_each > 1 or self._rng.random() > 0.03:
            return
        what = self._rng.choice([self._bump, self._bump, self._stumble, self._render, self._set_level])
        self._report.calls += 1
        try:
            complaint = what(pool, self._rng.randrange(self._kind.num_envs))
        except StepmillError as error:
            self._report.calls_failed += 1
            self._books.told |= named_in(error)
            return
        if complaint is not None:
            self._report.complain(complaint)

    def _bump(self, pool: Pool, env_id: int) -> str | None:
        try:
            identity, bumps = pool.call("bump", env_ids=[env_id])[0]
        except StepmillError:
            self._books.doubt_bump(env_id)
            raise
        if not self._books.check_identity(env_id, identity):
            return f"a call of env {env_id} was answered by object {identity}"
        return self._books.note_bump(identity, bumps)

    def _stumble(self, pool: Pool, env_id: int) -> str | None:
        self._books.doubt_bump(env_id)
        pool.call("stumble", env_ids=[env_id])
        return f"a call of env {env_id} that fails has not"

    def _render(self, pool: Pool, env_id: int) -> str | None:
        seen = pool.render(env_ids=[env_id])[0]
        book = self._books.rows[env_id]
        is_same = seen[: CLOCK + 1].tolist() == book.obs[: CLOCK + 1].tolist()
        is_known = book.action is None and not book.is_ended
        is_early = seen[TAG] == -1  # built anew, and not played again yet
        if (is_same or is_early or not is_known) and self._books.check_identity(env_id, int(seen[IDENTITY])):
            return None
        return f"env {env_id} was at {book.obs.tolist()}, and rendered {seen.tolist()}"

    def _set_level(self, pool: Pool, _: int) -> str | None:
        level = self._rng.randrange(1000)
        try:
            pool.set_attr("level", level)
        except StepmillError:
            self._books.note_level(level, is_certain=False)
            raise
        self._books.note_level(level, is_certain=True)
        return None
