"""Starts workers through the launcher, and waits until they have built their envs or attached to the slab.

The launcher is the process that starts a pool's workers; what runs in it is in `worker/launcher.py`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from stepmill import _native
from stepmill._native import OwnedFd
from stepmill.backends.base import GRACE_S, start_timeout_error, worker_died_error, worker_fault_error
from stepmill.backends.starter_client import STARTERS, StartedLauncher, preload_of
from stepmill.backends.worker_link import WorkerLink
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import (
    ClosedPoolError,
    EngineBug,
    EnvError,
    LauncherDied,
    StepmillError,
    describe_exit,
    join_errors,
    signal_name,
)
from stepmill.spec.options import Context
from stepmill.worker import launcher
from stepmill.worker.build_progress import IN_WORKER_INIT
from stepmill.worker.channel import NO_FD, Channel, ChannelClosed, deadline_after, wait_ready
from stepmill.worker.child_server import load_modules
from stepmill.worker.env_host import Fault
from stepmill.worker.messages import (
    Exited,
    Failed,
    Launched,
    LaunchFailed,
    LaunchWorker,
    Quit,
    Ready,
    WorkerPlan,
    WorkerReport,
    WorkerSettings,
    dump,
    load,
)
from stepmill.worker.process_setup import block_signals, fork, worker_environ
from stepmill.worker.signals import allow_signals, defer_signals

_EXIT_CODE_S = 0.5


class LauncherClient:
    """Starts and ends the launcher, and exchanges messages with it. `close` may be called from any thread."""

    def __init__(self, settings: WorkerSettings, plans: Sequence[WorkerPlan]) -> None:
        """Start the launcher. In context "fork" this forks the calling process, so the pool must not have threads yet.

        The caller defers signals, and closes this object.
        """
        self._links: dict[int, WorkerLink] = {}  # the newest of each worker
        self._code: int | None = None
        self._is_reaped = False
        self._lock = threading.RLock()  # one thread at a time reads the channel; reentrant for signal handlers
        self._is_fork = settings.context is Context.FORK
        self._started: StartedLauncher | None = None
        if self._is_fork:
            self._start_fork(settings, plans)
            return
        environ, preload, timeout_s = _worker_environ(settings), preload_of(settings.context), settings.start_timeout_s
        try:
            started = STARTERS.start_launcher(settings.context, environ, preload, timeout_s)
        except TimeoutError:
            raise join_errors([start_timeout_error(plan, None, timeout_s or 0.0) for plan in plans]) from None
        self._started = started
        self._channel, self.pid, self._pidfd = started.channel, started.pid, started.pidfd

    def _start_fork(self, settings: WorkerSettings, plans: Sequence[WorkerPlan]) -> None:
        self.pid, self._pidfd = 0, OwnedFd()
        load_modules(preload_of(settings.context))  # once here, and not in each launcher: further pools start sooner
        learner = OwnedFd.pidfd(os.getpid())
        self._channel, peer = Channel.pair()
        with peer, contextlib.closing(learner):
            try:
                self.pid = self._fork(settings, plans, peer, learner.fileno())
                self._pidfd = OwnedFd.pidfd(self.pid)
            except BaseException:
                self._channel.close()
                if self.pid:
                    os.kill(self.pid, signal.SIGKILL)  # it is not reaped yet, so no other process has this pid
                    self._reap()
                raise

    def _fork(self, settings: WorkerSettings, plans: Sequence[WorkerPlan], peer: socket.socket, learner: int) -> int:
        inherited = launcher.InheritedState(plans, _worker_environ(settings))
        with block_signals():
            pid = fork()
            if pid == 0:
                try:
                    self._channel.close_local_copy()
                    launcher.main_forked(Channel(peer, use_thread=False), learner, inherited)
                finally:
                    os._exit(1)  # the learner's code must not go on in the child
        return pid

    @property
    def fds(self) -> dict[int, int]:
        """The descriptors and events to poll for messages and the end of the launcher."""
        return {self._channel.fd: select.POLLIN, self._pidfd.fileno(): select.POLLIN}

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._pidfd.fileno() == NO_FD

    @property
    def is_dead(self) -> bool:
        """Whether the launcher has ended."""
        return self.is_closed or bool(wait_ready({self._pidfd.fileno(): select.POLLIN}, 0.0))

    def launch(self, link: WorkerLink) -> None:
        """Ask the launcher for a process for this link; `handle_messages` receives the result.

        Raises:
            LauncherDied: the launcher has ended.
        """
        self._links[link.plan.worker] = link
        try:
            with defer_signals(), link.peer as sock:
                self._channel.send(dump(LaunchWorker(link.plan.worker)), [sock.fileno()])
        except ChannelClosed as exc:
            raise self.launcher_died_error() from exc

    def handle_messages(self) -> None:
        """Handle the launcher's messages: update the links of processes that have started, failed to start or ended."""
        with defer_signals(), self._lock, contextlib.suppress(ChannelClosed):
            while (frame := self._channel.poll_frame()) is not None:
                self._receive(load(frame.data), frame.fds)

    def wait_exit(self, link: WorkerLink, timeout_s: float) -> int | None:
        """Return the exit code of a process that has ended; wait at most `timeout_s` for the launcher to report it."""
        deadline = time.monotonic() + timeout_s
        self.handle_messages()
        while link.exit_code is None and not self.is_dead and time.monotonic() < deadline:
            wait_ready(self.fds, deadline)
            self.handle_messages()
        return link.exit_code

    def launcher_died_error(self) -> LauncherDied:
        """Return the error for a launcher that has ended unexpectedly."""
        code = self._reap()
        name = signal_name(code)
        hint = (
            "with context='fork' it cannot be replaced, and no worker can be started any more; make a new pool"
            if self._is_fork
            else "stderr may say why; make a new pool"
        )
        return LauncherDied(
            f"the process that starts workers {describe_exit(code)}; {hint}",
            exit_code=code if name is None else None,
            signal_name=name,
            is_final=self._is_fork,
        )

    def _receive(self, message: object, fds: tuple[OwnedFd, ...]) -> None:
        link = self._links.get(getattr(message, "number", NO_FD))
        if link is None:
            return
        if isinstance(message, Launched) and fds:
            link.set_process(message.pid, fds[0])
        elif isinstance(message, Launched):  # this process may open no more files
            link.mark_launch_failed(os.strerror(errno.EMFILE))
        elif isinstance(message, LaunchFailed):
            link.mark_launch_failed(message.reason)
        elif isinstance(message, Exited) and message.pid == link.pid:
            link.exit_code = message.code

    # ---- the end --------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """End the launcher, which kills the remaining workers, and reap it. Idempotent."""
        with defer_signals(), self._lock:
            if not self.is_closed:
                self._close(timeout_s)

    def _close(self, timeout_s: float) -> None:
        with contextlib.suppress(ChannelClosed):
            self._channel.send(dump(Quit()))
        deadline = time.monotonic() + timeout_s
        while not self.is_dead and time.monotonic() < deadline:
            wait_ready({self._pidfd.fileno(): select.POLLIN}, deadline)
        if not self.is_dead:
            with contextlib.suppress(ProcessLookupError):
                _native.pidfd_send_signal(self._pidfd.fileno(), signal.SIGKILL)
        self._reap()
        self._pidfd.close()
        self._channel.close()

    def _reap(self) -> int | None:
        """Reap a launcher that has ended or was killed; return its exit code, or None if other code has reaped it."""
        if self._is_reaped:
            return self._code
        self._is_reaped = True
        if self._started is not None:
            self._code = self._started.starter.release(self._started.number)
        elif self.pid:
            with contextlib.suppress(ChildProcessError):  # other code in this process waits for any child
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _worker_environ(settings: WorkerSettings) -> dict[str, str]:
    return worker_environ(os.environ, settings.worker_env, settings.worker_threads)


