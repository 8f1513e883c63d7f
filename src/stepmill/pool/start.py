"""From env functions to a running pool: plan the workers, build the envs, check them, lay out the slab."""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from stepmill import _native
from stepmill.backends.base import Backend, Mortal, too_many_workers
from stepmill.backends.foreign import InlineForeignBackend, foreign_backend
from stepmill.backends.process import ProcessBackend
from stepmill.backends.program_end import is_ending
from stepmill.backends.serial import SerialBackend
from stepmill.backends.thread import ThreadBackend
from stepmill.pool.fault_handler import FaultHandler
from stepmill.pool.payloads import InfoMaker, describe_unreadable, reserved_keys
from stepmill.pool.spinning import parent_spin_ns, set_spinning, worker_cores
from stepmill.slab.layout import lay_out
from stepmill.slab.memory import SharedSlab
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import SpecMismatch, StepmillError, UsageError
from stepmill.spec.notices import warn
from stepmill.spec.options import AutoresetMode, BackendName, OnFault, PoolOptions, RetryIn, Seeding
from stepmill.spec.tree import Node, leaves, program
from stepmill.worker.messages import WorkerPlan, WorkerReport, WorkerSettings, dump, load
from stepmill.worker.settle import DUMP_SIGNAL
from stepmill.worker.signals import defer_signals

EnvFn = Callable[[], object]

CLOSE_TIMEOUT_S = 1.5  # how long workers may take to close their envs before they are killed
INTERRUPTED_CLOSE_TIMEOUT_S = 0.4  # the same after Ctrl-C, when all is to be over within a second
_SEEDING_NUMBERS = {Seeding.CONTINUE: 0, Seeding.PER_EPISODE: 1, Seeding.FIXED: 2}
_AUTORESET_NUMBERS = {AutoresetMode.NEXT_STEP: 0, AutoresetMode.SAME_STEP: 1, AutoresetMode.DISABLED: 2}


class PoolResources:
    """What a pool owns and has to end: workers, descriptors, memory, threads.

    It exists before the first of them, and each is stored here as soon as it is made, while signals are deferred. So it
    can be closed at any time, however far the start of the pool has come.
    """

    def __init__(self) -> None:
        self.backend: Backend | None = None
        self.faults: FaultHandler | None = None
        self.slab: SharedSlab | None = None
        self.state: _native.Ledger | None = None
        self.reaper: _native.Reaper | None = None
        self._closers = [None]  # whoever takes the one item closes; taking it is atomic

    @property
    def is_closed(self) -> bool:
        """Whether `close` has begun."""
        return not self._closers

    def close(self) -> None:
        """End everything, once. Quick if Ctrl-C is what ends it: a KeyboardInterrupt is being handled."""
        self._close(is_interrupted=_is_interrupt(sys.exc_info()[0]))

    def abandon(self) -> None:
        """Close what nobody has closed: the pool is garbage, or the program ends.

        The program ends because of Ctrl-C if a KeyboardInterrupt was the last exception whose traceback was printed.
        """
        if self.is_closed:
            return
        last_type = getattr(sys, "last_type", None) if is_ending() else None
        self._close(is_interrupted=_is_interrupt(sys.exc_info()[0]) or _is_interrupt(last_type))

    def _close(self, *, is_interrupted: bool) -> None:
        with defer_signals():
            try:
                self._closers.pop()
            except IndexError:
                return
            self._end(INTERRUPTED_CLOSE_TIMEOUT_S if is_interrupted else CLOSE_TIMEOUT_S)

    def _end(self, timeout_s: float) -> None:
        if self.faults is not None:
            self.faults.workers.stop()
        if self.state is not None:
            self.state.close()
        if self.reaper is not None:
            self.reaper.stop()
            self.reaper = None
        try:
            if self.backend is not None:
                self.backend.close(timeout_s)
        finally:  # it warns of envs that raise in close(), and warnings may be errors
            if self.faults is not None:
                self.faults.workers.join()
                self.faults.capsules.let_go()
            if self.state is not None:
                self.state.release()
            if self.slab is not None:
                self.slab.close()


def _is_interrupt(kind: type[BaseException] | None) -> bool:
    return kind is not None and issubclass(kind, KeyboardInterrupt)


