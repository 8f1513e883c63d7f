"""The managers under DI-engine's names, and its registry of managers.

    BaseEnvManager               envs in the caller's thread
    AsyncSubprocessEnvManager    envs in processes; a step returns when some of them have replied
    SyncSubprocessEnvManager     envs in processes; a step returns when all of them have replied
    GymVectorEnvManager          the same, launched by its first reset
    BaseEnvManagerV2, SubprocessEnvManagerV2    with tree arrays

Each env has its own worker process, as in DI-engine, because DI-engine's envs seed NumPy's global generator, which the envs of one
process share. With `num_workers`, several envs share a process, which is faster for small envs that do not use that generator.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, NoReturn

from stepmill.envs.di_engine import seed_env
from stepmill.envs.di_engine_managed import ManagedSettings
from stepmill.frontends.di_engine import config as settings
from stepmill.frontends.di_engine import worker_functions
from stepmill.frontends.di_engine.env_lifecycle import EnvState
from stepmill.frontends.di_engine.env_pool import PoolEnvManager
from stepmill.frontends.di_engine.errors import ManagerUsageError, UnknownManagerError, retries_error, with_closing_hint
from stepmill.frontends.di_engine.manager import Manager, ResetParam, logger
from stepmill.frontends.di_engine.pool_client import Command, PoolClient, is_torn
from stepmill.frontends.di_engine.trees import TreeManager
from stepmill.spec.errors import StepmillError, WorkerDied, join_errors
from stepmill.spec.options import AutoresetMode, BackendName, OptionKeywords

if TYPE_CHECKING:
    from typing_extensions import Unpack


class BaseEnvManager(Manager):
    """The manager that runs all envs in the caller's thread, one after the other. Use it for debugging, and for very small envs.

    A step that raises an exception is tried `max_retry` times. After that, a RuntimeError is raised, the env is in
    ERROR, and the manager stays open. Unlike in DI-engine, the other envs of that call are stepped, and their timesteps
    are in the error's `timesteps`. Time limits work only in the main thread, and not in native code.
    """

    NOT_CALLED = settings.NOT_CALLED_BY_BASE

    @property
    def _envs(self) -> list[Any]:
        """The env objects, which are still there after `close`."""
        return [self._inline_envs[env_id] for env_id in range(self._env_num)]

    def _make_client(self) -> PoolClient:
        cfg = self._cfg
        managed = ManagedSettings(
            shared_memory=False,
            step_tries=self._max_retry,
            step_timeout_s=cfg.step_timeout,
            reset_timeout_s=cfg.reset_timeout,
            is_process=False,
        )
        client = PoolClient(self._env_fn, replace(self._options, backend=BackendName.SERIAL, copy=True), managed)
        self._inline_envs = client.envs
        return client

    def reset(self, reset_param: ResetParam | None = None) -> None:
        """Like `Manager.reset`. All envs are seeded before the first one is reset: they share NumPy's global generator."""
        self._check_closed()
        for env_id in range(self._env_num) if reset_param is None else reset_param:
            seed = self._env_seed.get(env_id)
            if seed is not None:
                self._last_sent_seed[env_id] = (seed, self._env_dynamic_seed)
                self._env_seed[env_id] = None
                seed_env(self._inline_envs[env_id], seed, self._env_dynamic_seed)
        super().reset(reset_param)

    def _skips_reset(self, env_id: int) -> bool:
        if self._env_replay_path is None or self._env_states[env_id] is not EnvState.RUN:
            return False
        logger.warning("please don't reset a unfinished env when you enable save replay, we just skip it")
        return True

    def step(self, actions: Mapping[int, Any]) -> Any:
        """Step envs. An env whose episode ends begins its next episode before this returns.

        Args:
            actions: by env_id, any object, which the env receives unchanged.
        Returns:
            Timesteps by env_id.
        Raises:
            AssertionError: the manager is closed, or an env does not need an action.
            RuntimeError: an env raised `max_retry` times.
        """
        env_ids = self._begin_steps(actions)
        self._process_replies(lambda: len(env_ids) - len(self._results))
        try:
            return self._collect_timesteps(env_ids)
        finally:
            if not self._closed:
                self._wait_resets(set(env_ids))

    def _fail_step(self, errors: Sequence[StepmillError], timesteps: dict[int, Any]) -> NoReturn:
        failures = []
        for cause in errors:
            env_id: int | None = getattr(cause, "env_id", None)
            limit = f"Env {env_id} step has exceeded max retries({self._max_retry})"
            logger.error(limit)
            failures.append(retries_error(limit, env_id, "step", cause))
            failures[-1].timesteps = timesteps
        failures[0].others = tuple(failures[1:])
        raise failures[0]


class BaseEnvManagerV2(TreeManager, BaseEnvManager):
    """`BaseEnvManager` with tree arrays; see `TreeManager`."""


