"""What an env says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from stepmill.spec.tree import Node


class TimeStepFields(NamedTuple):
    """Where, in the tuple that an env's `step` returns, the engine finds what it must know.

    Attributes:
        step_type: place of an integer, which is 2 when the episode is over.
        reward: place of a number; -1 if the engine need not know it.
        discount: place of a number, of which 0 makes the end of an episode a termination, all else a truncation.
    """

    step_type: int
    reward: int
    discount: int


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """What the engine has to know of an env before it can step it.

    Attributes:
        observation: tree of one row's observation.
        action: tree of one row's action.
        batch_size: how many rows the env owns; more than 1 only if it is batched.
        time_step: None for an env whose `step` returns Gymnasium's five values. Else it returns a tuple, all of which is
            the observation, and here is where the rest is in it. Not for batched envs.
        is_batched: whether `step` takes and returns arrays with a leading dimension of batch_size.
        render_mode: as the env was made.
        metadata: the env's own; for a batched env "autoreset_mode" is there as Gymnasium's string.
        spaces: the original spaces, pickled as (observation space, action space) of one row; opaque to the engine.
        gym_spec: the Gymnasium spec that the env was made from, pickled; None if it has none or it does not pickle.
        payload_bytes: room in the slab for what of a result has no fixed size (infos, opaque observations), per row.
            What is larger takes a slower way. Room that is never used costs no memory.
    """

    observation: Node
    action: Node
    batch_size: int = 1
    is_batched: bool = False
    time_step: TimeStepFields | None = None
    render_mode: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    spaces: bytes = field(default=b"", repr=False)
    gym_spec: bytes | None = field(default=None, repr=False)
    payload_bytes: int = 0

    def is_compatible(self, other: EnvSpec) -> bool:
        """Whether envs of both specs can share a pool: same leaves, dtypes, shapes, structure and batch size.

        Bounds of spaces may differ; a front-end that minds compares `spaces`.
        """
        return (
            self.observation == other.observation
            and self.action == other.action
            and self.batch_size == other.batch_size
            and self.is_batched == other.is_batched
            and self.time_step == other.time_step
        )
