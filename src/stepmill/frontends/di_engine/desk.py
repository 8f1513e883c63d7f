"""Between a manager and its pool: commands by env_id in, answers one by one out. It has no policy.

send_steps, send_reset ──► pool ──► receive ──► Answer(env_id, kind, value)
                                                  STEP   the timestep
                                                  RESET  the first observation
                                                  FAULT  the error, of a step or a reset
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from stepmill.envs.di_engine_managed import ManagedEnvMaker, ManagedSettings
from stepmill.frontends.di_engine.errors import TornError
from stepmill.frontends.di_engine.forms import Reader
from stepmill.pool.pool import Pool
from stepmill.spec.batch import Batch
from stepmill.spec.errors import (
    BadOutput,
    EngineBug,
    EnvError,
    EnvTimeout,
    RecvTimeout,
    StepmillError,
    UsageError,
    WorkerDied,
)
from stepmill.spec.options import AutoresetMode, BackendName, EnvState, PoolOptions


class Kind(IntEnum):
    """What a command, or an answer, is."""

    STEP = 0
    RESET = 1
    FAULT = 2


class Answer(NamedTuple):
    """What became of a command to one env. `of` is the command's kind."""

    env_id: int
    kind: Kind
    value: Any
    of: Kind


@dataclass(frozen=True, kw_only=True)
class DeskSettings:
    """How the envs of a manager run; fields of PoolOptions have their meaning there.

    Attributes:
        is_inplace: an env that ends its episode is reset in its worker, at once.
        options: of the engine; what is named beside it goes over it.
    """

    backend: BackendName
    managed: ManagedSettings
    options: PoolOptions = field(default_factory=PoolOptions)
    num_workers: int | None = None
    context: str = "fork"
    copy: bool = True
    is_inplace: bool = False
    linger_s: float = 0.0
    step_timeout_s: float | None = None
    reset_timeout_s: float | None = None

    def pool_options(self) -> PoolOptions:
        """Return the pool's part of it."""
        own: dict[str, object] = {}
        if self.backend is not BackendName.SERIAL:
            own = {"envs_per_worker": 1} if self.num_workers is None else {"num_workers": self.num_workers}
        if self.backend is BackendName.PROCESS:
            own["context"] = self.context
        return replace(
            self.options,
            backend=self.backend,
            autoreset_mode=AutoresetMode.SAME_STEP if self.is_inplace else AutoresetMode.DISABLED,
            copy=self.copy,
            episode_stats=False,
            linger_s=self.linger_s,
            step_timeout_s=self.step_timeout_s,
            reset_timeout_s=self.reset_timeout_s,
            **own,  # type: ignore[arg-type]  # checked by its __post_init__
        )