@dataclass(frozen=True)
class Running:
    """What `start_pool` has made. Its PoolResources own it, and end it.

    Attributes:
        specs: of every env, by env_id; spares come last.
        seats: of every server, spares too: its worker, and its place there.
    """

    backend: Backend
    plans: tuple[WorkerPlan, ...]
    specs: tuple[EnvSpec, ...]
    slab: SharedSlab
    state: _native.Ledger
    seats: tuple[tuple[int, int], ...]
    faults: FaultHandler


def start_pool(env_fns: Sequence[EnvFn], options: PoolOptions, resources: PoolResources) -> Running:
    """Build all envs and make everything that serves them, into `resources`, which the caller closes if this raises."""
    choice = choose_backend(len(env_fns), options)
    _check_retries(choice, options)
    _tell_unused(choice, options)
    check_affinity(choice, options)
    plans = plan_workers(env_fns, options)
    is_foreign = choice is BackendName.ENVPOOL
    backend = foreign_backend(worker_settings(options), env_fns) if is_foreign else make_backend(choice, options)
    if isinstance(backend, InlineForeignBackend):
        _tell_unused(choice, options, _MEANINGLESS[BackendName.SERIAL])
    try:
        with defer_signals():
            return _start(plans, backend, options, resources)
    except OSError as exc:
        if exc.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise too_many_workers(len(plans), exc) from exc


def _start(plans: Sequence[WorkerPlan], backend: Backend, options: PoolOptions, resources: PoolResources) -> Running:
    resources.backend = backend
    resources.faults = faults = FaultHandler(plans, backend, options)
    reports = _start_workers(backend, plans, faults)
    specs = _specs_in_order(plans, reports)
    check_specs(specs)
    check_budget(specs[0], options)
    owned = [plan.env_ids for plan in plans]
    layout = lay_out(specs[0], owned, lease_slots=options.slots, num_spares=options.spare_envs)
    resources.slab = slab = SharedSlab(layout, len(plans))
    set_spinning(slab, options, len(plans))
    settings = _ledger_settings(specs, options, backend, len(plans))
    resources.state = state = _native.Ledger(slab.native, settings)
    if isinstance(backend, Mortal):
        resources.reaper = _make_reaper(slab, backend, options)
        state.attach_reaper(resources.reaper)
    faults.workers.attach(state, reports)
    faults.capsules.attach(state, specs[0], faults.workers.attributes_of)
    backend.attach(slab, state.post_request)
    if isinstance(backend, SerialBackend):
        state.attach_inline(backend.loop)
    if isinstance(backend, InlineForeignBackend):
        state.attach_helper(backend.help)
    return Running(backend, tuple(plans), specs, slab, state, seats_of(plans), faults)


def _make_reaper(slab: SharedSlab, backend: Mortal, options: PoolOptions) -> _native.Reaper:
    dump_signal = DUMP_SIGNAL if options.crash_dir is not None else 0
    limits = options.step_timeout_s, options.reset_timeout_s, dump_signal, options.call_timeout_s
    reaper = _native.Reaper(slab.native, *limits, _attempts_timeout_s(options))
    try:
        for worker, pidfd in backend.pidfds.items():
            reaper.watch(worker, pidfd)
    except BaseException:
        reaper.stop()
        raise
    return reaper


def _attempts_timeout_s(options: PoolOptions) -> float | None:
    """Return how long a reset may take with all its attempts in the same env, and the waits between them."""
    if options.reset_timeout_s is None:
        return None
    num_retries = options.reset_retries if options.reset_retry_in is RetryIn.SAME else 0
    return (1 + num_retries) * options.reset_timeout_s + num_retries * options.reset_retry_wait_s


def _start_workers(backend: Backend, plans: Sequence[WorkerPlan], faults: FaultHandler) -> list[WorkerReport]:
    try:
        return backend.start(plans)
    except StepmillError as error:
        faults.capsules.keep_start(error)
        raise


def has_log(options: PoolOptions) -> bool:
    """Whether the actions and results of running episodes are kept: to play them again, or for crash capsules."""
    has_capsules = options.crash_dir is not None and options.backend is not BackendName.ENVPOOL
    return OnFault.REPLAY in (options.on_fault, options.on_raise) or has_capsules


def make_backend(choice: BackendName | Backend, options: PoolOptions) -> Backend:
    """Return a backend that has not begun."""
    if not isinstance(choice, BackendName):
        return choice
    return _BACKENDS[choice](worker_settings(options))


