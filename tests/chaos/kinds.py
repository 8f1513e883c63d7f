"""The kinds of rounds: the options of the pool, and the faults that are injected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stepmill.spec.options import AutoresetMode, OnFault, PoolOptions
from tests.pool_model.envs import HANG, HANG_S, KILL, RAISE, SCRIBBLE
from tests.pool_model.setup import Setup

STEP_TIMEOUT_S = 0.4
CALL_TIMEOUT_S = 3.0
THREAD_HANG_S = 0.7  # longer than the deadline, shorter than close() waits
NUM_ROWS = 8
MAX_FAILED_BUILDS = 3


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of round.

    Attributes:
        options: pool options in addition to those of all rounds.
        fatal: actions that make an env fail each time. None under replay, which cannot repair a fault that repeats.
        steps, resets, calls: how traps make a step, reset or call fail once.
        builds: how traps make constructors fail after a death, up to MAX_FAILED_BUILDS times.
        is_interrupted: whether Ctrl-C interrupts calls that send and receive.
        interrupts_starts: whether the round only makes pools, and Ctrl-C interrupts their construction.
        has_unreadable: whether some infos have a value that cannot be unpickled.
        rows_each, is_ragged: rows of each env object, and whether their episodes end at different times.
        backend: only processes, also those of nodes, get signals; a hang in a thread ends after `hang_s`.
        num_threads: threads of each worker that run envs.
        has_capsules: whether a crash capsule of each fault is written and read.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    fatal: tuple[int, ...] = (KILL, RAISE, HANG)
    steps: tuple[int, ...] = ()
    resets: tuple[int, ...] = ()
    calls: tuple[int, ...] = (RAISE,)
    builds: tuple[int, ...] = ()
    is_interrupted: bool = False
    interrupts_starts: bool = False
    has_unreadable: bool = False
    rows_each: int = 1
    is_ragged: bool = False
    backend: str = "process"
    num_workers: int = 3
    num_threads: int = 1
    has_capsules: bool = False

    @property
    def policy(self) -> OnFault:
        """The fault policy."""
        return OnFault(self.options.get("on_fault", OnFault.TRUNCATE))

    @property
    def is_replayed(self) -> bool:
        """Whether episodes are replayed, so that none may be broken."""
        return self.policy is OnFault.REPLAY

    @property
    def mode(self) -> AutoresetMode:
        """When ended envs are reset."""
        return AutoresetMode(self.options.get("autoreset_mode", AutoresetMode.NEXT_STEP))

    @property
    def budget(self) -> int | None:
        """How many episodes each env plays; None is no limit."""
        return self.options.get("num_episodes")

    @property
    def hang_s(self) -> float:
        """How long a hang lasts."""
        return HANG_S if self.has_processes else THREAD_HANG_S

    @property
    def has_processes(self) -> bool:
        """Whether the workers are processes of this machine."""
        return self.backend in ("process", "ray")

    @property
    def num_spares(self) -> int:
        """How many spare env objects there are."""
        return int(self.options.get("resets", {}).get("spare_envs", 0))

    @property
    def num_envs(self) -> int:
        """How many envs the pool has."""
        return NUM_ROWS // self.rows_each

    @property
    def lengths(self) -> tuple[int, ...]:
        """The episode length of each row."""
        num_rows = (self.num_envs + self.num_spares) * self.rows_each
        return tuple(8 + (row if self.is_ragged else row // self.rows_each) % 5 for row in range(num_rows))

    @property
    def setup(self) -> Setup:
        """What the model has to know."""
        chosen = {"backend": self.backend, "seeding": "per_episode", **self.options}
        chosen |= {"autoreset_mode": self.mode.value, "on_fault": self.policy.value}
        return Setup(
            "single" if self.rows_each == 1 else "batched",
            self.num_envs,
            chosen,
            self.fatal,
            self.lengths,
            is_stormy=True,
            hides_faults=self.is_replayed,
        )

    def pool_options(self, context: str, crash_dir: str | None) -> PoolOptions:
        """Return the options of the round's pool."""
        chosen: dict[str, Any] = {
            "on_fault": self.policy,
            "seeding": "per_episode",
            "context": context,
            "autoreset_mode": self.mode,
            "step_timeout_s": None if self.backend == "serial" else STEP_TIMEOUT_S,
            "reset_timeout_s": None if self.backend == "serial" else STEP_TIMEOUT_S,
            "workers": {"call_timeout_s": CALL_TIMEOUT_S, "threads_per_worker": self.num_threads},
            "crash_dir": crash_dir if self.has_capsules else None,
            "restarts": {"max_restarts": 1_000_000, "restart_window_s": 0.02},
            **self.options,
        }
        return PoolOptions(**chosen)


