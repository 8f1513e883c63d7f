"""The table of differences of docs/switching/di_engine.md, each row run with DI-engine's classes and with ours.

A test marked `row` shows the row of the table of differences that begins with the text. The last test fails if a row has no test.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import multiprocessing
import os
import signal
import sys
import time
import types
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepmill.frontends import di_engine
from stepmill.spec.errors import BadOutput, UsageError
from stepmill.testing.faulty import OddSignatureError
from stepmill.testing.gates import Gate
from tests.frontends.di_engine.envs import DingEnv, TreeEnv, ding_envs, opened_later
from tests.frontends.di_engine.test_faults import WrongShape
from tests.originals.di_engine import test_di_engine_corners
from tests.originals.di_engine.sides import (
    ASYNC,
    MARKS,
    NEVER_S,
    SUBPROCESS,
    Maker,
    Never,
    Screen,
    class_of,
    close_all,
    interrupted,
    until,
)
from tests.originals.either import fixture_of, raises
from tests.originals.pages import ROOT
from tests.originals.rows import ORIGINAL, OURS, Rows

pytestmark = MARKS
row = Rows("di_engine")
make = fixture_of(Maker)


# ---- arguments -------------------------------------------------------------------------------------------


@row("Managers: `cfg`")
def test_settings_may_be_left_out(whose: str) -> None:
    cls = class_of(whose, SUBPROCESS)
    with raises(whose, original=AttributeError):
        cls(ding_envs(1)).close()


@row("Settings")
def test_there_are_more_settings() -> None:
    more = {*class_of(OURS, ASYNC).default_config()} - {*class_of(ORIGINAL, ASYNC).default_config()}
    assert more == {"num_workers", "step_deadline", "max_get", "linger", "on_error"}


@row("`step_wait_timeout=None` of `async_subprocess`")
@row("A limit of `async_subprocess`'s wait")
@pytest.mark.parametrize("own", [{"wait_num": 2, "step_wait_timeout": None}, {"wait_num": 3, "step_deadline": 0.1}])
def test_a_step_of_the_original_waits_for_all(make: Any, whose: str, own: Any) -> None:
    with Gate() as gate:
        manager = make.launched(ASYNC, ding_envs(3, length=9, gate=str(gate.path)), **own)
        with opened_later(gate, 1) if whose == ORIGINAL else contextlib.nullcontext():
            timesteps = manager.step({0: 1, 1: 1, 2: "gate"})
        assert (2 in timesteps) is (whose == ORIGINAL)
        gate.open()


@row("`step_timeout`, `reset_timeout`")
def test_limits_may_be_fractions_of_a_second(make: Any, whose: str) -> None:
    manager = make.launched(SUBPROCESS, ding_envs(1), step_timeout=0.5)
    with pytest.raises(TimeoutError if whose == OURS else TypeError):
        manager.step({0: "sleep" if whose == OURS else 1})


class Masked(DingEnv):
    """Blocks the signals of its thread, as native code does by not returning."""

    def step(self, action: Any) -> Any:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        return super().step(action)


@row("`step_timeout`, `reset_timeout`")
def test_limits_hold_where_no_alarm_arrives(make: Any, whose: str) -> None:
    manager = make.launched(SUBPROCESS, [Masked], step_timeout=1)
    with (
        pytest.raises(TimeoutError if whose == OURS else Never),
        interrupted() if whose == ORIGINAL else contextlib.nullcontext(),
    ):
        manager.step({0: "sleep"})


@row("`AsyncSubprocessEnvManager.wait(")
@pytest.mark.covers("D-B1", "D-10")
def test_waits_for_connections(whose: str) -> None:
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    ours, theirs = zip(*pipes, strict=True)
    theirs[0].send("answer")
    wait = class_of(whose, ASYNC).wait
    began = time.monotonic()
    assert wait([*ours], 1, NEVER_S) == ([ours[0]], [0])
    assert (time.monotonic() - began < NEVER_S / 2) is (whose == OURS)  # the original lingers for the timeout
    with contextlib.nullcontext() if whose == OURS else pytest.raises(Never), interrupted():
        wait([*ours], 2, 0.2)


@row("`seed([...])`")
@pytest.mark.covers("D-B10")
def test_a_list_of_seeds_is_copied(make: Any, whose: str) -> None:
    manager = make(SUBPROCESS, ding_envs(2))
    seeds = [3, 4]
    manager.seed(seeds)
    manager.launch()
    assert seeds == ([None, None] if whose == ORIGINAL else [3, 4])


@row("V2 `step(actions)`")
def test_v2_needs_as_many_actions_as_envs(make: Any, whose: str) -> None:
    manager = make.launched("SubprocessEnvManagerV2", ding_envs(2))
    with raises(whose, ours=UsageError):
        assert len(manager.step([1])) == 1


@row("`render_mode` of `ready_imgs`")
@row("Methods of envs")
def test_render_modes_and_methods_of_envs(make: Any, whose: str) -> None:
    manager = make.launched(SUBPROCESS, ding_envs(2, _env=Screen()))
    with raises(whose, original=TypeError):
        (manager.render_ready if whose == OURS else manager.ready_imgs)("depth_array")
    with raises(whose, original=AttributeError):
        assert manager.call("reward_shaping", [1], env_ids=[1]) == {1: [1, 1]}


@row("Overriding ")
@pytest.mark.parametrize(
    ("base", "name"),
    [("BaseEnvManager", name) for name in ("_reset", "_step")]
    + [(SUBPROCESS, name) for name in ("worker_fn_robust", "_reset", "_check_data", "_create_env_subprocess")]
    + [("EnvSupervisor", name) for name in ("_reset", "_recv_callback", "_recv_step_callback", "_shm_callback")],
)
def test_these_methods_may_not_be_overridden(whose: str, base: str, name: str) -> None:
    cls = class_of(whose, base)
    calls: list[int] = []

    def own(*args: Any, **keywords: Any) -> Any:
        calls.append(1)
        return getattr(cls, name)(*args, **keywords)

    sub = type("Own", (cls,), {name: staticmethod(own) if name == "worker_fn_robust" else own})
    if whose == OURS:
        with pytest.raises(TypeError, match=f"Own overrides {name}"):
            sub(env_fn=ding_envs(1))
        return
    manager = sub(env_fn=ding_envs(1), **{} if base == "EnvSupervisor" else {"cfg": cls.default_config()})
    manager.launch()
    manager.step({0: 1})
    assert calls or name in ("worker_fn_robust", "_shm_callback")  # which are called in the process
    close_all([manager], whose)


@row("`EnvSupervisor`: `reset_timeout` and the arguments after it")
@row("`register`, `change_state` and `TYPE_MAPPING`")
def test_the_supervisors_arguments_and_parts(whose: str) -> None:
    cls = class_of(whose, "EnvSupervisor")
    kind = (di_engine if whose == OURS else importlib.import_module("ding.framework.supervisor")).ChildType.THREAD
    assert all(hasattr(cls, name) is (whose == ORIGINAL) for name in ("register", "change_state", "TYPE_MAPPING"))
    with raises(whose, ours=TypeError):
        cls(kind, ding_envs(1), "reset", 1, None, True, 5)


class FakePool:
    """As much of an EnvPool pool as DI-engine's manager uses."""

    def async_reset(self) -> None: ...

    def send(self, action: Any, env_id: Any) -> None: ...

    def recv(self) -> Any:
        return np.zeros((2, 4)), np.ones(2), np.array([False, True]), {"env_id": np.array([1, 0])}


