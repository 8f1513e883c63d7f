"""What docs/switching/di_engine.md lists as the same: programs that give the same results with DI-engine's classes and with ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from stepmill.frontends import di_engine
from stepmill.testing.gates import Gate
from tests.frontends.di_engine.envs import ding_envs, opened_later
from tests.originals.di_engine.sides import (
    ASYNC,
    MARKS,
    SUBPROCESS,
    Maker,
    Screen,
    class_of,
    until,
)
from tests.originals.either import assert_same_with_either
from tests.originals.rows import ORIGINAL, OURS

pytestmark = MARKS


def plain(timestep: Any) -> Any:
    """Return a timestep with classes, dtypes and shapes."""
    parts = (timestep.obs, timestep.reward)
    return [type(timestep).__name__, type(timestep.done), timestep.done, timestep.info] + [
        (type(part), part.dtype, part.shape, part.tolist()) for part in parts
    ]


def defaults(make: Any, whose: str) -> Any:
    found = {}
    for name in ("BaseEnvManager", "BaseEnvManagerV2", ASYNC, SUBPROCESS, "SubprocessEnvManagerV2"):
        known = class_of(ORIGINAL, name).default_config()
        cfg = class_of(whose, name).default_config()
        found[name] = {key: cfg[key] for key in known}
    return found


def states(make: Any, whose: str) -> Any:
    module = di_engine if whose == OURS else importlib.import_module("ding.envs.env_manager.base_env_manager")
    return [(state.name, int(state)) for state in module.EnvState]


def episodes(name: str, make: Any, whose: str) -> Any:
    manager = make(name, ding_envs(3, length=2), episode_num=2)
    manager.seed([7, 8, 9], dynamic_seed=False)
    manager.launch({0: {"stat": "kept"}, 1: None, 2: {}})
    found: list[Any] = [manager.seeds, manager.env_num, manager.closed]
    for _ in range(4):
        until(lambda: len(manager.ready_obs) == 3)
        found.append([manager.ready_obs_id, {env_id: obs.tolist() for env_id, obs in manager.ready_obs.items()}])
        found.append({env_id: plain(timestep) for env_id, timestep in sorted(act(manager).items())})
    found += [manager.done, manager.env_state_done(0), manager.resets, manager.identity, manager.method_name_list]
    with pytest.raises(RuntimeError, match="override method_name_list"):
        assert manager.user_defined
    with pytest.raises(AttributeError, match="doesn't have the attribute `absent`"):
        assert manager.absent
    manager.close()
    with pytest.raises(AssertionError, match="env manager is closed"):
        manager.step({})
    manager.launch()
    return [*found, manager.seeds, manager.resets]  # the seeds are not sent again


def act(manager: Any) -> Any:
    """Step each env that needs an action, with its id plus one."""
    return manager.step({env_id: np.array([env_id + 1]) for env_id in manager.ready_obs_id})


def without_auto_reset(make: Any, whose: str) -> Any:
    manager = make.launched(SUBPROCESS, ding_envs(2, length=1), auto_reset=False)
    manager.step({0: 1, 1: "abnormal"})
    found = [int(state) for state in manager._env_states.values()]
    manager.reset({0: {"stat": "mine"}, 1: None})
    return [found, manager.ready_env, manager.resets]


def retries(kind: str, make: Any, whose: str) -> Any:
    manager = make.launched(SUBPROCESS, ding_envs(1), max_retry=3, retry_type=kind, retry_waiting_time=0.01)
    found = []
    if kind == "renew":
        manager.reset({0: {"stat": "even"}})  # fails once
        found = manager.resets  # of the new env
    with pytest.raises(RuntimeError):
        manager.reset({0: {"stat": "error"}})
    return [found, manager.closed]


def a_step_over_its_limit(make: Any, whose: str) -> Any:
    manager = make.launched(SUBPROCESS, ding_envs(1), step_timeout=1)
    with pytest.raises(TimeoutError):
        manager.step({0: "sleep"})
    return manager.closed


def replays_and_frames(make: Any, whose: str) -> Any:
    manager = make(SUBPROCESS, ding_envs(2, _env=Screen()))
    manager.enable_save_replay(["a", "b"])
    manager.launch()
    return [manager.replay_path, {env_id: frame.tolist() for env_id, frame in manager.ready_imgs.items()}]


def num_awaited(make: Any, whose: str) -> Any:
    """Return how many timesteps a step waits for: those that arrive within step_wait_timeout, but at least wait_num."""
    with Gate() as gate:
        found = []
        for own in ({"wait_num": 2}, {"wait_num": 1, "step_wait_timeout": 60.0}):
            manager = make.launched(ASYNC, ding_envs(3, length=9, gate=str(gate.path)), **own)
            with opened_later(gate, 2):
                timesteps = manager.step({0: "gate", 1: 1, 2: "gate"})
            found.append(len(timesteps) >= 2)
        return [*found, len(timesteps)]


def cartpole() -> Any:
    import gymnasium

    return importlib.import_module("ding.envs").DingEnvWrapper(gymnasium.make("CartPole-v1"))


def dynamic_seeds(name: str, make: Any, whose: str) -> Any:
    """Return the observations of twenty episodes per env, whose seeds are drawn from NumPy's global generator."""
    manager = make(name, [cartpole] * 3)
    manager.seed(5)
    manager.launch()
    found = []
    for step in range(200):
        until(lambda: len(manager.ready_obs) == 3)
        found.append({env_id: obs.tolist() for env_id, obs in manager.ready_obs.items()})
        manager.step({env_id: np.array(step // 5 % 2) for env_id in range(3)})
    return found


def loops(make: Any, whose: str) -> Any:
    """Step with loops that never read `ready_obs`."""
    manager = make.launched(SUBPROCESS, ding_envs(2))
    for ask in (
        manager.random_action,
        lambda: dict.fromkeys(manager.ready_obs_id, 1),
        lambda: dict.fromkeys(manager.ready_env, 1),
    ):
        count = 0
        while count < 30:
            count += len(manager.step(ask()))
    return sorted(manager.step({0: 1})) if until(lambda: 0 in manager.ready_env) is None else None


def hooks_called(make: Any, whose: str) -> Any:
    return [hooks_of(name, make, whose) for name in ("BaseEnvManager", SUBPROCESS)]


def hooks_of(name: str, make: Any, whose: str) -> Any:
    calls: list[str] = []

    class Own(class_of(whose, name)):  # type: ignore[misc]
        def _create_state(self) -> None:
            calls.append("_create_state")
            super()._create_state()

        def _check_closed(self) -> None:
            calls.append("_check_closed")
            super()._check_closed()

    manager = Own(ding_envs(1), class_of(whose, name).default_config())
    make.made.append(manager)
    manager.launch()
    manager.step({0: 1})
    return [isinstance(manager, importlib.import_module("ding.envs").BaseEnvManager), sorted({*calls})]


SAME = [
    *(defaults, states, partial(episodes, "BaseEnvManager"), partial(episodes, SUBPROCESS), without_auto_reset),
    *(partial(retries, "reset"), partial(retries, "renew"), replays_and_frames, num_awaited, loops, hooks_called),
    *(a_step_over_its_limit, partial(dynamic_seeds, "BaseEnvManager"), partial(dynamic_seeds, SUBPROCESS)),
]


@pytest.mark.covers("D-6", "D-16", "D-17", "D-38", "D-39", "D-40")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", SAME, ids=lambda program: getattr(program, "__name__", "") or str(program.args[0]))
def test_this_program_gives_the_same_with_either(program: Callable[[Any, str], Any]) -> None:
    assert_same_with_either(lambda make: program(make, make.whose), Maker)
