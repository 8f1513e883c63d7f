"""Moves that end or restart workers, and those that keep the state of envs."""

from __future__ import annotations

import os
import signal
from typing import Any

import stepmill
from stepmill.spec.errors import BusyEnvError
from tests.pool_model.calls import Calls
from tests.pool_model.envs import KILL
from tests.pool_model.records import FAULTED, IDLE
from tests.pool_model.results import require


class Workers:
    """Kills and revives workers; saves and restores kernel envs."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.setup, self.pool, self.model = calls.setup, calls.pool, calls.model
        self._saved: list[Any] = []

    def revive(self, ids: list[int] | None, wait: bool, restart_living: bool) -> None:
        """Revive envs without a command."""
        envs = [env for env in self.calls.envs(ids) if not env.is_pending]
        is_allowed = (
            self.setup.options["backend"] == "process" and KILL in self.setup.verbs and not self.setup.num_spares
        )
        restart_living &= is_allowed
        if not envs:
            return
        if restart_living:
            for worker in {self.model.worker_of[env.env_id] for env in envs}:
                self.model.lose_worker(worker, is_revived=True)
        to = [env.env_id for env in envs]
        text = f"pool.revive({to}, wait={wait}, restart_living={restart_living})"
        outcome = self.calls.request(
            "revive", text, lambda: self.pool.revive(to, wait=wait, restart_living=restart_living)
        )
        states = self.pool.states
        for env in envs:
            state = states[env.env_id].name
            require(
                isinstance(outcome, BaseException) or state != FAULTED, f"env {env.env_id} was revived and is {state}"
            )
            env.is_loose |= state != IDLE or env.status != IDLE
            env.status = (
                state if env.status == FAULTED or env.risks or isinstance(outcome, BaseException) else env.status
            )

    def kill(self, which: int) -> None:
        """Kill a worker from outside, in programs in which envs kill theirs."""
        if self.setup.options["backend"] != "process" or KILL not in self.setup.verbs:
            return
        workers = self.pool.stats().workers
        worker = which % len(workers)
        self.calls.lines.append(f"os.kill(pool.stats().workers[{worker}].pid, signal.SIGKILL)")
        try:
            os.kill(workers[worker].pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.model.lose_worker(worker)

    def save(self, ids: list[int] | None) -> None:
        """Save idle envs of a kernel."""
        envs = [env for env in self.calls.envs(ids) if env.status == IDLE]
        if self.setup.kind == "kernel" and envs:
            to = [env.env_id for env in envs]
            text = f"saved.append(stepmill.save(pool, None, env_ids={to}))"
            saved = self.calls.request("save", text, lambda: stepmill.save(self.pool, None, env_ids=to))
            kept = [
                (
                    env.rows[0].place,
                    env.rows[0].is_over,
                    env.rows[0].object.seed,
                    env.rows[0].object.count,
                    env.num_ended,
                )
                for env in envs
            ]
            self._saved.append((saved, kept))

    def restore(self, which: int) -> None:
        """Restore saved envs in their own places."""
        if not self._saved:
            return
        place = which % len(self._saved)
        saved, kept = self._saved[place]
        envs = [self.model.envs[env_id] for env_id in saved.env_ids]
        text = f"stepmill.restore(pool, saved[{place}])"
        if any(env.is_pending for env in envs):
            self.calls.make(text, lambda: stepmill.restore(self.pool, saved), None, BusyEnvError)
            return
        if any(env.status not in (IDLE, FAULTED) for env in envs):
            return
        obs = self.calls.request("restore", text, lambda: stepmill.restore(self.pool, saved))
        for row, env, (then, is_over, seed, count, num_ended) in zip(obs.tolist(), envs, kept, strict=True):
            require(tuple(row) == then.obs, f"{row} was restored, not {then}")
            env.status, env.num_ended = IDLE, num_ended
            env.rows[0].place, env.rows[0].is_over = then, is_over
            env.rows[0].object.seed, env.rows[0].object.count = seed, count
            env.is_unknown |= self.setup.options["seeding"] != "continue"
