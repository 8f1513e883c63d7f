"""`stepmill.tune`: finds how to run an env on this machine.

profile_env ──► race: measure some by turns, drop the slower half, again ──► race the best and its neighbours, again ──► TuneResult
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, cast

import cloudpickle

from stepmill import _native
from stepmill.observe.catalog import find_env
from stepmill.observe.tune_choice import (
    SERIAL,
    Configuration,
    EnvProfile,
    Limits,
    choose,
    explain,
    is_settled,
    keep_better_half,
    medians,
    neighbours,
    paired_scores,
    starts,
)
from stepmill.observe.tune_code import CodeSource, code_of_function, code_of_id, code_text
from stepmill.observe.tune_measure import Arena, EnvFn, Subject, profile_env
from stepmill.observe.tune_result import Trial, TuneResult
from stepmill.pool.arguments import checked_count
from stepmill.pool.auto_backend import choose_backend
from stepmill.spec.errors import StepmillError, UsageError
from stepmill.spec.options import BackendName, PoolOptions

if TYPE_CHECKING:
    from typing_extensions import Self

BUDGET_S = 60.0
TIME_LIMIT_S = 30.0
LEARNER_S = 3e-4  # a small policy; without any, tiny envs would seem to gain from workers: decision 0019
PROBE_S = 1.5
PROBE_SHARE = 0.15  # of the budget
TURN_S = 0.12
BUSY_TURN_S = 0.4  # if other programs also use the cores
ROUNDS_PER_RUNG = 5
MAX_FINAL_ROUNDS = 30
RACE_SHARE = 0.5  # of the time that is left, for one race
MAX_RACES = 5
STEPS_PER_TURN = 4  # at least, of all envs


class Phase(Enum):
    """What `tune` does at the moment."""

    PROFILE = "one env alone"
    COMPARE = "configurations by turns"
    REFINE = "neighbours of the best"


OnProgress = Callable[[Phase, float], None]  # called with the seconds since the start


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """The input of a search.

    Attributes:
        name: the name of the env, for the report.
        subject: how the env is built and measured.
        source: how a program makes the env.
        baseline: the configuration that backend="auto" runs.
        budget_s: the seconds for the whole search.
        is_async: see `tune`.
    """

    name: str
    subject: Subject
    source: CodeSource
    baseline: Configuration
    budget_s: float = BUDGET_S
    is_async: bool | None = None


def tune(
    env: str | Callable[[], object],
    num_envs: int = 8,
    *,
    budget_s: float = BUDGET_S,
    is_async: bool | None = None,
    learner_s: float = LEARNER_S,
    step_timeout_s: float = TIME_LIMIT_S,
) -> TuneResult:
    """Find how to run an env on this machine: backend, workers, batch size and other options.

    The backends take turns in stepping the envs with random actions; then configurations that differ from the best by one option do,
    until none is faster. `print(result)` shows the choice, the reasons, and a program; `result.keywords` are keywords of `make_vec`.

    Args:
        env: an id of Gymnasium, module:Id, module:Class, or a function that builds the env. Ids of ale_py get the Atari preprocessing.
        num_envs: how many envs will run.
        budget_s: seconds that the search may take.
        is_async: True tries `recv` of some envs, False steps of all envs; None tries both, and chooses batches if they are 15 % faster.
        learner_s: seconds that the program computes between two batches, with the GIL; the default is typical of a small policy.
        step_timeout_s: time limit of a step and of a reset.
    Raises:
        UsageError: there is no such env, or a number is out of range.
        StepmillError: the env raised, hung or crashed.
    """
    request = make_request(
        env, num_envs, budget_s=budget_s, is_async=is_async, learner_s=learner_s, step_timeout_s=step_timeout_s
    )
    with Tuner(request) as tuner:
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
    """Find the env, and return the input of the search. `of_id` are arguments of `find_env`."""
    is_positive = all(0 < amount < math.inf for amount in (budget_s, step_timeout_s))
    num_envs = checked_count(num_envs)
    if not is_positive or not 0 <= learner_s < math.inf:
        raise UsageError(
            f"budget_s={budget_s!r} and step_timeout_s={step_timeout_s!r} must be more than 0, "
            f"and learner_s={learner_s!r} 0 or more"
        )
    kernel = None
    if isinstance(env, str):
        choice = find_env(env, **of_id)  # type: ignore[arg-type]  # passed on
        name, source = choice.env_id, code_of_id(env, choice)
        make: EnvFn = choice.make
        if not choice.is_atari and not of_id.get("env_kwargs"):
            kernel = find_kernel(choice.env_id)
    else:
        name, make, source = getattr(env, "__name__", type(env).__name__), env, code_of_function(env)
    can_pickle = why_unpicklable(make) is None
    backend = cast("BackendName", choose_backend([make] * num_envs, PoolOptions()))
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
    except Exception as error:  # the user's objects may raise anything
        return f"{type(error).__name__}: {error}"
    return None


@dataclass
class Tuner:
    """One search. `run` may be interrupted; `result` returns what is known by then."""

    request: TuneRequest
    on_progress: OnProgress = lambda _phase, _elapsed_s: None
    clock: Callable[[], float] = time.monotonic
    profile_one: Callable[[Subject, float], EnvProfile] = profile_env
    make_arena: Callable[[Subject], Arena] = Arena
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    is_interrupted: bool = False

    rounds: list[dict[Configuration, float]] = field(default_factory=list, init=False)
    failures: dict[Configuration, StepmillError] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._begun_s = self.clock()
        self._until_s = self._begun_s + self.request.budget_s
        subject = self.request.subject
        self._limits = Limits(
            subject.num_envs,
            _native.usable_cores(),
            self.request.is_async,
            subject.can_pickle,
            subject.kernel is not None,
        )
        self._arena = self.make_arena(subject)
        self._profile: EnvProfile | None = None
        self._eligible: list[Configuration] = []  # the baseline may be measured without being in it
        self._choice: Configuration | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._arena.close()

    @property
    def has_result(self) -> bool:
        """Whether `result` has something to return."""
        return self._profile is not None

    def run(self) -> None:
        """Measure, and choose.

        Raises:
            StepmillError: the env failed alone, or in every configuration.
        """
        self._report(Phase.PROFILE)
        self._profile = self.profile_one(self.request.subject, min(PROBE_S, PROBE_SHARE * self.request.budget_s))
        best = self._race(Phase.COMPARE, starts(self._profile, self._limits))
        for _ in range(MAX_RACES):
            others = [each for each in neighbours(best, self._profile, self._limits) if each not in self._eligible]
            if not others or self.clock() > self._until_s:
                break
            best, previous = self._race(Phase.REFINE, [best, *others]), best
            if best == previous:
                break

    def _is_possible(self, configuration: Configuration) -> bool:
        return self.request.subject.can_pickle or configuration.backend is not BackendName.PROCESS

    @property
    def _known(self) -> EnvProfile:
        if self._profile is None:
            raise UsageError("the search was interrupted before one env was measured; run it again")
        return self._profile

    # ---- turns ---------------------------------------------------------------------------------------------------

    def _race(self, phase: Phase, alive: list[Configuration]) -> Configuration:
        """Measure configurations by turns, keep the better half, repeat, and return the best. The baseline stays in."""
        self._eligible += [each for each in alive if each not in self._eligible]
        now_s = self.clock()
        until_s = now_s + RACE_SHARE * (self._until_s - now_s)
        turn_s = self._turn_s(alive, until_s - now_s)
        first_round = len(self.rounds)
        is_on_time = True
        while is_on_time:
            self._arena.keep_only([*alive, self.request.baseline])
            is_on_time = self._play(phase, alive, ROUNDS_PER_RUNG, turn_s, until_s)
            alive = self._without_failed(alive)
            scores = paired_scores(self.rounds[first_round:], alive)
            kept = keep_better_half(scores) or alive
            if len(kept) <= 2 or len(kept) == len(alive):
                break
            alive = kept if is_on_time else alive
        for _ in range(MAX_FINAL_ROUNDS):
            scores = paired_scores(self.rounds[first_round:], alive)
            ordered = sorted(scores, key=lambda each: -scores[each])
            if len(ordered) < 2 or is_settled(self.rounds[first_round:], *ordered[:2]):
                break
            if not self._play(phase, alive, 1, turn_s, until_s):
                break
            alive = self._without_failed(alive)
        scores = paired_scores(self.rounds[first_round:], alive)
        self._choice = choose(scores) if scores else alive[0]
        return self._choice

    def _play(self, phase: Phase, alive: list[Configuration], num_rounds: int, turn_s: float, until_s: float) -> bool:
        """Measure rounds of turns. Return False if the time ended before the rounds."""
        listed = list(
            dict.fromkeys([*alive, *([self.request.baseline] if self._is_possible(self.request.baseline) else [])])
        )
        for number in range(num_rounds):
            rates: dict[Configuration, float] = {}
            self.rounds.append(rates)
            first = number % len(listed)
            for each in listed[first:] + listed[:first]:
                if self.clock() + turn_s > until_s:
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

    def _turn_s(self, alive: list[Configuration], available_s: float) -> float:
        """Return how long a turn takes, which is the wanted time if there is enough left."""
        affordable_s = available_s / (2 * ROUNDS_PER_RUNG * (len(alive) + 1))
        return max(min(TURN_S, self._in_turn_s), min(self._wanted_turn_s(), affordable_s))

    def _wanted_turn_s(self) -> float:
        """Return how long a turn should take: some steps of all envs, and with slow resets two episodes.

        A median over turns that are shorter than an episode would leave out the resets.
        """
        episodes_s = 2 * self._in_turn_s / self._known.reset_chance if self._known.has_slow_resets else 0.0
        least_s = BUSY_TURN_S if self.load > self._limits.cores else TURN_S
        return max(least_s, STEPS_PER_TURN * self._in_turn_s, episodes_s)

    @property
    def _in_turn_s(self) -> float:
        """How long a step of all envs takes if they step one after the other."""
        return self.request.subject.num_envs * self._known.row_s

    def _report(self, phase: Phase) -> None:
        self.on_progress(phase, self.clock() - self._begun_s)

    # ---- result --------------------------------------------------------------------------------------------------

    def result(self) -> TuneResult:
        """Return what is known so far.

        Raises:
            UsageError: nothing is known yet.
        """
        request, profile = self.request, self._known
        choice = self._choice or self._best_so_far()
        baseline = request.baseline if self._is_possible(request.baseline) else SERIAL
        rates = medians(self.rounds)
        trials = [self._trial(each, rates) for each in {**rates, choice: 0.0, **self.failures}]
        in_step = [each for each in rates if each.batch_size is None]
        alternative = choose({each: rates[each] for each in in_step}) if choice.batch_size and in_step else None
        return TuneResult(
            env=request.name,
            num_envs=request.subject.num_envs,
            cores=self._limits.cores,
            learner_s=request.subject.learner_s,
            profile=profile,
            choice=self._trial(choice, rates),
            baseline=self._trial(baseline, rates),
            gain=self._times(choice, baseline),
            trials=tuple(sorted(trials, key=lambda each: -(each.steps_per_s or 0.0))),
            reasons=tuple(explain(choice, profile, self._limits, partial(self._times, choice))),
            notes=tuple(self._notes()),
            code=code_text(request.source, choice, request.subject.num_envs),
            alternative=None if alternative is None else self._trial(alternative, rates),
            alternative_code=None
            if alternative is None
            else code_text(request.source, alternative, request.subject.num_envs),
            elapsed_s=self.clock() - self._begun_s,
            is_interrupted=self.is_interrupted,
        )

    def _best_so_far(self) -> Configuration:
        eligible = [each for each in self._eligible if each not in self.failures]
        measured = [each for each in eligible if any(each in rates for rates in self.rounds)]
        scores = paired_scores(self.rounds, measured)
        return choose(scores) if scores else next(iter(eligible), self.request.baseline)

    def _trial(self, configuration: Configuration, rates: Mapping[Configuration, float]) -> Trial:
        failure = self.failures.get(configuration)
        return Trial(configuration, rates.get(configuration), "" if failure is None else failure.message)

    def _times(self, one: Configuration, other: Configuration) -> float | None:
        """Return how many times as fast as another a configuration is, from rounds in which both were measured."""
        ratios = [each[one] / max(each[other], 1e-9) for each in self.rounds if one in each and other in each]
        return median(ratios) if ratios else None

    def _notes(self) -> list[str]:
        notes = []
        if self.load > self._limits.cores:
            notes.append(
                f"other programs use this machine (load {self.load:.1f} on {self._limits.cores} cores), so workers gain less than on "
                "an idle one; run this again when it is idle"
            )
        why = None if self.request.subject.can_pickle else why_unpicklable(self.request.subject.make)
        if why is not None:
            notes.append(
                f"the function that makes the env cannot be pickled ({why}), so only the serial and thread backends were tried; "
                "create its contents inside it"
            )
        notes += [
            f"{each}: failed, and was left out: {error.message.splitlines()[0]}"
            for each, error in self.failures.items()
        ]
        return notes
