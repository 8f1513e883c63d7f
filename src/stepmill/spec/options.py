"""The options of a pool: `PoolOptions`, and the enums of its fields from `choices.py`."""

from __future__ import annotations

import difflib
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, SupportsIndex, TypedDict, TypeVar

from stepmill.spec.choices import AutoresetMode as AutoresetMode
from stepmill.spec.choices import BackendName as BackendName
from stepmill.spec.choices import Context as Context
from stepmill.spec.choices import EnvState as EnvState
from stepmill.spec.choices import OnFault as OnFault
from stepmill.spec.choices import OnFaultName as OnFaultName
from stepmill.spec.choices import RetryIn as RetryIn
from stepmill.spec.choices import Seeding as Seeding
from stepmill.spec.errors import UsageError
from stepmill.spec.option_values import (
    Cores,
    Environment,
    checked_cores,
    checked_environment,
    checked_folder,
    checked_function,
)
from stepmill.spec.ray_options import RayOptions, check_ray, hosts_kernels

if TYPE_CHECKING:
    import gymnasium.vector
    from typing_extensions import Self, Unpack

    from stepmill.backends.base import Backend


_Choice = TypeVar("_Choice", bound=Enum)

_MIB = 1 << 20
_BACKEND_METHODS = ("start", "attach", "call", "revive", "close")

_CHOICES: dict[str, type[Enum]] = {
    "context": Context,
    "autoreset_mode": AutoresetMode,
    "seeding": Seeding,
    "on_fault": OnFault,
    "reset_retry_in": RetryIn,
}
_MIN_SIMILARITY = 0.65  # of 1, as difflib measures it; at its default of 0.6 "gravity" is like "ray"
MAX_SLOTS = 252  # a slot's number fits in a byte, and three slots are private
# name: (smallest value, whether None is allowed)
_COUNTS: dict[str, tuple[int, bool]] = {
    "num_workers": (0, True),
    "envs_per_worker": (1, True),
    "slots": (1, False),
    "num_episodes": (1, True),
    "max_restarts": (0, False),
    "max_env_errors": (0, False),
    "max_restarts_total": (0, True),
    "reset_retries": (0, False),
    "spare_envs": (0, False),
    "replay_log_bytes": (0, False),
    "worker_threads": (1, True),
    "timers_every": (0, False),
}
# name: (whether 0 is allowed, whether None is allowed)
_AMOUNTS: dict[str, tuple[bool, bool]] = {
    "step_timeout_s": (False, True),
    "reset_timeout_s": (False, True),
    "start_timeout_s": (False, False),
    "call_timeout_s": (False, False),
    "linger_s": (True, False),
    "spin_us": (True, True),
    "restart_window_s": (False, False),
    "reset_retry_wait_s": (True, False),
}
_OR_NONE = ("", ", or None")  # by whether None is allowed
_SWITCHES = ("copy", "overlap_resets", "persist_options", "show_progress", "start_serially")
_ONLY_OF_PYTHON_ENVS = ("envs_per_worker", "reset_retries", "spare_envs", "overlap_resets")
_NOT_OF_ENVPOOL = (*_ONLY_OF_PYTHON_ENVS, "num_workers", "affinity", "seeding", "worker_init")
_NOT_OF_KERNELS = (*_ONLY_OF_PYTHON_ENVS, "timers_every", "worker_init")


class EngineKeywords(TypedDict, total=False):
    """`OptionKeywords` without `start_serially`, which is an argument of ALF's classes."""

    backend: BackendName | Literal["auto", "serial", "thread", "process", "envpool", "kernel", "ray"] | Backend
    num_workers: int | None
    envs_per_worker: int | None
    context: Context | Literal["forkserver", "fork", "spawn"]
    autoreset_mode: AutoresetMode | gymnasium.vector.AutoresetMode | Literal["NextStep", "SameStep", "Disabled"]
    copy: bool
    episode_stats: bool | None
    step_timeout_s: float | None
    reset_timeout_s: float | None
    start_timeout_s: float
    call_timeout_s: float
    linger_s: float
    slots: int
    spin_us: float | None
    seeding: Seeding | Literal["continue", "per_episode", "fixed"]
    num_episodes: int | None
    on_fault: OnFault | OnFaultName
    on_raise: OnFault | OnFaultName | None
    max_restarts: int
    restart_window_s: float
    max_env_errors: int
    max_restarts_total: int | None
    reset_retries: int
    reset_retry_in: RetryIn | Literal["same", "new"]
    reset_retry_wait_s: float
    spare_envs: int
    overlap_resets: bool
    replay_log_bytes: int
    crash_dir: str | os.PathLike[str] | None
    worker_init: Callable[[], object] | None
    worker_env: Environment
    worker_threads: int | None
    affinity: Cores
    persist_options: bool
    timers_every: int
    ray: RayOptions | None
    show_progress: bool


