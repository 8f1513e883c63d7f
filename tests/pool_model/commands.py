"""Moves that send commands, and receive results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

import stepmill
from stepmill.pool.port import PoolPort
from stepmill.spec.errors import BusyEnvError, UsageError
from tests.harness.hangs import HANG_GUARD_S
from tests.pool_model.calls import Calls, Recorders
from tests.pool_model.envs import AGENTS, NUM_COLUMNS, STEP
from tests.pool_model.records import EXHAUSTED, FAULTED, IDLE, Env
from tests.pool_model.results import require, rows_of

MAX_REPAIRS = 20


class Commands:
    """Steps, resets and receives."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.setup, self.pool, self.model = calls.setup, calls.pool, calls.model

    def step(self, actions: list[int], way: str) -> None:
        """Step all envs, and receive them; first make that possible."""
        self.receive_all()
        self.reset_refused(self.model.envs)
        envs = [env for env in self.model.envs if env.status == IDLE and not self.model.is_stepping_refused(env)]
        if not envs or len(envs) + sum(env.status == EXHAUSTED for env in self.model.envs) != self.setup.num_envs:
            return
        chosen = self._actions(self.model.envs, actions)
        skipped = {env.env_id: partial(setattr, env, "is_skipped", True) for env in self.model.envs if env not in envs}
        sent = {**self._senders(envs, chosen), **skipped}
        arranged = self._arranged(chosen)
        if way == "step_async":
            outcome = self.calls.make(
                f"PoolPort(pool).step_async({arranged!r})", lambda: PoolPort(self.pool).step_async(arranged), sent
            )
            if outcome is None:
                outcome = self.calls.make("PoolPort(pool).step_wait()", PoolPort(self.pool).step_wait)
        else:
            name, step = (
                ("pool", self.pool.step) if way == "step" else ("PoolPort(pool)", PoolPort(self.pool).step_fast)
            )
            outcome = self.calls.make(f"{name}.{way}({arranged!r})", lambda: step(arranged), sent)
        if not isinstance(outcome, BaseException):
            rows = range(self.setup.num_envs * len(self.model.envs[0].rows))
            batch = stepmill.Batch(*outcome, np.array([row // len(self.model.envs[0].rows) for row in rows]))
            self._receive(batch)

    def send(self, ids: list[int] | None, actions: list[int], is_careless: bool) -> None:
        """Send actions to envs that may step, or, if careless, to all of these envs."""
        envs = self.calls.envs(ids)
        free = [env for env in envs if env.status == IDLE and not self.model.is_stepping_refused(env)]
        refusal = None
        if (
            is_careless
            and len(free) < len(envs)
            and not any(any(r.is_over for r in env.rows) for env in envs if self.setup.kind == "batched")
        ):
            refusal = BusyEnvError if any(env.is_pending for env in envs) else UsageError
            if len(envs) == self.setup.num_envs and refusal is UsageError:
                return  # a send to all leaves the exhausted out
        elif not free:
            self.reset_refused(envs)
            return
        else:
            envs = free
        chosen = self._actions(envs, actions)
        arranged, to = self._arranged(chosen), self.calls.ids(envs)
        self.calls.make(
            f"pool.send({arranged!r}, {to})", lambda: self.pool.send(arranged, to), self._senders(envs, chosen), refusal
        )

    def _actions(self, envs: Sequence[Env], actions: Sequence[int]) -> list[list[int]]:
        each = len(envs[0].rows)
        return [list(actions[env.env_id * each : (env.env_id + 1) * each]) for env in envs]

    def _arranged(self, actions: list[list[int]]) -> Any:
        flat = [action for own in actions for action in own]
        return dict.fromkeys(AGENTS, flat) if self.setup.kind == "agents" else flat

    def _senders(self, envs: Sequence[Env], actions: list[list[int]]) -> Recorders:
        all_envs = len(actions) == self.setup.num_envs
        own = {env.env_id: actions[env.env_id if all_envs else place] for place, env in enumerate(envs)}
        return {env.env_id: (lambda env=env: self.model.send(env, own[env.env_id])) for env in envs}

    def reset_refused(self, envs: Sequence[Env]) -> None:
        """Reset the envs of these that must be reset before they step."""
        refused = self.refused(envs)
        if refused:
            self.reset(refused)

    def refused(self, envs: Sequence[Env]) -> list[int]:
        """Return the envs of these that must be reset before they step."""
        return [
            env.env_id
            for env in envs
            if not env.is_pending and env.status != EXHAUSTED and self.model.is_stepping_refused(env)
        ]

    def reset(
        self,
        ids: Any,
        seed: Any = None,
        bonus: int | None = None,
        persist: bool | None = None,
        fault: int = STEP,
        is_careless: bool = False,
    ) -> None:
        """Reset envs and receive them; repeat what was interrupted, or has failed and left open what was done."""
        for _ in range(MAX_REPAIRS):
            outcome, envs = self._reset("reset", ids, seed, bonus, persist, fault)
            if not isinstance(outcome, BaseException):
                self._receive(outcome)
                return
            if all(env.status == FAULTED for env in envs):
                return
            self._forget(envs)
            fault = STEP

    def reset_async(
        self,
        ids: Any,
        seed: Any = None,
        bonus: int | None = None,
        persist: bool | None = None,
        fault: int = STEP,
        is_careless: bool = False,
    ) -> None:
        """Begin to reset envs."""
        outcome, envs = self._reset("reset_async", ids, seed, bonus, persist, fault)
        if isinstance(outcome, BaseException):
            self._forget(envs)
            self.reset([env.env_id for env in envs], seed, bonus, persist)

    def _forget(self, envs: Sequence[Env]) -> None:
        for env in envs:
            env.is_loose = True
            env.is_unknown = not self.setup.is_stormy

    def _reset(
        self, way: str, ids: Any, seed: Any, bonus: int | None, persist: bool | None, fault: int
    ) -> tuple[Any, list[Env]]:
        envs = self.calls.envs(ids)
        if self.setup.kind == "kernel" or self.setup.num_spares:
            bonus = persist = None
        if self.setup.kind == "kernel" or self.model.policies != {self.model.policy_of(fault % 8)}:
            fault = STEP
        if self.setup.kind == "batched" or fault != STEP:
            persist = None
        given = {"bonus": bonus} if bonus is not None else {}
        options = ({**given, "fault": fault} if fault != STEP else given) or None
        seeds, by_row = self._seeds(envs, seed)
        sent = {
            env.env_id: (lambda env=env: self._record_reset(env, by_row[env.env_id], bonus, persist, fault))
            for env in envs
        }
        arguments = {"seed": seeds, "options": options, "env_ids": self.calls.ids(envs), "persist_options": persist}
        text = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value is not None)
        outcome = self.calls.make(f"pool.{way}({text})", lambda: getattr(self.pool, way)(**arguments), sent)
        if isinstance(outcome, BaseException):
            for env in envs:
                if env.is_pending:  # this reset may have been sent in the place of the command before
                    self.model.add_risks(env, [fault])
        return outcome, envs

    def _record_reset(
        self, env: Env, seeds: list[int | None], bonus: int | None, persist: bool | None, fault: int
    ) -> None:
        if persist:
            env.bonus = bonus or 0
        self.model.reset(env, seeds, (0 if fault != STEP else None) if bonus is None else bonus, fault)

    def _seeds(self, envs: Sequence[Env], seed: Any) -> tuple[Any, dict[int, list[int | None]]]:
        """Return the argument `seed` of a reset, and the seed of each row; {} and [] are dicts and lists of some."""
        each = len(envs[0].rows)
        if isinstance(seed, dict):
            seed = {env.env_id: 100 + 10 * env.env_id for env in envs[::2]}
            return seed, {
                env.env_id: [seed[env.env_id] + row if env.env_id in seed else None for row in range(each)]
                for env in envs
            }
        if isinstance(seed, list):
            seed = [None if number % 3 == 1 else 40 + number for number in range(len(envs) * each)]
            return seed, {env.env_id: seed[place * each : (place + 1) * each] for place, env in enumerate(envs)}
        if seed is None:
            return None, {env.env_id: [None] * each for env in envs}
        return seed, {env.env_id: [seed + env.env_id * each + row for row in range(each)] for env in envs}

    # ---- results ------------------------------------------------------------------------------------------------

    def recv(self, ids: list[int] | None, how: str, count: int, is_careless: bool = False) -> None:
        """Receive some envs, in one of many ways."""
        pending = [env.env_id for env in self.model.envs if env.is_pending]
        count = min(count, len(pending))
        chosen = [env_id for env_id in ids or range(self.setup.num_envs) if is_careless or env_id in pending]
        refusal = UsageError if not pending and how != "ready" else None
        arguments: dict[str, Any] = {"timeout_s": HANG_GUARD_S}
        if how == "ids":
            arguments["env_ids"] = chosen
            refusal = UsageError if not chosen or {*chosen} - {*pending} else None
        elif how == "between":
            arguments |= {"min_envs": 1, "max_envs": max(1, count)}
        elif how == "count":
            arguments["batch_size"] = count or 1
        elif how == "out" and self.setup.kind in ("single", "kernel"):
            arguments |= {"batch_size": count or 1, "out": np.zeros((count or 1, NUM_COLUMNS), np.int64)}
        elif how == "at once":
            arguments["timeout_s"] = 0
        if how == "ready":
            batch = self.calls.make("pool.recv(min_envs=0)", lambda: self.pool.recv(min_envs=0))
        else:
            text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            batch = self.calls.make(f"pool.recv({text})", lambda: self.pool.recv(**arguments), None, refusal)
        if isinstance(batch, BaseException):
            return
        got = [env_id for env_id, _ in groupby(batch.env_id.tolist())]
        require(len({*got}) == len(got) and {*got} <= {*pending}, f"{got} were received of {pending}")
        require(how != "ids" or got == sorted({*chosen}), f"{got} were received for {chosen}")
        require("batch_size" not in arguments or len(got) == count, f"{len(got)} envs were received for {count}")
        require(how not in ("all", "at once") or len(got) == len(pending), f"{got} were received of {pending}")
        self._receive(batch)

    def _receive(self, batch: stepmill.Batch) -> None:
        num_ended = PoolPort(self.pool).num_ended.tolist()
        for env_id, group in groupby(rows_of(batch), key=lambda pair: pair[0]):
            self.model.receive(env_id, [result for _, result in group], num_ended)
        self.calls.check()

    def receive_all(self) -> None:
        for _ in range(MAX_REPAIRS):
            if not any(env.is_pending for env in self.model.envs):
                return
            self.recv(None, "all", self.setup.num_envs)
        require(False, "results did not arrive")

    def bring_back(self) -> None:
        """Receive what is pending, and check that a reset brings every env back."""
        self.receive_all()
        for _ in range(MAX_REPAIRS):
            self.reset(None)
            self.calls.check()
            if all(env.status == IDLE for env in self.model.envs):
                return
        require(False, f"no reset brings the pool back: {self.pool.states}")
