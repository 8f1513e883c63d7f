"""`BaseEnvManager`: all envs in line, in this process, one after the other. For debugging, and for tiny envs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from stepmill.frontends.di_engine.errors import RetriesError
from stepmill.frontends.di_engine.manager import Manager, logger
from stepmill.frontends.di_engine.states import EnvState
from stepmill.frontends.di_engine.trees import TreeManager
from stepmill.spec.errors import StepmillError


class BaseEnvManager(Manager):
    """DI-engine's manager of that name: the same interface as those with processes, in line.

    A step that raises is tried `max_retry` times, and then a RuntimeError; that env is in ERROR, the manager stays open.
    Unlike the original, the other envs named in that call are stepped nevertheless, and their timesteps are in the
    error's `timesteps`. Time limits hold in the main thread only, and not in native code.
    """

    @property
    def _envs(self) -> list[Any]:
        """The env objects."""
        return [self._inline_envs[env_id] for env_id in range(self._env_num)]

    def _start(self) -> Any:
        desk = super()._start()
        self._inline_envs = desk.envs
        return desk

    def _is_kept(self, env_id: int) -> bool:
        if self._env_replay_path is None or self._env_states[env_id] is not EnvState.RUN:
            return False
        logger.warning("please don't reset a unfinished env when you enable save replay, we just skip it")
        return True

    def step(self, actions: Mapping[int, Any]) -> Any:
        """Step the envs named; who is done begins its next episode before this returns.

        Args:
            actions: by env_id; any object, handed to the env as it is.
        Returns:
            Timesteps by env_id.
        Raises:
            AssertionError: the manager is closed, or an env does not want an action.
            RuntimeError: an env raised `max_retry` times.
        """
        self._check_closed()
        env_ids = list(actions)
        self._check_ready(env_ids)
        for answer in self._live_desk().send_steps(actions):
            self._take(answer)
        self._pump(lambda: len(self._mail) >= len(env_ids), lambda: len(env_ids) - len(self._mail))
        try:
            return self._deliver(env_ids)
        finally:
            if not self._closed:
                self._wait_resets(set(env_ids))

    def _is_borne(self, error: StepmillError) -> bool:
        return False

    def _fail_step(self, errors: Sequence[StepmillError], timesteps: dict[int, Any]) -> NoReturn:
        failures = []
        for cause in errors:
            env_id: int | None = getattr(cause, "env_id", None)
            logger.error("Env %s step has exceeded max retries(%d)", env_id, self._max_retry)
            failure = RetriesError(
                f"Env {env_id} step has exceeded max retries({self._max_retry}), and the latest exception is: {cause}",
                env_id=env_id,
                phase="step",
                error_type=getattr(cause, "error_type", type(cause).__name__),
                remote_traceback=getattr(cause, "remote_traceback", ""),
            )
            failure.__cause__ = cause
            failure.timesteps = timesteps
            failures.append(failure)
        failures[0].others = tuple(failures[1:])
        raise failures[0]


class BaseEnvManagerV2(TreeManager, BaseEnvManager):
    """`BaseEnvManager` with tree arrays; see `TreeManager`."""
