"""Predicts what a pool returns. Everything that is not certain, because a worker has died or may have, is said to be so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepmill.spec.options import EnvState
from tests.fuzz.envs import DIE, HANG, ONCE, STEP, Obs, Place, first_of_kernel, first_place, next_place
from tests.fuzz.programs import Program
from tests.fuzz.results import Result

IDLE, PENDING, FAULTED, EXHAUSTED, NEEDS_RESET = "IDLE", "PENDING", "FAULTED", "EXHAUSTED", "NEEDS_RESET"
UNKNOWN = -(10**6)  # number of episodes
MANY = 10**6
MAX_LOST_RESETS = 5  # of an env between two results, if faults or interrupts have cost some


class WrongError(AssertionError):
    """A pool does not do what the model says."""


def require(condition: object, text: str) -> None:
    if not condition:
        raise WrongError(text)


def same(result: Result, wanted: Result, text: str) -> None:
    if result != wanted:
        raise WrongError(f"{text} is\n  {result}, not\n  {wanted}")


def derive_seed(base: int, env_id: int, episode: int) -> int:
    """Return the seed of an episode, as `_native/shared/seeds.hpp` does."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        return x ^ (x >> 31)

    return mix((mix((mix(base) + env_id) & (2**64 - 1)) + episode) & (2**64 - 1)) >> 33


@dataclass
class EnvObject:
    """What is known of an env object between episodes.

    Attributes:
        next_level: one that could not be set, but is perhaps set once the object is built again.
        past_levels: all that were set: the last one before a reset that is repeated is not known.
    """

    identity: int
    seed: int = -1
    count: int = 0
    level: int = 0
    next_level: int | None = None
    past_levels: set[int] = field(default_factory=lambda: {0})

    def set_level(self, level: int) -> None:
        self.level, self.next_level = level, None
        self.past_levels.add(level)


@dataclass
class Row:
    """One row of an env: its object, and where the result received last has left it."""

    object: EnvObject
    place: Place
    is_over: bool = True


@dataclass
class Command:
    """A command whose result was not received.

    Attributes:
        actions: of a step, one for each row; None for a reset.
        seeds: of a reset, one for each row.
        verb: how the reset fails.
        levels: of the objects, when the command was sent.
    """

    actions: Sequence[int] | None
    seeds: Sequence[int | None]
    bonus: int
    verb: int
    levels: Sequence[int]


@dataclass
class Env:
    """One env of the pool.

    Attributes:
        command: the one whose result was not received.
        bonus: the option that is kept for later resets.
        base, episode: the seed that the user gave last, and the number of the episode since.
        risks: how many deaths of its worker it may still have to show.
        is_loose: whether resets may have happened that no result has shown.
        is_unknown: whether the seed and number of its episode are not known, until a reset with a seed.
        is_skipped: whether it was exhausted in a step of all envs whose results were not received.
        is_called: whether something was called that a replay cannot undo.
    """

    env_id: int
    rows: list[Row]
    status: str = NEEDS_RESET
    command: Command | None = None
    bonus: int = 0
    base: int | None = None
    episode: int = 0
    num_ended: int = 0
    risks: int = 0
    is_loose: bool = False
    is_unknown: bool = False
    is_called: bool = False
    is_skipped: bool = False

    @property
    def is_pending(self) -> bool:
        return self.command is not None or self.is_skipped


