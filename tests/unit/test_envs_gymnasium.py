"""The spaces of Gymnasium envs, as trees."""

import pickle
from types import SimpleNamespace

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

from stepmill.envs import adapt, describe
from stepmill.envs.gymnasium import GymnasiumEnvMaker
from stepmill.spec.errors import UsageError
from stepmill.spec.tree import DictNode, Leaf, LeafKind, Opaque, TupleNode


class Env(gymnasium.Env):
    def __init__(self, observation_space, action_space=None):
        self.observation_space = observation_space
        self.action_space = spaces.Discrete(2) if action_space is None else action_space


def tree_of(space):
    spec = describe(Env(space, space))
    assert spec.observation == spec.action
    return spec.observation


@pytest.mark.parametrize(
    "dtype", ["b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", np.longdouble]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 4), (0,)])
def test_a_box_is_a_leaf_of_its_dtype_and_shape(dtype, shape):
    kind = LeafKind.ARRAY if shape else LeafKind.SCALAR
    assert tree_of(spaces.Box(0, 1, shape, dtype)) == Leaf(np.dtype(dtype), shape, kind)


def test_a_box_in_foreign_byte_order_is_kept_in_the_machines_own():
    assert tree_of(spaces.Box(0, 1, (2,), ">f4")) == Leaf(np.dtype("=f4"), (2,))


@pytest.mark.parametrize("dtype", ["i8", "i4", "u1"])
def test_a_discrete_is_an_integer_of_its_dtype(dtype):
    assert tree_of(spaces.Discrete(3, start=1, dtype=dtype)) == Leaf(np.dtype(dtype), (), LeafKind.DISCRETE)


def test_vectors_of_choices_are_arrays():
    assert tree_of(spaces.MultiDiscrete([3, 4])) == Leaf(np.dtype("i8"), (2,))
    assert tree_of(spaces.MultiDiscrete([[3, 4], [5, 6]], dtype="u1")) == Leaf(np.dtype("u1"), (2, 2))
    assert tree_of(spaces.MultiBinary(4)) == Leaf(np.dtype("i1"), (4,))
    assert tree_of(spaces.MultiBinary([2, 3])) == Leaf(np.dtype("i1"), (2, 3))


class Strange(spaces.Space):
    def __init__(self):
        super().__init__(shape=(3,), dtype=np.float32)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Box(0, 1, (2,))),
        spaces.Graph(spaces.Box(0, 1, (2,)), None),
        spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (2,))]),
        Strange(),
    ],
    ids=lambda space: type(space).__name__,
)
def test_what_has_no_fixed_size_or_is_not_known_is_opaque(space):
    assert tree_of(space) == Opaque()


def test_composites_keep_the_spaces_order_to_any_depth():
    box, pick = spaces.Box(0, 1, (2,)), spaces.Discrete(3)
    leaf, integer = Leaf(np.dtype("f4"), (2,)), Leaf(np.dtype("i8"), (), LeafKind.DISCRETE)
    space = spaces.Dict({"z": pick, "a": spaces.Tuple([box, spaces.Dict({"t": spaces.Text(3)}), spaces.Tuple([])])})
    inner = TupleNode((leaf, DictNode((("t", Opaque()),)), TupleNode(())))
    items = {"z": integer, "a": inner}
    assert tree_of(space) == DictNode(tuple((key, items[key]) for key in space.spaces))


def test_a_dtype_that_holds_references_or_fields_is_refused_by_name():
    space = spaces.Box(0, 1, (2,))
    space.dtype = np.dtype(object)
    with pytest.raises(UsageError, match=r"observation_space\['a'\]\[0\] has dtype object"):
        describe(Env(spaces.Dict({"a": spaces.Tuple([space])})))
    space.dtype = np.dtype([("x", "f4")])
    with pytest.raises(UsageError, match=r"action_space has dtype .* cannot lie in shared memory"):
        describe(Env(spaces.Discrete(2), space))


def test_what_is_no_space_is_refused_by_name():
    env = Env(spaces.Discrete(2), spaces.Discrete(2))
    env.observation_space = 3
    with pytest.raises(UsageError, match=r"observation_space of .* is a int; set it"):
        describe(env)


def test_without_a_space_any_value_is_an_observation_or_an_action():
    env = Env(None, spaces.Discrete(2))
    assert (describe(env).observation, describe(env).action) == (Opaque(), tree_of(spaces.Discrete(2)))
    for bare in (gymnasium.Env(), gymnasium.Wrapper(gymnasium.Env()), SimpleNamespace(reset=len, step=len)):
        spec = describe(bare)
        assert (spec.observation, spec.action, spec.is_batched) == (Opaque(), Opaque(), False)
        assert pickle.loads(spec.spaces) == (None, None)
        assert adapt(bare) is bare


def test_wrapped_envs_are_stepped_as_they_are():
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    spec = describe(env)
    assert adapt(env) is env
    assert spec.render_mode == "rgb_array"
    assert spec.metadata == env.metadata
    assert pickle.loads(spec.spaces) == (env.observation_space, env.action_space)
    assert pickle.loads(spec.gym_spec) == env.spec
    assert (spec.batch_size, spec.is_batched) == (1, False)
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_equal_envs_share_one_spec():
    first = describe(gymnasium.make("CartPole-v1"))
    assert describe(gymnasium.make("CartPole-v1"), first) is first
    other = describe(gymnasium.make("MountainCar-v0"), first)
    assert other is not first
    assert not other.is_compatible(first)


def test_metadata_with_arrays_does_not_get_in_the_way():
    first, second = Env(spaces.Discrete(2)), Env(spaces.Discrete(2))
    first.metadata = {"table": np.arange(3)}
    second.metadata = {"table": np.arange(3)}
    spec = describe(first)
    assert describe(second, spec).is_compatible(spec)


def test_spaces_of_a_local_class_travel_with_their_class():
    class Local(spaces.Space):
        pass

    loaded = cloudpickle.loads(describe(Env(Local())).spaces)
    assert type(loaded[0]).__name__ == "Local"


def test_a_spec_that_cannot_be_rebuilt_is_left_out():
    class Odd(Env):
        spec = SimpleNamespace(lock=iter([]), unpicklable=(value for value in ()))

    assert describe(Odd(spaces.Discrete(2))).gym_spec is None


@pytest.mark.parametrize("thing", [3, None, object(), spaces.Discrete(2), Env])
def test_what_is_no_env_is_refused_with_what_is_accepted(thing):
    for function in (describe, adapt):
        with pytest.raises(
            UsageError, match=r"which is not an env .* one of: gymnasium.Env, gymnasium.vector.VectorEnv"
        ):
            function(thing)


def test_an_env_maker_travels_and_wraps():
    spec = gymnasium.spec("CartPole-v1")
    maker = GymnasiumEnvMaker(spec, (lambda env: gymnasium.wrappers.TransformReward(env, lambda reward: reward + 1),))
    env = cloudpickle.loads(cloudpickle.dumps(maker))()
    env.reset(seed=0)
    assert env.step(0)[1] == 2
    assert env.spec.id == "CartPole-v1"


def test_an_env_maker_needs_no_registry():
    spec = GymnasiumSpec("Nowhere-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=3)
    assert GymnasiumEnvMaker(spec)().spec.max_episode_steps == 3
