"""The pool's connection to one node, from the start of the node's actor to its end. A new actor gets a new link.

    STARTING ──the workers serve──► SERVING ──its actor died, or does not answer──► LOST
        └──────────────── it could not be started ─────────────────────────────────► LOST

An exchange is a message of commands to the node, which is answered by a message of results. Exchanges are numbered, and
the node keeps each answer until the pool has received it. If the connection breaks while the actor lives, it is made
again. Exchanges without an answer are then sent again with the same numbers, because the node may have received them.
"""

from __future__ import annotations

import enum
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from stepmill import _native
from stepmill.backends.base import Future
from stepmill.backends.ray.cluster import kill
from stepmill.backends.ray.handshake import KEY_BYTES
from stepmill.backends.ray.messages import Answer, Exchange, NodeCall, NodeStarted, Raised
from stepmill.backends.ray.stream import EMPTY, RETRY_S, Bytes, PoolStream
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import EngineBug, EnvTimeout, StepmillError, WorkerDied
from stepmill.spec.stats import NodeStats
from stepmill.worker.messages import Reply, Request
from stepmill.worker.signals import allow_signals

MAX_IN_FLIGHT = 3  # exchanges: one waits on the node for results while the others are transferred
IDLE_S = 0.25  # an idle node is asked this often whether workers have died
EAGER_WORD = 2  # index of `is_eager` in a message of commands, as 32-bit words (_native/relay/relay_message.hpp)

Callback = Callable[[], None]


class NodeState(enum.Enum):
    """The state of a node; see the docstring of the module."""

    STARTING = enum.auto()
    SERVING = enum.auto()
    LOST = enum.auto()