class Desk:
    """Envs that run, each commanded on its own. One command per env at a time.

    Attributes:
        pending: what each env that has not answered yet was commanded.
        spaces: observation, action and reward space of env 0.
        envs: the env objects by env_id, if they run in line.
    """

    def __init__(self, env_fns: Sequence[Callable[[], object]], settings: DeskSettings) -> None:
        self.envs: dict[int, object] = {}
        is_inline = settings.backend is BackendName.SERIAL
        makers = [
            ManagedEnvMaker(env_fn, env_id, settings.managed, self.envs if is_inline else None)
            for env_id, env_fn in enumerate(env_fns)
        ]
        self.pool = Pool(makers, options=settings.pool_options())
        self.spaces: tuple[Any, Any, Any] = cloudpickle.loads(self.pool.spec.spaces)
        self.pending: dict[int, Kind] = {}
        self._is_alone = settings.backend is BackendName.PROCESS and self.pool.num_workers == self.pool.num_envs
        self._reader = Reader(self.pool.spec.observation)
        self._lost: dict[int, StepmillError] = {}  # idle envs whose worker is gone
        self._unreadable: Exception | None = None

    def close(self) -> None:
        """End the envs. Idempotent."""
        self.pending.clear()
        self.pool.close()

    # ---- commands ------------------------------------------------------------------------------------------------

    def send_steps(self, actions: Mapping[int, Any]) -> list[Answer]:
        """Give each env its action; answers at once of envs that are known to be lost."""
        answers: list[Answer] = []
        wanted = dict(actions)
        while True:
            for env_id in [env_id for env_id in wanted if env_id in self._lost]:
                answers.append(Answer(env_id, Kind.FAULT, self._lost[env_id], Kind.STEP))
                del wanted[env_id]
            if not wanted:
                return answers
            try:
                if len(wanted) == self.pool.num_envs:  # named by nobody, they are stepped the fastest way
                    self.pool.send([wanted[env_id] for env_id in range(len(wanted))])
                else:
                    self.pool.send(list(wanted.values()), list(wanted))
            except WorkerDied as died:  # found dead before anything was sent
                self._lost.update(dict.fromkeys(died.env_ids, died))
                continue
            self.pending.update(dict.fromkeys(wanted, Kind.STEP))
            return answers

    def send_reset(self, env_id: int, told: dict[str, Any]) -> Answer | None:
        """Have an env begin an episode; what it was doing is dropped. An answer at once if it cannot be brought back.

        Args:
            env_id: which.
            told: for `ManagedEnv.reset`.
        """
        self.pending.pop(env_id, None)
        try:
            if self.pool.states[env_id] is EnvState.FAULTED:
                self.pool.revive([env_id], wait=False)  # its worker starts while the others go on
        except StepmillError as error:  # it cannot be replaced: a thread that hangs, for one
            return Answer(env_id, Kind.FAULT, error, Kind.RESET)
        try:
            self.pool.reset_async(env_ids=[env_id], options=told)
        except UsageError:
            raise
        except StepmillError as error:
            return Answer(env_id, Kind.FAULT, error, Kind.RESET)
        self._lost.pop(env_id, None)
        self.pending[env_id] = Kind.RESET
        return None

    def send_renewal(self, env_id: int, told: dict[str, Any]) -> Answer | None:
        """Like `send_reset`, but the env is made anew first: in a new process, if its own is not that of other envs, too."""
        if not self._is_alone:
            return self.send_reset(env_id, {**told, "renew": True})
        try:
            self.pool.revive([env_id], wait=False, restart_living=True)
        except StepmillError as error:
            return Answer(env_id, Kind.FAULT, error, Kind.RESET)
        return self.send_reset(env_id, told)

    # ---- answers -------------------------------------------------------------------------------------------------

    def receive(self, least: int, timeout_s: float | None) -> list[Answer]:
        """Wait for `least` answers, and return all that are there; none if that takes too long, faults alone.

        With a timeout of 0 nothing is waited for.
        """
        try:
            batch = self.pool.recv_ready() if timeout_s == 0 else self.pool.recv(min_envs=least, timeout_s=timeout_s)
        except RecvTimeout:
            return []
        except UsageError:
            raise
        except StepmillError as error:
            return self._faults([error, *error.others])
        except Exception as exc:  # an observation that cannot be loaded: the pool makes a fault of it, which comes next
            self._unreadable = exc
            return []
        except BaseException:
            self._forget_interrupted()
            raise
        return self._answers(batch)

    def _answers(self, batch: Batch) -> list[Answer]:
        kinds = [self.pending.pop(env_id, Kind.STEP) for env_id in batch.env_id.tolist()]
        if Kind.RESET not in kinds:
            values = self._reader.read(batch)
        elif Kind.STEP not in kinds:
            values = self._reader.read_obs(batch)
        else:
            values = self._reader.read_mixed(batch, [kind is Kind.RESET for kind in kinds])
        return [
            Answer(env_id, Kind.FAULT if isinstance(value, TornError) else kind, value, kind)
            for env_id, kind, value in zip(batch.env_id.tolist(), kinds, values, strict=True)
        ]

    def _faults(self, errors: Sequence[StepmillError]) -> list[Answer]:
        answers: list[Answer] = []
        states = self.pool.states
        for error in errors:
            for env_id in self._concerned(error):
                if states[env_id] is EnvState.READY:
                    continue  # its result was out before its worker ended
                of = self.pending.pop(env_id, None)
                if of is not None:
                    answers.append(Answer(env_id, Kind.FAULT, self._named(error, env_id), of))
                elif isinstance(error, (WorkerDied, EnvTimeout)):
                    self._lost[env_id] = error
        return answers

    def _named(self, error: StepmillError, env_id: int) -> StepmillError:
        """Return the error of an env whose observation could not be loaded as what it is: a torn one."""
        cause, self._unreadable = self._unreadable, None
        if cause is None or not isinstance(error, (BadOutput, EnvError, EngineBug)):
            return error
        torn = TornError(error.message, env_id=env_id, leaf="observation", phase="step")
        torn.__cause__ = cause
        return torn

    def _concerned(self, error: StepmillError) -> list[int]:
        if isinstance(error, WorkerDied):
            return list(error.env_ids)
        env_id: int | None = getattr(error, "env_id", None)
        if env_id is None:
            return list(self.pending)
        if isinstance(error, EnvTimeout):  # its worker was ended, and with it the envs that share it
            worker_of = self.pool.worker_of
            return [other for other in range(self.pool.num_envs) if worker_of[other] == worker_of[env_id]]
        return [env_id]

    def _forget_interrupted(self) -> None:
        """After Ctrl-C: an env that ran in line has a fault now, and is pending no more."""
        for env_id, state in enumerate(self.pool.states):
            if state in (EnvState.FAULTED, EnvState.IDLE, EnvState.NEEDS_RESET):
                self.pending.pop(env_id, None)


def replay_paths(path: str | Path | Sequence[str | Path], num_envs: int) -> list[str]:
    """Return one path per env."""
    if isinstance(path, (str, Path)):
        return [str(path)] * num_envs
    return [str(one) for one in path]
