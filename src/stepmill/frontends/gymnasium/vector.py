"""`VectorEnv`: Gymnasium's vector env on top of `Pool`.

There are intended differences from `gymnasium.vector.AsyncVectorEnv` 1.4. No env is built in the parent. `options` is
never changed. After a timeout, the wait can be repeated. Errors are both stepmill's and Gymnasium's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
from gymnasium.vector import AutoresetMode as GymnasiumAutoreset
from gymnasium.vector import VectorEnv as GymnasiumVectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from stepmill.frontends.env_objects import env_objects
from stepmill.frontends.gymnasium.arguments import VectorKeywords, check_positions, read_keywords, read_options
from stepmill.frontends.gymnasium.errors import (
    ClosedVectorEnvError,
    NothingPendingError,
    PendingCallError,
    SpecMismatchError,
    WaitTimeout,
)
from stepmill.frontends.gymnasium.spaces import SpacePair, batch_observations, check_spaces, read_spaces
from stepmill.pool.arguments import checked_fns, select_rows
from stepmill.pool.auto_backend import begin_start
from stepmill.spec.batch import Batch
from stepmill.spec.closing import close_on_error
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import ArgumentTypeError, EnvTimeout, RecvTimeout, SpecMismatch, UsageError
from stepmill.spec.options import EnvState, PoolOptions, merge_options, name_of_backend

if TYPE_CHECKING:
    from typing_extensions import Never, Self, Unpack

    from stepmill.pool.pool import Pool
    from stepmill.pool.port import Seed
    from stepmill.spec.stats import PoolStats

StepResult: TypeAlias = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]

_ENV_API = frozenset({"reset", "step", "close"})


class _Waiting(Enum):
    """The pending result. It moves from NOTHING to any other member and back, and from any member to CLOSED."""

    NOTHING = "default"
    RESET = "reset"
    STEP = "step"
    CALL = "call"
    CLOSED = "closed"


_PENDING = (EnvState.BUSY, EnvState.READY)
_NOT_STEPPING = (EnvState.IDLE, EnvState.NEEDS_RESET)
_NOTHING = _Waiting.NOTHING  # looking up an enum's member is slow, and each `step` needs it


class VectorEnv(GymnasiumVectorEnv[Any, Any, NDArray[Any]]):
    """Runs many Gymnasium envs as one vector env.

    Args:
        env_fns: functions that make the envs. Each runs in the worker that owns its env. If all of them make vector
            envs, each vector env owns as many rows as it has envs.
        observation_mode: "same", "different" (same shapes and dtypes, other bounds), or a tuple (batched observation
            space, single observation space).
        options: how the envs are run.
        **keywords: fields of PoolOptions by name, in place of `options` or in addition: backend, num_workers,
            autoreset_mode (stepmill's or Gymnasium's), copy, on_fault and so on. Of Gymnasium's AsyncVectorEnv, `max_concurrency`
            sets `num_workers`, `shared_memory` and `daemon` have no effect, and `worker` must be None.

    Attributes:
        num_envs: the number of envs, which is that of the rows.
        observation_space: the space of all observations together, with a leading dimension of num_envs.
        action_space: the space of all actions together.
        single_observation_space: the space of one env's observations.
        single_action_space: the space of one env's actions.
        metadata: the metadata of the first env, and "autoreset_mode".
        render_mode: the render mode of the envs, or None.
        closed: whether `close` was called.

    Raises:
        EnvError: a constructor raised an exception.
        SpaceMismatchError: the envs' spaces cannot be batched.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        *misplaced: Never,
        observation_mode: str | SpacePair = "same",
        options: PoolOptions | None = None,
        **keywords: Unpack[VectorKeywords],
    ) -> None:
        check_positions(env_fns, misplaced)
        chosen = merge_options(options, read_keywords(keywords, options), episode_stats=False)
        self.env_fns = env_fns
        self.copy = chosen.copy
        self.observation_mode = observation_mode
        self.autoreset_mode = GymnasiumAutoreset(chosen.autoreset_mode.value)
        self._waiting = _Waiting.CLOSED
        self._read_call: Callable[..., Sequence[Any]] = tuple  # returns the results of the pending call
        # [N] bool, while the rest of a failed step is pending: rows whose results of that step are kept.
        self._kept: NDArray[np.bool_] | None = None
        self._pool = self._open(env_fns, chosen)
        from stepmill.pool.port import PoolPort  # as late as the pool

        self._port = PoolPort(self._pool)
        with close_on_error(self._pool.close):
            self._describe(self._pool.spec, self._port.env_specs)
        self._step_fast = self._port.step_fast
        self._waiting = _Waiting.NOTHING

    @staticmethod
    def _open(env_fns: Sequence[Callable[[], object]], options: PoolOptions) -> Pool:
        fns = checked_fns(env_fns)
        begin_start(fns, options)
        # Imported here, while the process that starts workers imports its own modules: the first pool of a program is ready sooner.
        from stepmill.pool.pool import Pool

        try:
            return Pool(fns, options=options)
        except SpecMismatch as exc:
            raise SpecMismatchError(exc.message, specs=exc.specs) from None

    def _describe(self, spec: EnvSpec, env_specs: Sequence[EnvSpec]) -> None:
        """Set the public attributes of a Gymnasium vector env."""
        own_mode = spec.metadata.get("autoreset_mode")
        if spec.is_batched and own_mode != self.autoreset_mode.value:
            raise UsageError(
                f"the batched envs have autoreset_mode={own_mode!r}, but the vector env has "
                f"autoreset_mode={self.autoreset_mode.value!r}; give both the same mode"
            )
        if spec.agents:
            raise UsageError(
                f"the envs have {len(spec.agents)} agents, but a Gymnasium vector env has one; use stepmill.Pool"
            )
        self.num_envs = self._pool.num_envs * spec.batch_size
        self.metadata = {**spec.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = spec.render_mode
        pairs = read_spaces(env_specs, allows_vectors=True)
        if spec.reward_space:  # named as in MO-Gymnasium, whose wrappers read it: the space of one env's reward
            self.reward_space = pickle.loads(spec.reward_space)
        self.single_action_space = pairs[0][1]
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        observations = [pair[0] for pair in pairs for _ in range(spec.batch_size)]
        self.observation_space, self.single_observation_space = batch_observations(observations, self.observation_mode)
        check_spaces(pairs, self.single_observation_space, is_same=self.observation_mode == "same")

    # ---- stepping and resetting ------------------------------------------------------------------------------------

    def step(self, actions: Any) -> StepResult:
        """Step all envs. Hot path.

        If an env fails, the results of the others are kept. Repair it with `reset(options={"reset_mask": mask})`. The next step
        returns the kept results, and steps only the envs without a kept result. Its `infos["kept"]`, a bool array [N], is True for
        kept results: they belong to the actions of the step that failed, and the new actions of these envs are not used.

        Args:
            actions: an element of `action_space`.

        Returns:
            observations [N, ...], rewards [N] float64, terminations [N] bool, truncations [N] bool, infos. If the envs have a
            `reward_space` of k numbers, rewards are [N, k], and float32 if the space is float32.
        """
        if self._waiting is not _NOTHING:
            self._refuse("step")
        try:
            return self._step_fast(actions)
        except UsageError as exc:
            self._step_rest(actions, exc)
            return self._read_step()

    def step_async(self, actions: Any) -> None:
        """Begin to step all envs; `step_wait` returns the results.

        Args:
            actions: an element of `action_space`.
        """
        self._check_idle("step_async")
        try:
            self._port.step_async(actions)
        except UsageError as exc:
            self._step_rest(actions, exc)
        self._waiting = _Waiting.STEP

    def _step_rest(self, actions: Any, error: UsageError) -> None:
        """Step the envs that have no result of a failed step; raise `error` if no step has failed."""
        states = self._pool.states
        failed = [env_id for env_id, state in enumerate(states) if state is EnvState.FAULTED]
        if failed:
            raise UsageError(
                f"envs {failed} have failed; repair them with reset(options={{'reset_mask': mask}}), which keeps the results "
                "of the others for the next step, or reset all with reset()"
            ) from error
        idle = [env_id for env_id, state in enumerate(states) if state in _NOT_STEPPING]
        if not any(state in _PENDING for state in states):
            if np.isscalar(actions):
                raise ArgumentTypeError(f"actions={actions!r} is a single number; give one action per env") from error
            raise error
        if not idle:
            raise PendingCallError(
                "the last step was interrupted; call step_wait() for its results, or reset()", "step"
            ) from error
        size = self._pool.spec.batch_size
        rows = [row for env_id in idle for row in range(env_id * size, (env_id + 1) * size)]
        self._pool.send(select_rows(self._pool.spec.action, actions, rows, self.num_envs), idle)
        self._kept = np.ones(self.num_envs, np.bool_)
        self._kept[rows] = False

    def _read_step(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the results of a step; mark those that are kept from a failed step."""
        obs, reward, terminated, truncated, infos = self._port.step_wait(timeout_s=timeout_s)
        kept, self._kept = self._kept, None
        if kept is not None:
            infos = {**infos, "kept": kept, "_kept": kept.copy()}
        return obs, reward, terminated, truncated, infos

    def _as_returned(self, batch: Batch) -> StepResult:
        """Return what `stepmill.restore` returns: the results of the last step before the envs were saved."""
        is_stepping = any(state in _PENDING for state in self._pool.states)
        self._waiting = _Waiting.STEP if is_stepping else _NOTHING
        obs, reward, terminated, truncated, info = batch
        return obs, reward, terminated, truncated, info

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Return the results of `step_async`, or of a `step` that Ctrl-C interrupted; see `step`.

        Args:
            timeout: seconds; None waits as long as an env is stepping in a worker that is alive.

        Raises:
            WaitTimeout: the envs did not finish in time. No result is lost; call step_wait() again.
        """
        result: StepResult = self._wait(_Waiting.STEP, self._read_step, timeout)
        return result

    def reset(
        self, *, seed: Seed = None, options: Mapping[str, Any] | None = None, persist_options: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those that a mask selects.

        Args:
            seed: an int s seeds env i with s + i; a list has one seed, or None, per env; None does not seed.
            options: passed to every env's reset, except "reset_mask": a bool array [N], True for the envs to reset. The
                other envs keep their last observation.
            persist_options: True also passes the options to later resets without options, including automatic ones; see `Pool.reset`.

        Returns:
            observations [N, ...] and infos.
        """
        self._check_idle("reset")
        self._kept = None
        mask, each = self._read_options(options)
        if mask is not None:
            self._pool.reset_async(seed=seed, options=each, mask=mask, persist_options=persist_options)
            return self._port.reset_wait()
        batch = self._pool.reset(seed=seed, options=each, persist_options=persist_options)
        return batch.obs, batch.info

    def reset_async(self, seed: Seed = None, options: Mapping[str, Any] | None = None) -> None:
        """Begin to reset envs; `reset_wait` returns the results. See `reset` for the arguments."""
        self._check_idle("reset_async")
        self._kept = None
        mask, each = self._read_options(options)
        self._pool.reset_async(seed=seed, options=each, mask=mask)
        self._waiting = _Waiting.RESET

    def _read_options(self, options: object) -> tuple[NDArray[np.bool_] | None, list[dict[str, Any]] | None]:
        """Return the reset mask, and a list of the other options of each env: a dict could be one by env id."""
        mask, rest = read_options(options, self.num_envs)
        return mask, None if rest is None else [rest] * self._pool.num_envs

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Return the results of `reset_async`: observations [N, ...] and infos.

        Args:
            timeout: seconds; None waits as long as an env is being reset in a worker that is alive.

        Raises:
            WaitTimeout: the envs did not finish in time. No result is lost; call reset_wait() again.
        """
        result: tuple[Any, dict[str, Any]] = self._wait(_Waiting.RESET, self._port.reset_wait, timeout)
        return result

    # ---- everything slow -------------------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env with the same arguments, through wrappers; return one result per env.

        If the attribute is not a method, its value is returned.
        """
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Begin a `call`; `call_wait` returns the results."""
        self._check_idle("call_async")
        if name in _ENV_API:
            raise UsageError(f"call() cannot call {name} of the envs; use {name}() of the vector env")
        if self._pool.spec.is_batched:
            name, args = "call", (name, *args)
        self._read_call = self._pool.call_async(name, *args, **kwargs).result
        self._waiting = _Waiting.CALL

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Return the results of `call_async`, one per env.

        Args:
            timeout: seconds; None waits as long as `workers.call_timeout_s` allows.

        Raises:
            WaitTimeout: the envs did not answer in time. No result is lost; call call_wait() again.
        """
        results = self._wait(_Waiting.CALL, self._read_call, timeout)
        self._read_call = tuple
        return self._flat(tuple(results))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every env. If it is a method, it is called, as in Gymnasium."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env, on the wrapper that has it.

        Args:
            name: the name of the attribute.
            values: a list or tuple with one value per env; any other value is set on all envs.
        """
        self._check_idle("set_attr")
        columns = list(values) if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(columns) != self.num_envs:
            raise UsageError(
                f"set_attr({name!r}) got {len(columns)} values for {self.num_envs} envs; "
                "give a list or tuple with one per env, or one value for all"
            )
        if not self._pool.spec.is_batched:
            self._pool.set_attr(name, columns)
            return
        size = self._pool.spec.batch_size
        for env_id in range(self._pool.num_envs):
            own = columns[env_id * size : (env_id + 1) * size]
            self._pool.call("set_attr", name, own, env_ids=[env_id])

    def render(self) -> tuple[Any, ...]:
        """Return the result of each env's `render`."""
        self._check_idle("render")
        return self._flat(self._pool.render())

    def _flat(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return one result per row. The result of a batched env is a tuple with one per row."""
        if not self._pool.spec.is_batched:
            return results
        return tuple(result for rows in results for result in (rows or ()))

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # as Gymnasium's own vector envs
        """The seed of every env's generator."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]  # read-only, as in Gymnasium's own vector envs
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """A copy of every env's generator."""
        return self.get_attr("np_random")

    @property
    def envs(self) -> tuple[Any, ...]:
        """The env objects, on the serial backend only, as in Gymnasium's SyncVectorEnv.

        Raises:
            AttributeError: the envs are objects in workers.
        """
        # A __getattr__ for all names would slow down each attribute of this class.
        instead = "get_attr(name) and set_attr(name, values) access their attributes, call(name, ...) their methods"
        return env_objects(self, self._pool, instead)

    def stats(self) -> PoolStats:
        """Return how each worker has spent its time since the start."""
        if self.closed and "_pool" not in vars(self):  # it was pickled
            self._refuse("stats")
        return self._pool.stats()

    def __getstate__(self) -> dict[str, Any]:
        if not self.closed:
            raise ArgumentTypeError(
                "a VectorEnv that is open cannot be pickled or copied, because its envs run in workers of this program; "
                "pickle a function that makes it, or close() it first"
            )
        return {name: value for name, value in vars(self).items() if name not in ("_pool", "_port", "_step_fast")}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = super().__repr__()
        return name if self.closed else f"{name[:-1]}, backend={name_of_backend(self._pool.options.backend)!r})"

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the envs and end the workers; the serial backend has no limit.

        Args:
            timeout: seconds that envs have for their `close`, after which their workers are killed; None means 1.5 s.
            terminate: True means a timeout of 0.
        """
        limits = [0.0] if terminate else [] if timeout is None else [timeout]
        self._waiting = _Waiting.CLOSED
        self._read_call = tuple
        self._pool.close(*limits)

    # ---- pending results -------------------------------------------------------------------------------------------

    def _check_idle(self, method: str) -> None:
        if self._waiting is not _Waiting.NOTHING:
            self._refuse(method)

    def _refuse(self, method: str) -> NoReturn:
        if self._waiting is _Waiting.CLOSED:
            raise ClosedVectorEnvError(f"{method}() was called after close(); make a new VectorEnv")
        pending = self._waiting.value
        raise PendingCallError(
            f"{method}() was called while a {pending} is pending; call {pending}_wait() first", pending
        )

    def _wait(self, kind: _Waiting, wait: Callable[..., Any], timeout: float | None) -> Any:
        if self._waiting is _Waiting.CLOSED:
            self._refuse(f"{kind.value}_wait")
        # An interrupted step() also has results to wait for.
        was_interrupted = kind is _Waiting.STEP and self._waiting is _NOTHING and self._port.has_results_of_all
        if self._waiting is not kind and not was_interrupted:
            raise NothingPendingError(f"no {kind.value} is pending; begin one with {kind.value}_async()", kind.value)
        is_over = True
        try:
            return wait(timeout_s=timeout)
        except (RecvTimeout, EnvTimeout) as exc:
            # An EnvTimeout of a step, or of a call that its worker has cancelled, is a fault, and the wait is over.
            if isinstance(exc, EnvTimeout) and (kind is not _Waiting.CALL or timeout is None or exc.remote_traceback):
                raise
            is_over = False
            raise WaitTimeout(exc.message, env_ids=exc.env_ids, timeout_s=exc.timeout_s) from exc
        finally:
            if is_over:
                self._waiting = _Waiting.NOTHING
