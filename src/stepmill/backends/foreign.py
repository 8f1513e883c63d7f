"""Envs of a pool that is not ours. One thread of this process, the proxy, stands between it and the slab.

    learner ──► slab: commands ──► take ──► pool.send, pool.reset
    learner ◄── slab: results ◄── publish ◄── pool.recv

The pool has its own threads and its own loop; what it owes us is arrays (`ForeignPool`). Whatever it is, an env in it has
a ticket, a state and a row like any other, and the learner cannot tell the difference. A proxy cannot be killed: a pool
that never answers is left behind by close(), with a warning, as a hung thread is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill.backends.thread import ThreadBackend, ThreadWorker
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.worker.calls import answer
from stepmill.worker.host import Built, Fault, Mailbox, loop_settings
from stepmill.worker.messages import WorkerPlan, WorkerReport
from stepmill.worker.records import describe

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


class PoolMaker(Protocol):
    """What stands for each env function of a foreign pool: one object for all of them."""

    def make_pool(self, num_envs: int) -> tuple[ForeignPool, EnvSpec]:
        """Return a pool of so many envs, and what they say of themselves."""


class ForeignBackend(ThreadBackend):
    """One pool that is not ours, behind one worker: the proxy thread."""

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerReport]:
        """Build the pool.

        Raises:
            UsageError: the env functions are not all one maker of a foreign pool.
        """
        fns = {id(fn): fn for plan in plans for fn in plan.env_fns}
        if len(plans) != 1 or len(fns) != 1 or not hasattr(next(iter(fns.values())), "make_pool"):
            raise UsageError(
                "this backend runs the envs of one pool that is not stepmill's; give one maker of it for all envs, for "
                "example [stepmill.envs.envpool.EnvPoolTask('Pong-v5')] * num_envs"
            )
        return super().start(plans)

    def _make_worker(self, plan: WorkerPlan, num_requests: int) -> ThreadWorker:
        return _ProxyWorker(plan, self._settings, num_requests=num_requests)


class _ProxyWorker(ThreadWorker):
    """The thread of the proxy."""

    _pool: ForeignPool | None = None

    def build(self) -> Built:
        built = Built()
        maker: Any = self.plan.env_fns[0]
        num_envs = len(self.plan.env_ids)
        try:
            self._pool, spec = maker.make_pool(num_envs)
            built.envs = [self._pool.seat(server) for server in range(num_envs)]
            built.specs = [spec] * num_envs
        except BaseException as exc:
            built.faults.append((self.plan.env_ids[0], describe(exc, "construct")))
        return built

    def serve_slab(self, slab: _native.Slab) -> None:
        assert self._pool is not None  # or there were faults, and nothing is served
        loop = _native.ForeignLoop(slab, self.plan.worker, loop_settings(self.built.specs[0], self.settings))
        self.has_answered.set()
        Proxy(loop, self._pool, self.built.envs).serve(self, self.num_before)

    def close_envs(self) -> tuple[Fault, ...]:
        pool, self._pool = self._pool, None
        try:
            if pool is not None:
                pool.close()
        except BaseException as exc:  # whatever the pool does, its end must not keep the thread from ending
            return ((self.plan.env_ids[0], describe(exc, "close")),)
        return ()


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
        while self._loop.num_flying():
            self._bring()

    def run_until(self, local: int, after_ticket: int) -> None:
        """Do what was commanded of an env before a request, for `answer`."""
        _, servers, actions, resets = self._loop.take_one(local, after_ticket)
        self._begin(servers, actions, resets or ())
        while local in self._loop.flying():
            self._bring()

    def refresh(self) -> None:
        """Nothing is looked up ahead here."""

    def keep_options(self, local: int, options: bytes | None) -> None:
        """Refuse, for `answer`: resets of foreign pools are the pool's own."""
        raise UsageError("the envs of a foreign pool keep no reset options; give them to the pool's maker")

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
            self._loop.fail(self._loop.flying(), exc, "step")
            return
        again: list[int] = []
        try:
            again = self._loop.publish(servers, obs, reward, terminated, truncated, infos)
        except Exception as exc:
            self._loop.fail(servers, exc, "output of step")
        if again:
            self._blame(again, "reset", lambda: self._pool.reset([(server, None, None) for server in again]))

    def _blame(self, servers: Any, phase: str, begin: Callable[[], None]) -> None:
        try:
            begin()
        except BaseException as exc:  # SystemExit and the like are the pool's doing, too
            self._loop.fail(servers, exc, phase)
