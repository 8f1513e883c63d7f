"""A `stepmill.VectorEnv` is Gymnasium's `SyncVectorEnv`, element by element, on every backend."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces as gs
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings

from stepmill.testing.compare import find_difference
from stepmill.testing.sampled import all_leaves_space
from tests.harness import spaces
from tests.harness.effort import every_second, examples
from tests.harness.pools import BACKENDS, make_vector_env
from tests.harness.trace import MASK, RESET, STEP, Story, compare_with_gymnasium, stories

ANY = stories(spaces.any_spaces(), spaces.any_spaces())
LARGE = stories(spaces.large_spaces(), spaces.fixed_spaces(), max_acts=20)
VARIABLE = [
    gs.Text(12),
    gs.Sequence(gs.Box(0, 1, (2,))),
    gs.Sequence(gs.Discrete(5), stack=True),
    gs.Graph(gs.Box(0, 1, (2,)), gs.Discrete(3)),
    gs.OneOf([gs.Discrete(3), gs.Box(0, 1, (2,))]),
]
ACTS = (
    [(STEP, 0, None)] * 6
    + [(MASK, 5, {"level": 1})]
    + [(STEP, 0, None)] * 6
    + [(RESET, 9, None)]
    + [(STEP, 0, None)] * 3
)


@pytest.mark.covers("X-15")
@pytest.mark.parametrize(("where", "num_any", "num_large"), [("serial", 30, 15), ("thread", 20, 10), ("fork", 15, 10)])
def test_a_backend_equals_gymnasium_for_any_space_and_for_observations_that_are_lent(where, num_any, num_large):
    def compare(story):
        compare_with_gymnasium(story, partial(make_vector_env, where))

    settings(max_examples=examples(num_any))(given(ANY)(compare))()
    settings(max_examples=examples(num_large))(given(LARGE)(compare))()


@pytest.mark.covers("G-7", "G-11")
@pytest.mark.parametrize(
    ("where", "num_workers", "mode", "seed"),  # 5 envs: shares of two sizes
    [
        ("thread", 3, AutoresetMode.SAME_STEP, 3),
        pytest.param("fork", 2, AutoresetMode.NEXT_STEP, 3, marks=pytest.mark.slow),
        ("fork", 2, AutoresetMode.DISABLED, 3),
        ("forkserver", 2, AutoresetMode.NEXT_STEP, [7, None, 9, 1, None]),
        pytest.param("spawn", 2, AutoresetMode.SAME_STEP, [7, None, 9, 1, None], marks=pytest.mark.slow),
    ],
)
def test_every_leaf_kind_equals_gymnasium_on_any_number_of_workers(where, num_workers, mode, seed):
    space = gs.Dict({"fixed": all_leaves_space(), "variable": gs.Tuple(VARIABLE)})
    story = Story(space, space, num_envs=5, mode=mode, seed=seed, acts=ACTS)
    compare_with_gymnasium(story, partial(make_vector_env, where, num_workers=num_workers))


@pytest.mark.parametrize("space", VARIABLE, ids=lambda space: type(space).__name__)
@pytest.mark.parametrize("where", ["serial", "fork"])
def test_a_space_of_no_fixed_size_may_be_the_whole_observation_and_action(where, space):
    story = Story(space, space, num_envs=2, mode=AutoresetMode.SAME_STEP, seed=1, acts=ACTS)
    compare_with_gymnasium(story, partial(make_vector_env, where))


@pytest.mark.parametrize("copy_results", [True, False])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_copying_results_does_not_change_them(mode, copy_results):
    space = gs.Dict({"image": gs.Box(0, 255, (84, 84, 3), np.uint8), "number": gs.Discrete(5)})
    story = Story(space, gs.Discrete(3), num_envs=4, mode=mode, seed=11, acts=ACTS)
    compare_with_gymnasium(story, partial(make_vector_env, "fork", copy=copy_results))


@pytest.mark.covers("G-6")
@pytest.mark.parametrize(("where", "mode"), every_second(BACKENDS, [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]))
def test_a_gymnasium_env_plays_the_same_episodes_as_under_gymnasium(where, mode):
    env_fns = [partial(gymnasium.make, "CartPole-v1")] * 3
    ours = make_vector_env(where, env_fns, autoreset_mode=mode)
    theirs = gymnasium.vector.SyncVectorEnv(env_fns, autoreset_mode=mode)
    theirs.action_space.seed(4)
    assert not find_difference(ours.reset(seed=42), theirs.reset(seed=42), "reset")
    for i in range(150):
        action = theirs.action_space.sample()
        assert not find_difference(ours.step(action), theirs.step(action), f"step {i}")
    ours.close()
    theirs.close()
