"""The public Pool: many envs, stepped together or as they get ready."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from stepmill import _native, timers
from stepmill.pool.arguments import checked_batch_size, checked_fns, checked_num_envs
from stepmill.pool.properties import PoolProperties
from stepmill.pool.receiving import Receiver
from stepmill.pool.requests import EnvRequests, PoolFuture
from stepmill.pool.resets import Options, ResetDesk, Seed
from stepmill.pool.settings import Name
from stepmill.pool.start import PoolResources, has_log, start_pool
from stepmill.pool.stats import PoolStats, read_stats
from stepmill.pool.timers import read_timers
from stepmill.pool.waiting import PoolWait
from stepmill.spec.batch import Batch
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.spec.options import EnvState, OptionKeywords, PoolOptions, Seeding, merge_options
from stepmill.spec.tree import Node, program, walk
from stepmill.worker.calls import call_payload
from stepmill.worker.messages import RequestKind

if TYPE_CHECKING:
    import gymnasium
    from typing_extensions import Self, Unpack

    from stepmill.envs.gymnasium import VectorSpaces

EnvIds = Sequence[int] | NDArray[np.integer[Any]]
StepTuple = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


class Pool:
    """Runs N envs, each under an env_id from 0 to N-1 for the life of the pool.

    `step` steps all envs and waits for all. `send` and `recv` do it in two halves, for any subset: `recv` returns the
    envs that are ready, longest-waiting first. A pool is used by one thread at a time; `close` may come from any.

    Args:
        env_fns: functions without arguments, one per env and then one per spare; called in the workers.
        batch_size: how many envs `recv` returns if it is not told; None is all that are pending.
        options: how the envs are run.
        **keywords: fields of PoolOptions by name, in place of `options` or beside it.
    Raises:
        UsageError: the envs differ, or an option is wrong.
        EnvError: a constructor raised.
        WorkerDied: a worker ended while it built its envs.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], object]],
        *,
        batch_size: int | None = None,
        options: PoolOptions | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> None:
        env_fns = checked_fns(env_fns)
        self.options = merge_options(options, keywords)
        self._num_spares = self.options.spare_envs
        self.num_envs = checked_num_envs(len(env_fns), self._num_spares)
        self.batch_size = checked_batch_size(batch_size, self.num_envs)
        # What owns the workers, and what ends them when the pool is garbage, exist before the first worker.
        self._resources = PoolResources()
        self._finalizer = weakref.finalize(self, self._resources.abandon)
        try:
            self._running = start_pool(env_fns, self.options, self._resources)
            self.env_specs: tuple[EnvSpec, ...] = self._running.specs[: self.num_envs]
            self.spare_specs: tuple[EnvSpec, ...] = self._running.specs[self.num_envs :]
            self.spec: EnvSpec = self.env_specs[0]
            self.num_rows = self.num_envs * self.spec.batch_size
            self.num_workers = len(self._running.plans)
            self._state = self._running.state
            self._unclaimed = self._state.unclaimed
            self._faults = self._running.faults
            self._waits = PoolWait(self._state, self._faults, self.options)
            self._requests = EnvRequests(
                self._running.backend, self._faults, self._running.seats, self.options, num_envs=self.num_envs
            )
            self._receiver = Receiver(self._state, self._waits, self.num_envs, self.batch_size)
            self._resets = ResetDesk(
                self.num_envs,
                self.spec.batch_size,
                is_seeded=self.options.seeding is not Seeding.CONTINUE or has_log(self.options),
                num_spares=self._num_spares,
            )
            self._last_reset: list[int] = []
        except BaseException:
            self.close()
            raise

    # ---- synchronous --------------------------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: Seed = None,
        options: Options = None,
        env_ids: EnvIds | None = None,
        persist_options: bool | None = None,
    ) -> Batch:
        """Reset all envs, or some, and wait for them. What they were doing is waited for and dropped.

        Args:
            seed: None; s, which gives env i the seed s + i; a list, one per env; or a dict from env id to seed.
            options: a mapping, handed to each env's `reset`, every env a copy of its own; or, for each env its own, a
                list, or a dict from env id to mapping.
            env_ids: which envs; None is all.
            persist_options: True keeps the options: every reset of that env that is given none gets them again,
                automatic ones and those after a restart too, until others are kept; with options=None it forgets them.
                None is the pool's own `persist_options`.
        Returns:
            B rows: obs [B, ...], reward 0, terminated and truncated False.
        Raises:
            EnvError: an env raised. The others stay usable.
        """
        ids = self.reset_async(seed=seed, options=options, env_ids=env_ids, persist_options=persist_options)
        self._waits.wait_for(ids, None)
        return self._receiver.collect(len(ids), len(ids), None, ids)

    def step(self, actions: Any) -> Batch:
        """Step all envs and wait for all.

        Args:
            actions: in the structure of the action space, each array [N, ...]; cast within its kind if need be.
        Returns:
            N rows in env order. That of an exhausted env has reward 0, no flag, and its last observation.
        Raises:
            UsageError: all envs are exhausted.
        """
        self.step_async(actions)
        return self.recv(self.num_envs)

    def step_fast(self, actions: Any) -> StepTuple:
        """Step all envs: Gymnasium's five values, by the shortest way. Hot path.

        Large observation arrays are leased: they stay valid while referenced, and are not copied.
        """
        result = None
        try:
            result = self._state.step(actions)
            self._unclaimed[0] = False
            return result if result is not None else self.step_wait()
        except _native.DeadWorkers:  # nothing was sent
            self.step_async(actions)
            return self.step_wait()
        except BaseException:
            self._receiver.take_back(result)
            raise

    # ---- asynchronous -------------------------------------------------------------------------------------------

    def reset_async(
        self,
        *,
        seed: Seed = None,
        options: Options = None,
        env_ids: EnvIds | None = None,
        mask: NDArray[np.bool_] | None = None,
        persist_options: bool | None = None,
    ) -> list[int]:
        """Command resets, and return the ids of the envs concerned. `recv` brings their observations.

        Args:
            seed, options, env_ids, persist_options: as for `reset`.
            mask: [num_rows] bool, instead of env_ids; a batched env of which only some rows are masked is handed
                those as its own "reset_mask".
        """
        order = self._resets.order(env_ids, mask, seed, options)
        is_wanted = self.options.persist_options and options is not None if persist_options is None else persist_options
        if is_wanted and self.spec.is_batched:
            raise UsageError("persist_options is for envs that the engine resets, and batched envs reset themselves")
        self._waits.prepare_reset(order)
        if is_wanted and order.given:
            given = order.given_with(self._num_spares)
            self._requests.set(RequestKind.KEEP_OPTIONS, "options", list(given.values()), list(given))
        while not self._waits.try_send(lambda: self._state.send_reset(order.env_ids, order.words, order.blobs)):
            self._waits.prepare_reset(order)  # a worker has died meanwhile
        self._resets.note_sent(order)
        if self._num_spares and order.is_whole:
            self._state.stage_spares(order.spare_seeds)
        self._last_reset = order.env_ids
        return order.env_ids

    def send(self, actions: Any, env_ids: EnvIds | None = None) -> None:
        """Give actions to some envs, or all, and return at once.

        Args:
            actions: in the structure of the action space, each array [B, ...] in the order of env_ids.
            env_ids: which envs; None is all.
        Raises:
            BusyEnvError: one of them is still stepping, or its result was not received. Nothing is sent.
            UsageError: actions or ids are wrong. Nothing is sent.
        """
        self._waits.send(partial(self._state.send, actions, env_ids))

    def recv(
        self,
        batch_size: int | None = None,
        *,
        min_envs: int | None = None,
        max_envs: int | None = None,
        env_ids: EnvIds | None = None,
        timeout_s: float | None = None,
        out: Any = None,
    ) -> Batch:
        """Return envs that finished, longest-waiting first.

        Args:
            batch_size: exactly so many envs; None is the pool's, or else all that are pending.
            min_envs, max_envs: instead of batch_size: return as soon as min_envs are there, with at most max_envs.
            env_ids: instead of a number: exactly these envs, by ascending id; all of them were sent something.
            timeout_s: seconds; 0 asks without waiting; None waits while something live is pending.
            out: arrays in the structure of the observation, [B, ...] each, to be written in place of fresh ones.
        Raises:
            EnvError, BadOutput, WorkerDied: an env has a fault. It is told once; the others stay receivable.
            RecvTimeout: too slow. Nothing is lost; call recv() again.
            KeyboardInterrupt: nothing is lost; call recv() again.
            UsageError: more envs are wanted than are pending.
        """
        return self._receiver.recv(batch_size, min_envs, max_envs, env_ids, timeout_s, out)

    def recv_ready(self) -> Batch:
        """Return what is ready now, which may be nothing (B = 0)."""
        self._waits.poll()
        return self._receiver.collect(0, self.num_envs)

    # ---- for front-ends in Gymnasium's shape --------------------------------------------------------------------

    def reset_rows(
        self, mask: NDArray[np.bool_], seed: Seed = None, options: Options = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the rows of a mask; newest observations of all N rows, and infos [N] of those that were reset."""
        self.reset_async(seed=seed, options=options, mask=mask)
        return self.reset_wait()

    def reset_wait(self, timeout_s: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the envs of the last `reset_async`; observations of all N rows, and infos [N] of those envs."""
        self._waits.wait_for(self._last_reset, timeout_s)
        result = None
        try:
            while (result := self._state.collect_rows(self._last_reset)) is None:
                self._waits.wait_for(self._last_reset, timeout_s)
            self._unclaimed[0] = False
            return result
        except BaseException:
            self._receiver.take_back(result)
            raise

    def step_async(self, actions: Any) -> None:
        """Command a step of all envs but those that are exhausted."""
        self._waits.send(partial(self._state.send_all, actions))

    def step_wait(self, timeout_s: float | None = None) -> StepTuple:
        """Wait for all envs; Gymnasium's five values."""
        self._waits.wait_any(self.num_envs, timeout_s)
        result = None
        try:
            while (result := self._state.collect_ready()) is None:
                self._waits.wait_any(self.num_envs, timeout_s)
            self._unclaimed[0] = False
            return cast("StepTuple", result)
        except BaseException:
            self._receiver.take_back(result)
            raise

    def revive(self, env_ids: EnvIds | None = None, *, wait: bool = True, anew: bool = False) -> None:
        """Bring FAULTED envs back, whose workers are restarted if they are dead; reset them before they are stepped.

        Args:
            env_ids: which envs; None is all.
            wait: False does not wait for workers to start. A reset can be commanded at once: its result, or the reason
                why the worker could not be started, is received like any other.
            anew: workers that live are ended and started anew, too; on the process backend.
        Raises:
            EnvError, EnvTimeout, WorkerDied: a worker could not be restarted.
        """
        ids = self._requests.checked_ids(env_ids)
        if not anew:
            self._faults.warn_of_losses(ids)
        self._faults.revive(ids, wait=wait, anew=anew)
        self._faults.raise_errors()

    # ---- methods and attributes of envs: a request to an env runs after the commands sent to it before ----------------

    def call(
        self, name: str | Callable[..., Any], *args: Any, env_ids: EnvIds | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Call a method of envs, through wrappers; an attribute that is no method is returned.

        Args:
            name: of the method; or a function, which is called in the worker with the env, outermost wrapper and all, as
                its first argument.
            *args, **kwargs: for every env; they travel by cloudpickle.
            env_ids: which envs; None is all.
        Returns:
            One result per env.
        """
        return self.call_async(name, *args, env_ids=env_ids, **kwargs).result()

    def call_async(
        self, name: str | Callable[..., Any], *args: Any, env_ids: EnvIds | None = None, **kwargs: Any
    ) -> PoolFuture:
        """Begin a `call`; the future's `result()` gives its results."""
        return self._requests.send(RequestKind.CALL, env_ids, call_payload(name, args, kwargs))

    def get_attr(self, name: str | Callable[[Any], Any], *, env_ids: EnvIds | None = None) -> tuple[Any, ...]:
        """Return an attribute of envs, through wrappers, one per env.

        Instead of a name, a function that is called in the worker with the env, and only reads: unlike what `call` does, it
        is not repeated when an episode is played again.
        """
        return self._requests.send(RequestKind.GET_ATTR, env_ids, name).result()

    def set_attr(self, name: Name, values: Any, *, env_ids: EnvIds | None = None) -> None:
        """Set an attribute of envs, on the wrapper that has it. Envs that are built anew are given its newest value.

        Args:
            name: of the attribute; or a function, which is called in the worker with the env, outermost wrapper and all,
                and its value, for what takes more than an attribute. Give the same function object each time.
            values: a list or tuple has one value per env; anything else is for all, spares too.
            env_ids: which envs; None is all. A value of its own stays with the env object, whichever env that serves;
                a list for all may have one more value for each spare.
        """
        self._requests.set(RequestKind.SET_ATTR, name, values, env_ids)

    @property
    def properties(self) -> PoolProperties:
        """Named values that envs are given beside the data: `set(name, value)`, `get(name)`, `list()`."""
        return PoolProperties(
            partial(self._requests.set, RequestKind.SET_PROPERTY),
            lambda env_ids: self._requests.send(RequestKind.GET_PROPERTIES, env_ids, None).result(),
        )

    def timers(self) -> timers.Tree:
        """Return the calling thread's timers, with those of all workers added up under "workers"; see `stepmill.timers`."""
        return read_timers(self._running, self._requests.ids)

    def render(self, env_ids: EnvIds | None = None) -> tuple[Any, ...]:
        """Return what each env's `render` gives, one per env."""
        return self._requests.send(RequestKind.RENDER, env_ids, None).result()

    # ---- introspection, which waits for nothing ---------------------------------------------------------------------

    @property
    def ready_ids(self) -> list[int]:
        """Envs whose result can be received now."""
        return self._state.ready_ids()

    @property
    def has_results_of_all(self) -> bool:
        """Whether every env is stepping or has a result to be received."""
        return self._state.num_pending() == self.num_envs

    def observe(self, env_ids: EnvIds | None = None) -> Any:
        """Return the newest observations that were received of some envs, or all, [B, ...]; zeros before the first."""
        return self._state.observe(env_ids)

    @property
    def exhausted(self) -> NDArray[np.bool_]:
        """[N] bool, which envs have played their num_episodes."""
        return np.array([state is EnvState.EXHAUSTED for state in self.states])

    @property
    def num_ended(self) -> NDArray[np.int64]:
        """[N] int64, how many episodes of its num_episodes each env has ended; not counted if there is no budget."""
        return np.array(self._state.num_ended(), np.int64)

    @property
    def states(self) -> list[EnvState]:
        """What each env is doing, by env_id."""
        return [EnvState(number) for number in self._state.states()]

    @property
    def worker_of(self) -> tuple[int, ...]:
        """Which worker owns each env, by env_id: envs of one worker are lost together."""
        return tuple(self._state.worker_of(env_id) for env_id in range(len(self._state.states())))

    @cached_property
    def _spaces(self) -> VectorSpaces:
        # By name: the adapters import foreign libraries, which are loaded only where their envs are.
        return cast("VectorSpaces", import_module("stepmill.envs.gymnasium").vector_spaces(self.spec, self.num_rows))

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        """Gymnasium's space of the observations of all rows; bounds are those of env 0. UsageError if the envs have none."""
        return self._spaces.observation

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        """Gymnasium's space of the actions of all rows, each with the bounds of env 0. UsageError if the envs have none."""
        return self._spaces.action

    @property
    def single_observation_space(self) -> gymnasium.Space[Any]:
        """Gymnasium's space of one row's observation, as env 0 has it. UsageError if the envs have none."""
        return self._spaces.single_observation

    @property
    def single_action_space(self) -> gymnasium.Space[Any]:
        """Gymnasium's space of one row's action, as env 0 has it. UsageError if the envs have none."""
        return self._spaces.single_action

    def xla(self) -> tuple[Any, ...]:
        """Return EnvPool's (handle, recv, send, step), for use inside JAX's `jit`; see `stepmill.jax.xla`."""
        return cast("tuple[Any, ...]", import_module("stepmill.jax").xla(self))

    @property
    def memory_place(self) -> tuple[int, int]:
        """Address and size in bytes of the shared memory that results lie in, for programs that lock its pages."""
        return cast("tuple[int, int]", self._running.slab.native.place())

    def stats(self) -> PoolStats:
        """Return where the time went since the start, per worker."""
        return read_stats(self._running)

    # ---- for front-ends whose users want classes and tensors in place of arrays -----------------------------------------

    def set_observation_format(
        self,
        observation: Node,
        *,
        wrap: Callable[[NDArray[Any]], object] | None = None,
        given: Mapping[int, NDArray[Any]] | None = None,
    ) -> None:
        """Say in which form batches of observations are handed out from now on: it costs no pass over what is made.

        Args:
            observation: the tree of `spec.observation`, its tuples with factories of your own.
            wrap: called with each array [B, ...]; what it returns takes the array's place. If it raises, the results can be
                received again.
            given: by number of a leaf, an array [num_rows, ...] of that leaf's dtype: what the rows hold there, whatever
                the envs say.
        Raises:
            UsageError: the tree has other leaves than `spec.observation`, or an array does not fit its leaf.
        """
        if list(walk(observation)) != list(walk(self.spec.observation)):
            raise UsageError(
                f"{observation} has other leaves than this pool's observations, {self.spec.observation}; give the same "
                "tree, with other factories"
            )
        arrays = {index: np.ascontiguousarray(array) for index, array in (given or {}).items()}
        self._state.hand_out(program(observation), wrap, arrays)

    def step_obs(self, actions: Any) -> Any:
        """Step all envs and return the newest observations, without rewards, flags and infos. Hot path."""
        obs = None
        try:
            obs = self._state.step_obs(actions)
            self._unclaimed[0] = False
            return obs if obs is not None else self.step_wait()[0]
        except _native.DeadWorkers:  # nothing was sent
            self.step_async(actions)
            return self.step_wait()[0]
        except BaseException:
            self._receiver.take_back(obs)
            raise

    # ---- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers and close the envs, in at most 2 s. Idempotent, and from any thread."""
        self._resources.close()
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._resources.is_closed else ""
        return f"Pool(num_envs={self.num_envs}, num_workers={self.num_workers}{state})"
