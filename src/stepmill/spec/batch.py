"""One batch of results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.spec.errors import UsageError

AGENT_ID = "agent_id"  # the info of fixed shape [A] that says who sits in which slot
NO_AGENT = -1


@dataclass(frozen=True, eq=False)
class Players:
    """The agents that are really there in a batch, one row each: those that go on, and those that ended in this step.

    Attributes:
        env_id: [P] int64, whose agents they are.
        agent_id: [P] int64, what the env calls them: `info["agent_id"]` if it says so, else the slot.
        slot: [P] int64, their place among the env's agents: `actions[row of the batch, slot]` is theirs.
        row: [P] int64, their env's row in the batch.
        obs: [P, ...] in every array.
        reward: [P].
        terminated, truncated: [P] bool.
        alive: [P] bool, who wants an action.
    """

    env_id: NDArray[np.int64]
    agent_id: NDArray[np.int64]
    slot: NDArray[np.int64]
    row: NDArray[np.int64]
    obs: Any
    reward: NDArray[np.floating[Any]]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    alive: NDArray[np.bool_]

    def __len__(self) -> int:
        """Return P."""
        return len(self.env_id)


@dataclass(frozen=True, eq=False, init=False)
class Batch:
    """The results of B envs. It unpacks into Gymnasium's five values: obs, reward, terminated, truncated, info.

    Attributes:
        obs: the observations, [B, ...] in every array; dicts and tuples as the env's space has them. Parts of no
            fixed size (text, sequences, graphs) are tuples of B values. Large arrays are leased: they stay valid
            while referenced.
        reward: [B] float64, or in the shape [B, ...] and the dtype that the env declares; 0 for an env that was reset.
        terminated: [B] bool; [B, A] for envs with A agents.
        truncated: [B] bool; [B, A] for envs with A agents.
        info: merged as Gymnasium merges: for each key an array [B] or [B, ...], and under "_key" the mask [B] of
            the envs that have it. Decoded when it is first looked at.
        env_id: [B] int64, which env each row belongs to. It is not unpacked.
        alive: [B, A] bool, which agents go on and want an action; None for envs without agents. It is not unpacked.
            What a step says of an agent counts if the agent was alive before it.

    B counts rows: an env of batch size k has k of them, all with its env_id.
    """

    obs: Any
    reward: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    info: dict[str, Any]
    env_id: NDArray[np.int64]
    alive: NDArray[np.bool_] | None = None

    def __init__(
        self,
        obs: Any,
        reward: NDArray[np.float64],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        info: dict[str, Any],
        env_id: NDArray[np.int64],
        alive: NDArray[np.bool_] | None = None,
    ) -> None:
        # Hot path: the __init__ that a frozen dataclass generates takes 0.3 us longer.
        values = self.__dict__
        values["obs"] = obs
        values["reward"] = reward
        values["terminated"] = terminated
        values["truncated"] = truncated
        values["info"] = info
        values["env_id"] = env_id
        values["alive"] = alive

    def __iter__(self) -> Iterator[Any]:
        return iter((self.obs, self.reward, self.terminated, self.truncated, self.info))

    def __len__(self) -> int:
        """Return how many values it unpacks into, which is 5; `num_rows` says how many results it holds."""
        return 5

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.env_id)

    @property
    def players(self) -> Players:
        """The agents that are there, one row each; copies.

        Raises:
            UsageError: the envs have no agents, or their observations have no dimension for them.
        """
        if self.alive is None:
            raise UsageError("these envs have no agents, and no players; every row of the batch is one env's")
        is_there = self.alive | self.terminated | self.truncated
        row, slot = np.nonzero(is_there)
        agent_id = self.info[AGENT_ID][is_there] if AGENT_ID in self.info else slot
        return Players(
            env_id=self.env_id[row],
            agent_id=agent_id,
            slot=slot,
            row=row,
            obs=_rows_of(self.obs, is_there),
            reward=self.reward[is_there],
            terminated=self.terminated[is_there],
            truncated=self.truncated[is_there],
            alive=self.alive[is_there],
        )


def _rows_of(value: Any, is_there: NDArray[np.bool_]) -> Any:
    if isinstance(value, dict):
        return {key: _rows_of(child, is_there) for key, child in value.items()}
    if isinstance(value, np.ndarray) and value.shape[:2] == is_there.shape:
        return value[is_there]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rows_of(child, is_there) for child in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_rows_of(child, is_there) for child in value)
    raise UsageError(
        "players are rows of observations [B, A, ...], and these have no dimension for the agents; declare it, or use "
        "StackedAgents"
    )
