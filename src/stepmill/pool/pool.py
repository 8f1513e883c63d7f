"""The public Pool: many envs, stepped together or as they get ready."""

from __future__ import annotations

import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from stepmill.pool.answers import PoolAnswers
from stepmill.pool.arguments import check_timeout, checked_batch_size, checked_fns, checked_num_envs
from stepmill.pool.calls import PoolCalls
from stepmill.pool.forms import PoolForms
from stepmill.pool.keepsakes import Keepsakes
from stepmill.pool.resets import Options, ResetDesk, Seed
from stepmill.pool.start import PoolResources, has_log, start_pool
from stepmill.spec.batch import Batch
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import RecvTimeout, UsageError, join_errors
from stepmill.spec.options import EnvState, PoolOptions, Seeding, apply_arguments
from stepmill.worker.messages import RequestKind

SLOW_S = 30.0  # after this long without an answer a wait tells of it
MAX_LATE_FAULTS = 2  # that a wait whose time is over still deals with, since what it waits for may be there then
_FAULT, _TIMED_OUT = 1, 2  # what Ledger.wait returns beside 0

if TYPE_CHECKING:
    from typing_extensions import Self

EnvIds = Sequence[int] | NDArray[np.integer[Any]]
StepTuple = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


class Pool(PoolCalls, PoolAnswers, PoolForms):
    """Runs N envs, each under an env_id from 0 to N-1 for the life of the pool.

    `step` steps all envs and waits for all. `send` and `recv` do it in two halves, for any subset: `recv` returns the
    envs that are ready, longest-waiting first. A pool is used by one thread at a time; `close` may come from any.

    Args:
        env_fns: functions without arguments, one per env and then one per spare; called in the workers.
        backend, num_workers: as in PoolOptions.
        batch_size: how many envs `recv` returns if it is not told; None is all that are pending.
        options: everything else.
    Raises:
        UsageError: the envs differ, or an option is wrong.
        EnvError: a constructor raised.
        WorkerDied: a worker ended while it built its envs.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], object]],
        *,
        backend: object = "auto",
        num_workers: int | None = None,
        batch_size: int | None = None,
        options: PoolOptions | None = None,
    ) -> None:
        env_fns = checked_fns(env_fns)
        self.options = apply_arguments(options, backend=backend, num_workers=num_workers)
        self._num_spares = self.options.spare_envs
        self.num_envs = checked_num_envs(len(env_fns), self._num_spares)
        self.batch_size = checked_batch_size(batch_size, self.num_envs)
        # What owns the workers, and what ends them when the pool is garbage, exist before the first worker.
        self._resources = PoolResources()
        self._finalizer = weakref.finalize(self, self._resources.abandon)
        try:
            self._running = start_pool(env_fns, self.options, self._resources)
            self.env_specs: tuple[EnvSpec, ...] = self._running.specs[: self.num_envs]
            self.spare_specs: tuple[EnvSpec, ...] = self._running.specs[self.num_envs :]
            self.spec: EnvSpec = self.env_specs[0]
            self.num_rows = self.num_envs * self.spec.batch_size
            self.num_workers = len(self._running.plans)
            self._ledger = self._running.ledger
            self._recovery = self._running.recovery
            self._keepsakes = Keepsakes(self._running)
            self._recovery.restarts.remember(self._keepsakes)
            self._recovery.capsules.on_attributes(self._keepsakes.values_of)
            self._request_ids = itertools.count(1)
            self._is_eager = False
            self._slow_s: float | None = None if self._has_deadlines else SLOW_S
            self._resets = ResetDesk(
                self.num_envs,
                self.spec.batch_size,
                is_seeded=self.options.seeding is not Seeding.CONTINUE or has_log(self.options),
                num_spares=self._num_spares,
            )
            self._last_reset: list[int] = []
        except BaseException:
            self.close()
            raise

    @property
    def _has_deadlines(self) -> bool:
        return self.options.step_timeout_s is not None and self.options.reset_timeout_s is not None

    # ---- synchronous --------------------------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: Seed = None,
        options: Options = None,
        env_ids: EnvIds | None = None,
        persist_options: bool | None = None,
    ) -> Batch:
        """Reset all envs, or some, and wait for them. What they were doing is waited for and dropped.

        Args:
            seed: None; s, which gives env i the seed s + i; a list, one per env; or a dict from env id to seed.
            options: a mapping, handed to each env's `reset`, every env a copy of its own; or, for each env its own, a
                list, or a dict from env id to mapping.
            env_ids: which envs; None is all.
            persist_options: True keeps the options: every reset of that env that is given none gets them again,
                automatic ones and those after a restart too, until others are kept; with options=None it forgets them.
                None is the pool's own `persist_options`.
        Returns:
            B rows: obs [B, ...], reward 0, terminated and truncated False.
        Raises:
            EnvError: an env raised. The others stay usable.
        """
        ids = self.reset_async(seed=seed, options=options, env_ids=env_ids, persist_options=persist_options)
        self._wait_for(ids, None)
        return Batch(*self._ledger.collect(len(ids), None, ids))

    def step(self, actions: Any) -> Batch:
        """Step all envs and wait for all.

        Args:
            actions: in the structure of the action space, each array [N, ...]; cast within its kind if need be.
        Returns:
            N rows in env order. That of an exhausted env has reward 0, no flag, and its last observation.
        Raises:
            UsageError: all envs are exhausted.
        """
        self._ledger.send_all(actions)
        return self.recv(self.num_envs)

    def step_fast(self, actions: Any) -> StepTuple:
        """Step all envs: Gymnasium's five values, by the shortest way. Hot path.

        Large observation arrays are leased: theirs to hold, no copy made.
        """
        result = self._ledger.step(actions)
        return result if result is not None else self.step_wait()

    # ---- asynchronous -------------------------------------------------------------------------------------------

    def reset_async(
        self,
        *,
        seed: Seed = None,
        options: Options = None,
        env_ids: EnvIds | None = None,
        mask: NDArray[np.bool_] | None = None,
        persist_options: bool | None = None,
    ) -> list[int]:
        """Command resets, and return the ids of the envs concerned. `recv` brings their observations.

        Args:
            seed, options, env_ids, persist_options: as for `reset`.
            mask: [num_rows] bool, instead of env_ids; a batched env of which only some rows are masked is handed
                those as its own "reset_mask".
        """
        order = self._resets.order(env_ids, mask, seed, options)
        is_wanted = self.options.persist_options and options is not None if persist_options is None else persist_options
        if is_wanted and self.spec.is_batched:
            raise UsageError("persist_options is for envs that the engine resets, and batched envs reset themselves")
        self._drain(order.env_ids)
        if self._num_spares:
            order.recall(self._ledger)
            self._drain(order.demanding)
        if is_wanted and order.given:
            given = order.given_with(self._num_spares)
            self._set(RequestKind.KEEP_OPTIONS, "options", list(given.values()), list(given))
        self._ledger.send_reset(order.env_ids, order.words, order.blobs)
        self._resets.note_sent(order)
        if self._num_spares and order.is_whole:
            self._ledger.stage_spares(order.spare_seeds)
        self._last_reset = order.env_ids
        return order.env_ids

    def send(self, actions: Any, env_ids: EnvIds | None = None) -> None:
        """Give actions to some envs, or all, and return at once.

        Args:
            actions: in the structure of the action space, each array [B, ...] in the order of env_ids.
            env_ids: which envs; None is all.
        Raises:
            BusyEnvError: one of them is still stepping, or its result was not received. Nothing is sent.
            UsageError: actions or ids are wrong. Nothing is sent.
        """
        self._ledger.send(actions, env_ids)

    def recv(
        self,
        batch_size: int | None = None,
        *,
        min_envs: int | None = None,
        max_envs: int | None = None,
        env_ids: EnvIds | None = None,
        timeout_s: float | None = None,
        out: Any = None,
    ) -> Batch:
        """Return envs that finished, longest-waiting first.

        Args:
            batch_size: exactly so many envs; None is the pool's, or else all that are pending.
            min_envs, max_envs: instead of batch_size: return as soon as min_envs are there, with at most max_envs.
            env_ids: instead of a number: exactly these envs, by ascending id; all of them were sent something.
            timeout_s: seconds; 0 asks without waiting; None waits while something live is pending.
            out: arrays in the structure of the observation, [B, ...] each, to be written in place of fresh ones.
        Raises:
            EnvError, BadOutput, WorkerDied: an env has a fault. It is told once; the others stay receivable.
            RecvTimeout: too slow. Nothing is lost; call recv() again.
            UsageError: more envs are wanted than are pending.
        """
        check_timeout(timeout_s)
        if env_ids is not None:
            if (batch_size, min_envs, max_envs) != (None, None, None):
                raise UsageError("recv() takes env_ids, or how many envs, not both")
            ids = self._pending(env_ids)
            self._set_eager(len(ids) < self.num_envs)
            self._wait_for(ids, timeout_s)
            return Batch(*self._ledger.collect(len(ids), out, ids))
        least, most = self._bounds(batch_size, min_envs, max_envs)
        self._set_eager(least < self.num_envs)
        self._await(lambda slice_s: self._ledger.wait(least, slice_s), timeout_s)
        if self.options.linger_s and most > least:
            self._linger(most)
        return Batch(*self._ledger.collect(most, out))

    def recv_ready(self) -> Batch:
        """Return what is ready now, which may be nothing (B = 0)."""
        while self._ledger.num_pending() and self._ledger.wait(self._ledger.num_pending(), 0.0) == _FAULT:
            self._absorb()
        return Batch(*self._ledger.collect(self.num_envs))

    # ---- for front-ends in Gymnasium's shape --------------------------------------------------------------------

    def reset_rows(
        self, mask: NDArray[np.bool_], seed: Seed = None, options: Options = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the rows of a mask; newest observations of all N rows, and infos [N] of those that were reset."""
        self.reset_async(seed=seed, options=options, mask=mask)
        return self.reset_wait()

    def reset_wait(self, timeout_s: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the envs of the last `reset_async`; observations of all N rows, and infos [N] of those envs."""
        self._wait_for(self._last_reset, timeout_s)
        result: tuple[Any, dict[str, Any]] = self._ledger.collect_rows(self._last_reset)
        return result

    def step_async(self, actions: Any) -> None:
        """Command a step of all envs but those that are exhausted."""
        self._ledger.send_all(actions)

    def step_wait(self, timeout_s: float | None = None) -> StepTuple:
        """Wait for all envs; Gymnasium's five values."""
        self._await(lambda slice_s: self._ledger.wait(self.num_envs, slice_s), timeout_s)
        return cast("StepTuple", self._ledger.collect_ready())

    def revive(self, env_ids: EnvIds | None = None, *, wait: bool = True, anew: bool = False) -> None:
        """Bring FAULTED envs back, whose workers are restarted if they are dead; reset them before they are stepped.

        Args:
            env_ids: which envs; None is all.
            wait: False does not wait for workers to start. A reset can be commanded at once: its result, or the reason
                why the worker could not be started, is received like any other.
            anew: workers that live are ended and started anew, too; on the process backend.
        Raises:
            EnvError, EnvTimeout, WorkerDied: a worker could not be restarted.
        """
        ids = self._named(env_ids)
        if not anew:
            self._recovery.tidings.warn_of(ids)
        self._recovery.revive(ids, wait=wait, anew=anew)

    # ---- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers and close the envs, in at most 2 s. Idempotent, and from any thread."""
        self._resources.close()
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._resources.is_closed else ""
        return f"Pool(num_envs={self.num_envs}, num_workers={self.num_workers}{state})"

    # ---- inner --------------------------------------------------------------------------------------------------

    def _bounds(self, batch_size: int | None, min_envs: int | None, max_envs: int | None) -> tuple[int, int]:
        if batch_size is not None and (min_envs is not None or max_envs is not None):
            raise UsageError("recv() takes batch_size, or min_envs and max_envs, not both")
        pending = self._ledger.num_pending()
        if pending == 0:
            over = "; all envs are exhausted" if self.exhausted.all() else ""
            raise UsageError(f"recv() with nothing pending would wait for ever; send() or reset_async() first{over}")
        if min_envs is not None or max_envs is not None:
            least = 1 if min_envs is None else min_envs
            most = max(least, self.num_envs) if max_envs is None else max_envs
        elif batch_size is not None:
            least = most = batch_size
        else:
            least = most = self.batch_size or pending
        if not 1 <= least <= most:
            raise UsageError(f"recv() of {least} to {most} envs makes no sense; ask for 1 to {self.num_envs}")
        return least, most

    def _pending(self, env_ids: EnvIds) -> list[int]:
        """Return these ids, if each is one of an env that is stepping or whose result waits to be received."""
        ids = sorted(set(self._named(env_ids)))
        states = self._ledger.states()
        untold = [env_id for env_id, _, _ in self._ledger.faults()]
        idle = [
            env_id for env_id in ids if states[env_id] not in (EnvState.BUSY, EnvState.READY) and env_id not in untold
        ]
        if idle or not ids:
            raise UsageError(f"envs {idle} were sent nothing that recv() could wait for; send() or reset_async() first")
        return ids

    def _set_eager(self, is_eager: bool) -> None:
        if is_eager is not self._is_eager:
            self._is_eager = is_eager
            self._ledger.set_eager(is_eager)

    def _wait_for(self, ids: Sequence[int], timeout_s: float | None) -> None:
        self._await(lambda slice_s: self._ledger.wait_for(ids, slice_s), timeout_s)

    def _await(self, wait: Callable[[float | None], int], timeout_s: float | None) -> None:
        """Wait until the ledger has what is wanted; deal with faults, and tell once of envs that are very slow."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        late_faults = 0
        while late_faults <= MAX_LATE_FAULTS:
            slice_s = self._slow_s if deadline is None else max(deadline - time.monotonic(), 0.0)
            outcome = wait(slice_s)
            if outcome == _FAULT:
                self._absorb()
                late_faults += slice_s == 0.0
            elif outcome != _TIMED_OUT:
                return
            elif deadline is not None:
                self._raise_timeout(timeout_s)
            else:
                self._tell_slow()
        self._raise_timeout(timeout_s)

    def _absorb(self) -> None:
        errors = self._recovery.absorb()
        if errors:
            raise join_errors(errors)

    def _linger(self, most: int) -> None:
        most = min(most, self._ledger.num_pending())
        while self._ledger.wait(most, self.options.linger_s) == _FAULT:
            self._absorb()

    def _tell_slow(self) -> None:
        self._slow_s = None  # once in a pool's life
        busy = [env_id for env_id, state in enumerate(self.states) if state is EnvState.BUSY]
        warnings.warn(
            f"envs {busy} have not answered for {SLOW_S:g} s; the pool waits on, since no step_timeout_s or reset_timeout_s "
            "is set that would end them",
            RuntimeWarning,
            stacklevel=4,
        )

    def _drain(self, ids: Sequence[int]) -> None:
        """Wait for what these envs are doing, and drop it, faults too: they are about to be reset. Revive who is FAULTED."""
        while self._ledger.num_pending():
            outcome = self._ledger.wait_for(ids, None)
            for env_id, kind, _ in [row for row in self._ledger.faults() if outcome == _FAULT and row[0] in ids]:
                warnings.warn(
                    f"env {env_id} failed (fault {kind}) before this reset, which drops its result",
                    RuntimeWarning,
                    stacklevel=4,
                )
            self._ledger.discard(ids)
            if outcome != _FAULT:
                break
        self._recovery.prepare_reset(ids)

    def _raise_timeout(self, timeout_s: float | None) -> NoReturn:
        busy = tuple(env_id for env_id, state in enumerate(self.states) if state is EnvState.BUSY)
        raise RecvTimeout(
            f"envs {list(busy)} were not ready within {timeout_s} s; nothing is lost, wait again",
            env_ids=busy,
            timeout_s=timeout_s or 0.0,
        )
