"""What a pool says of itself at once: states of envs, their newest observations, where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill.pool.start import Running
from stepmill.pool.stats import PoolStats, read_stats
from stepmill.spec.options import EnvState

EnvIds = Sequence[int] | NDArray[np.integer[Any]]


class PoolAnswers:
    """The part of `Pool` that is asked and waits for nothing."""

    _running: Running
    _ledger: _native.Ledger

    @property
    def ready_ids(self) -> list[int]:
        """Envs whose result can be received now."""
        return self._ledger.ready_ids()

    @property
    def has_results_of_all(self) -> bool:
        """Whether every env is stepping or has a result to be received."""
        return self._ledger.num_pending() == len(self._ledger.states())

    def observe(self, env_ids: EnvIds | None = None) -> Any:
        """Return the newest observations that were received of some envs, or all, [B, ...]; zeros before the first."""
        return self._ledger.observe(env_ids)

    @property
    def exhausted(self) -> NDArray[np.bool_]:
        """[N] bool, which envs have played their num_episodes."""
        return np.array([state is EnvState.EXHAUSTED for state in self.states])

    @property
    def num_ended(self) -> NDArray[np.int64]:
        """[N] int64, how many episodes of its num_episodes each env has ended; not counted if there is no budget."""
        return np.array(self._ledger.num_ended(), np.int64)

    @property
    def states(self) -> list[EnvState]:
        """What each env is doing, by env_id."""
        return [EnvState(number) for number in self._ledger.states()]

    @property
    def worker_of(self) -> tuple[int, ...]:
        """Which worker owns each env, by env_id: envs of one worker are lost together."""
        return tuple(self._ledger.worker_of(env_id) for env_id in range(len(self._ledger.states())))

    def xla(self) -> tuple[Any, ...]:
        """Return EnvPool's (handle, recv, send, step), for use inside JAX's `jit`; see `stepmill.jax.xla`."""
        functions: tuple[Any, ...] = import_module("stepmill.jax").xla(self)
        return functions

    @property
    def memory_place(self) -> tuple[int, int]:
        """Address and size in bytes of the shared memory that results lie in, for whoever locks its pages."""
        place: tuple[int, int] = self._running.slab.native.place()
        return place

    def stats(self) -> PoolStats:
        """Return where the time went since the start, per worker."""
        return read_stats(self._running)
