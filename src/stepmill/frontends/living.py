"""Actions for envs some of whose workers may be dead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepmill.pool.pool import Pool
from stepmill.spec.errors import StepmillError, UsageError
from stepmill.spec.options import EnvState


def send_living(pool: Pool, actions: Sequence[Any], env_ids: Sequence[int] | None = None) -> Sequence[int]:
    """Send a list of actions to envs; those that are found to be dead get none. Return the envs that were sent theirs.

    The next `receive` of the pool returns the faults of the others.
    """
    while True:
        try:
            pool.send(actions, env_ids)
            return range(pool.num_envs) if env_ids is None else env_ids
        except UsageError:
            raise
        except StepmillError:  # nothing was sent
            states = pool.states
            pairs = zip(range(pool.num_envs) if env_ids is None else env_ids, actions, strict=True)
            living = {env_id: action for env_id, action in pairs if states[env_id] is not EnvState.FAULTED}
            if not living:
                return ()
            actions, env_ids = list(living.values()), list(living)
