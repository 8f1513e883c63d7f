"""`stepmill.tune`: finds how to run an env on this machine.

profile_env ──► race: measure all by turns, drop those that are clearly slower ──► race the best and its neighbours, again ──► TuneResult
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import cloudpickle

from stepmill import _native
from stepmill.observe.catalog import EnvChoice, find_env, search_current_directory
from stepmill.observe.progress import show_progress
from stepmill.observe.tune_choice import (
    BUDGET_S,
    LEARNER_S,
    MIN_ROUNDS,
    SERIAL,
    TIE,
    TIME_LIMIT_S,
    Configuration,
    EnvProfile,
    Rates,
    TuneRequest,
    choose,
    contenders,
    explain,
    medians,
    neighbours,
    scores_of,
    starts,
)
from stepmill.observe.tune_measure import Arena, EnvFn, profile_env
from stepmill.observe.tune_result import Trial, TuneResult, code_text
from stepmill.pool.arguments import checked_count
from stepmill.pool.auto_backend import choose_backend
from stepmill.spec.errors import StepmillError, UsageError
from stepmill.spec.options import BackendName, PoolOptions

if TYPE_CHECKING:
    from typing_extensions import Self

PROBE_S = 1.5
PROBE_SHARE = 0.15  # of the budget
TURN_S = 0.12
BUSY_TURN_S = 0.4  # if other programs also use the cores
STEPS_PER_TURN = 4  # at least, of all envs
PLANNED_ROUNDS = 10
MAX_ROUNDS = 35
RACE_SHARE = 0.5  # of the time that is left, for one race
MAX_RACES = 6

OnProgress = Callable[[str, float], None]  # called with what is measured, and the seconds since the start


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
    atari: bool | None = None,
    env_kwargs: dict[str, object] | None = None,
    **settings: Any,
) -> TuneRequest:
    """Find the env, and return the input of the search. `settings` are fields of TuneRequest.

    Raises:
        UsageError: there is no such env, or a number is out of range.
    """
    num_envs = checked_count(num_envs)
    kernel = None
    if isinstance(env, str):
        choice = find_env(env, atari=atari, env_kwargs=env_kwargs)
        if not choice.is_atari and not env_kwargs:
            kernel = find_kernel(choice.env_id)
    else:
        choice = EnvChoice(getattr(env, "__name__", "make_env"), env, is_atari=False, is_function=True)
    cores, unpicklable = _native.usable_cores(), why_unpicklable(choice.make)
    backend = cast("BackendName", choose_backend([choice.make] * num_envs, PoolOptions()))
    baseline = Configuration(backend=backend, num_workers=min(num_envs, cores))
    return TuneRequest(
        env=choice,
        kernel=kernel,
        num_envs=num_envs,
        cores=cores,
        baseline=SERIAL if unpicklable or backend is BackendName.SERIAL else baseline,
        unpicklable=unpicklable,
        **settings,
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
    on_progress: OnProgress = lambda _what, _elapsed_s: None
    clock: Callable[[], float] = time.monotonic
    profile_one: Callable[[TuneRequest, float], EnvProfile] = profile_env
    make_arena: Callable[[TuneRequest], Arena] = Arena
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    is_interrupted: bool = False

    rounds: list[Rates] = field(default_factory=list, init=False)
    failures: dict[Configuration, StepmillError] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._begun_s = self.clock()
        self._until_s = self._begun_s + self.request.budget_s
        self._arena = self.make_arena(self.request)
        self._profile: EnvProfile | None = None
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
        self._report("one env alone")
        self._profile = self.profile_one(self.request, min(PROBE_S, PROBE_SHARE * self.request.budget_s))
        others, what, tried = starts(self._profile, self.request), "configurations by turns", set[Configuration]()
        for _ in range(MAX_RACES):
            best = self._choice
            tried.update(others)
            self._choice = self._race(what, others if best is None else [best, *others])
            found = neighbours(self._choice, self._profile, self.request)
            others, what = [each for each in found if each not in tried], "neighbours of the best"
            if self._choice == best or not others or self.clock() > self._until_s:
                break

    # ---- turns ---------------------------------------------------------------------------------------------------

    def _race(self, what: str, alive: Sequence[Configuration]) -> Configuration:
        """Measure configurations by turns, drop those that are clearly slower, and return the best.

        The race ends when one is left, or when more rounds would not tell which of those that are left is faster, or in time.
        """
        now_s = self.clock()
        until_s = now_s + RACE_SHARE * (self._until_s - now_s)
        turn_s = self._turn_s(PLANNED_ROUNDS * len({*alive, self.request.baseline}), until_s - now_s)
        first = len(self.rounds)
        for _ in range(MAX_ROUNDS):
            self._report(what)
            is_on_time = self._play_round(alive, turn_s, until_s)
            alive = [each for each in alive if each not in self.failures]
            if not (is_on_time and alive):
                break
            errors = contenders(self.rounds[first:], alive)
            alive = [*errors]
            if len(self.rounds) - first >= MIN_ROUNDS and all(error < TIE / 2 for error in errors.values()):
                break
        return self._best(self.rounds[first:], alive)

    def _play_round(self, alive: Sequence[Configuration], turn_s: float, until_s: float) -> bool:
        """Give each configuration and the baseline one turn. Return False if the time ends before the round."""
        listed = [each for each in dict.fromkeys([*alive, self.request.baseline]) if each not in self.failures]
        self._arena.keep_only(listed)
        first = len(self.rounds) % len(listed)
        rates: dict[Configuration, float] = {}
        self.rounds.append(rates)
        for each in listed[first:] + listed[:first]:
            if self.clock() + turn_s > until_s:
                return False
            try:
                rates[each] = self._arena.measure(each, turn_s)
            except StepmillError as error:
                self.failures[each] = error
        return True

    def _best(self, rounds: Sequence[Rates], among: Sequence[Configuration]) -> Configuration:
        left = [each for each in among if each not in self.failures]
        if not left:
            raise next(iter(self.failures.values()))
        scores = scores_of(rounds, left)
        return choose(scores) if scores else left[0]

    def _turn_s(self, num_turns: int, available_s: float) -> float:
        """Return how long a turn takes: some steps of all envs, and with slow resets two episodes, if there is enough time.

        A median over turns that are shorter than an episode would leave out the resets.
        """
        profile = self._known
        step_s = self.request.num_envs * profile.row_s  # of all envs, one after the other
        episodes_s = 2 * step_s / profile.reset_chance if profile.has_slow_resets else 0.0
        least_s = BUSY_TURN_S if self.load > self.request.cores else TURN_S
        wanted_s = max(least_s, STEPS_PER_TURN * step_s, episodes_s)
        return max(min(TURN_S, step_s), min(wanted_s, available_s / num_turns))

    def _report(self, what: str) -> None:
        self.on_progress(what, self.clock() - self._begun_s)

    # ---- result --------------------------------------------------------------------------------------------------

    @property
    def _known(self) -> EnvProfile:
        if self._profile is None:
            raise UsageError("the search was interrupted before one env was measured; run it again")
        return self._profile

    def result(self) -> TuneResult:
        """Return what is known so far.

        Raises:
            UsageError: nothing is known yet.
        """
        request, profile = self.request, self._known
        choice = self._choice or self._best(self.rounds, starts(profile, request))
        gain = self._times(choice, request.baseline)
        # The races drop the baseline like any other, but it is measured in each round, and may turn out to be faster. A program
        # that wants batches cannot use it.
        if not request.is_async and gain is not None and gain < 1 - TIE:
            choice, gain = request.baseline, 1.0
        rates = medians(self.rounds)
        in_step = {each: rate for each, rate in rates.items() if each.batch_size is None}
        alternative = choose(in_step) if choice.batch_size and in_step else None
        tried = sorted(dict.fromkeys([*rates, choice, *self.failures]), key=lambda each: -rates.get(each, 0.0))

        def trial_of(each: Configuration) -> Trial:
            failure = self.failures.get(each)
            return Trial(each, rates.get(each), "" if failure is None else failure.message)

        def code_of(each: Configuration) -> str:
            return code_text(request.env, each, request.num_envs)

        return TuneResult(
            env=request.env.env_id,
            num_envs=request.num_envs,
            cores=request.cores,
            learner_s=request.learner_s,
            profile=profile,
            choice=trial_of(choice),
            baseline=trial_of(request.baseline),
            gain=gain,
            trials=tuple(map(trial_of, tried)),
            reasons=tuple(explain(choice, profile, request, partial(self._times, choice))),
            notes=tuple(self._notes()),
            code=code_of(choice),
            alternative=None if alternative is None else trial_of(alternative),
            alternative_code=None if alternative is None else code_of(alternative),
            elapsed_s=self.clock() - self._begun_s,
            is_interrupted=self.is_interrupted,
        )

    def _times(self, one: Configuration, other: Configuration) -> float | None:
        """Return how many times as fast as another a configuration is, from rounds in which both were measured."""
        ratios = [each[one] / each[other] for each in self.rounds if one in each and other in each]
        return median(ratios) if ratios else None

    def _notes(self) -> list[str]:
        request, notes = self.request, []
        if self.load > request.cores:
            notes.append(
                f"other programs use this machine (load {self.load:.1f} on {request.cores} cores), so workers gain less than on "
                "an idle one; run this again when it is idle"
            )
        if request.unpicklable is not None:
            notes.append(
                f"the function that makes the env cannot be pickled ({request.unpicklable}), so only the serial and thread backends "
                "were tried; create its contents inside it"
            )
        failed = {each: error.message.splitlines()[0] for each, error in self.failures.items()}
        return notes + [f"{each}: failed, and was left out: {message}" for each, message in failed.items()]


def run_tune(*, learner_ms: float, is_json: bool, quiet: bool, **of_request: Any) -> None:
    """Search, and print the result. After a Ctrl-C, print what is known, and raise it again.

    Args:
        learner_ms: milliseconds that the program computes between two batches.
        is_json, quiet: options of the command.
        **of_request: the other arguments of `make_request`.
    Raises:
        UsageError: there is no such env.
        StepmillError: the env raised, hung or crashed.
    """
    search_current_directory()
    request = make_request(**of_request, learner_s=learner_ms / 1000)
    name = request.env.env_id
    with Tuner(request) as tuner:
        try:
            with show_progress(name, request.budget_s, is_quiet=quiet) as show:
                tuner.on_progress = lambda what, elapsed_s: show(elapsed_s, f"{name}: {what}")
                tuner.run()
        except KeyboardInterrupt:
            if not tuner.has_result:
                raise
            tuner.is_interrupted = True
        result = tuner.result()
    print(json.dumps(result.to_dict(), indent=2) if is_json else result, flush=True)
    if result.is_interrupted:
        raise KeyboardInterrupt
