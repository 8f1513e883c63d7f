"""`AsyncPool` starts and ends a pool for an event loop. `Leases` or `Batches` use the pool."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from stepmill import Batch, ClosedPoolError, Pool, Received, UsageError
from stepmill.aio.batches import Batches, check_loop
from stepmill.aio.lease import EnvLease
from stepmill.aio.leases import Leases
from stepmill.aio.on_demand import OnDemandEnv
from stepmill.pool.port import EnvIds, PoolPort, checked_count

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack

    from stepmill.spec.options import OptionKeywords

UserT = TypeVar("UserT", Leases, Batches)


class AsyncPool:
    """Runs N envs for the tasks of an asyncio event loop.

    Either tasks lease envs, each for one or more episodes, and await `reset` and `step` of the lease, or one task calls
    `reset_async` and `send`, and awaits `receive` for batches of results. A pool is used in one of these ways, in one
    event loop. Envs are never reset automatically. Waiting takes no thread, because the event loop waits for a
    descriptor that workers write to.

    Args:
        make_env: a function without arguments that makes an env, called in the workers; or a list of such functions,
            one per env.
        num_envs: the number of envs, if `make_env` is one function.
        idle_s: seconds. Each env is built when it is first reset in a lease, and closed when it has not been leased
            for this long. The next reset builds it again. Each thread of a worker builds one env at the start, which
            is then closed, too. With None, all envs are built at the start, and closed with the pool.
        **keywords: options of a pool, such as `num_workers`, `step_timeout_s` and `on_fault`, except `autoreset_mode`.
            The default of `backend` is "process".
    Raises:
        UsageError: an argument is wrong. `async with` starts the envs, and raises what `Pool` raises.
    """

    def __init__(
        self,
        make_env: Callable[[], object] | Sequence[Callable[[], object]],
        num_envs: int | None = None,
        *,
        idle_s: float | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> None:
        if callable(make_env) == (num_envs is None):
            raise UsageError("AsyncPool() takes a function and num_envs, or a list of functions, one per env")
        for name in {"autoreset_mode", "num_episodes"} & keywords.keys():
            raise UsageError(f"the tasks of an AsyncPool decide when an env is reset; leave {name} out")
        if idle_s is not None and not idle_s > 0:
            raise UsageError(f"idle_s={idle_s} must be a positive number of seconds, or None")
        env_fns = [make_env] * checked_count(num_envs) if callable(make_env) else make_env
        if idle_s is not None:
            env_fns = [partial(OnDemandEnv, env_fn) for env_fn in env_fns]
        self._idle_s = idle_s
        options: dict[str, Any] = {"backend": "process", **keywords, "autoreset_mode": "Disabled"}
        self._make_pool = partial(Pool, env_fns, **options)
        self._lock = threading.Lock()  # held while a thread starts the pool
        self._is_abandoned = False
        self._is_entered = False
        self._loop: asyncio.AbstractEventLoop  # in which the pool is entered
        self._pool: Pool | None = None
        self._user: Leases | Batches | None = None

    # ---- the start and the end ----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise UsageError("this AsyncPool was entered before; make another one for each `async with`")
        self._is_entered = True
        self._loop = asyncio.get_running_loop()
        try:
            await self._loop.run_in_executor(None, self._start)
        except asyncio.CancelledError:
            with self._lock:
                self._is_abandoned = True  # the thread closes what it has started
            await self.close()
            raise
        return self

    def _as_returned(self, batch: Batch) -> Batch:
        """Return what `stepmill.restore` returns: the newest results. `receive` goes on from there; a lease begins with a reset."""
        return batch

    def _start(self) -> None:
        pool = self._make_pool()
        try:
            PoolPort(pool).prepare_event_loop()
            with self._lock:
                self._pool = None if self._is_abandoned else pool
        finally:
            if self._pool is None:
                pool.close()

    async def close(self) -> None:
        """Close the envs and end the workers. Tasks that wait get ClosedPoolError. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        if self._user is not None:
            error = ClosedPoolError(
                "the AsyncPool was closed while this task used it; close it after its tasks have ended"
            )
            if self._loop is asyncio.get_running_loop() or not self._loop.is_running():
                self._user.end(error)
            else:  # of another thread
                self._loop.call_soon_threadsafe(self._user.end, error)
        await asyncio.get_running_loop().run_in_executor(None, pool.close)

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def pool(self) -> Pool:
        """The Pool, for reading `spec`, `options`, `states`, `stats()` and the spaces. Do not call methods of it that wait."""
        if self._pool is None:
            raise ClosedPoolError("the AsyncPool is not running; use it inside `async with AsyncPool(...) as pool`")
        return self._pool

    @property
    def num_envs(self) -> int:
        """The number of envs, N."""
        return self.pool.num_envs

    def _used_by(self, kind: type[UserT]) -> UserT:
        pool = self.pool
        check_loop(self._loop)
        if self._user is None:
            self._user = kind(pool, self._idle_s)
        if not isinstance(self._user, kind):
            raise UsageError(f"this AsyncPool is used with {self._user.use}; make another one for {kind.use}")
        return self._user

    # ---- envs of tasks ------------------------------------------------------------------------------------------------

    def lease(self) -> EnvLease:
        """Return a lease for `async with`, which waits for an idle env. Tasks get envs in the order in which they began to wait."""
        return EnvLease(self._used_by(Leases))

    # ---- batches ------------------------------------------------------------------------------------------------------

    def reset_async(self, *, env_ids: Sequence[int] | None = None, seed: Any = None, options: Any = None) -> list[int]:
        """Send resets to some envs, or all, as `Pool.reset_async` does. Meanwhile, envs that have a fault are rebuilt.

        If one of them has a command, this blocks the event loop until that has ended: receive its result first.
        """
        self._used_by(Batches).revive(env_ids)
        return self.pool.reset_async(env_ids=env_ids, seed=seed, options=options)

    def send(self, actions: Any, env_ids: Sequence[int] | None = None) -> EnvIds:
        """Send actions to some envs, or all, as `Pool.send` does, and return the ids of those that got one."""
        self._used_by(Batches)
        return self.pool.send(actions, env_ids)

    async def receive(
        self, min_envs: int | None = 1, max_envs: int | None = None, timeout_s: float | None = None
    ) -> Received:
        """Wait for results and faults, and return them, as `Pool.receive` does. If it is cancelled, nothing is lost.

        Args:
            min_envs: wait for this many envs, each with a result or a fault; 0 does not wait; None means all that are pending.
            max_envs: return at most this many results; None means all that are ready.
            timeout_s: seconds, after which the call returns the results and faults that have arrived, possibly none; None means no limit.
        """
        return await self._used_by(Batches).receive(min_envs, max_envs, timeout_s)
