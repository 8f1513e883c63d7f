"""`SubprocessEnv`: an env in its own process, with the interface of the env itself."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, Literal

import gymnasium

from stepmill.frontends.multi_env.shared_pool import SharedPool
from stepmill.frontends.overrides import refuse_overrides
from stepmill.spec.errors import StepmillError, UsageError, join_errors
from stepmill.spec.options import OptionKeywords, PoolOptions, merge_options

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    class _OldEnv:
        """Old gym's Env."""

else:
    # gym is not imported here: that takes seconds and warns. A program that needs the class has imported it.
    _OldEnv = getattr(sys.modules.get("gym"), "Env", object)


class LifeCycleError(UsageError):
    """A SubprocessEnv was used before it was started and initialized, or after it was closed."""


class _Phase(Enum):
    NEW = "new"
    STARTED = "started"
    READY = "ready"
    CLOSED = "closed"


class SubprocessEnv(gymnasium.Env[Any, Any], _OldEnv):
    """Runs one env in its own process. `start` starts the process, and `initialize` waits until the env is built.

    It is a `gymnasium.Env`, and also a `gym.Env` if gym was imported before this module, so wrappers accept it. From
    `initialize` on, `metadata`, `spec`, `render_mode` and `reward_range` are those of the env.

    `step`, `reset` and `render` return the results of the env: four or five values, and any observation. There is no autoreset.
    If the process dies, the episode ends: `step` returns the last observation, reward 0, a terminal flag and an info with
    "worker_restarted" and "fault", and the env is rebuilt. (actorcritic begins another episode without a message.) The
    action of that step is not repeated. An exception of the env is raised here as `EnvError`; `reset` makes the
    env usable again.

    Args:
        env_fn: a function that makes the env in the process, and again after the process died. It is sent with
            cloudpickle.
        options: options of the pool, such as the start method, deadlines and the number of restarts. By default each env
            has its own process, dead processes are restarted, and exceptions are raised.
        **keywords: fields of PoolOptions by name, which take precedence over `options`.

    Envs that `create_subprocess_envs` made together share a pool, which one thread at a time can use; other threads wait.
    """

    NOT_CALLED = dict.fromkeys(
        ("_child_worker", "_communicate", "_reset", "_unsafe_communicate"),
        "the pool starts the process and speaks with it; override reset or step, or put the code into a wrapper of the env",
    )

    def __init__(
        self, env_fn: Callable[[], object], *, options: PoolOptions | None = None, **keywords: Unpack[OptionKeywords]
    ) -> None:
        refuse_overrides(type(self))
        if not callable(env_fn):
            raise UsageError(f"env_fn is a {type(env_fn).__name__}; give a function that makes the env")
        self._attach(SharedPool([env_fn], merge_options(options, keywords)), 0)

    def _attach(self, shared: SharedPool, index: int) -> None:
        self._shared = shared
        self._index = index
        self._phase = _Phase.NEW
        self._spaces: tuple[object, object] = (None, None)
        self._is_gymnasium = False
        self._last_obs: Any = None
        self.reward_range: tuple[float, float] = (-float("inf"), float("inf"))

    # ---- start and close ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process, which begins to build the env; return at once. Idempotent.

        Raises:
            LifeCycleError: the env was closed.
        """
        self._check_closed()
        if self._phase is _Phase.NEW:
            self._shared.launch()
            self._phase = _Phase.STARTED

    def initialize(self) -> None:
        """Wait until the env is built, and fetch its spaces. Idempotent. A process that dies meanwhile is restarted.

        Raises:
            LifeCycleError: the env was not started, or was closed.
            EnvError: the constructor raised an exception.
            EnvTimeout, WorkerDied: building the env took too long, or the process died more often than `max_restarts`.
        """
        self._check_closed()
        if self._phase is _Phase.NEW:
            raise LifeCycleError("The subprocess is not started yet. Call 'start()' before 'initialize()'.")
        if self._phase is _Phase.STARTED:
            spec = self._shared.env_spec(self._index)
            self._spaces = pickle.loads(spec.spaces)
            self._is_gymnasium = bool(spec.metadata["is_gymnasium"])
            for name, value in self._shared.description(self._index).items():
                setattr(self, name, value)
            self._phase = _Phase.READY

    def close(self) -> None:
        """Close the env, and end the process, in about two seconds at most. Idempotent.

        The processes of envs that were made together end when the last of these envs is closed.
        """
        if self._phase is not _Phase.CLOSED:
            self._phase = _Phase.CLOSED
            self._shared.close_envs([self._index])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> Literal[False]:
        self.close()
        return False

    # ---- the interface of an env -------------------------------------------------------------------------------------

    @property
    def observation_space(self) -> Any:  # type: ignore[override]
        """The observation space of the env, which `initialize` fetches. Reading it never waits."""
        self._check_initialized("observation_space")
        return self._spaces[0]

    @property
    def action_space(self) -> Any:  # type: ignore[override]
        """The action space of the env, which `initialize` fetches. Reading it never waits."""
        self._check_initialized("action_space")
        return self._spaces[1]

    def step(self, action: Any) -> Any:
        """Step the env and return its results.

        Raises:
            EnvError: the env raised.
            WorkerDied: the process died more often than `max_restarts`.
        """
        self._check_initialized("step()")
        with self._shared.lock:
            self._shared.send([action], [self._index], is_driven=False)
            is_step, value, fault = self._recv()
        if fault is not None:
            return self._as_env_result(self._last_obs, is_over=True, info=restart_info(fault))
        if not is_step:  # the step after a crash: the pool has begun the next episode
            self._last_obs = self.split_reset(value)[0]
            return self._as_env_result(self._last_obs, is_over=False, info={})
        self._last_obs = value[0]
        return value

    def reset(self, **kwargs: Any) -> Any:
        """Reset the env with these keyword arguments and return its results."""
        self._check_initialized("reset()")
        with self._shared.lock:
            self._shared.send_reset(self._index, None, kwargs)
            value = self._recv()[1]
        self._last_obs = self.split_reset(value)[0]
        return value

    def render(self, mode: str | None = "human") -> Any:
        """Return the result of the env's `render(mode)`, or of `render()` if it takes no mode. None means "human".

        Raises:
            EnvError: the env raised.
            WorkerDied: the process died. Unlike in actorcritic, this is raised, because a new process could only render
                another episode. The next `step` returns the end of the episode, and the step after it begins another.
        """
        self._check_initialized("render()")
        with self._shared.lock:
            return self._shared.pool.call("render_as", "human" if mode is None else mode, env_ids=[self._index])[0]

    def seed(self, seed: int | None = None) -> Any:
        """Call `seed` of the env, which old gym's envs have. actorcritic calls `gym.Env.seed`, which does not reach the env."""
        return self.call("seed", seed)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the env and return its result, or return another attribute."""
        self._check_initialized(name)
        with self._shared.lock:
            return self._shared.pool.call(name, *args, env_ids=[self._index], **kwargs)[0]

    # ---- for MultiEnv ------------------------------------------------------------------------------------------------

    @property
    def pool_position(self) -> tuple[SharedPool, int]:
        """The shared pool that runs the env, and the env's number in it."""
        self._check_initialized("step()")
        return self._shared, self._index

    @property
    def has_reset_info(self) -> bool:
        """Whether `reset` of the env returns a pair (observation, info). The adapter of an env that wraps this one asks."""
        return self._is_gymnasium

    def split_reset(self, value: Any) -> tuple[Any, Any]:
        """Return the observation and the info in a result of the env's `reset`; the info is {} if the result has none."""
        has_info = self._is_gymnasium and isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)
        return value if has_info else (value, {})

    def mark_closed(self) -> None:
        """Record that a MultiEnv closes the env."""
        self._phase = _Phase.CLOSED

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _recv(self) -> tuple[bool, Any, Mapping[str, str] | None]:
        """Return whether the result is one of a step, what the env returned, and the fault that ended its episode."""
        results, faults, errors = self._shared.recv([self._index])
        if errors:
            raise join_errors(errors)
        return (*results[self._index], faults.get(self._index))

    def _as_env_result(self, obs: Any, *, is_over: bool, info: dict[str, Any]) -> tuple[Any, ...]:
        return (obs, 0.0, False, is_over, info) if self._is_gymnasium else (obs, 0.0, is_over, info)

    def _check_closed(self) -> None:
        if self._phase is _Phase.CLOSED:
            raise LifeCycleError("The subprocess was closed already.")

    def _check_initialized(self, method: str) -> None:
        self._check_closed()
        if self._phase is _Phase.NEW:
            raise LifeCycleError(
                f"The subprocess is not started yet. Call 'start()' and 'initialize()' before calling '{method}'."
            )
        if self._phase is _Phase.STARTED:
            raise LifeCycleError(
                f"The subprocess is not initialized yet. Call 'initialize()' before calling '{method}'."
            )


