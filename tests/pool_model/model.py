"""Predicts what a pool returns. Everything that is not certain, because a worker has died or may have, is said to be so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepmill.spec.options import EnvState
from tests.pool_model.envs import (
    BUMPS,
    COUNT,
    FAILURES,
    HANG,
    IDENTITY,
    KILL,
    LEVEL,
    MIX,
    ONCE,
    SEED,
    STEP,
    UNREADABLE,
    Obs,
    Place,
    first_of_kernel,
    first_place,
    next_place,
)
from tests.pool_model.records import (
    EXHAUSTED,
    FAULTED,
    IDLE,
    NEEDS_RESET,
    PENDING,
    UNKNOWN,
    Command,
    Env,
    EnvObject,
    Knowledge,
    Row,
)
from tests.pool_model.results import Result, WrongError, require, same
from tests.pool_model.setup import Setup

MANY = 10**6
MAX_LOST_RESETS = 5  # of an env between two results, if faults or interrupts have cost some
MAX_LOST_IN_STORMS = 50


def derive_seed(base: int, env_id: int, episode: int) -> int:
    """Return the seed of an episode, as `_native/shared/seeds.hpp` does."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        return x ^ (x >> 31)

    return mix((mix((mix(base) + env_id) & (2**64 - 1)) + episode) & (2**64 - 1)) >> 33


