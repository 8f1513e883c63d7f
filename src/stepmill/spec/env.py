"""`EnvSpec`: the facts about an env that the engine needs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stepmill.spec.errors import UsageError
from stepmill.spec.tree import DictNode, Leaf, Node, opaques

_REWARD_DTYPES = (np.dtype(np.float64), np.dtype(np.float32))


class TimeStepFields(NamedTuple):
    """Indices into the tuple that an env's `step` returns.

    Attributes:
        step_type: index of an integer that is 2 when the episode is over.
        reward: index of a number; -1 if the engine does not need it.
        discount: index of a number. If it is 0 at the end of an episode, the episode is terminated, else truncated.
    """

    step_type: int
    reward: int
    discount: int


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """The facts about an env that the engine needs before it can step the env.

    Attributes:
        observation: the tree of one row's observation.
        action: the tree of one row's action.
        reward: the dtype, float64 or float32, and the shape of one row's reward. With A agents, its first dimension is
            A.
        agents: the names of the A agent slots. Rewards and flags then have a dimension [A], and an episode is over when
            no agent is alive. Empty for an env without agents, whose rewards and flags do not have this dimension.
        is_open: whether agents come and go without end. No step ends the episode of such an env, even if no agent is
            alive.
        info: the parts of the info that have a fixed dtype and shape. They are in the slab, and are returned as arrays
            [B, ...] under their keys, with zeros where the env's info lacks them.
        batch_size: how many rows the env owns. It is more than 1 only if the env is batched.
        time_step: None for an env whose `step` returns Gymnasium's five values. Otherwise `step` returns a tuple, the
            whole tuple is the observation, and these are the indices of the other values in it. Batched envs cannot
            have it.
        is_batched: whether `step` takes and returns arrays with a leading dimension of batch_size.
        render_mode: the render mode that the env was made with.
        metadata: the env's metadata. A batched env has "autoreset_mode" in it, as Gymnasium's string.
        spaces: the original spaces, pickled as (observation space, action space) of one row. The engine does not read
            them.
        reward_space: the space of one row's reward, pickled, if the reward is a vector; empty if it is a number.
        gym_spec: the Gymnasium spec from which the env was made, pickled; None if there is none or it cannot be
            pickled.
        payload_bytes: bytes per row that the slab reserves for the parts of a result without a fixed size (infos, opaque
            observations). Larger payloads are transferred in a slower way. Reserved bytes that are never used cost no
            memory.
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
    reward_space: bytes = field(default=b"", repr=False)
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
                f"the reward has shape {self.reward.shape}, but there are {num_agents} agents; declare a shape "
                f"({num_agents}, ...)"
            )
        if num_agents and self.is_batched:
            raise UsageError("a batched env cannot have agents; declare rows without agents, or one env with agents")
        if opaques(self.info):
            raise UsageError(
                f"info parts {opaques(self.info)} have no fixed size; leave them out of the spec (the env's info may still "
                "have them)"
            )

    def is_compatible(self, other: EnvSpec) -> bool:
        """Return whether envs of both specs can share a pool.

        This is so if the leaves, dtypes, shapes, structure, agents and batch size are the same.

        The bounds of the spaces may differ. A front-end that needs equal bounds compares `spaces`.
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
