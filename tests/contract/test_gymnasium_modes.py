"""Observation modes and `make_vec`: Gymnasium's cases in our words, on every backend."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces

import stepmill
from stepmill.spec.errors import SpecMismatch
from stepmill.testing.envs import CountingEnv
from tests.harness.gym_envs import SampleEnv
from tests.harness.pools import assert_equal, begun

# ---------------------------------------------------------------- observation modes

BOXES = [spaces.Box(0, high, (5,)) for high in (1, 2, 3)]
BATCHED_BOX = spaces.Box(0, np.repeat(np.arange(1, 4), 5).reshape((3, 5)), (3, 5))


def _box_envs(given):
    return [partial(SampleEnv, space, spaces.Discrete(2)) for space in given]


def test_same_refuses_spaces_that_differ_and_says_what_to_use(vector_env_of):
    with pytest.raises((stepmill.StepmillError, RuntimeError), match="different"):
        vector_env_of(_box_envs(BOXES), observation_mode="same")


@pytest.mark.parametrize("mode", ["different", (BATCHED_BOX, spaces.Box(0, 1, (5,)))], ids=["different", "tuple"])
def test_different_batches_spaces_of_one_shape(vector_env_of, mode):
    envs = vector_env_of(_box_envs(BOXES), observation_mode=mode)
    assert envs.observation_space == batch_differing_spaces(BOXES)
    assert envs.single_observation_space == BOXES[0]
    observation, _ = envs.reset()
    assert observation in envs.observation_space
    envs.step(envs.action_space.sample())


# ---------------------------------------------------------------- make_vec


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_make_vec_takes_an_id_and_the_same_arguments(mode):
    envs = stepmill.make_vec("CartPole-v1", 3, backend="serial", autoreset_mode=mode)
    theirs = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})
    assert envs.metadata["autoreset_mode"] is mode
    assert envs.spec.id == "CartPole-v1"
    assert_equal(envs.reset(seed=1), theirs.reset(seed=1))
    assert_equal(envs.step(np.array([0, 1, 0])), theirs.step(np.array([0, 1, 0])))
    envs.close()
    theirs.close()


def test_a_vector_env_closes_when_it_is_garbage():
    envs = stepmill.make_vec("CartPole-v1", 2, backend="process", num_workers=1)
    envs.reset()
    del envs  # the fixture finds what is left


@pytest.mark.parametrize("mode", ["same", "different", (spaces.Box(0, 4, (2, 5)), spaces.Box(0, 4, (5,)))], ids=str)
@pytest.mark.parametrize("other", [spaces.Discrete(5), spaces.Box(0, 1, (2,))], ids=["kind", "shape"])
def test_no_mode_batches_spaces_of_another_structure(vector_env_of, mode, other):
    with pytest.raises(SpecMismatch, match="env 1 has another observation space than env 0") as caught:
        vector_env_of(_box_envs([spaces.Box(0, 1, (3,)), other]), observation_mode=mode)
    assert isinstance(caught.value, RuntimeError)
    assert len(caught.value.specs) == 2


def test_one_number_as_the_actions_is_a_type_error_too(vector_env_of):
    envs = begun(vector_env_of([CountingEnv] * 2))
    with pytest.raises(TypeError, match="actions=0 is a single number; give one action per env") as caught:
        envs.step(0)
    assert isinstance(caught.value, stepmill.UsageError)
    envs.step([0, 0])


def _make_tolerant(**kwargs):
    return CountingEnv()


@pytest.fixture
def tolerant_id():
    gymnasium.register("Tolerant-v0", _make_tolerant)
    yield "Tolerant-v0"
    del gymnasium.registry["Tolerant-v0"]


def test_a_typo_that_the_envs_accept_causes_a_warning(tolerant_id):
    with pytest.warns(UserWarning, match="num_worker is passed to the constructor of the envs; if you meant stepmill"):
        stepmill.make_vec(tolerant_id, 2, num_worker=2, size=3).close()


def test_arguments_that_only_the_envs_know_are_no_matter(tolerant_id, recwarn):
    stepmill.make_vec(tolerant_id, 2, "sync", size=3, env_kwargs={"num_worker": 2}).close()
    assert not recwarn.list


# ---------------------------------------------------------------- infos without content


def _text_env():
    return SampleEnv(spaces.Text(5), spaces.Discrete(2))  # its observation travels with the info


def _vector_of_boxes():
    return gymnasium.vector.SyncVectorEnv(_box_envs(BOXES[:1] * 2))


@pytest.mark.parametrize("make_env", [_box_envs(BOXES)[0], _text_env, _vector_of_boxes], ids=["box", "text", "batched"])
def test_infos_that_are_empty_are_plain_dicts(vector_env_of, make_env):
    envs = vector_env_of([make_env] * 2)
    infos = [
        envs.reset(seed=0)[1],
        envs.reset(options={"reset_mask": np.arange(envs.num_envs) == 0})[1],
        *(envs.step(envs.action_space.sample())[4] for _ in range(3)),
    ]
    assert [type(info) for info in infos] == [dict] * len(infos)
    assert not any(infos)
