"""`stepmill.tune`: finds how to run an env on this machine.

profile_env ──► predict every candidate ──► measure a few by turns, drop the slower half, again ──► choose ──► TuneResult
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import cloudpickle

from stepmill import _native
from stepmill.observe.catalog import find_env
from stepmill.observe.tune_choice import (
    MIN_ROUNDS,
    SERIAL,
    Limits,
    candidates,
    choose,
    explain,
    has_slow_resets,
    is_clearly_faster,
    is_settled,
    keep_better_half,
    medians,
    paired_rates,
    paired_scores,
    shortlist,
    variants,
)
from stepmill.observe.tune_code import CodeSource, code_of_function, code_of_id, code_text
from stepmill.observe.tune_measure import Arena, EnvFn, Probe, Subject, profile_env
from stepmill.observe.tune_result import Trial, TuneResult
from stepmill.pool.cost_model import Configuration, Machine, auto_backend, predict
from stepmill.spec.errors import StepmillError, UsageError
from stepmill.spec.options import BackendName

if TYPE_CHECKING:
    from typing_extensions import Self

BUDGET_S = 60.0
TIME_LIMIT_S = 30.0
LEARNER_S = 3e-4  # a small policy; without any, tiny envs would seem to gain from workers: decision 0019
PROBE_S = 1.5
PROBE_SHARE = 0.15  # of the budget
STARTING_SHARE = 0.4  # of the budget, which may be spent on building envs
TURN_S = 0.12
BUSY_TURN_S = 0.4  # where the scheduler gives the cores to other programs, too
ROUNDS_PER_RUNG = 5
MAX_FINAL_ROUNDS = 30
FINAL_SHARE = 0.7  # of the budget, until the end of which the last two are compared if noise leaves them undecided
EXHAUSTIVE_ROUNDS = 6
MAX_RUNGS = 3
STEPS_PER_TURN = 4  # of all envs, at least
START_SHARE_OF_ENV = 0.25  # of the time in which the first env of a worker is built
MIN_COMPARED = 3


class Phase(Enum):
    """What `tune` does at the moment."""

    PROFILE = "one env alone"
    COMPARE = "configurations by turns"
    VARIANTS = "spin_us and copy"
    EXHAUSTIVE = "every configuration"


OnProgress = Callable[[Phase, float], None]  # with the seconds since the start


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """What is to be tuned.

    Attributes:
        name: of the env, for the report.
        subject: how to build the env, and how it is measured.
        source: how a program makes the env.
        baseline: what backend="auto" runs.
        budget_s: seconds for everything, without the exhaustive comparison.
        is_async, is_exhaustive: see `tune`.
    """

    name: str
    subject: Subject
    source: CodeSource
    baseline: Configuration
    budget_s: float = BUDGET_S
    is_async: bool | None = None
    is_exhaustive: bool = False


def tune(
    env: str | Callable[[], object],
    num_envs: int = 8,
    *,
    budget_s: float = BUDGET_S,
    is_async: bool | None = None,
    learner_s: float = LEARNER_S,
    step_timeout_s: float = TIME_LIMIT_S,
    is_exhaustive: bool = False,
) -> TuneResult:
    """Find how to run an env on this machine: backend, workers, batch size and other options.

    One env is measured alone, with random actions. A model predicts the rate of each configuration, and the best few are
    measured by turns. `print(result)` says what was chosen, why, and what to write; `result.keywords` are keywords of `make_vec`.

    Args:
        env: an id of Gymnasium, module:Id, module:Class, or a function that builds the env. Ids of ale_py get the Atari preprocessing.
        num_envs: how many envs will run.
        budget_s: seconds that this may take.
        is_async: True for `recv` of some envs, False for steps of all envs; None tries both if durations of steps vary.
        learner_s: seconds that the program computes between two batches, with the GIL; the default is that of a small policy.
        step_timeout_s: time limit of a step and of a reset.
        is_exhaustive: then also measure every configuration, for as long as that takes.
    Raises:
        UsageError: there is no such env, or a number is out of range.
        StepmillError: the env raised, hung or crashed.
    """
    request = make_request(
        env, num_envs, budget_s=budget_s, is_async=is_async, learner_s=learner_s, step_timeout_s=step_timeout_s
    )
    with Tuner(replace(request, is_exhaustive=is_exhaustive)) as tuner:
        tuner.run()
        return tuner.result()


def make_request(
    env: str | EnvFn,
    num_envs: int,
    *,
    budget_s: float = BUDGET_S,
    is_async: bool | None = None,
    learner_s: float = LEARNER_S,
    step_timeout_s: float = TIME_LIMIT_S,
    **of_id: object,
) -> TuneRequest:
    """Find the env, and return what is to be tuned. `of_id` are arguments of `find_env`."""
    is_positive = all(0 < amount < math.inf for amount in (budget_s, step_timeout_s))
    if num_envs < 1 or not is_positive or not 0 <= learner_s < math.inf:
        raise UsageError(
            f"num_envs={num_envs!r} must be 1 or more, budget_s={budget_s!r} and step_timeout_s={step_timeout_s!r} more than 0, "
            f"and learner_s={learner_s!r} 0 or more"
        )
    kernel, known_s = None, None
    if isinstance(env, str):
        choice = find_env(env, **of_id)  # type: ignore[arg-type]  # passed on
        name, source = choice.env_id, code_of_id(env, choice)
        make: EnvFn = choice.make
        if not choice.is_atari and not of_id.get("env_kwargs"):
            kernel, known_s = find_kernel(choice.env_id), choice.known_step_s
    else:
        name, make, source = getattr(env, "__name__", type(env).__name__), env, code_of_function(env)
    can_pickle = why_unpicklable(make) is None
    backend = auto_backend(num_envs, step_s=known_s)
    num_workers = 1 if backend is BackendName.SERIAL else min(num_envs, _native.usable_cores())
    return TuneRequest(
        name=name,
        subject=Subject(make, kernel, num_envs, learner_s, step_timeout_s, can_pickle),
        source=source,
        baseline=Configuration(backend=backend, num_workers=num_workers),
        budget_s=budget_s,
        is_async=is_async,
    )


def find_kernel(env_id: str) -> EnvFn | None:
    """Return the kernel of an id, or None."""
    from stepmill import kernels

    if env_id not in kernels.names():
        return None
    try:
        found: EnvFn = kernels.find(env_id)
    except (StepmillError, ImportError):  # Numba or MuJoCo is not installed
        return None
    return found


def why_unpicklable(make: EnvFn) -> str | None:
    """Return why worker processes cannot get the function, or None if they can."""
    try:
        cloudpickle.dumps(make)
    except Exception as error:  # whatever the user's objects raise
        return f"{type(error).__name__}: {error}"
    return None


@dataclass
class Tuner:
    """One search. `run` may be interrupted; `result` returns what is known by then."""

    request: TuneRequest
    on_progress: OnProgress = lambda _phase, _elapsed_s: None
    clock: Callable[[], float] = time.monotonic
    profile_one: Callable[[Subject, float], Probe] = profile_env
    make_arena: Callable[[Subject], Arena] = Arena
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    is_interrupted: bool = False

    rounds: list[dict[Configuration, float]] = field(default_factory=list, init=False)
    failures: dict[Configuration, StepmillError] = field(default_factory=dict, init=False)
    exhaustive: list[dict[Configuration, float]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._begun_s = self.clock()
        self._until_s = self._begun_s + self.request.budget_s
        self._machine = Machine(_native.usable_cores(), self.request.subject.learner_s)
        self._arena = self.make_arena(self.request.subject)
        self._probe: Probe | None = None
        self._predicted: dict[Configuration, float] = {}
        self._eligible: list[Configuration] = []  # what may be chosen; the baseline may be measured without being it
        self._choice: Configuration | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._arena.close()

    @property
    def has_result(self) -> bool:
        """Whether `result` has something to return."""
        return bool(self._predicted)

    def run(self) -> None:
        """Measure, and choose.

        Raises:
            StepmillError: the env failed alone, or in every configuration.
        """
        self._profile()
        self._compare()
        self._try_variants()
        if self.request.is_exhaustive:
            self._measure_all()

    def _profile(self) -> None:
        self._report(Phase.PROFILE)
        request = self.request
        self._probe = self.profile_one(request.subject, min(PROBE_S, PROBE_SHARE * request.budget_s))
        self._arena.profile = self._probe.profile
        found = candidates(self._probe.profile, self._machine, self._limits())
        self._predicted = self._predict(found)
        self._eligible = list(self._predicted)
        if self._is_possible(request.baseline):
            self._predicted.update(self._predict([request.baseline]))

    def _limits(self, *, is_exhaustive: bool = False) -> Limits:
        subject = self.request.subject
        return Limits(subject.num_envs, self.request.is_async, subject.can_pickle, is_exhaustive)

    def _is_possible(self, configuration: Configuration) -> bool:
        return self.request.subject.can_pickle or configuration.backend is not BackendName.PROCESS

    def _predict(self, configurations: Iterable[Configuration]) -> dict[Configuration, float]:
        num_envs = self.request.subject.num_envs
        return {each: predict(self._known.profile, self._machine, each, num_envs) for each in configurations}

    @property
    def _known(self) -> Probe:
        if self._probe is None:
            raise UsageError("the search was interrupted before one env was measured; run it again")
        return self._probe

    # ---- turns ---------------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        """Measure the shortlist by turns; after each rung keep the better half. The baseline is measured to the end."""
        alive = self._affordable(
            shortlist({each: self._predicted[each] for each in self._eligible}, [self.request.baseline, SERIAL])
        )
        turn_s = self._turn_s(alive)
        for _ in range(MAX_RUNGS):
            is_on_time = self._play(Phase.COMPARE, alive, ROUNDS_PER_RUNG, turn_s)
            alive = self._without_failed(alive)
            kept = keep_better_half(paired_scores(self.rounds, alive)) or alive
            is_last = len(kept) <= 2 or len(kept) == len(alive)
            alive = kept if is_on_time else alive
            if is_last or not is_on_time:
                break
            self._arena.keep_only([*alive, self.request.baseline])
        self._play_until_settled(Phase.COMPARE, alive, turn_s)
        alive = self._without_failed(alive)
        self._choice = choose(paired_scores(self.rounds, alive) or {each: self._predicted[each] for each in alive})

    def _play_until_settled(self, phase: Phase, alive: list[Configuration], turn_s: float) -> None:
        """Measure rounds until the order of the two fastest is clear, or they are equal, or too much of the budget is used."""
        until_s = self._begun_s + FINAL_SHARE * self.request.budget_s
        for _ in range(MAX_FINAL_ROUNDS):
            left = [each for each in alive if each not in self.failures]
            scores = paired_scores(self.rounds, left)
            ordered = sorted(scores, key=lambda each: -scores[each])
            if len(ordered) < 2 or self.clock() > until_s or is_settled(self.rounds, *ordered[:2]):
                return
            if not self._play(phase, left, 1, turn_s):
                return

    def _try_variants(self) -> None:
        """Measure other values of spin_us and copy for the choice. The defaults stay, unless another value is faster."""
        choice, subject = self._choice, self.request.subject
        if choice is None or self.clock() >= self._until_s:
            return
        others = variants(choice, self._known.profile, subject.num_envs)
        if not others:
            return
        tried = [choice, *others]
        self._arena.keep_only([*tried, self.request.baseline])
        self._predicted.update(self._predict(others))
        self._play(Phase.VARIANTS, tried, MIN_ROUNDS, self._turn_s(tried))
        alive = self._without_failed(tried)
        if choice not in alive:
            self._choice = None  # it failed meanwhile: the best of the others is chosen
            return
        faster = [each for each in alive if is_clearly_faster(self.rounds, each, choice)]
        if faster:
            scores = paired_scores(self.rounds, faster)
            self._choice = max(scores, key=lambda each: scores[each])

    def _measure_all(self) -> None:
        """Measure every configuration beside the choice, in turns of the two, for as long as it takes."""
        choice = self._choice
        if choice is None:
            return
        self._arena.keep_only([choice])
        found = candidates(self._known.profile, self._machine, self._limits(is_exhaustive=True))
        listed = [each for each in dict.fromkeys([*found, self.request.baseline]) if each != choice]
        listed = [each for each in listed if each not in self.failures and self._is_possible(each)]
        self._predicted.update(self._predict(listed))
        for each in listed:
            turn_s = self._wanted_turn_s([each, choice])
            for number in range(EXHAUSTIVE_ROUNDS):
                rates: dict[Configuration, float] = {}
                self.exhaustive.append(rates)
                for one in (each, choice) if number % 2 else (choice, each):
                    self._take_turn(Phase.EXHAUSTIVE, one, turn_s, rates)
            self._arena.keep_only([choice])

    def _play(self, phase: Phase, alive: Iterable[Configuration], num_rounds: int, turn_s: float) -> bool:
        """Measure rounds of turns. Return False if the time was over before their end."""
        listed = list(
            dict.fromkeys([*alive, *([self.request.baseline] if self._is_possible(self.request.baseline) else [])])
        )
        for number in range(num_rounds):
            rates: dict[Configuration, float] = {}
            self.rounds.append(rates)
            first = number % len(listed)
            for each in listed[first:] + listed[:first]:
                if self.clock() + turn_s > self._until_s:
                    return False
                self._take_turn(phase, each, turn_s, rates)
        return True

    def _take_turn(self, phase: Phase, each: Configuration, turn_s: float, rates: dict[Configuration, float]) -> None:
        if each in self.failures:
            return
        self._report(phase)
        try:
            rates[each] = self._arena.measure(each, turn_s)
        except StepmillError as error:
            self.failures[each] = error

    def _without_failed(self, alive: Iterable[Configuration]) -> list[Configuration]:
        left = [each for each in alive if each not in self.failures]
        if not left:
            raise next(iter(self.failures.values()))
        return left

    def _turn_s(self, alive: list[Configuration]) -> float:
        """Return how long a turn takes: what is wanted, if there is time for it."""
        num_turns = (len(alive) + 1) * (ROUNDS_PER_RUNG + 1) + 6 * (MIN_ROUNDS + 1)
        affordable_s = max(self._until_s - self.clock(), 0.0) / num_turns
        return max(min(TURN_S, self._slowest_s(alive)), min(self._wanted_turn_s(alive), affordable_s))

    def _wanted_turn_s(self, alive: list[Configuration]) -> float:
        """Return how long a turn should take: some steps of all envs, and with slow resets two episodes.

        A median over turns that are shorter than an episode would leave out the resets.
        """
        profile, slowest_s = self._known.profile, self._slowest_s(alive)
        least_s = BUSY_TURN_S if self.load > self._machine.cores else TURN_S
        episodes_s = 2 * slowest_s / profile.reset_chance if has_slow_resets(profile) else 0.0
        return max(least_s, STEPS_PER_TURN * slowest_s, episodes_s)

    def _slowest_s(self, alive: list[Configuration]) -> float:
        """Return the longest expected duration of a step of all envs."""
        num_rows = self.request.subject.num_envs * self._known.profile.num_rows
        return max(num_rows / max(self._predicted[each], 1e-9) for each in alive)

    def _affordable(self, listed: list[Configuration]) -> list[Configuration]:
        """Leave out the least promising configurations if building all of their envs takes too long."""
        num_envs, left_s = self.request.subject.num_envs, STARTING_SHARE * (self._until_s - self.clock())
        kept: list[Configuration] = []
        required = [each for each in (self.request.baseline, SERIAL) if each in listed]
        for each in [*required, *(each for each in listed if each not in required)]:
            # Most of the time of a start is that of imports, once in each process.
            left_s -= self._known.start_s * (1 + START_SHARE_OF_ENV * (num_envs / each.num_workers - 1))
            if left_s > 0 or len(kept) < MIN_COMPARED:
                kept.append(each)
        return kept

    def _report(self, phase: Phase) -> None:
        self.on_progress(phase, self.clock() - self._begun_s)

    # ---- result --------------------------------------------------------------------------------------------------

    def result(self) -> TuneResult:
        """Return what is known so far.

        Raises:
            UsageError: nothing is known yet.
        """
        request, profile = self.request, self._known.profile
        choice = self._choice or self._best_so_far()
        baseline = request.baseline if self._is_possible(request.baseline) else SERIAL
        rates = medians(self.rounds)
        trials = [self._trial(each, rates) for each in {**rates, choice: 0.0, **self.failures}]
        in_step = [each for each in rates if each.batch_size is None]
        alternative = choose({each: rates[each] for each in in_step}) if choice.batch_size and in_step else None
        return TuneResult(
            env=request.name,
            num_envs=request.subject.num_envs,
            cores=self._machine.cores,
            learner_s=self._machine.learner_s,
            profile=profile,
            choice=self._trial(choice, rates),
            baseline=self._trial(baseline, rates),
            gain=self._times(choice, baseline),
            trials=tuple(sorted(trials, key=lambda each: -(each.steps_per_s or 0.0))),
            reasons=tuple(
                explain(choice, profile, self._machine, request.subject.num_envs, partial(self._times, choice))
            ),
            notes=tuple(self._notes()),
            code=code_text(request.source, choice, request.subject.num_envs),
            alternative=None if alternative is None else self._trial(alternative, rates),
            alternative_code=None
            if alternative is None
            else code_text(request.source, alternative, request.subject.num_envs),
            exhaustive=tuple(self._exhaustive_trials(choice)),
            elapsed_s=self.clock() - self._begun_s,
            is_interrupted=self.is_interrupted,
        )

    def _best_so_far(self) -> Configuration:
        eligible = [each for each in self._eligible if each not in self.failures]
        measured = [each for each in eligible if any(each in rates for rates in self.rounds)]
        return choose(paired_scores(self.rounds, measured) or {each: self._predicted[each] for each in eligible})

    def _trial(self, configuration: Configuration, rates: Mapping[Configuration, float]) -> Trial:
        failure = self.failures.get(configuration)
        predicted = self._predicted.get(configuration, 0.0)
        return Trial(configuration, predicted, rates.get(configuration), "" if failure is None else failure.message)

    def _times(self, one: Configuration, other: Configuration) -> float | None:
        """Return how many times as fast as another a configuration is, from rounds in which both were measured."""
        ratios = [each[one] / max(each[other], 1e-9) for each in self.rounds if one in each and other in each]
        return median(ratios) if ratios else None

    def _exhaustive_trials(self, choice: Configuration) -> list[Trial]:
        rates = paired_rates(self.exhaustive, choice)
        return [self._trial(each, rates) for each in sorted(rates, key=lambda each: -rates[each])]

    def _notes(self) -> list[str]:
        notes = []
        if self.load > self._machine.cores:
            notes.append(
                f"other programs use this machine (load {self.load:.1f} on {self._machine.cores} cores), so workers gain less than on "
                "an idle one; run this again when it is idle"
            )
        why = None if self.request.subject.can_pickle else why_unpicklable(self.request.subject.make)
        if why is not None:
            notes.append(
                f"the function that makes the env cannot be pickled ({why}), so only the serial and thread backends remain; make "
                "what it holds inside of it"
            )
        notes += [
            f"{each}: failed, and was left out: {error.message.splitlines()[0]}"
            for each, error in self.failures.items()
        ]
        return notes
