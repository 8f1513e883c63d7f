"""What a pool says of itself at once: states of envs, their newest observations, where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill.pool.start import Running
from stepmill.pool.stats import PoolStats, read_stats
from stepmill.spec.env import EnvSpec
from stepmill.spec.options import EnvState

if TYPE_CHECKING:
    import gymnasium

    from stepmill.envs.gymnasium import VectorSpaces

EnvIds = Sequence[int] | NDArray[np.integer[Any]]


class PoolAnswers:
    """The part of `Pool` that is asked and waits for nothing."""

    _running: Running
    _ledger: _native.Ledger
    spec: EnvSpec
    num_rows: int

    @cached_property
    def _spaces(self) -> VectorSpaces:
        # By name: the adapters import foreign libraries, which are loaded only where their envs are.
        spaces: VectorSpaces = import_module("stepmill.envs.gymnasium").vector_spaces(self.spec, self.num_rows)
        return spaces

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

    @property
    def ready_ids(self) -> list[int]:
        """Envs whose result can be received now."""
        return self._ledger.ready_ids()

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
