"""Makes a running pool from env functions: plans the workers, builds and checks the envs, and lays out the slab."""

from __future__ import annotations

import atexit
import errno
import os
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepmill import _native
from stepmill.backends.base import Backend, BackendTraits, too_many_workers_error, traits_of
from stepmill.backends.external_pool import external_pool_backend
from stepmill.backends.kernel import KernelBackend
from stepmill.backends.process import ProcessBackend
from stepmill.backends.serial import SerialBackend
from stepmill.backends.thread import ThreadBackend
from stepmill.pool import events
from stepmill.pool.auto_backend import EnvFn
from stepmill.pool.payloads import InfoMaker, describe_unreadable, reserved_keys
from stepmill.pool.plans import count_threads, plan_workers
from stepmill.pool.receiving import PoolWait
from stepmill.pool.recovery import Recovery
from stepmill.pool.revival import Revival
from stepmill.pool.spinning import check_affinity, parent_spin_ns, set_spinning, simulator_spin_s
from stepmill.slab.layout import lay_out
from stepmill.slab.memory import SharedSlab
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import SpecMismatch, StepmillError, UsageError
from stepmill.spec.notices import warn
from stepmill.spec.option_values import common_cores
from stepmill.spec.options import BackendName, OnFault, PoolOptions, RetryIn, Seeding, context_of, name_of_backend
from stepmill.spec.ray_options import hosts_kernels
from stepmill.spec.records import changed
from stepmill.worker.messages import ServerLocation, WorkerPlan, WorkerReport, WorkerSettings, dump, server_locations
from stepmill.worker.native_settings import native_settings
from stepmill.worker.process_setup import DUMP_SIGNAL
from stepmill.worker.signals import defer_signals

NO_LIMIT = (1 << 64) - 1
CLOSE_TIMEOUT_S = 1.5  # how long workers may take to close their envs before they are killed
INTERRUPTED_CLOSE_TIMEOUT_S = 0.4  # the same limit after Ctrl-C, when close() must take less than a second


