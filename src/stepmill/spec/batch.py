"""One batch of results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Batch:
    """The results of B envs; it unpacks like a tuple: obs, reward, terminated, truncated, info, env_id.

    Attributes:
        obs: the observations, [B, ...] in every array; dicts and tuples as the env's space has them. Parts of no
            fixed size (text, sequences, graphs) are tuples of B values. Large arrays are leased: theirs to hold.
        reward: [B] float64, or in the shape [B, ...] and the dtype that the env declares; 0 for an env that was reset.
        terminated: [B] bool; [B, A] for envs with A agents.
        truncated: [B] bool; [B, A] for envs with A agents.
        info: merged as Gymnasium merges: for each key an array [B] or [B, ...], and under "_key" the mask [B] of
            the envs that have it. Decoded when it is first looked at.
        env_id: [B] int64, which env each row belongs to.
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

    def __iter__(self) -> Iterator[Any]:
        return iter((self.obs, self.reward, self.terminated, self.truncated, self.info, self.env_id))

    def __len__(self) -> int:
        """Return B."""
        return len(self.env_id)
