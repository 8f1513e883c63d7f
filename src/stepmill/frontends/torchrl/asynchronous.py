"""`AsyncStepmillEnv`: some envs at a time, as they get ready; in place of TorchRL's `AsyncEnvPool`.

What differs from it, on purpose: a timeout bounds the whole call and loses nothing (X-2); what was returned is never written
again (X-3); "env_index" is a tensor [B]; data lie in shared memory on every backend, and no result waits in a queue of pickles.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from stepmill.frontends.torchrl.engine import Engine
from stepmill.frontends.torchrl.env import StepmillEnv
from stepmill.frontends.torchrl.errors import NotSteppedError, StillBusyError, translated
from stepmill.spec.batch import Batch
from stepmill.spec.errors import StepmillError, UsageError
from stepmill.spec.options import EnvState

Ids = NDArray[np.int64]
EnvIndex = int | Sequence[int] | None


class _Task(Enum):
    """What an env was asked for; the values are for messages."""

    STEP = "step"
    RESET = "reset"
    STEP_AND_RESET = "step_and_maybe_reset"


class AsyncStepmillEnv(StepmillEnv):
    """Envs that are stepped and reset a few at a time: `async_*_send` gives tasks, `async_*_recv` takes what is done.

    The synchronous methods work, too, while no task is at work. An env is busy from the sending of a task until its result
    is received.

    Args:
        env_fns: as for `StepmillEnv`.
        min_get: how many results a `recv` waits for if it is not told.
        **kwargs: all others of `StepmillEnv`; `frame_skip` must be 1.
    """

    def __init__(self, env_fns: Any, *, min_get: int = 1, **kwargs: Any) -> None:
        super().__init__(env_fns, **kwargs)
        if not 1 <= min_get <= self.num_workers:
            self.close()
            raise UsageError(f"min_get={min_get} must be 1 to the number of envs, {self.num_workers}")
        self.min_get = min_get

    def _set_up(self, engine: Engine, **kwargs: Any) -> None:
        self._tasks: dict[int, _Task] = {}  # of envs that are busy, also those whose result only waits to be taken
        self._roots: dict[int, tuple[TensorDictBase, int]] = {}  # what was sent with a step: a row of a tensordict
        self._ended: dict[int, TensorDictBase] = {}  # STEP_AND_RESET: what the step gave, while the env is reset
        self._done: dict[_Task, list[tuple[Ids, Any]]] = {task: [] for task in _Task}  # in the order of arrival
        super()._set_up(engine, **kwargs)
        if engine.frame_skip != 1:
            self.close()
            raise UsageError("frame_skip is for steps of all envs; wrap the single envs for asynchronous ones")

    # ---- steps --------------------------------------------------------------------------------------------------------

    def async_step_send(self, tensordict: TensorDictBase, env_index: EnvIndex = None) -> None:
        """Begin a step of some envs.

        Args:
            tensordict: [B] with "action", in the order of the envs; [] for a single one.
            env_index: which envs; None is what the tensordict has under "env_index", or all.
        Raises:
            RuntimeError: one of them is busy. Nothing is sent.
            UsageError: one of them is done, or was never reset.
        """
        self._send_step(_Task.STEP, tensordict, env_index)

    def async_step_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Return finished steps [B]: what was sent, with "next" and "env_index".

        Args:
            min_get: wait for so many.
            env_index: wait for this env alone; [] is returned.
            max_get: take at most so many; None is all that are there.
            timeout: seconds for the whole call; 0 only looks.
        Raises:
            TimeoutError: too few in time. Nothing is lost; call again.
            RuntimeError: fewer are at work.
            EnvError: an env raised. The others lose nothing.
        """
        result: TensorDictBase = self._recv(_Task.STEP, min_get, env_index, max_get, timeout)
        return result

    def async_step_and_maybe_reset_send(self, tensordict: TensorDictBase, env_index: EnvIndex = None) -> None:
        """Begin a step of some envs, each with a reset if it is done then; see `async_step_send`."""
        self._send_step(_Task.STEP_AND_RESET, tensordict, env_index)

    def async_step_and_maybe_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Return (finished steps, where the next ones begin), [B] each; see `async_step_recv`."""
        result: TensorDictBase = self._recv(_Task.STEP_AND_RESET, min_get, env_index, max_get, timeout)
        following = self._step_mdp(result.exclude("next").set("next", result["next", "begun"]))
        return result.set("next", result["next"].exclude("begun")), following

    # ---- resets -------------------------------------------------------------------------------------------------------

    def async_reset_send(self, tensordict: TensorDictBase | None = None, env_index: EnvIndex = None) -> None:
        """Begin a reset of some envs; see `async_step_send`. Seeds are those of `set_seed`."""
        ids, _ = self._name(tensordict, env_index)
        self._check_idle(ids)
        self._engine.reset_async(ids)
        self._tasks.update(dict.fromkeys(ids.tolist(), _Task.RESET))

    def async_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Return finished resets [B], with "env_index"; see `async_step_recv`."""
        result: TensorDictBase = self._recv(_Task.RESET, min_get, env_index, max_get, timeout)
        return result

    # ---- sending ------------------------------------------------------------------------------------------------------

    def _send_step(self, task: _Task, tensordict: TensorDictBase, env_index: EnvIndex) -> None:
        ids, rows = self._name(tensordict, env_index)
        if rows is None or rows.batch_size != torch.Size([len(ids)]):
            shape = None if rows is None else tuple(rows.batch_size)
            raise UsageError(f"the tensordict has batch size {shape} for {len(ids)} envs; give a row for each")
        self._check_idle(ids)
        with torch.no_grad():
            actions = self._reader.read(rows)
        try:
            self._engine.pool.send(actions, ids)
        except StepmillError as exc:
            raise translated(exc) from exc
        for place, env_id in enumerate(ids.tolist()):
            self._tasks[env_id], self._roots[env_id] = task, (rows, place)

    def _name(self, tensordict: TensorDictBase | None, env_index: EnvIndex) -> tuple[Ids, TensorDictBase | None]:
        """Return the envs meant, and the tensordict with a row for each."""
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
        return np.atleast_1d(np.asarray(listed, np.int64)), rows

    def _check_idle(self, ids: Ids) -> None:
        busy = sorted(set(ids.tolist()) & self._tasks.keys())
        if busy:
            raise StillBusyError(
                f"Some envs are still processing a step: envs that are busy: {set(self._tasks)}, queried: {ids.tolist()}. "
                f"Receive {busy} first.",
                env_ids=busy,
            )

    # ---- receiving ----------------------------------------------------------------------------------------------------

    def _recv(
        self, task: _Task, min_get: int | None, env_index: int | None, max_get: int | None, timeout: float | None
    ) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        if env_index is not None:
            self._await(task, lambda: any(env_index in ids for ids, _ in self._done[task]), 1, deadline, only=env_index)
            return self._take_one(task, env_index)
        least = self.min_get if min_get is None else min_get
        if max_get is not None and max_get < least:
            raise UsageError(f"max_get={max_get} is below min_get={least}")
        self._await(task, lambda: self._num_done(task) >= least, least, deadline)
        self._absorb(self._engine.pool.recv_ready())
        return self._take(task, self._num_done(task) if max_get is None else max_get)

    def _await(self, task: _Task, is_there: Any, least: int, deadline: float | None, only: int | None = None) -> None:
        at_work = [env_id for env_id, own in self._tasks.items() if own is task and only in (None, env_id)]
        if len(at_work) < least:
            raise NotSteppedError(
                f"Cannot await {least} {task.value} when only {len(at_work)} are being stepped; send them first"
            )
        while not is_there():
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                self._absorb(self._engine.pool.recv(min_envs=1, timeout_s=left_s))
            except StepmillError as exc:
                self._forget_faulted()
                raise translated(exc) from exc

    def _forget_faulted(self) -> None:
        states = self._engine.pool.states
        for env_id in [env_id for env_id in self._tasks if states[env_id] is EnvState.FAULTED]:
            self._tasks.pop(env_id)
            self._roots.pop(env_id, None)
            self._ended.pop(env_id, None)

    def _absorb(self, batch: Batch) -> None:
        """Sort finished rows by what they were asked for."""
        if not batch.num_rows:
            return
        self._engine.note_infos(batch.info, batch.env_id)
        packed = self._pack((batch.obs, batch.reward, batch.terminated, batch.truncated), batch.env_id)
        rows = self._to_rows(packed, batch.num_rows)
        tasks = [self._tasks[env_id] for env_id in batch.env_id.tolist()]
        for task in dict.fromkeys(tasks):
            places = [place for place, own in enumerate(tasks) if own is task]
            is_whole = len(places) == len(tasks)
            chunk = rows if is_whole else rows[places]
            self._file(task, batch.env_id if is_whole else batch.env_id[places], chunk)

    def _file(self, task: _Task, ids: Ids, rows: Any) -> None:
        if task is _Task.RESET:
            self._engine.note_reset(ids)
            self._done[task].append((ids, rows.exclude("reward").set("env_index", torch.from_numpy(ids))))
            return
        if task is _Task.STEP:
            self._note_step(ids, rows)
            self._done[task].append((ids, self._with_roots(ids, rows)))
            return
        for place, env_id in enumerate(ids.tolist()):
            self._file_step_and_reset(env_id, ids[place : place + 1], rows[place : place + 1])

    def _file_step_and_reset(self, env_id: int, own: Ids, row: Any) -> None:
        stepped = self._ended.pop(env_id, None)
        if stepped is None:
            self._note_step(own, row)
            if bool(row["done"].any()):
                self._ended[env_id] = row
                self._engine.pool.reset_async(env_ids=own)
                return
            begun = row.exclude("reward")
            stepped = row
        else:
            self._engine.note_reset(own)
            begun = row.exclude("reward")
        self._done[_Task.STEP_AND_RESET].append((own, self._with_roots(own, stepped.copy().set("begun", begun))))

    def _note_step(self, ids: Ids, rows: Any) -> None:
        flags = (rows[key].reshape(len(ids)).cpu().numpy() for key in ("terminated", "truncated"))
        self._engine.note_step(ids, *flags)

    def _with_roots(self, ids: Ids, following: Any) -> Any:
        """Return what was sent with the steps of these envs, with "next"."""
        roots = [self._roots.pop(env_id) for env_id in ids.tolist()]
        source = roots[0][0]
        if all(own is source for own, _ in roots):
            sent = source[[place for _, place in roots]]
        else:
            sent = torch.stack([own[place] for own, place in roots])
        return sent.set("next", following).set("env_index", torch.from_numpy(ids))

    def _to_rows(self, tensors: dict[str, Any], num: int) -> Any:
        return self._to_tensordict(tensors, batch_size=torch.Size([num]))

    # ---- handing out --------------------------------------------------------------------------------------------------

    def _num_done(self, task: _Task) -> int:
        return sum(len(ids) for ids, _ in self._done[task])

    def _take(self, task: _Task, most: int) -> Any:
        taken: list[Any] = []
        left: list[tuple[Ids, Any]] = []
        for ids, rows in self._done[task]:
            num = min(most, len(ids))
            most -= num
            if num:
                taken.append(rows if num == len(ids) else rows[:num])
                for env_id in ids[:num].tolist():
                    self._tasks.pop(env_id)
            if num < len(ids):
                left.append((ids[num:], rows[num:]))
        self._done[task] = left
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def _take_one(self, task: _Task, env_id: int) -> Any:
        for chunk, (ids, rows) in enumerate(self._done[task]):
            place = np.flatnonzero(ids == env_id)
            if not place.size:
                continue
            rest = np.flatnonzero(ids != env_id)
            self._done[task][chunk : chunk + 1] = [(ids[rest], rows[rest.tolist()])] if rest.size else []
            self._tasks.pop(env_id)
            return rows[int(place[0])]
        raise NotSteppedError(f"env {env_id} has no finished {task.value}")  # never: who calls has seen it

    # ---- the synchronous methods --------------------------------------------------------------------------------------

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = self._read_mask(tensordict, "_reset")
        self._check_idle(np.arange(self.num_workers) if mask is None else np.flatnonzero(mask))
        return super()._reset(tensordict, **kwargs)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._check_idle(np.arange(self.num_workers))
        return super()._step(tensordict)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """End the envs and their workers; what was not received is dropped. Idempotent."""
        for books in (self._tasks, self._roots, self._ended):
            books.clear()
        self._done = {task: [] for task in _Task}
        super().close(raise_if_closed=raise_if_closed)

    shutdown = close
