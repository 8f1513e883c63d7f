"""Calls policies of several kinds: functions, torch modules, and models of Stable-Baselines3."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from stepmill import UsageError

if TYPE_CHECKING:
    import torch

NO_EPISODE = -1


@dataclass(frozen=True)
class Rows:
    """What a policy gets: B observations, and whose they are.

    Attributes:
        obs: [B, ...] in every array.
        env_ids: [B] int64, the env of each row; -1 for rows that fill up the batch.
        episode_ids: [B] int64, the episode of each row; -1 for rows that fill up the batch.
        is_first: [B] bool, whether the row is the observation of a reset.
    """

    obs: Any
    env_ids: NDArray[np.int64]
    episode_ids: NDArray[np.int64]
    is_first: NDArray[np.bool_]


Act: TypeAlias = "Callable[[Rows], Any]"


class Actor:
    """Computes the actions of some envs of a pool.

    Args:
        policy: as for `evaluate`.
        observations, actions: the spaces of one env.
        num_envs: of the pool.
        batch_size: how many rows each call of the policy has; None is as many as there are.
    """

    def __init__(
        self,
        policy: Any,
        observations: gymnasium.Space[Any],
        actions: gymnasium.Space[Any],
        num_envs: int,
        batch_size: int | None,
    ) -> None:
        if batch_size is not None and batch_size < num_envs:
            raise UsageError(
                f"batch_size={batch_size} is less than num_envs={num_envs}; the policy acts for all envs that are ready"
            )
        self._act = adapt_policy(policy, actions, num_envs)
        self._observations = observations
        self._actions = actions
        self._batch_size = batch_size

    def act(self, rows: Rows) -> Any:
        """Return the actions [B, ...] of these rows."""
        num_rows = len(rows.env_ids)
        given = rows if self._batch_size is None else self._padded(rows, np.arange(self._batch_size))
        return take_rows(self._actions, self._act(given), slice(num_rows))

    def _padded(self, rows: Rows, numbers: NDArray[np.int64]) -> Rows:
        """Return rows of these numbers; the last row is repeated where there are fewer."""
        num_rows = len(rows.env_ids)
        index, is_padding = np.minimum(numbers, num_rows - 1), numbers >= num_rows
        return Rows(
            take_rows(self._observations, rows.obs, index),
            np.where(is_padding, NO_EPISODE, rows.env_ids[index]),
            np.where(is_padding, NO_EPISODE, rows.episode_ids[index]),
            rows.is_first[index] & ~is_padding,
        )


def take_rows(space: gymnasium.Space[Any], value: Any, rows: NDArray[np.integer[Any]] | slice) -> Any:
    """Return some rows of observations or actions [B, ...] of a space, as NumPy arrays, and tuples of values without a fixed size."""
    if isinstance(space, spaces.Dict):
        return {key: take_rows(child, value[key], rows) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(take_rows(child, part, rows) for child, part in zip(space.spaces, value, strict=True))
    if isinstance(value, (tuple, list)) and not isinstance(space, (spaces.Box, spaces.Discrete)):
        return tuple(value[rows] if isinstance(rows, slice) else (value[row] for row in rows))
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value)[rows]


def adapt_policy(policy: Any, actions: gymnasium.Space[Any], num_envs: int) -> Act:
    """Return a function that calls a policy for some rows.

    Raises:
        UsageError: it is not a policy.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(policy, torch.nn.Module) and not hasattr(policy, "predict"):
        return _TorchPolicy(policy, actions)
    if callable(getattr(policy, "predict", None)):
        return _SB3Policy(policy, num_envs)
    if not callable(policy):
        raise UsageError(
            f"the policy is a {type(policy).__name__}; give a function policy(obs) -> actions, a torch module, or a model of "
            "Stable-Baselines3"
        )
    if _takes_episodes(policy):
        return lambda rows: policy(rows.obs, rows.episode_ids, rows.is_first)
    return lambda rows: policy(rows.obs)


def _takes_episodes(policy: Callable[..., Any]) -> bool:
    """Return whether a function is policy(obs, episode_ids, is_first), and not policy(obs)."""
    try:
        signature = inspect.signature(policy)
    except (TypeError, ValueError):  # a function in C may have none
        return False
    for count in (3, 1) if "is_first" in signature.parameters else (1, 3):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count == 3
    raise UsageError(
        f"the policy is called as {signature}; it must be policy(obs) or policy(obs, episode_ids, is_first)"
    )


class _TorchPolicy:
    """Calls a module without gradients, in its evaluation mode. For discrete actions its output may be logits [B, n]."""

    def __init__(self, module: torch.nn.Module, actions: gymnasium.Space[Any]) -> None:
        import torch

        self._torch = torch
        self._module = module
        self._is_discrete = isinstance(actions, spaces.Discrete)
        self._start = int(getattr(actions, "start", 0))
        self._like = next(module.parameters(), torch.zeros(0))

    def __call__(self, rows: Rows) -> Any:
        was_training = self._module.training
        self._module.eval()
        try:
            with self._torch.inference_mode():
                output = self._module(self._tensors(rows.obs))
        finally:
            self._module.train(was_training)
        if not isinstance(output, self._torch.Tensor):
            raise UsageError(
                f"the torch module returned a {type(output).__name__}, not a tensor of actions; give a function that returns the actions"
            )
        if self._is_discrete and output.ndim == 2 and output.is_floating_point():
            return output.argmax(dim=1) + self._start
        return output

    def _tensors(self, obs: Any) -> Any:
        if isinstance(obs, dict):
            return {key: self._tensors(child) for key, child in obs.items()}
        if isinstance(obs, tuple):
            return tuple(map(self._tensors, obs))
        tensor = self._torch.as_tensor(np.array(obs))  # a copy, which a module may keep and write to
        return tensor.to(self._like.device, self._like.dtype if tensor.is_floating_point() else None)


class _SB3Policy:
    """Calls `predict` of a model, deterministically, and keeps the state of recurrent models for each env."""

    def __init__(self, model: Any, num_envs: int) -> None:
        self._model = model
        self._num_envs = num_envs
        self._states: tuple[NDArray[Any], ...] | None = None  # [layers, num_envs, ...] each, as sb3-contrib has them

    def __call__(self, rows: Rows) -> Any:
        is_real = rows.env_ids >= 0
        state = None if self._states is None else tuple(part[:, rows.env_ids] for part in self._states)
        actions, state = self._model.predict(rows.obs, state=state, episode_start=rows.is_first, deterministic=True)
        if state is not None:
            if self._states is None:
                self._states = tuple(
                    np.zeros((len(part), self._num_envs, *part.shape[2:]), part.dtype) for part in state
                )
            for kept, part in zip(self._states, state, strict=True):
                kept[:, rows.env_ids[is_real]] = part[:, is_real]
        return actions
