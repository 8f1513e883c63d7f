"""What happens to an env between two actions: its answers are taken, its episode ends, it is reset, and tried again.

step ─► desk ─► _take ─► mail ─► _deliver ─► timesteps; the next episode of who is done begins meanwhile
                  └► first observation ─► ready_obs        └► abnormal: ERROR · raised: the manager's policy
                  └► failed reset ─► tried again after retry_waiting_time, until max_retry
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from stepmill.envs.di_engine import timestep_class
from stepmill.envs.di_engine_managed import is_abnormal
from stepmill.frontends.di_engine.desk import Answer, Desk, Kind
from stepmill.frontends.di_engine.errors import ConnectionTimeout, ManagerClosedError, RetriesError
from stepmill.frontends.di_engine.forms import is_torn
from stepmill.frontends.di_engine.states import EnvState, StateBook
from stepmill.spec.errors import BadOutput, EnvError, EnvTimeout, StepmillError, WorkerDied

LOG_EVERY_S = 10.0  # a wait this long is told, and again each time it has lasted so long
logger = logging.getLogger("stepmill.di_engine")

_RUN, _RESET, _DONE = EnvState.RUN, EnvState.RESET, EnvState.DONE
_ERROR, _NEED_RESET = EnvState.ERROR, EnvState.NEED_RESET


class Turns:
    """The part of a manager that deals with answers. Names that begin with `_env` are DI-engine's own."""

    _desk: Desk | None
    _closed: bool
    _env_num: int
    _episode_num: float
    _max_retry: int
    _retry_type: str
    _retry_waiting_time: float
    _auto_reset: bool
    _reset_inplace = False
    _marks_abnormal = False  # whether abnormal timesteps put an env into ERROR
    _connect_timeout: float | None = None
    _reset_timeout: float | None = None

    def __init__(self, env_num: int) -> None:
        self._env_states = StateBook(env_num)
        self._env_seed: dict[int, int | None] = dict.fromkeys(range(env_num))
        self._env_dynamic_seed: bool | None = None
        self._given_seed: dict[int, tuple[int, bool | None]] = {}  # newest seed that each env was given
        self._forget()

    def _forget(self) -> None:
        """Begin anew: no env has done anything."""
        self._env_episode_count = dict.fromkeys(range(self._env_num), 0)
        self._ready_obs: dict[int, Any] = dict.fromkeys(range(self._env_num))
        self._reset_param: dict[int, dict[str, Any] | None] = {env_id: {} for env_id in range(self._env_num)}
        self._mail: dict[int, Any] = {}  # answers to steps that no step() has returned yet
        self._attempts: dict[int, int] = {}  # at the reset under way
        self._retry_at: dict[int, float] = {}
        self._exhausted: dict[int, StepmillError] = {}
        self._to_seed: set[int] = set()  # whose next reset gives the seed again
        self._to_renew: set[int] = set()  # whose next reset makes the env anew

    # ---- resets --------------------------------------------------------------------------------------------------

    def _begin_reset(self, env_id: int) -> None:
        desk = self._live_desk()
        told: dict[str, Any] = {"param": self._reset_param[env_id]}
        seed = self._env_seed[env_id]
        if seed is not None:
            self._given_seed[env_id] = (seed, self._env_dynamic_seed)
            self._env_seed[env_id] = None  # a seed is used once
            self._to_seed.add(env_id)
        if env_id in self._to_seed and env_id in self._given_seed:
            told["seed"] = self._given_seed[env_id]
        self._env_states.move(env_id, _RESET)
        self._mail.pop(env_id, None)
        self._retry_at.pop(env_id, None)
        answer = desk.send_renewal(env_id, told) if env_id in self._to_renew else desk.send_reset(env_id, told)
        if answer is not None:
            self._take(answer)

    def _reset_failed(self, env_id: int, error: StepmillError) -> None:
        attempts = self._attempts[env_id] = self._attempts.get(env_id, 0) + 1
        error = self._as_reset_error(error)
        if attempts >= max(self._max_retry, 1):
            self._exhausted[env_id] = error
            return
        logger.info("env %d: attempt %d of %d to reset it failed: %s", env_id, attempts, self._max_retry, error)
        self._to_seed.add(env_id)
        if self._retry_type == "renew" or is_torn(error):
            self._to_renew.add(env_id)
        self._retry_at[env_id] = time.monotonic() + self._retry_waiting_time

    def _as_reset_error(self, error: StepmillError) -> StepmillError:
        """Say by which of the two limits a reset was ended."""
        limit_s, connect_s = self._reset_timeout, self._connect_timeout
        if not isinstance(error, EnvTimeout) or connect_s is None or (limit_s is not None and limit_s <= connect_s):
            return error
        return ConnectionTimeout(
            f"env reset connection timeout: {error.message}", env_id=error.env_id, phase="reset", timeout_s=connect_s
        )

    def _retry_due(self) -> None:
        now = time.monotonic()
        for env_id in [env_id for env_id, due in self._retry_at.items() if due <= now]:
            self._begin_reset(env_id)

    def _give_up(self) -> NoReturn:
        """Close, and tell of the envs whose resets have failed too often."""
        errors = []
        for env_id, cause in self._exhausted.items():
            text = (
                f"Env {env_id} reset has exceeded max retries({self._max_retry}), and the latest exception is: {cause}"
            )
            logger.error("Env %d reset has exceeded max retries(%d)", env_id, self._max_retry)
            error = RetriesError(
                text,
                env_id=env_id,
                phase="reset",
                error_type=getattr(cause, "error_type", type(cause).__name__),
                remote_traceback=getattr(cause, "remote_traceback", ""),
            )
            error.__cause__ = cause
            errors.append(error)
        self._exhausted.clear()
        self.close()
        errors[0].others = tuple(errors[1:])
        raise errors[0]

    # ---- answers -------------------------------------------------------------------------------------------------

    def _take(self, answer: Answer) -> None:
        env_id, kind, value, of = answer
        if kind is Kind.STEP:
            self._mail[env_id] = value
        elif kind is Kind.RESET:
            self._ready_obs[env_id] = value
            self._env_states.move(env_id, _RUN)
            self._attempts.pop(env_id, None)
            self._to_seed.discard(env_id)
            self._to_renew.discard(env_id)
        else:
            if isinstance(value, (WorkerDied, EnvTimeout)):
                self._to_seed.add(env_id)  # its env is made anew
            if of is Kind.RESET:
                self._reset_failed(env_id, value)
            else:
                self._mail[env_id] = value

    def _take_arrived(self) -> None:
        """Take the answers that are here, without waiting."""
        desk = self._live_desk()
        self._retry_due()
        for answer in desk.receive(1, 0) if desk.pending else ():
            self._take(answer)

    def _pump(
        self, is_enough: Callable[[], bool], need: Callable[[], int], *, until: float | None = None, text: str = ""
    ) -> None:
        """Take answers until there are enough, or none can come any more.

        Args:
            is_enough: asked before each wait.
            need: how many answers to wait for at once, at least.
            until: on the clock of time.monotonic; then return, too.
            text: logged with a count when the wait is long.
        """
        began = time.monotonic()
        num_told = 0
        while not self._exhausted and not is_enough():
            desk = self._live_desk()
            slice_s = LOG_EVERY_S
            if self._retry_at:
                self._retry_due()
                slice_s = min([slice_s, *(max(due - time.monotonic(), 0.0) for due in self._retry_at.values())])
            if until is not None:
                slice_s = min(slice_s, until - time.monotonic())
                if slice_s <= 0.0:
                    return
            if desk.pending:
                for answer in desk.receive(max(1, min(need(), len(desk.pending))), slice_s):
                    self._take(answer)
            elif self._retry_at:
                time.sleep(slice_s)  # there is nothing to be woken by
            elif not self._exhausted:
                return
            if text and time.monotonic() - began >= (num_told + 1) * LOG_EVERY_S:
                num_told += 1
                logger.warning(text, num_told)
        if self._exhausted:
            self._give_up()

    def _deliver(self, env_ids: Iterable[int]) -> dict[int, Any]:
        """Return the timesteps that have come, and let their envs go on."""
        timesteps: dict[int, Any] = {}
        errors: list[StepmillError] = []
        ended: list[int] = []
        for env_id in env_ids:
            timestep = self._mail.pop(env_id)
            if isinstance(timestep, StepmillError):
                if not self._is_borne(timestep):
                    self._env_states.move(env_id, _ERROR)
                    errors.append(timestep)
                    continue
                timestep = self._abnormal(env_id, timestep)
            timesteps[env_id] = timestep
            info = timestep[3]
            if info and self._marks_abnormal and is_abnormal(info):
                self._env_states.move(env_id, _ERROR)
            elif timestep[2]:
                ended.append(env_id)
            else:
                self._ready_obs[env_id] = timestep[0]
        for env_id in ended:
            self._end_episode(env_id, timesteps[env_id])
        if errors:
            self._fail_step(errors, timesteps)
        return timesteps

    def _end_episode(self, env_id: int, timestep: Any) -> None:
        self._env_episode_count[env_id] += 1
        if self._env_episode_count[env_id] >= self._episode_num:
            self._env_states.move(env_id, _DONE)
        elif not self._auto_reset:
            self._env_states.move(env_id, _NEED_RESET)
        elif self._reset_inplace:
            self._ready_obs[env_id] = timestep[0]
        else:
            self._begin_reset(env_id)

    # ---- policy --------------------------------------------------------------------------------------------------

    def _is_borne(self, error: StepmillError) -> bool:
        """Whether a failed step becomes an abnormal timestep."""
        raise NotImplementedError

    def _fail_step(self, errors: Sequence[StepmillError], timesteps: dict[int, Any]) -> NoReturn:
        """Tell of steps that failed; `timesteps` are those of the other envs."""
        raise NotImplementedError

    def close(self) -> None:
        """End the envs."""
        raise NotImplementedError

    def _abnormal(self, env_id: int, error: StepmillError) -> Any:
        logger.warning("env %d gives an abnormal timestep; reset it to go on: %s", env_id, error.message)
        if isinstance(error, (EnvError, BadOutput)):
            self._to_seed.add(env_id)
        if is_torn(error):
            self._to_renew.add(env_id)
        info = {"abnormal": True, "fault": type(error).__name__, "message": error.message}
        return timestep_class()(None, None, None, info)

    def _live_desk(self) -> Desk:
        if self._closed or self._desk is None:
            raise ManagerClosedError("env manager is closed, please use the alive env manager")
        return self._desk
