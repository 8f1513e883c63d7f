"""Runs envs in compiled code, in native threads without the GIL. The thread that waits for results also runs envs.

    learner ──► slab: commands ──► KernelLoop: queue ──► threads ──► reset, step of the kernel ──► slab: results

One worker represents all threads. The caller of `send` does all work that takes less time than waking a thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stepmill import _native
from stepmill.backends.base import BackendTraits, Future, serve_requests_here, worker_fault_error
from stepmill.backends.serial import warn_of_use
from stepmill.slab.memory import SharedSlab
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import ClosedPoolError, EngineBug, UsageError, join_errors
from stepmill.spec.kernel import KernelEnvMemory, KernelMaker, KernelProgram, RowLayout, info_offsets, zero_infos
from stepmill.worker.env_host import apply_requests
from stepmill.worker.messages import Request, WorkerPlan, WorkerReport, WorkerSettings
from stepmill.worker.native_settings import native_settings


class KernelBackend:
    """Runs all envs of one kernel.

    Args:
        settings: the settings of the pool's workers.
        num_threads: how many threads run envs, including the caller's thread.
        step_timeout_s: if a call of an env takes this many seconds, the env is named on stderr. None for no limit.
    """

    _always_releases_gil = False  # short work keeps the GIL, because releasing it takes longer

    def __init__(self, settings: WorkerSettings, num_threads: int, step_timeout_s: float | None) -> None:
        self._settings = settings
        self._step_timeout_s = step_timeout_s
        self._num_threads = num_threads
        self._pid = os.getpid()
        self._plan = WorkerPlan(0, (), ())
        self._program: KernelProgram | None = None
        self._spec: EnvSpec | None = None
        self._loop: _native.KernelLoop | None = None
        self._envs: list[KernelEnvHandle] = []
        self._prepared: list[object] = []  # results of the kernel's `prepare`, which must live as long as the envs

    @property
    def traits(self) -> BackendTraits:
        identity = "" if self._program is None else f"{self._program.name} {self._program.digest}"
        return BackendTraits(driver={} if self._loop is None else {"kernel": self._loop}, identity=identity)

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
        self._prepare()

    def call(self, requests: Mapping[int, Request]) -> list[Future]:
        if self._loop is None:
            raise ClosedPoolError("the pool is closed; make a new one")
        return serve_requests_here(_Service(self._loop), self._envs, requests)

    def revive(self, worker: int, settings_requests: Iterable[Request] = ()) -> WorkerReport:
        """Set all envs back to their state before the first reset."""
        self.loop.clear()
        self._prepare()
        faults = apply_requests(_Service(self.loop), self._plan.env_ids, self._envs, settings_requests)
        if faults:
            raise join_errors([worker_fault_error(fault, 0) for fault in faults])
        return self._report()

    def close(self, timeout_s: float) -> None:
        """End the threads. If one is still in an env, it is not joined, and a warning is issued."""
        loop, self._loop, self._envs = self._loop, None, []
        if loop is None or os.getpid() != self._pid:
            return
        if loop.stop(timeout_s):
            self._prepared = []
        else:
            warn_of_use(self._plan.env_ids)

    def _prepare(self) -> None:
        assert self._program is not None
        self._envs = [
            KernelEnvHandle(self.loop, self._program, local, env_id) for local, env_id in enumerate(self._plan.env_ids)
        ]
        if self._program.prepare is not None:
            for env in self._envs:
                env.outside = self._program.prepare(env.state)
        self._prepared = [env.outside for env in self._envs]
        self.loop.set_outside(list(self._prepared))

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
            "state_bytes": program.memory.itemsize,
            "saved_bytes": program.num_saved_bytes,
            "info_bytes": 0 if program.infos is None else program.infos.itemsize,
            "info_offsets": info_offsets(program.infos),
            "infos": zero_infos(program.infos),
            "max_episode_steps": program.max_episode_steps,
            "obs_offsets": _offsets(program.observation),
            "action_offsets": _offsets(program.action),
            "obs_bytes": program.observation.size_bytes,
            "action_bytes": program.action.size_bytes,
            "entropy": self._settings.entropy,
            "num_threads": self._num_threads,
            "step_timeout_ns": int(1e9 * (self._step_timeout_s or 0.0)),
            "name": program.name,
            "always_releases_gil": self._always_releases_gil,
            "cores": list(self._settings.affinity or ()),
            "describe": describe,
        }


def _offsets(layout: RowLayout) -> list[int]:
    return list(layout.offsets)


class _Service:
    """The part of a loop that `serve_request` uses. Kernels have no early resets, and no cached methods."""

    def __init__(self, loop: _native.KernelLoop) -> None:
        self._loop = loop

    def run_until(self, local: int, after_ticket: int) -> None:
        self._loop.run_until(local, after_ticket)

    def refresh(self) -> None:
        pass

    def restart_early_reset(self, local: int) -> None:
        pass

    def restore(self, local: int, position: dict[str, Any]) -> None:
        raise UsageError("the state of a kernel is its memory; leave out state=")

    def set_default_options(self, local: int, options: bytes | None) -> None:
        if options is not None:
            raise UsageError("kernels take no reset options; declare a method, and call it")


class KernelEnvHandle:
    """The object that receives the calls of one env. It has the methods of the kernel and the fields of the state.

    Attributes:
        env_id: the number of the env.
        state: a record that shares the memory of the env.
        outside: the memory of the env outside its state. None if there is none.
    """

    def __init__(self, loop: _native.KernelLoop, program: KernelProgram, local: int, env_id: int) -> None:
        self.env_id = env_id
        self._methods = program.methods
        self._fields = program.state.names or ()
        memory = loop.state_of(local).view(program.memory)
        self.state = (memory if program.infos is None else memory["state"]).view(np.recarray)[0]
        self.outside: KernelEnvMemory | None = None

    def has_wrapper_attr(self, name: str) -> bool:
        """Return whether `get_wrapper_attr` finds this name."""
        return name in self._methods or name in self._fields or name == "state"

    def get_wrapper_attr(self, name: str) -> Any:
        """Return a method, or the value of a field of the state.

        Raises:
            AttributeError: the kernel declares no method and no field of this name.
        """
        if name == "state":
            return self.state
        if name in self._methods:
            method = self._methods[name]
            return lambda *args, **kwargs: method(self.state, *args, **kwargs)
        if name in self._fields:
            value = self.state[name]
            return value.copy() if isinstance(value, np.ndarray) else value
        raise AttributeError(
            f"the kernel does not declare a method {name!r}, and its state has no such field; "
            f"it has {', '.join([*self._methods, *self._fields])}"
        )

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Set a field of the state.

        Raises:
            AttributeError: the state has no field of this name.
        """
        if name not in self._fields:
            raise AttributeError(f"the state of the kernel has no field {name!r}; it has {', '.join(self._fields)}")
        self.state[name] = value
