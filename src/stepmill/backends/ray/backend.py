"""The backend. It plans the nodes, starts and restarts workers, and exchanges messages with all nodes in a thread."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import selectors
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from stepmill import _native
from stepmill._native import OwnedFd
from stepmill.backends.base import BackendTraits, Future, closed_error
from stepmill.backends.process import dump_plan, pack_request, unpack_outcome
from stepmill.backends.ray import cluster
from stepmill.backends.ray.cluster import CHECK_S, PlaceSearch
from stepmill.backends.ray.messages import Answer, NodePlan
from stepmill.backends.ray.node_link import Callback, NodeLink, NodeState
from stepmill.backends.ray.stream import Bytes, PoolStream
from stepmill.slab.memory import SharedSlab
from stepmill.spec.closing import close_on_error
from stepmill.spec.errors import EngineBug, StepmillError, WorkerDied, join_errors
from stepmill.spec.notices import warn
from stepmill.spec.ray_options import RayOptions
from stepmill.spec.stats import NodeStats
from stepmill.worker.messages import Build, Request, WorkerPlan, WorkerReport, WorkerSettings, dump
from stepmill.worker.program_state import ProgramState

MAX_HEARTBEAT_S = 1.0
WAKE_S = 0.05  # the thread looks at the nodes this often without an event
REPLY_SLACK_S = 5.0  # a node reports its own timeouts; the pool waits this much longer for the report
END_S = 5.0  # how long a node may take to end one worker
CLOSE_SLACK_S = 0.3


@dataclasses.dataclass
class RemoteWorker:
    """The state of a worker on a node, as the pool knows it.

    Attributes:
        plan: the plan of the worker, with its envs.
        node: the number of its node.
        local: its number within the node.
        end_fd: an eventfd that is written when the worker is dead.
        exit_code: the exit code of its process, as the node reported it.
    """

    plan: WorkerPlan
    node: int
    local: int
    end_fd: OwnedFd
    exit_code: int | None = None

    def mark_dead(self) -> None:
        """Tell the reaper that the worker is dead."""
        with contextlib.suppress(OSError, ValueError):  # closed
            os.eventfd_write(self.end_fd.fileno(), 1)


class RayBackend:
    """Runs workers on the nodes of a Ray cluster; see the package."""

    def __init__(
        self, settings: WorkerSettings, options: RayOptions, limits: Mapping[str, Any], num_threads: int = 0
    ) -> None:
        """`limits` are the time limits of the nodes' reapers. A kernel has `num_threads` on all nodes together."""
        self._settings, self._options, self._limits = settings, options, limits
        self._num_threads = num_threads  # that of each node once the nodes are planned
        self._ray = cluster.connect()
        self._pid = os.getpid()
        self._program = ProgramState.read()
        self._wake = OwnedFd.eventfd()
        self._callbacks: deque[Callback] = deque()
        self._links: list[NodeLink] = []
        self._starting: set[NodeLink] = set()  # may not be in `_links` yet
        self._workers: list[RemoteWorker] = []
        self._node_plans: dict[int, NodePlan] = {}
        self._replacing: dict[int, threading.Lock] = {}  # by node; nodes that replace one node share its lock
        self._searches: dict[int, PlaceSearch] = {}  # the last one, by node
        self._restarts: Counter[int] = Counter()
        self._call_numbers = itertools.count(1)
        self._postponed: dict[int, list[tuple[Request, Future]]] = {}  # by worker, while it is being restarted
        self._postponing = threading.RLock()  # held while calls are posted, which keeps their order
        self._slab: SharedSlab | None = None
        self._ring: Callable[[int], None] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    # ---- requests of the pool ---------------------------------------------------------------------------------------

    @property
    def traits(self) -> BackendTraits:
        driver = {"outbox_fd": self._wake.fileno()}
        return BackendTraits(
            monitor=self, nodes=self, driver=driver, can_restart_living=self._options.host == "process"
        )

    @property
    def pidfds(self) -> Mapping[int, int]:
        return {worker.plan.worker: worker.end_fd.fileno() for worker in self._workers}

    def exit_code(self, worker: int) -> int | None:
        return self._workers[worker].exit_code

    def describe_node(self, worker: int) -> str:
        return self._link_of(worker).describe()

    def cause_of_death(self, worker: int) -> str | None:
        return self._link_of(worker).cause

    def node_stats(self) -> tuple[NodeStats, ...]:
        return tuple(link.stats(self._restarts[link.node]) for link in self._links)

    def _link_of(self, worker: int) -> NodeLink:
        return self._links[self._workers[worker].node]

    # ---- start ------------------------------------------------------------------------------------------------------

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerReport]:
        num_nodes = cluster.count_nodes(self._ray, self._options, len(plans))
        self._num_threads = -(-self._num_threads // num_nodes)
        self._workers = [RemoteWorker(plan, 0, 0, OwnedFd.eventfd()) for plan in plans]
        self._replacing = {node: threading.Lock() for node in range(num_nodes)}
        self._plan_nodes(plans, range(num_nodes))
        with close_on_error(self._shut_down):
            self._links = [self._start_actor(node) for node in range(len(self._node_plans))]
            return self._wait_started(self._links)

    def _plan_nodes(self, plans: Sequence[WorkerPlan], nodes: Sequence[int]) -> None:
        """Divide workers evenly among nodes with these numbers."""
        path = tuple(entry or os.getcwd() for entry in sys.path)
        for index, node in enumerate(nodes):
            own = plans[index * len(plans) // len(nodes) : (index + 1) * len(plans) // len(nodes)]
            settings = dataclasses.replace(self._settings, entropy=self._settings.entropy ^ (node << 32))
            local_plans = [dataclasses.replace(plan, worker=local, first_lane=None) for local, plan in enumerate(own)]
            messages = [
                Build(settings, each.worker, each.lanes, dump_plan(each), self._program) for each in local_plans
            ]
            builds = tuple(map(dump, messages))
            ids = tuple(plan.env_ids for plan in own)
            host, threads = self._options.host, self._num_threads
            self._node_plans[node] = NodePlan(ids, builds, settings, host, threads, self._limits, path)
            for local, plan in enumerate(own):
                self._workers[plan.worker].node, self._workers[plan.worker].local = node, local

    def _workers_of(self, node: int) -> list[int]:
        return [worker.plan.worker for worker in self._workers if worker.node == node]

    def _demand_of(self, node: int) -> dict[str, float]:
        num_cpus = max(len(self._workers_of(node)), self._node_plans[node].num_threads)
        return cluster.demand_of(self._ray, self._options, num_cpus)

    def _start_actor(self, node: int, avoid: Sequence[str] = (), machine: str | None = None) -> NodeLink:
        """Start a node's actor, on `machine` without a reservation. If None, Ray chooses, except those to `avoid`."""
        workers, demand = self._workers_of(node), {} if machine else self._demand_of(node)
        actor = cluster.make_actor(self._ray, cluster.placed(self._ray, self._options, demand, avoid, machine))
        ids = {worker: self._workers[worker].plan.env_ids for worker in workers}
        link = NodeLink(self._ray, actor, node, ids, lambda call: self._run_later(lambda: self._serve_link(link, call)))
        self._starting.add(link)
        link.start_ref = actor.start.remote(self._node_plans[node])
        link.on_results = lambda answer, results: self._publish(link, answer, results)  # type: ignore[method-assign]
        link.on_lost = lambda: self._mark_lost(link)  # type: ignore[method-assign]
        return link

    def _wait_started(self, links: Sequence[NodeLink]) -> list[WorkerReport]:
        self._wait_all(links, [_begun(link) for link in links])
        # The limit of the builds counts from here, because Ray starts processes slowly under load.
        starts = self._wait_all(links, [link.start_ref for link in links], REPLY_SLACK_S)
        reports: list[WorkerReport] = []
        for link, started in zip(links, starts, strict=True):
            link.started = started
            reports += [dataclasses.replace(each, worker=link.workers[each.worker]) for each in started.reports]
        return reports

    def _wait_all(self, links: Sequence[NodeLink], refs: Sequence[Any], slack_s: float = 0.0) -> list[Any]:
        """Wait for a result of each node within the limit of the start. If one fails, kill all actors."""
        errors: list[StepmillError] = []
        results: list[Any] = []
        limit_s = self._settings.start_timeout_s
        deadline = time.monotonic() + (1e9 if limit_s is None else limit_s + slack_s)
        for link, ref in zip(links, refs, strict=True):
            try:
                results.append(link.wait(ref, max(0.1, deadline - time.monotonic())))
            except StepmillError as error:
                errors.append(error)
        if errors:
            for link in links:
                cluster.kill(self._ray, link.actor)
            raise join_errors(errors)
        return results

    def attach(self, slab: SharedSlab, ring: Callable[[int], None]) -> None:
        self._slab, self._ring = slab, ring
        self._attach(self._links)
        self._starting.clear()
        self._thread = threading.Thread(target=self._run, name="stepmill-ray", daemon=True)
        self._thread.start()

    def _attach(self, links: Sequence[NodeLink]) -> None:
        slab = self._slab
        if slab is None:
            raise EngineBug("nodes cannot attach before there is a slab; please report this")
        refs = []
        for link in links:
            started = link.started
            assert started is not None  # `_wait_started` has set it
            ids = [env_id for worker in link.workers for env_id in self._workers[worker].plan.env_ids]
            refs.append(link.attach(started.reports[0].specs[0], ids))
        for link, ref in zip(links, refs, strict=True):
            link.connect(link.wait(ref, self._settings.start_timeout_s))
            link.relay = _native.PoolRelay(slab.native, list(link.workers))
            link.state = NodeState.SERVING

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run_later(self, callback: Callback) -> None:
        """Let the backend's thread call `callback`. Any thread may call this."""
        self._callbacks.append(callback)
        with contextlib.suppress(OSError, ValueError):  # closed
            os.eventfd_write(self._wake.fileno(), 1)

    def _run(self) -> None:
        timeout_s = self._options.node_timeout_s
        heartbeat_s = min(MAX_HEARTBEAT_S, timeout_s / 4)
        selector = selectors.PollSelector()
        selector.register(self._wake.fileno(), selectors.EVENT_READ)
        while not self._is_closed:
            self._watch_streams(selector)
            for key, _ in selector.select(WAKE_S):
                if key.data is None:
                    os.eventfd_read(self._wake.fileno())
                else:
                    self._serve_link(key.data, key.data.receive)
            while self._callbacks:
                self._callbacks.popleft()()
            for link in list(self._links):
                self._serve_link(link, partial(link.advance, heartbeat_s, timeout_s))

    @staticmethod
    def _serve_link(link: NodeLink, function: Callback) -> None:
        """Call a function for a node, which is lost if the call fails. The thread continues with the others."""
        try:
            function()
        except Exception as exc:  # Ray may raise anything when a cluster ends; the node is then unusable
            link.mark_lost(f"cannot be reached ({type(exc).__name__}: {exc})")

    def _watch_streams(self, selector: selectors.BaseSelector) -> None:
        """Let the selector wait for the connections of the nodes, which may break and be renewed."""
        streams = {link.stream: link for link in self._links if link.stream and link.state is NodeState.SERVING}
        keys = selector.get_map().values()
        watched = {key.fileobj: key.events for key in keys if isinstance(key.fileobj, PoolStream)}
        for stream in watched.keys() - streams.keys():
            selector.unregister(stream)
            stream.close()
        for stream, link in streams.items():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.has_unsent else 0)
            if stream not in watched:
                selector.register(stream, events, link)
            elif watched[stream] != events:
                selector.modify(stream, events, link)

    def _publish(self, link: NodeLink, answer: Answer, results: Bytes) -> None:
        workers = {worker: self._workers[worker] for worker in link.workers}
        if link.relay is None:
            return
        try:
            dead, _ = link.relay.publish_results(results)
        except ValueError as exc:
            link.mark_lost(str(exc))
            return
        for number in dead:
            workers[number].exit_code = answer.exit_codes.get(workers[number].local)
            workers[number].mark_dead()

    def _mark_lost(self, link: NodeLink) -> None:
        for worker in link.workers:
            self._workers[worker].exit_code = None
            self._workers[worker].mark_dead()

    # ---- calls ------------------------------------------------------------------------------------------------------

    def call(self, requests: Mapping[int, Request]) -> list[Future]:
        packed = {worker: pack_request(request) for worker, request in requests.items()}
        timeout_s = self._settings.call_timeout_s
        futures = {
            worker: Future(request, worker, timeout_s, self._wait, unpack=unpack_outcome)
            for worker, request in requests.items()
        }
        ring = self._ring
        if self._is_closed or ring is None:
            for future in futures.values():
                future.fail(closed_error())
            return list(futures.values())
        with self._postponing:
            postponed = [worker for worker in requests if worker in self._postponed]
            for worker in postponed:
                self._postponed[worker].append((packed[worker], futures[worker]))
            self._post({worker: (packed[worker], futures[worker]) for worker in requests if worker not in postponed})
        for worker in requests:
            ring(worker)
        return list(futures.values())

    def _post(self, calls: Mapping[int, tuple[Request, Future]]) -> None:
        """Send requests, by worker, to their nodes."""
        for node in sorted({self._workers[worker].node for worker in calls}):
            own = {self._workers[worker].local: worker for worker in calls if self._workers[worker].node == node}
            requests = {local: calls[worker][0] for local, worker in own.items()}
            futures = {local: calls[worker][1] for local, worker in own.items()}
            self._links[node].call(next(self._call_numbers), requests, futures)

    def _wait(self, future: Future, deadline: float | None) -> None:
        future.wait_done(deadline, lambda: self._is_closed)
        if self._is_closed and not future.is_done:
            future.fail(closed_error())

    # ---- restarts of workers ----------------------------------------------------------------------------------------

    def end_worker(self, worker: int) -> None:
        remote, link = self._workers[worker], self._link_of(worker)
        if link.state is not NodeState.SERVING or worker in link.already_started:
            return
        try:
            remote.exit_code = link.call_actor(link.actor.end_worker, remote.local, worker=worker, timeout_s=END_S)
        except WorkerDied:
            if link.state is NodeState.SERVING:
                raise
        except StepmillError as error:
            link.mark_lost(f"did not end its worker {worker}: {error.message}")

    def revive(self, worker: int, settings_requests: Iterable[Request] = ()) -> WorkerReport:
        """Replace a worker, and its node if that is lost. Calls that come meanwhile are sent to the successor."""
        with self._postponing:
            self._postponed.setdefault(worker, [])
        try:
            return self._revive(worker, settings_requests)
        finally:
            with self._postponing:
                for call in self._postponed.pop(worker, []):
                    self._post({worker: call})

    def _revive(self, worker: int, settings_requests: Iterable[Request]) -> WorkerReport:
        asked_at = time.monotonic()
        with self._replacing[self._workers[worker].node]:
            if self._is_closed:
                raise closed_error()
            if self._link_of(worker).state is NodeState.LOST:
                self._replace_node(worker, asked_at)
            remote, link = self._workers[worker], self._link_of(worker)  # it may have another node now
            local = remote.local
        # Without the lock, because an env that hangs here must not delay the node's other workers.
        limit_s = self._settings.start_timeout_s
        timeout_s = None if limit_s is None else limit_s + REPLY_SLACK_S
        packed = [pack_request(request) for request in settings_requests]
        arguments = local, [] if link.relay is None else link.relay.tickets_of(worker), packed
        generation = 0
        if worker in link.already_started and link.started is not None:
            link.call_actor(link.actor.apply_settings, *arguments, worker=worker, timeout_s=timeout_s)
            link.already_started.discard(worker)
            report = link.started.reports[local]
        else:
            report, generation = link.call_actor(link.actor.revive, *arguments, worker=worker, timeout_s=timeout_s)
        if link.relay is not None:
            link.relay.expect_worker(worker, generation)
        with self._replacing[remote.node]:  # a call for another worker may have replaced the node meanwhile
            fresh = dataclasses.replace(remote, end_fd=OwnedFd.eventfd(), exit_code=None)
            self._workers[worker] = fresh
        remote.end_fd.close()
        if link.state is not NodeState.SERVING:  # the node was lost meanwhile
            fresh.mark_dead()
        return dataclasses.replace(report, worker=worker)

    def _replace_node(self, worker: int, asked_at: float) -> None:
        """Start one or more actors with all workers of a worker's lost node. `asked_at` is when `revive` was called."""
        node, lost = self._workers[worker].node, self._link_of(worker)
        search = self._searches.get(node)
        if search is not None and search.gave_up_at > asked_at:  # in a call for another worker of the node
            raise search.error(lost.lost_error(worker))
        avoid = [] if lost.started is None or lost.cause is None else [lost.started.node_id]
        ids = [env_id for each in self._workers_of(node) for env_id in self._workers[each].plan.env_ids]
        error, demand = lost.lost_error(worker), self._demand_of(node)
        self._searches[node] = search = PlaceSearch(self._ray, self._options, demand, error, ids, avoid)
        links = [self._start_actor(node, avoid)]
        try:
            if shared := self._wait_placed(links[0], search):
                cluster.kill(self._ray, links.pop().actor)
                links += self._divide(node, shared)
            if self._is_closed:
                raise closed_error()
            self._wait_started(links)
            for link in links:
                link.already_started = set(link.workers)
            self._attach(links)
        except BaseException:
            for link in links:
                cluster.kill(self._ray, link.actor)
                link.close_stream()
                self._starting.discard(link)
            raise
        links[0].counts = lost.counts
        self._restarts[node] += 1
        for link in links:
            self._links[link.node] = link
            self._starting.discard(link)

    def _wait_placed(self, link: NodeLink, search: PlaceSearch) -> list[str]:
        """Wait until an actor runs or is late. Return any machines among which its workers are divided instead."""
        deadline = time.monotonic() + (self._settings.start_timeout_s or math.inf)
        runs = _begun(link)
        while not self._ray.wait([runs], timeout=CHECK_S)[0]:
            if self._is_closed:
                raise closed_error()
            if shared := search.shared_machines():
                return shared
            if time.monotonic() > deadline and not cluster.is_waiting(self._ray, self._demand_of(link.node)):
                break
        return []

    def _divide(self, node: int, machines: Sequence[str]) -> list[NodeLink]:
        """Divide the workers of a lost node among machines; return the links of the nodes that replace it."""
        plans = [self._workers[worker].plan for worker in self._workers_of(node)]
        machines = machines[: len(plans)]
        nodes = [node, *range(len(self._links), len(self._links) + len(machines) - 1)]
        self._replacing.update(dict.fromkeys(nodes, self._replacing[node]))
        self._links += [self._links[node]] * (len(nodes) - 1)  # the lost link, until they have started
        self._plan_nodes(plans, nodes)
        return [self._start_actor(each, machine=machine) for each, machine in zip(nodes, machines, strict=True)]

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        if os.getpid() != self._pid or self._is_closed:
            return
        self._is_closed = True
        self._stop_thread()
        serving = [link for link in self._links if link.state is NodeState.SERVING]
        texts: list[str] = []
        with contextlib.suppress(Exception):  # the cluster may have ended
            refs = [link.actor.close.remote(timeout_s) for link in serving]
            if refs:
                done, _ = self._ray.wait(refs, num_returns=len(refs), timeout=timeout_s + CLOSE_SLACK_S)
                texts = [text for found in self._ray.get(done, timeout=1.0) for text in found]
        self._shut_down()
        for text in texts:
            warn(text)

    def _stop_thread(self) -> None:
        self._run_later(lambda: None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _shut_down(self) -> None:
        self._is_closed = True
        links = [*self._links, *self._starting]
        for link in links:
            link.mark_lost("was closed")
        for worker in self._workers:
            worker.end_fd.close()
        if self._thread is None or not self._thread.is_alive():
            self._wake.close()
            for link in links:
                link.close_stream()
        self._slab = self._ring = None


def _begun(link: NodeLink) -> Any:
    """Return a reference that is ready once a process runs the actor of a node."""
    return link.actor.ping.options(concurrency_group="ping").remote()
