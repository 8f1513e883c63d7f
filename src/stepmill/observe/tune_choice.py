"""Which configurations `stepmill tune` compares, and which of them it chooses. Nothing is measured here.

starts() ──► measured by turns ──► the best ──► its neighbours() ──► measured by turns ──► the best ──► ... until none is faster

While they are measured, `contenders` drops those that are clearly slower, and `choose` takes the simplest of those that are equally fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, median, stdev
from typing import TypeAlias

from stepmill.observe.catalog import EnvChoice
from stepmill.observe.report import plural
from stepmill.slab.layout import LEASE_BYTES
from stepmill.spec.errors import UsageError
from stepmill.spec.options import BackendName
from stepmill.spec.stats_text import duration_text

BUDGET_S = 60.0
LEARNER_S = 3e-4  # a small policy; without any, tiny envs would seem to gain from workers: decision 0019
TIME_LIMIT_S = 30.0
TIE = 0.05  # rates that differ by less are equal, and the simpler configuration is chosen
WORTH_BATCHES = 0.15  # batches of some envs, for which a program must be written, are chosen if faster by this
WORTH_SETTING = 0.1  # the same for another spin_us or copy, because a busy machine has noise below this
MIN_ROUNDS = 6  # before a configuration is dropped
ERROR_OF_MEDIAN = 1.25  # the standard error of a median divided by that of a mean
WAITING_SHARE = 0.9  # envs that use a core for less of their time may need more workers than cores
SLOW_RESET_SHARE = 0.05  # of an env's time; from this share on, resets in advance are tried
MAX_WORKERS = 256


@dataclass(frozen=True, kw_only=True)
class EnvProfile:
    """The costs of one env, measured alone.

    Attributes:
        step_s, step_p50_s, step_p99_s: the mean and the percentiles of the durations of steps.
        reset_s: the mean duration of a reset.
        episode_steps: the mean number of steps per episode; infinity if no episode ended.
        obs_bytes: the size of an observation, of all rows if the env is batched.
        cpu_share: the part of these durations during which the env uses a core, 0 to 1. The rest is spent waiting.
        num_rows: how many envs a batched env has.
        start_s: how long building the env in a worker takes.
    """

    step_s: float
    step_p50_s: float = 0.0
    step_p99_s: float = 0.0
    reset_s: float = 0.0
    episode_steps: float = math.inf
    obs_bytes: int = 0
    cpu_share: float = 1.0
    num_rows: int = 1
    start_s: float = 0.0

    @property
    def reset_chance(self) -> float:
        """The part of the rows of a pool that are resets: an episode of T steps has one reset (NEXT_STEP)."""
        return 1 / (self.episode_steps + 1)

    @property
    def row_s(self) -> float:
        """The mean duration of a row of a batch, which is a step or a reset."""
        return (1 - self.reset_chance) * self.step_s + self.reset_chance * self.reset_s

    @property
    def reset_share(self) -> float:
        """The part of the env's time that resets take, 0 to 1."""
        return self.reset_chance * self.reset_s / max(self.row_s, 1e-9)

    @property
    def has_slow_resets(self) -> bool:
        """Whether resets take a considerable part of the env's time."""
        return self.reset_share > SLOW_RESET_SHARE

    @property
    def is_waiting(self) -> bool:
        """Whether the env waits for something, so that more workers than cores may be faster."""
        return self.cpu_share < WAITING_SHARE or self.has_slow_resets


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to run the envs. The defaults are those of PoolOptions.

    Attributes:
        batch_size: `recv` waits for this number of envs; None steps all envs together.
    """

    backend: BackendName
    num_workers: int = 1
    batch_size: int | None = None
    spin_us: float | None = None
    copy: bool = False
    spare_envs: int = 0
    overlap_resets: bool = False

    def keywords(self) -> dict[str, object]:
        """Return the options that differ from the defaults, as keywords of `make_vec`, `VectorEnv` and `Pool`."""
        found: dict[str, object] = {"backend": self.backend.value}
        if self.backend is not BackendName.SERIAL:
            found["num_workers"] = self.num_workers
        if self.copy:
            found["copy"] = True
        if self.spin_us is not None:
            found["tuning"] = {"spin_us": self.spin_us}
        resets = {"spare_envs": self.spare_envs, "overlap": self.overlap_resets}
        if any(resets.values()):
            found["resets"] = {name: value for name, value in resets.items() if value}
        return found

    @property
    def is_set(self) -> bool:
        """Whether spin_us or copy differ from their defaults."""
        return self.spin_us is not None or self.copy

    @property
    def complexity(self) -> tuple[int, ...]:
        """A key that sorts simpler configurations first."""
        extras = (self.spare_envs > 0) + self.overlap_resets + (self.spin_us is not None) + self.copy
        return (self.batch_size is not None, _BACKENDS.index(self.backend), extras, self.num_workers, self.spare_envs)

    def __str__(self) -> str:
        has_threads = self.backend in (BackendName.THREAD, BackendName.KERNEL)
        parts = {
            self.backend.value: True,
            plural(self.num_workers, "thread" if has_threads else "worker"): self.backend is not BackendName.SERIAL,
            f"batches of {self.batch_size}": self.batch_size is not None,
            plural(self.spare_envs, "spare"): self.spare_envs > 0,
            "overlapped resets": self.overlap_resets,
            f"spin_us={self.spin_us or 0:g}": self.spin_us is not None,
            "copy=True": self.copy,
        }
        return ", ".join(text for text, is_shown in parts.items() if is_shown)


_BACKENDS = (BackendName.SERIAL, BackendName.THREAD, BackendName.PROCESS, BackendName.KERNEL)  # the simplest first
SERIAL = Configuration(backend=BackendName.SERIAL)
Rates: TypeAlias = Mapping[Configuration, float]  # rows per second


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """What is measured, and what may be chosen.

    Raises:
        UsageError: a number is out of range.

    Attributes:
        env: the env's name, the function that builds it, and how a program makes it.
        kernel: a function that builds the same env as a kernel; None if there is none.
        num_envs: N.
        cores: the number of usable cores.
        baseline: the configuration that backend="auto" runs.
        budget_s: the seconds for the whole search.
        is_async: True for batches of some envs, False for all envs together; None for both.
        learner_s: seconds in which the learner computes between two batches.
        step_timeout_s: the limit of a step and of a reset, after which the env counts as hung.
        unpicklable: why worker processes cannot get the env function; None if they can.
    """

    env: EnvChoice
    kernel: Callable[[], object] | None = None
    num_envs: int
    cores: int
    baseline: Configuration = SERIAL
    budget_s: float = BUDGET_S
    is_async: bool | None = None
    learner_s: float = LEARNER_S
    step_timeout_s: float = TIME_LIMIT_S
    unpicklable: str | None = None

    def __post_init__(self) -> None:
        is_positive = all(0 < amount < math.inf for amount in (self.budget_s, self.step_timeout_s))
        if not is_positive or not 0 <= self.learner_s < math.inf:
            raise UsageError(
                f"budget_s={self.budget_s!r} and step_timeout_s={self.step_timeout_s!r} must be more than 0, "
                f"and learner_s={self.learner_s!r} 0 or more"
            )

    @property
    def batch_sizes(self) -> list[int]:
        """How many envs `recv` may wait for."""
        if self.is_async is False or (self.num_envs == 1 and not self.is_async):
            return []
        return sorted({self.num_envs // 2, self.num_envs // 4} - {0, self.num_envs} or {1})


def starts(profile: EnvProfile, request: TuneRequest) -> list[Configuration]:
    """Return the configurations that are compared first: each backend with a worker per core, and with one per env if envs wait."""
    num_envs, cores = request.num_envs, request.cores
    batch_size = request.batch_sizes[-1] if request.is_async else None
    counts: dict[BackendName, set[int]] = {}
    if not request.is_async:
        counts = {BackendName.SERIAL: {1}, BackendName.KERNEL: {1, cores} if request.kernel else set()}
    if num_envs > 1 or request.is_async:
        workers = {min(cores, num_envs), min(num_envs, MAX_WORKERS if profile.is_waiting else cores)}
        counts |= {BackendName.THREAD: workers, BackendName.PROCESS: set() if request.unpicklable else workers}
    return [
        Configuration(backend=backend, num_workers=each, batch_size=batch_size)
        for backend, found in counts.items()
        for each in sorted(found)
    ]


def neighbours(one: Configuration, profile: EnvProfile, request: TuneRequest) -> list[Configuration]:
    """Return the configurations that differ from `one` in one option."""
    if one.backend in (BackendName.SERIAL, BackendName.KERNEL) or one.is_set:
        return []
    num_envs, is_in_step = request.num_envs, one.batch_size is None
    found = [replace(one, spin_us=0.0)]
    if is_in_step and num_envs * profile.obs_bytes >= LEASE_BYTES:
        found.append(replace(one, copy=True))
    if not (one.spare_envs or one.overlap_resets):
        counts = {one.num_workers // 2, min(2 * one.num_workers, num_envs, MAX_WORKERS)}
        found += [replace(one, num_workers=each) for each in counts if each > 1]
        found += [replace(one, batch_size=each) for each in request.batch_sizes]
        if profile.has_slow_resets and is_in_step:
            # A worker that resets a spare cannot step its other envs, so spares help if each env object has its own worker: as
            # many as are in a reset at a time and one more, or one for each env, if all are reset together.
            few = min(num_envs, 1 + math.ceil(num_envs * profile.reset_share / 2))
            found.append(replace(one, overlap_resets=True))
            found += [replace(one, num_workers=num_envs + each, spare_envs=each) for each in {few, num_envs}]
    return sorted({*found} - {one}, key=lambda each: each.complexity)


def medians(rounds: Sequence[Rates]) -> dict[Configuration, float]:
    """Return the median rate of each configuration."""
    measured = dict.fromkeys(key for each in rounds for key in each)
    return {key: median(each[key] for each in rounds if key in each) for key in measured}


def scores_of(rounds: Sequence[Rates], alive: Collection[Configuration]) -> dict[Configuration, float]:
    """Return how fast configurations are relative to each other: medians over the rounds in which all were measured.

    A round in which the machine was busy lowers all rates of that round, and so changes no score. Without a complete round the
    scores are the medians of the rates that there are, and configurations without any have no score.

    Args:
        rounds: in each round, rows per second by configuration.
        alive: the configurations to compare.
    """
    complete = [each for each in rounds if all(key in each for key in alive)]
    means = [geometric_mean(each[key] for key in alive) for each in complete] or [1.0] * len(rounds)
    pairs = zip(complete or rounds, means, strict=True)
    return medians([{key: each[key] / mean for key in alive if key in each} for each, mean in pairs])


def contenders(rounds: Sequence[Rates], alive: Collection[Configuration]) -> dict[Configuration, float]:
    """Return the configurations that may be the best: all but those that are clearly slower than the best so far.

    The values are the standard errors of how many times as fast the best is, as a logarithm: 0 for the best, and infinity before
    enough rounds.
    """
    merits = {each: score * _worth(each) for each, score in scores_of(rounds, alive).items()}
    best = max(alive, key=lambda each: merits.get(each, 0.0))
    found = {best: 0.0}
    for other in set(alive) - {best}:
        logs = [math.log(each[best] / each[other]) for each in rounds if best in each and other in each]
        error = math.inf if len(logs) < MIN_ROUNDS else ERROR_OF_MEDIAN * stdev(logs) / math.sqrt(len(logs))
        if error == math.inf or median(logs) + math.log(_worth(best) / _worth(other)) - TIE <= 2 * error:
            found[other] = error
    return found


def choose(scores: Rates) -> Configuration:
    """Return the configuration to use: the simplest of those that are as fast as the fastest, within TIE."""
    merits = {each: score * _worth(each) for each, score in scores.items()}
    best = max(merits.values())
    return min((each for each in merits if merits[each] >= best * (1 - TIE)), key=lambda each: each.complexity)


def _worth(one: Configuration) -> float:
    """Return the part of the speed that counts: options that cost a program something, or that only seem faster, count for less."""
    return (1 - WORTH_BATCHES * (one.batch_size is not None)) * (1 - WORTH_SETTING * one.is_set)


def explain(
    choice: Configuration, profile: EnvProfile, request: TuneRequest, times_of: Callable[[Configuration], float | None]
) -> list[str]:
    """Return a reason for each part of the choice.

    Args:
        choice: the configuration.
        times_of: how many times as fast as another configuration the choice is, or None if that was not measured.
    """
    reasons = [_backend_reason(choice, profile, request, times_of(SERIAL))]
    if choice.backend is not BackendName.SERIAL:
        reasons.append(_workers_reason(choice, profile, request))
    if choice.spare_envs or choice.overlap_resets:
        how = f"resets.spare_envs={choice.spare_envs}" if choice.spare_envs else "resets.overlap=True"
        reasons.append(
            f"{how}: resets take {profile.reset_share:.0%} of an env's time, and are made in advance; between episodes call() and "
            "render() then see the next episode"
        )
    if choice.batch_size is not None:
        reasons.append(f"batch_size={choice.batch_size}: envs that are ready continue while others take longer")
    others = {"batch_size": None, "spin_us": None if choice.spin_us == 0 else 0.0, "copy": not choice.copy}
    for name, other in others.items():
        value = getattr(choice, name)
        times = None if value == other else times_of(replace(choice, **{name: other}))  # type: ignore[arg-type]  # its values
        if times is not None:
            is_tie, instead = abs(times - 1) <= TIE, f"{name}={other!r}"
            much = f"{instead} is as fast" if is_tie else f"measured {times:.2f} times as fast as {instead}"
            reasons.append(f"{name}={value!r}: {much}")
    return reasons


def _backend_reason(choice: Configuration, profile: EnvProfile, request: TuneRequest, times: float | None) -> str:
    name, num_envs = choice.backend.value, request.num_envs
    if choice.backend is BackendName.KERNEL:
        return "kernel: this env is compiled in stepmill.kernels (other random numbers than Gymnasium's)"
    in_turn = f"{num_envs} rows of {duration_text(profile.row_s)}, one after the other, take {duration_text(num_envs * profile.row_s)}"
    if choice.backend is BackendName.SERIAL:
        if num_envs == 1:
            return "serial: a single env cannot run in parallel"
        return f"serial: {in_turn}; dividing them among workers costs more than it gains"
    measured = "" if times is None else f" (measured {times:.1f} times as fast as serial)"
    if choice.backend is BackendName.THREAD:
        why = "the envs wait" if profile.is_waiting else "the envs release the GIL"
        return f"{name}: {why}, so threads run them in parallel, without processes{measured}"
    return f"{name}: {in_turn}; processes run in parallel, and a crash ends only one of them{measured}"


def _workers_reason(choice: Configuration, profile: EnvProfile, request: TuneRequest) -> str:
    count, cores = choice.num_workers, request.cores
    per_worker = -(-(request.num_envs + choice.spare_envs) // count)
    text = f"num_workers={count}: "
    if choice.backend is not BackendName.KERNEL:
        text += f"{plural(per_worker, 'env')} per worker, "
    if count > cores:
        return (
            text
            + f"more than the {cores} usable cores, because the envs use a core for {profile.cpu_share:.0%} of their time"
        )
    if count == cores:
        return text + f"one for each of the {cores} usable cores"
    return text + f"more would not be faster on {cores} usable cores"
