"""`MultiEnv`: several envs stepped together, with lists in and lists out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from stepmill.frontends.multi_env.remote import SubprocessEnv, restart_info
from stepmill.frontends.multi_env.shared_pool import Answer, SharedPool
from stepmill.spec.errors import EnvError, StepmillError, UsageError, join_errors
from stepmill.spec.options import BackendName, PoolOptions

if TYPE_CHECKING:
    from typing_extensions import Self

Columns = tuple[list[Any], ...]
Row = tuple[Any, Any, Any, Any]
_SKIPPED: Row = (None, None, None, None)


class StepApi(str, Enum):
    """What `MultiEnv.step` and `MultiEnv.reset` return."""

    GYM = "gym"  # step: obs, rewards, terminals, infos; reset: obs
    GYMNASIUM = "gymnasium"  # step: obs, rewards, terminated, truncated, infos; reset: obs, infos


@dataclass(frozen=True)
class _Lane:
    """The envs of one shared pool. `places[i]`: which env of the MultiEnv has number `ids[i]` in the shared pool."""

    shared: SharedPool
    ids: tuple[int, ...]
    places: dict[int, int]
    is_whole: bool  # all envs of the shared pool, in its order, and nothing else

    def leave(self) -> None:
        """Close these envs."""
        self.shared.leave_all(self.ids)


class MultiEnv:
    """Steps several envs at the same time, without a thread or a pipe for each.

    Envs that `create_subprocess_envs` made together take one step of one pool. SubprocessEnvs that were made one by
    one are driven side by side, and so is any other env, which is stepped in this process.

    When an episode has ended, the next `step` of that env begins a new one: its action is ignored, and its first
    observation is what the step returns, with reward 0 (actorcritic applied the action to the new episode, and nobody
    saw the first observation: M-B2). An episode that a crash ended is terminal, with infos "worker_restarted",
    "TimeLimit.truncated" and "fault" (M-B3). A time limit that an env with five values reports is "TimeLimit.truncated",
    too.

    Args:
        envs: initialized SubprocessEnvs, or envs.
        step_api: four lists as actorcritic has them, or Gymnasium's five.
        check_spaces: whether envs whose spaces differ from those of env 0 are refused (M-B8).
    Raises:
        UsageError: no envs, or envs with different spaces.
        LifeCycleError: an env is not initialized.

    Attributes:
        partial_results: what the other envs returned in the last step that raised; None for those that failed.
    """

    def __init__(
        self, envs: Sequence[Any], *, step_api: StepApi | str = StepApi.GYM, check_spaces: bool = True
    ) -> None:
        self._envs = list(envs)
        if not self._envs:
            raise UsageError("a MultiEnv needs at least one env; envs is empty")
        self._api = StepApi(step_api)
        self._members = [env if isinstance(env, SubprocessEnv) else _local(env) for env in self._envs]
        self._lanes = _lanes(self._members)
        self._last_obs: list[Any] = [None] * len(self._envs)
        self.observation_space = self._members[0].observation_space
        self.action_space = self._members[0].action_space
        self.partial_results: Columns | None = None
        if check_spaces:
            self._check_spaces()

    @property
    def envs(self) -> list[Any]:
        """The envs that were given."""
        return self._envs

    def __len__(self) -> int:
        """Return the number of envs."""
        return len(self._envs)

    # ---- stepping and resetting ---------------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        kwargs: Sequence[Mapping[str, Any]] | None = None,
        env_ids: Sequence[int] | None = None,
    ) -> Any:
        """Reset all envs, or some; needed once, before the first step, and after an env has raised.

        Args:
            seed: s seeds env i with s + i; a list has one per env that is reset. Old envs get it by `seed()`.
            kwargs: keyword arguments of `reset`, one mapping per env that is reset.
            env_ids: which envs; None is all.
        Returns:
            A list of observations, one per env that was reset; with StepApi.GYMNASIUM a list of infos beside it.
        Raises:
            EnvError: an env raised.
        """
        places = list(range(len(self))) if env_ids is None else [self._checked_place(place) for place in env_ids]
        seeds = self._spread("seed", [seed + place for place in places] if isinstance(seed, int) else seed, places)
        arguments = self._spread("kwargs", kwargs, places)
        for place, own_seed, own in zip(places, seeds, arguments, strict=True):
            shared, index = self._members[place].place
            shared.send_reset(index, own_seed, own or {})
        chosen = set(places)
        lanes = [lane for lane in self._lanes if chosen & set(lane.places.values())]
        rows = self._collect(lanes)
        observations = [rows[place][0] for place in places]
        return observations if self._api is StepApi.GYM else (observations, [rows[place][3] for place in places])

    def step(self, actions: Sequence[Any]) -> Columns:
        """Step all envs and wait for all.

        Args:
            actions: one per env; an env whose action is None is left alone, and its results are None.
        Returns:
            Lists with one entry per env: observations, rewards, terminals, infos; with StepApi.GYMNASIUM terminated
            and truncated in the place of terminals.
        Raises:
            EnvError: an env raised. The others have been stepped: `partial_results`. Reset the one that raised.
            WorkerDied: a process ended once more than its restarts allow.
        """
        actions = list(actions)
        if len(actions) != len(self._envs):
            raise UsageError(
                f"{len(actions)} actions are given for {len(self._envs)} envs; give one, or None, for each"
            )
        skips = any(action is None for action in actions)
        lanes = self._lanes
        if len(lanes) == 1 and lanes[0].is_whole and not skips:
            lanes[0].shared.send(actions, None, is_driven=True)
            return self._columns(self._collect(lanes))
        sent: list[_Lane] = []
        refusals: list[StepmillError] = []
        for lane in lanes:
            ids = [env_id for env_id in lane.ids if actions[lane.places[env_id]] is not None]
            try:
                if ids:
                    lane.shared.send([actions[lane.places[env_id]] for env_id in ids], ids, is_driven=True)
                    sent.append(lane)
            except StepmillError as refusal:  # the other lanes go on: what they were given must be received
                refusals.append(_at_place(refusal, lane))
        return self._columns(self._collect(sent, refusals))

    def close(self) -> None:
        """Close all envs, in about two seconds at most. Idempotent."""
        for member in self._members:
            member.retire()
        if len(self._lanes) == 1:
            self._lanes[0].leave()
            return
        with ThreadPoolExecutor(min(len(self._lanes), 32), thread_name_prefix="stepmill-close") as threads:
            for done in [threads.submit(lane.leave) for lane in self._lanes]:
                done.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    # ---- inner --------------------------------------------------------------------------------------------------

    def _collect(self, lanes: Sequence[_Lane], refusals: Sequence[StepmillError] = ()) -> list[Row]:
        """Return a row per env, waiting for everything that these lanes have been given; `refusals` are raised after it."""
        rows = [_SKIPPED] * len(self._envs)
        errors = list(refusals)
        for lane in lanes:
            answers, faults, failures = lane.shared.recv()
            places, last_obs = lane.places, self._last_obs
            for env_id, (is_step, value) in answers.items():
                place = places[env_id]
                if not is_step or env_id in faults:
                    rows[place] = self._unusual_row(place, Answer(is_step, value, faults.get(env_id)))
                    continue
                last_obs[place] = value[0]
                rows[place] = value if len(value) == 4 else (value[0], value[1], (value[2], value[3]), value[4])
            errors += [_at_place(error, lane) for error in failures]
        if errors:
            self.partial_results = self._columns(rows)
            raise join_errors(errors)
        return rows

    def _unusual_row(self, place: int, answer: Answer) -> Row:
        """Return the row of an env whose episode was cut short, or which was reset."""
        if answer.fault is not None:
            return self._last_obs[place], 0.0, (False, True), restart_info(answer.fault)
        obs, info = answer.value if self._members[place].has_reset_info else (answer.value, {})
        self._last_obs[place] = obs
        return obs, 0.0, (False, False), info

    def _columns(self, rows: Sequence[Row]) -> Columns:
        observations, rewards, ends, infos = (list(column) for column in zip(*rows, strict=True))
        if self._api is StepApi.GYMNASIUM:
            pairs = [_as_pair(end, info) for end, info in zip(ends, infos, strict=True)]
            return observations, rewards, [pair[0] for pair in pairs], [pair[1] for pair in pairs], infos
        for place, end in enumerate(ends):
            if type(end) is tuple:
                ends[place] = end[0] or end[1]
                if end[1] and not end[0]:
                    infos[place].setdefault("TimeLimit.truncated", True)
        return observations, rewards, ends, infos

    def _spread(self, name: str, values: Any, places: Sequence[int]) -> list[Any]:
        if values is None:
            return [None] * len(places)
        if len(values) != len(places):
            raise UsageError(f"{name} has {len(values)} entries for {len(places)} envs; give one for each")
        return list(values)

    def _checked_place(self, place: int) -> int:
        if not 0 <= place < len(self._envs):
            raise UsageError(f"env {place} does not exist; this MultiEnv has envs 0 to {len(self._envs) - 1}")
        return int(place)

    def _check_spaces(self) -> None:
        for place, member in enumerate(self._members):
            for what, own, first in (
                ("observation space", member.observation_space, self.observation_space),
                ("action space", member.action_space, self.action_space),
            ):
                if not _is_equal(own, first):
                    raise UsageError(
                        f"env {place} has another {what} than env 0: {own} instead of {first}; give envs that agree, "
                        "or check_spaces=False"
                    )


def _is_equal(one: object, other: object) -> bool:
    try:
        return one is other or bool(one == other)
    except ValueError:  # spaces made of arrays, which have no single truth value
        return True


def _as_pair(end: Any, info: Any) -> tuple[Any, Any]:
    """Return (terminated, truncated) of an env with either API; old gym tells a time limit by its info."""
    if type(end) is tuple or end is None:
        return (None, None) if end is None else (end[0], end[1])
    is_cut = bool(end) and isinstance(info, dict) and bool(info.get("TimeLimit.truncated", False))
    return bool(end) and not is_cut, is_cut


def _at_place(error: StepmillError, lane: _Lane) -> StepmillError:
    """Return an error with the env's place in the MultiEnv, where that is not its number in its shared pool."""
    env_id = getattr(error, "env_id", None)
    if isinstance(env_id, int) and lane.places.get(env_id, env_id) != env_id:
        place = lane.places[env_id]
        error.env_id = place  # type: ignore[attr-defined]  # those that have one
        error.message = f"env {place} of this MultiEnv: {error.message}"
    elif not isinstance(error, EnvError) and list(lane.places.values()) != list(lane.ids):
        error.message = f"envs {sorted(lane.places.values())} of this MultiEnv: {error.message}"
    return error


def _lanes(members: Sequence[SubprocessEnv]) -> list[_Lane]:
    places: dict[SharedPool, dict[int, int]] = {}
    for place, member in enumerate(members):
        shared, index = member.place
        own = places.setdefault(shared, {})
        if index in own:
            raise UsageError(f"envs {own[index]} and {place} are one and the same env; give each env once")
        own[index] = place
    return [
        _Lane(shared, tuple(sorted(own)), own, list(own.items()) == [(i, i) for i in range(shared.num_envs)])
        for shared, own in places.items()
    ]


def _local(env: object) -> SubprocessEnv:
    """Return an env of this process as a member: it is stepped in line, by the same rules."""
    member = SubprocessEnv(lambda: env, options=PoolOptions(backend=BackendName.SERIAL))
    member.start()
    member.initialize()
    return member
