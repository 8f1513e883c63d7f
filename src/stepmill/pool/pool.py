"""`Pool`, the public class that steps many envs, all together or as they become ready."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from stepmill.pool.advice import give_advice
from stepmill.pool.arguments import check_timeouts, checked_batch_size, checked_fns, checked_num_envs
from stepmill.pool.auto_backend import choose_backend
from stepmill.pool.call_log import Name
from stepmill.pool.positions import Positions
from stepmill.pool.receiving import EnvIds, Receiver
from stepmill.pool.requests import EnvRequests, PoolFuture, PoolProperties
from stepmill.pool.resets import Options, ResetPlanner, Seed
from stepmill.pool.start import CLOSE_TIMEOUT_S, PoolResources, has_seeds, start_pool
from stepmill.pool.stats import read_stats
from stepmill.spec.batch import Batch
from stepmill.spec.closing import CloseAtEnd
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.spec.options import EnvState, OptionKeywords, PoolOptions, context_of, merge_options, name_of_backend
from stepmill.spec.received import Received
from stepmill.spec.stats import PoolStats
from stepmill.worker.calls import call_payload
from stepmill.worker.messages import RequestKind

if TYPE_CHECKING:
    import gymnasium
    from typing_extensions import Unpack

    from stepmill.envs.gymnasium import VectorSpaces


class Pool(CloseAtEnd):
    """Runs N envs, each with a fixed env_id from 0 to N-1.

    `step` steps all envs and waits for all of them. `send` and `recv` are the two halves of a step, for any subset of envs: `recv`
    returns the envs that are ready, longest-waiting first. Only one thread at a time may use a pool, but any thread may call `close`.
    `stepmill.monitor`, `stepmill.trace` and `stepmill.read_timers` take a pool, and front-ends use its `PoolPort`.

    Args:
        env_fns: functions without arguments that make the envs, one per env and then one per spare; the workers call them.
        batch_size: how many envs `recv` returns by default; None means all that are pending.
        options: how to run the envs.
        **keywords: fields of PoolOptions by name, instead of `options` or in addition.
    Raises:
        UsageError: the envs differ, or an option is wrong.
        EnvError: a constructor raised an exception.
        EnvTimeout: the envs were not built within `start.timeout_s`.
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
        self._env_fns = env_fns = checked_fns(env_fns)
        self._given = given = merge_options(options, keywords)
        choice = choose_backend(env_fns, given)
        self.options = replace(given, backend=choice, context=context_of(given))
        self._num_spares = self.options.resets.spare_envs
        self.num_envs = checked_num_envs(len(env_fns), self._num_spares)
        self.batch_size = checked_batch_size(batch_size, self.num_envs)
        # The owner of the workers, and the finalizer that ends them, exist before the first worker.
        self._resources = PoolResources()
        self._finalizer = weakref.finalize(self, self._resources.abandon)
        try:  # not close_on_error: a Ctrl-C at the end of its block would leave the workers running
            self._runtime = start_pool(env_fns, self.options, self._resources)
            self.spec: EnvSpec = self._runtime.specs[0]
            self.num_rows = self.num_envs * self.spec.batch_size
            self.num_workers = len(self._runtime.plans)
            self._state = self._runtime.state
            self._revival = self._runtime.revival
            self._recovery = self._revival.recovery
            self._waits = self._revival.waits
            self._requests = EnvRequests(self._runtime, self.options, num_envs=self.num_envs)
            self._receiver = Receiver(self._state, self._waits, self._recovery.news, self.num_envs, self.batch_size)
            self._resets = ResetPlanner(
                self.num_envs, self.spec.batch_size, is_seeded=has_seeds(self.options), num_spares=self._num_spares
            )
            self._last_reset: list[int] = []
            self._positions = Positions(self._runtime, self._requests, self._resets, self.options, self.num_envs)
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
        persist_options: bool = False,
    ) -> Batch:
        """Reset all envs, or some, and wait for them. Pending results of these envs are awaited and dropped.

        Args:
            seed: None; a number s, which gives env i the seed s + i; a list with one seed per env; or a dict from env id to seed.
            options: a mapping, of which the `reset` of each env gets a copy; a list with one mapping per env; or a dict from
                env id to mapping.
            env_ids: which envs; None is all.
            persist_options: True stores the options. Every later reset of the env without options gets them, including automatic
                resets and resets after a restart, until other options are stored; options=None clears them.
        Returns:
            A batch of B rows: obs [B, ...], reward 0, terminated and truncated False.
        Raises:
            EnvError, BadOutput, EnvTimeout, WorkerDied: an env failed. The other envs stay usable.
        """
        self._recovery.news.raise_errors()  # of an interrupted call, before results are dropped
        ids = self.reset_async(seed=seed, options=options, env_ids=env_ids, persist_options=persist_options)
        return self._receiver.recv_envs(ids)

    def step(self, actions: Any) -> Batch:
        """Step all envs, and wait for all results.

        Args:
            actions: in the structure of the action space, each array [N, ...]; arrays are cast within their kind if necessary.
        Returns:
            A batch of N rows, ordered by env_id. The row of an exhausted env has reward 0, no flags, and its last observation.
        Raises:
            EnvError, BadOutput, EnvTimeout, WorkerDied: as for `recv`.
            UsageError: all envs are exhausted.
        """
        self._waits.send(actions, None, skips_exhausted=True)
        return self.recv(self.num_envs)

    # ---- asynchronous -------------------------------------------------------------------------------------------

    def reset_async(
        self,
        *,
        seed: Seed = None,
        options: Options = None,
        env_ids: EnvIds | None = None,
        mask: NDArray[np.bool_] | None = None,
        persist_options: bool = False,
    ) -> list[int]:
        """Send resets, and return the ids of the envs to which they were sent. `recv` returns the observations.

        As with `send`, these are not the envs that are lost: the next `recv` raises their faults, and the next `receive` returns
        them. An earlier fault of these envs that was not received yet is dropped with a warning, as an earlier result is. With
        spares, a reset of all envs is sent to all of them or to none.

        Args:
            seed, options, env_ids, persist_options: as for `reset`.
            mask: [num_rows] bool, instead of env_ids. If the mask selects only some rows of a batched env, the env gets its
                part of the mask as the option "reset_mask".
        """
        plan = self._resets.plan(env_ids, mask, seed, options)
        if persist_options and self.spec.is_batched:
            raise UsageError(
                "persist_options does not work with batched envs, because they reset themselves; pass the options with each reset"
            )
        self._recovery.news.drop(plan.env_ids)
        self._recovery.news.warn()
        num_asked = len(plan.env_ids)
        is_set = not (persist_options and plan.options)
        while True:
            plan = self._revival.prepare_reset(plan)
            if num_asked and not plan.env_ids:
                break
            if not is_set:
                options_of = plan.options_with_spares(self._num_spares)
                self._requests.set(
                    RequestKind.SET_RESET_OPTIONS, "options", list(options_of.values()), list(options_of)
                )
                is_set = True
            spare_seeds = plan.spare_seeds if self._num_spares and plan.is_whole else None
            if self._waits.try_send(partial(self._state.send_reset, plan.env_ids, plan.words, plan.blobs, spare_seeds)):
                break  # else a worker has died since the last call
        self._resets.record_sent(plan)
        self._last_reset = plan.env_ids
        return plan.env_ids

    def send(self, actions: Any, env_ids: EnvIds | None = None) -> EnvIds:
        """Send actions to some envs, or all, and return at once the ids of the envs to which they were sent.

        These are the ids that were given, except those of envs whose worker is found dead, and of envs with a fault that was not
        received yet. The next `recv` raises these faults, and the next `receive` returns them.

        Args:
            actions: in the structure of the action space, each array [B, ...] in the order of env_ids.
            env_ids: which envs; None is all.
        Raises:
            BusyEnvError: an env is still stepping, or its result has not been received. Nothing is sent.
            UsageError: actions or ids are wrong. Nothing is sent.
        """
        return self._waits.send(actions, env_ids)

    def recv(
        self,
        batch_size: int | None = None,
        *,
        min_envs: int | None = None,
        max_envs: int | None = None,
        env_ids: EnvIds | None = None,
        timeout_s: float | None = None,
        linger_s: float = 0.0,
        out: Any = None,
    ) -> Batch:
        """Return envs that finished, longest-waiting first.

        Args:
            batch_size: how many envs; None means the `batch_size` of the pool, or all that are pending if that is None, too.
            min_envs, max_envs: instead of batch_size: return as soon as min_envs are ready, with at most max_envs. min_envs=0
                returns the envs that are ready now, which may be none (B = 0).
            env_ids: instead of a number, the envs to return, by ascending id. All of them must have a command.
            timeout_s: seconds; 0 does not wait; None waits while a living env is pending.
            linger_s: with max_envs, wait this many seconds longer for more envs once min_envs are ready.
            out: arrays in the structure of the observation, [B, ...] each, that receive the observations in place of new arrays.
        Raises:
            EnvError, BadOutput, EnvTimeout, WorkerDied: an env has a fault. Each is raised once; the other results can still be received.
            RecvTimeout, KeyboardInterrupt: nothing is lost; call recv() again.
            UsageError: more envs are requested than are pending.
        """
        return self._receiver.recv(batch_size, min_envs, max_envs, env_ids, timeout_s, linger_s, out)

    def receive(
        self,
        min_envs: int | None = 1,
        max_envs: int | None = None,
        timeout_s: float | None = None,
        linger_s: float = 0.0,
    ) -> Received:
        """Return the results of envs that finished, and the faults of those that failed, without raising them.

        Args:
            min_envs: wait for this many envs, each with a result or a fault; 0 does not wait; None means all that are pending.
            max_envs: return at most this many results; None means all that are ready.
            timeout_s: seconds, after which the call returns the results and faults that have arrived, possibly none; None means no limit.
            linger_s: wait this many seconds longer for max_envs once min_envs are ready.
        """
        return self._receiver.receive(min_envs, max_envs, timeout_s, linger_s)

    def revive(self, env_ids: EnvIds | None = None, *, wait: bool = True, restart_living: bool = False) -> None:
        """Revive FAULTED envs, and restart their workers if they are dead. The envs need a reset before the next step.

        Args:
            env_ids: which envs; None is all.
            wait: False does not wait for workers to start. A reset may be sent at once; `recv` raises if a start failed.
            restart_living: True also ends and restarts workers that are alive; only on the process backend.
        Raises:
            EnvError, EnvTimeout, WorkerDied: a worker could not be restarted.
            WorkerDied: a worker had died unnoticed, and another env has lost its episode. Revive all envs that the error names.
        """
        self._revival.revive_only(self._requests.checked_ids(env_ids), wait=wait, restart_living=restart_living)

    # ---- methods and attributes of envs: a request to an env runs after the commands sent to it before ----------------

    def call(
        self, name: str | Callable[..., Any], *args: Any, env_ids: EnvIds | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Call a method of envs, through wrappers, and return one result per env. For an attribute, return its value.

        Args:
            name: the name of the method; or a function, which the worker calls with the env (the outermost wrapper), then `args`.
            *args, **kwargs: the arguments, which are the same for every env, and are sent with cloudpickle.
            env_ids: which envs; None is all.
        """
        return self.call_async(name, *args, env_ids=env_ids, **kwargs).result()

    def call_async(
        self, name: str | Callable[..., Any], *args: Any, env_ids: EnvIds | None = None, **kwargs: Any
    ) -> PoolFuture:
        """Begin a `call`, and return at once. `result()` of the future returns the results."""
        return self._requests.send(RequestKind.CALL, env_ids, call_payload(name, args, kwargs))

    def get_attr(self, name: str | Callable[[Any], Any], *, env_ids: EnvIds | None = None) -> tuple[Any, ...]:
        """Return an attribute of envs, through wrappers, one per env.

        A function in place of a name is called in the worker with the env. It must only read, because replays do not repeat it.
        """
        return self._requests.send(RequestKind.GET_ATTR, env_ids, name).result()

    def set_attr(self, name: Name, values: Any, *, env_ids: EnvIds | None = None) -> None:
        """Set an attribute of envs, on the wrapper that has it. Rebuilt envs get its newest value.

        Args:
            name: the name of the attribute; or, for a setting that is not an attribute, a function, which the worker calls with the
                env (the outermost wrapper) and its value. Pass the same function object each time.
            values: a list or tuple with one value per env (for all envs, it may have one more per spare), or one value for all.
            env_ids: which envs; None means all, and the spares. A value stays with its env object, even if that serves another env.
        """
        self._requests.set(RequestKind.SET_ATTR, name, values, env_ids)

    @property
    def properties(self) -> PoolProperties:
        """Named values of envs that are separate from the data: `set(name, value)`, `get(name)`, `list()`."""
        send, kind = self._requests.send, RequestKind.GET_PROPERTIES
        set_property = partial(self._requests.set, RequestKind.SET_PROPERTY)
        return PoolProperties(set_property, lambda env_ids: send(kind, env_ids, None).result())

    def render(self, env_ids: EnvIds | None = None) -> tuple[Any, ...]:
        """Return the results of `render`, one per env, in the order of `env_ids`. None means all envs."""
        return self._requests.send(RequestKind.RENDER, env_ids, None).result()

    # ---- introspection, which does not wait -------------------------------------------------------------------------

    @property
    def ready_ids(self) -> list[int]:
        """The envs whose results can be received now."""
        return [env_id for env_id, state in enumerate(self._state.states()) if state == EnvState.READY]

    @property
    def exhausted(self) -> NDArray[np.bool_]:
        """[N] bool: which envs have completed their num_episodes."""
        return np.array([state is EnvState.EXHAUSTED for state in self.states])

    @property
    def states(self) -> list[EnvState]:
        """The state of each env, by env_id."""
        return [EnvState(number) for number in self._state.states()]

    @cached_property
    def _spaces(self) -> VectorSpaces:
        # The module is imported by name, because adapters import other libraries, which are loaded only with their
        # envs.
        return cast("VectorSpaces", import_module("stepmill.envs.gymnasium").vector_spaces(self.spec, self.num_rows))

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        """Gymnasium's space of the observations of all rows, with the bounds of env 0. Raises UsageError if the envs have no spaces."""
        return _declared("observation_space", self._spaces.observation)

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        """Gymnasium's space of the actions of all rows, with the bounds of env 0. Raises UsageError if the envs have no spaces."""
        return _declared("action_space", self._spaces.action)

    @property
    def single_observation_space(self) -> gymnasium.Space[Any]:
        """Gymnasium's space of one row's observation, that of env 0. Raises UsageError if the envs have no spaces."""
        return _declared("observation_space", self._spaces.single_observation)

    @property
    def single_action_space(self) -> gymnasium.Space[Any]:
        """Gymnasium's space of one row's action, that of env 0. Raises UsageError if the envs have no spaces."""
        return _declared("action_space", self._spaces.single_action)

    def stats(self) -> PoolStats:
        """Return the counters of the pool, and where time was spent since its start."""
        return read_stats(self._runtime)

    # ---- the end ------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Close the envs and end the workers. Any thread may call this. Later calls do nothing.

        Args:
            timeout_s: how long workers may take to close their envs before they are killed. The serial backend has no limit.
        """
        check_timeouts(timeout_s=timeout_s)
        runtime = getattr(self, "_runtime", None)  # None if the start failed
        if runtime is not None and not self._resources.is_closed:
            give_advice(runtime, self._given)
        self._resources.close(min(float(timeout_s), 1e6))  # a wait without end is too long for a lock
        self._finalizer.detach()

    def __repr__(self) -> str:
        backend = name_of_backend(self.options.backend)
        closed = ", closed" * self._resources.is_closed
        return f"Pool(num_envs={self.num_envs}, backend={backend!r}, num_workers={self.num_workers}{closed})"


def _declared(name: str, space: gymnasium.Space[Any] | None) -> gymnasium.Space[Any]:
    if space is None:
        raise UsageError(f"the envs declare no {name}; set the attribute {name} of each env to a gymnasium.Space")
    return space
