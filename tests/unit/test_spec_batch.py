"""A batch unpacks into Gymnasium's five values."""

import dataclasses

import numpy as np
import pytest

from stepmill.spec.batch import Batch


def test_a_batch_unpacks_and_counts_its_rows():
    batch = Batch(np.zeros((2, 3)), np.zeros(2), np.zeros(2, bool), np.ones(2, bool), {}, np.array([4, 7]))
    obs, reward, terminated, truncated, info = batch
    assert obs is batch.obs
    assert (reward is batch.reward, terminated is batch.terminated, truncated is batch.truncated) == (True,) * 3
    assert info is batch.info
    assert batch.env_id.tolist() == [4, 7]
    assert batch.num_rows == 2
    assert len(batch) == len(list(batch)) == 5


def test_a_batch_is_frozen():
    batch = Batch(None, None, None, None, {}, np.array([0]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.reward = np.ones(1)


def test_the_repr_of_a_batch_names_shapes_and_dtypes_and_no_values():
    obs = {"image": np.zeros((3, 84, 84), np.uint8), "rest": (np.zeros((3, 2), np.float32), ("a", "b", "c"))}
    flags = np.zeros(3, np.bool_)
    batch = Batch(obs, np.zeros(3), flags, flags, {"lives": np.zeros(3), "_lives": flags}, np.array([4, 0, 2]))
    assert repr(batch) == (
        "Batch(num_rows=3, env_id=[4 0 2], obs={'image': uint8[3, 84, 84], 'rest': (float32[3, 2], tuple[3])}, "
        "reward=float64[3], terminated=bool[3], truncated=bool[3], info keys ['lives'])"
    )


def test_the_repr_of_a_large_batch_of_agents_is_short():
    flags = np.zeros((5000, 2), np.bool_)
    batch = Batch(np.zeros((5000, 2, 4)), np.zeros((5000, 2)), flags, flags, {}, np.arange(5000), flags)
    assert "alive=bool[5000, 2]" in repr(batch)
    assert len(repr(batch)) < 250
