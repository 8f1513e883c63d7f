"""TorchRL's envs, such as `GymEnv` and `TransformedEnv`: tensordicts become Gymnasium's five values.

The observation is a dict of all parts of the env's observation spec, with the same nesting. The action is an element of
the spec of "action", such as a one-hot vector. Front-ends get TorchRL's own specs in the spaces (`SpecSpace`). Envs are
refused by name if they have a batch size, inputs other than the action, unusual keys, or parts that are not arrays.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from inspect import getattr_static
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from tensordict import TensorDict
from torchrl.data import Composite
from torchrl.envs import EnvBase, GymLikeEnv

from stepmill.envs.env_adapter import EnvAdapter
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.spec.tree import DictNode, Leaf, Node

_FLAGS = {"done", "terminated", "truncated"}


class SpecSpace(spaces.Space[NDArray[Any]]):
    """A space that is one of TorchRL's specs. `spec` is the spec of one env, without a batch dimension."""

    def __init__(self, spec: Any, dtype: np.dtype[Any]) -> None:
        super().__init__(tuple(spec.shape), dtype)
        self.spec = spec

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> NDArray[Any]:
        """Return a random value, drawn from torch's generator."""
        drawn: NDArray[Any] = self.spec.rand().numpy()
        return drawn

    def contains(self, x: Any) -> bool:
        """Whether the spec allows a value."""
        return bool(self.spec.is_in(torch.as_tensor(x)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpecSpace) and bool(self.spec == other.spec)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SpecSpace({self.spec!r})"


def describe(env: object, _like: EnvSpec | None) -> EnvSpec:
    """Return the spec of a TorchRL env.

    Raises:
        UsageError: the env has something that is not supported.
    """
    known: Any = env
    _check(known)
    observation = _space_of(known, known.observation_spec, "observation")
    action = _space_of(known, known.full_action_spec["action"], "action")
    return EnvSpec(
        observation=_tree_of(observation), action=_tree_of(action), spaces=pickle.dumps((observation, action))
    )


class TorchRLEnv(EnvAdapter):
    """Steps a TorchRL env for the hot loop. It keeps the env's tensordict, whose values transforms read in the next step."""

    _has_wrappers = False  # TorchRL's envs look attributes up in what they wrap

    def __init__(self, env: object) -> None:
        super().__init__(env)
        self._keys = [
            tuple(key) if isinstance(key, tuple) else (key,) for key in self.env.observation_spec.keys(True, True)
        ]
        self._root: Any = None
        # Such an env reads only the action, so that its next step needs no tensordict with what the last one returned.
        cls: Any = type(env)
        self._reads_action = (
            isinstance(env, GymLikeEnv)
            and (cls.step, cls._step, cls._step_proc_data) == (EnvBase.step, GymLikeEnv._step, EnvBase._step_proc_data)
            and not env.run_type_checks
        )

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[object, dict[str, object]]:
        """Begin an episode.

        Raises:
            TypeError: options are given, which TorchRL's envs do not have.
        """
        if options:
            raise TypeError(f"a TorchRL env takes no reset options; leave out {options!r}")
        if seed is not None:
            self.env.set_seed(seed, static_seed=True)
        self._root = self.env.reset()
        return self._observed(self._root), {}

    def step(self, action: Any) -> tuple[object, float, bool, bool, dict[str, object]]:
        """Step the env."""
        self._root.set("action", _to_tensors(action))
        if self._reads_action:
            reached = self.env._step(self._root)
        else:
            after = self.env.step(self._root)
            reached = after["next"]
            self._root = self.env.step_mdp(after)
        is_done, is_truncated = bool(reached["done"]), bool(reached.get("truncated", False))
        is_terminated = bool(reached.get("terminated", False)) or (is_done and not is_truncated)
        return self._observed(reached), float(reached["reward"]), is_terminated, is_truncated, {}

    def _observed(self, tensordict: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key in self._keys:
            place = found
            for name in key[:-1]:
                place = place.setdefault(name, {})
            place[key[-1]] = tensordict.get(key).detach().cpu().numpy()
        return found


adapt = TorchRLEnv


def _to_tensors(action: Any) -> Any:
    if isinstance(action, dict):
        return TensorDict({key: _to_tensors(child) for key, child in action.items()})
    return torch.from_numpy(np.array(action))  # a copy, because the engine writes the next action to the same memory


def _check(env: Any) -> None:
    """Refuse an env that is not a single one with TorchRL's usual keys.

    Raises:
        UsageError: the text names the env, what is not supported, and what to do.
        RuntimeError: TorchRL's, of a transform that works only outside a batched env.
    """
    if tuple(env.batch_size):
        _refuse(env, f"has batch_size={tuple(env.batch_size)}", "return a single env, with an empty batch size")
    if getattr_static(env, "transform", None) is not None:
        env.transform._check_batched_worker_compat()
    inputs = set(env.full_state_spec.keys(True, True)) - set(env.observation_spec.keys(True, True))
    if inputs:
        _refuse(env, f"has the inputs {_names(inputs)} beside the action", "keep them in the env")
    for what, keys, usual in (
        ("action", env.full_action_spec.keys(), {"action"}),
        ("reward", env.full_reward_spec.keys(True, True), {"reward"}),
        ("done", env.full_done_spec.keys(True, True), _FLAGS),
    ):
        if not set(keys) <= usual:
            _refuse(
                env, f"has the {what} keys {_names(set(keys))}", f"rename them to {_names(usual)} with RenameTransform"
            )
    sized = [env.full_reward_spec["reward"], *env.full_done_spec.values()]
    if any(spec.shape.numel() != 1 for spec in sized):
        _refuse(env, "has several rewards or flags", "return one reward and one flag per step")


def _refuse(env: Any, what: str, advice: str) -> None:
    raise UsageError(
        f"{type(env).__name__} {what}, which is not supported in a pool; {advice}, or use TorchRL's ParallelEnv"
    )


def _names(keys: Iterable[Any]) -> str:
    return ", ".join(sorted(repr(key) for key in keys))


def _space_of(env: Any, spec: Any, path: str) -> spaces.Space[Any]:
    if isinstance(spec, Composite):
        return spaces.Dict({str(key): _space_of(env, child, f"{path}.{key}") for key, child in spec.items()})
    if spec.dtype is None:  # text, and other values that are not tensors
        raise UsageError(
            f"{path} of {type(env).__name__} is a {type(spec).__name__}, which is not a tensor; remove it with "
            "ExcludeTransform, after a transform that reads it, such as Hash, or use TorchRL's ParallelEnv"
        )
    try:
        dtype = torch.zeros((), dtype=spec.dtype).numpy().dtype
    except (TypeError, RuntimeError) as exc:
        raise UsageError(
            f"{path} of {type(env).__name__} is a {type(spec).__name__} of {spec.dtype}, which is not an array of numbers; remove "
            "it, or cast it with a transform"
        ) from exc
    if any(size < 0 for size in spec.shape):
        _refuse(env, f"has a part {path} of shape {tuple(spec.shape)}, without a fixed size", "give it a fixed size")
    return SpecSpace(spec.to("cpu"), dtype)


def _tree_of(space: spaces.Space[Any]) -> Node:
    if isinstance(space, spaces.Dict):
        return DictNode(tuple((key, _tree_of(child)) for key, child in space.spaces.items()))
    return Leaf(np.dtype(cast("Any", space.dtype)), tuple(space.shape or ()))
