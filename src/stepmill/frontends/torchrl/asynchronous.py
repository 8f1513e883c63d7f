"""`AsyncStepmillEnv`: steps and resets some envs asynchronously, in place of TorchRL's `AsyncEnvPool`.

There are differences from that class. A timeout limits the whole call, and nothing is lost. Returned tensors are never
modified. "env_index" is a tensor [B]. Data are in shared memory on every backend, and results are not pickled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torchrl.envs
from numpy.typing import NDArray
from tensordict import TensorDictBase

from stepmill.frontends.torchrl.engine import Engine
from stepmill.frontends.torchrl.env import StepmillEnv, replace_class
from stepmill.frontends.torchrl.errors import NotSteppedError, StillBusyError, translated
from stepmill.pool.port import checked_ids
from stepmill.spec.batch import Batch
from stepmill.spec.errors import RecvTimeout, UsageError, join_errors

Ids = NDArray[np.int64]
EnvIndex = int | Sequence[int] | None


class _TaskKind(Enum):
    """What an env does; the values are used in error texts."""

    STEP = "step"
    RESET = "reset"
    STEP_AND_RESET = "step_and_maybe_reset"


_Row = tuple[TensorDictBase, int]
"""A tensordict, and the place of an env's row in it."""


@dataclass(eq=False)
class _Task:
    """What an env does, from its command until the result is received.

    Attributes:
        sent: the row that was sent; None for a reset.
        stepped: the result of the step, also while a STEP_AND_RESET resets the env.
        result: the last result, when the task has ended.
    """

    kind: _TaskKind
    sent: _Row | None = None
    stepped: _Row | None = None
    result: _Row | None = None

    @property
    def is_resetting(self) -> bool:
        """Whether the next result is one of a reset."""
        return self.kind is _TaskKind.RESET or self.stepped is not None


