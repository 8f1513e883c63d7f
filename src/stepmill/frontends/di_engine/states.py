"""What state an env of a manager is in, and which moves there are."""

from __future__ import annotations

from enum import IntEnum

from stepmill.spec.errors import EngineBug


class EnvState(IntEnum):
    """As DI-engine's EnvState, name by name and number by number."""

    VOID = 0  # not launched, or closed
    INIT = 1  # its process is there
    RUN = 2  # it wants an action, or is at work on one
    RESET = 3  # it begins an episode
    DONE = 4  # it has had all its episodes
    ERROR = 5  # it failed, or called its timestep abnormal; a reset brings it back
    NEED_RESET = 6  # its episode is over, and auto_reset is off


_VOID, _INIT, _RUN, _RESET = EnvState.VOID, EnvState.INIT, EnvState.RUN, EnvState.RESET
_DONE, _ERROR, _NEED_RESET = EnvState.DONE, EnvState.ERROR, EnvState.NEED_RESET

MOVES: dict[EnvState, frozenset[EnvState]] = {
    _VOID: frozenset({_INIT}),
    _INIT: frozenset({_RESET, _VOID}),
    _RESET: frozenset({_RUN, _RESET, _ERROR, _VOID}),
    _RUN: frozenset({_RUN, _RESET, _DONE, _ERROR, _NEED_RESET, _VOID}),
    _DONE: frozenset({_RESET, _VOID}),
    _ERROR: frozenset({_RESET, _ERROR, _VOID}),
    _NEED_RESET: frozenset({_RESET, _VOID}),
}


class StateBook(dict[int, EnvState]):
    """The state of each env, by env_id."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(dict.fromkeys(range(num_envs), EnvState.VOID))

    def move(self, env_id: int, state: EnvState) -> None:
        """Put an env into another state.

        Raises:
            EngineBug: there is no such move.
        """
        if state not in MOVES[self[env_id]]:
            raise EngineBug(f"env {env_id} cannot go from {self[env_id].name} to {state.name}; please report this")
        self[env_id] = state

    def close(self) -> None:
        """Every env is VOID."""
        for env_id in self:
            self[env_id] = EnvState.VOID

    def ids_in(self, state: EnvState) -> list[int]:
        """Return the envs that are in a state, in the order of their ids."""
        return [env_id for env_id, own in self.items() if own is state]
