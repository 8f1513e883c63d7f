"""What an env says of itself."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stepmill.spec.errors import UsageError
from stepmill.spec.tree import DictNode, Leaf, Node, opaques

_REWARD_DTYPES = (np.dtype(np.float64), np.dtype(np.float32))


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
        reward: dtype, float64 or float32, and shape of one row's reward; with A agents its first dimension is A.
        agents: names of the agent slots, A of them; rewards and flags have a dimension [A] then, and an episode is over
            when no agent is alive. Without agents the env is its own one, and nothing has that dimension.
        is_open: agents come and go for ever: no step ends the env's episode, whoever is alive.
        info: parts of the info that have a fixed dtype and shape. They lie in the slab and come as arrays [B, ...] under
            their keys; zeros where the env's info lacks them.
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
    reward: Leaf = field(default_factory=lambda: Leaf(np.dtype(np.float64), ()))
    agents: tuple[Hashable, ...] = ()
    is_open: bool = False
    info: DictNode = field(default_factory=lambda: DictNode(()))
    batch_size: int = 1
    is_batched: bool = False
    time_step: TimeStepFields | None = None
    render_mode: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    spaces: bytes = field(default=b"", repr=False)
    gym_spec: bytes | None = field(default=None, repr=False)
    payload_bytes: int = 0

    def __post_init__(self) -> None:
        num_agents = len(self.agents)
        if num_agents and not self.reward.shape:
            object.__setattr__(self, "reward", Leaf(self.reward.dtype, (num_agents,)))
        if self.reward.dtype not in _REWARD_DTYPES:
            raise UsageError(f"a reward of dtype {self.reward.dtype} is not supported; declare float64 or float32")
        if num_agents and self.reward.shape[0] != num_agents:
            raise UsageError(
                f"the reward has shape {self.reward.shape}, but there are {num_agents} agents; begin its shape with that"
            )
        if num_agents and self.is_batched:
            raise UsageError("a batched env cannot have agents; declare its rows, or one env with agents")
        if opaques(self.info):
            raise UsageError(
                f"info parts {opaques(self.info)} have no fixed size; leave them out of the spec, and in the info"
            )

    def is_compatible(self, other: EnvSpec) -> bool:
        """Whether envs of both specs can share a pool: same leaves, dtypes, shapes, structure, agents and batch size.

        Bounds of spaces may differ; a front-end that minds compares `spaces`.
        """
        return (
            self.observation == other.observation
            and self.action == other.action
            and self.reward == other.reward
            and self.agents == other.agents
            and self.is_open == other.is_open
            and self.info == other.info
            and self.batch_size == other.batch_size
            and self.is_batched == other.is_batched
            and self.time_step == other.time_step
        )
