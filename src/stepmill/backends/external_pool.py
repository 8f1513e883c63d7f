"""Runs the envs of another library's pool, which is called an external pool. A proxy connects the pool to the slab.

    learner ──► slab: commands ──► take ──► pool.send, pool.reset
    learner ◄── slab: results ◄── publish ◄── pool.recv

An external pool has its own threads and its own loop, and returns arrays (`ExternalPool`). Its envs have tickets, states and
rows like all other envs, so the learner treats them in the same way.

If the result of each env is available as soon as it is ready, the proxy runs in a thread. Deadlines are then enforced. If
the external pool hangs, close() warns and leaves the thread running. If envs that are commanded together finish together,
the proxy runs in the learner's thread. It starts commands when they are sent, and receives results when the learner waits
for them. This saves two thread switches in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill.backends.base import Backend, BackendTraits
from stepmill.backends.serial import InlineBackend
from stepmill.backends.thread import ThreadBackend, ThreadWorker
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.worker.calls import ServingLoop
from stepmill.worker.env_host import BuiltEnvs, Fault, loop_settings
from stepmill.worker.error_records import RaisePredicate, describe_error, raise_none
from stepmill.worker.messages import WorkerPlan, WorkerSettings
from stepmill.worker.signals import allow_signals

ResetCommand: TypeAlias = tuple[int, Any, Any]
"""(server, seed or None, options or None)."""

PoolResults: TypeAlias = "tuple[Any, Any, Any, Any, Any, Mapping[str, Any] | None]"
"""(servers [k], observation arrays [k, ...], reward [k], terminated [k], truncated [k], infos as arrays [k, ...] or None)."""


class ExternalPool(Protocol):
    """A pool of envs, which one thread uses. An exception of a method becomes a fault of the envs that it concerns."""

    def send(self, servers: NDArray[np.int32], actions: Any) -> None:
        """Start a step of these k envs. `actions` has arrays [k, ...] in the structure of the action space."""

    def reset(self, commands: Sequence[ResetCommand]) -> None:
        """Start these resets, and return at once."""

    def recv(self) -> PoolResults:
        """Wait until a pending env is done, and return the results of all that are done. Rewards of resets are ignored."""

    def env_handle(self, server: int) -> object:
        """Return the object that serves calls, attributes and `render` of one env."""

    def close(self) -> None:
        """End the pool. No env is pending when this is called."""


@runtime_checkable
class Interruptible(Protocol):
    """An external pool that runs in the calling thread. A signal handler may raise an exception anywhere in its methods."""

    def drop(self) -> None:
        """Discard all pending envs, if there are any, so that no later `recv` returns their results."""


class PoolMaker(Protocol):
    """The env function of an external pool. All envs of the pool have the same object as their env function."""

    @property
    def is_async(self) -> bool:
        """Whether each env's result is available as soon as it is ready.

        If not, one `recv` returns the results of all envs that were commanded together.
        """

    def make_pool(self, num_envs: int) -> tuple[ExternalPool, EnvSpec]:
        """Return a pool of `num_envs` envs, and the spec of its envs."""


def external_pool_backend(settings: WorkerSettings, env_fns: Sequence[object]) -> Backend:
    """Return the backend for an external pool.

    Raises:
        UsageError: the env functions are not all the same `PoolMaker`.
    """
    maker: Any = env_fns[0]
    if any(fn is not maker for fn in env_fns) or not hasattr(maker, "make_pool"):
        raise UsageError(
            "this backend runs the envs of one external pool; give the same pool maker for all envs, for example "
            "[stepmill.envs.envpool.EnvPoolTask('Pong-v5')] * num_envs"
        )
    return ExternalPoolBackend(settings) if maker.is_async else InlineExternalPoolBackend(settings)


class _PoolHost:
    """Makes and closes the external pool of one worker's plan."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self.pool: ExternalPool | None = None

    def build(self, *, should_raise: RaisePredicate = raise_none) -> BuiltEnvs:
        """Make the pool. Exceptions become a fault, except those that `should_raise` selects."""
        built = BuiltEnvs()
        maker: Any = self.plan.env_fns[0]
        num_envs = len(self.plan.env_ids)
        made: list[Any] = []
        try:
            with allow_signals():
                _native.append_result(made, partial(maker.make_pool, num_envs))
            self.pool, spec = made[0]
            built.envs = [self.pool.env_handle(server) for server in range(num_envs)]
            built.specs = [spec] * num_envs
        except BaseException as exc:
            self.pool = made[0][0] if made else None
            self.close()
            if should_raise(exc):
                raise
            built.faults.append((self.plan.env_ids[0], describe_error(exc, "construct")))
        return built

    def close(self) -> tuple[Fault, ...]:
        pool, self.pool = self.pool, None
        try:
            if pool is not None:
                pool.close()
        except BaseException as exc:  # an error of the external pool must not prevent the backend from closing
            return ((self.plan.env_ids[0], describe_error(exc, "close")),)
        return ()

    def make_proxy(self, slab: _native.Slab, built: BuiltEnvs, settings: WorkerSettings) -> Proxy:
        assert self.pool is not None  # `build` reported no faults
        loop = _native.ExternalPoolLoop(slab, self.plan.worker, loop_settings(built.specs[0], settings))
        return Proxy(loop, self.pool)


# ---- in a thread -------------------------------------------------------------------------------------------------------


class ExternalPoolBackend(ThreadBackend):
    """Runs one external pool with its proxy in a thread."""

    def _make_worker(self, plan: WorkerPlan, num_requests: int) -> ThreadWorker:
        return _ProxyWorker(plan, self._settings, num_requests=num_requests)


