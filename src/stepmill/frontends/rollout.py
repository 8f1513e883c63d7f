"""`Rollout`: T steps of all envs in arrays [T, N, ...], written in place, for learners such as PPO.

    sync               policy(all) │ step(all) │ policy(all) │ step(all) │ ...
    double-buffered    policy(A) │ policy(B) │ policy(A) │ ...        A and B are halves of the envs: one half
                                 └ A steps ──┘└ B steps ─┘            steps while the policy computes for the other

Each `recv` writes its results into row t+1 of the buffer. Both modes are deterministic: the envs that a call of the
policy gets do not depend on timing or on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepmill.frontends.batch_rows import infos_and_finals
from stepmill.pool.pool import Pool
from stepmill.pool.port import Seed
from stepmill.spec.batch import Batch
from stepmill.spec.errors import UsageError
from stepmill.spec.options import AutoresetMode
from stepmill.spec.tree import DictNode, Node, TupleNode, flatten, leaves, opaques, unflatten

Policy: TypeAlias = Callable[[Any, NDArray[np.int64]], Any]


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """T steps of N envs. The arrays belong to the rollout, and the next `collect` overwrites them.

    Attributes:
        obs: [T+1, N, ...] in the structure of the observation. obs[t] is the policy's input at step t.
        action: [T, N, ...] in the structure of the action.
        reward: [T, N] float32.
        terminated, truncated: [T, N] bool, whether step t ended the episode.
        valid: [T, N] bool. With NEXT_STEP autoreset, the step after the end of an episode only resets the env and
            ignores its action. `valid` is False for such a step, which a loss must leave out.
        final_at: [K, 2] int64, (t, n) of each step whose next observation is in final_obs instead of obs[t+1, n]. These are the
            ends of episodes with SAME_STEP autoreset. K is 0 with NEXT_STEP.
        final_obs: [K, ...] in the structure of the observation.
        extras: arrays [T, N, ...] by name, which the policy returned in addition to actions.
        episodes: one dict per episode that ended: "t", "env_id", "r" (return), "l" (length).
    """

    obs: Any
    action: Any
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    final_at: NDArray[np.int64]
    final_obs: Any
    extras: dict[str, NDArray[Any]]
    episodes: list[dict[str, float]]

    def advantages(
        self,
        values: NDArray[np.floating[Any]],
        final_values: NDArray[np.floating[Any]] | None = None,
        *,
        gamma: float = 0.99,
        lam: float = 0.95,
    ) -> NDArray[np.float32]:
        """Return generalized advantages [T, N] float32 (Schulman et al. 2016); 0 where `valid` is False.

        After a step that terminated the episode, the next value is 0; after one that truncated it, it is the value of the last observation.

        Args:
            values: [T+1, N], the values of `obs`.
            final_values: [K], the values of `final_obs`; needed if K is not 0.
            gamma: the discount.
            lam: the weight between one-step (0) and Monte Carlo (1) advantages.
        """
        following = np.array(values[1:], dtype=np.float32)
        if len(self.final_at):
            if final_values is None:
                raise UsageError(
                    f"{len(self.final_at)} steps have their next observation in final_obs; give its values as final_values"
                )
            following[self.final_at[:, 0], self.final_at[:, 1]] = final_values
        following[self.terminated] = 0.0
        deltas = (self.reward + gamma * following - values[:-1]) * self.valid
        goes_on = ~(self.terminated | self.truncated) & self.valid
        advantages = np.zeros_like(self.reward)
        later = np.zeros_like(self.reward[0])
        for step in reversed(range(len(advantages))):
            later = deltas[step] + gamma * lam * goes_on[step] * later
            advantages[step] = later
        return advantages


@dataclass
class _Group:
    """Envs that are stepped together: their ids and their rows."""

    ids: NDArray[np.int64]
    rows: slice


@dataclass
class _EpisodeEnds:
    """The ends of episodes during one `collect`."""

    final_at: list[tuple[int, int]] = field(default_factory=list)
    final_obs: list[Any] = field(default_factory=list)
    episodes: list[dict[str, float]] = field(default_factory=list)


class Rollout:
    """Collects T steps of all envs of a pool at a time.

    Args:
        pool: a pool with NEXT_STEP or SAME_STEP autoreset. Do not use it elsewhere while the rollout collects.
        num_steps: T, the number of steps that `collect` runs.
        is_double_buffered: whether one half of the envs is stepped while the policy computes for the other half.

    Raises:
        UsageError: the pool's autoreset is DISABLED, it has num_episodes, its envs have agents or several rewards, or their
            observations or actions have parts of no fixed size.
    """

    def __init__(self, pool: Pool, num_steps: int, *, is_double_buffered: bool = False) -> None:
        if num_steps < 1:
            raise UsageError(f"num_steps={num_steps} must be 1 or more")
        if pool.options.autoreset_mode is AutoresetMode.DISABLED:
            raise UsageError("a Rollout needs envs that reset themselves; make the pool with NEXT_STEP or SAME_STEP")
        if pool.options.num_episodes is not None:
            raise UsageError(
                f"num_episodes={pool.options.num_episodes} ends the steps of an env in the middle of a rollout; make the pool without it"
            )
        if is_double_buffered and pool.num_envs < 2:
            raise UsageError(
                "is_double_buffered needs 2 envs or more, and the pool has 1; leave it out, or make more envs"
            )
        if pool.spec.agents or pool.spec.reward.shape:
            raise UsageError(
                "the rows of a Rollout have one reward each, and the envs have agents or several rewards; collect with Pool.step, or "
                "give each agent a row: stepmill.frontends.pettingzoo.AgentVectorEnv"
            )
        for name, node in (("observations", pool.spec.observation), ("actions", pool.spec.action)):
            if opaques(node):
                raise UsageError(f"{name} have parts of no fixed size ({opaques(node)}); a Rollout needs arrays")
        self.pool = pool
        self.num_steps = num_steps
        lead = (num_steps, pool.num_rows)
        self._obs = _arrays(pool.spec.observation, (num_steps + 1, pool.num_rows))
        self._action = _arrays(pool.spec.action, lead)
        self._reward = np.zeros(lead, np.float32)
        self._terminated, self._truncated = np.zeros(lead, np.bool_), np.zeros(lead, np.bool_)
        self._valid = np.ones(lead, np.bool_)
        self._extras: dict[str, NDArray[Any]] = {}
        self._groups = self._split(2 if is_double_buffered else 1)
        # [N] bool: the row's last step ended an episode, so that its next step only resets it.
        self._is_over = np.zeros(pool.num_rows, np.bool_)
        self._can_continue = False

    def _split(self, num_groups: int) -> list[_Group]:
        size = self.pool.spec.batch_size
        parts = np.array_split(np.arange(self.pool.num_envs), num_groups)
        return [_Group(ids, slice(int(ids[0]) * size, (int(ids[-1]) + 1) * size)) for ids in parts]

    def reset(self, seed: Seed = None, options: Mapping[str, object] | None = None) -> None:
        """Reset all envs. `collect` calls it without arguments the first time, and after an error."""
        batch = self.pool.reset(seed=seed, options=options)
        for buffer, first in zip(self._obs, flatten(self.pool.spec.observation, batch.obs), strict=True):
            buffer[-1] = first
        self._is_over[:] = False
        self._can_continue = True

    def _as_returned(self, batch: Batch) -> Batch:
        """Go on with restored envs: the next `collect` begins with their newest observations. Return `batch`."""
        obs, _, terminated, truncated, _ = batch
        for buffer, newest in zip(self._obs, flatten(self.pool.spec.observation, obs), strict=True):
            buffer[-1] = newest
        self._is_over[:] = (terminated | truncated) & (self.pool.options.autoreset_mode is AutoresetMode.NEXT_STEP)
        self._can_continue = True
        return batch

    def collect(self, policy: Policy) -> RolloutBatch:
        """Run T steps. They continue the episodes of the last `collect`.

        Args:
            policy: a function that takes observations [B, ...] and env ids [B], and returns actions [B, ...], or a tuple of actions
                and a dict of further arrays [B, ...], such as log-probabilities, which are returned in `extras`. The observations
                are views of the buffer; do not change them.
        """
        if not self._can_continue:
            self.reset()
        self._can_continue = False  # an error before the last result leaves envs in the middle of a step
        for buffer in self._obs:
            buffer[0] = buffer[-1]
        ends = _EpisodeEnds()
        self._extras = {}  # another policy may return others
        for step in range(self.num_steps):
            for group in self._groups:
                if step:
                    self._receive(step - 1, group, ends)
                self._act(step, group, policy)
        for group in self._groups:
            self._receive(self.num_steps - 1, group, ends)
        self._can_continue = True
        return self._batch(ends)

    def _act(self, step: int, group: _Group, policy: Policy) -> None:
        spec = self.pool.spec
        obs = unflatten(spec.observation, [buffer[step, group.rows] for buffer in self._obs])
        result = policy(obs, group.ids if spec.batch_size == 1 else np.repeat(group.ids, spec.batch_size))
        action, extras = result if self._has_extras(result) else (result, {})
        self.pool.send(action, group.ids)  # this checks the actions
        for buffer, part in zip(self._action, flatten(spec.action, action), strict=True):
            buffer[step, group.rows] = part
        for name, value in extras.items():
            column = np.asarray(value)
            if name not in self._extras:
                self._extras[name] = np.zeros((self.num_steps, self.pool.num_rows, *column.shape[1:]), column.dtype)
            self._extras[name][step, group.rows] = column
        self._valid[step, group.rows] = ~self._is_over[group.rows]

    def _has_extras(self, result: Any) -> bool:
        """Return whether the policy returned (actions, extras). A tuple that is an action has the structure of the action space."""
        if type(result) is not tuple or len(result) != 2 or not isinstance(result[1], Mapping):
            return False
        node = self.pool.spec.action
        is_pair = isinstance(node, TupleNode) and len(node.children) == 2 and isinstance(node.children[1], DictNode)
        # Of an action space Tuple(..., Dict), actions alone are such a pair, too.
        return not is_pair or (type(result[0]) is tuple and len(result[0]) == 2 and isinstance(result[0][1], Mapping))

    def _receive(self, step: int, group: _Group, ends: _EpisodeEnds) -> None:
        out = unflatten(self.pool.spec.observation, [buffer[step + 1, group.rows] for buffer in self._obs])
        batch = self.pool.recv(env_ids=group.ids, out=out)
        self._reward[step, group.rows] = batch.reward
        self._terminated[step, group.rows] = batch.terminated
        self._truncated[step, group.rows] = batch.truncated
        over = batch.terminated | batch.truncated
        is_next_step = self.pool.options.autoreset_mode is AutoresetMode.NEXT_STEP
        self._is_over[group.rows] = over if is_next_step else False
        if over.any():
            if is_next_step and self.pool.spec.is_batched and "fault" in batch.info:
                self._is_over[group.rows] |= batch.info["_fault"]  # also rows whose episodes ended earlier
            self._record_ends(step, group.rows.start, batch, ends)

    def _record_ends(self, step: int, first_row: int, batch: Batch, ends: _EpisodeEnds) -> None:
        over = np.flatnonzero(batch.terminated | batch.truncated)
        if self.pool.options.autoreset_mode is AutoresetMode.SAME_STEP:
            if self.pool.spec.is_batched:  # an env has one info for all its rows
                finals = batch.info["final_obs"]
            else:
                found = infos_and_finals(batch.info, over.tolist())[1]
                finals = {row: final_obs for row, (final_obs, _) in found.items()}
            ends.final_at += [(step, first_row + int(row)) for row in over]
            ends.final_obs += [finals[int(row)] for row in over]
        episode = batch.info.get("episode")
        if episode is not None:
            ends.episodes += [
                {
                    "t": step,
                    "env_id": int(batch.env_id[row]),
                    "r": float(episode["r"][row]),
                    "l": int(episode["l"][row]),
                }
                for row in over
            ]

    def _batch(self, ends: _EpisodeEnds) -> RolloutBatch:
        spec = self.pool.spec
        rows = [flatten(spec.observation, obs) for obs in ends.final_obs]
        finals = [
            np.stack([row[index] for row in rows]) if rows else np.zeros((0, *leaf.shape), leaf.dtype)
            for index, (_, leaf) in enumerate(leaves(spec.observation))
        ]
        return RolloutBatch(
            obs=unflatten(spec.observation, self._obs),
            action=unflatten(spec.action, self._action),
            reward=self._reward,
            terminated=self._terminated,
            truncated=self._truncated,
            valid=self._valid,
            final_at=np.array(ends.final_at, np.int64).reshape(-1, 2),
            final_obs=unflatten(spec.observation, finals),
            extras=self._extras,
            episodes=ends.episodes,
        )


def _arrays(node: Node, leading: tuple[int, int]) -> list[NDArray[Any]]:
    return [np.zeros((*leading, *leaf.shape), leaf.dtype) for _, leaf in leaves(node)]