@dataclass
class PoolModel:
    """All envs of a program's pool."""

    program: Program
    worker_of: Sequence[int]
    objects: list[EnvObject] = field(default_factory=list)
    envs: list[Env] = field(default_factory=list)
    has_deaths: bool = False  # a call may meet a worker that is still being restarted
    is_revived: bool = False  # whether living workers were restarted, which no policy hides

    def __post_init__(self) -> None:
        each = 2 if self.program.kind == "batched" else 1
        self.is_kernel = self.program.kind == "kernel"
        num_objects = (self.program.num_envs + self.program.num_spares) * each
        self.objects = [EnvObject(-1 if self.is_kernel else number) for number in range(num_objects)]
        nowhere = Place((0,) * 6, 0)
        self.envs = [
            Env(number, [Row(own, nowhere) for own in self.objects[number * each : (number + 1) * each]])
            for number in range(self.program.num_envs)
        ]
        if HANG in self.program.verbs:  # with time limits, which other envs may exceed on a busy machine
            self.has_deaths = True
            for env in self.envs:
                env.risks, env.is_loose = MANY, True
        self.mode = self.program.options["autoreset_mode"]
        self.seeding = self.program.options["seeding"]
        self.budget = self.program.options.get("num_episodes")

    # ---- rules --------------------------------------------------------------------------------------------------

    def policy_of(self, verb: int) -> str:
        """Return the policy for a failure."""
        on_fault: str = self.program.options["on_fault"]
        return on_fault if verb in (DIE, HANG) else self.program.options.get("restarts", {}).get("on_raise") or on_fault

    @property
    def policies(self) -> set[str]:
        return {self.policy_of(STEP), self.policy_of(DIE)}

    def is_stepping_refused(self, env: Env) -> bool:
        """Whether an idle env must be reset before a step."""
        return env.status in (FAULTED, NEEDS_RESET, EXHAUSTED) or (
            self.mode == "Disabled" and any(row.is_over for row in env.rows)
        )

    def verbs_of(self, env: Env) -> list[int]:
        """Return the failures that the actions of the command cause."""
        if env.command is None or env.command.actions is None:
            return []
        is_reset = self.mode == "NextStep" and all(row.is_over for row in env.rows)
        pairs = zip(env.command.actions, env.rows, strict=True)
        skips = self.mode == "NextStep"
        return [] if is_reset else [action for action, row in pairs if action % ONCE and not (skips and row.is_over)]

    def must_fail(self, env: Env) -> bool:
        """Whether the command cannot have an ordinary result."""
        if env.command is not None and env.command.verb != STEP:
            return self.policy_of(env.command.verb % ONCE) == "raise"
        return any(not (verb & ONCE and self.policy_of(verb % ONCE) == "replay") for verb in self.verbs_of(env))

    def may_fail(self, env: Env) -> bool:
        """Whether the command may have a fault, or the env be lost."""
        is_in_process = self.program.options["backend"] != "process"
        is_doubtful = env.is_called and is_in_process and "replay" in self.policies and bool(self.verbs_of(env))
        return self.must_fail(env) or env.risks > 0 or is_doubtful

    def is_faulty(self, env: Env) -> bool:
        """Whether the env may have a fault that its policy has not handled yet."""
        return self.may_fail(env) or bool(self.verbs_of(env)) or (env.command is not None and env.command.verb != STEP)

    def may_succeed(self, env: Env) -> bool:
        """Whether the command may have an ordinary result."""
        return not self.must_fail(env) or (env.risks > 0 and all(verb & ONCE for verb in self.verbs_of(env)))

    # ---- commands -----------------------------------------------------------------------------------------------

    def send(self, env: Env, actions: Sequence[int]) -> None:
        """Record that an env is stepping."""
        levels = [row.object.level for row in env.rows]
        env.command = Command(actions, [None] * len(env.rows), env.bonus, STEP, levels)
        env.status = PENDING
        self.add_risks(env, self.verbs_of(env))

    def reset(self, env: Env, seeds: Sequence[int | None], bonus: int | None, verb: int) -> None:
        """Record that an env is being reset; a result that was not received is dropped."""
        if env.command is not None:
            self.drop(env)
        env.is_skipped = False
        if env.status == EXHAUSTED:
            env.num_ended = 0
        if seeds[0] is not None:
            env.base, env.episode = seeds[0], -1  # the episode 0 is about to begin
        levels = [row.object.level for row in env.rows]
        env.command = Command(None, seeds, env.bonus if bonus is None else bonus, verb, levels)
        env.status = PENDING
        for row in env.rows:
            row.is_over = True
        env.is_loose |= verb != STEP
        self.add_risks(env, [verb])

    def add_risks(self, env: Env, verbs: Sequence[int]) -> None:
        """Record that a command may be the death of the env's worker."""
        if any(verb % ONCE in (DIE, HANG) for verb in verbs):
            self.lose_worker(self.worker_of[env.env_id])

    def lose_worker(self, worker: int, *, is_revived: bool = False) -> None:
        """Record that a worker is about to die: each of its envs is lost, and a result of it may still come."""
        self.is_revived |= is_revived
        self.has_deaths = True
        for env in self.envs:
            if self.worker_of[env.env_id] == worker or self.program.num_spares:
                env.risks += 1
                env.is_loose = True

    def drop(self, env: Env) -> None:
        """Record that a command was carried out, and that its result will not be received."""
        if self.budget is not None and env.command is not None and env.command.actions is not None:
            is_certain = not self.may_fail(env) and not env.is_loose
            has_ended = not env.rows[0].is_over and any(self.next_of(env).ends)
            env.num_ended = env.num_ended + has_ended if is_certain else UNKNOWN
            env.status = EXHAUSTED if env.num_ended >= self.budget else env.status
        is_reset = env.command is not None and env.command.actions is None
        env.is_unknown |= is_reset and self.is_faulty(env)
        for place, row in enumerate(env.rows):
            row.is_over = True
            seed = env.command.seeds[place] if is_reset and env.command is not None else None
            row.object.seed, row.object.count = (row.object.seed, row.object.count) if seed is None else (seed, 0)
        env.command, env.is_loose = None, True

    # ---- results ------------------------------------------------------------------------------------------------

    def receive(self, env_id: int, results: Sequence[Result], num_ended: Sequence[int]) -> None:
        """Check the results of an env, one per row. `num_ended`: how many episodes the envs have ended by now."""
        env = self.envs[env_id]
        if env.num_ended < 0:
            env.num_ended = num_ended[env_id] - any(results[0].ends)
        if env.is_skipped:
            env.is_skipped = False
            for row, result in zip(env.rows, results, strict=True):
                same(result, Result(row.place.obs, 0.0, (False, False), self._info(None)), "a row of an exhausted env")
            return
        require(env.command is not None, f"env {env_id} had no command: {results}")
        has_fault = any(result.fault for result in results)
        if has_fault:
            require(self.may_fail(env), f"env {env_id} has a fault without a cause: {results}")
            require(self.policies & {"truncate", "replay"}, f"env {env_id} has a fault that must be raised: {results}")
        else:
            require(self.may_succeed(env), f"the action of env {env_id} must fail: {results}")
        is_between = all(row.is_over for row in env.rows)
        require(not (has_fault and is_between), f"env {env_id} has a fault between two episodes: {results}")
        env.is_loose |= has_fault
        for place, (row, result) in enumerate(zip(env.rows, results, strict=True)):
            self._receive_row(env, row, place, result)
        if has_fault:
            env.risks, env.is_loose = max(0, env.risks - 1), True
        elif is_between:
            env.is_loose = env.risks > 0
        env.command, env.status = None, IDLE
        env.num_ended += any(results[0].ends)
        if self.budget is not None and any(results[0].ends) and env.num_ended >= self.budget:
            env.status = EXHAUSTED

    def _receive_row(self, env: Env, row: Row, place: int, result: Result) -> None:
        assert env.command is not None
        if result.fault is not None:
            self._receive_fault(env, row, place, result)
        elif env.command.actions is None or (row.is_over and self.mode == "NextStep"):
            start = self._begin(env, row, place, result.obs)
            same(
                result,
                Result(start.obs, 0.0, (False, False), self._first_info(env, place, row, result)),
                f"env {env.env_id}: a first result",
            )
            row.place, row.is_over = start, False
        else:
            self._receive_end_or_next(env, row, place, result, self.next_of(env, place))

    def next_of(self, env: Env, place: int = 0) -> Place:
        """Return where the step that an env does leads a row."""
        assert env.command is not None
        assert env.command.actions is not None
        return next_place(env.rows[place].place, env.command.actions[place], env.command.levels[place])

    def _receive_end_or_next(self, env: Env, row: Row, place: int, result: Result, then: Place) -> None:
        wanted = Result(then.obs, then.reward, then.ends, self._info(then))
        row.place, row.is_over = then, any(then.ends)
        if row.is_over:
            wanted.episode = None if self.program.kind == "batched" and not result.episode else (then.total, then.clock)
            if self.mode == "SameStep":
                self._turn(env, row, place, result, wanted)
        same(result, wanted, f"env {env.env_id}: the next result")

    def _receive_fault(self, env: Env, row: Row, place: int, result: Result) -> None:
        """Check the row of an episode that was cut short, or of one that had ended before."""
        require(result.fault and result.fault["message"], f"no cause in {result}")
        wanted = Result(row.place.obs, 0.0, (False, not row.is_over), self._info(None), fault=result.fault)
        if not row.is_over:
            require(
                result.episode is None or result.episode[1] in (row.place.clock, row.place.clock + 1),
                f"the length of an episode that was cut short: {result}",
            )
            wanted.episode = result.episode
            if self.mode == "SameStep":
                self._turn(env, row, place, result, wanted)
                wanted.final_info = {}
        row.is_over = self.mode != "SameStep" or row.is_over
        same(result, wanted, f"env {env.env_id}: a fault")

    def _turn(self, env: Env, row: Row, place: int, result: Result, wanted: Result) -> None:
        """Let the end of an episode, with SAME_STEP, be the beginning of the next, unless it was the last of a budget."""
        wanted.final_obs, wanted.final_info = wanted.obs, wanted.info
        wanted.info = wanted.info if self.is_kernel else {}
        if self.budget is not None and env.num_ended + 1 >= self.budget:
            return
        row.place = self._begin(env, row, place, result.obs)
        row.is_over = False
        wanted.obs, wanted.info = row.place.obs, self._first_info(env, place, row, result)

    def _info(self, place: Place | None) -> dict[str, Any]:
        """Return the info of a step; None has no info."""
        if self.is_kernel:
            return {"mix": place.obs[4] if place else 0}
        return place.info if place else {}

    def _first_info(self, env: Env, place: int, row: Row, result: Result) -> dict[str, Any]:
        """Return the info of a reset, which says which seed was given."""
        assert env.command is not None
        if self.is_kernel:
            return {"mix": 0}
        if self.program.num_spares:
            return {"given": result.info.get("given")} if "given" in result.info else {"given": -1}
        is_given = self.seeding != "continue" or env.command.seeds[place] is not None
        return {"given": row.object.seed if is_given else -1}

    def _begin(self, env: Env, row: Row, place: int, obs: Obs) -> Place:
        """Find where an episode begins that has this first observation, and adopt it."""
        assert env.command is not None
        level = env.command.levels[place]
        if self.program.num_spares or self.program.is_overlapped:
            level = obs[5]  # the reset may have been made before the level was set
        elif env.is_loose or self.may_fail(env) or row.object.next_level is not None:
            levels = {level, row.object.next_level, *row.object.past_levels}
            level = obs[5] if obs[5] in levels else level  # the reset may repeat one that has failed
        given = env.command.seeds[place]
        if self.program.num_spares:
            return self._begin_with_spares(env, row, obs, given)
        starts = []
        for seed, count, episode in self._origins(env, row.object, given, obs):
            start = self._first(row.object.identity, seed, count, env.command.bonus, level, obs)
            starts.append(
                start.obs
            )  # of one that follows a reset that was dropped, or an object that was built again, too
            if start.obs == obs:
                row.object.seed, row.object.count = seed, count
                env.is_unknown &= None in env.command.seeds
                env.base = seed if given is not None or env.base is None else env.base
                env.episode = episode
                return start
        raise WrongError(f"env {env.env_id} begins an episode with {obs}; possible are {starts}")

    def _first(self, identity: int, seed: int, count: int, bonus: int, level: int, obs: Obs) -> Place:
        if not self.is_kernel:
            return first_place(identity, seed, count, bonus, level)
        return first_of_kernel(seed, count) if seed >= 0 else Place((-1, obs[1], -1, 0, obs[1], 0), 1 + obs[1] % 6)

    def _origins(self, env: Env, own: EnvObject, given: int | None, obs: Obs) -> list[tuple[int, int, int]]:
        """Return the seed, the resets since that seed, and the number of the episode with which it may begin."""
        is_loose = env.is_loose or self.program.is_overlapped  # a reset in advance may not have been used
        lost = range(MAX_LOST_RESETS if is_loose else 1)
        if given is not None:
            return [(given, 0, 0)]
        if env.is_unknown:
            return [(obs[1], obs[2], 0) if not self.is_kernel else (-1, 0, 0)]
        if self.seeding == "continue":
            rebuilt = [(-1, 1 + more, 0) for more in lost] if env.is_loose else []
            return [(own.seed, own.count + 1 + more, 0) for more in lost] + rebuilt
        if env.base is None:
            return [(obs[1], 0, 0)] if not self.is_kernel else [(-1, 0, 0)]
        if self.seeding == "fixed":
            return [(env.base, 0, 0)]
        episodes = [env.episode + 1 + more for more in lost]
        seeds = [derive_seed(env.base, env.env_id, episode) if episode else env.base for episode in episodes]
        return [(seed, 0, episode) for seed, episode in zip(seeds, episodes, strict=True)]

    def _begin_with_spares(self, env: Env, row: Row, obs: Obs, given: int | None) -> Place:
        """Let any object begin an episode that serves no other env; a seed that was given is its seed."""
        identity, seed, count = obs[:3]
        serving = [
            other.rows[0].object.identity
            for other in self.envs
            if other is not env and not other.rows[0].is_over and other.status in (IDLE, PENDING)
        ]
        require(0 <= identity < len(self.objects) and identity not in serving, f"object {identity} serves {serving}")
        require(given in (None, seed), f"env {env.env_id} was reset with seed {given}, not {seed}")
        start = first_place(identity, seed, count, 0, obs[5])
        require(start.obs == obs, f"{obs} is not the beginning of an episode")
        row.object = self.objects[identity]
        row.object.seed, row.object.count = seed, count
        return start

    # ---- states -------------------------------------------------------------------------------------------------

    def check_states(self, states: Sequence[EnvState], pending: Sequence[bool], num_ended: Sequence[int]) -> None:
        """Compare the states of all envs; an env that may be lost may be FAULTED by now."""
        for env in self.envs:
            state, is_pending = states[env.env_id].name, pending[env.env_id]
            if env.is_skipped:
                require(state == "READY", f"env {env.env_id} is {state}, and not READY with an empty row")
                continue
            text = f"env {env.env_id} is {state}, {'' if is_pending else 'not '}pending; it must be {env.status}"
            require(is_pending == env.is_pending, text)
            if is_pending:
                require(state in ("BUSY", "READY") or (state == "FAULTED" and self.is_faulty(env)), text)
            elif (
                state == FAULTED
                and env.status in (IDLE, NEEDS_RESET)
                and env.risks
                and ("raise" in self.policies or self.is_revived)
            ):
                env.status, env.risks = FAULTED, env.risks - 1
            else:
                require(state == env.status, text)
            if self.budget is not None and not is_pending:
                if env.num_ended < 0:
                    env.num_ended = num_ended[env.env_id]
                require(num_ended[env.env_id] == env.num_ended, f"env {env.env_id} has ended {num_ended} episodes")

    def adopt_states(
        self,
        states: Sequence[EnvState],
        pending: Sequence[bool],
        sent: Mapping[int, Callable[[], None]],
        *,
        is_reset: bool,
    ) -> None:
        """Take over what a call that has raised has done: commands sent, results dropped, envs that have failed.

        `sent`: by env, the function that records the command that the call may have given it; it is a reset, or a step.
        """
        had_results = [env.is_pending for env in self.envs]
        for env in self.envs:  # all of them first: one of these commands may be the death of another env
            is_commanded = pending[env.env_id] and not env.is_pending
            is_faulted = states[env.env_id].name == FAULTED and not pending[env.env_id]
            has_failed = is_faulted and (is_reset or env.status != FAULTED)
            if env.env_id in sent and (is_commanded or has_failed):
                sent[env.env_id]()
        for env, was_pending in zip(self.envs, had_results, strict=True):
            state, is_pending = states[env.env_id].name, pending[env.env_id]
            require(not is_pending or env.is_pending, f"env {env.env_id} has got a command from nowhere")
            if is_pending:
                continue
            env.is_skipped = False
            has_failed_now = state == FAULTED and (env.command is not None or env.status != FAULTED)
            if env.command is not None:
                is_dropped = env.env_id in sent and (was_pending or is_reset)
                require(
                    is_dropped or (state == FAULTED and self.may_fail(env)),
                    f"the result of env {env.env_id} is lost; it is {state}",
                )
                self.drop(env)
            elif state == FAULTED and env.status != FAULTED:
                require(env.risks, f"env {env.env_id} has failed without a cause")
            if has_failed_now:  # an env that had failed before has not shown the death yet
                env.risks = max(0, env.risks - 1)
            if is_reset and env.env_id in sent:  # it may have been sent
                env.is_unknown, env.num_ended = True, UNKNOWN
            env.status = state
