"""Envs in compiled code. Native threads run them without the GIL, and the thread that waits for results takes part.

    learner ──► slab: commands ──► KernelLoop: queue ──► threads ──► reset, step of the kernel ──► slab: results

One worker stands for all threads. What takes less time than to wake a thread is done by the caller, when it is sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stepmill import _native
from stepmill.backends.base import Future, serve_requests_here, worker_fault_error
from stepmill.backends.serial import warn_of_use
from stepmill.slab.memory import SharedSlab
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import ClosedPoolError, EngineBug, UsageError, join_errors
from stepmill.spec.kernel import KernelMaker, KernelProgram, RowLayout
from stepmill.worker.env_host import apply_requests
from stepmill.worker.messages import Request, WorkerPlan, WorkerReport, WorkerSettings
from stepmill.worker.native_settings import native_settings


class KernelBackend:
    """Runs all envs of one kernel.

    Args:
        settings: of the pool.
        num_threads: how many threads run envs, the caller's own among them.
        step_timeout_s: an env that is in one call for so long is named on stderr; None is no limit.
    """

    def __init__(self, settings: WorkerSettings, num_threads: int, step_timeout_s: float | None) -> None:
        self._settings = settings
        self._step_timeout_s = step_timeout_s
        self._num_threads = num_threads
        self._pid = os.getpid()
        self._plan = WorkerPlan(0, (), ())
        self._program: KernelProgram | None = None
        self._spec: EnvSpec | None = None
        self._loop: _native.KernelLoop | None = None
        self._seats: list[KernelSeat] = []
        self._kept: list[object] = []  # what the envs need beside their state

    @property
    def loop(self) -> _native.KernelLoop:
        """The native loop."""
        if self._loop is None:
            raise EngineBug("the kernel backend has no loop before attach() and after close()")
        return self._loop

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerReport]:
        self._plan = plans[0]
        maker: Any = self._plan.env_fns[0]
        if any(fn is not maker for fn in self._plan.env_fns) or not isinstance(maker, KernelMaker):
            raise UsageError(
                "backend='kernel' runs the envs of one kernel; give it once for each env: "
                "stepmill.Pool([kernel] * num_envs, backend='kernel'), with a kernel of @stepmill.kernel or "
                "stepmill.kernels.load()"
            )
        self._program, self._spec = maker.compile(), maker.describe()
        return [self._report()]

    def attach(self, slab: SharedSlab, ring: Callable[[int], None]) -> None:
        if self._program is None or self._spec is None:
            raise EngineBug("the kernel backend attaches before it has started")
        self._loop = _native.KernelLoop(slab.native, self._loop_settings(self._program, self._spec))
        self._seats = [KernelSeat(self._loop, self._program, server) for server in range(len(self._plan.env_ids))]
        self._prepare()

    def call(self, requests: Mapping[int, Request]) -> list[Future]:
        if self._loop is None:
            raise ClosedPoolError("a pool that is closed answers no call; make a new one")
        return serve_requests_here(_Service(self._loop), self._seats, requests)

    def revive(self, worker: int, orders: Iterable[Request] = ()) -> WorkerReport:
        """Make all envs as they were before their first reset."""
        self.loop.clear()
        self._prepare()
        faults = apply_requests(_Service(self.loop), self._plan.env_ids, self._seats, orders)
        if faults:
            raise join_errors([worker_fault_error(fault, 0) for fault in faults])
        return self._report()

    def close(self, timeout_s: float) -> None:
        """End the threads. One that is still in an env is left behind, with a warning."""
        loop, self._loop, self._seats = self._loop, None, []
        if loop is None or os.getpid() != self._pid:
            return
        if loop.stop(timeout_s):
            self._kept = []
        else:
            warn_of_use(self._plan.env_ids)

    def _prepare(self) -> None:
        if self._program is not None and self._program.prepare is not None:
            self._kept = [self._program.prepare(seat.state) for seat in self._seats]

    def _report(self) -> WorkerReport:
        assert self._spec is not None
        return WorkerReport(0, self._pid, (self._spec,) * len(self._plan.env_ids))

    def _loop_settings(self, program: KernelProgram, spec: EnvSpec) -> dict[str, object]:
        def describe(is_reset: bool, status: int, raised: int, message: str) -> dict[str, str]:
            kind, text = program.explain(status, raised, message)
            return {"phase": "reset" if is_reset else "step", "type": kind, "message": text, "traceback": ""}

        return {
            **native_settings(spec, self._settings.autoreset, self._settings.seeding),
            "call": int(program.call),
            "reset": program.reset,
            "step": program.step,
            "state_bytes": program.state.itemsize,
            "max_episode_steps": program.max_episode_steps,
            "obs_offsets": _offsets(program.observation),
            "action_offsets": _offsets(program.action),
            "obs_bytes": program.observation.size_bytes,
            "action_bytes": program.action.size_bytes,
            "entropy": self._settings.entropy,
            "num_threads": self._num_threads,
            "step_timeout_ns": int(1e9 * (self._step_timeout_s or 0.0)),
            "name": program.name,
            "cores": list(self._settings.affinity or ()),
            "describe": describe,
        }


def _offsets(layout: RowLayout) -> list[int]:
    return list(layout.offsets)


class _Service:
    """What answering calls asks of a loop; nothing is begun ahead of its time here, or looked up."""

    def __init__(self, loop: _native.KernelLoop) -> None:
        self._loop = loop

    def run_until(self, local: int, after_ticket: int) -> None:
        self._loop.run_until(local, after_ticket)

    def refresh(self) -> None:
        pass

    def restart_early_reset(self, local: int) -> None:
        pass

    def set_default_options(self, local: int, options: bytes | None) -> None:
        if options is not None:
            raise UsageError("kernels take no reset options; declare a method, and call it")


class KernelSeat:
    """One env, as calls see it: the methods that its kernel declares, and the fields of its state.

    Attributes:
        env_id: its number.
        state: a record that shares the env's memory.
    """

    def __init__(self, loop: _native.KernelLoop, program: KernelProgram, server: int) -> None:
        self._loop, self.env_id = loop, server
        self._methods = program.methods
        self._has_more = program.prepare is not None
        self._fields = program.state.names or ()
        self.state = loop.state_of(server).view(program.state).view(np.recarray)[0]

    def snapshot(self) -> bytes:
        """Return a copy of all that the env remembers.

        Raises:
            UsageError: that is not all in its state.
        """
        if self._has_more:
            raise UsageError("this kernel keeps memory beside its state, and has no snapshots")
        return self._loop.snapshot(self.env_id)

    def restore(self, snapshot: bytes) -> None:
        """Make the env what it was."""
        self._loop.restore(self.env_id, snapshot)

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether `get_wrapper_attr` finds it."""
        return name in self._methods or name in self._fields or name in ("state", "snapshot", "restore")

    def get_wrapper_attr(self, name: str) -> Any:
        """Return a method, or the value of a field of the state.

        Raises:
            AttributeError: the kernel declares neither.
        """
        if name in ("state", "snapshot", "restore"):
            return getattr(self, name)
        if name in self._methods:
            method = self._methods[name]
            return lambda *args, **kwargs: method(self.state, *args, **kwargs)
        if name in self._fields:
            value = self.state[name]
            return value.copy() if isinstance(value, np.ndarray) else value
        raise AttributeError(
            f"the kernel declares no method {name!r}, and its state has no such field; "
            f"it has {', '.join([*self._methods, *self._fields])}"
        )

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Set a field of the state.

        Raises:
            AttributeError: there is none.
        """
        if name not in self._fields:
            raise AttributeError(f"the state of the kernel has no field {name!r}; it has {', '.join(self._fields)}")
        self.state[name] = value