class OptionKeywords(EngineKeywords, total=False):
    """The fields of `PoolOptions` as keyword arguments. Where a field is an enum, its literal values are accepted, too."""

    start_serially: bool


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """How a pool runs its envs. Strings are accepted where a field is an enum.

    Everything that makes a pool also takes each option as a keyword: `Pool(env_fns, on_fault="truncate")`.

    Attributes:
        backend: "auto" is serial if there is one env or num_workers is 0, else process; or a Backend object.
        num_workers: None is min(num_envs, usable cores). The serial backend has no workers and ignores this.
            With kernels the number of threads that run envs, the caller's own included.
        envs_per_worker: sets the number of workers in another way; give at most one of the two. 1 isolates the envs
            from each other.
        context: how worker processes start.
        autoreset_mode: when an env is reset after the end of an episode.
        copy: True makes every result a copy; False lends large observations (see `Batch`).
        episode_stats: put the return and the length of an episode into the info at its end. None leaves the choice to
            the front-end: on in a Pool, off in a VectorEnv, whose infos are Gymnasium's.
        step_timeout_s, reset_timeout_s: time limit of a step and of a reset; None is no limit.
        start_serially: the workers build their envs one after the other, not all at once. Not on the thread backend.
        start_timeout_s, call_timeout_s: time limit for building the envs, and for a call.
        linger_s: when enough envs are ready, wait this much longer for more.
        slots: how many result slots there are for observations that are lent.
        spin_us: upper bound of spinning before parking; 0 never spins; None lets the engine choose.
        seeding: where the seeds of automatic resets come from.
        num_episodes: episodes per env; then the env is not ready again until it is reset. None is no limit.
        on_fault: what happens to an env that fails.
        on_raise: the same for an env that raised or returned a bad value while its worker is alive; None is on_fault.
        max_restarts, restart_window_s: how many restarts per worker and time window are made before a fault is raised.
        max_env_errors: how many errors of one env in restart_window_s are handled before the next is raised.
        max_restarts_total: how many restarts are made in the pool's life; None is no limit.
        reset_retries, reset_retry_in, reset_retry_wait_s: how often, where, and how long after a failed reset it is
            tried again.
        spare_envs: how many of the envs, counted from the last, are kept freshly reset to replace an env whose episode
            ends.
        overlap_resets: an idle worker resets a finished env before the next command asks for it (NEXT_STEP only, not in
            line). Between episodes `call` and `render` then see the next episode.
        replay_log_bytes: memory for the log that `on_fault="replay"` needs, for the whole pool.
        crash_dir: folder for crash capsules, one small file per fault; it is created if missing. None writes none.
        worker_init: a function that each worker calls first, before it loads and builds its envs, also when it is
            restarted. Threads call it, too, each once, and the serial backend in the calling thread.
        worker_env: environment variables of the workers, in addition to the learner's: a mapping for all; or a list of mappings,
            of which worker w has item w modulo its length; or a function of w that returns its mapping.
        worker_threads: number of torch and OpenMP threads in each worker; None does not change it.
        affinity: numbers of the cores that the workers may use, all of them together; a list of such lists or a function
            for each worker, as with worker_env; None is those of the learner.
        persist_options: the default of `Pool.reset(persist_options=...)`.
        timers_every: measure one in this many of the outermost timers of `stepmill.timers` in the workers; 0 is none.
        ray: how backend="ray" uses the cluster; None is RayOptions().
        show_progress: if stderr is a terminal and building the envs takes more than a second, show there how many are
            built. Not on the ray backend.
    """

    backend: BackendName | Backend = BackendName.AUTO
    num_workers: int | None = None
    envs_per_worker: int | None = None
    context: Context = Context.FORKSERVER
    autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP
    copy: bool = False
    episode_stats: bool | None = None
    step_timeout_s: float | None = None
    reset_timeout_s: float | None = None
    start_serially: bool = False
    start_timeout_s: float = 120.0
    call_timeout_s: float = 120.0
    linger_s: float = 0.0
    slots: int = 4
    spin_us: float | None = None
    seeding: Seeding = Seeding.CONTINUE
    num_episodes: int | None = None
    on_fault: OnFault = OnFault.RAISE
    on_raise: OnFault | None = None
    max_restarts: int = 10
    restart_window_s: float = 60.0
    max_env_errors: int = 100
    max_restarts_total: int | None = None
    reset_retries: int = 0
    reset_retry_in: RetryIn = RetryIn.SAME
    reset_retry_wait_s: float = 0.1
    spare_envs: int = 0
    overlap_resets: bool = False
    replay_log_bytes: int = 64 * _MIB
    crash_dir: str | os.PathLike[str] | None = None
    worker_init: Callable[[], object] | None = None
    worker_env: Environment = field(default_factory=dict)
    worker_threads: int | None = 1
    affinity: Cores = None
    persist_options: bool = False
    timers_every: int = 0
    ray: RayOptions | None = None
    show_progress: bool = True

    if TYPE_CHECKING:

        def __init__(self, **keywords: Unpack[OptionKeywords]) -> None: ...

    else:

        def __new__(cls, **keywords: object) -> Self:
            check_option_names(keywords)
            return super().__new__(cls)

    def __post_init__(self) -> None:
        self._set("backend", _backend(self.backend))
        for name, choices in _CHOICES.items():
            self._set(name, _choice(name, getattr(self, name), choices))
        if self.on_raise is not None:
            self._set("on_raise", _choice("on_raise", self.on_raise, OnFault))
        for name, (smallest, may_be_none) in _COUNTS.items():
            self._set(name, _count(name, getattr(self, name), smallest, may_be_none=may_be_none))
        for name, (may_be_zero, may_be_none) in _AMOUNTS.items():
            self._set(name, _amount(name, getattr(self, name), may_be_zero=may_be_zero, may_be_none=may_be_none))
        for name in _SWITCHES:
            self._set(name, _switch(name, getattr(self, name)))
        if self.episode_stats is not None:
            self._set("episode_stats", _switch("episode_stats", self.episode_stats))
        self._set("worker_init", checked_function(self.worker_init))
        self._set("worker_env", checked_environment(self.worker_env))
        self._set("crash_dir", checked_folder(self.crash_dir))
        self._set("affinity", checked_cores(self.affinity))
        if self.slots > MAX_SLOTS:
            raise UsageError(f"slots={self.slots} is too large; use {MAX_SLOTS} or less (each slot holds a batch)")
        self._check_workers()
        self._check_envpool()
        self._check_kernel()
        check_ray(self.ray, is_chosen=self.backend is BackendName.RAY, is_forked=self.context is Context.FORK)
        self._check_replay()
        self._check_spares()

    @classmethod
    def default_of(cls, name: str) -> object:
        """Return the default of an option."""
        option = cls.__dataclass_fields__[name]
        return option.default if option.default_factory is MISSING else option.default_factory()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_workers(self) -> None:
        if self.num_workers is not None and self.envs_per_worker is not None:
            raise UsageError(
                f"num_workers={self.num_workers} and envs_per_worker={self.envs_per_worker} are both given; "
                "give at most one of them"
            )
        if self.num_workers == 0 and self.backend not in (BackendName.AUTO, BackendName.SERIAL):
            raise UsageError(
                f"num_workers=0 leaves the {_name_of(self.backend)} backend without workers; "
                "use backend='serial', or at least 1 worker"
            )

    def _check_envpool(self) -> None:
        if self.backend is not BackendName.ENVPOOL:
            return
        unsupported = [name for name in _NOT_OF_ENVPOOL if getattr(self, name) != self.default_of(name)]
        if unsupported:
            raise UsageError(
                f"backend='envpool' does not support {', '.join(unsupported)}: EnvPool has its own threads (num_threads), "
                "resets its envs itself, and seeds them when their pool is made; leave out what it does not support"
            )

    def _check_kernel(self) -> None:
        if self.backend is not BackendName.KERNEL and not hosts_kernels(self.ray):
            return
        unkept = [name for name in _NOT_OF_KERNELS if getattr(self, name) != self.default_of(name)]
        if unkept:
            raise UsageError(
                f"{', '.join(unkept)}: kernels have no worker processes, and their resets take no time; leave that out, "
                "and say with num_workers how many threads there are"
            )

    def _check_replay(self) -> None:
        if OnFault.REPLAY in (self.on_fault, self.on_raise) and self.seeding is not Seeding.PER_EPISODE:
            raise UsageError(
                "on_fault='replay' needs seeding='per_episode', because it must repeat an episode with its seed; give both"
            )

    def _check_spares(self) -> None:
        if not self.spare_envs:
            return
        if self.backend is BackendName.ENVPOOL:
            raise UsageError("backend='envpool' resets its envs itself; leave spare_envs out")
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            raise UsageError(
                "spare_envs does not work with autoreset_mode SAME_STEP: its results already hold the next episode's first "
                "observation, and which spare env that comes from would depend on timing; use NEXT_STEP"
            )


