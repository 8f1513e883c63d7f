"""The states of a manager's envs: `EnvState` and its transitions, and `EnvLifecycle`, which moves envs between them.

PoolClient ─► _handle_reply ─┬► result of a step ─► _handle_result
                             ├► first observation ─► ready_obs
                             └► failed reset ─► repeated after retry_waiting_time, max_retry attempts in all
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

from stepmill.envs.di_engine_managed import ManagedSettings
from stepmill.frontends.di_engine.config import replay_paths
from stepmill.frontends.di_engine.errors import ConnectionTimeout, ManagerClosedError, UnknownEnvError, retries_error
from stepmill.frontends.di_engine.pool_client import Command, EnvReply, PoolClient, is_torn
from stepmill.spec.errors import EngineBug, EnvTimeout, StepmillError, WorkerDied
from stepmill.spec.options import BackendName, PoolOptions

LOG_EVERY_S = 10.0  # a wait that lasts this long is logged, and again after each further period
logger = logging.getLogger("stepmill.di_engine")


class EnvState(IntEnum):
    """The state of an env, with the names and numbers of DI-engine's EnvState."""

    VOID = 0  #: Not launched, or closed.
    INIT = 1  #: Its worker has started.
    RUN = 2  #: It waits for an action, or executes one.
    RESET = 3  #: It is being reset.
    DONE = 4  #: It has finished `episode_num` episodes.
    ERROR = 5  #: It failed, or returned an abnormal timestep. A reset repairs it.
    NEED_RESET = 6  #: Its episode has ended, and auto_reset is off.


_VOID, _INIT, _RUN, _RESET = EnvState.VOID, EnvState.INIT, EnvState.RUN, EnvState.RESET
_DONE, _ERROR, _NEED_RESET = EnvState.DONE, EnvState.ERROR, EnvState.NEED_RESET

TRANSITIONS: dict[EnvState, frozenset[EnvState]] = {
    _VOID: frozenset({_INIT}),
    _INIT: frozenset({_RESET, _VOID}),
    _RESET: frozenset({_RUN, _RESET, _ERROR, _VOID}),
    _RUN: frozenset({_RUN, _RESET, _DONE, _ERROR, _NEED_RESET, _VOID}),
    _DONE: frozenset({_RESET, _VOID}),
    _ERROR: frozenset({_RESET, _ERROR, _VOID}),
    _NEED_RESET: frozenset({_RESET, _VOID}),
}


