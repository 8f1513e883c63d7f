"""The front-end for ALF with torch: tensors in, tensors out, devices."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import stepmill
from stepmill.frontends.alf import FastParallelEnvironment, ProcessEnvironment
from tests.harness.alf_envs import AlfCounter, NestedAlf, RandomAlf, Reference, Spec, assert_same
from tests.harness.pools import keep_closed

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")


@pytest.fixture
def env_of():
    yield from keep_closed(FastParallelEnvironment)


def as_arrays(nest):
    if isinstance(nest, dict):
        return {key: as_arrays(child) for key, child in nest.items()}
    if isinstance(nest, (tuple, list)):
        children = [as_arrays(child) for child in nest]
        return type(nest)(*children) if hasattr(nest, "_fields") else type(nest)(children)
    assert isinstance(nest, torch.Tensor)
    return nest.numpy()


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.mark.covers("A-8", "A-9")
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_hundred_steps_with_tensors_are_those_of_the_envs_stepped_one_by_one(env_of, device):
    env, reference = env_of([RandomAlf] * 2, device=device), Reference([RandomAlf] * 2)
    assert env.is_tensor_based
    env.seed([0, 1])
    reference.seed([0, 1])
    one, other = env.reset(), reference.reset()
    for _ in range(100):
        here = one if device == "cpu" else one._cpu
        assert_same(as_arrays(here), other)
        assert torch.equal(one.observation, here.observation.to(device))
        one, other = env.step(one.prev_action), reference.step(other.prev_action)


@pytest.mark.covers("A-26")
def test_nests_of_tensors_go_in_and_come_out(env_of):
    env, reference = env_of([NestedAlf] * 2, num_workers=1), Reference([NestedAlf] * 2)
    assert_same(as_arrays(env.reset()), reference.reset())
    move = torch.arange(4, dtype=torch.float32, requires_grad=True).reshape(2, 2).T  # strided, and part of a graph
    jump = (torch.tensor([5, 6]), [torch.tensor([[7], [8]], dtype=torch.int32)])
    plain = {"move": move.detach().numpy(), "jump": (jump[0].numpy(), [jump[1][0].numpy()])}
    for _ in range(4):
        assert_same(as_arrays(env.step({"move": move, "jump": jump})), reference.step(plain))


@pytest.mark.covers("A-9")
def test_kept_tensors_are_not_written_again(env_of):
    class Image(AlfCounter):
        observation = Spec((64, 64), "uint8")

        def observe(self, action):
            return np.full((64, 64), self.t, np.uint8)

    env = env_of([partial(Image, length=50)] * 8, num_workers=1)
    kept = [env.reset()] + [env.step(torch.zeros(8)) for _ in range(20)]
    assert [int(time_step.observation[3, 5, 5]) for time_step in kept] == list(range(21))
    kept[0].observation.add_(7)  # theirs to write
    assert int(env.step(torch.zeros(8)).observation[0, 0, 0]) == 21


@pytest.mark.covers("A-9")
def test_on_another_device_the_copy_of_the_cpu_is_at_hand(env_of):
    env = env_of([NestedAlf] * 2, device="meta", num_workers=1)  # a device that every torch has
    for time_step in (env.reset(), env.current_time_step()):
        assert time_step.observation["pose"].speed.device.type == "meta"
        assert time_step.env_id.device.type == "meta"
        assert time_step._cpu.observation["pose"].speed.tolist() == [0, 0]
        assert time_step._cpu.env_id.tolist() == [0, 1]


@pytest.mark.covers("A-25", "A-1")
@pytest.mark.parametrize("threads", [1, 3])
def test_processes_have_as_many_threads_of_torch_as_asked_for(env_of, threads):
    env = env_of([lambda env_id: AlfCounter(torch.get_num_threads())], torch_num_threads_per_env=threads)
    assert env.envs[0].made_with == threads


@pytest.mark.covers("A-23/actions")
def test_wrong_tensors_are_refused_as_wrong_arrays_are(env_of):
    env = env_of([AlfCounter] * 2)
    env.reset()
    with pytest.raises(RuntimeError, match=r"Incorrect batch size\. Expected: 2, got 3"):
        env.step(torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"array structure mismatch"):
        env.step({"a": torch.zeros(2)})
    assert env.step(torch.zeros(2, dtype=torch.float64)).step_type.tolist() == [1, 1]


def test_a_process_environment_takes_tensors_and_gives_arrays():
    with ProcessEnvironment(AlfCounter) as env:
        env.start()
        env.reset()
        assert env.step(torch.tensor(3.0)).observation.tolist() == [0, 1, 1, 3]


def test_dtypes_of_torch_are_known():
    from stepmill.envs.alf import numpy_dtype

    assert numpy_dtype(torch.int16, "x") == np.dtype("int16")
    with pytest.raises(stepmill.UsageError, match=r"x has dtype torch.bfloat16"):
        numpy_dtype(torch.bfloat16, "x")
