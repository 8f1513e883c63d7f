"""`MultiEnv`: steps several envs together; arguments and results are lists with one entry per env."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any

from stepmill.frontends.multi_env.remote import LifeCycleError, SubprocessEnv, has_overrides, restart_info
from stepmill.frontends.multi_env.shared_pool import SharedPool
from stepmill.spec.closing import CloseAtEnd
from stepmill.spec.errors import EnvError, StepmillError, UsageError, join_errors
from stepmill.spec.options import BackendName, PoolOptions

Columns = tuple[list[Any], ...]
Row = tuple[Any, Any, Any, Any]
_SKIPPED: Row = (None, None, None, None)


class ClosedMultiEnvError(LifeCycleError, RuntimeError):
    """A MultiEnv was used after it was closed."""


class StepApi(str, Enum):
    """The form in which `MultiEnv.step` and `MultiEnv.reset` return results."""

    GYM = "gym"  #: `step` returns obs, rewards, terminals and infos, and `reset` returns obs.
    GYMNASIUM = "gymnasium"  #: `step` returns obs, rewards, terminated, truncated and infos, and `reset` obs and infos.


@dataclass(frozen=True)
class _PoolShare:
    """The envs of a MultiEnv that one shared pool runs.

    Attributes:
        ids: the numbers of these envs in the shared pool, in order.
        positions: by number in the shared pool, the env's index in the MultiEnv.
        is_whole: whether these are all envs of the shared pool, in its order.
    """

    shared: SharedPool
    ids: tuple[int, ...]
    positions: dict[int, int]
    is_whole: bool

    def close(self) -> None:
        """Close these envs."""
        self.shared.close_envs(self.ids)


class MultiEnv(CloseAtEnd):
    """Steps several envs at the same time, without a thread or a pipe for each.

    Envs that `create_subprocess_envs` made together are stepped by one pool. SubprocessEnvs that were made one by one are
    stepped at the same time. The overrides of a subclass of SubprocessEnv are called in a thread for each env. Any other env
    is stepped in this process.

    After the end of an episode, the next `step` of that env begins a new one: it ignores the action, and returns the first
    observation with reward 0. (actorcritic applies the action to the new episode and drops the first observation.)
    If a worker dies, the episodes of its envs are terminal, with infos "worker_restarted", "TimeLimit.truncated" and "fault".
    "TimeLimit.truncated" also marks an episode that an env with five values reports as truncated.

    Args:
        envs: initialized SubprocessEnvs, or envs.
        step_api: whether results are actorcritic's four lists, or Gymnasium's five.
        check_spaces: True refuses envs whose spaces differ from those of env 0.
    Raises:
        UsageError: there are no envs, their spaces differ, or an env is given twice.
        LifeCycleError: an env is not initialized.

    Attributes:
        partial_results: the results of the last step that raised an error, with None for the envs that failed.
    """

    def __init__(
        self, envs: Sequence[Any], *, step_api: StepApi | str = StepApi.GYM, check_spaces: bool = True
    ) -> None:
        self._envs = list(envs)
        if not self._envs:
            raise UsageError("a MultiEnv needs at least one env; envs is empty")
        self._api = StepApi(step_api)
        self._members = [_member(env) for env in self._envs]
        self._shares = _shares(self._members)
        self._last_obs: list[Any] = [None] * len(self._envs)
        self.partial_results: Columns | None = None
        if check_spaces:
            self._check_spaces()

    @property
    def envs(self) -> list[Any]:
        """The envs, as they were given."""
        return self._envs

    @property
    def observation_space(self) -> Any:
        """The observation space of env 0."""
        return self._members[0].observation_space

    @property
    def action_space(self) -> Any:
        """The action space of env 0."""
        return self._members[0].action_space

    def __len__(self) -> int:
        """Return the number of envs."""
        return len(self._envs)

    # ---- stepping and resetting --------------------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        kwargs: Sequence[Mapping[str, Any]] | None = None,
        env_ids: Sequence[int] | None = None,
    ) -> Any:
        """Reset all envs, or some. This is needed before the first step, and after an env has raised.

        Args:
            seed: s gives env i the seed s + i; a list has one seed per env that is reset. Envs of old gym get it by `seed()`.
            kwargs: keyword arguments of `reset`, one mapping per env that is reset.
            env_ids: the envs; None means all.
        Returns:
            A list of observations, one per env that was reset; with StepApi.GYMNASIUM also a list of infos.
        Raises:
            EnvError: an env raised.
        """
        self._open_shares()
        positions = list(range(len(self)) if env_ids is None else env_ids)
        for position in positions:
            if not 0 <= position < len(self):
                raise UsageError(f"env {position} does not exist; this MultiEnv has envs 0 to {len(self) - 1}")
        seeds = self._per_env(
            "seed", [seed + position for position in positions] if isinstance(seed, int) else seed, positions
        )
        arguments = self._per_env("kwargs", kwargs, positions)
        for position, own_seed, own in zip(positions, seeds, arguments, strict=True):
            shared, index = self._members[position].pool_position
            shared.send_reset(index, own_seed, own or {})
        chosen = set(positions)
        shares = [share for share in self._shares if chosen & set(share.positions.values())]
        rows = self._collect(
            [(share, [each for each in share.ids if share.positions[each] in chosen]) for share in shares]
        )
        observations = [rows[position][0] for position in positions]
        return (
            observations if self._api is StepApi.GYM else (observations, [rows[position][3] for position in positions])
        )

    def step(self, actions: Sequence[Any]) -> Columns:
        """Step all envs and wait for all of them.

        Args:
            actions: one per env; an env whose action is None is not stepped, and its results are None.
        Returns:
            Lists with one entry per env: observations, rewards, terminals, infos; with StepApi.GYMNASIUM terminated
            and truncated instead of terminals.
        Raises:
            EnvError: an env raised; reset it. The others have been stepped: see `partial_results`.
            WorkerDied: a process died more often than `max_restarts` allows.
            LifeCycleError: the MultiEnv was closed; also a RuntimeError.
        """
        actions = list(actions)
        if len(actions) != len(self._envs):
            raise UsageError(f"got {len(actions)} actions for {len(self._envs)} envs; give one, or None, for each")
        skips = any(action is None for action in actions)
        shares = self._open_shares()
        if len(shares) == 1 and shares[0].is_whole and not skips:
            shares[0].shared.send(actions, None, is_driven=True)
            return self._columns(self._collect([(shares[0], shares[0].ids)]))
        sent: list[tuple[_PoolShare, Sequence[int]]] = []
        refusals: list[StepmillError] = []
        for share in shares:
            ids = [env_id for env_id in share.ids if actions[share.positions[env_id]] is not None]
            try:
                if ids:
                    share.shared.send([actions[share.positions[env_id]] for env_id in ids], ids, is_driven=True)
                    sent.append((share, ids))
            except StepmillError as refusal:  # the results of the other pools must still be received
                refusals.append(_with_position(refusal, share))
        return self._columns(self._collect(sent, refusals))

    def close(self) -> None:
        """Close all envs, in about two seconds at most. Idempotent."""
        for member in self._members:
            member.mark_closed()
        shares, self._shares = self._shares, []
        if len(shares) == 1:
            shares[0].close()
            return
        with ThreadPoolExecutor(min(len(shares) or 1, 32), thread_name_prefix="stepmill-close") as threads:
            for done in [threads.submit(share.close) for share in shares]:
                done.result()

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _open_shares(self) -> list[_PoolShare]:
        if not self._shares:
            raise ClosedMultiEnvError("The MultiEnv was closed already; make another one.")
        return self._shares

    def _collect(
        self, sent: Sequence[tuple[_PoolShare, Sequence[int]]], refusals: Sequence[StepmillError] = ()
    ) -> list[Row]:
        """Wait for all results of envs of shares, and return a row per env; then raise `refusals` and the errors of the envs."""
        rows = [_SKIPPED] * len(self._envs)
        errors = list(refusals)
        for share, ids in sent:
            results, faults, failures = share.shared.recv(ids)
            positions, last_obs = share.positions, self._last_obs
            for env_id, (is_step, value) in results.items():
                position = positions[env_id]
                if not is_step or env_id in faults:
                    rows[position] = self._unusual_row(position, value, faults.get(env_id))
                    continue
                last_obs[position] = value[0]
                rows[position] = value if len(value) == 4 else (value[0], value[1], (value[2], value[3]), value[4])
            errors += [_with_position(error, share) for error in failures]
        if errors:
            self.partial_results = self._columns(rows)
            raise join_errors(errors)
        return rows

    def _unusual_row(self, position: int, value: Any, fault: Mapping[str, str] | None) -> Row:
        """Return the row of an env that was reset, or whose episode a fault ended."""
        if fault is not None:
            return self._last_obs[position], 0.0, (False, True), restart_info(fault)
        obs, info = self._members[position].split_reset(value)
        self._last_obs[position] = obs
        return obs, 0.0, (False, False), info

    def _columns(self, rows: Sequence[Row]) -> Columns:
        observations, rewards, ends, infos = (list(column) for column in zip(*rows, strict=True))
        if self._api is StepApi.GYMNASIUM:
            pairs = [_end_flags(end, info) for end, info in zip(ends, infos, strict=True)]
            return observations, rewards, [pair[0] for pair in pairs], [pair[1] for pair in pairs], infos
        for position, end in enumerate(ends):
            if type(end) is tuple:
                ends[position] = end[0] or end[1]
                if end[1] and not end[0]:
                    infos[position].setdefault("TimeLimit.truncated", True)
        return observations, rewards, ends, infos

    def _per_env(self, name: str, values: Any, positions: Sequence[int]) -> list[Any]:
        if values is None:
            return [None] * len(positions)
        if len(values) != len(positions):
            raise UsageError(f"{name} has {len(values)} entries for {len(positions)} envs; give one for each")
        return list(values)

    def _check_spaces(self) -> None:
        for position, member in enumerate(self._members):
            for what, own, first in (
                ("observation space", member.observation_space, self.observation_space),
                ("action space", member.action_space, self.action_space),
            ):
                if not _is_equal(own, first):
                    raise UsageError(
                        f"env {position} has another {what} than env 0: {own} instead of {first}; give envs with equal spaces, "
                        "or check_spaces=False"
                    )


def _is_equal(one: object, other: object) -> bool:
    try:
        return one is other or bool(one == other)
    except ValueError:  # spaces that are arrays: their comparison has no single truth value
        return True


def _end_flags(end: Any, info: Any) -> tuple[Any, Any]:
    """Return (terminated, truncated) of an env with either API; old gym marks a time limit in the info."""
    if type(end) is tuple or end is None:
        return (None, None) if end is None else (end[0], end[1])
    is_cut = bool(end) and isinstance(info, dict) and bool(info.get("TimeLimit.truncated", False))
    return bool(end) and not is_cut, is_cut


def _with_position(error: StepmillError, share: _PoolShare) -> StepmillError:
    """Return an error that names the env's index in the MultiEnv, if that differs from its number in the shared pool."""
    env_id = getattr(error, "env_id", None)
    if isinstance(env_id, int) and share.positions.get(env_id, env_id) != env_id:
        position = share.positions[env_id]
        error.env_id = position  # type: ignore[attr-defined]  # of the classes that have one
        error.message = f"env {position} of this MultiEnv: {error.message}"
    elif not isinstance(error, EnvError) and list(share.positions.values()) != list(share.ids):
        error.message = f"envs {sorted(share.positions.values())} of this MultiEnv: {error.message}"
    return error


def _shares(members: Sequence[SubprocessEnv]) -> list[_PoolShare]:
    positions: dict[SharedPool, dict[int, int]] = {}
    for position, member in enumerate(members):
        shared, index = member.pool_position
        own = positions.setdefault(shared, {})
        if index in own:
            raise UsageError(f"envs {own[index]} and {position} are the same env; give each env once")
        own[index] = position
    return [
        _PoolShare(shared, tuple(sorted(own)), own, list(own.items()) == [(i, i) for i in range(shared.num_envs)])
        for shared, own in positions.items()
    ]


def _member(env: object) -> SubprocessEnv:
    """Return the SubprocessEnv that steps an env: the env itself, or one of this process that calls the env's own methods."""
    backend = BackendName.SERIAL
    if isinstance(env, SubprocessEnv):
        if not has_overrides(env):
            return env
        backend = BackendName.THREAD  # each call waits for the process of its env
    member = SubprocessEnv(lambda: env, options=PoolOptions(backend=backend))
    member.start()
    member.initialize()
    return member