class AsyncStepmillEnv(StepmillEnv):
    """Steps and resets envs asynchronously. `async_*_send` begins tasks, and `async_*_recv` returns results.

    An env is busy from `async_*_send` until its result is received. The synchronous methods also work while no env is busy.

    Args:
        env_fns: as for `StepmillEnv`.
        min_get: the default of `min_get` of the `recv` methods.
        **kwargs: as for `StepmillEnv`; `frame_skip` must be 1.
    """

    def __init__(self, env_fns: Any, *, min_get: int = 1, **kwargs: Any) -> None:
        super().__init__(env_fns, **kwargs)
        if not 1 <= min_get <= self.num_workers:
            self.close()
            raise UsageError(f"min_get={min_get} must be 1 to the number of envs, {self.num_workers}")
        self.min_get = min_get

    @property
    def num_envs(self) -> int:
        """The number of envs, by AsyncEnvPool's name for it."""
        return self.num_workers

    def _set_up(self, engine: Engine, **kwargs: Any) -> None:
        self._tasks: dict[int, _Task] = {}  # of busy envs, until their results are received
        self._done: dict[_TaskKind, list[int]] = {kind: [] for kind in _TaskKind}  # envs, as their tasks ended
        super()._set_up(engine, **kwargs)
        if engine.frame_skip != 1:
            self.close()
            raise UsageError(
                "asynchronous steps have no frame_skip; put a wrapper that repeats actions around each env"
            )

    # ---- steps -------------------------------------------------------------------------------------------------------

    def async_step_send(self, tensordict: TensorDictBase, env_index: EnvIndex = None) -> None:
        """Begin a step of some envs.

        Args:
            tensordict: [B] with "action", in the order of the envs; [] for a single env.
            env_index: the envs; None means "env_index" of the tensordict, or all envs.
        Raises:
            RuntimeError: one of the envs is busy. Nothing is sent.
            UsageError: one of the envs is done, or has not been reset.
        """
        self._send_step(_TaskKind.STEP, tensordict, env_index)

    def async_step_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Return the results of steps [B]: the rows that were sent, with "next" and "env_index".

        Args:
            min_get: wait for this many results.
            env_index: wait for this env only; the result has batch size [].
            max_get: return at most this many results; None is all tasks of this kind that were sent.
            timeout: seconds for the whole call, which waits until then for `max_get` results; 0 does not wait, and None
                waits for `min_get` only.
        Raises:
            TimeoutError: fewer results arrived in time. Nothing is lost; call again.
            RuntimeError: fewer envs than `min_get` are busy.
            EnvError: an env raised. The results of the others are not lost.
        """
        return self._recv(_TaskKind.STEP, min_get, env_index, max_get, timeout)[0]

    def async_step_and_maybe_reset_send(self, tensordict: TensorDictBase, env_index: EnvIndex = None) -> None:
        """Begin a step of some envs, followed by a reset of each env that is done; see `async_step_send`."""
        self._send_step(_TaskKind.STEP_AND_RESET, tensordict, env_index)

    def async_step_and_maybe_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Return (the results of steps, the roots of the next steps), [B] each; see `async_step_recv`."""
        result, begun = self._recv(_TaskKind.STEP_AND_RESET, min_get, env_index, max_get, timeout)
        return result, self._step_mdp(result.copy().set("next", begun.exclude("reward")))

    # ---- resets ------------------------------------------------------------------------------------------------------

    def async_reset_send(self, tensordict: TensorDictBase | None = None, env_index: EnvIndex = None) -> None:
        """Begin a reset of some envs, with the seeds of `set_seed`; see `async_step_send`."""
        ids, _ = self._select_envs(tensordict, env_index)
        self._check_idle(ids)
        self._engine.reset_async(ids)
        self._tasks.update((env_id, _Task(_TaskKind.RESET)) for env_id in ids.tolist())

    def async_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Return the results of resets [B], with "env_index"; see `async_step_recv`."""
        return self._recv(_TaskKind.RESET, min_get, env_index, max_get, timeout)[0]

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _send_step(self, kind: _TaskKind, tensordict: TensorDictBase, env_index: EnvIndex) -> None:
        ids, rows = self._select_envs(tensordict, env_index)
        if rows is None or rows.batch_size != torch.Size([len(ids)]):
            shape = None if rows is None else tuple(rows.batch_size)
            raise UsageError(f"the tensordict has batch size {shape} for {len(ids)} envs; give a row for each")
        self._check_idle(ids)
        with torch.no_grad():
            actions = self._reader.read(rows)
        self._engine.pool.send(actions, ids)
        self._tasks.update((env_id, _Task(kind, (rows, place))) for place, env_id in enumerate(ids.tolist()))

    def _select_envs(self, tensordict: TensorDictBase | None, env_index: EnvIndex) -> tuple[Ids, TensorDictBase | None]:
        """Return the ids of the envs, and the tensordict with a row for each."""
        named: Any = env_index
        if named is None and tensordict is not None:
            named = tensordict.get("env_index", None)
        if named is None:
            return np.arange(self.num_workers), tensordict
        listed = named.tolist() if hasattr(named, "tolist") else named
        is_single = isinstance(listed, (int, np.integer))
        rows = (
            tensordict.unsqueeze(0)
            if is_single and tensordict is not None and not tensordict.batch_size
            else tensordict
        )
        return np.array(checked_ids([listed] if np.isscalar(listed) else listed, self.num_workers), np.int64), rows

    def _check_idle(self, ids: Ids) -> None:
        busy = sorted(set(ids.tolist()) & self._tasks.keys())
        if busy:
            raise StillBusyError(
                f"Some envs are still processing a step: envs that are busy: {set(self._tasks)}, queried: {ids.tolist()}. "
                f"Receive {busy} first.",
                env_ids=busy,
            )

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def _recv(
        self, kind: _TaskKind, min_get: int | None, env_index: int | None, max_get: int | None, timeout: float | None
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Return the results of tasks of a kind, and their last rows; with `env_index` those of one env, without a batch dimension."""
        if timeout is not None and not timeout >= 0:
            raise UsageError(f"timeout={timeout} must be a number of seconds, 0 or more")
        deadline = None if timeout is None else time.monotonic() + timeout
        done = self._done[kind]
        if env_index is not None:
            (env_index,) = checked_ids([env_index], self.num_workers)
            self._wait_for(kind, lambda: env_index in done, 1, deadline, only=env_index)
            result, last = self._pop_results(kind, [env_index])
            return result[0], last[0]
        least = self.min_get if min_get is None else min_get
        if not 1 <= least <= (least if max_get is None else max_get):
            raise UsageError(f"min_get={least} must be 1 to max_get={max_get}")
        self._wait_for(kind, lambda: len(done) >= least, least, deadline)
        most = min(max_get or self.num_workers, sum(task.kind is kind for task in self._tasks.values()))
        # Until the deadline, as in TorchRL; without one, what has arrived.
        while len(done) < most and self._receive(1, max((deadline or 0.0) - time.monotonic(), 0.0)):
            pass
        return self._pop_results(kind, done[:most])

    def _wait_for(
        self, kind: _TaskKind, is_there: Callable[[], bool], least: int, deadline: float | None, only: int | None = None
    ) -> None:
        at_work = [env_id for env_id, task in self._tasks.items() if task.kind is kind and only in (None, env_id)]
        if len(at_work) < least:
            raise NotSteppedError(
                f"Cannot await {least} {kind.value} when only {len(at_work)} are being stepped; send them first"
            )
        while not is_there():
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not self._receive(1, left_s):
                raise RecvTimeout(f"no {kind.value} has ended in time; nothing is lost: call again", env_ids=at_work)

    def _receive(self, least: int, timeout_s: float | None) -> bool:
        """Store what the pool has received, raise the errors of tasks that failed, and return whether there was anything."""
        received = self._engine.pool.receive(least, timeout_s=timeout_s)
        if received.batch is not None:
            self._store_batch(received.batch)
        errors = received.errors(self._tasks)
        for env_id in received.faults:
            if env_id in self._tasks and self._tasks[env_id].result is None:
                del self._tasks[env_id]
        if errors:
            error = join_errors(errors)
            raise translated(error) from error
        return received.batch is not None

    def _store_batch(self, batch: Batch) -> None:
        """Give each task its row. Begin the resets of envs whose step has ended an episode, if their tasks have one."""
        engine, ids = self._engine, batch.env_id
        engine.store_infos(batch.info, ids)
        packed = self._step_tensors((batch.obs, batch.reward, batch.terminated, batch.truncated), ids)
        rows = self._to_tensordict(packed, batch_size=torch.Size([batch.num_rows]))
        tasks = [self._tasks[env_id] for env_id in ids.tolist()]
        is_reset = np.array([task.is_resetting for task in tasks])
        engine.store_flags(ids, batch.terminated, batch.truncated)
        engine.mark_reset(ids[is_reset])
        has_ended = batch.terminated | batch.truncated
        begins = [task.kind is _TaskKind.STEP_AND_RESET for task in tasks] & has_ended & ~is_reset
        for place, (env_id, task) in enumerate(zip(ids.tolist(), tasks, strict=True)):
            if not is_reset[place]:
                task.stepped = rows, place
            if not begins[place]:
                task.result = rows, place
                self._done[task.kind].append(env_id)
        if begins.any():
            engine.pool.reset_async(env_ids=ids[begins])

    def _pop_results(self, kind: _TaskKind, env_ids: Sequence[int]) -> tuple[Any, Any]:
        tasks = [self._tasks.pop(env_id) for env_id in env_ids]
        self._done[kind][:] = [env_id for env_id in self._done[kind] if env_id in self._tasks]
        last = _joined([task.result for task in tasks])
        if kind is _TaskKind.RESET:
            result = last.exclude("reward")
        else:
            stepped = last if kind is _TaskKind.STEP else _joined([task.stepped for task in tasks])
            result = _joined([task.sent for task in tasks], is_copy=True).set("next", stepped)
        return result.set("env_index", torch.tensor(env_ids)), last

    # ---- the synchronous methods -------------------------------------------------------------------------------------

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = self._read_mask(tensordict, "_reset")
        self._check_idle(np.arange(self.num_workers) if mask is None else np.flatnonzero(mask))
        return super()._reset(tensordict, **kwargs)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._check_idle(np.arange(self.num_workers))
        return super()._step(tensordict)

    def _own_names(self) -> tuple[str, ...]:
        """Refuse to save envs that have tasks, whose tensordicts are not saved."""
        self._check_idle(np.arange(self.num_workers))
        return super()._own_names()

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the envs and end their workers; results that were not received are dropped. Idempotent."""
        self._tasks.clear()
        self._done = {kind: [] for kind in _TaskKind}
        super().close(raise_if_closed=raise_if_closed)

    shutdown = close


def _joined(rows: Sequence[_Row | None], *, is_copy: bool = False) -> Any:
    """Return rows as one tensordict [B]. Unless `is_copy`, all rows of a tensordict, in order, are that tensordict."""
    chunks = []
    for _, group in groupby([row for row in rows if row is not None], lambda row: id(row[0])):
        sources, places = zip(*group, strict=True)
        is_whole = not is_copy and places == (*range(len(sources[0])),)
        chunks.append(sources[0] if is_whole else sources[0][list(places)])
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


replace_class(AsyncStepmillEnv, torchrl.envs.AsyncEnvPool)