OPTION_NAMES = tuple(PoolOptions.__dataclass_fields__)


def merge_options(options: PoolOptions | None, keywords: Mapping[str, object], **defaults: object) -> PoolOptions:
    """Return options with keywords merged in.

    Args:
        options: the user's options; None means all defaults.
        keywords: options by name. If `options` has the option too, with a value other than its default, both must be
            equal. None counts as not given if None is the default.
        **defaults: defaults of the caller, for options that neither of the two sets.
    Raises:
        UsageError: a keyword is not an option, or an option is given twice, or a value is not allowed.
    """
    if options is not None and not isinstance(options, PoolOptions):
        raise UsageError(
            f"options is a {type(options).__name__}; give stepmill.PoolOptions(...), or each option by its name: "
            "copy=True in place of options={'copy': True}"
        )
    given = PoolOptions() if options is None else options
    unset = {name: value for name, value in defaults.items() if getattr(given, name) == PoolOptions.default_of(name)}
    check_option_names(keywords)
    keywords = {
        name: value for name, value in keywords.items() if value is not None or PoolOptions.default_of(name) is not None
    }
    merged = replace(given, **{**unset, **keywords})  # type: ignore[arg-type]  # checked by its __post_init__
    for name in keywords:
        chosen = getattr(given, name)
        if chosen not in (PoolOptions.default_of(name), getattr(merged, name)):
            raise UsageError(
                f"{name} is given twice: {_plain(keywords[name])!r}, and {_plain(chosen)!r} in options; give it once"
            )
    return merged


