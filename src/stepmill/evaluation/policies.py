"""Calls policies of several kinds: functions, torch modules, and models of Stable-Baselines3."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from stepmill import Pool, UsageError

if TYPE_CHECKING:
    import torch

NO_EPISODE = -1
Ids: TypeAlias = "NDArray[np.int64]"
Act: TypeAlias = "Callable[[Any, Ids, NDArray[np.bool_], Ids], Any]"
"""act(obs, episode_ids, is_first, env_ids) -> actions. Rows that fill up a batch have the ids -1."""


def make_act(policy: Any, pool: Pool, num_rows: int | None) -> Act:
    """Return a function that computes actions for num_rows rows of a pool at most.

    Args:
        policy: as for `evaluate`.
        pool: the pool, whose spaces are read.
        num_rows: how many rows each call of the policy has. The last row fills up the batch. None means as many as
            there are.

    Raises:
        UsageError: it is not a policy. The function raises it if the policy does not return an action for each row.
    """
    observations, actions = pool.single_observation_space, pool.single_action_space
    adapted = adapt_policy(policy, actions, pool.num_envs)

    def act(obs: Any, episode_ids: Ids, is_first: NDArray[np.bool_], env_ids: Ids) -> Any:
        num, num_given = len(env_ids), num_rows or len(env_ids)
        if num < num_given:
            numbers = np.arange(num_given)
            index, is_real = np.minimum(numbers, num - 1), numbers < num
            obs, is_first = select_rows(observations, obs, index), is_first[index] & is_real
            episode_ids, env_ids = (np.where(is_real, ids[index], NO_EPISODE) for ids in (episode_ids, env_ids))
        found = adapted(obs, episode_ids, is_first, env_ids)
        try:
            return select_rows(actions, found, slice(num), num_given)
        except (LookupError, TypeError, ValueError) as exc:
            raise UsageError(f"the policy must return actions for {num_given} rows of {actions}: {exc!r}") from exc

    return act


def select_rows(space: gymnasium.Space[Any], value: Any, rows: NDArray[np.intp] | slice, num: int | None = None) -> Any:
    """Return some rows of observations or actions [B, ...] of a space, as NumPy arrays, and tuples of values without a fixed size.

    Raises:
        ValueError: there are not `num` rows.
    """
    if isinstance(space, spaces.Dict):
        return {key: select_rows(child, value[key], rows, num) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(select_rows(child, part, rows, num) for child, part in zip(space.spaces, value, strict=True))
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if f"{value.dtype}" == "torch.bfloat16" else value).numpy()
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        value = np.asarray(value)
    if num is not None and len(value) != num:
        raise ValueError(f"there are {len(value)} rows")
    if isinstance(value, np.ndarray) or isinstance(rows, slice):
        return value[rows]
    return tuple(value[row] for row in rows)


def adapt_policy(policy: Any, actions: gymnasium.Space[Any], num_envs: int) -> Act:
    """Return a function that calls a policy for some rows.

    Raises:
        UsageError: it is not a policy.
    """
    if _is_module(policy) and not hasattr(policy, "predict"):
        return _torch_policy(policy, actions)
    if callable(getattr(policy, "predict", None)):
        return _sb3_policy(policy, num_envs)
    if not callable(policy):
        raise UsageError(f"the policy is a {type(policy).__name__}; give a function, a torch module, or an SB3 model")
    if _takes_episodes(policy):
        return lambda obs, episode_ids, is_first, _: policy(obs, episode_ids, is_first)
    return lambda obs, *_: policy(obs)


def _is_module(policy: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(policy, torch.nn.Module)


def _takes_episodes(policy: Callable[..., Any]) -> bool:
    """Return whether a function is policy(obs, episode_ids, is_first), and not policy(obs)."""
    try:
        signature = inspect.signature(policy)
    except (TypeError, ValueError):  # a function in C may have no signature
        return False
    for count in (3, 1) if "is_first" in signature.parameters else (1, 3):
        with suppress(TypeError):
            signature.bind(*range(count))
            return count == 3
    raise UsageError(f"a policy is policy(obs) or policy(obs, episode_ids, is_first), not one called as {signature}")


def _torch_policy(module: torch.nn.Module, actions: gymnasium.Space[Any]) -> Act:
    """Call a module without gradients, in its evaluation mode. For discrete actions its output may be logits [B, n]."""
    import torch

    like = next(filter(torch.is_floating_point, module.parameters()), torch.zeros(0))

    def tensors(obs: Any) -> Any:
        if isinstance(obs, dict):
            return {key: tensors(child) for key, child in obs.items()}
        if isinstance(obs, tuple):
            return tuple(map(tensors, obs))
        tensor = torch.as_tensor(np.array(obs))  # a copy, which a module may keep and write to
        return tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)

    def act(obs: Any, *_: Any) -> Any:
        trained = [part for part in module.modules() if part.training]
        module.eval()
        try:
            with torch.inference_mode():
                output = module(tensors(obs))
        finally:
            for part in trained:
                part.training = True
        if not isinstance(output, torch.Tensor):
            raise UsageError(f"the module must return actions as a tensor, not a {type(output).__name__}; wrap it")
        if isinstance(actions, spaces.Discrete) and output.shape[1:] == (actions.n,) and output.is_floating_point():
            return output.argmax(dim=1) + int(actions.start)
        return output

    return act


def _sb3_policy(model: Any, num_envs: int) -> Act:
    """Call `predict` of a model, deterministically, and keep the state of recurrent models for each env."""
    states: list[NDArray[Any]] = []  # [layers, num_envs, ...] each, as in sb3-contrib

    def act(obs: Any, _: Ids, is_first: NDArray[np.bool_], env_ids: Ids) -> Any:
        before = tuple(part[:, env_ids] for part in states) or None
        actions, after = model.predict(obs, state=before, episode_start=is_first, deterministic=True)
        is_real = env_ids >= 0
        for place, part in enumerate(after or ()):
            if place == len(states):
                states.append(np.zeros((len(part), num_envs, *part.shape[2:]), part.dtype))
            states[place][:, env_ids[is_real]] = part[:, is_real]
        return actions

    return act