@row("`PoolEnvManager(cfg)`")
@row("`PoolEnvManager`: `info")
def test_the_originals_manager_of_envpool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is tested with EnvPool itself in tests/frontends."""
    from easydict import EasyDict

    name = "ding.envs.env_manager.envpool_env_manager"
    monkeypatch.setitem(sys.modules, "envpool", types.SimpleNamespace(make=lambda **keywords: FakePool()))  # type: ignore[arg-type]
    theirs = importlib.import_module(name)
    monkeypatch.setattr(theirs, "envpool", sys.modules["envpool"])
    with pytest.raises(AttributeError):
        theirs.PoolEnvManager(EasyDict(env_id="CartPole-v1", env_num=2, batch_size=2)).launch()
    with pytest.raises(TypeError):
        importlib.import_module("ding.envs").create_env_manager(EasyDict(type="env_pool"), ding_envs(1))
    of_atari = dict.fromkeys(("episodic_life", "reward_clip", "stack_num", "gray_scale", "frame_skip"))
    manager = theirs.PoolEnvManager(EasyDict(env_id="Pong-v5", env_num=2, batch_size=2, **of_atari))
    manager.launch()
    assert {int(env_id): step.info["env_id"] for env_id, step in manager.step({0: 0, 1: 0}).items()} == {1: 0, 0: 1}


# ---- results ---------------------------------------------------------------------------------------------


@row("`ready_obs` |")
def test_ready_obs_when_no_env_can_need_an_action(make: Any, whose: str) -> None:
    manager = make.launched(SUBPROCESS, ding_envs(1, length=1), auto_reset=False)
    manager.step({0: 1})
    if whose == ORIGINAL:
        with pytest.raises(Never), interrupted():
            assert manager.ready_obs
    else:
        assert manager.ready_obs == {}


@row("Observations, `copy_on_get=False`")
def test_observations_that_are_not_copied(make: Any, whose: str) -> None:
    manager = make.launched(SUBPROCESS, ding_envs(1, length=9), copy_on_get=False)
    first = manager.step({0: 1})[0].obs
    manager.step({0: 1})
    assert first.tolist() == ([0, 0, 2] if whose == ORIGINAL else [0, 0, 1])


@row("`reset_inplace`")
def test_resets_in_place(make: Any, whose: str) -> None:
    manager = make(SUBPROCESS, ding_envs(1, length=1), reset_inplace=True)
    manager.launch({0: {"stat": "mine"}})
    timestep = manager.step({0: 1})[0]
    assert timestep.obs.tolist() == [0, 1, 0]
    assert ("final_obs" in timestep.info) is (whose == OURS)
    assert manager.resets[0][1] == {"stat": "mine" if whose == OURS else ""}


@row("Timestep of an env that died")
def test_an_env_that_dies(make: Any, whose: str) -> None:
    manager = make(SUBPROCESS, ding_envs(2))
    manager.seed(5)
    manager.launch({0: {}, 1: {"stat": "kept"}})
    if whose == ORIGINAL:
        with pytest.raises((EOFError, ConnectionError, Never)), interrupted():
            manager.step({0: 1, 1: "die"})
        return
    assert manager.step({0: 1, 1: "die"})[1].info["abnormal"] is True
    manager.reset({1: None})
    assert manager.seeds[1] == [(6, "not given")]


@row("Observation of an abnormal timestep")
def test_the_observation_of_an_abnormal_timestep(make: Any, whose: str) -> None:
    manager = make.launched(SUBPROCESS, ding_envs(1))
    manager.step({0: 1})
    obs = manager.step({0: "abnormal"})[0].obs
    assert (obs is None) if whose == OURS else (obs.tolist() == [0, 0, 1])


@row("Strings in infos of V2")
def test_strings_in_infos_of_v2(make: Any, whose: str, caplog: pytest.LogCaptureFixture) -> None:
    manager = make.launched("BaseEnvManagerV2", ding_envs(1, length=9))
    with caplog.at_level(logging.WARNING):
        infos = [manager.step(["info"])[0].info for _ in range(2)]
    assert all("name" not in dict(info.items()) for info in infos)
    assert caplog.text.count("'name'") == (whose == OURS)


@row("Observation spaces")
def test_observation_spaces_of_any_depth(make: Any, whose: str) -> None:
    with contextlib.nullcontext() if whose == OURS else pytest.raises(Exception, match=r".*"):
        manager = make.launched(SUBPROCESS, [TreeEnv])
        assert manager.ready_obs[0]["pose"]["place"].dtype == np.float16


def make_generator(*args: Any) -> Any:
    seeding = importlib.import_module("gym.utils.seeding")
    return seeding.RandomNumberGenerator(np.random.PCG64())


@row("`GymVectorEnvManager`")
def test_gymnasiums_vector_manager(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import gym  # type: ignore[import-not-found]
    import gymnasium
    from easydict import EasyDict

    # Newer versions of NumPy cannot copy gym's generators without this.
    monkeypatch.setattr(gym.utils.seeding.RandomNumberGenerator, "_generator_ctor", staticmethod(make_generator))

    def make_env() -> Any:
        env = gym.make("CartPole-v1") if whose == ORIGINAL else gymnasium.make("CartPole-v1")
        env.random_action = lambda: np.array([env.action_space.sample()])
        return env

    manager = class_of(whose, "GymVectorEnvManager")([make_env] * 2, EasyDict(shared_memory=False, episode_num=9))
    manager.reset()
    before = manager.ready_obs[1].tolist()
    assert list(manager.step({0: np.array([1])})) == [0]
    ours = manager._env_manager.step([0, 0])[0][1] if whose == ORIGINAL else manager.ready_obs[1]
    assert (np.asarray(ours).tolist() == before) is (whose == OURS)
    close_all([manager], whose)


@row("Spaces |")
def test_where_an_env_is_built_for_its_spaces(make: Any, whose: str) -> None:
    built: list[int] = []

    def make_env() -> DingEnv:
        built.append(os.getpid())
        return DingEnv()

    manager = make(SUBPROCESS, [make_env])
    assert manager.observation_space.shape == (3,)
    assert len(built) == (whose == ORIGINAL)
    assert manager.env_ref is not None
    assert built == [os.getpid()]


# ---- exceptions ------------------------------------------------------------------------------------------


@row("An env raises in a step")
def test_envs_that_raise_in_a_step(make: Any, whose: str) -> None:
    manager = make.launched(SUBPROCESS, ding_envs(3))
    with pytest.raises(RuntimeError, match="fails on purpose") as caught:
        manager.step({0: "error", 1: 1, 2: "error"})
    assert manager.closed
    assert [hasattr(caught.value, name) for name in ("others", "timesteps")] == [whose == OURS] * 2


@row("An env raises in a step")
@pytest.mark.covers("D-B5")
def test_an_exception_with_a_constructor_of_its_own(make: Any, whose: str) -> None:
    manager = make.launched(SUBPROCESS, ding_envs(1))
    with pytest.raises(OddSignatureError if whose == OURS else EOFError):
        manager.step({0: "odd"})


@row("A reset fails")
def test_a_reset_that_fails_once(make: Any, whose: str) -> None:
    manager = make(SUBPROCESS, ding_envs(1), max_retry=2, retry_waiting_time=0.01)
    with raises(whose, original=RuntimeError):
        manager.launch({0: {"stat": "once"}})


@row("An automatic reset fails")
def test_an_automatic_reset_that_fails(make: Any, whose: str) -> None:
    manager = make.launched(SUBPROCESS, ding_envs(1, length=1))
    manager._reset_param[0] = {"stat": "error"}
    manager.step({0: 1})
    if whose == ORIGINAL:
        until(lambda: manager.closed)
        with pytest.raises(AssertionError, match="env manager is closed"):
            manager.step({0: 1})
        return
    assert len(manager.resets[0]) == 2
    with pytest.raises(RuntimeError, match="fails on purpose"):
        assert manager.ready_env


@row("An env refuses its seed")
def test_an_env_that_refuses_its_seed(make: Any, whose: str) -> None:
    manager = make(SUBPROCESS, ding_envs(1), shared_memory=False)
    manager.seed(666)
    with contextlib.nullcontext() if whose == ORIGINAL else pytest.raises(RuntimeError, match="a bad seed"):
        manager.launch()


@row("The shape of an observation differs")
def test_an_observation_of_another_shape(make: Any, whose: str) -> None:
    manager = make.launched(SUBPROCESS, [partial(WrongShape, 0)])
    with pytest.raises(ValueError) as caught:
        manager.step({0: 1})
    assert isinstance(caught.value, BadOutput) is (whose == OURS)


@row("`reset({9: ...})`, `step({9: ...})`")
@pytest.mark.parametrize("call", ["reset", "step"])
def test_an_env_that_does_not_exist(make: Any, whose: str, call: str) -> None:
    manager = make.launched(SUBPROCESS, ding_envs(3))
    with pytest.raises(KeyError) as caught:
        getattr(manager, call)({9: {}})
    assert isinstance(caught.value, UsageError) is (whose == OURS)
    assert (9 in manager._reset_param) is (whose == ORIGINAL and call == "reset")


@row("`reset({0: 5})`")
def test_reset_arguments_that_are_no_dict(make: Any, whose: str) -> None:
    manager = make.launched(SUBPROCESS, ding_envs(1))
    with pytest.raises(RuntimeError) as caught:
        manager.reset({0: 5})
    assert isinstance(caught.value, UsageError) is (whose == OURS)
    assert manager.closed is (whose == ORIGINAL)


@row("`step` of a base manager, or of")
def test_a_step_of_an_env_that_is_done(make: Any, whose: str) -> None:
    manager = make.launched("BaseEnvManager", ding_envs(1, length=1), episode_num=1)
    manager.step({0: 1})
    with contextlib.nullcontext() if whose == ORIGINAL else pytest.raises(AssertionError, match="DONE"):
        manager.step({0: 1})


for text in (
    "`hasattr(manager, name)` while",
    "`_reset_param`, `_ready_obs` and",
    "`ready_env`, `active_env` of `base`",
    "An attribute that only some",
    "`cfg` after the constructor",
    "`env_fn` raises, or is not a function",
    "`pickle.dumps(manager)` of `base`",
    "`step({})` of `async_subprocess`",
    "V2 `step(None)`, `enable_save_replay(3)`",
    "`enable_save_figure`, `reward_shaping`",
    "`_env_seed`",
    '`EnvSupervisor("process", ...)`',
    "`EnvSupervisor.seed(...)` after `launch`",
    "A method of the envs that is not",
    "An attribute that envs get in",
    "`_env_states` after an automatic reset",
):
    row(text)(test_di_engine_corners)


@row("`_pipe_parents`, `_pipe_children`")
@row("`_subprocesses`")
@row("`_obs_buffers`")
@row("`_async_args`")
def test_attributes_of_the_managers_with_processes(make: Any, whose: str) -> None:
    manager = make.launched(SUBPROCESS, ding_envs(1))
    names = ("_pipe_parents", "_pipe_children", "_subprocesses", "_obs_buffers", "_async_args")
    assert [name in vars(manager) for name in names] == [whose == ORIGINAL] * 5
    with manager._lock:
        assert not manager._waiting_env["step"]
    assert manager._action_space == manager.action_space
    assert isinstance(manager._cfg, importlib.import_module("easydict").EasyDict)


@row("`EnvSupervisor.recv()` when no env executes")
def test_a_supervisor_that_waits_for_nothing(whose: str) -> None:
    kind = (di_engine if whose == OURS else importlib.import_module("ding.framework.supervisor")).ChildType.THREAD
    supervisor = class_of(whose, "EnvSupervisor")(kind, ding_envs(1), shared_memory=False)
    supervisor.launch()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 80)
    try:
        with pytest.raises(RecursionError if whose == ORIGINAL else UsageError):
            supervisor.recv()
    finally:
        sys.setrecursionlimit(limit)
    supervisor.close()


def test_each_row_of_the_page_has_a_program() -> None:
    row.check(Path(__file__).parent, ROOT / "tests" / "frontends" / "di_engine")