class AsyncSubprocessEnvManager(Manager):
    """The asynchronous manager. A step returns when enough envs have replied, and a later step returns the others.

    A step waits for `wait_num` timesteps, or for those of all its envs if they are fewer. Then it waits for more, until all
    have arrived or until `step_wait_timeout` seconds after it began. It does not return only ended episodes while other
    envs execute actions, because `ready_obs` would be empty. Some settings are not in DI-engine. After
    `step_deadline` seconds, a step returns the timesteps that have arrived, even if they are fewer than `wait_num`.
    With `step_wait_timeout=None`, it waits only for `wait_num`. `linger` waits for more timesteps, and `max_get` limits
    their number.

    An env that dies returns an abnormal timestep. Its next reset starts it in a new process, with its seed, its
    reset_param and its replay path. An env that raises an exception, or exceeds `step_timeout`, closes the manager. The
    error has the env's own class and contains the errors of all envs that failed. With `on_error="abnormal"`, such an
    env also returns an abnormal timestep.
    """

    config: dict[str, Any] = settings.ASYNC
    NOT_CALLED = settings.NOT_CALLED_BY_SUBPROCESS
    _marks_abnormal = True
    worker_fn = staticmethod(worker_functions.worker_fn)
    worker_fn_robust = staticmethod(worker_functions.worker_fn_robust)

    def __init__(
        self,
        env_fn: Sequence[Callable[[], Any]],
        cfg: Mapping[str, Any] | None = settings.EMPTY,
        **keywords: Unpack[OptionKeywords],
    ) -> None:
        super().__init__(env_fn, cfg, **keywords)
        if self._cfg.reset_inplace and not self._cfg.auto_reset:
            raise ManagerUsageError("reset_inplace is unavailable when auto_reset=False.")
        if self._cfg.on_error not in ("close", "abnormal"):
            raise ManagerUsageError(f"on_error={self._cfg.on_error!r} is not one of 'close', 'abnormal'")

    def _make_client(self) -> PoolClient:
        cfg = self._cfg
        limits = [limit for limit in (cfg.reset_timeout, cfg.connect_timeout) if limit is not None]
        mode = AutoresetMode.SAME_STEP if cfg.reset_inplace else AutoresetMode.DISABLED
        return self._make_client_of_workers(
            BackendName.PROCESS, reset_timeout_s=min(limits, default=None), autoreset_mode=mode
        )

    def step(self, actions: Mapping[int, Any]) -> Any:
        """Send actions to envs, and return the timesteps of envs that have replied, which may be other envs.

        Args:
            actions: by env_id; any object, which the env receives unchanged.
        Returns:
            Timesteps by env_id, in the order of arrival; at the end of an episode with its last observation.
        Raises:
            AssertionError: the manager is closed, or an env does not need an action.
            Exception: of the class that an env raised; the manager is closed.
        """
        began = time.monotonic()
        cfg = self._cfg
        env_ids = self._begin_steps(actions)
        deadline = math.inf if cfg.step_deadline is None else began + cfg.step_deadline
        wanted = max(min(cfg.wait_num, len(env_ids)), 1)

        def num_missing() -> int:
            num_left = wanted - len(self._results)
            return 0 if self._has_enough_results() and (num_left <= 0 or not self._num_stepping()) else max(num_left, 1)

        self._process_replies(num_missing, until=deadline)
        self._process_replies(self._num_stepping, until=min(began + (cfg.step_wait_timeout or 0.0), deadline))
        self._handle_ready_replies()
        self._process_replies(lambda: not self._has_enough_results())  # after the deadline, but not without a result
        finished = list(self._results)
        return self._collect_timesteps(finished[: min(len(finished), cfg.max_get)])

    def _has_enough_results(self) -> bool:
        """Whether a step may return: `ready_obs` will not be empty, or no env executes an action."""
        results = self._results.values()
        is_any = any(isinstance(value, StepmillError) or not value[2] for value in results)
        return is_any or not self._num_stepping()

    def _num_stepping(self) -> int:
        return list(self._open_client().pending.values()).count(Command.STEP)

    def _becomes_abnormal(self, error: StepmillError) -> bool:
        return isinstance(error, WorkerDied) or is_torn(error) or self._cfg.on_error == "abnormal"

    def _fail_step(self, errors: Sequence[StepmillError], timesteps: dict[int, Any]) -> NoReturn:
        self.close()
        raised = join_errors([with_closing_hint(error) for error in errors])
        raised.timesteps = timesteps  # type: ignore[attr-defined]  # of the envs that did not fail
        raise raised

    @staticmethod
    def wait(rest_conn: list[Any], wait_num: int, timeout: float | None = None) -> tuple[list[Any], list[int]]:
        """Wait for connections of multiprocessing.

        Args:
            rest_conn: the connections.
            wait_num: return as soon as this many can be read, 1 to all.
            timeout: return after this many seconds with those that can be read; None waits for `wait_num`.
        Returns:
            The connections, and their indices in rest_conn, both in that order.
        Raises:
            AssertionError: wait_num is less than 1, or more than there are connections.
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
    """The synchronous manager. A step returns the timesteps of exactly the envs that were given actions."""

    config: dict[str, Any] = settings.SYNC

    def step(self, actions: Mapping[int, Any]) -> Any:
        """Step envs, and wait for them.

        Args:
            actions: by env_id; any object, which the env receives unchanged.
        Returns:
            Timesteps by env_id, in the order of `actions`; at the end of an episode with its last observation. An env
            whose episode ended begins its next one in the background.
        Raises:
            AssertionError: the manager is closed, or an env does not need an action.
            Exception: of the class that an env raised; the manager is closed.
        """
        env_ids = self._begin_steps(actions)
        self._process_replies(lambda: len(env_ids) - len(self._results))
        return self._collect_timesteps(env_ids)


class SubprocessEnvManagerV2(TreeManager, SyncSubprocessEnvManager):
    """`SyncSubprocessEnvManager` with tree arrays; see `TreeManager`."""


class GymVectorEnvManager(SyncSubprocessEnvManager):
    """A manager of Gymnasium's envs that `reset` launches. Each env is reset when its own episode ends.

    DI-engine's manager steps envs without an action with a random action, and resets no env before all are done.
    """

    config: dict[str, Any] = {**settings.SYNC, "shared_memory": False}

    def reset(self, reset_param: Any = None) -> None:
        """Reset all envs, or those of `reset_param`; launch them first if the manager is closed."""
        if self.closed:
            self.launch(reset_param)
        else:
            super().reset(reset_param)


MANAGERS: dict[str, type[Manager]] = {
    "base": BaseEnvManager,
    "base_v2": BaseEnvManagerV2,
    "async_subprocess": AsyncSubprocessEnvManager,
    "subprocess": SyncSubprocessEnvManager,
    "subprocess_v2": SubprocessEnvManagerV2,
    "gym_vector": GymVectorEnvManager,
}


def create_env_manager(manager_cfg: Mapping[str, Any], env_fn: Sequence[Callable[[], Any]]) -> Any:
    """Make a manager by the name in a config, which is not changed.

    Args:
        manager_cfg: its settings, with "type", a name of `MANAGERS`, and optionally "import_names", modules to import.
        env_fn: functions that make the envs.
    Raises:
        UsageError: no manager has that name.
    """
    settings = copy.deepcopy(dict(manager_cfg))
    import_all(settings.pop("import_names", []))
    return manager_class(settings.pop("type", None))(env_fn=env_fn, cfg=settings)


def get_env_manager_cls(cfg: Mapping[str, Any]) -> Any:
    """Return the class that `create_env_manager` would use."""
    import_all(cfg.get("import_names", []))
    return manager_class(cfg.get("type"))


def manager_class(name: object) -> Any:
    """Return the manager class of that name."""
    if name in MANAGERS:
        return MANAGERS[str(name)]
    if name == "env_pool":
        return PoolEnvManager
    raise UnknownManagerError(f"there is no manager {name!r}; use one of {sorted([*MANAGERS, 'env_pool'])}")


def register() -> None:
    """Replace the managers in DI-engine's registry with stepmill's, so that its `create_env_manager` makes these.

    From then on stepmill's managers are subclasses of `ding.envs.BaseEnvManager`, for code that uses isinstance.

    "env_pool" is not replaced: DI-engine registers it when its own module is imported, and fails if the name is taken.
    """
    registry = _ding_registry()
    for name, cls in MANAGERS.items():
        registry.register(name, cls, force_overwrite=True)
    original = importlib.import_module("ding.envs").BaseEnvManager
    if not issubclass(Manager, original):
        Manager.__bases__ += (original,)  # the last base, so that no method of ours is replaced


def register_if_there() -> None:
    """Call `register` if DI-engine is installed; log a warning if it cannot be imported."""
    if not has_ding():
        return
    try:
        register()
    except ImportError as error:
        logger.warning("DI-engine cannot be imported, so its registry is not changed: %s", error)


def has_ding() -> bool:
    """Whether DI-engine is installed."""
    return importlib.util.find_spec("ding") is not None


def import_all(names: str | Sequence[str]) -> None:
    """Import modules by name."""
    for name in [names] if isinstance(names, str) else names:
        importlib.import_module(name)


def _ding_registry() -> Any:
    # DI-engine registers its managers when it is imported; stepmill's are registered after that.
    importlib.import_module("ding.envs")
    return importlib.import_module("ding.utils").ENV_MANAGER_REGISTRY
