"""The options of a pool: `PoolOptions`, the records in it, and the enums of its fields from `choices.py`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from stepmill.spec.choices import AutoresetMode as AutoresetMode
from stepmill.spec.choices import BackendName as BackendName
from stepmill.spec.choices import Context as Context
from stepmill.spec.choices import EnvState as EnvState
from stepmill.spec.choices import OnFault as OnFault
from stepmill.spec.choices import OnFaultName as OnFaultName
from stepmill.spec.choices import RetryIn as RetryIn
from stepmill.spec.choices import Seeding as Seeding
from stepmill.spec.errors import ArgumentTypeError, UsageError
from stepmill.spec.option_values import (
    Cores,
    Environment,
    checked_choice,
    checked_cores,
    checked_environment,
    checked_folder,
    checked_function,
    plain,
)
from stepmill.spec.ray_options import RayOptions, hosts_kernels
from stepmill.spec.records import Record, amount, changed, checked, choice, count, leaves_of, merged, record, switch

if TYPE_CHECKING:
    import gymnasium.vector
    from typing_extensions import Unpack

    from stepmill.backends.base import Backend

_MIB = 1 << 20
_BACKEND_METHODS = ("start", "attach", "call", "close")
_MIN_SIMILARITY = 0.65  # at difflib's default of 0.6, "gravity" is similar to "ray"
MAX_SLOTS = 252  # a slot's number fits in a byte, and three slots are private
_ONLY_OF_PYTHON_ENVS = ("envs_per_worker", "resets.retries", "resets.spare_envs", "resets.overlap", "workers.init")
_NOT_OF_ENVPOOL = (*_ONLY_OF_PYTHON_ENVS, "num_workers", "workers.threads_per_worker", "workers.affinity", "seeding")
_NOT_OF_KERNELS = (*_ONLY_OF_PYTHON_ENVS, "tuning.timers_every")


@dataclass(frozen=True, kw_only=True)
class Restarts(Record):
    """Options that say how faults of envs are handled, and how often.

    Attributes:
        on_raise: like on_fault, for an env that raised or returned a bad value while its worker is alive; None means on_fault.
        max_restarts, restart_window_s: how many restarts of a worker are made within this many seconds before a fault
            is raised.
        max_env_errors: how many errors of one env are handled within restart_window_s before the next is raised.
        recycle_after_episodes, recycle_above_mb: restart a worker process after this many episodes of all its envs, or when its
            resident memory exceeded this many MiB at the end of an episode. It is restarted while none of its envs is in an episode.
        replay_log_bytes: memory for the log that `on_fault="replay"` needs, for the whole pool.
    """

    _option = "restarts"

    on_raise: OnFault | OnFaultName | None = choice(None, OnFault)
    max_restarts: int = count(10)
    restart_window_s: float = amount(60.0)
    max_env_errors: int = count(100)
    recycle_after_episodes: int | None = count(None, 1)
    recycle_above_mb: int | None = count(None, 1)
    replay_log_bytes: int = count(64 * _MIB)

    @property
    def recycles(self) -> bool:
        """Whether workers are restarted between episodes."""
        return self.recycle_after_episodes is not None or self.recycle_above_mb is not None


@dataclass(frozen=True, kw_only=True)
class Resets(Record):
    """Options that say how failed resets are repeated, and how resets are made in advance.

    Attributes:
        retries, retry_in, retry_wait_s: how often and where a failed reset is tried again, and the seconds before each attempt.
        spare_envs: how many of the envs, counted from the last, are kept freshly reset to replace an env whose episode
            ends.
        overlap: whether an idle worker resets an env whose episode is over before the next command requests it. This
            has an effect only with NEXT_STEP, and not on the serial backend. Between episodes, `call` and `render` then
            see the next episode.
    """

    _option = "resets"

    retries: int = count(0)
    retry_in: RetryIn | Literal["same", "new"] = choice(RetryIn.SAME, RetryIn)
    retry_wait_s: float = amount(0.1, may_be_zero=True)
    spare_envs: int = count(0)
    overlap: bool = switch(default=False)


@dataclass(frozen=True, kw_only=True)
class Start(Record):
    """Options that say how workers build their envs.

    Attributes:
        timeout_s: the time limit for building all envs, in seconds.
        serially: whether the workers build their envs one after the other, and not all at once. It has no effect on the
            thread backend.
        show_progress: whether to show how many envs are built, if stderr is a terminal and building the envs takes more
            than a second. It has no effect on the ray backend.
    """

    _option = "start"

    timeout_s: float = amount(120.0)
    serially: bool = switch(default=False)
    show_progress: bool = switch(default=True)


@dataclass(frozen=True, kw_only=True)
class Workers(Record):
    """The settings of workers.

    Attributes:
        env: environment variables, in addition to the learner's: a mapping for all workers; a list of mappings, of which
            worker w gets item w modulo the length; or a function that takes w and returns its mapping.
        threads: the number of torch and OpenMP threads in each worker; None does not change it.
        threads_per_worker: how many threads of a worker process run envs. Each runs its share of the worker's envs.
            Threads help envs that block, because these then wait at the same time. Without num_workers, there are
            enough processes for one thread per env.
        affinity: the numbers of the cores that the workers share; or a list of such lists, or a function, with the cores of
            each worker, as for env. None means the cores of the learner.
        call_timeout_s: the time limit of `Pool.call` and other requests to envs, in seconds.
        init: a function that each worker calls before it loads and builds its envs, also after a restart. On the thread
            backend, each thread calls it once. On the serial backend, the calling thread calls it.
    """

    _option = "workers"

    env: Environment = checked({}, lambda _, value: checked_environment(value))
    threads: int | None = count(1, 1, may_be_none=True)
    threads_per_worker: int = count(1, 1)
    affinity: Cores = checked(None, lambda _, value: checked_cores(value))
    call_timeout_s: float = amount(120.0)
    init: Callable[[], object] | None = checked(None, lambda _, value: checked_function(value))


@dataclass(frozen=True, kw_only=True)
class Tuning(Record):
    """Options that change only speed and measurements, and no results.

    Attributes:
        slots: how many result slots there are for observations that are lent.
        spin_us: for how many microseconds a thread spins at most before it parks. 0 never spins; None lets the engine
            choose.
        timers_every: one in this many of the outermost timers of `stepmill.timers` in the workers is measured; 0
            measures none.
    """

    _option = "tuning"

    slots: int = count(4, 1)
    spin_us: float | None = amount(None, may_be_zero=True)
    timers_every: int = count(0)


class OptionKeywords(TypedDict, total=False):
    """The fields of `PoolOptions` as keyword arguments. Where a field is an enum, its literal values are accepted, too."""

    backend: BackendName | Literal["auto", "serial", "thread", "process", "envpool", "kernel", "ray"] | Backend
    num_workers: int | None
    envs_per_worker: int | None
    context: Context | Literal["forkserver", "fork", "spawn"] | None
    autoreset_mode: AutoresetMode | gymnasium.vector.AutoresetMode | Literal["NextStep", "SameStep", "Disabled"]
    seeding: Seeding | Literal["continue", "per_episode", "fixed"]
    num_episodes: int | None
    copy: bool
    episode_stats: bool | None
    step_timeout_s: float | None
    reset_timeout_s: float | None
    on_fault: OnFault | OnFaultName
    crash_dir: str | os.PathLike[str] | None
    restarts: Restarts | Mapping[str, object]
    resets: Resets | Mapping[str, object]
    start: Start | Mapping[str, object]
    workers: Workers | Mapping[str, object]
    tuning: Tuning | Mapping[str, object]
    ray: RayOptions | Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class PoolOptions(Record):
    """Options that say how a pool runs its envs. A string is accepted for an enum, and a mapping for a record.

    Every class and function that makes a pool also takes each option as a keyword: `Pool(env_fns, on_fault="truncate",
    resets={"spare_envs": 2})`.

    Attributes:
        backend: where envs run, or a Backend object. "auto" means serial if there is one env, if num_workers is 0, or for
            up to 17 of Gymnasium's tiny envs, such as CartPole, unless an option is about workers or faults; else process.
        num_workers: the number of workers; None means min(num_envs, usable cores). The serial backend has no workers and
            ignores it. With kernels it is the number of threads that run envs, including the caller's.
        envs_per_worker: the number of envs per worker, in place of num_workers. 1 isolates the envs
            from each other.
        context: how worker processes start. None means "forkserver".
        autoreset_mode: when an env is reset after the end of an episode.
        seeding: where the seeds of automatic resets come from.
        num_episodes: the number of episodes per env, after which the env is exhausted until it is reset. None means no
            limit.
        copy: True makes every result a copy; False lends large observations (see `Batch`).
        episode_stats: whether the info at the end of an episode contains its return and length. None leaves the choice to
            the front-end: True in a Pool, False in a VectorEnv, whose infos are Gymnasium's.
        step_timeout_s, reset_timeout_s: the time limits of a step and of a reset, in seconds; None means no limit.
        on_fault: what happens to an env that fails.
        crash_dir: the folder for crash capsules, which are small files, one per fault. It is created if it is missing.
            None means that no capsules are written.
        restarts: which faults are handled, and how often: see `Restarts`.
        resets: how failed resets are repeated, and how resets are made in advance: see `Resets`.
        start: how workers build their envs: see `Start`.
        workers: settings of the workers: see `Workers`.
        tuning: settings of speed and measurement: see `Tuning`.
        ray: how backend="ray" uses the cluster: see `RayOptions`.
    """

    backend: BackendName | Backend = checked(BackendName.AUTO, lambda _, value: _backend(value))
    num_workers: int | None = count(None)
    envs_per_worker: int | None = count(None, 1)
    context: Context | None = choice(None, Context)
    autoreset_mode: AutoresetMode = choice(AutoresetMode.NEXT_STEP, AutoresetMode)  # Gymnasium's have the same values
    seeding: Seeding = choice(Seeding.CONTINUE, Seeding)
    num_episodes: int | None = count(None, 1)
    copy: bool = switch(default=False)
    episode_stats: bool | None = switch(default=None)
    step_timeout_s: float | None = amount(None)
    reset_timeout_s: float | None = amount(None)
    on_fault: OnFault = choice(OnFault.RAISE, OnFault)
    crash_dir: str | os.PathLike[str] | None = checked(None, lambda _, value: checked_folder(value))
    restarts: Restarts = record(Restarts)
    resets: Resets = record(Resets)
    start: Start = record(Start)
    workers: Workers = record(Workers)
    tuning: Tuning = record(Tuning)
    ray: RayOptions = record(RayOptions)

    if TYPE_CHECKING:

        def __init__(self, **keywords: Unpack[OptionKeywords]) -> None: ...

    @classmethod
    def _check_names(cls, keywords: Mapping[str, object]) -> None:
        check_option_names(keywords)

    def __post_init__(self) -> None:
        super().__post_init__()
        if text := next(chain(self._conflicts_of_backend(), self._conflicts_of_episodes()), None):
            raise UsageError(text)

    def _conflicts_of_backend(self) -> Iterator[str]:
        """Yield a text for each option that does not fit the backend, or the other options of workers."""
        if self.tuning.slots > MAX_SLOTS:
            yield f"tuning.slots={self.tuning.slots} is too large; use {MAX_SLOTS} or less (each slot holds a batch)"
        if self.num_workers is not None and self.envs_per_worker is not None:
            given = f"num_workers={self.num_workers} and envs_per_worker={self.envs_per_worker}"
            yield f"{given} are both given; give at most one of them"
        if self.num_workers == 0 and self.backend not in (BackendName.AUTO, BackendName.SERIAL):
            name = name_of_backend(self.backend)
            yield f"num_workers=0 leaves the {name} backend without workers; use backend='serial', or at least 1 worker"
        if self.workers.threads_per_worker > 1 and self.backend is BackendName.RAY:
            yield (
                f"workers.threads_per_worker={self.workers.threads_per_worker} does not work with backend='ray', whose nodes "
                "exchange the commands of whole workers; leave it out, and give one worker per env with envs_per_worker=1"
            )
        if self.backend is BackendName.ENVPOOL and (unsupported := changed(self, _NOT_OF_ENVPOOL)):
            yield (
                f"backend='envpool' does not support {', '.join(unsupported)}: EnvPool has its own threads (num_threads), "
                "resets its envs itself, and seeds them when their pool is made; leave out what it does not support"
            )
        has_kernels = self.backend is BackendName.KERNEL or hosts_kernels(self.ray)
        if has_kernels and (unkept := changed(self, _NOT_OF_KERNELS)):
            yield (
                f"{', '.join(unkept)}: kernels have no worker processes, and their resets take no time; leave them out, "
                "and set the number of threads with num_workers"
            )
        if self.ray != RayOptions() and self.backend is not BackendName.RAY:
            yield "the option ray is only for backend='ray'; give backend='ray', or leave it out"
        if self.backend is BackendName.RAY and self.context is Context.FORK:
            yield "backend='ray' cannot fork this program on other machines; use context='forkserver' or 'spawn'"

    def _conflicts_of_episodes(self) -> Iterator[str]:
        """Yield a text for each option about faults and resets that does not fit the others."""
        is_same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        if OnFault.REPLAY in (self.on_fault, self.restarts.on_raise) and self.seeding is not Seeding.PER_EPISODE:
            yield "on_fault='replay' needs seeding='per_episode', because it must repeat an episode with its seed; give both"
        if self.resets.spare_envs and is_same_step:
            yield (
                "resets.spare_envs does not work with autoreset_mode SAME_STEP: its results already hold the next episode's first "
                "observation, and which spare env that comes from would depend on timing; use NEXT_STEP"
            )
        recycling = "restarts.recycle_after_episodes and restarts.recycle_above_mb need"
        if self.restarts.recycles and is_same_step and self.on_fault is not OnFault.REPLAY:
            yield (
                f"{recycling} on_fault='replay' with autoreset_mode SAME_STEP: you have the first observation of the next episode "
                "already, so the new process must repeat its reset; give on_fault='replay' and seeding='per_episode', or use NEXT_STEP"
            )
        if self.restarts.recycles and self.resets.spare_envs and self.seeding is Seeding.CONTINUE:
            yield (
                f"{recycling} seeding='per_episode' or 'fixed' with resets.spare_envs, which begin the episode of their predecessors; "
                "give one of the two"
            )


OPTION_NAMES = tuple(PoolOptions.__dataclass_fields__)
RECORDS: tuple[type[Record], ...] = (Restarts, Resets, Start, Workers, Tuning, RayOptions)


def merge_options(options: PoolOptions | None, keywords: Mapping[str, object], **defaults: object) -> PoolOptions:
    """Return the options `options` with the values of `keywords`.

    Args:
        options: the user's options; None means all defaults.
        keywords: options by name. If `options` also has a value for the option that is not the default, the two must be
            equal. The same applies to the fields of records. None counts as not given if None is the default.
        **defaults: the caller's defaults for options that neither of the two sets.
    Raises:
        UsageError: a keyword is not an option, or an option is given twice, or a value is not allowed.
    """
    if options is not None and not isinstance(options, PoolOptions):
        raise UsageError(
            f"options is a {type(options).__name__}; give stepmill.PoolOptions(...), or each option by its name: "
            "copy=True in place of options={'copy': True}"
        )
    given = PoolOptions() if options is None else options
    chosen = {*changed(given), *(name for name, value in keywords.items() if value is not None)}
    unset: dict[str, Any] = {name: value for name, value in defaults.items() if name not in chosen}
    return merged(replace(given, **unset) if unset else given, keywords)


def check_option_names(keywords: Mapping[str, object]) -> None:
    """Refuse names that are not fields of PoolOptions.

    Raises:
        ArgumentTypeError: a name is not a field; the message suggests the nearest one, or the record that has it.
    """
    unknown = [name for name in keywords if name not in OPTION_NAMES]
    for kind in RECORDS if unknown else ():
        inside = {name: leaf for name in unknown if (leaf := _leaf_of(kind, name)) is not None}
        if inside:
            values = {leaf: plain(keywords[name]) for name, leaf in inside.items()}
            raise ArgumentTypeError(
                f"{', '.join(inside)}: give it in the record {kind._option}: {kind._option}={values!r}"
            )
    for name in unknown:
        near = nearest_option(name, cutoff=0.6)
        hint = f"did you mean {near}?" if near else "help(stepmill.PoolOptions) lists them"
        if name == "num_envs":  # an argument of make_vec
            hint = "there are as many envs as env_fns; for an id of Gymnasium use stepmill.make_vec(id, num_envs=8)"
        raise ArgumentTypeError(f"{name} is not an option of stepmill; {hint}")


def _leaf_of(kind: type[Record], name: str) -> str | None:
    """Return the field of a record that a name means: `retries`, `reset_retries` and `retries_resets` are that field of `resets`."""
    for leaf in kind.__dataclass_fields__:
        if name in (leaf, f"{kind._option.rstrip('s')}_{leaf}", f"{leaf}_{kind._option}"):
            return leaf
    return None


def nearest_option(name: str, others: Iterable[str] = (), *, cutoff: float = _MIN_SIMILARITY) -> str | None:
    """Return the option, or the name in `others`, that is most similar to a name, or None.

    An option of a record is returned as the user gives it.

    Args:
        name: the unknown name.
        others: further names that are possible.
        cutoff: the least similarity, at most 1, as difflib measures it.
    """
    leaves = {leaf: kind for kind in RECORDS for leaf in kind.__dataclass_fields__}
    found = [leaf for kind in RECORDS if (leaf := _leaf_of(kind, name)) is not None]
    for names in ([*others, *OPTION_NAMES[: -len(RECORDS)], *leaves], OPTION_NAMES):
        found = found or difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    if found and found[0] in leaves and found[0] not in others:
        return f"{leaves[found[0]]._option}={{{found[0]!r}: ...}}"
    return next(iter(found), None)


def flat_options(keywords: Mapping[str, object]) -> dict[str, object]:
    """Return options that are given by keyword. Those of records get names with a dot."""
    check_option_names(keywords)
    kinds = {kind._option: kind for kind in RECORDS}
    return {
        f"{name}.{leaf}" if name in kinds else name: each
        for name, value in keywords.items()
        for leaf, each in (leaves_of(kinds[name], value).items() if name in kinds else (("", value),))
    }


def pop_options(keywords: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of PoolOptions from keyword arguments, and return them."""
    return {name: keywords.pop(name) for name in OPTION_NAMES if name in keywords}


def context_of(options: PoolOptions) -> Context:
    """Return how worker processes start: the option `context`, or FORKSERVER if it is not given."""
    return options.context or Context.FORKSERVER


def name_of_backend(backend: object) -> str:
    """Return the name of a backend, or of the class of a Backend object."""
    return str(backend.value) if isinstance(backend, BackendName) else type(backend).__name__


def _backend(value: object) -> object:
    if isinstance(value, str):
        return checked_choice("backend", value, BackendName)
    missing = [name for name in _BACKEND_METHODS if not callable(getattr(value, name, None))]
    if missing:
        names = ", ".join(repr(name.value) for name in BackendName)
        raise UsageError(
            f"backend={value!r} is not a Backend (it has no {', '.join(missing)}); use one of {names}, or a Backend object"
        )
    return value