class EnvStates(dict[int, EnvState]):
    """The state of each env, by env_id."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(dict.fromkeys(range(num_envs), EnvState.VOID))

    def move(self, env_id: int, state: EnvState) -> None:
        """Change the state of an env.

        Raises:
            EngineBug: `TRANSITIONS` does not allow the change.
        """
        if state not in TRANSITIONS[self[env_id]]:
            raise EngineBug(f"env {env_id} cannot change from {self[env_id].name} to {state.name}; please report this")
        self[env_id] = state

    def close(self) -> None:
        """Set every env to VOID."""
        for env_id in self:
            self[env_id] = EnvState.VOID

    def ids_in(self, state: EnvState) -> list[int]:
        """Return the envs that are in a state, in the order of their ids."""
        return [env_id for env_id, env_state in self.items() if env_state is state]


def _setting(name: str) -> Any:
    """Return a property that reads and writes a setting. DI-engine has attributes of these names, which its users assign."""

    def read(self: EnvLifecycle) -> Any:
        return self._cfg.get(name)

    def write(self: EnvLifecycle, value: Any) -> None:
        self._cfg[name] = value

    return property(read, write)


class EnvLifecycle:
    """The part of a manager, or of a supervisor, that handles replies, episode ends, resets and retries.

    Names that begin with `_env` come from DI-engine, because users' subclasses rely on them.
    """

    _forgets_seeds = True  # whether `_env_seed` has only the seeds that were not sent yet
    _attempts_name = "max retries"  # in the text of an error, as the next two
    _closed_text = _closed_attribute_text = "env manager is closed, please use the alive env manager"
    _auto_reset, _retry_type, _retry_waiting_time, _reset_timeout, _step_timeout, _connect_timeout = map(
        _setting, ("auto_reset", "retry_type", "retry_waiting_time", "reset_timeout", "step_timeout", "connect_timeout")
    )
    _context, _copy_on_get, _reset_inplace, _shared_memory, _step_wait_timeout, _wait_num = map(
        _setting, ("context", "copy_on_get", "reset_inplace", "shared_memory", "step_wait_timeout", "wait_num")
    )

    def __init__(self, env_fn: Sequence[Callable[[], Any]], cfg: Any, options: PoolOptions) -> None:
        self._env_fn = list(env_fn)
        self._env_num = len(self._env_fn)
        if not self._env_fn:
            raise UnknownEnvError("a manager needs at least one env; env_fn is empty")
        self._cfg = cfg
        self._options = options
        self._episode_num: float = cfg.episode_num
        self._max_retry: int = max(cfg.max_retry, 1)
        self._client: PoolClient | None = None
        self._closed = True
        self._space_seed: int | None = None
        self._own_spaces: dict[int, Any] = {}  # those that a subclass has assigned
        self._lock = threading.Lock()  # for subclasses: DI-engine's threads are not there
        self._init_states()

    def _init_states(self) -> None:
        """Set all envs to VOID, and reset the data of the last launch, the seeds and the paths of replays."""
        self._env_states = EnvStates(self._env_num)
        self._env_seed: dict[int, int | None] = dict.fromkeys(range(self._env_num))
        self._env_dynamic_seed: bool | None = None
        self._env_replay_path: list[str] | None = None
        self._clear_progress()

    def _clear_progress(self) -> None:
        """Reset the data of the last launch."""
        self._env_episode_count = dict.fromkeys(range(self._env_num), 0)
        self._ready_obs: dict[int, Any] = dict.fromkeys(range(self._env_num))
        self._reset_param: dict[int, dict[str, Any] | None] = {env_id: {} for env_id in range(self._env_num)}
        self._results: dict[int, Any] = {}  # results that step() has not returned yet
        self._attempts: dict[int, int] = {}  # failed attempts of the current reset
        self._retry_at: dict[int, float] = {}
        self._offered_ids: list[int] | None = None  # those of `ready_obs`, until `ready_obs_id` is read or an env steps
        self._last_sent_seed: dict[int, tuple[int, bool | None]] = {}  # the newest seed that was sent to each env
        self._failed_resets: dict[int, StepmillError] = {}  # by env, after max_retry attempts
        self._needs_seed: set[int] = set()  # envs whose next reset sends the seed again
        self._needs_renewal: set[int] = set()  # envs to replace by new ones before their next reset

    def _check_ids(self, env_ids: Iterable[object]) -> None:
        """Check that these envs exist.

        Raises:
            UnknownEnvError: one does not; a KeyError and an IndexError.
        """
        if unknown := [env_id for env_id in env_ids if env_id not in range(self._env_num)]:
            raise UnknownEnvError(f"there are no envs {unknown}; there are envs 0 to {self._env_num - 1}")

    # ---- launch ------------------------------------------------------------------------------------------------------

    def _start(self) -> PoolClient:
        """Return the client of the pool; start the envs if there is no client."""
        if self._client is None:
            self._client = self._make_client()
            self._seed_action_space()
        return self._client

    def _make_client(self) -> PoolClient:
        """Start the envs."""
        raise NotImplementedError

    def _make_client_of_workers(
        self, backend: BackendName, *, reset_timeout_s: float | None, **options: Any
    ) -> PoolClient:
        """Start the envs in workers, one for each env unless the settings have their number."""
        cfg = self._cfg
        is_process = backend is BackendName.PROCESS
        options |= {"envs_per_worker": 1} if cfg.num_workers is None else {"num_workers": cfg.num_workers}
        options |= {"context": cfg.context} if is_process else {}
        limits = {"step_timeout_s": cfg.step_timeout, "reset_timeout_s": reset_timeout_s}
        return PoolClient(
            self._env_fn,
            replace(self._options, backend=backend, copy=cfg.copy_on_get, **limits, **options),
            ManagedSettings(shared_memory=cfg.shared_memory and is_process, is_process=is_process),
            cfg.linger,
        )

    def _seed_action_space(self) -> None:
        if self._client is not None and self._space_seed is not None and hasattr(self._client.spaces[1], "seed"):
            self._client.spaces[1].seed(int(self._space_seed))

    @property
    def closed(self) -> bool:
        """Whether the envs are closed, or not launched yet."""
        return self._closed

    def enable_save_replay(self, replay_path: str | Path | Sequence[str | Path] | None) -> None:
        """Make each env save replays, from the next `launch` on; envs that are rebuilt do so, too.

        Args:
            replay_path: one folder for all envs, or one per env. None saves none.
        """
        self._env_replay_path = None if replay_path is None else replay_paths(replay_path, self._env_num)

    def _open(self, client: PoolClient) -> None:
        """Set all envs to INIT, and give them the paths of their replays."""
        for env_id in range(self._env_num):
            self._env_states.move(env_id, _INIT)
        self._closed = False
        if self._env_replay_path is not None:
            client.pool.set_attr("replay_path", list(self._env_replay_path))

    # ---- resets ------------------------------------------------------------------------------------------------------

    def _begin_reset(self, env_id: int) -> None:
        client = self._open_client()
        request: dict[str, Any] = {"param": self._param_of(env_id)}
        seed = self._env_seed[env_id]
        if seed is not None and (self._forgets_seeds or env_id not in self._last_sent_seed):  # a seed is used once
            self._last_sent_seed[env_id] = (seed, self._env_dynamic_seed)
            self._env_seed[env_id] = None if self._forgets_seeds else seed
            self._needs_seed.add(env_id)
        if env_id in self._needs_seed and env_id in self._last_sent_seed:
            request["seed"] = self._last_sent_seed[env_id]
        self._env_states.move(env_id, _RESET)
        self._offered_ids = None
        self._results.pop(env_id, None)
        self._retry_at.pop(env_id, None)
        client.send_reset(env_id, request, is_renewal=env_id in self._needs_renewal)

    def _param_of(self, env_id: int) -> dict[str, Any] | None:
        """Return the keyword arguments of the reset that an env begins."""
        return self._reset_param[env_id]

    def _handle_reset_failure(self, env_id: int, error: StepmillError) -> None:
        attempts = self._attempts[env_id] = self._attempts.get(env_id, 0) + 1
        error = self._as_reset_error(error)
        if attempts >= self._max_retry:
            self._failed_resets[env_id] = error
            return
        logger.info("env %d: attempt %d of %d to reset it failed: %s", env_id, attempts, self._max_retry, error)
        self._needs_seed.add(env_id)
        if self._cfg.retry_type == "renew" or is_torn(error):
            self._needs_renewal.add(env_id)
        self._retry_at[env_id] = time.monotonic() + self._cfg.retry_waiting_time

    def _as_reset_error(self, error: StepmillError) -> StepmillError:
        """Return a ConnectionTimeout if `connect_timeout` is the limit that was exceeded, else the error itself."""
        limit_s, connect_s = self._cfg.reset_timeout, self._cfg.get("connect_timeout")
        if not isinstance(error, EnvTimeout) or connect_s is None or (limit_s is not None and limit_s <= connect_s):
            return error
        return ConnectionTimeout(
            f"env reset connection timeout: {error.message}", env_id=error.env_id, phase="reset", timeout_s=connect_s
        )

    def _start_due_retries(self) -> None:
        now = time.monotonic()
        for env_id in [env_id for env_id, retry_at in self._retry_at.items() if retry_at <= now]:
            self._begin_reset(env_id)

    def _raise_failed_resets(self) -> NoReturn:
        """Close the manager, and raise the error of the first env that is out of attempts, with the others in `others`."""
        errors = []
        for env_id, cause in self._failed_resets.items():
            limit = f"Env {env_id} reset has exceeded {self._attempts_name}({self._max_retry})"
            logger.error(limit)
            errors.append(retries_error(limit, env_id, "reset", cause))
        self._failed_resets.clear()
        self.close()
        errors[0].others = tuple(errors[1:])
        raise errors[0]

    # ---- replies -----------------------------------------------------------------------------------------------------

    def _handle_reply(self, reply: EnvReply) -> None:
        env_id, command, value = reply
        if isinstance(value, (WorkerDied, EnvTimeout)):
            self._needs_seed.add(env_id)  # the env will be built again
        if command is Command.STEP:
            self._handle_result(env_id, value)
        elif isinstance(value, StepmillError):
            self._handle_reset_failure(env_id, value)
        else:
            self._ready_obs[env_id] = value
            self._env_states.move(env_id, _RUN)
            self._attempts.pop(env_id, None)
            self._needs_seed.discard(env_id)
            self._needs_renewal.discard(env_id)

    def _handle_result(self, env_id: int, value: Any) -> None:
        """Store the timestep of a step, or its error."""
        self._results[env_id] = value

    def _process_replies(self, num_missing: Callable[[], int], *, until: float | None = None, text: str = "") -> None:
        """Handle replies until `num_missing()` is 0, or until no further reply can arrive.

        Args:
            num_missing: returns how many replies the next wait should wait for; called before each wait.
            until: do not wait after this time of time.monotonic(); replies that have arrived are handled.
            text: a message for long waits, with one %d for the number of periods waited; nothing is logged if it is empty.
        Raises:
            RetriesError: a reset has failed `max_retry` times; the manager is closed.
        """
        began = time.monotonic()
        num_warnings = 0
        while not self._failed_resets and (missing := num_missing()) > 0:
            client = self._open_client()
            self._start_due_retries()
            now = time.monotonic()
            ends = [now + LOG_EVERY_S, now + LOG_EVERY_S if until is None else until, *self._retry_at.values()]
            wait_s = max(min(ends) - now, 0.0)
            replies: list[EnvReply] = []
            if client.pending:
                replies = client.receive(max(1, min(missing, len(client.pending))), wait_s)
            elif self._retry_at:
                time.sleep(wait_s)  # no command is outstanding, so no event can end this wait earlier
            else:
                return
            for reply in replies:
                self._handle_reply(reply)
            now = time.monotonic()
            if text and now - began >= (num_warnings + 1) * LOG_EVERY_S:
                num_warnings += 1
                logger.warning(text, num_warnings)
            if until is not None and now >= until and not replies:
                break
        if self._failed_resets:
            self._raise_failed_resets()

    def env_state_done(self, env_id: int) -> bool:
        """Whether an env is DONE."""
        return self._env_states[env_id] is EnvState.DONE

    def close(self) -> None:
        """Close all envs."""
        raise NotImplementedError

    def _check_closed(self) -> None:
        if self.__dict__.get("_closed", True):
            raise ManagerClosedError(self._closed_text)

    def _open_client(self) -> PoolClient:
        """Return the client of the pool.

        Raises:
            ManagerClosedError: the manager is closed.
        """
        if self._client is None:
            raise ManagerClosedError(self._closed_text)
        return self._client
