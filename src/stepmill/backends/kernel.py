"""Runs envs in compiled code, in native threads without the GIL. The thread that waits for results also runs envs.

    learner ──► slab: commands ──► KernelLoop: queue ──► threads ──► reset, step of the kernel ──► slab: results

One worker represents all threads. The caller of `send` does all work that takes less time than waking a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stepmill import _native
from stepmill.backends.base import BackendTraits
from stepmill.backends.serial import InlineBackend
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.spec.kernel import KernelEnvMemory, KernelMaker, KernelProgram, info_offsets, zero_infos
from stepmill.worker.calls import ServingLoop
from stepmill.worker.env_host import BuiltEnvs, Fault
from stepmill.worker.messages import WorkerSettings
from stepmill.worker.native_settings import native_settings


class KernelBackend(InlineBackend):
    """Runs all envs of one kernel.

    Args:
        settings: the settings of the pool's workers.
        num_threads: how many threads run envs, including the caller's thread.
        step_timeout_s: if a call of an env takes this many seconds, the env is named on stderr. None for no limit.
    """

    _always_releases_gil = False  # short work keeps the GIL, because releasing it takes longer

    def __init__(self, settings: WorkerSettings, num_threads: int, step_timeout_s: float | None) -> None:
        super().__init__(settings)
        self._step_timeout_s = step_timeout_s
        self._num_threads = num_threads
        self._identity = ""
        self._prepared: list[object] = []  # results of the kernel's `prepare`, which must live as long as the envs

    @property
    def traits(self) -> BackendTraits:
        return BackendTraits(
            driver={} if self._loop is None else {"kernel": self._loop.native}, identity=self._identity
        )

    def _build(self, on_begin: Callable[[int], None]) -> BuiltEnvs:
        maker: Any = self._plan.env_fns[0]
        if any(fn is not maker for fn in self._plan.env_fns) or not isinstance(maker, KernelMaker):
            raise UsageError(
                "backend='kernel' runs the envs of one kernel; give it once for each env: "
                "stepmill.Pool([kernel] * num_envs, backend='kernel'), with a kernel of @stepmill.kernel or "
                "stepmill.kernels.load()"
            )
        self._program = maker.compile()
        self._identity = f"{self._program.name} {self._program.digest}"
        return BuiltEnvs(specs=[maker.describe()] * len(self._plan.env_ids))

    def _make_loop(self, slab: _native.Slab) -> _KernelService:
        program = self._program
        native = _native.KernelLoop(slab, self._loop_settings(program, self._built.specs[0]))
        envs = [KernelEnvHandle(native, program, local, env_id) for local, env_id in enumerate(self._plan.env_ids)]
        if program.prepare is not None:
            for env in envs:
                env.outside = program.prepare(env.state)
        self._prepared = [env.outside for env in envs]
        native.set_outside(list(self._prepared))
        self._built.envs = [*envs]
        return _KernelService(native)

    def _end_loop(self, timeout_s: float) -> bool:
        """End the threads. If one is still in an env, it is not joined."""
        return bool(self._loop.native.stop(timeout_s))

    def _close_envs(self, built: BuiltEnvs) -> tuple[Fault, ...]:
        self._prepared = []
        return ()

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
            "obs_offsets": list(program.observation.offsets),
            "action_offsets": list(program.action.offsets),
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


class _KernelService(ServingLoop):
    """The part of a loop that `serve_request` uses."""

    def __init__(self, native: _native.KernelLoop) -> None:
        self.native = native

    def run_until(self, local: int, after_ticket: int) -> None:
        self.native.run_until(local, after_ticket)

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
