"""The launcher, the process that starts the workers of one pool and reports to the learner how they end.

    forkserver   a fork of the starter, which has imported what every worker needs; workers are forks of it
    spawn        a fork of the starter; it starts each worker as a fresh interpreter
    fork         a fork of the learner, made at the start of the pool before stepmill has threads; workers are forks of it

The launcher is the parent of the workers. Therefore the learner need not fork later, when it may have threads and use a
GPU, and it needs no signal handler for child processes.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepmill._native import OwnedFd
from stepmill.spec.choices import Context
from stepmill.worker import process_setup
from stepmill.worker.channel import Channel
from stepmill.worker.child_server import Child, ChildServer
from stepmill.worker.fresh_interpreter import InterpreterStart, start_interpreter
from stepmill.worker.messages import LaunchWorker, WorkerPlan


@dataclass(frozen=True)
class InheritedState:
    """The data in memory that a launcher inherits if it is a fork of the learner."""

    plans: Sequence[WorkerPlan]
    environ: Mapping[str, str]


def main_forked(channel: Channel, learner: int, inheritance: InheritedState) -> None:
    """Run a launcher in a fork of the learner. This does not return."""
    try:
        process_setup.remove_parent_cleanup()
        process_setup.reset_signal_handlers()
        process_setup.detach_stdin()
        os.environ.update(inheritance.environ)
        launcher = Launcher(channel, learner, Context.FORK, {plan.worker: plan for plan in inheritance.plans})
    except BaseException:
        traceback.print_exc()
        process_setup.exit_process(1)
    else:
        launcher.run_and_leave()


class Launcher(ChildServer[LaunchWorker]):
    """Starts workers on request, and reaps them."""

    def __init__(self, channel: Channel, learner: int, context: Context, plans: Mapping[int, WorkerPlan]) -> None:
        super().__init__(channel, learner, LaunchWorker)
        self._context = context
        self._plans = plans

    def start(self, request: LaunchWorker, fds: Sequence[OwnedFd]) -> Child:
        if self._context is Context.SPAWN:
            arguments = {"learner": self._learner}
            start = InterpreterStart("stepmill.worker.main:main", arguments, (self._learner,), os.environ)
            process = start_interpreter(start, fds[0].fileno())
            return Child.watch(request.number, process.pid, process)
        pid = process_setup.fork()
        if pid == 0:
            self._run_as_worker(request.number, fds[0])
        return Child.watch(request.number, pid)

    def _run_as_worker(self, worker: int, fd: OwnedFd) -> None:
        try:
            from stepmill.worker.main import run_worker  # imported here because a launcher that spawns does not need it

            self.close_in_fork()
            process_setup.enable_crash_traceback()
            run_worker(Channel(socket.socket(fileno=fd.release())), self._learner, self._plans.get(worker))
        except BaseException:
            traceback.print_exc()
        finally:
            process_setup.exit_process(1)