_BACKENDS: dict[BackendName, Callable[[WorkerSettings], Backend]] = {
    BackendName.SERIAL: SerialBackend,
    BackendName.THREAD: ThreadBackend,
    BackendName.PROCESS: ProcessBackend,
}


def _check_retries(choice: BackendName | Backend, options: PoolOptions) -> None:
    if options.reset_retries and options.reset_retry_in is RetryIn.NEW and choice in _MEANINGLESS:
        raise UsageError(
            f"reset_retry_in='new' needs processes, and the backend is {_name(choice)}; "
            "use backend='process', or reset_retry_in='same'"
        )


def _name(choice: BackendName | Backend) -> str:
    return repr(choice.value) if isinstance(choice, BackendName) else type(choice).__name__


def _tell_unused(choice: BackendName | Backend, options: PoolOptions, names: Sequence[str] | None = None) -> None:
    """Warn of options that were given and mean nothing here: a deadline that nobody keeps must not be trusted."""
    if not isinstance(choice, BackendName):
        return
    names = _MEANINGLESS.get(choice, ()) if names is None else names
    unused = [name for name in names if getattr(options, name) != PoolOptions.default_of(name)]
    if unused:
        given = ", ".join(unused)
        warn(
            f"{given}: without effect on the {choice.value} backend, whose envs run in this process; "
            "use backend='process', or leave them out",
        )


# Not `context`: how processes would have been started makes no difference where there are none.
_OF_PROCESSES = ("worker_env", "worker_threads")
_MEANINGLESS = {
    BackendName.SERIAL: ("step_timeout_s", "reset_timeout_s", "start_timeout_s", "call_timeout_s", *_OF_PROCESSES),
    BackendName.THREAD: _OF_PROCESSES,
}


def choose_backend(num_envs: int, options: PoolOptions) -> BackendName | Backend:
    """Return the backend that "auto" stands for: in line where nothing is gained by processes."""
    if options.backend is BackendName.AUTO:
        return BackendName.SERIAL if num_envs == 1 or options.num_workers == 0 else BackendName.PROCESS
    return cast("BackendName | Backend", options.backend)


