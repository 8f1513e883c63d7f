"""The managers with processes: asynchronous, synchronous, and with tree arrays.

Each env has a worker process of its own, as in DI-engine: its envs seed NumPy's global generator, which envs of one
process share. `num_workers` puts several envs into one process, which is faster where envs are small and do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, NoReturn

from stepmill.envs.di_engine_managed import ManagedSettings
from stepmill.frontends.di_engine import config as settings
from stepmill.frontends.di_engine.desk import DeskSettings, Kind
from stepmill.frontends.di_engine.errors import ManagerUsageError, closing
from stepmill.frontends.di_engine.forms import is_torn
from stepmill.frontends.di_engine.manager import Manager
from stepmill.frontends.di_engine.trees import TreeManager
from stepmill.spec.errors import StepmillError, WorkerDied, join_errors
from stepmill.spec.options import BackendName, OptionKeywords

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncSubprocessEnvManager(Manager):
    """DI-engine's asynchronous manager: a step returns when enough envs have answered; the others come with a later one.

    `wait_num` and `step_wait_timeout` have other semantics than the original, where the second is a minimum that is
    always lingered, and nothing bounds the wait (D-B1). Here a step returns as soon as `wait_num` timesteps are there,
    and `step_wait_timeout` seconds after it began with those that are; but never without a timestep of an episode that
    goes on, unless all have answered, since `ready_obs` would be empty. `linger` waits for more, `max_get` returns no more.

    An env that dies gives an abnormal timestep, and comes back in a new process with its next reset, with its seed, its
    reset_param and its replay path. An env that raises, or exceeds `step_timeout`, closes the manager; the error is of
    the env's own class and tells of all that failed (D-B5, D-B6). With `on_error="abnormal"` that is an abnormal timestep, too.
    """

    config: dict[str, Any] = settings.ASYNC
    _marks_abnormal = True

    def __init__(
        self,
        env_fn: Sequence[Callable[[], Any]],
        cfg: Mapping[str, Any] | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> None:
        super().__init__(env_fn, cfg, **keywords)
        self._shared_memory = self._cfg.shared_memory
        self._copy_on_get = self._cfg.copy_on_get
        self._context = self._cfg.context
        self._wait_num = self._cfg.wait_num
        self._step_wait_timeout = self._cfg.step_wait_timeout
        self._connect_timeout = self._cfg.connect_timeout
        self._reset_inplace = self._cfg.reset_inplace
        self._max_get = self._cfg.max_get
        self._on_error = self._cfg.on_error
        if self._reset_inplace and not self._auto_reset:
            raise ManagerUsageError("reset_inplace is unavailable when auto_reset=False.")
        if self._on_error not in ("close", "abnormal"):
            raise ManagerUsageError(f"on_error={self._on_error!r} is not one of 'close', 'abnormal'")

    def _desk_settings(self) -> DeskSettings:
        limits = [limit for limit in (self._reset_timeout, self._connect_timeout) if limit is not None]
        return DeskSettings(
            backend=BackendName.PROCESS,
            options=self._options,
            managed=ManagedSettings(shared_memory=self._shared_memory),
            num_workers=self._cfg.num_workers,
            context=self._context,
            copy=self._copy_on_get,
            is_inplace=self._reset_inplace,
            linger_s=self._cfg.linger,
            step_timeout_s=self._step_timeout,
            reset_timeout_s=min(limits, default=None),
        )

    def step(self, actions: Mapping[int, Any]) -> Any:
        """Give envs their actions, and return timesteps of those that answered, which may be others.

        Args:
            actions: by env_id; any object, handed to the env as it is.
        Returns:
            Timesteps by env_id, in the order in which they came; at the end of an episode with its last observation.
        Raises:
            AssertionError: the manager is closed, or an env does not want an action.
            Exception: of the class that an env raised; the manager is closed.
        """
        self._check_closed()
        env_ids = list(actions)
        self._check_ready(env_ids)
        for answer in self._live_desk().send_steps(actions):
            self._take(answer)
        until = None if self._step_wait_timeout is None else time.monotonic() + self._step_wait_timeout
        wanted = max(min(self._wait_num, len(env_ids)), 1)
        self._pump(
            lambda: len(self._mail) >= wanted and self._has_enough(),
            lambda: max(wanted - len(self._mail), 1),
            until=until,
        )
        self._pump(self._has_enough, lambda: 1)  # past the deadline: what is there, but not nothing
        come = list(self._mail)
        return self._deliver(come[: min(len(come), self._max_get)])

    def _has_enough(self) -> bool:
        """Whether a step may return: somebody will want an action then, or nobody is at work."""
        mail = self._mail.values()
        is_any = any(isinstance(value, StepmillError) or not value[2] for value in mail)
        return is_any or not self._is_at_work()

    def _is_at_work(self) -> bool:
        return Kind.STEP in self._live_desk().pending.values()

    def _is_borne(self, error: StepmillError) -> bool:
        return isinstance(error, WorkerDied) or is_torn(error) or self._on_error == "abnormal"

    def _fail_step(self, errors: Sequence[StepmillError], timesteps: dict[int, Any]) -> NoReturn:
        self.close()
        raised = join_errors([closing(error) for error in errors])
        raised.timesteps = timesteps  # type: ignore[attr-defined]  # for who wants what the others gave
        raise raised

    @staticmethod
    def wait(rest_conn: list[Any], wait_num: int, timeout: float | None = None) -> tuple[list[Any], list[int]]:
        """Wait for connections of multiprocessing.

        Args:
            rest_conn: which.
            wait_num: return as soon as so many can be read; 1 to all.
            timeout: return after so many seconds with those that can be; None waits for `wait_num`.
        Returns:
            The connections, and their places in rest_conn, both in that order.
        Raises:
            AssertionError: wait_num makes no sense.
        """
        if not 1 <= wait_num <= len(rest_conn):
            raise ManagerUsageError(
                f"please indicate proper wait_num: <wait_num: {wait_num}, rest_conn_num: {len(rest_conn)}>"
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        ready: set[Any] = set()
        while len(ready) < wait_num:
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ready.update(connection.wait([conn for conn in rest_conn if conn not in ready], left_s))
            if deadline is not None and time.monotonic() >= deadline:
                break
        places = [place for place, conn in enumerate(rest_conn) if conn in ready]
        return [rest_conn[place] for place in places], places


class SyncSubprocessEnvManager(AsyncSubprocessEnvManager):
    """DI-engine's synchronous manager: a step returns the timesteps of exactly the envs that were given actions."""

    config: dict[str, Any] = settings.SYNC

    def step(self, actions: Mapping[int, Any]) -> Any:
        """Step the envs named, and wait for them.

        Args:
            actions: by env_id; any object, handed to the env as it is.
        Returns:
            Timesteps by env_id, in the order of `actions`; at the end of an episode with its last observation. Who is
            done begins its next episode while you think.
        Raises:
            AssertionError: the manager is closed, or an env does not want an action.
            Exception: of the class that an env raised; the manager is closed.
        """
        self._check_closed()
        env_ids = list(actions)
        self._check_ready(env_ids)
        for answer in self._live_desk().send_steps(actions):
            self._take(answer)
        mail = self._mail
        num = len(env_ids)
        self._pump(lambda: len(mail) >= num, lambda: num - len(mail))
        return self._deliver(env_ids)


class SubprocessEnvManagerV2(TreeManager, SyncSubprocessEnvManager):
    """`SyncSubprocessEnvManager` with tree arrays; see `TreeManager`."""


class GymVectorEnvManager(SyncSubprocessEnvManager):
    """DI-engine's manager of that name, for Gymnasium's envs: `reset` launches it, and every env is reset by itself.

    The original steps envs that were given no action with a random one, and resets none before all are done.
    """

    config: dict[str, Any] = {**settings.SYNC, "shared_memory": False}

    def reset(self, reset_param: Any = None) -> None:
        """Reset all envs, or those named; launch them first if that was not done."""
        if self.closed:
            self.launch(reset_param)
        else:
            super().reset(reset_param)
