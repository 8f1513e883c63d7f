"""What every worker does, be it a process, a thread or the caller itself: build envs, make the native loop, serve, close.

build(env_ids, env_fns) ─► Built: envs, specs, faults
make_loop(slab, …)      ─► the native loop over those envs
obey(…)                ─► the records of envs that cannot do what must come before they serve
serve(loop, …)              runs it; does slow requests in between; returns when the pool says stop
close_envs(…)           ─► the records of envs that raised in close()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Protocol, cast

from stepmill import _native
from stepmill.slab.memory import attach_worker
from stepmill.spec.env import EnvSpec
from stepmill.spec.options import AutoresetMode, Seeding
from stepmill.spec.tree import Node, leaves, program
from stepmill.worker import calls
from stepmill.worker.channel import NO_FD
from stepmill.worker.messages import EnvFn, Record, Reply, Request, WorkerSettings, dump, load
from stepmill.worker.records import Passes, describe, passes_none
from stepmill.worker.signals import allow_signals

Fault = tuple[int | None, Record]  # env_id and what it raised

_AUTORESET_NUMBERS = {AutoresetMode.NEXT_STEP: 0, AutoresetMode.SAME_STEP: 1, AutoresetMode.DISABLED: 2}
_SEEDING_NUMBERS = {Seeding.CONTINUE: 0, Seeding.PER_EPISODE: 1, Seeding.FIXED: 2}
EXIT_STRAY_COPY = 67  # as in _native/forks.hpp
_COUNTER_MASK = 0xFFFFFFFF  # the slab's counter of requests has 32 bits


class Door(Protocol):
    """What `stepmill.envs` offers. It is found by name: the adapters import foreign libraries, and this room does not."""

    def describe(self, env: object, like: EnvSpec | None = None) -> EnvSpec: ...
    def adapt(self, env: object) -> object: ...


class Mailbox(Protocol):
    """Where slow requests come from and replies go to."""

    def next(self) -> Request | None:
        """Waits for the request that was announced; None if the learner is gone."""

    def reply(self, reply: Reply) -> None:
        """Sends a reply, without waiting for its reader."""


@dataclass
class Built:
    """The envs of one worker: those that were built before the first fault, all of them if there is none."""

    envs: list[object] = field(default_factory=list)
    specs: list[EnvSpec] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def build(
    env_ids: Sequence[int],
    env_fns: Sequence[EnvFn],
    *,
    on_begin: Callable[[int], None] = lambda _: None,
    passes: Passes = passes_none,
) -> Built:
    """Builds envs one after the other; goes on after one that raises, so that all faults are told at once.

    Args:
        env_ids: their numbers.
        env_fns: their constructors.
        on_begin: is told the env_id before each construction; may raise what `passes` lets through.
        passes: says which exceptions are raised here, once the envs built so far are closed; all others become faults.
    """
    built = Built()
    door = cast("Door", import_module("stepmill.envs"))
    for env_id, env_fn in zip(env_ids, env_fns, strict=True):
        made: list[object] = []
        try:
            on_begin(env_id)
            with allow_signals():
                _native.append_result(made, env_fn)  # in one step: Ctrl-C cannot come between the env and the list
                spec = door.describe(made[0], built.specs[-1] if built.specs else None)
                env = door.adapt(made[0])
            built.specs.append(spec)
            built.envs.append(env)
        except BaseException as exc:
            close_envs((env_id,), made)
            if passes(exc):
                close_envs(env_ids, built.envs)
                raise
            built.faults.append((env_id, describe(exc, "construct", passes=passes)))
    if built.faults:
        close_envs(env_ids, built.envs)
    return built


def attach_own(
    plan: Mapping[str, object], num_workers: int, worker: int, fds: Sequence[int], *, is_process: bool = False
) -> _native.Slab:
    """Maps a slab for one worker, which needs no other worker's memory.

    Args:
        plan: of the slab.
        num_workers: of the pool.
        worker: whose mapping it is.
        fds: of the slab, of this worker's commands and of its results. The mapping needs them no more.
        is_process: whether the worker has a process of its own. Then an env that writes over other workers' results ends
            by a signal; in a thread it would end the learner, which is no better than a wrong value.
    """
    slab_fd, commands_fd, results_fd = fds
    everyone = [slab_fd] + [NO_FD] * (2 * num_workers)
    everyone[1 + 2 * worker], everyone[2 + 2 * worker] = commands_fd, results_fd
    return attach_worker(plan, everyone, worker, is_protected=is_process)


def make_loop(
    slab: _native.Slab, worker: int, built: Built, settings: WorkerSettings, *, is_inline: bool
) -> _native.Loop:
    """Returns the native loop over a worker's envs. `is_inline`: the learner's own thread runs it."""
    how = loop_settings(built.specs[0], settings)
    if is_inline:
        how |= {"inline": True, "describe": partial(describe, passes=_native.is_from_signal)}
    return _native.Loop(slab, worker, built.envs, how)


def loop_settings(spec: EnvSpec, settings: WorkerSettings) -> dict[str, object]:
    """Returns what native code has to know to serve envs of a spec."""
    return {
        "autoreset": _AUTORESET_NUMBERS[settings.autoreset],
        "seeding": _SEEDING_NUMBERS[settings.seeding],
        "batched": spec.is_batched,
        "time_step": spec.time_step,
        "overlap": settings.overlap_resets,
        "reset_retries": settings.reset_retries,
        "retry_wait_ns": int(1e9 * settings.reset_retry_wait_s),
        "observation": program(spec.observation),
        "observation_leaves": _shapes(spec.observation),
        "action": program(spec.action),
        "action_leaves": _shapes(spec.action),
        "info": program(spec.info),
        "info_leaves": _shapes(spec.info),
        "reward": (spec.reward.dtype, spec.reward.shape),
        "describe": describe,
        "pickler": dump,
        "unpickler": load,
    }


def _shapes(node: Node) -> list[tuple[object, tuple[int, ...]]]:
    return [(leaf.dtype, leaf.shape) for _, leaf in leaves(node)]


def serve(loop: _native.Loop, envs: Sequence[object], mailbox: Mailbox, *, num_requests: int = 0) -> bool:
    """Runs the loop until the pool says stop. Returns False if the learner was gone before.

    Args:
        loop: over `envs`.
        envs: the worker's envs, by server.
        mailbox: where the requests are that the slab announces.
        num_requests: announced to this worker's predecessors, and not for it.
    """
    num_seen = num_requests
    own_pid = os.getpid()
    loop.requests_seen(num_seen)
    while loop.run() == _native.LOOP_REQUEST:
        request = mailbox.next()
        if request is None:
            return False
        reply = calls.answer(loop, envs, request)
        if os.getpid() != own_pid:  # the call forked, and this is the copy: it must not answer a second time
            os._exit(EXIT_STRAY_COPY)
        num_seen = (num_seen + 1) & _COUNTER_MASK
        loop.requests_seen(num_seen)
        mailbox.reply(reply)
    return True


def obey(
    loop: calls.ServingLoop, env_ids: Sequence[int], envs: Sequence[object], orders: Iterable[Request]
) -> tuple[Fault, ...]:
    """Does requests with new envs before the loop serves them; returns the records of those that raised."""
    faults: list[Fault] = []
    for order in orders:
        records = calls.obey(loop, envs, order)
        faults += [(env_ids[server], record) for server, record in zip(order.servers, records, strict=True) if record]
    return tuple(faults)


def close_envs(env_ids: Sequence[int], envs: Sequence[object]) -> tuple[Fault, ...]:
    """Closes envs, all of them, and returns the records of those that raised. An env without `close` needs none."""
    faults = (_close_env(env_id, env) for env_id, env in zip(env_ids, envs, strict=False))
    return tuple(fault for fault in faults if fault is not None)


def _close_env(env_id: int, env: object) -> Fault | None:
    try:
        close: Callable[[], object] | None = getattr(env, "close", None)
        if close is not None:
            close()
    except BaseException as exc:  # an env that calls sys.exit in close() must not keep the others open
        return env_id, describe(exc, "close")
    return None


def no_env(exc: BaseException, phase: str) -> tuple[Fault, ...]:
    """Returns the fault of a worker that cannot serve for a reason that no env is to blame for."""
    return ((None, describe(exc, phase)),)
