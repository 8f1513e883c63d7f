"""`SharedPool`: the pool that runs one SubprocessEnv, or several that were made together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepmill.envs.opaque import OpaqueEnvMaker
from stepmill.frontends.pool_options import options_of
from stepmill.frontends.starting_pool import StartingPool
from stepmill.pool.pool import Pool
from stepmill.pool.port import CLOSE_TIMEOUT_S, PoolFuture, PoolPort
from stepmill.spec.batch import Batch
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import StepmillError
from stepmill.spec.notices import warn
from stepmill.spec.options import BackendName, OnFault, PoolOptions


class SharedPool:
    """Runs envs that were made together. One thread at a time may use it, which holds `lock`."""

    def __init__(self, env_fns: Sequence[Callable[[], object]], options: PoolOptions) -> None:
        """Check the options. Nothing runs before `launch`.

        Args:
            env_fns: the functions that make the envs.
            options: the options of the pool. Those at their defaults are replaced by others that suit envs that may
                crash: each env has its own process, dead processes are restarted, and exceptions are raised.
        """
        self.lock = threading.RLock()
        self.num_envs = len(env_fns)
        chosen = _with_defaults(options)
        makers = [OpaqueEnvMaker(env_fn) for env_fn in env_fns]
        self._starting = StartingPool(makers, chosen, num_retries=chosen.restarts.max_restarts)
        self._open_ids = set(range(len(env_fns)))

    def launch(self) -> None:
        """Start the workers, which build their envs, and return without waiting. Idempotent."""
        self._starting.launch()

    @property
    def pool(self) -> Pool:
        """The pool; the first use waits until all envs are built. If a process dies meanwhile, all are built again, `max_restarts` times.

        Raises:
            EnvError, EnvTimeout, WorkerDied: an env could not be built.
        """
        with self.lock:
            return self._starting.pool

    def env_spec(self, index: int) -> EnvSpec:
        """Return the spec of an env: pickled spaces, None in place of one that it does not have, and metadata["is_gymnasium"]."""
        return PoolPort(self.pool).env_specs[index]

    def description(self, index: int) -> Mapping[str, Any]:
        """Return those of an env's attributes metadata, spec, render_mode and reward_range that it has."""
        found: Mapping[str, Any] = self.pool.call(_describe, env_ids=[index])[0]
        return found

    def send(self, actions: Sequence[Any], env_ids: Sequence[int] | None, *, is_driven: bool) -> None:
        """Send envs their actions; with `is_driven`, envs whose episode has ended are reset instead. `recv` returns deaths."""
        self.pool.send([(is_driven, action) for action in actions], env_ids)

    def send_reset(self, index: int, seed: int | None, kwargs: Mapping[str, Any]) -> None:
        """Begin to reset an env with these keyword arguments."""
        self.pool.reset_async(seed={index: seed}, options=dict(kwargs) or None, env_ids=[index])

    def recv(
        self, wanted: Container[int]
    ) -> tuple[dict[int, tuple[bool, Any]], dict[int, Mapping[str, str]], list[StepmillError]]:
        """Wait for all pending results. Hot path.

        Returns:
            By env, whether it was stepped (False for a reset, which may be an automatic one), and what it returned; by env, the fault
            that ended its episode; and the errors of `wanted` envs without a result.
        """
        received = self.pool.receive(None)
        errors, batch = received.errors(wanted), received.batch
        if batch is None:
            return {}, {}, errors
        env_ids = batch.env_id.tolist()
        faults = _faults_of(batch, env_ids) if batch.truncated.any() else {}
        return dict(zip(env_ids, batch.obs, strict=True)), faults, errors

    def close_envs(self, indices: Sequence[int]) -> None:
        """Close some envs; closing the last ones closes the pool. Idempotent. It takes about two seconds at most.

        Errors become warnings. The envs then count as closed, and their processes end with the pool.
        """
        with self.lock:
            leaving = sorted(self._open_ids & set(indices))
            self._open_ids -= set(leaving)
            if not self._open_ids:
                self.close()
            elif leaving and self._starting.made is not None:
                _warn_of_errors(self._starting.made.call_async("close_env", env_ids=leaving))

    def close(self) -> None:
        """Close all envs and end their processes. Idempotent."""
        self._open_ids.clear()
        self._starting.close()


def _warn_of_errors(closing: PoolFuture) -> None:
    """Wait for envs that are closed, and warn of those that raise, or take too long."""
    try:
        closing.result(CLOSE_TIMEOUT_S)
    except StepmillError as error:
        for each in (error, *error.others):
            warn(f"close(): {each}")


def _describe(env: Any) -> dict[str, Any]:
    own = env.env
    names = ("metadata", "spec", "render_mode", "reward_range")
    return {name: getattr(own, name) for name in names if hasattr(own, name)}


def _with_defaults(options: PoolOptions) -> PoolOptions:
    chosen: dict[str, Any] = {}
    if options.backend is BackendName.AUTO:
        chosen["backend"] = BackendName.PROCESS
    if options.num_workers is None and options.envs_per_worker is None:
        chosen["envs_per_worker"] = 1
    if options.on_fault is OnFault.RAISE and options.restarts.on_raise is None:
        chosen["on_fault"], chosen["restarts"] = OnFault.TRUNCATE, replace(options.restarts, on_raise=OnFault.RAISE)
    return options_of("MultiEnv", replace(options, **chosen), {}, {"episode_stats": False})


def _faults_of(batch: Batch, env_ids: Sequence[int]) -> dict[int, Mapping[str, str]]:
    """Return the faults that ended episodes, by env."""
    columns = {key: column for key, column in batch.info.get("fault", {}).items() if not key.startswith("_")}
    rows = batch.truncated.nonzero()[0].tolist() if columns else []
    faults = {env_ids[row]: {key: column[row] for key, column in columns.items()} for row in rows}
    return {env_id: fault for env_id, fault in faults.items() if fault.get("kind") is not None}