@dataclass
class PoolModel:
    """All envs of a pool."""

    setup: Setup
    worker_of: Sequence[int]
    objects: list[EnvObject] = field(default_factory=list)
    envs: list[Env] = field(default_factory=list)
    has_deaths: bool = False  # a call may meet a worker that is still being restarted
    is_revived: bool = False  # whether living workers were restarted, which no policy hides

    def __post_init__(self) -> None:
        each = self.setup.rows_each
        self.is_kernel = self.setup.kind == "kernel"
        num_objects = (self.setup.num_envs + self.setup.num_spares) * each
        self.objects = [EnvObject(-1 if self.is_kernel else number) for number in range(num_objects)]
        nowhere = Place((0,) * 7, 0)
        self.envs = [
            Env(number, [Row(own, nowhere) for own in self.objects[number * each : (number + 1) * each]])
            for number in range(self.setup.num_envs)
        ]
        if (
            HANG in self.setup.verbs or self.setup.is_stormy
        ):  # with time limits, which other envs may exceed on a busy machine
            self.has_deaths = True
            for env in self.envs:
                env.risks, env.is_loose = MANY, True
        self.mode = self.setup.options["autoreset_mode"]
        self.seeding = self.setup.options["seeding"]
        self.budget = self.setup.options.get("num_episodes")

    # ---- rules --------------------------------------------------------------------------------------------------

    def policy_of(self, verb: int) -> str:
        """Return the policy for a failure."""
        on_fault: str = self.setup.options["on_fault"]
        return on_fault if verb in (KILL, HANG) else self.setup.options.get("restarts", {}).get("on_raise") or on_fault

    @property
    def policies(self) -> set[str]:
        return {self.policy_of(STEP), self.policy_of(KILL)}

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
        return (
            []
            if is_reset
            else [action for action, row in pairs if action % ONCE in FAILURES and not (skips and row.is_over)]
        )

    def must_fail(self, env: Env) -> bool:
        """Whether the command cannot have an ordinary result."""
        if env.command is not None and env.command.verb != STEP:
            return self.policy_of(env.command.verb % ONCE) == "raise"
        return any(not (verb & ONCE and self.policy_of(verb % ONCE) == "replay") for verb in self.verbs_of(env))

    def may_fail(self, env: Env) -> bool:
        """Whether the command may have a fault, or the env be lost."""
        is_in_process = self.setup.options["backend"] != "process"
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
        known = [Knowledge.of(row) for row in env.rows]
        env.command = Command(actions, [None] * len(env.rows), env.bonus, STEP, known)
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
        known = [Knowledge.of(row) for row in env.rows]
        env.command = Command(None, seeds, env.bonus if bonus is None else bonus, verb, known)
        env.status = PENDING
        for row in env.rows:
            row.is_over, row.good_left = True, None
            if not self.setup.hides_faults:
                row.object.bumps = None  # its worker may have died: calls are not repeated
        env.is_loose |= verb != STEP
        self.add_risks(env, [verb])

    def add_risks(self, env: Env, verbs: Sequence[int]) -> None:
        """Record that a command may be the death of the env's worker."""
        if any(verb % ONCE in (KILL, HANG) for verb in verbs):
            self.lose_worker(self.worker_of[env.env_id])

    def lose_worker(self, worker: int, *, is_revived: bool = False) -> None:
        """Record that a worker is about to die: each of its envs is lost, and a result of it may still come."""
        self.is_revived |= is_revived
        self.has_deaths = True
        for env in self.envs:
            if self.worker_of[env.env_id] == worker or self.setup.num_spares:
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
            self._check_replay(env, results)
        else:
            require(self.may_succeed(env), f"the action of env {env_id} must fail: {results}")
        is_between = all(row.is_over for row in env.rows)
        require(not (has_fault and is_between), f"env {env_id} has a fault between two episodes: {results}")
        env.is_loose |= has_fault
        for place, (row, result) in enumerate(zip(env.rows, results, strict=True)):
            was_over, known = row.is_over, env.command.known[place]
            self._receive_row(env, row, place, result)
            self._learn(row, result, known, was_over=was_over)
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
            shown = result.obs if result.final_obs is None else result.final_obs
            self._receive_end_or_next(env, row, place, result, self.next_of(env, place, shown))

    def next_of(self, env: Env, place: int = 0, obs: Obs | None = None) -> Place:
        """Return where the step that an env does leads a row; `obs` chooses among several levels and bumps."""
        assert env.command is not None
        assert env.command.actions is not None
        known = env.command.known[place]
        level = obs[LEVEL] if obs is not None and obs[LEVEL] in known.levels else max(known.levels)
        bumps = (
            obs[BUMPS]
            if obs is not None and (known.bumps is None or obs[BUMPS] in known.bumps)
            else max(known.bumps or {0})
        )
        return next_place(env.rows[place].place, env.command.actions[place], level, bumps)

    def _receive_end_or_next(self, env: Env, row: Row, place: int, result: Result, then: Place) -> None:
        assert env.command is not None
        assert env.command.actions is not None
        wanted = Result(then.obs, then.reward, then.ends, self._info(then))
        row.place, row.is_over = then, any(then.ends)
        if env.command.actions[place] % ONCE == UNREADABLE:
            wanted.omitted = ((env.env_id, "info['page']"),)
        if row.is_over:
            wanted.episode = None if self.setup.kind == "batched" and not result.episode else (then.total, then.clock)
            if self.mode == "SameStep":
                self._turn(env, row, place, result, wanted)
        same(result, wanted, f"env {env.env_id}: the next result")

    def _receive_fault(self, env: Env, row: Row, place: int, result: Result) -> None:
        """Check the row of an episode that was cut short, or of one that had ended before."""
        require(result.fault and result.fault["message"], f"no cause in {result}")
        wanted = Result(row.place.obs, 0.0, (False, not row.is_over), self._info(None), fault=result.fault)
        if not row.is_over:
            # A worker may have died while it wrote the result of one more step.
            ends = [(row.place.total, row.place.clock), *self._ends_after_one_more(env, place)]
            require(
                result.episode in ends or (self.setup.kind == "batched" and result.episode is None),
                f"the return and length of an episode that was cut short: {result}; possible are {ends}",
            )
            wanted.episode = result.episode
            if self.mode == "SameStep":
                self._turn(env, row, place, result, wanted)
                wanted.final_info = {}
        row.is_over = self.mode != "SameStep" or row.is_over
        same(result, wanted, f"env {env.env_id}: a fault")

    def _ends_after_one_more(self, env: Env, place: int) -> list[tuple[float, int]]:
        """Return what the return and length may be of an episode that was cut short after the step under way."""
        assert env.command is not None
        if env.command.actions is None:
            return []
        here, action = env.rows[place].place, env.command.actions[place]
        nexts = [next_place(here, action, level) for level in env.command.known[place].levels]
        return [(each.total, each.clock) for each in nexts]

    def _check_replay(self, env: Env, results: Sequence[Result]) -> None:
        """Check that an env whose episodes are replayed has no fault that a replay should have repaired."""
        text = "".join(str(result.fault) for result in results)
        # A spare may have been reset long before it began to serve.
        is_called = any(row.object.num_calls > (0 if self.setup.num_spares else row.calls_before) for row in env.rows)
        # The effects of calls on an env that is not in a process cannot be undone.
        is_undone = self.setup.options["backend"] == "process" or not (is_called or env.is_called)
        has_differed = is_undone and "gave another result" in text
        require(not has_differed, f"env {env.env_id} was not replayed as it was played: {results}")
        may_break = self.setup.options["backend"] != "process" and is_called and "not_replayable" in text
        is_hidden = self.setup.hides_faults and not may_break
        require(not is_hidden, f"env {env.env_id} has a fault, and should have been replayed: {results}")

    def _learn(self, row: Row, result: Result, known: Knowledge, *, was_over: bool) -> None:
        """Reduce the possible states of an object to what its observation shows, unless it was called since."""
        has_ended = result.fault is not None or any(result.ends)
        require(
            row.good_left != 0 or result.fault is not None,
            f"a rebuilt env goes on in the middle of an episode: {result}",
        )
        row.good_left = None if has_ended or not row.good_left else row.good_left - 1
        own, is_new = row.object, was_over or (any(result.ends) and not row.is_over)
        if is_new:
            row.calls_before = known.num_calls
        if result.fault is None and not was_over and known.num_calls == own.num_calls:
            own.levels, own.bumps = {result.obs[LEVEL]}, {result.obs[BUMPS]}
        # An object may have been rebuilt, and calls are not repeated; a death between episodes is not visible in results.
        if not self.setup.hides_faults and (result.fault is not None or was_over or has_ended):
            own.bumps = None

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
            return {"mix": place.obs[MIX] if place else 0}
        return place.info if place else {}

    def _first_info(self, env: Env, place: int, row: Row, result: Result) -> dict[str, Any]:
        """Return the info of a reset, which says which seed was given."""
        assert env.command is not None
        if self.is_kernel:
            return {"mix": 0}
        if self.setup.num_spares:
            return {"given": result.info.get("given")} if "given" in result.info else {"given": -1}
        return {"given": -1 if row.object.count else row.object.seed}

    def _begin(self, env: Env, row: Row, place: int, obs: Obs) -> Place:
        """Find where an episode begins that has this first observation, and adopt it."""
        assert env.command is not None
        levels, is_any = env.command.known[place].levels, self.setup.num_spares or self.setup.is_overlapped
        if env.is_loose or self.may_fail(env):
            levels = levels | row.object.past_levels  # the reset may repeat one that has failed
        # A reset in advance may have been made before the level was set.
        level = obs[LEVEL] if is_any or obs[LEVEL] in levels else max(levels)
        given = env.command.seeds[place]
        if self.setup.num_spares:
            return self._begin_with_spares(env, row, obs, given)
        starts = []
        for seed, count, episode in self._origins(env, place, given, obs):
            start = self._first(row.object.identity, seed, count, env.command.bonus, level, obs)
            starts.append(
                start.obs
            )  # of one that follows a reset that was dropped, or an object that was built again, too
            if start.obs == obs:
                row.object.seed, row.object.count = seed, count
                env.is_unknown &= None in env.command.seeds
                env.base = seed - place if given is not None or env.base is None else env.base
                env.episode = episode
                return start
        raise WrongError(f"env {env.env_id} begins an episode with {obs}; possible are {starts}")

    def _first(self, identity: int, seed: int, count: int, bonus: int, level: int, obs: Obs) -> Place:
        if not self.is_kernel:
            return first_place(identity, seed, count, bonus, level, obs[BUMPS], self.setup.length_of(identity))
        return first_of_kernel(seed, count) if seed >= 0 else Place((-1, obs[1], -1, 0, obs[1], 0, 0), 1 + obs[1] % 6)

    def _origins(self, env: Env, place: int, given: int | None, obs: Obs) -> list[tuple[int, int, int]]:
        """Return the seed, the resets since that seed, and the number of the episode with which it may begin."""
        own = env.rows[place].object
        is_loose = env.is_loose or self.setup.is_overlapped  # a reset in advance may not have been used
        most = MAX_LOST_IN_STORMS if self.setup.is_stormy else MAX_LOST_RESETS
        lost = range(most if is_loose else 1)
        if given is not None:
            return [(given, 0, 0)]
        if env.is_unknown:
            return [(obs[SEED], obs[COUNT], 0) if not self.is_kernel else (-1, 0, 0)]
        going_on = [(own.seed, own.count + 1 + more, env.episode) for more in lost]
        if self.seeding == "continue":
            rebuilt = [(-1, 1 + more, 0) for more in lost] if env.is_loose else []
            return going_on + rebuilt
        if env.base is None:
            return [(obs[SEED], 0, 0)] if not self.is_kernel else [(-1, 0, 0)]
        if self.seeding == "fixed":
            return [(env.base, 0, 0)]
        episodes = [env.episode + (place == 0) + more for more in lost]  # the first row has counted the reset
        seeds = [derive_seed(env.base, env.env_id, episode) if episode else env.base for episode in episodes]
        reset = [(seed + place, 0, episode) for seed, episode in zip(seeds, episodes, strict=True)]
        return reset + (going_on if self.setup.kind == "batched" else [])  # whose rows reset themselves

    def _begin_with_spares(self, env: Env, row: Row, obs: Obs, given: int | None) -> Place:
        """Let any object begin an episode that serves no other env; a seed that was given is its seed."""
        identity, seed, count = obs[IDENTITY], obs[SEED], obs[COUNT]
        serving = [
            other.rows[0].object.identity
            for other in self.envs
            if other is not env and not other.rows[0].is_over and other.status in (IDLE, PENDING)
        ]
        require(0 <= identity < len(self.objects) and identity not in serving, f"object {identity} serves {serving}")
        require(given in (None, seed), f"env {env.env_id} was reset with seed {given}, not {seed}")
        start = first_place(identity, seed, count, 0, obs[LEVEL], obs[BUMPS], self.setup.length_of(identity))
        is_new = self.seeding != "per_episode" or given is not None or seed != row.place.obs[SEED]
        require(is_new, f"env {env.env_id} begins the same episode again, with seed {seed}")
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
                env.is_unknown, env.num_ended = not self.setup.is_stormy, UNKNOWN
            env.status = state