_ONCE = (RAISE, RAISE, KILL, HANG)
_IN_THREADS = (RAISE, RAISE, HANG)
_SAME = {"autoreset_mode": "SameStep"}
_DISABLED = {"autoreset_mode": "Disabled"}
_SPARES = {"resets": {"spare_envs": 3}}
_REPLAY = {"on_fault": "replay"}


def _replayed(name: str, *, ways: tuple[int, ...] = _ONCE, **fields: Any) -> Kind:
    # A call that fails once and succeeds when it is repeated cannot be replayed.
    return Kind(name=name, fatal=(), steps=ways, resets=ways, calls=(), **fields)


_TRUNCATED = (
    Kind(name="truncate"),
    Kind(name="overlap", options={"resets": {"overlap": True}}, resets=_ONCE, has_capsules=True),
    Kind(name="spares", options=_SPARES, resets=_ONCE),
    Kind(name="retries", options={"resets": {"retries": 2, "retry_wait_s": 0.01}}, resets=(RAISE, RAISE, RAISE, KILL)),
    Kind(
        name="retries in new processes",
        options={"resets": {"retries": 2, "retry_in": "new", "retry_wait_s": 0.01}},
        resets=_ONCE,
    ),
    Kind(name="batched", rows_each=2, steps=_ONCE),
    Kind(name="ragged", rows_each=2, is_ragged=True, steps=_ONCE, resets=_ONCE),
    Kind(name="batched, same step", rows_each=2, options=_SAME, steps=_ONCE, resets=_ONCE),
    Kind(name="same step", options=_SAME, resets=_ONCE, has_capsules=True),
    Kind(name="disabled", options=_DISABLED, resets=_ONCE),
    Kind(name="disabled, spares", options={**_DISABLED, **_SPARES}, resets=_ONCE),
    Kind(name="spares, overlap", options={"resets": {"spare_envs": 3, "overlap": True}}, resets=_ONCE),
    Kind(name="spares, budget", options={**_SPARES, "num_episodes": 3}, resets=_ONCE),
    Kind(name="budget", options={"num_episodes": 3}, resets=_ONCE),
    Kind(name="budget, same step", options={**_SAME, "num_episodes": 3}, resets=_ONCE),
)
_RAISED = (
    Kind(name="raise", options={"on_fault": "raise"}),
    Kind(name="raise, same step", options={**_SAME, "on_fault": "raise"}, resets=_ONCE),
    Kind(name="raise, disabled", options={**_DISABLED, "on_fault": "raise"}, resets=_ONCE),
    Kind(name="raise, spares", options={**_SPARES, "on_fault": "raise"}, resets=_ONCE),
    Kind(name="raise, batched", options={"on_fault": "raise"}, rows_each=2, resets=_ONCE),
)
_REPLAYED = (
    _replayed("replay", options=_REPLAY, has_capsules=True),
    _replayed("replay with overlap", options={**_REPLAY, "resets": {"overlap": True}}),
    _replayed("replay with spares", options={**_REPLAY, **_SPARES}),
    _replayed("replay with spares, disabled", options={**_REPLAY, **_SPARES, **_DISABLED}),
    _replayed("replay with spares, overlap", options={**_REPLAY, "resets": {"spare_envs": 3, "overlap": True}}),
    _replayed("replay, same step", options={**_REPLAY, **_SAME}),
    _replayed("replay, disabled", options={**_REPLAY, **_DISABLED}),
    _replayed("replay, budget", options={**_REPLAY, "num_episodes": 3}),
    _replayed("replay, batched", options=_REPLAY, rows_each=2),
    _replayed("replay, batched, same step", options={**_REPLAY, **_SAME}, rows_each=2),
    _replayed("replay, ragged", options=_REPLAY, rows_each=2, is_ragged=True),
)
_FAILING_BUILDS = (RAISE, RAISE, KILL)
_STRAY = (SCRIBBLE, SCRIBBLE, RAISE)
_RAISE = {"on_fault": "raise"}
_WITH_CTRL_C = (
    Kind(name="ctrl-c", is_interrupted=True),
    Kind(name="ctrl-c, same step", options=_SAME, is_interrupted=True),
    Kind(name="ctrl-c, raise", options=_RAISE, is_interrupted=True),
    _replayed("ctrl-c, replay", options=_REPLAY, is_interrupted=True),
    _replayed("ctrl-c, replay with spares", options={**_REPLAY, **_SPARES}, is_interrupted=True),
    _replayed(
        "ctrl-c, threads, replay", backend="thread", options=_REPLAY, ways=(RAISE, RAISE, HANG), is_interrupted=True
    ),
)
_INTERRUPTED_STARTS = tuple(
    Kind(name=f"ctrl-c in a start, {backend}", backend=backend, fatal=(), calls=(), interrupts_starts=True)
    for backend in ("process", "thread", "serial")
)
_REBUILT = (
    Kind(name="failing rebuilds", builds=_FAILING_BUILDS),
    Kind(name="failing rebuilds, raise", options=_RAISE, builds=_FAILING_BUILDS),
    _replayed("failing rebuilds, replay", options=_REPLAY, builds=_FAILING_BUILDS),
)
_UNREADABLE = (
    Kind(name="unreadable infos", has_unreadable=True),
    _replayed("unreadable infos, replay", options=_REPLAY, has_unreadable=True),
)
_SCRIBBLED = (
    Kind(name="scribbles", steps=_STRAY),
    Kind(name="scribbles, raise", options=_RAISE, steps=_STRAY),
    # Only in steps: a crash in the reset of a replay counts as another crash of the step that is replayed.
    Kind(name="scribbles, replay", fatal=(), steps=_STRAY, resets=(RAISE,), calls=(), options=_REPLAY),
)
_SEVERAL_THREADS = (
    Kind(name="lanes", num_threads=3, resets=_ONCE, has_capsules=True),
    Kind(name="lanes, same step", num_threads=2, options=_SAME, steps=_ONCE, resets=_ONCE),
    Kind(name="lanes, disabled, spares", num_threads=4, options={**_DISABLED, **_SPARES}, resets=_ONCE),
    Kind(name="lanes, raise", num_threads=3, options=_RAISE, resets=_ONCE),
    Kind(
        name="lanes, retries in new processes",
        num_threads=3,
        options={"resets": {"retries": 2, "retry_in": "new", "retry_wait_s": 0.01}},
        resets=_ONCE,
    ),
    _replayed("lanes, replay", num_threads=3, options=_REPLAY, builds=_FAILING_BUILDS),
    _replayed("lanes, replay with spares", num_threads=2, options={**_REPLAY, **_SPARES}),
    _replayed("ctrl-c, lanes, replay", num_threads=3, options=_REPLAY, is_interrupted=True),
)
_OTHER_BACKENDS = (
    Kind(name="threads", backend="thread", fatal=(RAISE, HANG), resets=_IN_THREADS, calls=_IN_THREADS),
    Kind(
        name="threads, same step",
        backend="thread",
        options=_SAME,
        fatal=(RAISE, HANG),
        resets=_IN_THREADS,
        calls=_IN_THREADS,
    ),
    Kind(name="threads, spares", backend="thread", options=_SPARES, fatal=(RAISE, HANG), resets=_IN_THREADS),
    Kind(
        name="threads, overlap",
        backend="thread",
        options={"resets": {"overlap": True}},
        fatal=(RAISE, HANG),
        resets=_IN_THREADS,
        calls=_IN_THREADS,
    ),
    Kind(
        name="threads, raise", backend="thread", options={"on_fault": "raise"}, fatal=(RAISE, HANG), resets=_IN_THREADS
    ),
    _replayed("threads, replay", backend="thread", options=_REPLAY, ways=_IN_THREADS),
    _replayed("threads, replay with spares", backend="thread", options={**_REPLAY, **_SPARES}, ways=_IN_THREADS),
    Kind(name="serial", backend="serial", fatal=(RAISE,), resets=(RAISE,)),
    Kind(name="serial, spares", backend="serial", options=_SPARES, fatal=(RAISE,), resets=(RAISE,)),
    Kind(name="serial, disabled", backend="serial", options=_DISABLED, fatal=(RAISE,), resets=(RAISE,)),
    Kind(name="serial, raise", backend="serial", options={"on_fault": "raise"}, fatal=(RAISE,), resets=(RAISE,)),
    _replayed("serial, replay", backend="serial", options=_REPLAY, ways=(RAISE,)),
)
KINDS = (
    *_TRUNCATED,
    *_RAISED,
    *_REPLAYED,
    *_WITH_CTRL_C,
    *_INTERRUPTED_STARTS,
    *_REBUILT,
    *_UNREADABLE,
    *_SCRIBBLED,
    *_SEVERAL_THREADS,
    *_OTHER_BACKENDS,
)
