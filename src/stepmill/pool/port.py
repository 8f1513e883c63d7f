"""The interface of a pool for front-ends: `PoolPort`, in addition to the public methods, and functions that front-ends share with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill.backends.base import traits_of
from stepmill.pool.arguments import check_leaves, checked_count, checked_fns, checked_ids, whole_ids
from stepmill.pool.auto_backend import choose_backend
from stepmill.pool.infos import OMITTED, merge, rows_of
from stepmill.pool.payloads import reserved_keys
from stepmill.pool.plans import plan_workers
from stepmill.pool.pool import Pool
from stepmill.pool.positions import Positions, SavedEnvs, StateFunctions
from stepmill.pool.receiving import READY, EnvIds
from stepmill.pool.requests import PoolFuture, SentPart
from stepmill.pool.resets import Options, Seed, spread_seed
from stepmill.pool.saved_file import read_saved, write_saved
from stepmill.pool.start import CLOSE_TIMEOUT_S, worker_settings
from stepmill.pool.stats import read_timers
from stepmill.pool.workers import WorkerState
from stepmill.slab.memory import SharedSlab
from stepmill.spec.batch import Batch
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import EnvTimeout, UsageError, WorkerDied
from stepmill.spec.received import EnvFault
from stepmill.spec.tree import Leaf, Node, Opaque, map_tree, program
from stepmill.worker.calls import call_payload
from stepmill.worker.messages import RequestKind

__all__ = [  # all names of `stepmill.pool`, except Pool, that packages above it may import
    "CLOSE_TIMEOUT_S", "OMITTED", "EnvIds", "Options", "PoolFuture", "PoolPort", "SavedEnvs", "Seed", "SentPart", "StateFunctions",
    "StepTuple", "checked_count", "checked_fns", "checked_ids", "choose_backend", "merge", "plan_workers", "read_saved",
    "read_timers", "rows_of", "spread_seed", "whole_ids", "worker_settings", "write_saved",
]  # fmt: skip

StepTuple = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


class PoolPort:
    """Provides steps and resets in Gymnasium's form, formats of observations, and facts for front-ends. It has no state.

    Attributes:
        env_fns: the functions that made the envs and spares.
        env_specs, spare_specs: the specs of the envs, and of the spares.
        slab: the shared memory of the pool, for tools that read it.
        positions: takes and restores the positions of envs.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.env_fns: Sequence[Callable[[], object]] = pool._env_fns
        self.env_specs: tuple[EnvSpec, ...] = pool._runtime.specs[: pool.num_envs]
        self.spare_specs: tuple[EnvSpec, ...] = pool._runtime.specs[pool.num_envs :]
        self.slab: SharedSlab = pool._runtime.slab
        self.positions: Positions = pool._positions
        self._state = pool._state
        self._unclaimed = pool._state.unclaimed
        self._waits = pool._waits
        self._receiver = pool._receiver
        self._recovery = pool._recovery

    # ---- steps and resets ----------------------------------------------------------------------------------------------

    def step_fast(self, actions: Any) -> StepTuple:
        """Step all envs and return Gymnasium's five values. Hot path.

        Large observation arrays are leased: they stay valid while referenced, and are not copied.
        """
        result = None
        try:
            result = self._state.step(actions)
            self._unclaimed[0] = False
            return result if result is not None else self.step_wait()
        except BaseException as error:
            return self._finish_step(error, result, actions)

    def step_obs(self, actions: Any, read: Callable[[StepTuple], Any] = itemgetter(0)) -> Any:
        """Step all envs and return the newest observations, without rewards, flags and infos. Hot path.

        `read` returns them from the results of a step in which envs may have had faults.
        """
        obs = None
        try:
            obs = self._state.step_obs(actions)
            self._unclaimed[0] = False
            return obs if obs is not None else read(self.step_wait())
        except BaseException as error:
            return read(self._finish_step(error, obs, actions))

    def _finish_step(self, error: BaseException, result: object, actions: Any) -> StepTuple:
        """Finish a fast step that has raised an exception. Repeat it if it found dead workers, and else raise an error."""
        if isinstance(error, _native.DeadWorkers):  # nothing was sent
            self.step_async(actions)
            return self.step_wait()
        self._receiver.restore_unclaimed(result)
        if isinstance(error, UsageError):
            self._recovery.news.raise_errors()  # an interrupt has delayed these errors, which are why the step is refused
        raise error

    def step_async(self, actions: Any) -> None:
        """Send actions to all envs that are not exhausted."""
        self._waits.send(actions, None, skips_exhausted=True)

    def step_wait(self, timeout_s: float | None = None) -> StepTuple:
        """Wait for all envs, and return Gymnasium's five values."""
        wait = partial(self._waits.wait, timeout_s, self.pool.num_envs)
        # This is one expression, because Ctrl-C between two lines would lose the result.
        return self._receiver.wait_and_collect(wait, self._state.collect_ready)

    def reset_rows(
        self, mask: NDArray[np.bool_], seed: Seed = None, options: Options = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the rows that a mask selects.

        Return the newest observations of all N rows, and infos [N] of the rows that were reset.
        """
        self._recovery.news.raise_errors()  # of an interrupted call, before results are dropped
        self.pool.reset_async(seed=seed, options=options, mask=mask)
        return self.reset_wait()

    def reset_wait(self, timeout_s: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the envs of the last `reset_async`. Return observations of all N rows, and infos [N] of those envs."""
        ids = self.pool._last_reset
        wait, collect = partial(self._waits.wait, timeout_s, env_ids=ids), partial(self._state.collect_rows, ids)
        return self._receiver.wait_and_collect(wait, collect)

    # ---- observations of other classes, or tensors ---------------------------------------------------------------------

    def set_observation_format(
        self,
        observation: Node,
        *,
        wrap: Callable[[NDArray[Any]], object] | None = None,
        given: Mapping[int, NDArray[Any]] | None = None,
    ) -> None:
        """Set the format in which batches of observations are built. No later conversion is needed.

        Args:
            observation: the tree of `spec.observation`, with other factories for its tuples.
            wrap: a function of one array [B, ...], whose result replaces the array. If it raises an exception, the
                results can be received again.
            given: by index of a leaf, an array [num_rows, ...] of that leaf's dtype, which replaces the values of the envs.
        Raises:
            UsageError: the tree has other leaves than `spec.observation`, or an array does not fit its leaf.
        """
        check_leaves(observation, self.pool.spec.observation)
        arrays = {index: np.ascontiguousarray(array) for index, array in (given or {}).items()}
        self._state.set_observation_format(program(observation), wrap, arrays)

    def observe(self, env_ids: EnvIds | None = None) -> Any:
        """Return the newest received observations [B, ...] of these envs, or of all. Before a first result, they are 0."""
        return self._state.observe(env_ids)

    # ---- event loops, and one env at a time ----------------------------------------------------------------------------

    @property
    def event_fd(self) -> int:
        """The descriptor that becomes readable after `watch`. The pool owns it."""
        return self.slab.event

    def prepare_event_loop(self) -> None:
        """Check that an event loop can wait for the pool, and let restarts leave a core free for the event loop.

        Raises:
            UsageError: the envs run in the thread that waits for them, which would be blocked.
        """
        if traits_of(self.pool._runtime.backend).driver.keys() & {"loop", "advance", "kernel"}:
            raise UsageError(
                "the envs of this backend run in the thread that waits for them, so they would block an event loop; "
                "use backend='process' or 'thread'"
            )
        self._recovery.workers.leave_core_free()

    def has_news(self, min_envs: int | None, max_envs: int | None) -> bool:
        """Return whether `Pool.receive` would return now, and handle faults and events that have arrived."""
        return self._receiver.has_news(min_envs, max_envs)

    def watch(self, num_envs: int) -> bool:
        """Make the descriptor `event_fd` readable when `num_envs` of the stepping envs, or all, may be ready, or another event occurs.

        Returns:
            False if this is already the case: receive first. A call that waits for the pool ends the watch.
        """
        return self._state.watch(num_envs)

    def as_batch(self, action: Any) -> Any:
        """Return the action of one env as the actions of a batch of one.

        Raises:
            UsageError: the action does not have the structure of the action space.
        """
        try:
            return map_tree(_in_batch, self.pool.spec.action, action)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UsageError(f"the action does not have the structure of the action space: {error!r}") from error

    def send_one(self, env_id: int, action: Any) -> bool:
        """Send the action of one env, as `Pool.send` does. Return whether it was sent. Hot path."""
        is_array = type(self.pool.spec.action) is Leaf
        actions = np.asarray(action)[np.newaxis] if is_array else self.as_batch(action)
        try:
            self._state.send(actions, [env_id])
        except (UsageError, _native.DeadWorkers):
            if env_id in self._recovery.news.raised:  # a call has raised its fault, and `receive` returns it, too
                return False
            return len(self.pool.send(actions, [env_id])) > 0
        return True

    def poll(self) -> tuple[Batch | None, Mapping[int, EnvFault]]:
        """Return the results and faults that `Pool.receive` returns without waiting. Hot path: results alone take few calls."""
        state, news, fields = self._state, self._recovery.news, None
        if not (news.faults or news.raised or news.notices) and state.num_pending():
            try:
                if state.wait(0.0, num_envs=1) == READY and (fields := state.collect(self.pool.num_envs)) is not None:
                    self._unclaimed[0] = False
                    return Batch(*fields), {}
            except BaseException:
                self._receiver.restore_unclaimed(fields)
                raise
        received = self.pool.receive(0)
        return received.batch, received.faults

    def call_now(self, env_id: int, name: str | Callable[..., Any], args: Any, kwargs: Any) -> PoolFuture | None:
        """Begin a `Pool.call` of one env without waiting. Return None while the env is being rebuilt; try again later.

        Raises:
            WorkerDied: the env was lost with its worker, and its successor has not begun an episode.
        """
        view = self._recovery.workers.view_of(env_id)
        if view.phase in ("LOST", "DOOMED", "RENEWED"):
            text = f"env {env_id} was lost with its worker {view.worker}, and was not reset since; reset it before it is called"
            raise WorkerDied(text, worker=view.worker, env_ids=[env_id])
        with suppress(EnvTimeout):
            return self.pool._requests.send(RequestKind.CALL, [env_id], call_payload(name, args, kwargs), 0.0)
        return None

    def watch_call(self, future: PoolFuture, callback: Callable[[], object]) -> SentPart | None:
        """Watch a call of one env, and return what was sent, as `PoolFuture` does. Then call `result(0)`, which may begin it again."""
        return future._watch(callback)

    def is_rebuilt(self, env_id: int) -> bool:
        """Return whether no replay is rebuilding an env; a reset would wait for its end. Handle deaths that this finds."""
        with suppress(EnvTimeout):
            self.pool._revival.wait_until_rebuilt([self._recovery.workers.worker_of(env_id)], 0.0)
            return True
        return False

    def is_lost(self, env_id: int) -> bool:
        """Whether the worker of an env is dead and an error has been raised for it, so that only `Pool.revive` restarts it."""
        workers = self._recovery.workers
        return workers.records[workers.worker_of(env_id)].state is WorkerState.DEAD_REPORTED

    def row_of(self, obs: Any, row: int) -> Any:
        """Return one row of a batch of observations. Hot path."""
        if type(self.pool.spec.observation) is Leaf:
            return obs[row]
        return map_tree(lambda part, column: column[row], self.pool.spec.observation, obs)

    # ---- facts ---------------------------------------------------------------------------------------------------------

    @property
    def reserved_info_keys(self) -> frozenset[str]:
        """The keys of infos that the pool itself uses, so that values of envs under them are omitted."""
        return reserved_keys(self.pool.options, is_batched=self.pool.spec.is_batched)

    @property
    def has_results_of_all(self) -> bool:
        """Whether every env is stepping or has a result to be received."""
        return self.num_pending == self.pool.num_envs

    @property
    def num_pending(self) -> int:
        """How many envs are stepping or have a result to be received."""
        return self._state.num_pending()

    @property
    def num_ended(self) -> NDArray[np.int64]:
        """[N] int64: how many of its num_episodes each env has completed. Without num_episodes, nothing is counted."""
        return np.array([view.num_ended for view in self._state.view(env_ids=range(self.pool.num_envs))], np.int64)

    @property
    def worker_of(self) -> tuple[int, ...]:
        """The worker of each env, by env_id. The envs of a worker are lost together."""
        return tuple(map(self._recovery.workers.worker_of, range(self.pool.num_envs)))

    @property
    def threads(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """The threads that run envs. Each has its worker, its index in the worker, and its envs."""
        plans = self.pool._runtime.plans
        return [(plan.worker, index, own) for plan in plans for index, own in enumerate(plan.lanes.values())]

    @property
    def memory_place(self) -> tuple[int, int]:
        """Address and size in bytes of the shared memory, for programs that lock its pages."""
        return cast("tuple[int, int]", self.slab.native.place())


def _in_batch(part: Leaf | Opaque, value: Any) -> Any:
    return [value] if isinstance(part, Opaque) else np.asarray(value)[np.newaxis]