def has_overrides(env: SubprocessEnv) -> bool:
    """Whether a subclass, or the object itself, overrides a method that a MultiEnv must then call."""
    names = ("step", "reset", "close", "_check_closed", "_check_initialized")
    return any(getattr_static(env, name) is not getattr_static(SubprocessEnv, name) for name in names)


def restart_info(fault: Mapping[str, str]) -> dict[str, Any]:
    """Return the info of an episode that ended because its worker died."""
    return {"worker_restarted": True, "TimeLimit.truncated": True, "fault": dict(fault)}


def create_subprocess_envs(
    env_fns: Sequence[Callable[[], object]], *, options: PoolOptions | None = None, **keywords: Unpack[OptionKeywords]
) -> list[SubprocessEnv]:
    """Return started and initialized envs in processes. All are built at the same time.

    Args:
        env_fns: one function per env, which is called again if the env's process died.
        options: as for SubprocessEnv. Without num_workers each env has its own process, as in actorcritic. Fewer processes
            are faster for fast envs, but if one dies, the episodes of all its envs end.
        **keywords: as for SubprocessEnv.
    Raises:
        EnvError: constructors raised; `others` has the further errors. (actorcritic returns such envs without an error.)
        EnvTimeout, WorkerDied: building took too long, or a process died.
    """
    functions = list(env_fns)
    if not functions:
        return []
    for index, env_fn in enumerate(functions):
        if not callable(env_fn):
            raise UsageError(f"env_fns[{index}] is a {type(env_fn).__name__}; give a function that makes the env")
    shared = SharedPool(functions, merge_options(options, keywords))
    envs = [_member(shared, index) for index in range(len(functions))]
    try:
        for env in envs:
            env.start()
            env.initialize()
    except StepmillError:
        shared.close()
        raise
    return envs


def _member(shared: SharedPool, index: int) -> SubprocessEnv:
    env = SubprocessEnv.__new__(SubprocessEnv)
    env._attach(shared, index)
    return env