class NodeLink:
    """The connection to one actor of a node.

    Attributes:
        node: the number of the node.
        workers: the workers that it runs, by their numbers in the pool.
        started: what the actor reported when its envs were built.
        already_started: workers that were started with this actor after the node's last actor was lost, and for which
            `revive` has not been called yet.
        cause: why the node is lost, or None.
    """

    def __init__(
        self, ray: Any, actor: Any, node: int, env_ids: Mapping[int, Sequence[int]], post: Callable[[Callback], None]
    ) -> None:
        """`env_ids` has the envs by worker number in the pool. `post` lets the backend's thread call a function."""
        self.node = node
        self.workers = tuple(env_ids)
        self._env_ids = {worker: tuple(ids) for worker, ids in env_ids.items()}
        self.state = NodeState.STARTING
        self.started: NodeStarted | None = None
        self.already_started: set[int] = set()
        self.cause: str | None = None
        self.relay: _native.PoolRelay | None = None
        self.start_ref: Any = None
        self.stream: PoolStream | None = None  # None while the connection is broken
        self.counts = {"messages": 0, "sent_bytes": 0, "received_bytes": 0}
        self._ray, self.actor = ray, actor
        self._post = post
        self._lock = threading.RLock()  # reentrant, because a signal handler may close the pool
        self._number = 0
        self._queue: deque[tuple[Any, NodeCall | None]] = deque()  # commands and calls that are not sent yet, in order
        self._in_flight: dict[int, tuple[Any, NodeCall | None]] = {}  # what was sent, by number
        self._futures: set[Future] = set()
        self._calls: dict[int, Mapping[int, Future]] = {}  # calls whose replies have not arrived, by number
        self._replies: deque[tuple[Future, Any]] = deque()  # until all results before them are published
        self._waits_for_all = True  # exchanges return when all commands of the node are done, and not after each
        self._answered_at = time.monotonic()
        self._heard_at = self._connected_at = self._probed_at = 0.0
        self._obstacle = ""  # why there is no connection
        self._address, self._key = ("", 0), secrets.token_bytes(KEY_BYTES)
        self._pinged_at = self._advanced_at = time.monotonic()
        self._has_ping = False

    # ---- calls that wait --------------------------------------------------------------------------------------------

    def call_actor(self, method: Any, *arguments: Any, worker: int, timeout_s: float | None) -> Any:
        """Call a method of the actor for a worker of the pool, and wait for the result.

        Raises:
            StepmillError: the method raised it.
            EnvTimeout: the method has not returned in time.
            WorkerDied: the node is lost.
        """
        return self.wait(method.remote(*arguments), timeout_s, worker)

    def wait(self, ref: Any, timeout_s: float | None, worker: int | None = None) -> Any:
        """Wait for the result of a method, as `call_actor` does. Without a worker, the method concerns all of them."""
        ray = self._ray
        try:
            with allow_signals():
                result = ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as exc:
            raise EnvTimeout(
                f"node {self.node} did not answer within {timeout_s or 0.0:g} s; the cluster may lack free CPUs (`ray status` "
                "shows them): use fewer workers or nodes, or give ray={'resources': {'CPU': ...}}",
                phase="construct",
                timeout_s=timeout_s or 0.0,
            ) from exc
        except ray.exceptions.RayError as exc:
            self.mark_lost(_first_line(exc))
            raise self.lost_error(self.workers[0] if worker is None else worker) from exc
        if isinstance(result, Raised):
            raise self._with_pool_numbers(result.error)
        return result

    def _with_pool_numbers(self, error: StepmillError) -> StepmillError:
        """Replace the node's number of a worker, in an error of the node, by the pool's number."""
        if isinstance(error, WorkerDied) and 0 <= error.worker < len(self.workers):
            number = self.workers[error.worker]
            place = f"worker {number} on {self.describe()} "
            error.message = error.message.replace(f"worker {error.worker} ", place, 1)
            error.args, error.worker, error.node = (error.message,), number, self.describe()
        return error

    def describe(self) -> str:
        """Return the node's number and address, for messages."""
        return f"node {self.node}" + (f" ({self.started.address})" if self.started is not None else "")

    def lost_error(self, worker: int) -> WorkerDied:
        """Return the error of a worker whose commands or calls are lost with this node."""
        ids = self._env_ids[worker]
        text = f"worker {worker} on {self.describe()} {self.cause}; its envs {list(ids)} are lost"
        return WorkerDied(text, worker=worker, env_ids=ids, node=self.describe())

    # ---- exchanges: called by the backend's thread --------------------------------------------------------------------

    def advance(self, heartbeat_s: float, timeout_s: float) -> None:
        """Finish calls, send new commands, ask for results, and check that the node answers, after all callbacks."""
        if self.state is not NodeState.SERVING or self.relay is None:
            return
        self._finish_calls()
        now = time.monotonic()
        # While this program was stopped, it could hear nothing.
        missed_s = max(0.0, now - self._advanced_at - heartbeat_s)
        self._advanced_at, self._heard_at, self._pinged_at = now, self._heard_at + missed_s, self._pinged_at + missed_s
        with self._lock:  # messages are sent in the order in which their commands are collected
            if not self._queue and len(self._in_flight) < MAX_IN_FLIGHT:
                commands = self.relay.collect_commands()
                if commands is not None:
                    self._queue.append((commands, None))
        while self._queue and len(self._in_flight) < MAX_IN_FLIGHT:
            self._begin_exchange(*self._queue.popleft())
        is_awaited = bool(self._calls) or self.relay.has_outstanding()
        if not self._in_flight and (is_awaited or now - self._answered_at >= IDLE_S):
            self._begin_exchange(None, None)
        self._check_connection(now, timeout_s)
        if self._has_ping and now - self._pinged_at > timeout_s:
            self.mark_lost(f"did not answer for {timeout_s:g} s")
        elif not self._has_ping and now - self._pinged_at >= heartbeat_s:
            self._has_ping, self._pinged_at = True, now
            self._handle_when_done(self.actor.ping.options(concurrency_group="ping").remote(), self._on_ping)

    def _check_connection(self, now: float, timeout_s: float) -> None:
        """Give up a silent connection, and later the node. Probes are sent because an answer may take long."""
        stream = self.stream
        if not self._in_flight:
            return
        if stream is not None:
            self._heard_at = max(self._heard_at, stream.heard_at)
        silent_s = now - self._heard_at
        if silent_s > timeout_s and not self._has_ping:  # otherwise Ray may not reach it either
            place = "{}:{}".format(*self._address)
            self.mark_lost(f"did not answer at {place} for {timeout_s:g} s{self._obstacle}, although Ray reaches it")
        elif stream is not None and min(silent_s, now - self._connected_at) > timeout_s / 2:
            self._reconnect()  # messages are lost on the way
        elif stream is not None and min(silent_s, now - self._probed_at) > timeout_s / 8:
            self._probed_at = now
            stream.send(None, EMPTY)

    def _begin_exchange(self, commands: Any, call: NodeCall | None) -> None:
        if not self._in_flight:
            self._heard_at = time.monotonic()  # nothing was expected from it before
        self._number += 1
        self._in_flight[self._number] = commands, call
        self.counts["messages"] += 1
        if commands is not None:
            self.counts["sent_bytes"] += commands.nbytes
            self._waits_for_all = not np.frombuffer(commands, np.uint32, count=EAGER_WORD + 1)[EAGER_WORD]
        self._send_exchange(self._number)

    def _send_exchange(self, number: int) -> None:
        if self.stream is not None:  # otherwise it is sent when there is a connection again
            commands, call = self._in_flight[number]
            exchange = Exchange(number, call, min(self._in_flight) - 1, self._waits_for_all)
            self.stream.send(exchange, EMPTY if commands is None else commands)

    def _handle_when_done(self, ref: Any, handle: Callable[[Any], None]) -> None:
        """Let the backend's thread call `handle` with the future of a reference when it is done."""
        ref.future().add_done_callback(lambda done: self._post(lambda: handle(done)))

    def _on_ping(self, done: Any) -> None:
        self._has_ping = False
        error = done.exception()
        if error is None and done.result() is not None:
            self.mark_lost(f"was ended, because its env {done.result()} has not returned within step_timeout_s")
        elif error is not None and not isinstance(error, self._ray.exceptions.ActorUnavailableError):
            self.mark_lost(_first_line(error))

    def receive(self) -> None:
        """Handle the answers that have arrived, and send what the connection did not take before."""
        if (stream := self.stream) is None:
            return
        stream.flush()
        try:
            for answer, results in stream.receive():
                self._on_answer(Answer(*answer), results)
        except OSError:
            self._reconnect()

    def _on_answer(self, answer: Answer, results: Bytes) -> None:
        if self.state is not NodeState.SERVING or answer.number not in self._in_flight:
            return
        if answer.error is not None:
            self.mark_lost(answer.error)
            return
        self._answered_at = time.monotonic()
        del self._in_flight[answer.number]
        self.counts["received_bytes"] += results.nbytes
        self.on_results(answer, results)
        for number, replies in answer.replies.items():
            with self._lock:
                futures = self._calls.pop(number, {})
            self._replies.extend((future, replies.get(local) or replies[-1]) for local, future in futures.items())

    def on_results(self, answer: Answer, results: Bytes) -> None:
        """Handle the answer to an exchange. The backend sets this."""
        raise EngineBug("a node has no backend; please report this")

    # ---- the connection -------------------------------------------------------------------------------------------------

    def attach(self, spec: EnvSpec, pool_servers: Sequence[int]) -> Any:
        """Let the node's workers serve a slab. Return a reference to the address where the node then listens."""
        return self.actor.attach.remote(spec, pool_servers, self._key)

    def connect(self, address: tuple[str, int]) -> None:
        """Connect to the address that `attach` gave.

        Raises:
            WorkerDied: the node cannot be reached. It is lost.
        """
        self._address = address
        try:
            self.stream = PoolStream(address, self._key)
        except OSError as exc:
            self.mark_lost(
                f"cannot be reached at {address[0]}:{address[1]} ({exc}); each node listens on a free port, which firewalls between "
                "it and this program must let pass"
            )
            raise self.lost_error(self.workers[0]) from exc

    def _reconnect(self) -> None:
        """Make the connection again. If the node is lost, the next ping finds out."""
        self.close_stream()
        if not self._has_ping:
            self._pinged_at = 0.0  # ping now
        if self.state is NodeState.SERVING:
            threading.Thread(target=self._connect_again, name="stepmill-connect", daemon=True).start()

    def close_stream(self) -> None:
        """Close the connection. Only the backend's thread calls this, or any thread after it has ended."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def _connect_again(self) -> None:
        while self.state is NodeState.SERVING:
            try:
                self._post(partial(self._use, PoolStream(self._address, self._key)))
                return
            except OSError as exc:
                self._obstacle = f" ({exc})"
                time.sleep(RETRY_S)

    def _use(self, stream: PoolStream) -> None:
        if self.state is not NodeState.SERVING:
            stream.close()
            return
        self.stream, self._connected_at, self._obstacle = stream, time.monotonic(), ""
        for number in sorted(self._in_flight):
            self._send_exchange(number)

    # ---- slow requests ----------------------------------------------------------------------------------------------

    def call(self, number: int, requests: Mapping[int, Request], futures: Mapping[int, Future]) -> None:
        """Send requests, by the node's number of the worker, after all earlier commands; the replies finish the futures.

        The thread that sends commands calls this, and threads that restart workers, for requests that came meanwhile.
        """
        with self._lock:
            is_lost = self.state is not NodeState.SERVING or self.relay is None
            if not is_lost and self.relay is not None:
                self._futures.update(futures.values())
                self._calls[number] = futures
                # Here, because later commands must come after the requests.
                self._queue.append((self.relay.collect_commands(), NodeCall(number, requests)))
        if is_lost:
            for future in futures.values():
                future.fail(self.lost_error(future.worker))
            return
        self._post(lambda: None)  # wakes the backend's thread

    def _finish_calls(self) -> None:
        """Finish calls whose replies have arrived, once the results of all earlier commands have arrived as well."""
        for _ in range(len(self._replies)):
            future, reply = self._replies.popleft()
            if not self._is_published(future):
                self._replies.append((future, reply))
                continue
            with self._lock:
                self._futures.discard(future)
            if isinstance(reply, Reply):
                future.finish(reply)
            else:
                future.fail(self._with_pool_numbers(reply))

    def _is_published(self, future: Future) -> bool:
        request, relay = future.request, self.relay
        tickets = zip(request.servers, request.after, strict=True)
        return relay is None or all(relay.is_published(future.worker, local, after) for local, after in tickets)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def on_lost(self) -> None:
        """Handle the loss of the node. The backend sets this."""

    def mark_lost(self, cause: str) -> None:
        """Kill the actor of the node, and mark its workers dead. Any thread may call it."""
        with self._lock:
            if self.state is NodeState.LOST:
                return
            self.state, self.cause = NodeState.LOST, cause
            futures, self._futures = self._futures, set()
        for future in futures:
            if self.relay is not None:
                self.relay.mark_serving(future.worker)
        self.on_lost()
        for future in futures:
            future.fail(self.lost_error(future.worker))
        if (stream := self.stream) is not None:  # read once: the backend's thread may close it
            stream.shut_down()
        kill(self._ray, self.actor)

    def stats(self, restarts: int) -> NodeStats:
        """Return the traffic with this node."""
        return NodeStats(
            node=self.node,
            address="" if self.started is None else self.started.address,
            workers=tuple(self.workers),
            in_flight=len(self._in_flight),
            restarts=restarts,
            **self.counts,
        )


def _first_line(error: BaseException | None) -> str:
    """Return the type of an error of Ray, and the first line of its text that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"was lost ({type(error).__name__}: {lines[0] if lines else ''})"
