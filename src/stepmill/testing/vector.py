"""`check_frontend`: the executable contract of vector envs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from stepmill.testing.check import NUM_STEPS, draw_actions, fail_if
from stepmill.testing.compare import find_difference
from stepmill.testing.sampled import SampledEnv, all_leaves_space, describe

_DIFFERS = "the front-end differs from gymnasium.vector.SyncVectorEnv"
_ATTRIBUTES = ("num_envs", "observation_space", "single_observation_space", "action_space", "single_action_space")
_OPTIONS = {"level": 3}
_WHOLE_RESET_AT, _PARTIAL_RESET_AT = 13, 27  # after these steps all envs are reset, and one env


def check_frontend(
    make_vector_env: Callable[..., gymnasium.vector.VectorEnv[Any, Any, Any]], *, num_envs: int = 3
) -> None:
    """Check that a `gymnasium.vector.VectorEnv` returns the same data as Gymnasium's SyncVectorEnv, in all autoreset modes.

    The check covers observations, rewards, flags, infos and final observations, seeds and options of whole and partial resets,
    spaces and the autoreset mode. The vector env must change neither its arguments nor the results that it has returned.
    (Gymnasium's SyncVectorEnv removes the mask from its options and would fail this part.)

    Args:
        make_vector_env: a function that is called as `make_vector_env(env_fns, autoreset_mode=mode)`.
        num_envs: how many envs to run, 2 or more.

    Raises:
        CheckFailed: names the first element that differs.
    """
    space = all_leaves_space()
    env_fns = [partial(SampledEnv, space, space, base_seed=i) for i in range(num_envs)]
    for mode in AutoresetMode:
        ours = make_vector_env(env_fns, autoreset_mode=mode)
        theirs = gymnasium.vector.SyncVectorEnv(env_fns, autoreset_mode=mode)
        try:
            _check_attributes(ours, theirs)
            _Pair(ours, theirs, is_manual=mode is AutoresetMode.DISABLED).run()
        finally:
            ours.close()
            theirs.close()


def _check_attributes(ours: Any, theirs: Any) -> None:
    for name in _ATTRIBUTES:
        left, right = getattr(ours, name), getattr(theirs, name)
        fail_if(None if left == right else f"{left} versus {right}", f"{_DIFFERS} in its {name}")
    mine, wanted = (env.metadata.get("autoreset_mode") for env in (ours, theirs))
    fail_if(find_difference(mine, wanted, "metadata['autoreset_mode']"), _DIFFERS)


class _Pair:
    """Drives both vector envs with the same calls, and keeps the results of the one under test."""

    def __init__(self, ours: Any, theirs: Any, *, is_manual: bool) -> None:
        self._ours, self._theirs, self._is_manual = ours, theirs, is_manual
        self._num_envs: int = theirs.num_envs
        self._held: list[tuple[str, Any, Any]] = []

    def run(self) -> None:
        """Reset, step, and reset again in every way."""
        seeds = [None if i == 1 else 40 + i for i in range(self._num_envs)]
        over = np.zeros(self._num_envs, bool)
        self._call("the first reset", "reset", seed=3)
        for index, action in enumerate(draw_actions(self._theirs.action_space, NUM_STEPS, seed=5)):
            result = self._call(f"step {index}", "step", action)
            over = np.logical_or(result[2], result[3])
            if index == _WHOLE_RESET_AT:
                self._call("the reset with a list of seeds", "reset", seed=seeds, options=_OPTIONS)
            elif index == _PARTIAL_RESET_AT or (self._is_manual and over.any()):
                mask = over if self._is_manual and over.any() else np.arange(self._num_envs) == 1
                options = {**_OPTIONS, "reset_mask": mask.copy()}
                self._call(f"the partial reset after step {index}", "reset", seed=seeds, options=options)
        for where, result, then in self._held:
            fail_if(
                find_difference(result, then, where), "a later call changed a result that the front-end had returned"
            )

    def _call(self, where: str, name: str, *args: Any, **kwargs: Any) -> Any:
        passed = copy.deepcopy((args, kwargs))
        before = describe(passed)
        ours = getattr(self._ours, name)(*passed[0], **passed[1])
        fail_if(None if describe(passed) == before else where, "the front-end changed its arguments")
        theirs = getattr(self._theirs, name)(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        space = self._theirs.single_observation_space
        mine, wanted = ((*side[:-1], _with_plain_final_obs(side[-1], space)) for side in (ours, theirs))
        fail_if(find_difference(mine, wanted, where), _DIFFERS)
        self._held.append((where, ours, copy.deepcopy(ours)))
        return theirs


def _with_plain_final_obs(info: Any, space: gymnasium.Space[Any]) -> dict[str, Any]:
    """Return infos with the numbers in final_obs as arrays: a front-end may return them as scalars or as 0-d arrays."""
    if "final_obs" not in info:
        return dict(info)
    plain = info["final_obs"].copy()
    for row, obs in enumerate(plain):
        plain[row] = None if obs is None else _as_plain(obs, space)
    return {**info, "final_obs": plain}


def _as_plain(value: Any, space: gymnasium.Space[Any]) -> Any:
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: _as_plain(value[key], child) for key, child in space.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(_as_plain(item, child) for item, child in zip(value, space, strict=True))
    is_number = isinstance(space, gymnasium.spaces.Box) and space.shape == ()
    return np.asarray(value, space.dtype) if is_number else value
