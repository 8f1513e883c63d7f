"""`AsyncStepmillEnv`: steps and resets some envs asynchronously, in place of TorchRL's `AsyncEnvPool`.

There are differences from that class. A timeout limits the whole call, and nothing is lost. Returned tensors are never
modified. "env_index" is a tensor [B]. Data are in shared memory on every backend, and results are not pickled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
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
from stepmill.spec.errors import RecvTimeout, UsageError, join_errors, raising_as

Ids = NDArray[np.int64]
EnvIndex = int | Sequence[int] | None


class _TaskKind(Enum):
    """What an env does; the values are used in error texts."""

    STEP = "step"
    RESET = "reset"
    STEP_AND_RESET = "step_and_maybe_reset"


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
        self._tasks: dict[int, _TaskKind] = {}  # the tasks of busy envs, until their results are received
        self._roots: dict[int, tuple[TensorDictBase, int]] = {}  # by env, the tensordict of its step, and its row in it
        self._ended: dict[int, TensorDictBase] = {}  # STEP_AND_RESET: the result of the step, while the env is reset
        self._done: dict[_TaskKind, list[tuple[Ids, Any]]] = {task: [] for task in _TaskKind}  # in the order of arrival
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
        result: TensorDictBase = self._recv(_TaskKind.STEP, min_get, env_index, max_get, timeout)
        return result

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
        result: TensorDictBase = self._recv(_TaskKind.STEP_AND_RESET, min_get, env_index, max_get, timeout)
        following = self._step_mdp(result.exclude("next").set("next", result["next", "begun"]))
        return result.set("next", result["next"].exclude("begun")), following

    # ---- resets ------------------------------------------------------------------------------------------------------

    def async_reset_send(self, tensordict: TensorDictBase | None = None, env_index: EnvIndex = None) -> None:
        """Begin a reset of some envs, with the seeds of `set_seed`; see `async_step_send`."""
        ids, _ = self._select_envs(tensordict, env_index)
        self._check_idle(ids)
        self._engine.reset_async(ids)
        self._tasks.update(dict.fromkeys(ids.tolist(), _TaskKind.RESET))

    def async_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Return the results of resets [B], with "env_index"; see `async_step_recv`."""
        result: TensorDictBase = self._recv(_TaskKind.RESET, min_get, env_index, max_get, timeout)
        return result

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _send_step(self, task: _TaskKind, tensordict: TensorDictBase, env_index: EnvIndex) -> None:
        ids, rows = self._select_envs(tensordict, env_index)
        if rows is None or rows.batch_size != torch.Size([len(ids)]):
            shape = None if rows is None else tuple(rows.batch_size)
            raise UsageError(f"the tensordict has batch size {shape} for {len(ids)} envs; give a row for each")
        self._check_idle(ids)
        with torch.no_grad():
            actions = self._reader.read(rows)
        with raising_as(translated):
            self._engine.pool.send(actions, ids)
        for place, env_id in enumerate(ids.tolist()):
            self._tasks[env_id], self._roots[env_id] = task, (rows, place)

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
        self, task: _TaskKind, min_get: int | None, env_index: int | None, max_get: int | None, timeout: float | None
    ) -> Any:
        if timeout is not None and not timeout >= 0:
            raise UsageError(f"timeout={timeout} must be a number of seconds, 0 or more")
        deadline = None if timeout is None else time.monotonic() + timeout
        if env_index is not None:
            (env_index,) = checked_ids([env_index], self.num_workers)
            self._wait_for(
                task, lambda: any(env_index in ids for ids, _ in self._done[task]), 1, deadline, only=env_index
            )
            return self._pop_result_of(task, env_index)
        least = self.min_get if min_get is None else min_get
        if not 1 <= least <= (least if max_get is None else max_get):
            raise UsageError(f"min_get={least} must be 1 to max_get={max_get}")
        self._wait_for(task, lambda: self._num_done(task) >= least, least, deadline)
        most = min(max_get or self.num_workers, sum(own is task for own in self._tasks.values()))
        # Until the deadline, as in TorchRL; without one, what has arrived.
        while self._num_done(task) < most and self._receive(1, max((deadline or 0.0) - time.monotonic(), 0.0)):
            pass
        return self._pop_results(task, most)

    def _wait_for(
        self, task: _TaskKind, is_there: Any, least: int, deadline: float | None, only: int | None = None
    ) -> None:
        at_work = [env_id for env_id, own in self._tasks.items() if own is task and only in (None, env_id)]
        if len(at_work) < least:
            raise NotSteppedError(
                f"Cannot await {least} {task.value} when only {len(at_work)} are being stepped; send them first"
            )
        while not is_there():
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not self._receive(1, left_s):
                raise RecvTimeout(f"no {task.value} has ended in time; nothing is lost: call again", env_ids=at_work)

    def _receive(self, least: int, timeout_s: float | None) -> bool:
        """Store what the pool has received, raise the errors of tasks that failed, and return whether there was anything."""
        received = self._engine.pool.receive(least, timeout_s=timeout_s)
        if received.batch is not None:
            self._store_batch(received.batch)
        errors = received.errors(self._tasks)
        for env_id in received.faults:
            for entries in (self._tasks, self._roots, self._ended):
                entries.pop(env_id, None)
        if errors:
            error = join_errors(errors)
            raise translated(error) from error
        return received.batch is not None

    def _store_batch(self, batch: Batch) -> None:
        """Store the rows of a batch by the kind of task."""
        self._engine.store_infos(batch.info, batch.env_id)
        packed = self._step_tensors((batch.obs, batch.reward, batch.terminated, batch.truncated), batch.env_id)
        rows = self._to_tensordict(packed, batch_size=torch.Size([batch.num_rows]))
        tasks = [self._tasks[env_id] for env_id in batch.env_id.tolist()]
        for task in dict.fromkeys(tasks):
            places = [place for place, own in enumerate(tasks) if own is task]
            is_whole = len(places) == len(tasks)
            chunk = rows if is_whole else rows[places]
            self._store_result(task, batch.env_id if is_whole else batch.env_id[places], chunk)

    def _store_result(self, task: _TaskKind, ids: Ids, rows: Any) -> None:
        if task is _TaskKind.RESET:
            self._engine.mark_reset(ids)
            self._done[task].append((ids, rows.exclude("reward").set("env_index", torch.from_numpy(ids))))
            return
        if task is _TaskKind.STEP:
            self._store_flags(ids, rows)
            self._done[task].append((ids, self._with_roots(ids, rows)))
            return
        for place, env_id in enumerate(ids.tolist()):
            self._store_step_and_reset(env_id, ids[place : place + 1], rows[place : place + 1])

    def _store_step_and_reset(self, env_id: int, own: Ids, row: Any) -> None:
        stepped = self._ended.pop(env_id, None)
        if stepped is None:
            self._store_flags(own, row)
            if bool(row["done"].any()):
                self._ended[env_id] = row
                self._engine.pool.reset_async(env_ids=own)
                return
            begun = row.exclude("reward")
            stepped = row
        else:
            self._engine.mark_reset(own)
            begun = row.exclude("reward")
        self._done[_TaskKind.STEP_AND_RESET].append((own, self._with_roots(own, stepped.copy().set("begun", begun))))

    def _store_flags(self, ids: Ids, rows: Any) -> None:
        flags = (rows[key].reshape(len(ids)).cpu().numpy() for key in ("terminated", "truncated"))
        self._engine.store_flags(ids, *flags)

    def _with_roots(self, ids: Ids, following: Any) -> Any:
        """Return the rows that were sent with the steps of these envs, with "next"."""
        roots = [self._roots.pop(env_id) for env_id in ids.tolist()]
        source = roots[0][0]
        if all(own is source for own, _ in roots):
            sent = source[[place for _, place in roots]]
        else:
            sent = torch.stack([own[place] for own, place in roots])
        return sent.set("next", following).set("env_index", torch.from_numpy(ids))

    # ---- results -----------------------------------------------------------------------------------------------------

    def _num_done(self, task: _TaskKind) -> int:
        return sum(len(ids) for ids, _ in self._done[task])

    def _pop_results(self, task: _TaskKind, most: int) -> Any:
        taken: list[Any] = []
        left: list[tuple[Ids, Any]] = []
        for ids, rows in self._done[task]:
            num = min(most, len(ids))
            most -= num
            if num:
                taken.append(rows if num == len(ids) else rows[:num])
                for env_id in ids[:num].tolist():
                    self._tasks.pop(env_id, None)  # None, because its worker may have died meanwhile
            if num < len(ids):
                left.append((ids[num:], rows[num:]))
        self._done[task] = left
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def _pop_result_of(self, task: _TaskKind, env_id: int) -> Any:
        for chunk, (ids, rows) in enumerate(self._done[task]):
            place = np.flatnonzero(ids == env_id)
            if not place.size:
                continue
            rest = np.flatnonzero(ids != env_id)
            self._done[task][chunk : chunk + 1] = [(ids[rest], rows[rest.tolist()])] if rest.size else []
            self._tasks.pop(env_id, None)
            return rows[int(place[0])]
        raise NotSteppedError(f"env {env_id} has no finished {task.value}")  # the caller has checked it

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
        for entries in (self._tasks, self._roots, self._ended):
            entries.clear()
        self._done = {task: [] for task in _TaskKind}
        super().close(raise_if_closed=raise_if_closed)

    shutdown = close


replace_class(AsyncStepmillEnv, torchrl.envs.AsyncEnvPool)
