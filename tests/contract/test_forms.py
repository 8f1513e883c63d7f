"""The format of a pool's observations: classes, conversions of arrays, leaves that the pool adds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import stepmill
from stepmill.envs.alf import AlfEnvMaker
from stepmill.pool.port import PoolPort
from stepmill.spec.tree import Leaf, TupleNode
from tests.harness.alf_envs import AlfCounter, TimeStep

ENV_ID = 5  # the number of that leaf
GIVEN = np.array([70, 80, 90], np.int32)


class Mine(NamedTuple):
    """A TimeStep with another name for each field."""

    kind: Any
    gain: Any
    factor: Any
    view: Any
    done: Any
    slot: Any
    raw: Any
    more: Any


class Checked(Mine):
    """A named tuple whose constructor does more than hold its fields."""

    def __new__(cls, *fields):
        return super().__new__(cls, *fields[:-1], "made by __new__")


class Labelled(Mine):
    """One with an __init__ that does."""

    def __init__(self, *fields):
        self.label = f"{len(fields)} fields"


def shouted(*fields):
    return ["a function", *fields]


@pytest.fixture(params=["serial", "fork"])
def where(request):
    return request.param


@pytest.fixture
def pool(pool_of):
    pool = pool_of([AlfEnvMaker(AlfCounter, i) for i in range(3)])
    assert type(pool.reset().obs) is TimeStep
    return pool


def node_of(pool, factory):
    return TupleNode(pool.spec.observation.children, factory)


def test_all_ways_to_receive_hand_out_the_same_form(pool):
    PoolPort(pool).set_observation_format(node_of(pool, Mine), wrap=np.ndarray.tolist, given={ENV_ID: GIVEN})
    actions = np.zeros(3, np.float32)
    first = pool.reset().obs
    assert (type(first), first.kind, first.slot, first.raw, first.more) == (Mine, [0, 0, 0], [70, 80, 90], (), {})
    assert pool.step(actions).obs.view == [[0, 2, 1, 0], [1, 2, 1, 0], [2, 2, 1, 0]]
    only = PoolPort(pool).step_obs(actions)
    assert (type(only), only.gain, only.slot) == (Mine, [2, 2, 2], [70, 80, 90])
    pool.send(actions[:2], env_ids=[2, 0])
    some = pool.recv().obs
    assert (some.kind, some.slot) == ([2, 2], [70, 90])
    assert PoolPort(pool).observe([1]).slot == [80]
    assert pool.reset(env_ids=[1]).obs.slot == [80]


def test_what_is_given_also_goes_to_arrays_of_the_callers_own(pool):
    PoolPort(pool).set_observation_format(node_of(pool, Mine), given={ENV_ID: GIVEN})
    out = pool.reset().obs
    out.slot[:] = 0
    pool.send(np.zeros(3, np.float32))
    assert pool.recv(out=out).obs.slot is out.slot
    assert out.slot.tolist() == [70, 80, 90]
    out.slot[:] = 0  # theirs: the pool has its own
    assert PoolPort(pool).step_obs(np.zeros(3, np.float32)).slot.tolist() == [70, 80, 90]


@pytest.mark.parametrize("factory", [Checked, Labelled, shouted, None])
def test_what_a_factory_does_is_done(pool, factory):
    PoolPort(pool).set_observation_format(node_of(pool, factory))
    obs = pool.reset().obs
    if factory is Checked:
        assert (type(obs), obs.more, obs.kind.tolist()) == (Checked, "made by __new__", [0, 0, 0])
    elif factory is Labelled:
        assert (type(obs), obs.label, obs.kind.tolist()) == (Labelled, "8 fields", [0, 0, 0])
    elif factory is shouted:
        assert (obs[0], obs[1].tolist()) == ("a function", [0, 0, 0])
    else:
        assert (type(obs), obs[0].tolist()) == (tuple, [0, 0, 0])


def test_a_class_with_attributes_and_methods_is_made_whole(pool):
    class Open(Mine):  # its instances have a __dict__
        @property
        def total(self):
            return self.gain.sum()

    PoolPort(pool).set_observation_format(node_of(pool, Open))
    obs = pool.reset().obs
    obs.note = "kept"
    assert (type(obs), obs.total, obs.note, len(obs), hash(Open._fields)) == (Open, 0, "kept", 8, hash(Mine._fields))


def test_a_form_of_other_leaves_is_refused(pool):
    children = pool.spec.observation.children
    with pytest.raises(stepmill.UsageError, match="differ from those of this pool's observations"):
        PoolPort(pool).set_observation_format(TupleNode((*children[:-1], Leaf(np.dtype(np.int8), ())), Mine))
    for wrong in (GIVEN[:2], GIVEN.astype(np.int64), GIVEN.astype(np.float32)):
        with pytest.raises(stepmill.UsageError, match=r"leaf \[5\] must be given as a C array of int32"):
            PoolPort(pool).set_observation_format(node_of(pool, Mine), given={ENV_ID: wrong})
    assert type(pool.reset().obs) is TimeStep


def test_a_fault_is_raised_by_a_step_that_wants_observations_only(pool_of):
    from tests.harness.alf_envs import FaultyAlf

    pool = pool_of([AlfEnvMaker(FaultyAlf, i) for i in range(2)])
    pool.reset()
    with pytest.raises(stepmill.EnvError, match="failed in step"):
        PoolPort(pool).step_obs(np.array([0, 13], np.float32))
    assert pool.recv().env_id.tolist() == [0]
    pool.reset()
    assert PoolPort(pool).step_obs(np.zeros(2, np.float32)).step_type.tolist() == [1, 1]
