"""`EnvSupervisor`: DI-engine's newer manager, over processes or threads, with or without waiting."""

from __future__ import annotations

import logging
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from stepmill.envs.di_engine_managed import ManagedSettings
from stepmill.frontends.di_engine.config import options_in, settings_in
from stepmill.frontends.di_engine.desk import Desk, DeskSettings, replay_paths
from stepmill.frontends.di_engine.errors import ManagerClosedError, ManagerUsageError, SeedTypeError
from stepmill.frontends.di_engine.payloads import ChildType, RecvPayload, SendPayload
from stepmill.frontends.di_engine.states import EnvState
from stepmill.frontends.di_engine.supervised import SLICE_S, Supervised
from stepmill.spec.errors import RecvTimeout, UsageError
from stepmill.spec.options import BackendName, OptionKeywords, pop_options

logger = logging.getLogger("stepmill.di_engine")


class EnvSupervisor(Supervised):
    """Envs in processes or threads, with DI-engine's interface of that name.

    A step that fails is an abnormal timestep, and its env is reset; a reset that fails is tried `max_try` times. Commands
    to an env that is at work wait for their turn. Unlike the original, no env is built here to learn its spaces
    (D-B14), and `recv` without anything to wait for is refused; it waits without waking up to look (D-B17).

    Args:
        type_: processes or threads. A thread that hangs cannot be ended, and its env cannot be reset: the supervisor closes.
        env_fn: functions that make the envs.
        retry_type: "reset", or "renew" for a new env.
        max_try: attempts at a reset; `max_retry` is its older name.
        auto_reset: reset an env whose episode is over, until it has had `episode_num`.
        reset_timeout, step_timeout: seconds.
        retry_waiting_time: seconds before another attempt.
        shared_memory, copy_on_get: as for the managers.
        **kwargs: these last, `episode_num`, `context`, and fields of PoolOptions by name, as for the managers.
    """

    def __init__(
        self,
        type_: Any = ChildType.PROCESS,
        env_fn: Sequence[Callable[[], Any]] | None = None,
        retry_type: str = "reset",
        max_try: int | None = None,
        max_retry: int | None = None,
        auto_reset: bool = True,
        **kwargs: Any,
    ) -> None:
        self._desk: Desk | None = None
        self._running = False
        self._type = ChildType(getattr(type_, "value", type_))
        self._env_fn = list(env_fn or ())
        self._env_num = len(self._env_fn)
        self._retry_type = getattr(retry_type, "value", retry_type)
        self._max_try = max_try or max_retry or 1
        self._auto_reset = auto_reset
        of_pool = cast("OptionKeywords", pop_options(kwargs))
        kwargs |= settings_in(of_pool)
        self._options = options_in(of_pool)
        self._num_workers: int | None = kwargs.pop("num_workers", None)
        self._linger: float = kwargs.pop("linger", 0.0)
        self._reset_timeout: float | None = kwargs.pop("reset_timeout", None)
        self._step_timeout: float | None = kwargs.pop("step_timeout", None)
        self._retry_waiting_time: float | None = kwargs.pop("retry_waiting_time", None)
        self._episode_num: float = kwargs.pop("episode_num", float("inf"))
        is_process = self._type is ChildType.PROCESS
        self._shared_memory = kwargs.pop("shared_memory", True) and is_process
        self._copy_on_get = kwargs.pop("copy_on_get", True)
        self._context = kwargs.pop("context", "fork")
        if kwargs:
            logger.warning("Unknown parameters on env supervisor: %s", sorted(kwargs))
        self._init_states()

    # ---- life ----------------------------------------------------------------------------------------------------

    def start_link(self) -> None:
        """Start the workers, if they are not there."""
        if self._desk is None:
            is_process = self._type is ChildType.PROCESS
            settings = DeskSettings(
                backend=BackendName.PROCESS if is_process else BackendName.THREAD,
                options=self._options,
                managed=ManagedSettings(shared_memory=self._shared_memory, is_process=is_process),
                num_workers=self._num_workers,
                linger_s=self._linger,
                context=self._context,
                copy=self._copy_on_get,
                step_timeout_s=self._step_timeout,
                reset_timeout_s=self._reset_timeout,
            )
            self._desk = Desk(self._env_fn, settings)

    def launch(self, reset_param: Any = None, block: bool = True) -> None:
        """Start the envs and reset them; with block=False their observations come by `recv`."""
        if not self.closed:
            raise ManagerUsageError("Please first close the env supervisor before launch it")
        if reset_param is not None and len(reset_param) != self._env_num:
            raise ManagerUsageError(f"reset_param has {len(reset_param)} entries for {self._env_num} envs")
        self.start_link()
        self._running = True
        try:
            if self._env_replay_path is not None:
                self._live_desk().pool.set_attr("replay_path", list(self._env_replay_path))
            self.reset(reset_param, block=block)
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self, timeout: float | None = None) -> None:
        """End the envs, in at most two seconds, whatever `timeout` says. It can be launched again."""
        desk, self._desk = self._desk, None
        if desk is not None:
            desk.close()
        if self._running:
            self._running = False
            self._init_states()

    def close(self, timeout: float | None = None) -> None:
        """End the envs; as `shutdown`."""
        self.shutdown(timeout)

    @property
    def closed(self) -> bool:
        """Whether it is not running."""
        return not self._running

    # ---- commands ------------------------------------------------------------------------------------------------

    def step(self, actions: Any, block: bool = True) -> list[Any] | None:
        """Step envs.

        Args:
            actions: by env_id, or a list for all.
            block: wait, and return one tree array per env, in the order of `actions`; else they come by `recv`.
        """
        self._check_running()
        named = dict(enumerate(actions)) if isinstance(actions, (list, tuple)) else dict(actions)
        if not named:
            raise ManagerUsageError("Action is empty!")
        payloads = [SendPayload(env_id, method="step", args=[action]) for env_id, action in named.items()]
        for payload in payloads:
            self.send(payload)
        if not block:
            return None
        data = [payload.data for payload in self.recv_all(payloads, ignore_err=True)]
        self._settle(named)
        return data

    def reset(self, reset_param: Any = None, block: bool = True) -> None:
        """Reset envs.

        Args:
            reset_param: by env_id, or a list for all, keyword arguments of the env's `reset`; None is all without.
            block: wait; else their observations come by `recv`.
        """
        self._check_running()
        param = reset_param or {env_id: {} for env_id in range(self._env_num)}
        named = dict(enumerate(param)) if isinstance(param, (list, tuple)) else dict(param)
        payloads = []
        for env_id, kwargs in named.items():
            if self._env_replay_path is not None and self.env_states[env_id] is EnvState.RUN:
                logger.warning("Please don't reset an unfinished env when you enable save replay, we just skip it")
                continue
            self._reset_param[env_id] = kwargs or self._reset_param.get(env_id) or {}
            payloads.append(SendPayload(env_id, method="reset", kwargs=self._reset_param[env_id]))
        for payload in payloads:
            self.send(payload)
        if block and payloads:
            self.recv_all(payloads, ignore_err=True)
            self._settle(named)

    def send(self, payload: SendPayload) -> None:
        """Have an env do something, after what it was asked before: "step", "reset", or one of its methods."""
        self._check_running()
        self._queues[payload.proc_id].append(payload)
        self._advance(payload.proc_id)

    def recv(self, ignore_err: bool = False) -> RecvPayload:
        """Return what came first; waits for it.

        Args:
            ignore_err: pass over steps that failed; else they come with `err` and an abnormal timestep.
        Raises:
            RuntimeError: a reset has failed `max_try` times; the supervisor is closed.
            UsageError: nothing is under way.
        """
        self._check_running()
        while True:
            while self._inbox:
                payload = self._inbox.popleft()
                if payload.err is None or not ignore_err:
                    return payload
            if not self._at_work:
                raise UsageError("recv() with nothing under way would wait for ever; step() or reset() first")
            self._receive(SLICE_S)

    def recv_all(
        self,
        send_payloads: Sequence[SendPayload],
        ignore_err: bool = False,
        callback: Callable[[RecvPayload, dict[str, SendPayload]], object] | None = None,
        timeout: float | None = None,
    ) -> list[RecvPayload]:
        """Wait for what came of these, and return it in their order; what else comes is kept for `recv`.

        Args:
            send_payloads: which.
            ignore_err: leave an error in its payload; else it is raised. What is not there after `timeout` seconds has
                a TimeoutError then, instead of raising one.
            callback: told of each payload and of those that remain.
        """
        remain = {payload.req_id: payload for payload in send_payloads}
        found: dict[str, RecvPayload] = {}
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            for payload in [payload for payload in self._inbox if payload.req_id in remain]:
                self._inbox.remove(payload)
                del remain[str(payload.req_id)]
                found[str(payload.req_id)] = payload
                if payload.err is not None and not ignore_err:
                    raise payload.err
                if callback is not None:
                    callback(payload, remain)
            if not remain or not self._at_work:
                break
            left_s = SLICE_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                self._late(remain, found, timeout, ignore_err=ignore_err)
                break
            self._receive(min(left_s, SLICE_S))
        return [found[payload.req_id] for payload in send_payloads if payload.req_id in found]

    def _late(
        self,
        remain: Mapping[str, SendPayload],
        found: dict[str, RecvPayload],
        timeout: float | None,
        *,
        ignore_err: bool,
    ) -> None:
        error = RecvTimeout(
            f"envs {[one.proc_id for one in remain.values()]} did not answer within {timeout} s; nothing is lost, "
            "recv() has it later",
            timeout_s=timeout or 0.0,
        )
        if not ignore_err:
            raise error
        for req_id, sent in remain.items():
            found[req_id] = RecvPayload(sent.proc_id, req_id, sent.method, err=error)

    def seed(self, seed: Mapping[int, int] | list[int] | int, dynamic_seed: bool | None = None) -> None:
        """Give seeds for the first reset after `launch`, as the managers' `seed` does."""
        if isinstance(seed, numbers.Integral):
            self._env_seed = {env_id: int(seed) + env_id for env_id in range(self._env_num)}
        elif isinstance(seed, list):
            if len(seed) != self._env_num:
                raise ManagerUsageError(f"len(seed) {len(seed)} != env_num {self._env_num}")
            self._env_seed = dict(enumerate(seed))
        elif isinstance(seed, Mapping):
            self._env_seed = dict(seed)
        else:
            raise SeedTypeError(f"Invalid seed arguments type: {type(seed)}")
        self._env_dynamic_seed = dynamic_seed

    def enable_save_replay(self, replay_path: Any) -> None:
        """Have each env save replays, from the next `launch` on."""
        self._env_replay_path = replay_paths(replay_path, self._env_num)

    # ---- inner ---------------------------------------------------------------------------------------------------

    def _check_running(self) -> None:
        if not self._running:
            raise ManagerClosedError("Env supervisor has closed.")
