"""Waits for workers to answer: all built, all attached, or every reason why not."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from stepmill.backends.base import deadline_after, died_error, fault_error, late_start
from stepmill.backends.launching import LauncherHandle
from stepmill.backends.link import WorkerLink
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import ClosedPoolError, EngineBug, EnvError, StepmillError, join_errors
from stepmill.worker.channel import NO_FD, wait_ready
from stepmill.worker.host import Fault
from stepmill.worker.messages import Failed, Ready, WorkerPlan, WorkerReport, dump, load
from stepmill.worker.signals import allow_signals

GRACE_S = 2.0  # after the first failure, how long the other workers may go on to tell theirs
_EXIT_CODE_S = 0.5


def await_answers(links: Sequence[WorkerLink], launcher: LauncherHandle, timeout_s: float | None) -> None:
    """Waits until every worker has answered.

    Raises:
        StepmillError: what the first worker reported that failed; the rest is in `others`.
    """
    errors: dict[int, list[StepmillError]] = {}
    waiting = {link.plan.worker: link for link in links}
    deadline = deadline_after(timeout_s)
    while waiting and time.monotonic() < deadline:
        for link in _wait_news(waiting.values(), launcher, deadline):
            del waiting[link.plan.worker]
            errors[link.plan.worker] = _failures(link, launcher)
        if launcher.is_closed:
            raise ClosedPoolError("the pool was closed while its workers started")
        if waiting and launcher.is_dead:
            launcher.pump()
            errors[min(waiting)] = [launcher.death()]
            break
        if any(errors.values()):
            deadline = min(deadline, time.monotonic() + GRACE_S)
    found = [error for worker in sorted(errors) for error in errors[worker]]
    if waiting and not found:
        found = [late_start(link.plan, link.building, timeout_s or 0.0, pid=link.pid) for link in waiting.values()]
    if found:
        raise join_errors(found)


def _wait_news(links: Iterable[WorkerLink], launcher: LauncherHandle, deadline: float) -> list[WorkerLink]:
    """Waits for anything to happen, in a slice; returns the links that have answered or never will."""
    wanted = dict(launcher.fds)
    for link in links:
        wanted.update(link.fds)
    with allow_signals():  # whatever has been started belongs to the backend by now
        ready = wait_ready(wanted, deadline)
    launcher.pump()
    for link in links:
        if link.channel.fd in ready or link.pidfd in ready:
            link.pump()
    return [link for link in links if _is_settled(link) or link.pidfd in ready]


def _is_settled(link: WorkerLink) -> bool:
    # The answer may overtake Launched, which comes by another channel. Without its pidfd a process can neither be watched nor
    # ended, and a pidfd that comes later would be taken for that of the next process.
    return link.answer is not None and (link.pidfd != NO_FD or link.is_void)


def _failures(link: WorkerLink, launcher: LauncherHandle) -> list[StepmillError]:
    if isinstance(link.answer, Failed):
        return [_unloadable(link.plan, fault) or fault_error(fault, link.plan.worker) for fault in link.answer.faults]
    if link.answer is not None:
        return []
    where = "nothing of it is usable" if link.building is None else f"it was constructing env {link.building}"
    code = launcher.wait_exit(link, _EXIT_CODE_S)
    return [died_error(link.plan.worker, link.plan.env_ids, code, hint=f"{where}; stderr may say why")]


def _unloadable(plan: WorkerPlan, fault: Fault) -> EnvError | None:
    """Returns the error for env_fns that a worker could not load, if one of them cannot be loaded here either."""
    record = fault[1]
    for env_id, env_fn in zip(plan.env_ids, plan.env_fns, strict=True) if record["phase"] == "unpickle" else ():
        try:
            with allow_signals():  # loading runs code of the user
                load(dump(env_fn))
        except Exception as exc:
            return EnvError(
                f"the env_fn of env {env_id} cannot be rebuilt from its pickle: {type(exc).__name__}: {exc}; give what it "
                "holds a __reduce__, make it inside of the env_fn, or use context='fork'",
                env_id=env_id,
                phase="construct",
                error_type=record["type"],
                remote_traceback=record["traceback"],
            )
    return None


def read_report(link: WorkerLink, specs: dict[bytes, EnvSpec]) -> WorkerReport:
    """Returns what a worker that is ready has built. Equal specs, which `specs` collects, are one object."""
    if not isinstance(link.answer, Ready):
        raise EngineBug(f"worker {link.plan.worker} answered {link.answer} when it was told to build")
    for data in link.answer.distinct:
        if data not in specs:
            spec = load(data)
            if not isinstance(spec, EnvSpec):
                raise EngineBug(f"worker {link.plan.worker} sent a {type(spec).__name__} for an EnvSpec")
            specs[data] = spec
    distinct = [specs[data] for data in link.answer.distinct]
    return WorkerReport(link.plan.worker, link.answer.pid, tuple(distinct[which] for which in link.answer.which))
