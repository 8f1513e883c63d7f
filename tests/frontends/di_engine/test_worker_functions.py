"""`worker_fn`, `worker_fn_robust` and `is_abnormal_timestep`: the loop of DI-engine's worker processes, for code that starts its own."""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from stepmill.frontends import di_engine
from stepmill.frontends.di_engine import (
    AsyncSubprocessEnvManager,
    BaseEnvManager,
    BaseEnvManagerV2,
    EnvSupervisor,
    SubprocessEnvManagerV2,
    SyncSubprocessEnvManager,
)
from stepmill.testing.faulty import OddSignatureError
from tests.frontends.di_engine.conftest import MakeManager
from tests.frontends.di_engine.envs import DingEnv, Timestep, ding_envs
from tests.harness.hangs import HANG_GUARD_S

HAS_DING = importlib.util.find_spec("ding") is not None
METHODS = ["reset", "step", "seed", "close", "render", "reward_shaping"]
LIMIT_S = 60.0

pytestmark = pytest.mark.filterwarnings("ignore")  # those of DI-engine, and of what it imports


class Wrapper:
    """What DI-engine wraps a function in, so that it can be pickled."""

    def __init__(self, data: Callable[[], Any]) -> None:
        self.data = data


class Buffer:
    """A buffer for observations in memory that forked processes share."""

    def __init__(self) -> None:
        self.array = np.frombuffer(mmap.mmap(-1, 12), np.float32)

    def fill(self, obs: Any) -> None:
        self.array[:] = obs


