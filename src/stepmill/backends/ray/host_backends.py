"""The backends that run the envs of a node, made from the messages of the pool.

process   a worker process per worker      the actor does not read its messages, and need not import the user's code
thread    a thread per worker              in the actor's process
kernel    one worker: compiled threads     in the actor's process; the thread that waits for results runs envs, too
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from stepmill import _native
from stepmill.backends.base import Backend
from stepmill.backends.kernel import KernelBackend
from stepmill.backends.process import ProcessBackend
from stepmill.backends.ray.messages import NodePlan
from stepmill.backends.thread import ThreadBackend
from stepmill.worker.messages import Build, Outcome, PackedPlan, WorkerPlan, load


class NodeProcessBackend(ProcessBackend):
    """Workers in processes, built from messages that the pool has made."""

    def __init__(self, plan: NodePlan) -> None:
        super().__init__(plan.settings)
        self._builds = plan.builds

    def _dump_build(self, plan: WorkerPlan) -> bytes:
        return self._builds[plan.worker]

    def _unpack(self, outcome: Outcome) -> Outcome:
        return outcome  # the pool unpacks it


class NodeKernelBackend(KernelBackend):
    """The envs of a kernel. Several threads of the actor use the loop, one at a time: the one that holds the lock."""

    _always_releases_gil = True  # so that the actor can name an env that hangs

    def __init__(self, plan: NodePlan) -> None:
        super().__init__(plan.settings, plan.num_threads, plan.limits["step_timeout_s"])

    def run(
        self, relay: _native.NodeRelay, should_run: Callable[[], bool], *, is_for_all: bool, timeout_s: float
    ) -> bool:
        """Run envs until the commands of the node are done, as `NodeRelay.wait` waits.

        Args:
            relay: the relay of the node. Its `wake` ends a wait without anything to run.
            should_run: called after each wait; a change of its result must be followed by `wake`.
            is_for_all: whether to wait until all commands are done, instead of one.
            timeout_s: the longest wait in seconds.
        """
        deadline = time.monotonic() + timeout_s
        while should_run():
            with self._use:
                has_work = self._loop.native.advance(True)
            if relay.wait(is_for_all, 0.0):
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not should_run():  # called again, because the wait may have consumed the wake
                return False
            if not has_work:
                return relay.wait(is_for_all, left_s)
        return False

    def find_hung_env(self) -> int | None:
        """Return the env_id of an env that has not returned within step_timeout_s, or None."""
        return None if self._loop is None else self._loop.native.last_reported()


def make_host_backend(plan: NodePlan) -> tuple[Backend, list[WorkerPlan]]:
    """Return the backend of a node, which is not started, and the plans of its workers."""
    if plan.host == "process":
        plans = [WorkerPlan(worker, ids, ()) for worker, ids in enumerate(plan.env_ids)]
        return NodeProcessBackend(plan), plans
    builds = [load(data) for data in plan.builds]
    loaded = [load(build.plan) for build in builds if isinstance(build, Build) and build.plan is not None]
    plans = [
        dataclasses.replace(each.unpack(), worker=at) for at, each in enumerate(loaded) if isinstance(each, PackedPlan)
    ]
    return NodeKernelBackend(plan) if plan.host == "kernel" else ThreadBackend(plan.settings), plans
