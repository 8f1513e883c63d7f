"""Starts workers through the launcher, and waits until they have built their envs or attached to the slab.

The launcher is the process that starts the workers of a pool. Its code is in `worker/launcher.py`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence

from stepmill._native import OwnedFd
from stepmill.backends.base import GRACE_S, start_timeout_error, worker_fault_error
from stepmill.backends.process_link import ServerLink, WorkerLink, wait_links
from stepmill.backends.starter_client import STARTERS, launcher_setup
from stepmill.spec.choices import Context
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import ClosedPoolError, EngineBug, EnvError, LauncherDied, StepmillError, join_errors
from stepmill.worker import process_setup
from stepmill.worker.build_progress import IN_WORKER_INIT
from stepmill.worker.channel import ChannelClosed, deadline_after
from stepmill.worker.env_host import Fault
from stepmill.worker.launcher import load_modules, run_launcher
from stepmill.worker.messages import Failed, LauncherSetup, WorkerPlan, WorkerReport, WorkerSettings, dump, load
from stepmill.worker.signals import allow_signals

_EXIT_CODE_S = 0.5


class LauncherClient(ServerLink):
    """Starts and ends the launcher, and asks it for workers. Any thread may call `end`."""

    def __init__(self, settings: WorkerSettings, plans: Sequence[WorkerPlan]) -> None:
        """Start the launcher. The caller defers signals, and calls `end` later.

        In context "fork" this forks the calling process, so the pool must not have threads yet.
        """
        super().__init__()
        self._is_fork = settings.context is Context.FORK
        setup = launcher_setup(settings.context, settings.worker_env, settings.worker_threads)
        try:
            if self._is_fork:
                load_modules(
                    setup.preload
                )  # loaded here once, and not in each launcher, so that further pools start sooner
                self._fork(plans, setup)
            else:
                STARTERS.start_launcher(self, setup, settings.start_timeout_s)
        except BaseException as exc:
            self.close()  # this ends a launcher that has been started
            if isinstance(exc, TimeoutError):
                limit_s = settings.start_timeout_s or 0.0
                raise join_errors([start_timeout_error(plan, None, limit_s) for plan in plans]) from None
            raise

    def _fork(self, plans: Sequence[WorkerPlan], setup: LauncherSetup) -> None:
        with self.peer, contextlib.closing(OwnedFd.pidfd(os.getpid())) as learner, process_setup.block_signals():

            def run() -> None:
                process_setup.remove_parent_cleanup()
                self.channel.close_local_copy()
                process_setup.reset_signal_handlers()
                process_setup.detach_stdin()
                run_launcher(self.peer.detach(), learner.fileno(), setup.context, setup.environ, plans)

            self.set_process(process_setup.fork(run))

    def launch(self, link: WorkerLink) -> None:
        """Ask the launcher to start a process for this link. `handle_messages` receives the result.

        Raises:
            LauncherDied: the launcher has ended.
        """
        try:
            self.request(link, worker=link.plan.worker)
        except ChannelClosed as exc:
            raise self.died() from exc

    def died(self) -> LauncherDied:
        """Return the error for a launcher that has ended unexpectedly."""
        if self._is_fork:
            hint = "with context='fork' it cannot be replaced, and no worker can be started any more; make a new pool"
            return self.died_error("workers", hint, is_final=True)
        return self.died_error("workers", "stderr may say why; make a new pool")


# ---- waiting for workers --------------------------------------------------------------------------------------------


def wait_setup(
    links: Sequence[WorkerLink],
    launcher: LauncherClient,
    timeout_s: float | None,
    on_wait: Callable[[], None] | None = None,
) -> None:
    """Wait until every worker has built its envs or attached to the slab, or has failed.

    `on_wait` is called at least every 0.1 s.

    Raises:
        StepmillError: the error of the first worker that failed. `others` has further errors.
    """
    errors: dict[int, list[StepmillError]] = {}
    waiting = {link.plan.worker: link for link in links if not link.is_set_up}
    deadline = deadline_after(timeout_s)
    while waiting and time.monotonic() < deadline:
        with allow_signals():  # the backend owns everything that was started
            ready = wait_links([launcher, *waiting.values()], deadline)
        for server_or_worker in (launcher, *waiting.values()):
            if server_or_worker.channel.fd in ready or server_or_worker.pidfd in ready:
                server_or_worker.handle_messages()
        for worker, link in tuple(waiting.items()):
            if link.is_set_up or link.pidfd in ready:
                del waiting[worker]
                errors[worker] = _setup_errors(link)
        if on_wait is not None:
            on_wait()
        if launcher.is_closed:
            raise ClosedPoolError("the pool was closed while its workers started")
        if waiting and launcher.pidfd in ready:
            errors[min(waiting)] = [launcher.died()]
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


def _setup_errors(link: WorkerLink) -> list[StepmillError]:
    if isinstance(link.setup_result, Failed):
        return [
            _unloadable_env_fn(link.plan, fault) or worker_fault_error(fault, link.plan.worker)
            for fault in link.setup_result.faults
        ]
    if isinstance(link.setup_result, link.awaited):
        return []
    where = "it had built no env" if link.building is None else f"it was constructing env {link.building}"
    where = "it was in workers.init" if link.building == IN_WORKER_INIT else where
    return [link.died_error(f"{where}; stderr may say why", _EXIT_CODE_S)]


def _unloadable_env_fn(plan: WorkerPlan, fault: Fault) -> EnvError | None:
    """Return the error for an env_fn that a worker could not load. Return None if this process can load it."""
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
    """Return the report of a worker that has built its envs. `specs` stores specs, so that equal ones are one object."""
    ready = link.ready
    if ready is None:
        raise EngineBug(f"worker {link.plan.worker} sent {link.setup_result} after Build")
    for data in ready.distinct_specs:
        if data not in specs:
            spec = load(data)
            if not isinstance(spec, EnvSpec):
                raise EngineBug(f"worker {link.plan.worker} sent a {type(spec).__name__} instead of an EnvSpec")
            specs[data] = spec
    found = [specs[ready.distinct_specs[index]] for index in ready.spec_indices]
    return WorkerReport(link.plan.worker, ready.pid, tuple(found), ready.load_s)
