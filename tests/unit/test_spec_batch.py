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
