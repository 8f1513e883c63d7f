"""Corners of DI-engine's managers that no list had, with its classes and with ours; test_di_engine_differences names their rows."""

from __future__ import annotations

import contextlib
import importlib
import pickle
from functools import partial
from typing import Any

import pytest

from stepmill.frontends import di_engine
from tests.frontends.di_engine.envs import DingEnv, ding_envs
from tests.originals.di_engine.sides import ASYNC, MARKS, SUBPROCESS, Maker, class_of, close_all, until
from tests.originals.either import fixture_of
from tests.originals.rows import ORIGINAL, OURS

pytestmark = MARKS


make = fixture_of(Maker)


@pytest.mark.parametrize("name", ["BaseEnvManager", SUBPROCESS])
def test_attributes_of_a_manager_that_is_closed(make: Any, whose: str, name: str) -> None:
    manager = make(name, ding_envs(2))
    raises = whose == ORIGINAL and name == SUBPROCESS
    with pytest.raises(AssertionError) if raises else contextlib.nullcontext():
        assert not hasattr(manager, "nothing")
    for error in (AssertionError,) if whose == ORIGINAL else (AssertionError, AttributeError):
        with pytest.raises(error):
            assert manager.length
    with contextlib.nullcontext() if whose == OURS else pytest.raises((AssertionError, AttributeError)):
        assert manager._ready_obs == {0: None, 1: None}
    if name == "BaseEnvManager":
        assert hasattr(manager, "active_env") is (whose == OURS)
    assert manager.ready_imgs == {}


def test_an_attribute_that_one_env_has(make: Any, whose: str) -> None:
    manager = make.launched("BaseEnvManager", [partial(DingEnv, mine=1), DingEnv])
    with contextlib.nullcontext() if whose == ORIGINAL else pytest.raises(AttributeError):
        assert manager.mine == [1, None]


def test_corners_of_managers(make: Any, whose: str) -> None:
    is_ours = whose == OURS
    cls = class_of(whose, SUBPROCESS)
    cfg = cls.default_config()
    manager = cls(ding_envs(1), cfg)
    assert (manager._cfg is cfg) is not is_ours
    manager.seed(3)
    assert manager._env_seed == ({0: 3} if is_ours else [3])
    with pytest.raises(AttributeError) if not is_ours else contextlib.nullcontext():
        manager.launch()
        manager.enable_save_figure(0, "figures")
    manager.close()
    with pytest.raises(TypeError):
        make("BaseEnvManager", [3]).launch()
    with pytest.raises(TypeError) if is_ours else contextlib.nullcontext():
        assert pickle.dumps(make("BaseEnvManager", ding_envs(1)))
    with pytest.raises(TypeError) if is_ours else contextlib.nullcontext():
        make(SUBPROCESS, ding_envs(1)).enable_save_replay(3)
    manager = make.launched(ASYNC, ding_envs(1))
    with pytest.raises(AssertionError) if not is_ours else contextlib.nullcontext():
        assert manager.step({}) == {}
    manager = make.launched("BaseEnvManagerV2", ding_envs(1))
    with pytest.raises(AttributeError if is_ours else TypeError):
        manager.step(None)


class Counts(DingEnv):
    def reset(self, **kwargs: Any) -> Any:
        self.num_resets = getattr(self, "num_resets", 0) + 1
        return super().reset(**kwargs)


def test_corners_of_resets(make: Any, whose: str) -> None:
    is_ours = whose == OURS
    manager = make.launched(SUBPROCESS, [partial(Counts, length=1)])
    with pytest.raises(AttributeError) if not is_ours else contextlib.nullcontext():
        assert manager.num_resets == [1]
    manager.step({0: 1})
    if is_ours:
        assert manager._env_states[0].name == "RESET"
        until(lambda: manager.ready_obs_id == [0])
    else:
        until(lambda: manager._env_states[0].name == "RUN")


def test_corners_of_the_supervisor(whose: str) -> None:
    cls = class_of(whose, "EnvSupervisor")
    with pytest.raises(KeyError) if whose == ORIGINAL else contextlib.nullcontext():
        cls("process", ding_envs(1))
    kind = (di_engine if whose == OURS else importlib.import_module("ding.framework.supervisor")).ChildType.THREAD
    supervisor = cls(kind, ding_envs(2))
    assert not hasattr(supervisor, "nothing")
    supervisor.seed(3)
    supervisor.seed({1: 5})  # the seeds that were given before are dropped
    supervisor.launch()
    assert supervisor.seeds == [[], [(5, "not given")]]
    supervisor.seed({0: 7})
    supervisor.reset()
    assert supervisor.seeds[0] == ([(7, "not given")] if whose == OURS else [])
    with pytest.raises(RuntimeError) if whose == OURS else contextlib.nullcontext():
        assert callable(supervisor.user_defined[0])
    with pytest.raises(IndexError):
        supervisor.step({9: 1})
    with pytest.raises(AttributeError):
        supervisor.get_child_attr(0, "nothing")
    with pytest.raises(AssertionError, match="Action is empty"):
        supervisor.step(None)
    close_all([supervisor], whose)
