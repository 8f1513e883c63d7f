"""Envs of a pool that is not ours. A proxy stands between it and the slab.

    learner ──► slab: commands ──► take ──► pool.send, pool.reset
    learner ◄── slab: results ◄── publish ◄── pool.recv

The pool has its own threads and its own loop; what it owes us is arrays (`ForeignPool`). Whatever it is, an env in it has
a ticket, a state and a row like any other, and the learner cannot tell the difference.

Where envs answer one by one the proxy is a thread of the learner's process: deadlines hold, and a pool that never answers
is left behind by close(), with a warning, as a hung thread is. Where those commanded together answer together the learner
is the proxy itself: it begins what it sends, and brings what it waits for. That saves two changes of threads in each step.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill.backends.base import Backend, Future, answer_here, fault_error, warn_of_close
from stepmill.backends.serial import warn_of_use
from stepmill.backends.thread import ThreadBackend, ThreadWorker
from stepmill.slab.memory import SharedSlab
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import ClosedPoolError, UsageError, join_errors
from stepmill.worker.calls import answer
from stepmill.worker.host import Built, Fault, Mailbox, loop_settings, obey
from stepmill.worker.messages import Request, WorkerPlan, WorkerReport, WorkerSettings
from stepmill.worker.records import Passes, describe, passes_none
from stepmill.worker.signals import allow_signals, defer_signals

_COUNTER_MASK = 0xFFFFFFFF  # the slab's counter of requests has 32 bits

ResetOrder: TypeAlias = tuple[int, Any, Any]
"""(server, seed or None, options or None)."""

Arrived: TypeAlias = "tuple[Any, Any, Any, Any, Any, Mapping[str, Any] | None]"
"""(servers [k], observation arrays [k, ...], reward [k], terminated [k], truncated [k], infos as arrays [k, ...] or None)."""


class ForeignPool(Protocol):
    """A pool of envs, used by one thread. What it raises becomes the fault of the envs concerned."""

    def send(self, servers: NDArray[np.int32], actions: Any) -> None:
        """Begin a step of some envs; actions [k, ...] in the structure of the action space."""

    def reset(self, orders: Sequence[ResetOrder]) -> None:
        """Begin resets."""

    def recv(self) -> Arrived:
        """Wait for at least one env that was begun, and return those that are done. The row of a reset has any reward."""

    def seat(self, server: int) -> object:
        """Return what calls, attributes and `render` of one env reach."""

    def close(self) -> None:
        """End it. Nothing is at work any more."""


@runtime_checkable
class Interruptible(Protocol):
    """A foreign pool that can be driven in line, where a signal handler may raise at any point of `send`, `reset` and `recv`."""

    def drop(self) -> None:
        """Forget what was begun and not received: no later `recv` returns it. Nothing need be at work."""


class PoolMaker(Protocol):
    """What stands for each env function of a foreign pool: one object for all of them."""

    @property
    def is_async(self) -> bool:
        """Whether envs answer one by one. Otherwise those commanded together answer together, at one `recv`."""

    def make_pool(self, num_envs: int) -> tuple[ForeignPool, EnvSpec]:
        """Return a pool of so many envs, and what they say of themselves."""


def foreign_backend(settings: WorkerSettings, env_fns: Sequence[object]) -> Backend:
    """Return the backend for a foreign pool.

    Raises:
        UsageError: the env functions are not all one maker of a foreign pool.
    """
    maker: Any = env_fns[0]
    if any(fn is not maker for fn in env_fns) or not hasattr(maker, "make_pool"):
        raise UsageError(
            "this backend runs the envs of one pool that is not stepmill's; give one maker of it for all envs, for "
            "example [stepmill.envs.envpool.EnvPoolTask('Pong-v5')] * num_envs"
        )
    return ForeignBackend(settings) if maker.is_async else InlineForeignBackend(settings)


class _Hosted:
    """A foreign pool, built for one worker's plan."""

    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self.pool: ForeignPool | None = None

    def build(self, *, passes: Passes = passes_none) -> Built:
        """Make the pool. What raises is a fault, but for what `passes` lets through, which is raised here."""
        built = Built()
        maker: Any = self.plan.env_fns[0]
        num_envs = len(self.plan.env_ids)
        made: list[Any] = []
        try:
            with allow_signals():
                _native.append_result(made, partial(maker.make_pool, num_envs))
            self.pool, spec = made[0]
            built.envs = [self.pool.seat(server) for server in range(num_envs)]
            built.specs = [spec] * num_envs
        except BaseException as exc:
            self.pool = made[0][0] if made else None
            self.close()
            if passes(exc):
                raise
            built.faults.append((self.plan.env_ids[0], describe(exc, "construct")))
        return built

    def close(self) -> tuple[Fault, ...]:
        pool, self.pool = self.pool, None
        try:
            if pool is not None:
                pool.close()
        except BaseException as exc:  # whatever the pool does, its end must not keep ours from coming
            return ((self.plan.env_ids[0], describe(exc, "close")),)
        return ()

    def serve(self, slab: _native.Slab, built: Built, settings: WorkerSettings) -> Proxy:
        assert self.pool is not None  # or there were faults, and nothing is served
        loop = _native.ForeignLoop(slab, self.plan.worker, loop_settings(built.specs[0], settings))
        return Proxy(loop, self.pool, built.envs)