class _ProxyWorker(ThreadWorker):
    """The worker thread that runs the proxy."""

    def build(self) -> BuiltEnvs:
        self._host = _PoolHost(self.plan)
        return self._host.build()

    def make_loop(self, slab: _native.Slab) -> Proxy:
        return self._host.make_proxy(slab, self.built, self.settings)

    def close_envs(self) -> tuple[Fault, ...]:
        return self._host.close()


# ---- in the calling thread ---------------------------------------------------------------------------------------------


class InlineExternalPoolBackend(InlineBackend):
    """Runs one external pool with its proxy in the calling thread."""

    @property
    def traits(self) -> BackendTraits:
        return BackendTraits(driver={"advance": self.advance}, is_inline=True)

    def advance(self, is_waiting: bool) -> bool:
        """Start sent commands and, if `is_waiting`, receive results; return whether there were any.

        The pool's native code calls this.
        """
        with self._use:
            # After the end, the native code checks whether the pool is closed before it calls this again.
            return self._loop is None or self._loop.advance(is_waiting=is_waiting)

    def _build(self, on_begin: Callable[[int], None]) -> BuiltEnvs:
        self._host = _PoolHost(self._plan)
        return self._host.build(should_raise=_native.is_from_signal)

    def _make_loop(self, slab: _native.Slab) -> Proxy:
        return self._host.make_proxy(slab, self._built, self._settings)

    def _end_loop(self, timeout_s: float) -> bool:
        self._loop.drain()
        return True

    def _close_envs(self, built: BuiltEnvs) -> tuple[Fault, ...]:
        return self._host.close()


# ---- the proxy -----------------------------------------------------------------------------------------------------------


class Proxy(ServingLoop):
    """Passes commands from the slab to an external pool, and its results to the slab."""

    def __init__(self, loop: _native.ExternalPoolLoop, pool: ExternalPool) -> None:
        self._loop = loop
        self._pool = pool
        self.requests_seen = loop.requests_seen

    def run(self) -> int:
        """Pass on commands and results until there is a request or the worker must stop. Return LOOP_REQUEST or LOOP_STOP."""
        while True:
            # Wait for commands only if no env is pending. Otherwise wait for results, and read commands after the next.
            exit_kind, servers, actions, resets = self._loop.receive_commands(self._loop.num_outstanding() == 0)
            if exit_kind == _native.LOOP_STOP:
                self.drain()
            if exit_kind in (_native.LOOP_STOP, _native.LOOP_REQUEST):
                return exit_kind
            self._start_pool_calls(servers, actions, resets or ())
            if self._loop.num_outstanding():
                self._receive()

    def advance(self, *, is_waiting: bool) -> bool:
        """Start sent commands and, if `is_waiting`, receive results; return whether there were any."""
        try:
            _, servers, actions, resets = self._loop.receive_commands(may_wait=False)
            self._start_pool_calls(servers, actions, resets or ())
            has_begun = servers is not None or bool(resets)
            if not is_waiting or not self._loop.num_outstanding():
                return has_begun
            self._receive()
        except BaseException as exc:
            self._fail_interrupted(exc)
            raise
        return True

    def drain(self) -> None:
        """Wait for the results of all pending envs."""
        while self._loop.num_outstanding():
            self._receive()

    def run_until(self, local: int, after_ticket: int) -> None:
        """Run the commands of an env up to a ticket. `serve_request` calls this."""
        try:
            _, servers, actions, resets = self._loop.receive_command(local, after_ticket)
            self._start_pool_calls(servers, actions, resets or ())
            while local in self._loop.outstanding():
                self._receive()
        except BaseException as exc:
            self._fail_interrupted(exc)
            raise

    def restore(self, local: int, position: dict[str, Any]) -> None:
        raise UsageError("the envs of another library's pool have no state that could be restored")

    def set_default_options(self, local: int, options: bytes | None) -> None:
        """Refuse options for automatic resets, because the external pool does these resets itself.

        Raises:
            UsageError: `options` is not None.
        """
        if options is not None:
            raise UsageError("the envs of an external pool take no reset options; give them to the pool's maker")

    def _fail_interrupted(self, exc: BaseException) -> None:
        """If a signal handler raised `exc`, fail all pending envs, because their state is unknown."""
        if _native.is_from_signal(exc):
            if isinstance(self._pool, Interruptible):
                self._pool.drop()
            self._loop.fail(self._loop.outstanding(), exc, "step")

    def _start_pool_calls(
        self, servers: NDArray[np.int32] | None, actions: Any, resets: Sequence[ResetCommand]
    ) -> None:
        if servers is not None:
            self._fail_on_error(servers, "step", lambda: self._pool.send(servers, actions))
        if resets:
            self._fail_on_error([command[0] for command in resets], "reset", lambda: self._pool.reset(resets))

    def _receive(self) -> None:
        """Wait for results, and write them to the slab."""
        try:
            servers, obs, reward, terminated, truncated, infos = self._pool.recv()
        except BaseException as exc:  # all fail, because it is unknown which envs are still pending
            if _native.is_from_signal(exc):
                raise
            self._loop.fail(self._loop.outstanding(), exc, "step")
            return
        to_reset: list[int] = []
        try:
            to_reset = self._loop.publish(servers, obs, reward, terminated, truncated, infos)
        except Exception as exc:
            if _native.is_from_signal(exc):
                raise
            self._loop.fail(servers, exc, "output of step")
        if to_reset:
            self._fail_on_error(
                to_reset, "reset", lambda: self._pool.reset([(server, None, None) for server in to_reset])
            )

    def _fail_on_error(self, servers: Any, phase: str, call: Callable[[], None]) -> None:
        """Call a method of the external pool. If it raises an exception, these envs fail."""
        try:
            call()
        except BaseException as exc:  # also SystemExit, which the external pool may raise
            if _native.is_from_signal(exc):
                raise
            self._loop.fail(servers, exc, phase)
