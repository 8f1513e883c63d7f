"""A Gymnasium vector env as one env of many rows."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from stepmill.envs import adapt, describe
from stepmill.spec.errors import UsageError
from stepmill.spec.tree import Leaf, LeafKind


@pytest.fixture
def envs():
    made = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    yield made
    made.close()


def test_a_vector_env_is_described_by_one_of_its_rows(envs):
    spec = describe(envs)
    assert spec.observation == Leaf(np.dtype("f4"), (4,))
    assert spec.action == Leaf(np.dtype("i8"), (), LeafKind.DISCRETE)
    assert (spec.batch_size, spec.is_batched) == (3, True)
    assert adapt(envs) is envs


def test_the_autoreset_mode_is_a_string_and_the_envs_own_stays(envs):
    assert describe(envs).metadata["autoreset_mode"] == "SameStep"
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP


def test_vector_wrappers_are_batched_envs_too(envs):
    spec = describe(gymnasium.wrappers.vector.RecordEpisodeStatistics(envs))
    assert spec.batch_size == 3
    assert describe(envs, describe(envs)).is_compatible(spec)


def test_equal_vector_envs_share_one_spec(envs):
    first = describe(envs)
    assert describe(envs, first) is first


def test_gymnasiums_own_numpy_batches_are_batched_envs():
    made = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")
    assert describe(made).batch_size == 2
    made.close()


def test_a_vector_env_without_a_size_is_refused():
    class Bare(gymnasium.vector.VectorEnv):
        single_observation_space = single_action_space = spaces.Discrete(2)

        num_envs = None

    with pytest.raises(UsageError, match=r"num_envs of .* is None; set it to the number of rows"):
        describe(Bare())
