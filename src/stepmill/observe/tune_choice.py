"""Which configurations `stepmill tune` compares, and which of them it chooses. Nothing is measured here.

candidates(profile) ──► all that may be useful ──► shortlist(predictions) ──► measured by turns ──► choose(rates)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, stdev

from stepmill.pool.cost_model import Configuration, EnvProfile, Machine, predict
from stepmill.slab.layout import LEASE_BYTES
from stepmill.spec.options import BackendName
from stepmill.spec.stats_text import duration_text

TIE = 0.05  # rates that differ by less are equal, and the simpler configuration is chosen
DROP = 0.1  # configurations that are this much worse than the better half are dropped
MIN_ROUNDS = 6
ERROR_OF_MEDIAN = 1.25  # the standard error of a median divided by that of a mean
MAX_MEASURED = 6
MAX_OF_A_KIND = 2  # of one backend, in step or not
HOPELESS = 0.4  # of the best prediction: below this nothing is measured
WAITING_SHARE = 0.9  # envs that use a core for less of their time may need more workers than cores
UNEVEN = 0.15  # of the time is spent waiting for the slowest env, from which on batches of some envs are tried
SLOW_RESET_SHARE = 0.05  # of the time of an env, from which on resets in advance are tried
MAX_WORKERS = 256

SERIAL = Configuration(backend=BackendName.SERIAL)


@dataclass(frozen=True)
class Limits:
    """What may be chosen.

    Attributes:
        num_envs: N.
        is_async: True for batches of some envs, False for all envs together; None for both if rows differ in duration.
        can_pickle: whether worker processes can get the env function.
        is_exhaustive: take all configurations, not only those that may be useful.
    """

    num_envs: int
    is_async: bool | None = None
    can_pickle: bool = True
    is_exhaustive: bool = False


def candidates(profile: EnvProfile, machine: Machine, limits: Limits) -> list[Configuration]:
    """Return the configurations that may be useful, simplest first."""
    found: list[Configuration] = []
    if limits.is_async is not True:
        found.append(SERIAL)
    is_uneven = straggler_loss(profile, machine, limits.num_envs) > UNEVEN
    has_batches = is_uneven if limits.is_async is None else limits.is_async
    for backend in _worker_backends(limits):
        for num_workers in _worker_counts(profile, machine, limits):
            base = Configuration(backend=backend, num_workers=num_workers)
            found += _in_step(base, profile, limits) + (_in_batches(base, limits) if has_batches else [])
    if profile.kernel_step_s is not None and limits.is_async is not True:
        counts = {1, 2, machine.cores} if machine.cores > 1 else {1}
        found += [Configuration(backend=BackendName.KERNEL, num_workers=each) for each in sorted(counts)]
    if limits.is_exhaustive:
        found += [variant for each in found for variant in variants(each, profile, limits.num_envs)]
    return sorted(dict.fromkeys(found), key=lambda each: each.complexity)


def _worker_backends(limits: Limits) -> list[BackendName]:
    if limits.num_envs == 1 and limits.is_async is not True and not limits.is_exhaustive:
        return []
    return [BackendName.THREAD, BackendName.PROCESS] if limits.can_pickle else [BackendName.THREAD]


def _worker_counts(profile: EnvProfile, machine: Machine, limits: Limits) -> list[int]:
    """Return the numbers of workers: powers of 2 up to the cores, and more if the envs wait for something."""
    most = min(limits.num_envs, machine.cores)
    needs_more = profile.cpu_share < WAITING_SHARE or has_slow_resets(profile)
    if needs_more or limits.is_exhaustive:
        most = min(limits.num_envs, MAX_WORKERS)
    counts = {min(machine.cores, limits.num_envs), most, *(2**power for power in range(most.bit_length()))}
    smallest = 1 if limits.is_exhaustive or limits.is_async or most == 1 else 2
    return sorted(each for each in counts if smallest <= each <= most)


def _in_step(base: Configuration, profile: EnvProfile, limits: Limits) -> list[Configuration]:
    """Return the configurations of a backend and a number of workers that step all envs together."""
    if limits.is_async is True:
        return []
    found = [base]
    if has_slow_resets(profile):
        found.append(replace(base, overlap_resets=True))
        if base.num_workers == limits.num_envs:
            num_spares = _num_spares(profile, limits.num_envs)
            found.append(replace(base, num_workers=limits.num_envs + num_spares, spare_envs=num_spares))
    return found


def _in_batches(base: Configuration, limits: Limits) -> list[Configuration]:
    """Return the configurations of a backend and a number of workers that receive some envs at a time."""
    sizes = {limits.num_envs // 2, limits.num_envs // 4} - {0, limits.num_envs}
    return [replace(base, batch_size=size) for size in sorted(sizes or {1})]


def straggler_loss(profile: EnvProfile, machine: Machine, num_envs: int) -> float:
    """Return the part of the time of steps of all envs that is lost because durations differ, 0 to 1."""
    even = EnvProfile(steps_s=(profile.row_s,), cpu_share=profile.cpu_share)
    num_workers = num_envs if profile.cpu_share < WAITING_SHARE else min(num_envs, machine.cores)
    base = Configuration(backend=BackendName.PROCESS, num_workers=num_workers)
    alone = Machine(machine.cores)
    return 1 - predict(replace(profile, num_rows=1), alone, base, num_envs) / predict(even, alone, base, num_envs)


def has_slow_resets(profile: EnvProfile) -> bool:
    """Whether resets take a considerable part of the time of an env."""
    return profile.reset_chance * profile.reset_s > SLOW_RESET_SHARE * profile.row_s


def _num_spares(profile: EnvProfile, num_envs: int) -> int:
    """Return how many envs are in a reset at a time, on average, and one more; all of them if they are reset together."""
    if profile.is_length_fixed:
        return num_envs
    resetting = profile.reset_chance * profile.reset_s / max(profile.row_s, 1e-9)
    return min(num_envs, 1 + math.ceil(num_envs * resetting / 2))


def variants(configuration: Configuration, profile: EnvProfile, num_envs: int) -> list[Configuration]:
    """Return the same configuration with other values of spin_us and copy, where they make a difference."""
    found = []
    if configuration.backend in (BackendName.THREAD, BackendName.PROCESS):
        found.append(replace(configuration, spin_us=0.0))
    is_lent = configuration.batch_size is None and configuration.backend is not BackendName.SERIAL
    if is_lent and num_envs * profile.num_rows * profile.obs_bytes >= LEASE_BYTES:
        found.append(replace(configuration, copy=True))
    return found


def shortlist(
    predicted: Mapping[Configuration, float], required: Iterable[Configuration], most: int = MAX_MEASURED
) -> list[Configuration]:
    """Return the few configurations that are worth measuring, the best prediction first.

    Args:
        predicted: rows per second.
        required: these are always measured, if they are possible.
        most: how many, without those that are required.
    """
    best = max(predicted.values())
    chosen: list[Configuration] = []
    kinds: dict[tuple[object, ...], int] = {}
    for each in sorted(predicted, key=lambda each: (-predicted[each], each.complexity)):
        kind = (each.backend, each.batch_size is not None, each.spare_envs > 0 or each.overlap_resets)
        kinds[kind] = kinds.get(kind, 0) + 1
        if len(chosen) < most and kinds[kind] <= MAX_OF_A_KIND and predicted[each] >= HOPELESS * best:
            chosen.append(each)
    return [*chosen, *(each for each in dict.fromkeys(required) if each in predicted and each not in chosen)]


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


def paired_rates(rounds: Sequence[Mapping[Configuration, float]], anchor: Configuration) -> dict[Configuration, float]:
    """Return rows per second by configuration, corrected for rounds in which the machine was busy.

    Each rate is the median of its ratios to the rate of `anchor` in the same rounds, times the median rate of `anchor`. Without a
    round in which both were measured it is a plain median.
    """
    found = medians(rounds)
    level = found.get(anchor, 1.0)
    for key in found:
        ratios = [each[key] / max(each[anchor], 1e-9) for each in rounds if key in each and anchor in each]
        found[key] = level * median(ratios) if ratios else found[key]
    return found


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


def is_clearly_faster(
    rounds: Sequence[Mapping[Configuration, float]], one: Configuration, other: Configuration
) -> bool:
    """Whether `one` is faster than `other` by more than a tie and more than noise."""
    found = compare(rounds, one, other)
    return found is not None and found[0] - 2 * found[1] > TIE


def choose(scores: Mapping[Configuration, float], tie: float = TIE) -> Configuration:
    """Return the configuration to use: the simplest of those that are as fast as the fastest, within `tie`."""
    best = max(scores.values())
    return min((each for each in scores if scores[each] >= best * (1 - tie)), key=lambda each: each.complexity)


def keep_better_half(scores: Mapping[Configuration, float]) -> list[Configuration]:
    """Return the better half, at least two, and all that are nearly as good as the last of them."""
    ordered = sorted(scores, key=lambda each: -scores[each])
    num_kept = max(2, -(-len(ordered) // 2))
    if len(ordered) <= num_kept:
        return ordered
    bar = scores[ordered[num_kept - 1]] * (1 - DROP)
    return [each for each in ordered if scores[each] >= bar]


def explain(
    choice: Configuration,
    profile: EnvProfile,
    machine: Machine,
    num_envs: int,
    times_of: Callable[[Configuration], float | None],
) -> list[str]:
    """Return a reason for each part of the choice.

    Args:
        choice: the configuration.
        times_of: how many times as fast as another configuration the choice is, or None if that was not measured.
    """
    expected = {each: predict(profile, machine, each, num_envs) for each in (SERIAL, choice)}
    reasons = [_backend_reason(choice, profile, machine, num_envs, expected)]
    if choice.backend is not BackendName.SERIAL:
        reasons.append(_workers_reason(choice, profile, machine, num_envs))
    if choice.batch_size is not None:
        reasons.append(
            f"batch_size={choice.batch_size}: durations differ; in steps of all envs "
            f"{max(0.0, straggler_loss(profile, machine, num_envs)):.0%} of the time would be spent waiting for the slowest"
        )
    if choice.spare_envs or choice.overlap_resets:
        share = profile.reset_chance * profile.reset_s / profile.row_s
        how = f"spare_envs={choice.spare_envs}" if choice.spare_envs else "overlap_resets=True"
        reasons.append(
            f"{how}: resets take {share:.0%} of an env's time, and are made in advance; between episodes call() and render() then "
            "see the next episode"
        )
    spinning = replace(choice, spin_us=None if choice.spin_us == 0 else 0.0)
    if (times := times_of(spinning)) is not None:
        reasons.append(_times_text("spin_us", choice.spin_us, spinning.spin_us, times))
    copying = replace(choice, copy=not choice.copy)
    if (times := times_of(copying)) is not None:
        reasons.append(_times_text("copy", choice.copy, copying.copy, times))
    return reasons


def _times_text(name: str, value: object, other: object, times: float) -> str:
    if abs(times - 1) <= TIE:
        return f"{name}={value!r}: {name}={other!r} is as fast"
    doubt = (
        "" if times > 1 else "; the measurements vary too much to choose it: run tune again when no other program runs"
    )
    return f"{name}={value!r}: measured {times:.2f} times as fast as {name}={other!r}{doubt}"


def _backend_reason(
    choice: Configuration, profile: EnvProfile, machine: Machine, num_envs: int, expected: Mapping[Configuration, float]
) -> str:
    name = choice.backend.value
    if choice.backend is BackendName.KERNEL:
        return (
            "kernel: this env is compiled in stepmill.kernels; a step takes "
            f"{duration_text(profile.kernel_step_s or 0.0)}, not {duration_text(profile.step_s)} (other random numbers than Gymnasium's)"
        )
    if choice.backend is BackendName.SERIAL:
        if num_envs == 1:
            return "serial: one env has nothing to run beside"
        if machine.cores == 1 and profile.cpu_share >= WAITING_SHARE:
            return "serial: there is one usable core, and the envs compute all the time"
        total_s = num_envs * profile.row_s
        return f"serial: all {num_envs} envs take {duration_text(total_s)} together; to divide them among workers gains less than it costs"
    times = expected[choice] / expected[SERIAL]
    if choice.backend is BackendName.THREAD:
        why = "the envs wait" if profile.cpu_share < WAITING_SHARE else "the envs release the GIL"
        return f"{name}: {why}, so threads run them side by side, without processes ({times:.1f} times serial expected)"
    why = (
        f"{num_envs} steps of {duration_text(profile.row_s)} one after the other take {duration_text(num_envs * profile.row_s)}; "
        "processes run side by side, and a crash ends only one of them"
    )
    return f"{name}: {why} ({times:.1f} times serial expected)"


def _workers_reason(choice: Configuration, profile: EnvProfile, machine: Machine, num_envs: int) -> str:
    count = choice.num_workers
    per_worker = -(-(num_envs + choice.spare_envs) // count)
    text = f"num_workers={count}: {per_worker} env{'s' if per_worker > 1 else ''} per worker, "
    if choice.backend is BackendName.KERNEL:
        text = f"num_workers={count}: "
    if count > machine.cores:
        return (
            text
            + f"more than the {machine.cores} usable cores, because the envs use a core for {profile.cpu_share:.0%} of their time"
        )
    if count == machine.cores:
        return text + f"one for each of the {machine.cores} usable cores"
    return text + f"more would not pay on {machine.cores} usable cores"
