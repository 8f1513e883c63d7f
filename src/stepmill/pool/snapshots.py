"""Takes and restores snapshots of kernel envs, whose state is plain memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill.pool.requests import EnvRequests
from stepmill.spec.errors import BusyEnvError, UsageError
from stepmill.spec.options import BackendName, EnvState, PoolOptions
from stepmill.spec.tree import map_nest
from stepmill.worker.calls import call_payload
from stepmill.worker.messages import RequestKind

EnvIds: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]]"


@dataclass(frozen=True)
class PoolSnapshot:
    """The state of B envs at one time, with their random generators and positions in the episode. It can be pickled.

    Attributes:
        env_ids: the envs.
        obs: the newest observations of the envs, with arrays [B, ...] in the structure of the observation.
        memory: the state of each env as bytes. The format is not public.
    """

    env_ids: tuple[int, ...]
    obs: Any
    memory: tuple[bytes, ...]


class Snapshots:
    """Takes and restores snapshots of a pool's envs."""

    def __init__(self, state: _native.PoolState, requests: EnvRequests, options: PoolOptions) -> None:
        self._state, self._requests, self._options = state, requests, options

    def take(self, env_ids: EnvIds | None) -> PoolSnapshot:
        """Return a snapshot of these envs, or of all if `env_ids` is None.

        Raises:
            UsageError: the envs are not kernel envs.
            BusyEnvError: an env is not idle.
        """
        ids = self._idle(env_ids)
        found = self._requests.send(RequestKind.GET_ATTR, ids, _read).result()
        obs = self._state.observe(ids)
        for place, (_, restored) in enumerate(found):
            if restored is not None:  # the newest result is older
                map_nest(partial(_set_row, place), obs, restored)
        return PoolSnapshot(tuple(ids), obs, tuple(memory for memory, _ in found))

    def restore(self, snapshot: PoolSnapshot, env_ids: EnvIds | None) -> Any:
        """Restore the state of envs from a snapshot of the same or other envs; return the observations of the snapshot.

        Raises:
            UsageError: the snapshot is of another kernel, is damaged, has another number of envs, or is of an episode that ended
                in another autoreset mode. No env is changed.
            BusyEnvError: an env is not idle. No env is changed.
        """
        if not isinstance(snapshot, PoolSnapshot):
            raise UsageError(f"a {type(snapshot).__name__} is not a snapshot; give the return value of Pool.snapshot()")
        ids = self._idle(snapshot.env_ids if env_ids is None else env_ids)
        if len(ids) != len(snapshot.memory):
            raise UsageError(
                f"got {len(ids)} env_ids for a snapshot of {len(snapshot.memory)} envs; give one per env of the snapshot"
            )
        # All states are checked before the first env is changed. One env can check them all: the kernel is the same.
        for refusal in self._requests.send(RequestKind.GET_ATTR, ids[:1], _FindRefusal(snapshot.memory)).result():
            if refusal is not None:
                raise UsageError(refusal)
        rows = [map_nest(lambda column, place=place: column[place].copy(), snapshot.obs) for place in range(len(ids))]
        write: Callable[..., None] = _Write(dict(zip(ids, zip(snapshot.memory, rows, strict=True), strict=True)))
        self._requests.send(RequestKind.CALL, ids, call_payload(write)).result()
        return map_nest(np.copy, snapshot.obs)

    def _idle(self, env_ids: EnvIds | None) -> list[int]:
        if self._options.backend is not BackendName.KERNEL:
            raise UsageError(
                "only kernel envs have snapshots, because the state of other envs is not known to the pool; use "
                "backend='kernel', or a method of the env"
            )
        ids = self._requests.checked_ids(env_ids)
        states = self._state.states()
        busy = [env_id for env_id in ids if states[env_id] != EnvState.IDLE]
        if busy:
            raise BusyEnvError(
                f"envs {busy} are stepping, have results to be received, or need a reset; snapshots need idle envs: recv() "
                "or reset() them first",
                env_ids=busy,
            )
        return ids


def _read(env: Any) -> tuple[bytes, Any]:
    return env.snapshot(), env.restored_obs()


def _set_row(place: int, column: Any, row: Any) -> None:
    column[place] = row


class _FindRefusal:
    """A function that returns why one of these states cannot be restored in an env, or None if all can."""

    def __init__(self, memory: tuple[bytes, ...]) -> None:
        self._memory = memory

    def __call__(self, env: Any) -> str | None:
        refusals = (env.refusal_of(memory) for memory in self._memory)
        return next((refusal for refusal in refusals if refusal is not None), None)


class _Write:
    """A function that restores an env from the state and observation with its env_id."""

    def __init__(self, states: dict[int, tuple[bytes, Any]]) -> None:
        self._states = states

    def __call__(self, env: Any) -> None:
        env.restore(*self._states[env.env_id])
