"""Adapters that a program registers reach its workers."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

import stepmill
from stepmill.envs import registered
from stepmill.spec.tree import Leaf
from tests.harness.pools import begun, make_pool
from tests.harness.scripts import run_file


class Counter:
    """An env of an API that stepmill does not know."""

    def count(self):
        self.value = getattr(self, "value", 0) + 1
        return np.full(2, self.value, np.float32)


class CounterAsEnv:
    def __init__(self, counter):
        self.counter = counter

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return self.counter.count(), 1.0, False, False, {}


def describe(env, like):
    leaf = Leaf(np.dtype(np.float32), (2,))
    return like or stepmill.EnvSpec(observation=leaf, action=leaf)


adapt = CounterAsEnv
NAMESPACE = types.SimpleNamespace(describe=describe, adapt=adapt)


@pytest.fixture(autouse=True)
def _without_registrations():
    before = dict(registered.ADAPTERS)
    yield
    registered._registered.clear()
    registered.ADAPTERS.clear()
    registered.ADAPTERS.update(before)


@pytest.mark.parametrize("where", ["serial", "thread", "fork", "forkserver", "spawn"])
@pytest.mark.parametrize("adapter", [NAMESPACE, sys.modules[__name__], __name__], ids=["object", "module", "name"])
def test_envs_of_another_api_are_stepped_on_each_backend(where, adapter):
    stepmill.register_adapter(Counter, adapter)
    with begun(make_pool(where, [Counter] * 3)) as pool:
        assert pool.step(np.zeros((3, 2), np.float32)).obs.tolist() == [[1, 1]] * 3


def test_a_class_may_be_given_by_its_name():
    stepmill.register_adapter(f"{__name__}.Counter", NAMESPACE)
    with make_pool("serial", [Counter]) as pool:
        assert pool.reset(seed=0).obs.shape == (1, 2)


def test_an_adapter_of_a_script_reaches_its_workers(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import types\nimport numpy as np\nimport stepmill\nfrom stepmill.spec.tree import Leaf\n"
        "class Toy:\n    pass\n"
        "class ToyEnv:\n"
        "    def __init__(self, toy):\n        pass\n"
        "    def reset(self, *, seed=None, options=None):\n        return np.zeros(1, np.float32), {}\n"
        "    def step(self, action):\n        return np.ones(1, np.float32), 1.0, False, False, {}\n"
        "def describe(env, like):\n"
        "    leaf = Leaf(np.dtype(np.float32), (1,))\n"
        "    return like or stepmill.EnvSpec(observation=leaf, action=leaf)\n"
        "stepmill.register_adapter(Toy, types.SimpleNamespace(describe=describe, adapt=ToyEnv))\n"
        "with stepmill.Pool([Toy] * 2, backend='process', num_workers=2) as pool:\n"
        "    print(pool.reset(seed=0).obs.tolist())\n"
    )
    result = run_file(program)
    assert (result.stdout.strip(), result.stderr) == ("[[0.0], [0.0]]", "")


def test_an_env_without_an_adapter_is_answered_with_the_function():
    known = r".*gymnasium.Env, .*mlagents_envs.BaseEnv, .*reasoning_gym; or register an adapter"
    with pytest.raises(stepmill.EnvError, match=rf"Counter, which is not an env {known} .*stepmill\.register_adapter"):
        make_pool("serial", [Counter])


def test_adapters_that_cannot_be_are_refused():
    with pytest.raises(stepmill.UsageError, match=r"has no adapt; give it describe and adapt"):
        stepmill.register_adapter(Counter, types.SimpleNamespace(describe=describe))
    with pytest.raises(stepmill.UsageError, match="'no_such_module', which cannot be imported"):
        stepmill.register_adapter(Counter, "no_such_module")
    stepmill.register_adapter(Counter, types.SimpleNamespace(describe=describe, adapt=adapt, socket=(x for x in ())))
    with pytest.raises(stepmill.UsageError, match=r"adapters \(.*Counter\) cannot be pickled: .*context='fork'"):
        make_pool("forkserver", [Counter])
