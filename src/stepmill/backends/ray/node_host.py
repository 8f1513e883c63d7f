"""The part that runs on a node: workers that serve the node's slab, and the messages between them and the pool.

    NodeStream ──► NodeRelay.apply_commands ──► slab ──► workers (a local backend)
    NodeStream ◄── NodeRelay.collect_results ◄── slab ◄── workers

`NodeHost` is the class of the actor. Ray calls its methods in several threads. Commands and results do not pass through
Ray: the thread of the stream applies commands, and another thread waits for results and sends them. Ray is imported
only in methods.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from stepmill import _native
from stepmill.backends.base import Backend, Future, MonitoredBackend
from stepmill.backends.ray.host_backends import NodeKernelBackend, make_host_backend
from stepmill.backends.ray.messages import Answer, Exchange, NodeCall, NodePlan, NodeStarted, Raised, Replies
from stepmill.backends.ray.stream import EMPTY, Bytes, NodeStream
from stepmill.slab.layout import lay_out
from stepmill.slab.memory import SharedSlab
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import ClosedPoolError, EngineBug, StepmillError, WorkerDied
from stepmill.worker.calls import dump_outcome, load_payload
from stepmill.worker.error_records import env_error
from stepmill.worker.messages import Reply, Request, Value, WorkerReport

GATHER_S = 0.01  # results wait this long for those of the other envs that were commanded
NO_TIMEOUT_S = 1e9  # because the pool enforces the time limit of a call
LONG_POLL_S = 2.0  # an exchange without results ends after this time

Result = TypeVar("Result")


class NodeHost:
    """The workers of one node."""

    def __init__(self) -> None:
        self._relay: _native.NodeRelay | None = None
        self._slab: SharedSlab | None = None
        self._reaper: _native.Reaper | None = None
        self._backend: Backend | None = None
        self._plan: NodePlan | None = None
        self._reports: list[WorkerReport] = []
        self._stream: NodeStream | None = None
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # an exchange has arrived, or the node is closed
        self._newest = 0  # the number of the newest exchange; they arrive in order
        self._unanswered: deque[Exchange] = deque()
        self._answers: dict[int, tuple[Answer, Bytes]] = {}  # by number of the exchange, until received
        self._replies: dict[int, Replies] = {}  # by number of the call, until an answer contains them
        self._failure: str | None = None  # why the node is unusable
        self._is_closed = False

    # ---- start ------------------------------------------------------------------------------------------------------

    def start(self, plan: NodePlan) -> NodeStarted | Raised:
        """Build all envs of the node."""
        import ray  # it runs this method

        node_id = ray.get_runtime_context().get_node_id()
        for entry in plan.sys_path:
            if entry not in sys.path and os.path.exists(entry):
                sys.path.append(entry)

        def build() -> NodeStarted:
            self._plan = plan
            self._backend, plans = make_host_backend(plan)
            self._reports = self._backend.start(plans)
            return NodeStarted(tuple(self._reports), socket.gethostname(), os.getpid(), node_id)

        return _guarded(build)

    def attach(self, spec: EnvSpec, pool_servers: Sequence[int], key: bytes) -> tuple[str, int] | Raised:
        """Let the workers serve a slab; return the address where the node listens for exchanges.

        Args:
            spec: the spec of the envs.
            pool_servers: by server of the node, its number in the pool.
            key: a secret that only this node and the pool know.
        """
        import ray  # it runs this method

        host = ray.util.get_node_ip_address()

        def serve() -> tuple[str, int]:
            plan, backend = self._require(self._plan), self._require(self._backend)
            servers = iter(range(len(pool_servers)))
            owned = [[next(servers) for _ in ids] for ids in plan.env_ids]
            layout = lay_out(spec, owned, lease_slots=1)
            layout.plan["pool_servers"] = list(pool_servers)
            self._slab = slab = SharedSlab(layout, len(owned))
            self._relay = relay = _native.NodeRelay(slab.native)
            if isinstance(backend, MonitoredBackend):
                self._reaper = _native.Reaper(slab.native, **plan.limits, pidfds=dict(backend.pidfds))
            backend.attach(slab, relay.post_request)
            self._stream = stream = NodeStream(host, key, self._on_message)
            threading.Thread(target=self._answer_all, name="stepmill-answers", daemon=True).start()
            return stream.address

        return _guarded(serve)

    def ping(self) -> int | None:
        """Check that the machine's raylet answers. Return an env that hangs and only ends with the node, or None."""
        import ray  # it runs this method

        ray.put(None)  # waits while the raylet is stopped and could not pass on replies
        return self._backend.find_hung_env() if isinstance(self._backend, NodeKernelBackend) else None

    # ---- commands and results ---------------------------------------------------------------------------------------

    def _on_message(self, exchange: Exchange, commands: Bytes) -> None:
        """Give commands and then requests to the workers. An exchange that arrives again gets its answer again."""
        with self._arrived:
            for number in [number for number in self._answers if number <= exchange.acknowledged]:
                del self._answers[number]
            if exchange.number <= self._newest:
                answer = self._answers.get(exchange.number)
                if answer is not None:
                    self._require(self._stream).send(*answer)
                return
            self._newest = exchange.number  # from here on, the waiting exchange runs no kernel, which a call may need
            try:
                if commands.nbytes:
                    self._require(self._relay).apply_commands(commands)
                if exchange.call is not None:
                    self._post(exchange.call)
            except Exception as exc:
                self._failure = f"failed ({type(exc).__name__}: {exc})"
            self._unanswered.append(exchange)
            self._arrived.notify_all()
        # The waiting exchange is answered with the results so far, and this one waits in its place.
        self._require(self._relay).wake()

    def _answer_all(self) -> None:
        """Answer the exchanges, in their order, until the node is closed."""
        while True:
            with self._arrived:
                while not self._unanswered and not self._is_closed:
                    self._arrived.wait()
                if self._is_closed:
                    return
                exchange = self._unanswered.popleft()
            try:
                answer = self._answer(exchange)
            except Exception as exc:
                self._failure = f"failed ({type(exc).__name__}: {exc})"
                answer = Answer(exchange.number, {}, self._failure, {}), EMPTY
            with self._lock:
                self._answers[exchange.number] = answer
            self._require(self._stream).send(*answer)

    def _answer(self, exchange: Exchange) -> tuple[Answer, Bytes]:
        """Wait until there are results or replies, a later exchange has arrived, or LONG_POLL_S seconds have passed."""
        number, relay = exchange.number, self._require(self._relay)
        deadline = time.monotonic() + LONG_POLL_S
        is_done = (
            exchange.is_for_all and self._waits(number) and self._wait(number, is_for_all=True, timeout_s=GATHER_S)
        )
        while not is_done and self._waits(number) and time.monotonic() < deadline:
            is_done = self._wait(number, is_for_all=False, timeout_s=LONG_POLL_S)
        with self._lock:
            replies, self._replies = self._replies, {}
            results = relay.collect_results()
        return Answer(number, self._exit_codes(), self._failure, replies), results

    def _waits(self, number: int) -> bool:
        """Whether the answer to an exchange may wait, because there is no later exchange and no reply to a call."""
        return self._newest == number and not self._replies

    def _wait(self, number: int, *, is_for_all: bool, timeout_s: float) -> bool:
        """Wait for results as `NodeRelay.wait` does, while this exchange waits."""
        relay, backend = self._require(self._relay), self._backend
        if not isinstance(backend, NodeKernelBackend):
            return bool(relay.wait(is_for_all, timeout_s))
        return backend.run(relay, lambda: self._waits(number), is_for_all=is_for_all, timeout_s=timeout_s)

    def _exit_codes(self) -> dict[int, int | None]:
        slab, backend = self._require(self._slab), self._require(self._backend)
        dead = [worker for worker in range(slab.num_lanes) if slab.native.is_dead(worker)]
        return {worker: backend.exit_code(worker) if isinstance(backend, MonitoredBackend) else None for worker in dead}

    # ---- slow requests ----------------------------------------------------------------------------------------------

    def _post(self, call: NodeCall) -> None:
        """Send requests to workers. Called in the order of the exchanges, with the lock."""
        try:
            requests = {worker: self._translate(worker, each) for worker, each in call.requests.items()}
            futures = self._require(self._backend).call(requests)
        except StepmillError as error:
            self._replies[call.number] = {-1: error}
            return
        arguments = call.number, futures
        threading.Thread(target=self._await_replies, args=arguments, name="stepmill-replies", daemon=True).start()

    def _await_replies(self, number: int, futures: Sequence[Future]) -> None:
        """Wait for the replies to a call. The next answer contains them."""
        replies: dict[int, Reply | StepmillError] = {}
        for future in futures:
            try:
                outcomes = future.result(NO_TIMEOUT_S)
                packed = map(dump_outcome, outcomes) if self._require(self._plan).host != "process" else outcomes
                replies[future.worker] = Reply(future.request.id, tuple(packed))
            except StepmillError as error:
                replies[future.worker] = error
        with self._lock:
            self._replies[number] = replies
        self._require(self._relay).wake()

    def _translate(self, worker: int, request: Request) -> Request:
        """Return a request whose tickets are those of the node's slab."""
        relay = self._require(self._relay)
        servers = zip(request.servers, request.after, strict=True)
        tickets = tuple(relay.ticket_after(worker, local, after) for local, after in servers)
        if None in tickets and self._require(self._slab).native.is_dead(worker):
            raise WorkerDied(f"worker {worker} is dead, and was not called", worker=worker)
        if None in tickets:
            raise EngineBug(f"a request came before the commands {request.after} of its envs; please report this")
        return self._unpacked(request)._replace(after=tickets)

    def _unpacked(self, request: Request) -> Request:
        """Return a request for the node's backend. Worker processes load the payload themselves."""
        return request if self._require(self._plan).host == "process" else load_payload(request)

    # ---- restarts of workers ----------------------------------------------------------------------------------------

    def end_worker(self, worker: int) -> int | Raised | None:
        """Kill a worker if it runs, and wait for its end; return its exit code."""

        def end() -> int | None:
            backend = self._require(self._backend)
            if not isinstance(backend, MonitoredBackend):
                return None
            backend.end_worker(worker)
            return backend.exit_code(worker)

        return _guarded(end)

    def revive(
        self, worker: int, tickets: Sequence[int], settings_requests: Sequence[Request]
    ) -> tuple[WorkerReport, int] | Raised:
        """Replace a worker that has ended. Return the report of its successor and the number of its restarts.

        Args:
            worker: its number in the node.
            tickets: by server of the worker, the pool's newest ticket.
            settings_requests: requests to run before the successor serves.
        """

        def restart() -> tuple[WorkerReport, int]:
            backend, relay = self._require(self._backend), self._require(self._relay)
            if self._reaper is not None:
                self._reaper.declare_dead(worker)
            with self._lock:
                relay.clear_worker(worker)
                relay.set_tickets(worker, list(tickets))
            report = backend.revive(worker, list(map(self._unpacked, settings_requests)))
            with self._lock:
                relay.begin_generation(worker)
            if self._reaper is not None and isinstance(backend, MonitoredBackend):
                self._reaper.watch(worker, backend.pidfds[worker])
            return report, relay.generation(worker)

        return _guarded(restart)

    def apply_settings(
        self, worker: int, tickets: Sequence[int], settings_requests: Sequence[Request]
    ) -> Raised | None:
        """Run requests in a worker of a new node before its first command. The arguments are as for `revive`."""

        def apply() -> None:
            backend, plan = self._require(self._backend), self._require(self._plan)
            with self._lock:
                self._require(self._relay).set_tickets(worker, list(tickets))
            for request in settings_requests:
                outcomes = backend.call({worker: self._unpacked(request)})[0].result()
                for env_id, outcome in zip((plan.env_ids[worker][at] for at in request.servers), outcomes, strict=True):
                    if not isinstance(outcome, Value):
                        raise env_error({**outcome, "phase": "restore"}, env_id)

        return _guarded(apply)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> list[str]:
        """End all workers; return the warnings of envs that did not close."""
        import warnings

        with self._arrived:
            self._is_closed = True
            self._arrived.notify_all()
        if self._relay is not None:
            self._relay.stop()
        if self._reaper is not None:
            self._reaper.stop()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.suppress(ClosedPoolError):
                if self._backend is not None:
                    self._backend.close(timeout_s)
        if self._stream is not None:
            self._stream.close()
        if self._slab is not None:
            self._slab.close()
        return [str(each.message) for each in caught]

    @staticmethod
    def _require(part: Any) -> Any:
        if part is None:
            raise EngineBug("this node is not started or not attached; please report this")
        return part


def _guarded(function: Callable[[], Result]) -> Result | Raised:
    """Return the result of a function, or the error of stepmill that it raised, as a value."""
    try:
        return function()
    except StepmillError as error:
        return Raised(error)
    except Exception as exc:
        return Raised(EngineBug(f"a node of the pool failed: {type(exc).__name__}: {exc}"))