class PoolResources:
    """Everything that a pool owns and must release: workers, descriptors, memory, threads.

    This object is made first. Each resource is stored here as soon as it exists, while signals are deferred. The object
    can therefore be closed at any point of the start of the pool.
    """

    def __init__(self) -> None:
        self.backend: Backend | None = None
        self.recovery: Recovery | None = None
        self.slab: SharedSlab | None = None
        self.state: _native.PoolState | None = None
        self.reaper: _native.Reaper | None = None
        self._closers = [None]  # the caller that removes the item closes the pool; the removal is atomic

    @property
    def is_closed(self) -> bool:
        """Whether `close` has begun."""
        return not self._closers

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Release everything, once. The default timeout is shorter while a KeyboardInterrupt is handled."""
        self._close(timeout_s, is_interrupted=timeout_s == CLOSE_TIMEOUT_S and _is_interrupt(sys.exc_info()[0]))

    def abandon(self) -> None:
        """Close a pool that the user has not closed, because it is garbage or the program ends.

        If the last exception whose traceback was printed is a KeyboardInterrupt, the program ends because of Ctrl-C.
        """
        if self.is_closed:
            return
        last_type = getattr(sys, "last_type", None) if _native.is_exiting() else None
        self._close(CLOSE_TIMEOUT_S, is_interrupted=_is_interrupt(sys.exc_info()[0]) or _is_interrupt(last_type))

    def _close(self, timeout_s: float, *, is_interrupted: bool) -> None:
        with defer_signals():
            try:
                self._closers.pop()
            except IndexError:
                return
            self._end(INTERRUPTED_CLOSE_TIMEOUT_S if is_interrupted else timeout_s)

    def _end(self, timeout_s: float) -> None:
        if self.recovery is not None:
            self.recovery.workers.stop()
        if self.state is not None:
            self.state.close()
        if self.reaper is not None:
            self.reaper.stop()
            self.reaper = None
        try:
            if self.backend is not None:
                self.backend.close(timeout_s)
        finally:  # close() of a backend may warn, and warnings may be errors
            if self.recovery is not None:
                self.recovery.workers.join()
            if self.state is not None:
                self.state.release()
            if self.slab is not None:
                self.slab.close()


# The exit function of `weakref` closes the pools that are left. Exit functions run in the reverse order of their
# registration, and `weakref` registers its own with the first finalizer. This finalizer therefore makes
# `begin_exit` run before any pool is closed.
weakref.finalize(PoolResources, int)
atexit.register(_native.begin_exit)


def _is_interrupt(kind: type[BaseException] | None) -> bool:
    return kind is not None and issubclass(kind, KeyboardInterrupt)


@dataclass(frozen=True)
class PoolRuntime:
    """The parts of a started pool. Its PoolResources own and release them.

    Attributes:
        plans: the plan of each worker.
        specs: the spec of each env, by env_id. Those of spares come last.
        server_locations: the location of each server, including those of spares.
        load_s: the largest `load_s` of the workers, see `WorkerReport`.
    """

    backend: Backend
    plans: tuple[WorkerPlan, ...]
    specs: tuple[EnvSpec, ...]
    slab: SharedSlab
    state: _native.PoolState
    server_locations: tuple[ServerLocation, ...]
    revival: Revival
    load_s: float


def start_pool(env_fns: Sequence[EnvFn], options: PoolOptions, resources: PoolResources) -> PoolRuntime:
    """Build all envs, and start the backend that runs them, which is not "auto". If this raises, the caller closes `resources`."""
    choice = options.backend
    _check_retries(choice, options)
    keeps_limits = all(getattr(env_fn, "keeps_time_limits", False) for env_fn in env_fns)
    _warn_unused(choice, options, _ONLY_PROCESSES if choice is BackendName.SERIAL and keeps_limits else None)
    if choice is BackendName.RAY:
        options = connect_ray(options, len(env_fns))
    plans = plan_workers(env_fns, options)
    check_affinity(choice, options, plans)
    if choice is BackendName.RAY:
        backend: Backend = ray_backend(options)
    elif choice is BackendName.ENVPOOL:
        backend = external_pool_backend(worker_settings(options), env_fns)
    elif choice is BackendName.KERNEL:
        backend = KernelBackend(worker_settings(options), count_threads(len(env_fns), options), options.step_timeout_s)
    else:
        backend = _BACKENDS[choice](worker_settings(options)) if isinstance(choice, BackendName) else choice
    _check_recycling(backend, choice, options)
    if choice is BackendName.ENVPOOL and traits_of(backend).is_inline:
        _warn_unused(choice, options, _WITHOUT_EFFECT[BackendName.SERIAL])
    try:
        with defer_signals():
            return _start(plans, backend, options, resources)
    except OSError as exc:
        if exc.errno in (errno.ENOMEM, errno.EFBIG):
            raise UsageError(
                f"there is no memory for the results of {len(env_fns)} envs: {exc}; use fewer envs or smaller observations, "
                "or raise the limits of memory (ulimit -v) and of files (ulimit -f), which count shared memory"
            ) from exc
        if exc.errno not in (errno.EMFILE, errno.ENFILE, errno.EAGAIN):
            raise
        raise too_many_workers_error(len(plans), exc) from exc


def connect_ray(options: PoolOptions, num_envs: int) -> PoolOptions:
    """Connect to a Ray cluster, and return the options.

    If no number of workers is given, the result has the number for which the cluster has CPUs. If the nodes run
    kernels, it also has the number of nodes.
    """
    from stepmill.backends.ray import cluster

    chosen = options.ray
    num_cpus = cluster.count_cpus(chosen)
    if hosts_kernels(chosen):
        chosen = replace(chosen, num_nodes=cluster.count_nodes(cluster.require_ray(), chosen, num_envs))
    is_open = options.num_workers is None and options.envs_per_worker is None
    # The thread that waits leaves its core to the thread that receives messages.
    tuning = replace(options.tuning, spin_us=options.tuning.spin_us or 0.0)
    return replace(options, ray=chosen, num_workers=num_cpus if is_open else options.num_workers, tuning=tuning)


def ray_backend(options: PoolOptions) -> Backend:
    """Return the backend for a Ray cluster, which `connect_ray` has connected."""
    from stepmill.backends.ray.backend import RayBackend

    limits = {
        "step_timeout_s": options.step_timeout_s,
        "reset_timeout_s": options.reset_timeout_s,
        "call_timeout_s": options.workers.call_timeout_s,
        "attempts_timeout_s": _attempts_timeout_s(options),
    }
    chosen = options.ray
    num_threads = (options.num_workers or 1) if hosts_kernels(chosen) else 0
    return RayBackend(worker_settings(options), chosen, limits, num_threads)


def _start(
    plans: Sequence[WorkerPlan], backend: Backend, options: PoolOptions, resources: PoolResources
) -> PoolRuntime:
    resources.backend = backend
    resources.recovery = recovery = Recovery(plans, backend, options)
    reports = _start_workers(backend, plans, recovery)
    specs = _specs_in_order(plans, reports)
    check_specs(specs)
    check_budget(specs[0], options)
    owned = [env_ids for plan in plans for env_ids in plan.lanes.values()]
    layout = lay_out(specs[0], owned, lease_slots=options.tuning.slots, num_spares=options.resets.spare_envs)
    layout.plan["lanes"] = [list(plan.lanes) for plan in plans]
    name = re.sub("[^a-z]", "", name_of_backend(options.backend).lower())
    resources.slab = slab = SharedSlab(layout, len(owned), backend=name)
    set_spinning(slab, options, len(owned))
    settings = _state_settings(specs, options, backend, len(owned))
    settings["pids"] = {lane: report.pid for plan, report in zip(plans, reports, strict=True) for lane in plan.lanes}
    resources.state = state = _native.PoolState(slab.native, settings)
    traits = traits_of(backend)
    if traits.monitor is not None:
        resources.reaper = _make_reaper(slab, traits, options)
        state.attach(reaper=resources.reaper)
    recovery.workers.attach(state, resources.reaper)
    recovery.crash_reporter.spec = specs[0]
    backend.attach(slab, state.post_request)
    state.attach(**traits_of(backend).driver)
    revival = Revival(PoolWait(state, recovery, options, specs[0]), recovery, options)
    load_s = max(report.load_s for report in reports)
    return PoolRuntime(backend, tuple(plans), specs, slab, state, server_locations(plans), revival, load_s)


def _make_reaper(slab: SharedSlab, traits: BackendTraits, options: PoolOptions) -> _native.Reaper:
    if traits.nodes is not None:  # the nodes enforce the time limits
        options = replace(options, step_timeout_s=None, reset_timeout_s=None, crash_dir=None)
    dump_signal = DUMP_SIGNAL if options.crash_dir is not None else 0
    limits = options.step_timeout_s, options.reset_timeout_s, dump_signal, options.workers.call_timeout_s
    pidfds = {} if traits.monitor is None else dict(traits.monitor.pidfds)
    return _native.Reaper(slab.native, *limits, _attempts_timeout_s(options), pidfds)


def _attempts_timeout_s(options: PoolOptions) -> float | None:
    """Return how long a reset may take, with all attempts in the same env and the waits between them."""
    if options.reset_timeout_s is None:
        return None
    num_retries = options.resets.retries if options.resets.retry_in is RetryIn.SAME else 0
    return (1 + num_retries) * options.reset_timeout_s + num_retries * options.resets.retry_wait_s


def _start_workers(backend: Backend, plans: Sequence[WorkerPlan], recovery: Recovery) -> list[WorkerReport]:
    try:
        return backend.start(plans)
    except StepmillError as error:
        recovery.crash_reporter.report_start_failure(error)
        raise


def has_log(options: PoolOptions) -> bool:
    """Whether actions and results of running episodes are logged, for replays or crash capsules."""
    has_capsules = options.crash_dir is not None and options.backend is not BackendName.ENVPOOL
    return OnFault.REPLAY in (options.on_fault, options.restarts.on_raise) or has_capsules


def has_seeds(options: PoolOptions) -> bool:
    """Whether the pool must know the seed of every episode."""
    return options.seeding is not Seeding.CONTINUE or has_log(options)


_BACKENDS: dict[BackendName, Callable[[WorkerSettings], Backend]] = {
    BackendName.SERIAL: SerialBackend,
    BackendName.THREAD: ThreadBackend,
    BackendName.PROCESS: ProcessBackend,
}


def _check_retries(choice: BackendName | Backend, options: PoolOptions) -> None:
    if options.resets.retries and options.resets.retry_in is RetryIn.NEW and choice in _WITHOUT_EFFECT:
        text = f"resets.retry_in='new' needs processes, and the backend is {name_of_backend(choice)!r}"
        raise UsageError(f"{text}; use backend='process', or resets.retry_in='same'")


def _check_recycling(backend: Backend, choice: BackendName | Backend, options: PoolOptions) -> None:
    if options.restarts.recycles and not traits_of(backend).can_restart_living:
        text = "restarts.recycle_after_episodes and restarts.recycle_above_mb restart worker processes, and the backend"
        raise UsageError(f"{text} {name_of_backend(choice)!r} has none; use backend='process', or leave them out")


def _warn_unused(choice: BackendName | Backend, options: PoolOptions, names: Sequence[str] | None = None) -> None:
    """Warn of options that have no effect on this backend, such as a deadline that is not enforced."""
    if not isinstance(choice, BackendName):
        return
    has_kernels = choice is BackendName.RAY and hosts_kernels(options.ray)
    if names is None:
        names = _WITHOUT_EFFECT_ON_NODES if has_kernels else _WITHOUT_EFFECT.get(choice, ())
    if names and (unused := changed(options, names)):
        given, option = ", ".join(unused), "host" if has_kernels else "backend"
        place = "threads of nodes" if has_kernels else "this process"
        warn(
            f"{given}: no effect on the {choice.value} backend, because its envs run in {place}; "
            f"use {option}='process', or leave them out"
        )


# `context` is not among them, because a backend without processes needs none.
_ONLY_PROCESSES = ("workers.env", "workers.threads", "workers.threads_per_worker")
_WITHOUT_EFFECT = {
    BackendName.SERIAL: (
        "step_timeout_s",
        "reset_timeout_s",
        "start.timeout_s",
        "workers.call_timeout_s",
        *_ONLY_PROCESSES,
    ),
    BackendName.THREAD: _ONLY_PROCESSES,
    BackendName.KERNEL: ("reset_timeout_s", "start.timeout_s", "workers.call_timeout_s", *_ONLY_PROCESSES),
}
_WITHOUT_EFFECT_ON_NODES = ("reset_timeout_s", *_ONLY_PROCESSES)  # if the nodes run kernels


def _specs_in_order(plans: Sequence[WorkerPlan], reports: Sequence[WorkerReport]) -> tuple[EnvSpec, ...]:
    specs = {
        i: spec
        for plan, report in zip(plans, reports, strict=True)
        for i, spec in zip(plan.env_ids, report.specs, strict=True)
    }
    return tuple(specs[server] for server in range(len(specs)))


def worker_settings(options: PoolOptions) -> WorkerSettings:
    """Return the options that workers need."""
    return WorkerSettings(
        autoreset=options.autoreset_mode,
        seeding=options.seeding,
        context=context_of(options),
        entropy=int.from_bytes(os.urandom(8), "little"),
        worker_env=options.workers.env if isinstance(options.workers.env, Mapping) else {},
        worker_threads=options.workers.threads,
        affinity=common_cores(options.workers.affinity),
        timers_every=options.tuning.timers_every,
        overlap_resets=options.resets.overlap and not options.resets.spare_envs,  # with spares, every reset overlaps
        start_serially=options.start.serially,
        reset_retries=options.resets.retries if options.resets.retry_in is RetryIn.SAME else 0,
        reset_retry_wait_s=options.resets.retry_wait_s,
        step_timeout_s=options.step_timeout_s,
        reset_timeout_s=options.reset_timeout_s,
        start_timeout_s=options.start.timeout_s,
        call_timeout_s=options.workers.call_timeout_s,
        show_progress=options.start.show_progress,
        measures_memory=options.restarts.recycle_above_mb is not None,
        watches_sharing=options.envs_per_worker is None,
        simulator_spin_s=simulator_spin_s(options),
        has_trace=options.crash_dir is not None,
    )


def check_specs(specs: Sequence[EnvSpec]) -> None:
    """Check that the envs can share a slab.

    Raises:
        SpecMismatch: an env differs from env 0.
    """
    first = specs[0]
    for env_id, spec in enumerate(specs):
        if spec is first or first.is_compatible(spec):
            continue
        for what, ours, theirs in (
            ("observation space", first.observation, spec.observation),
            ("action space", first.action, spec.action),
            ("reward", first.reward, spec.reward),
            ("set of agents", (first.agents, first.is_open), (spec.agents, spec.is_open)),
            ("info of fixed shape", first.info, spec.info),
            ("number of rows", first.batch_size, spec.batch_size),
        ):
            if ours != theirs:
                raise SpecMismatch(
                    f"env {env_id} has another {what} than env 0: {theirs} instead of {ours}; "
                    "the envs of a pool must agree in structure, shapes and dtypes",
                    specs=specs,
                )
        raise SpecMismatch(
            f"env {env_id} is batched and env 0 is not, or the other way round; use only one kind in a pool",
            specs=specs,
        )


def check_budget(spec: EnvSpec, options: PoolOptions) -> None:
    """Check the option `num_episodes`.

    Raises:
        UsageError: the envs are batched, and their rows end episodes at different times.
    """
    if options.num_episodes is not None and spec.is_batched:
        raise UsageError(
            f"num_episodes={options.num_episodes} does not work with batched envs; leave it out, and count the "
            "episodes of the rows in your program"
        )


def _state_settings(
    specs: Sequence[EnvSpec], options: PoolOptions, backend: Backend, num_workers: int
) -> dict[str, object]:
    spec = specs[0]
    return {
        **native_settings(spec, options.autoreset_mode, options.seeding),
        "pickler": _dump_argument,
        "num_envs": len(specs) - options.resets.spare_envs,
        "flag": (np.dtype(np.bool_), (len(spec.agents),) if spec.agents else ()),
        "over": (np.dtype(np.bool_), ()),
        "episode_return": (np.dtype(np.float64), spec.reward.shape),
        "episode_length": (np.dtype(np.int64), ()),
        "copy": options.copy,
        "episode_stats": options.episode_stats is not False,
        "holds_gil": traits_of(backend).has_processes,
        "spin_ns": parent_spin_ns(options, num_workers),
        "make_info": InfoMaker(
            spec.batch_size if spec.is_batched else None, reserved_keys(options, is_batched=spec.is_batched)
        ).make,
        "describe_unreadable": describe_unreadable,
        "event_types": events,
        "num_episodes": options.num_episodes or 0,
        "recycle_episodes": options.restarts.recycle_after_episodes or NO_LIMIT,
        "recycle_bytes": (options.restarts.recycle_above_mb or 0) << 20 or NO_LIMIT,
        "log_limit_bytes": options.restarts.replay_log_bytes if has_log(options) else 0,
    }


def _dump_argument(value: object) -> bytes:
    """Return the pickle of an object in reset options or in an action. Arrays, numbers, texts and containers need none.

    Raises:
        UsageError: the object cannot be pickled.
    """
    try:
        return dump(value)
    except Exception as exc:
        raise UsageError(
            f"a {type(value).__name__} in the options of a reset, or in an action, cannot be pickled: {exc}; give the env what it "
            "needs to make it, such as a name or a path"
        ) from exc
