"""The front-end for ALF refuses envs that do not fit together, and actions that do not fit the envs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import stepmill
from stepmill.envs.alf import numpy_dtype
from stepmill.frontends.alf import BatchEnvironmentWrapper, FastParallelEnvironment
from tests.harness.alf_envs import AlfCounter, FaultyAlf, NestedAlf, Spec, TimeStep


class Odd(AlfCounter):
    """Differs from the others, if its number is `odd`, in one thing."""

    def __init__(self, env_id: int, *, odd: int, **changes: object) -> None:
        super().__init__(env_id)
        if env_id == odd:
            for name, value in changes.items():
                setattr(self, name, value)


class SaysItIsBatched(AlfCounter):
    batched = True
    batch_size = 1


CHANGES = {
    "array-based environments": {"is_tensor_based": True},
    "the same action spec": {"action": Spec((2,))},
    "the same time_step_spec": {"observation": Spec((5,))},
    "the same env_info_spec": {"info": {"more": Spec()}},
}


def start(constructors, **arguments):
    return FastParallelEnvironment(constructors, as_tensors=False, **arguments)


@pytest.mark.covers("A-5")
@pytest.mark.parametrize("text", CHANGES)
def test_each_difference_has_its_own_error_text(text):
    constructors = [partial(Odd, odd=1, **CHANGES[text])] * 2
    with pytest.raises(ValueError, match=rf"^All environments must (have|be) {text}\.? Env 1"):
        start(constructors)


@pytest.mark.covers("A-5")
def test_bounds_are_part_of_a_spec():
    with pytest.raises(ValueError, match="All environments must have the same action spec"):
        start([partial(Odd, odd=1, action=Spec((), maximum=3.0))] * 2)


@pytest.mark.covers("A-5")
def test_batch_sizes_and_being_batched_must_agree():
    def pair(env_id):
        return BatchEnvironmentWrapper([AlfCounter(env_id)] * 2)

    with pytest.raises(ValueError, match=r"^All environments must have the same batch_size\. Env 1 has 1"):
        start([pair, AlfCounter])
    with pytest.raises(ValueError, match=r"^All environments must have the same batched\. Env 1 has True"):
        start([AlfCounter, SaysItIsBatched])


def test_an_env_that_is_no_alf_environment_is_refused():
    with pytest.raises(stepmill.EnvError, match=r"is not an ALF environment: it has no action_spec\(\)") as caught:
        start([lambda env_id: __import__("stepmill.testing").testing.CountingEnv()])
    assert isinstance(caught.value, RuntimeError)
    with pytest.raises(stepmill.EnvError, match="return a named tuple with"):
        start([partial(Odd, odd=0, time_step_spec=lambda: (Spec(),))])
    with pytest.raises(stepmill.EnvError, match=r"time_step.observation is a str; a spec must have a shape"):
        start([partial(Odd, odd=0, observation="text")])


@pytest.mark.parametrize("dtype", ["torch.float32", "float32", np.float32, np.dtype("float32"), np.dtype(">f4")])
def test_dtypes_of_any_library_are_known_by_name(dtype):
    assert numpy_dtype(dtype, "x") == np.dtype("float32")
    assert numpy_dtype(np.bool_, "x") == np.dtype(bool)


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "no dtype", "object"])
def test_dtypes_that_cannot_lie_in_shared_memory_are_refused(dtype):
    with pytest.raises(stepmill.UsageError, match="x has dtype"):
        numpy_dtype(dtype, "x")


# ---- actions ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nested():
    with start([NestedAlf] * 3, backend="serial") as env:
        yield env


def good(**changes):
    action = {"move": np.zeros((3, 2), np.float32), "jump": (np.zeros(3, np.int64), [np.zeros((3, 1), np.int32)])}
    return {**action, **changes}


WRONG = {
    "another structure": (np.zeros(3), r"array structure mismatch\. action must be a dict"),
    "a key too few": ({"move": np.zeros((3, 2), np.float32)}, r"array structure mismatch\..*keys \['move', 'jump'\]"),
    "a part too many": (good(jump=(1, 2, 3)), r"array structure mismatch\. action\['jump'\] must have 2 parts"),
    "a nest for a leaf": (good(move=(1, 2)), r"array structure mismatch\. action\['move'\] must be one array"),
    "too few rows": (good(move=np.zeros((2, 2), np.float32)), r"Incorrect batch size\. Expected: 3, got 2"),
    "no rows": (good(move=np.float32(1)), r"Incorrect batch size\. Expected: 3, got 0"),
    "another shape": (good(move=np.zeros((3, 4), np.float32)), r"float32 of shape \(3, 2\), but is float32 of shape"),
    "another dtype": (good(jump=(np.full(3, 0.5), [np.zeros((3, 1), np.int32)])), r"must be int64 .* but is float64"),
    "no array": (good(move=object()), r"one of the field is not converted to numpy array"),
    "text": (good(move=["a", "b", "c"]), r"one of the field is not converted to numpy array"),
}


@pytest.mark.covers("A-23/actions", "A-B5/actions")
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_action_is_refused_and_nothing_is_stepped(nested, what):
    action, text = WRONG[what]
    before = nested.reset()
    with pytest.raises(ValueError, match=text) as caught:
        nested.step(action)
    assert isinstance(caught.value, RuntimeError)
    assert nested.current_time_step() is before
    assert nested.step(good()).step_type.tolist() == [1, 1, 1]


@pytest.mark.covers("A-B5/actions")
def test_numbers_are_converted_by_value_and_never_reinterpreted(nested):
    nested.reset()
    time_step = nested.step(good(move=np.full((3, 2), 7, np.float64)))  # as wide as int64
    assert time_step.prev_action["move"].tolist() == [[7, 7]] * 3
    time_step = nested.step(good(move=np.full((3, 2), 7, np.int32)))  # as wide as float32
    assert time_step.prev_action["move"].dtype == np.float32
    assert time_step.prev_action["move"].tolist() == [[7, 7]] * 3


# ---- time steps -------------------------------------------------------------------------------------------------------

INVALID = {
    "shape": r"env 1 gave a wrong output of step: leaf observation has shape \(5,\)",
    "structure": r"gave a wrong output of step",
    "dtype": r"gave a wrong output of step",
    "text": r"one of the field is not converted to numpy array.*env 1",
    "short": r"array structure mismatch\..*env 1",
    "none": r"array structure mismatch\..*env 1",
}


@pytest.mark.covers("A-23/time_steps")
@pytest.mark.parametrize("how", INVALID)
def test_a_wrong_time_step_is_an_error_with_env_and_field(how):
    with start([partial(FaultyAlf, how=how, only=1)] * 2, backend="thread", num_workers=1) as env:
        env.reset()
        with pytest.raises(stepmill.BadOutput, match=INVALID[how]) as caught:
            env.step(np.array([13, 13], np.float32))
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.env_id == 1
        assert env.reset().step_type.tolist() == [0, 0]


@pytest.mark.covers("A-B5/scalars")
def test_a_scalar_of_another_width_is_written_within_its_own_place():
    class Wide(AlfCounter):
        def tell(self, step_type, reward, discount, action):
            time_step = super().tell(step_type, reward, discount, action)
            return time_step._replace(reward=np.float64(1.5), discount=0.25, env_id=np.int64(2**31 - 1))

    with start([Wide] * 3, backend="serial") as env:
        time_step = env.reset()
        assert (time_step.reward.dtype, time_step.reward.tolist()) == (np.float32, [1.5] * 3)
        assert time_step.discount.tolist() == [0.25] * 3
        assert time_step.env_id.tolist() == [0, 1, 2]


def test_classes_of_time_steps_keep_their_methods():
    with start([partial(AlfCounter, length=1)], backend="serial") as env:
        env.reset()
        time_step = env.step(np.zeros(1, np.float32))
        assert isinstance(time_step, TimeStep)
        assert time_step.is_last().tolist() == [True]


def test_without_torch_there_are_arrays_and_wanting_tensors_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(stepmill.MissingExtraError, match=r"pip install 'stepmill\[torch\]'"):
        FastParallelEnvironment([AlfCounter], as_tensors=True, backend="serial")


@pytest.mark.covers("A-26", "A-5", "A-1")
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_classes_of_a_function_are_the_same_from_every_worker(start_method):
    class Pair(NamedTuple):
        left: Any
        right: Any

    @dataclass(frozen=True)
    class OwnSpec:
        shape: tuple[int, ...]
        dtype: str
        maximum: float = 1.0

    class Own(AlfCounter):
        observation = Pair(OwnSpec((), "float32"), OwnSpec((2,), "float32"))

        def observe(self, action):
            return Pair(np.float32(self.t), np.ones(2, np.float32))

    with start([Own] * 2, start_method=start_method) as env:
        assert env.reset().observation.right.tolist() == [[1, 1]] * 2

    class Other(Own):
        def observation_spec(self):
            last = OwnSpec((2,), "float32", maximum=2.0 if self.made_with else 1.0)
            return Pair(OwnSpec((), "float32"), last)

        def time_step_spec(self):
            return super().time_step_spec()._replace(observation=self.observation_spec())

    with pytest.raises(ValueError, match="All environments must have the same time_step_spec"):
        start([Other] * 2, start_method=start_method)
