"""Which configurations `stepmill tune` compares, and which of them it chooses. Nothing is measured here.

starts() ──► measured by turns ──► the best ──► its neighbours() ──► measured by turns ──► the best ──► ... until none is faster
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, stdev

from stepmill.slab.layout import LEASE_BYTES
from stepmill.spec.options import BackendName
from stepmill.spec.stats_text import duration_text

TIE = 0.05  # rates that differ by less are equal, and the simpler configuration is chosen
WORTH_BATCHES = 0.15  # batches of some envs, for which a program must be written, are chosen if faster by this
WORTH_SETTING = 0.1  # the same for another spin_us or copy, because a busy machine has noise below this
DROP = 0.1  # configurations that are this much worse than the better half are dropped
MIN_ROUNDS = 6
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
        return (self.batch_size is not None, _RANKS[self.backend], extras, self.num_workers, self.spare_envs)

    def __str__(self) -> str:
        parts = [self.backend.value]
        if self.backend is not BackendName.SERIAL:
            what = "thread" if self.backend in (BackendName.THREAD, BackendName.KERNEL) else "worker"
            parts.append(f"{self.num_workers} {what}{'s' if self.num_workers > 1 else ''}")
        if self.batch_size is not None:
            parts.append(f"batches of {self.batch_size}")
        if self.spare_envs:
            parts.append(f"{self.spare_envs} spare{'s' if self.spare_envs > 1 else ''}")
        if self.overlap_resets:
            parts.append("overlapped resets")
        if self.spin_us is not None:
            parts.append(f"spin_us={self.spin_us:g}")
        if self.copy:
            parts.append("copy=True")
        return ", ".join(parts)


_RANKS = {
    backend: rank
    for rank, backend in enumerate((BackendName.SERIAL, BackendName.THREAD, BackendName.PROCESS, BackendName.KERNEL))
}


SERIAL = Configuration(backend=BackendName.SERIAL)


@dataclass(frozen=True)
class Limits:
    """What may be chosen.

    Attributes:
        num_envs: N.
        cores: the number of usable cores.
        is_async: True for batches of some envs, False for all envs together; None for both.
        can_pickle: whether worker processes can get the env function.
        has_kernel: whether the env exists as a kernel.
    """

    num_envs: int
    cores: int
    is_async: bool | None = None
    can_pickle: bool = True
    has_kernel: bool = False

    @property
    def batch_sizes(self) -> list[int]:
        """How many envs `recv` may wait for."""
        if self.is_async is False or (self.num_envs == 1 and not self.is_async):
            return []
        return sorted({self.num_envs // 2, self.num_envs // 4} - {0, self.num_envs} or {1})


def starts(profile: EnvProfile, limits: Limits) -> list[Configuration]:
    """Return the configurations that are compared first: each backend with a worker per core, and with one per env if envs wait."""
    batch_size = limits.batch_sizes[-1] if limits.is_async else None
    found = [] if limits.is_async else [SERIAL]
    if limits.has_kernel and not limits.is_async:
        found += [Configuration(backend=BackendName.KERNEL, num_workers=each) for each in sorted({1, limits.cores})]
    if limits.num_envs == 1 and not limits.is_async:
        return found
    counts = {min(limits.cores, limits.num_envs)} | (
        {min(limits.num_envs, MAX_WORKERS)} if profile.is_waiting else set()
    )
    for backend in (BackendName.THREAD, *([BackendName.PROCESS] if limits.can_pickle else [])):
        found += [Configuration(backend=backend, num_workers=each, batch_size=batch_size) for each in sorted(counts)]
    return found


def neighbours(one: Configuration, profile: EnvProfile, limits: Limits) -> list[Configuration]:
    """Return the configurations that differ from `one` in one option."""
    if one.backend in (BackendName.SERIAL, BackendName.KERNEL) or one.is_set:
        return []
    found = [replace(one, spin_us=0.0)]
    if one.batch_size is None and limits.num_envs * profile.obs_bytes >= LEASE_BYTES:
        found.append(replace(one, copy=True))
    if one.spare_envs or one.overlap_resets:
        return found
    most = min(limits.num_envs, MAX_WORKERS)
    found += [
        replace(one, num_workers=each) for each in {one.num_workers // 2, min(2 * one.num_workers, most)} if each > 1
    ]
    found += [replace(one, batch_size=each) for each in limits.batch_sizes]
    if profile.has_slow_resets and one.batch_size is None:
        # A worker that resets a spare cannot step its other envs, so spares help if each env object has its own worker: as many
        # as are in a reset at a time and one more, or one for each env, if all are reset together.
        few = min(limits.num_envs, 1 + math.ceil(limits.num_envs * profile.reset_share / 2))
        found.append(replace(one, overlap_resets=True))
        found += [replace(one, num_workers=limits.num_envs + each, spare_envs=each) for each in {few, limits.num_envs}]
    return sorted({each for each in found if each != one}, key=lambda each: each.complexity)


def paired_scores(
    rounds: Sequence[Mapping[Configuration, float]], alive: Iterable[Configuration]
) -> dict[Configuration, float]:
    """Return how fast configurations are relative to each other: medians over the rounds in which all were measured.

    A round in which the machine was busy lowers all rates of that round, and so changes no score. Without a complete round the
    scores are the medians of the rates that there are, and configurations without any have no score.

    Args:
        rounds: in each round, rows per second by configuration.
        alive: the configurations to compare.
    """
    alive = list(alive)
    complete = [each for each in rounds if all(key in each for key in alive)]
    if not complete:
        found = {key: [each[key] for each in rounds if key in each] for key in alive}
        return {key: median(rates) for key, rates in found.items() if rates}
    means = [math.exp(sum(math.log(max(each[key], 1e-9)) for key in alive) / len(alive)) for each in complete]
    return {key: median(each[key] / mean for each, mean in zip(complete, means, strict=True)) for key in alive}


def medians(rounds: Iterable[Mapping[Configuration, float]]) -> dict[Configuration, float]:
    """Return the median rate of each configuration."""
    found: dict[Configuration, list[float]] = {}
    for each in rounds:
        for configuration, rate in each.items():
            found.setdefault(configuration, []).append(rate)
    return {configuration: median(rates) for configuration, rates in found.items()}


def compare(
    rounds: Sequence[Mapping[Configuration, float]], one: Configuration, other: Configuration
) -> tuple[float, float] | None:
    """Return the logarithm of how many times as fast `one` is as `other`, and its standard error; None before enough rounds."""
    logs = [math.log(max(each[one], 1e-9) / max(each[other], 1e-9)) for each in rounds if one in each and other in each]
    if len(logs) < MIN_ROUNDS:
        return None
    return median(logs), ERROR_OF_MEDIAN * stdev(logs) / math.sqrt(len(logs))


def is_settled(rounds: Sequence[Mapping[Configuration, float]], one: Configuration, other: Configuration) -> bool:
    """Whether further rounds are unlikely to change which of two configurations is faster, or whether they are equal."""
    found = compare(rounds, one, other)
    return found is not None and (found[1] < TIE / 2 or abs(found[0]) - TIE > 2 * found[1])


def choose(scores: Mapping[Configuration, float]) -> Configuration:
    """Return the configuration to use: the simplest of those that are as fast as the fastest, within TIE."""
    merits = {
        each: score * (1 - WORTH_BATCHES * (each.batch_size is not None)) * (1 - WORTH_SETTING * each.is_set)
        for each, score in scores.items()
    }
    best = max(merits.values())
    return min((each for each in merits if merits[each] >= best * (1 - TIE)), key=lambda each: each.complexity)


def keep_better_half(scores: Mapping[Configuration, float]) -> list[Configuration]:
    """Return the better half, at least two, and all that are nearly as good as the last of them."""
    ordered = sorted(scores, key=lambda each: -scores[each])
    num_kept = max(2, -(-len(ordered) // 2))
    if len(ordered) <= num_kept:
        return ordered
    bar = scores[ordered[num_kept - 1]] * (1 - DROP)
    return [each for each in ordered if scores[each] >= bar]


def explain(
    choice: Configuration, profile: EnvProfile, limits: Limits, times_of: Callable[[Configuration], float | None]
) -> list[str]:
    """Return a reason for each part of the choice.

    Args:
        choice: the configuration.
        times_of: how many times as fast as another configuration the choice is, or None if that was not measured.
    """
    reasons = [_backend_reason(choice, profile, limits, times_of(SERIAL))]
    if choice.backend is not BackendName.SERIAL:
        reasons.append(_workers_reason(choice, profile, limits))
    if choice.spare_envs or choice.overlap_resets:
        how = f"resets.spare_envs={choice.spare_envs}" if choice.spare_envs else "resets.overlap=True"
        reasons.append(
            f"{how}: resets take {profile.reset_share:.0%} of an env's time, and are made in advance; between episodes call() and "
            "render() then see the next episode"
        )
    if choice.batch_size is not None:
        reasons.append(f"batch_size={choice.batch_size}: envs that are ready continue while others take longer")
    for name, other in (
        ("batch_size", None),
        ("spin_us", None if choice.spin_us == 0 else 0.0),
        ("copy", not choice.copy),
    ):
        value = getattr(choice, name)
        times = None if value == other else times_of(replace(choice, **{name: other}))  # type: ignore[arg-type]  # its values
        if times is not None:
            is_tie = abs(times - 1) <= TIE
            much = (
                f"{name}={other!r} is as fast" if is_tie else f"measured {times:.2f} times as fast as {name}={other!r}"
            )
            reasons.append(f"{name}={value!r}: {much}")
    return reasons


def _backend_reason(choice: Configuration, profile: EnvProfile, limits: Limits, times: float | None) -> str:
    name, num_envs = choice.backend.value, limits.num_envs
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


def _workers_reason(choice: Configuration, profile: EnvProfile, limits: Limits) -> str:
    count, cores = choice.num_workers, limits.cores
    per_worker = -(-(limits.num_envs + choice.spare_envs) // count)
    text = f"num_workers={count}: "
    if choice.backend is not BackendName.KERNEL:
        text += f"{per_worker} env{'s' if per_worker > 1 else ''} per worker, "
    if count > cores:
        return (
            text
            + f"more than the {cores} usable cores, because the envs use a core for {profile.cpu_share:.0%} of their time"
        )
    if count == cores:
        return text + f"one for each of the {cores} usable cores"
    return text + f"more would not be faster on {cores} usable cores"