def plan_workers(env_fns: Sequence[EnvFn], options: PoolOptions) -> list[WorkerPlan]:
    """Share the envs out among the workers: contiguous, and as even as can be; the spares, which come last, evenly too."""
    num_envs = len(env_fns)
    if choose_backend(num_envs, options) in (BackendName.SERIAL, BackendName.ENVPOOL):
        num_workers = 1
    elif options.envs_per_worker is not None:
        num_workers = -(-num_envs // options.envs_per_worker)
    else:
        num_workers = options.num_workers or worker_cores(options)
    num_workers = min(num_workers, num_envs)
    bounds = [worker * num_envs // num_workers for worker in range(num_workers + 1)]
    rooms = [end - begin for begin, end in itertools.pairwise(bounds)]
    spares: list[list[int]] = [[] for _ in rooms]
    for place in range(options.spare_envs):
        worker = num_workers - 1 - place * num_workers // options.spare_envs
        while len(spares[worker]) == rooms[worker]:
            worker -= 1  # the first worker is never the only one with room: its turn comes last
        spares[worker].append(num_envs - options.spare_envs + place)
    ids = iter(range(num_envs - options.spare_envs))
    shares = [(*itertools.islice(ids, room - len(extra)), *extra) for room, extra in zip(rooms, spares, strict=True)]
    return [WorkerPlan(worker, own, tuple(env_fns[i] for i in own)) for worker, own in enumerate(shares)]


def seats_of(plans: Sequence[WorkerPlan]) -> tuple[tuple[int, int], ...]:
    """Return each server's worker, and its place there, in the order of servers."""
    seats = {server: (plan.worker, place) for plan in plans for place, server in enumerate(plan.env_ids)}
    return tuple(seats[server] for server in range(len(seats)))


def _specs_in_order(plans: Sequence[WorkerPlan], reports: Sequence[WorkerReport]) -> tuple[EnvSpec, ...]:
    specs = {
        i: spec
        for plan, report in zip(plans, reports, strict=True)
        for i, spec in zip(plan.env_ids, report.specs, strict=True)
    }
    return tuple(specs[server] for server in range(len(specs)))


def check_affinity(choice: BackendName | Backend, options: PoolOptions) -> None:
    """Refuse cores that are not there, and a backend that has no workers to keep to them.

    Raises:
        UsageError: names them.
    """
    if options.affinity is None:
        return
    missing = sorted(set(options.affinity) - os.sched_getaffinity(0))
    if missing:
        usable = sorted(os.sched_getaffinity(0))
        raise UsageError(f"affinity names the cores {missing}, which this process may not use; it may use {usable}")
    if choice is BackendName.SERIAL:
        raise UsageError(
            "affinity is for workers, and the serial backend has none; pin your own process, or use another backend"
        )


def worker_settings(options: PoolOptions) -> WorkerSettings:
    """Return what of the options every worker must know."""
    return WorkerSettings(
        autoreset=options.autoreset_mode,
        seeding=options.seeding,
        context=options.context,
        entropy=int.from_bytes(os.urandom(8), "little"),
        worker_env=options.worker_env,
        worker_threads=options.worker_threads,
        affinity=None if options.affinity is None else tuple(options.affinity),
        timers_every=options.timers_every,
        overlap_resets=options.overlap_resets and not options.spare_envs,  # with spares every reset is
        start_serially=options.start_serially,
        reset_retries=options.reset_retries if options.reset_retry_in is RetryIn.SAME else 0,
        reset_retry_wait_s=options.reset_retry_wait_s,
        start_timeout_s=options.start_timeout_s,
        call_timeout_s=options.call_timeout_s,
        has_trace=options.crash_dir is not None,
    )


def check_specs(specs: Sequence[EnvSpec]) -> None:
    """Refuse envs that cannot share a slab.

    Raises:
        SpecMismatch: names the first env that differs from env 0, and how.
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
            f"env {env_id} is batched and env 0 is not, or the other way round; let all be alike", specs=specs
        )


def check_budget(spec: EnvSpec, options: PoolOptions) -> None:
    """Refuse a budget of episodes for envs whose rows end theirs at different times.

    Raises:
        UsageError: the envs are batched.
    """
    if options.num_episodes is not None and spec.is_batched:
        raise UsageError(
            f"num_episodes={options.num_episodes} is for envs of one row each, and these are batched; count the "
            "episodes of their rows yourself"
        )


def _ledger_settings(
    specs: Sequence[EnvSpec],
    options: PoolOptions,
    backend: Backend,
    num_workers: int,
) -> dict[str, object]:
    spec = specs[0]
    return {
        "num_envs": len(specs) - options.spare_envs,
        "observation": program(spec.observation),
        "observation_leaves": _shapes(spec.observation),
        "action": program(spec.action),
        "action_leaves": _shapes(spec.action),
        **_outcome_settings(spec),
        "autoreset": _AUTORESET_NUMBERS[options.autoreset_mode],
        "copy": options.copy,
        "episode_stats": options.episode_stats is not False,
        "batched": spec.is_batched,
        "holds_gil": isinstance(backend, ProcessBackend),
        "spin_ns": parent_spin_ns(options, num_workers),
        "make_info": InfoMaker(
            spec.batch_size if spec.is_batched else None, reserved_keys(options, is_batched=spec.is_batched)
        ).make,
        "describe_unreadable": describe_unreadable,
        "seeding": _SEEDING_NUMBERS[options.seeding],
        "num_episodes": options.num_episodes or 0,
        "log_limit_bytes": options.replay_log_bytes if has_log(options) else 0,
        "pickler": dump,
        "unpickler": load,
    }


def _outcome_settings(spec: EnvSpec) -> dict[str, object]:
    """Dtype and shape of what a row's result says beside its observation."""
    return {
        "info": program(spec.info),
        "info_leaves": _shapes(spec.info),
        "reward": (spec.reward.dtype, spec.reward.shape),
        "flag": (np.dtype(np.bool_), (len(spec.agents),) if spec.agents else ()),
        "over": (np.dtype(np.bool_), ()),
        "episode_return": (np.dtype(np.float64), spec.reward.shape),
        "episode_length": (np.dtype(np.int64), ()),
    }


def _shapes(node: Node) -> list[tuple[object, tuple[int, ...]]]:
    return [(leaf.dtype, leaf.shape) for _, leaf in leaves(node)]