# ---- waiting for workers --------------------------------------------------------------------------------------------


def wait_setup(
    links: Sequence[WorkerLink],
    launcher: LauncherClient,
    timeout_s: float | None,
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Wait until every worker has built its envs, or attached, or has failed to. `on_wait` is called every 0.1 s or sooner.

    Raises:
        StepmillError: the error of the first worker that failed; `others` has further errors.
    """
    errors: dict[int, list[StepmillError]] = {}
    waiting = {link.plan.worker: link for link in links}
    deadline = deadline_after(timeout_s)
    while waiting and time.monotonic() < deadline:
        for link in _wait_for_any(waiting.values(), launcher, deadline):
            del waiting[link.plan.worker]
            errors[link.plan.worker] = _setup_errors(link, launcher)
        on_wait()
        if launcher.is_closed:
            raise ClosedPoolError("the pool was closed while its workers started")
        if waiting and launcher.is_dead:
            launcher.handle_messages()
            errors[min(waiting)] = [launcher.launcher_died_error()]
            break
        if any(errors.values()):
            deadline = min(deadline, time.monotonic() + GRACE_S)
    found = [error for worker in sorted(errors) for error in errors[worker]]
    if waiting and not found:
        found = [
            start_timeout_error(link.plan, link.building, timeout_s or 0.0, pid=link.pid) for link in waiting.values()
        ]
    if found:
        raise join_errors(found)


def _wait_for_any(links: Iterable[WorkerLink], launcher: LauncherClient, deadline: float) -> list[WorkerLink]:
    """Wait for messages or ends of workers, for a slice of time; return the links that are set up or have failed."""
    wanted = dict(launcher.fds)
    for link in links:
        wanted.update(link.fds)
    with allow_signals():  # the backend owns everything that was started
        ready = wait_ready(wanted, deadline)
    launcher.handle_messages()
    for link in links:
        if link.channel.fd in ready or link.pidfd in ready:
            link.handle_messages()
    return [link for link in links if _is_set_up(link) or link.pidfd in ready]


def _is_set_up(link: WorkerLink) -> bool:
    # The worker's message may come before Launched, which is sent on another channel. Without its pidfd a process can neither
    # be watched nor ended, and a pidfd that comes later would be taken for that of the next process.
    return link.setup_result is not None and (link.pidfd != NO_FD or link.has_no_process)


def _setup_errors(link: WorkerLink, launcher: LauncherClient) -> list[StepmillError]:
    if isinstance(link.setup_result, Failed):
        return [
            _unloadable_env_fn(link.plan, fault) or worker_fault_error(fault, link.plan.worker)
            for fault in link.setup_result.faults
        ]
    if link.setup_result is not None:
        return []
    where = "it had built no env" if link.building is None else f"it was constructing env {link.building}"
    where = "it was in workers.init" if link.building == IN_WORKER_INIT else where
    code = launcher.wait_exit(link, _EXIT_CODE_S)
    return [worker_died_error(link.plan.worker, link.plan.env_ids, code, hint=f"{where}; stderr may say why")]


def _unloadable_env_fn(plan: WorkerPlan, fault: Fault) -> EnvError | None:
    """Return the error for an env_fn that a worker could not load, if it cannot be loaded here either."""
    record = fault[1]
    for env_id, env_fn in zip(plan.env_ids, plan.env_fns, strict=True) if record["phase"] == "unpickle" else ():
        try:
            with allow_signals():  # loading runs code of the user
                load(dump(env_fn))
        except Exception as exc:
            return EnvError(
                f"the env_fn of env {env_id} cannot be rebuilt from its pickle: {type(exc).__name__}: {exc}; give the "
                "objects that it holds a __reduce__, create them inside of the env_fn, or use context='fork'",
                env_id=env_id,
                phase="construct",
                error_type=record["type"],
                remote_traceback=record["traceback"],
            )
    return None


def read_report(link: WorkerLink, specs: dict[bytes, EnvSpec]) -> WorkerReport:
    """Return the report of a worker that has built its envs. `specs` collects the specs, so that equal ones are one object."""
    if not isinstance(link.setup_result, Ready):
        raise EngineBug(f"worker {link.plan.worker} sent {link.setup_result} after Build")
    for data in link.setup_result.distinct_specs:
        if data not in specs:
            spec = load(data)
            if not isinstance(spec, EnvSpec):
                raise EngineBug(f"worker {link.plan.worker} sent a {type(spec).__name__} instead of an EnvSpec")
            specs[data] = spec
    distinct = [specs[data] for data in link.setup_result.distinct_specs]
    return WorkerReport(
        link.plan.worker, link.setup_result.pid, tuple(distinct[index] for index in link.setup_result.spec_indices)
    )