# ---- in a thread -------------------------------------------------------------------------------------------------------


class ForeignBackend(ThreadBackend):
    """One pool that is not ours, behind one worker: the proxy thread."""

    def _make_worker(self, plan: WorkerPlan, num_requests: int) -> ThreadWorker:
        return _ProxyWorker(plan, self._settings, num_requests=num_requests)


class _ProxyWorker(ThreadWorker):
    """The thread of the proxy."""

    def build(self) -> Built:
        self._hosted = _Hosted(self.plan)
        return self._hosted.build()

    def serve_slab(self, slab: _native.Slab) -> None:
        proxy = self._hosted.serve(slab, self.built, self.settings)
        self.crash = obey(proxy, self.plan.env_ids, self.built.envs, self.orders)
        if not self.crash and self.may_serve():
            proxy.serve(self, self.num_before)

    def close_envs(self) -> tuple[Fault, ...]:
        return self._hosted.close()


# ---- in line -----------------------------------------------------------------------------------------------------------


class InlineForeignBackend:
    """One pool that is not ours, driven by the thread that waits for it. What a signal handler raises passes through."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._hosted = _Hosted(WorkerPlan(0, (), ()))
        self._built = Built()
        self._slab: SharedSlab | None = None
        self._proxy: Proxy | None = None
        self._is_closed = False
        self._use = threading.RLock()  # held by the thread that is at work in the pool

    def help(self, is_waiting: bool) -> bool:
        """Begin what was commanded and, to wait, bring results; returns whether anything was done. For the ledger."""
        with self._use:
            if self._is_closed:
                return True  # the ledger looks whether it is closed before it asks again
            return self._proxy is not None and self._proxy.advance(is_waiting=is_waiting)

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerReport]:
        self._hosted = _Hosted(plans[0])
        with defer_signals():
            return [self._build()]

    def attach(self, slab: SharedSlab, ring: Callable[[int], None]) -> None:
        self._slab = slab
        self._proxy = self._hosted.serve(slab.native, self._built, self._settings)

    def call(self, requests: Mapping[int, Request]) -> list[Future]:
        if self._proxy is None:
            raise ClosedPoolError("a pool that is closed answers no call; make a new one")
        with self._use:
            return answer_here(self._proxy, self._built.envs, requests)

    def revive(self, worker: int, orders: Iterable[Request] = ()) -> WorkerReport:
        """Make the pool anew."""
        if self._slab is None:
            raise ClosedPoolError("a pool that is closed, or not started, has nothing to revive")
        self._hosted.close()
        report = self._build()
        self._proxy = self._hosted.serve(self._slab.native, self._built, self._settings)
        faults = obey(self._proxy, self._hosted.plan.env_ids, self._built.envs, orders)
        if faults:
            raise join_errors([fault_error(fault, 0) for fault in faults])
        return report

    def close(self, timeout_s: float) -> None:
        """End the pool, however long that takes: what runs in the caller's thread cannot be timed out.

        Another thread that is at work in the pool is waited for, at most `timeout_s`; if it goes on, the pool is not ended.
        """
        if os.getpid() != self._pid:
            return
        if not self._use.acquire(timeout=timeout_s):
            warn_of_use(self._hosted.plan.env_ids)
            return
        try:
            self._is_closed = True
            proxy, self._proxy, self._slab, self._built = self._proxy, None, None, Built()
            if proxy is not None:
                proxy.drain()
            warn_of_close(0, self._hosted.close())
        finally:
            self._use.release()

    def _build(self) -> WorkerReport:
        self._built = built = self._hosted.build(passes=_native.is_from_signal)
        if built.faults:
            raise join_errors([fault_error(fault, 0) for fault in built.faults])
        return WorkerReport(0, self._pid, tuple(built.specs))


# ---- the proxy -----------------------------------------------------------------------------------------------------------


class Proxy:
    """Takes commands from the slab to a foreign pool, and its results back."""

    def __init__(self, loop: _native.ForeignLoop, pool: ForeignPool, seats: Sequence[object]) -> None:
        self._loop = loop
        self._pool = pool
        self._seats = seats

    def serve(self, mailbox: Mailbox, num_requests: int) -> None:
        """Serve until the pool says stop, or the learner is gone; nothing is at work in the foreign pool then."""
        num_seen = num_requests
        self._loop.requests_seen(num_seen)
        while True:
            # While envs are at work their results are waited for, not commands: those are seen with the next result.
            exit_kind, servers, actions, resets = self._loop.take(self._loop.num_flying() == 0)
            if exit_kind == _native.LOOP_STOP:
                break
            if exit_kind == _native.LOOP_REQUEST:
                request = mailbox.next()
                if request is None:
                    break
                reply = answer(self, self._seats, request)
                num_seen = (num_seen + 1) & _COUNTER_MASK
                self._loop.requests_seen(num_seen)
                mailbox.reply(reply)
                continue
            self._begin(servers, actions, resets or ())
            if self._loop.num_flying():
                self._bring()
        self.drain()

    def advance(self, *, is_waiting: bool) -> bool:
        """Begin what was commanded and, to wait, bring results; returns whether anything was done."""
        try:
            _, servers, actions, resets = self._loop.take(may_wait=False)
            self._begin(servers, actions, resets or ())
            has_begun = servers is not None or bool(resets)
            if not is_waiting or not self._loop.num_flying():
                return has_begun
            self._bring()
        except BaseException as exc:
            self._fail_interrupted(exc)
            raise
        return True

    def drain(self) -> None:
        """Wait for what is at work."""
        while self._loop.num_flying():
            self._bring()

    def run_until(self, local: int, after_ticket: int) -> None:
        """Do what was commanded of an env before a request, for `answer`."""
        try:
            _, servers, actions, resets = self._loop.take_one(local, after_ticket)
            self._begin(servers, actions, resets or ())
            while local in self._loop.flying():
                self._bring()
        except BaseException as exc:
            self._fail_interrupted(exc)
            raise

    def refresh(self) -> None:
        """Nothing is looked up ahead here."""

    def begin_again(self, local: int) -> None:
        """Nothing is begun ahead of its time."""

    def keep_options(self, local: int, options: bytes | None) -> None:
        """Refuse options for automatic resets, which the pool does itself.

        Raises:
            UsageError: there are some.
        """
        if options is not None:
            raise UsageError("the envs of a foreign pool keep no reset options; give them to the pool's maker")

    def _fail_interrupted(self, exc: BaseException) -> None:
        """Fail what is at work, if a signal handler raised: nobody knows how far it came."""
        if _native.is_from_signal(exc):
            if isinstance(self._pool, Interruptible):
                self._pool.drop()
            self._loop.fail(self._loop.flying(), exc, "step")

    def _begin(self, servers: NDArray[np.int32] | None, actions: Any, resets: Sequence[ResetOrder]) -> None:
        if servers is not None:
            self._blame(servers, "step", lambda: self._pool.send(servers, actions))
        if resets:
            self._blame([order[0] for order in resets], "reset", lambda: self._pool.reset(resets))

    def _bring(self) -> None:
        """Wait for results and write them into the slab."""
        try:
            servers, obs, reward, terminated, truncated, infos = self._pool.recv()
        except BaseException as exc:  # nobody knows what is still at work: all of it has failed
            if _native.is_from_signal(exc):
                raise
            self._loop.fail(self._loop.flying(), exc, "step")
            return
        again: list[int] = []
        try:
            again = self._loop.publish(servers, obs, reward, terminated, truncated, infos)
        except Exception as exc:
            if _native.is_from_signal(exc):
                raise
            self._loop.fail(servers, exc, "output of step")
        if again:
            self._blame(again, "reset", lambda: self._pool.reset([(server, None, None) for server in again]))

    def _blame(self, servers: Any, phase: str, begin: Callable[[], None]) -> None:
        try:
            begin()
        except BaseException as exc:  # SystemExit and the like are the pool's doing, too
            if _native.is_from_signal(exc):
                raise
            self._loop.fail(servers, exc, phase)
