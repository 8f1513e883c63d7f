"""Runs the same commands on two vector envs, and compares all results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from hypothesis import strategies as st

from stepmill.testing.compare import find_difference
from stepmill.testing.sampled import SampledEnv, describe
from tests.harness import spaces

STEP, RESET, MASK = "step", "reset", "mask"


@dataclass(frozen=True)
class Story:
    """What is done to a vector env: spaces, mode, seed and a list of (what, seed, options)."""

    observation_space: spaces.Space
    action_space: spaces.Space
    num_envs: int
    mode: AutoresetMode
    seed: int | list[int | None] | None
    acts: Sequence[tuple[str, int, dict[str, Any] | None]] = field(default_factory=list)

    def env_fns(self) -> list[Callable[[], SampledEnv]]:
        return [
            partial(SampledEnv, self.observation_space, self.action_space, base_seed=i) for i in range(self.num_envs)
        ]


@st.composite
def stories(
    draw: st.DrawFn,
    observation_spaces: st.SearchStrategy[spaces.Space],
    action_spaces: st.SearchStrategy[spaces.Space],
    max_acts: int = 12,
) -> Story:
    num_envs = draw(st.integers(1, 4))
    seeds = st.lists(st.one_of(st.none(), st.integers(0, 2**31)), min_size=num_envs, max_size=num_envs)
    options = st.sampled_from([None, None, {}, {"level": 3, "start": np.arange(3)}])
    act = st.tuples(st.sampled_from([STEP] * 6 + [MASK, RESET]), st.integers(0, 2**20), options)
    return Story(
        observation_space=draw(observation_spaces),
        action_space=draw(action_spaces),
        num_envs=num_envs,
        mode=draw(st.sampled_from(AutoresetMode)),
        seed=draw(st.one_of(st.none(), st.integers(0, 2**31), seeds)),
        acts=draw(st.lists(act, min_size=4, max_size=max_acts)),
    )


def compare_with_gymnasium(story: Story, make: Callable[..., gymnasium.vector.VectorEnv[Any, Any, Any]]) -> None:
    """Run a story on `make(env_fns, autoreset_mode=...)` and on SyncVectorEnv; assert that nothing differs.

    Results of whole batches are held to the end, and must still say then what they said at first.
    """
    ours = make(story.env_fns(), autoreset_mode=story.mode)
    theirs = gymnasium.vector.SyncVectorEnv(story.env_fns(), autoreset_mode=story.mode)
    try:
        _compare_faces(ours, theirs)
        _Comparison(story, ours, theirs).run()
    finally:
        ours.close()
        theirs.close()


class _Comparison:
    def __init__(self, story: Story, ours: Any, theirs: Any) -> None:
        self._story = story
        self._ours = ours
        self._theirs = theirs
        self._over = np.zeros(story.num_envs, bool)
        self._held: list[tuple[Any, Any]] = []
        theirs.action_space.seed(0)

    def run(self) -> None:
        self._reset("first reset", self._story.seed, None)
        for index, (what, seed, options) in enumerate(self._story.acts):
            is_stuck = self._story.mode is AutoresetMode.DISABLED and self._over.any()
            if what == RESET:
                self._reset(f"{index}: reset", seed, options)
            elif what == MASK or is_stuck:
                self._reset_some(f"{index}: partial reset", seed, options)
            else:
                self._step(f"{index}: step")
        for result, then in self._held:
            assert not find_difference(result, then, "a result that was held")

    def _reset(self, where: str, seed: Any, options: dict[str, Any] | None) -> None:
        self._over[:] = False
        given = (copy.deepcopy(seed), copy.deepcopy(options))
        ours = self._ours.reset(seed=given[0], options=given[1])
        assert describe(given) == describe((seed, options)), f"{where}: arguments were changed"
        self._hold(ours)
        self._compare(where, ours, self._theirs.reset(seed=copy.deepcopy(seed), options=copy.deepcopy(options)))

    def _reset_some(self, where: str, seed: int, options: dict[str, Any] | None) -> None:
        rng = np.random.default_rng(seed)
        mask = rng.random(self._story.num_envs) < 0.5
        mask[rng.integers(self._story.num_envs)] = True
        if self._story.mode is AutoresetMode.DISABLED:
            mask |= self._over
        seeds = [int(rng.integers(2**20)) if rng.random() < 0.5 else None for _ in mask]
        options = {**(options or {}), "reset_mask": mask}
        given = copy.deepcopy(options)
        ours = self._ours.reset(seed=list(seeds), options=given)
        assert describe(given) == describe(options), f"{where}: options were changed"
        self._compare(where, ours, self._theirs.reset(seed=list(seeds), options=copy.deepcopy(options)))
        self._over &= ~mask

    def _step(self, where: str) -> None:
        action = self._theirs.action_space.sample()
        before = describe(action)
        ours = self._ours.step(action)
        assert describe(action) == before, f"{where}: the action was changed"
        self._hold(ours)
        theirs = self._theirs.step(action)
        self._compare(where, ours, theirs)
        self._over = np.logical_or(theirs[2], theirs[3])

    def _compare(self, where: str, ours: Any, theirs: Any) -> None:
        assert_results_equal(ours, theirs, self._story.observation_space, where)
        assert type(ours[-1]) is dict or isinstance(ours[-1], dict)

    def _hold(self, result: Any) -> None:
        self._held.append((result[:-1], copy.deepcopy(result[:-1])))


def assert_results_equal(ours: Any, theirs: Any, space: spaces.Space, where: str) -> None:
    """Compare what `reset` or `step` of two vector envs returned, to the last bit."""
    pair = ((*side[:-1], with_plain_final_obs(side[-1], space)) for side in (ours, theirs))
    assert not (difference := find_difference(*pair, where)), difference


def with_plain_final_obs(info: Any, space: spaces.Space) -> dict[str, Any]:
    """Return infos with the numbers in final_obs as arrays: an env may return an int, a scalar or a 0-d array, ours are scalars."""
    if "final_obs" not in info:
        return dict(info)
    plain = info["final_obs"].copy()
    for i, obs in enumerate(plain):
        plain[i] = None if obs is None else _as_plain(obs, space)
    return {**info, "final_obs": plain}


def _as_plain(value: Any, space: spaces.Space) -> Any:
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: _as_plain(value[key], child) for key, child in space.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(_as_plain(item, child) for item, child in zip(value, space, strict=True))
    is_number = isinstance(space, (gymnasium.spaces.Box, gymnasium.spaces.Discrete)) and space.shape == ()
    return np.asarray(value, space.dtype) if is_number else value


def _compare_faces(ours: Any, theirs: Any) -> None:
    for name in (
        "num_envs",
        "observation_space",
        "single_observation_space",
        "action_space",
        "single_action_space",
        "metadata",
        "render_mode",
    ):
        left, right = getattr(ours, name), getattr(theirs, name)
        assert left == right, f"{name}: {left} against {right}"