def check_option_names(names: Iterable[str], known: Sequence[str] = OPTION_NAMES) -> None:
    """Refuse names that are not fields of PoolOptions, or not among other known names.

    Raises:
        UsageError: a name is not a field; the message suggests the nearest field.
    """
    for name in names:
        if name not in known:
            near = next(iter(difflib.get_close_matches(name, known, n=1)), None)
            listed = (
                "help(stepmill.PoolOptions) lists them" if known is OPTION_NAMES else f"there are {', '.join(known)}"
            )
            raise UsageError(f"{name} is not an option of stepmill; {f'did you mean {near}?' if near else listed}")


def pop_options(keywords: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of PoolOptions from keyword arguments, and return them."""
    return {name: keywords.pop(name) for name in OPTION_NAMES if name in keywords}


def nearest_option(name: str, others: Iterable[str] = ()) -> str | None:
    """Return the option, or the one of `others`, whose name is most similar, or None."""
    return next(iter(difflib.get_close_matches(name, [*OPTION_NAMES, *others], n=1, cutoff=_MIN_SIMILARITY)), None)


def _plain(value: object) -> object:
    """Return an enum's value, so that a message shows what the user can type."""
    return value.value if isinstance(value, Enum) else value


def _name_of(backend: object) -> str:
    return str(backend.value) if isinstance(backend, BackendName) else type(backend).__name__


def _backend(value: object) -> object:
    if isinstance(value, str):
        return _choice("backend", value, BackendName)
    missing = [name for name in _BACKEND_METHODS if not callable(getattr(value, name, None))]
    if missing:
        names = ", ".join(repr(name.value) for name in BackendName)
        raise UsageError(
            f"backend={value!r} is not a Backend (it has no {', '.join(missing)}); use one of {names}, or a Backend object"
        )
    return value


def _choice(name: str, value: object, choices: type[_Choice]) -> _Choice:
    # Gymnasium's AutoresetMode is another enum with the same values.
    try:
        return choices(_plain(value))
    except ValueError:
        names = ", ".join(repr(choice.value) for choice in choices)
        raise UsageError(f"{name}={_plain(value)!r} is not one of {names}") from None


def _count(name: str, value: SupportsIndex | None, smallest: int, *, may_be_none: bool) -> int | None:
    if value is None and may_be_none:
        return None
    try:
        count = None if value is None or isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < smallest:
        raise UsageError(f"{name}={value!r} must be a whole number, {smallest} or more{_OR_NONE[may_be_none]}")
    return count


def _amount(name: str, value: SupportsFloat | None, *, may_be_zero: bool, may_be_none: bool) -> float | None:
    if value is None and may_be_none:
        return None
    try:
        amount = math.nan if value is None or isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        amount = math.nan
    if not math.isfinite(amount) or amount < 0 or (amount == 0 and not may_be_zero):
        unit = "microseconds" if name.endswith("_us") else "seconds"
        bound = "0 or more" if may_be_zero else "more than 0"
        raise UsageError(f"{name}={value!r} must be a number of {unit}, {bound}{_OR_NONE[may_be_none]}")
    return amount


def _switch(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    import numpy as np  # here, because help of the command line does not wait for it

    if isinstance(value, np.bool_):
        return bool(value)
    raise UsageError(f"{name}={value!r} must be True or False")
