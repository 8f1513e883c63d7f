"""`Batch`: the results of several envs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.spec.errors import UsageError

AGENT_ID = "agent_id"  # the key of an info of fixed shape [A], which names the agent in each slot
NO_AGENT = -1
ENGINE_INFO_KEYS = frozenset(
    {"episode", "fault", "final_info", "final_obs", "omitted"}
)  # keys of infos that a pool may add


@dataclass(frozen=True, eq=False)
class Players:
    """The agents that are present in a batch, one row each: those that continue, and those that ended in this step.

    Attributes:
        env_id: [P] int64, the env of each agent.
        agent_id: [P] int64, the id that the env gives each agent: `info["agent_id"]` if the env provides it, else the slot.
        slot: [P] int64, the agent's index among the env's agents. Its action is `actions[row of the batch, slot]`.
        row: [P] int64, the row of the agent's env in the batch.
        obs: the observations, [P, ...] in every array.
        reward: [P], the rewards in the dtype that the env declares.
        terminated, truncated: [P] bool.
        alive: [P] bool, True for agents that need an action.
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


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Batch:
    """The results of B envs. It unpacks into Gymnasium's five values: obs, reward, terminated, truncated, info.

    Attributes:
        obs: the observations, [B, ...] in every array, in the dicts and tuples of the env's space. Parts without a
            fixed size (text, sequences, graphs) are tuples of B values. Large arrays are leased: they stay valid
            while referenced.
        reward: [B] float64, or [B, ...] in the shape and dtype that the env declares; 0 for an env that was reset.
        terminated: [B] bool; [B, A] for envs with A agents.
        truncated: [B] bool; [B, A] for envs with A agents.
        info: merged as Gymnasium merges infos: for each key an array [B] or [B, ...], and under "_key" the mask [B] of
            the envs that have the key. It is decoded on first access.
        env_id: [B] int64, the env of each row. It is not unpacked.
        alive: [B, A] bool, the agents that continue and need an action; None for envs without agents. It is not unpacked.
            The results of a step are valid for the agents that were alive before the step.

    B counts rows: an env of batch size k has k rows, all with the same env_id.
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
        # This is a hot path: the __init__ that a frozen dataclass generates takes 0.3 us longer.
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

    def __repr__(self) -> str:
        agents = "" if self.alive is None else f", alive={_describe(self.alive)}"
        keys = [key for key in self.info if not str(key).startswith("_")]
        return (
            f"Batch(num_rows={self.num_rows}, env_id={np.array2string(self.env_id, threshold=16, edgeitems=3)}, "
            f"obs={_describe(self.obs)}, reward={_describe(self.reward)}, terminated={_describe(self.terminated)}, "
            f"truncated={_describe(self.truncated)}{agents}, info keys {keys})"
        )

    def __len__(self) -> int:
        """Return 5, the number of values that a batch unpacks into. `num_rows` is the number of results."""
        return 5

    @property
    def num_rows(self) -> int:
        """The number of rows, B."""
        return len(self.env_id)

    @property
    def players(self) -> Players:
        """The agents that are present, one row each, as copies.

        Raises:
            UsageError: the envs have no agents, or their observations have no dimension for agents.
        """
        if self.alive is None:
            raise UsageError("these envs have no agents; read the rows of the batch in place of its players")
        is_present = self.alive | self.terminated | self.truncated
        row, slot = np.nonzero(is_present)
        agent_id = self.info[AGENT_ID][is_present] if AGENT_ID in self.info else slot
        return Players(
            env_id=self.env_id[row],
            agent_id=agent_id,
            slot=slot,
            row=row,
            obs=_rows_of(self.obs, is_present),
            reward=self.reward[is_present],
            terminated=self.terminated[is_present],
            truncated=self.truncated[is_present],
            alive=self.alive[is_present],
        )


def _describe(value: Any) -> str:
    """Return the structure of a value, with the dtype and shape of each array in place of its content."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_describe(child)}" for key, child in value.items()) + "}"
    if isinstance(value, tuple) and any(isinstance(child, (np.ndarray, dict, tuple)) for child in value):
        return "(" + ", ".join(map(_describe, value)) + ")"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return f"{type(value).__name__}[{len(value)}]" if hasattr(value, "__len__") else type(value).__name__


def _rows_of(value: Any, is_present: NDArray[np.bool_]) -> Any:
    if isinstance(value, dict):
        return {key: _rows_of(child, is_present) for key, child in value.items()}
    if isinstance(value, np.ndarray) and value.shape[:2] == is_present.shape:
        return value[is_present]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rows_of(child, is_present) for child in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_rows_of(child, is_present) for child in value)
    raise UsageError(
        "the observations have no dimension for agents, [B, A, ...], which players needs; declare it in the observation "
        "space, or use StackedAgents"
    )