@pytest.fixture(
    params=["ours", pytest.param("original", marks=pytest.mark.skipif(not HAS_DING, reason="DI-engine is not there"))]
)
def managers(request: pytest.FixtureRequest) -> Any:
    """The module that has the functions."""
    if request.param == "ours":
        return di_engine
    return importlib.import_module("ding.envs.env_manager.subprocess_env_manager")


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Start a worker function in a process; return this end of its pipe."""
    context = multiprocessing.get_context("fork")
    processes, ends = [], []

    def start_one(function: Callable[..., None], env_fn: Callable[[], Any], *args: Any) -> Any:
        here, there = context.Pipe()
        process = context.Process(target=function, args=(here, there, Wrapper(env_fn), *args), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        ends.append(here)
        return here

    yield start_one
    for end in ends:
        end.close()
    for process in processes:
        process.join(LIMIT_S)
        process.close()


def ask(pipe: Any, *request: Any) -> Any:
    """Send one request, and return its reply."""
    pipe.send(list(request))
    assert pipe.poll(LIMIT_S)
    return pipe.recv()


@pytest.mark.covers("D-36")
@pytest.mark.parametrize("name", ["worker_fn", "worker_fn_robust"])
def test_a_worker_function_runs_the_requests_of_a_pipe(managers: Any, start: Callable[..., Any], name: str) -> None:
    pipe = start(getattr(managers.AsyncSubprocessEnvManager, name), ding_envs(1)[0], None, METHODS)
    ask(pipe, "seed", [5, False], {})
    assert ask(pipe, "reset", [], {}).tolist() == [0.0, 0.0, 0.0]
    timestep = ask(pipe, "step", [1], {})
    assert (timestep.obs.tolist(), timestep.reward.tolist(), timestep.done) == ([0.0, 0.0, 1.0], [1.0], False)
    assert ask(pipe, "getattr", ["seeds"], {}) == [(5, False)]
    refused = ask(pipe, "fly", [], {})
    assert isinstance(refused, KeyError)
    assert "not support env cmd: fly" in str(refused)
    ask(pipe, "close", None, None)
    assert pipe.poll(LIMIT_S)
    with pytest.raises(EOFError):
        pipe.recv()


@pytest.mark.covers("D-36")
def test_a_worker_function_fills_the_buffer_of_observations(managers: Any, start: Callable[..., Any]) -> None:
    buffer = Buffer()
    pipe = start(managers.AsyncSubprocessEnvManager.worker_fn_robust, ding_envs(1)[0], buffer, METHODS)
    assert ask(pipe, "reset", [], None) is None
    assert buffer.array.tolist() == [0.0, 0.0, 0.0]
    assert ask(pipe, "step", [1], {}).obs is None
    assert buffer.array.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.covers("D-36")
@pytest.mark.parametrize("name", ["worker_fn", "worker_fn_robust"])
def test_a_worker_function_returns_what_an_env_raises(managers: Any, start: Callable[..., Any], name: str) -> None:
    pipe = start(getattr(managers.AsyncSubprocessEnvManager, name), ding_envs(1)[0], None, METHODS)
    ask(pipe, "reset", [], {})
    raised = ask(pipe, "step", ["error"], {})
    assert type(raised) is RuntimeError
    assert str(raised).startswith("\nEnv Process Exception:\n")
    assert "in _act" in str(raised)
    assert ask(pipe, "step", [1], {}).done is False  # the worker goes on


@pytest.mark.covers("D-36", "D-B5")
def test_an_exception_that_cannot_be_made_of_a_text_is_returned_as_a_runtime_error(start: Callable[..., Any]) -> None:
    pipe = start(AsyncSubprocessEnvManager.worker_fn_robust, ding_envs(1)[0], None, METHODS)
    ask(pipe, "reset", [], {})
    raised = ask(pipe, "step", ["odd"], {})
    assert type(raised) is RuntimeError
    assert OddSignatureError.__name__ in str(raised)
    assert ask(pipe, "step", [1], {}).done is False


@pytest.mark.covers("D-36", "D-B7")
def test_a_worker_function_ends_a_step_at_its_exact_time_limit(start: Callable[..., Any]) -> None:
    pipe = start(AsyncSubprocessEnvManager.worker_fn_robust, ding_envs(1)[0], None, METHODS, None, 0.3)
    ask(pipe, "reset", [], {})
    began = time.monotonic()
    raised = ask(pipe, "step", ["sleep"], {})
    assert isinstance(raised, TimeoutError)
    assert "0.3 s" in str(raised)  # the original rounds up to the next whole second
    assert 0.3 <= time.monotonic() - began < HANG_GUARD_S


@pytest.mark.covers("D-36", "D-13")
def test_a_worker_function_resets_in_place(managers: Any, start: Callable[..., Any]) -> None:
    pipe = start(managers.AsyncSubprocessEnvManager.worker_fn, ding_envs(1, length=1)[0], None, METHODS, True)
    ask(pipe, "reset", [], {})
    timestep = ask(pipe, "step", [1], {})
    assert timestep.done
    assert timestep.obs.tolist() == [0.0, 1.0, 0.0]  # of the next episode


@pytest.mark.covers("D-36")
def test_abnormal_timesteps_are_recognised(managers: Any) -> None:
    for info, is_abnormal in (
        ({}, False),
        ({"abnormal": True}, True),
        ([{}, {"abnormal": True}], True),
        (({"abnormal": False}, {}), False),
    ):
        assert bool(managers.is_abnormal_timestep(Timestep(None, None, None, info))) is is_abnormal
    with pytest.raises(TypeError, match="invalid env timestep type"):
        managers.is_abnormal_timestep(Timestep(None, None, None, "abnormal"))


@pytest.mark.covers("D-36", "D-40")
@pytest.mark.parametrize(
    ("base", "name"),
    [
        (AsyncSubprocessEnvManager, "worker_fn"),
        (AsyncSubprocessEnvManager, "worker_fn_robust"),
        (SubprocessEnvManagerV2, "_create_env_subprocess"),
        (SyncSubprocessEnvManager, "_check_data"),
        (AsyncSubprocessEnvManager, "_reset"),
        (BaseEnvManagerV2, "_reset"),
        (BaseEnvManager, "_step"),
        (EnvSupervisor, "_recv_callback"),
    ],
)
def test_a_subclass_with_a_method_that_nothing_calls_is_refused_by_name(base: Any, name: str) -> None:
    class Own(base):  # type: ignore[misc]
        pass

    Own(env_fn=[DingEnv])
    setattr(Own, name, lambda *args: None)
    advice = ".*put its code into the env" if name.startswith("worker_fn") else ""
    with pytest.raises(TypeError, match=rf"Own overrides {name}, which stepmill's \w+ does not call: {advice}"):
        Own(env_fn=[DingEnv])


@pytest.mark.covers("D-40")
@pytest.mark.parametrize("base", [BaseEnvManager, AsyncSubprocessEnvManager])
def test_create_state_of_a_subclass_runs_before_the_first_reset(launched: MakeManager, base: Any) -> None:
    class Own(base):  # type: ignore[misc]
        def _create_state(self) -> None:
            super()._create_state()
            self.resets_before = [len(resets) for resets in self.resets]

    manager = launched(Own, [DingEnv] * 2)
    assert manager.resets_before == [0, 0]
    assert [len(resets) for resets in manager.resets] == [1, 1]
