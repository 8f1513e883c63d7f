"""`EnvSupervisor`: commands that wait or do not, steps that fail, resets that are tried again."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from stepmill.frontends.di_engine import ChildType, EnvState, EnvSupervisor, trees
from stepmill.frontends.di_engine.supervisor import SendPayload
from stepmill.spec.errors import EnvTimeout, RecvTimeout, UsageError, WorkerDied
from stepmill.testing.gates import Gate
from tests.frontends.di_engine.envs import ding_envs
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import keep_closed

pytestmark = pytest.mark.covers("D-31/interface")


@pytest.fixture(params=[ChildType.PROCESS, ChildType.THREAD])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def supervise(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make supervisors; they are closed at the end."""
    monkeypatch.setattr(trees, "_library", lambda: None)

    def make_one(
        kind: Any = ChildType.THREAD, num_envs: int = 2, length: int = 3, gate: str = "", **settings: Any
    ) -> Any:
        return EnvSupervisor(kind, ding_envs(num_envs, length, gate=gate), **settings)

    yield from keep_closed(make_one)


@pytest.fixture
def launched(supervise: Any) -> Any:
    """Make supervisors whose envs have been launched."""

    def launch(*arguments: Any, **settings: Any) -> Any:
        supervisor = supervise(*arguments, **settings)
        supervisor.launch()
        return supervisor

    return launch


def test_a_blocking_step_returns_trees_in_the_order_of_its_actions(supervise: Any, kind: Any) -> None:
    envs = supervise(kind, 3)
    with pytest.raises(AssertionError, match="Supervisor is not running"):
        _ = envs.identity
    envs.seed(7, dynamic_seed=False)
    envs.launch({0: {"stat": "a"}, 1: {}, 2: {}})
    assert envs.seeds == [[(7, False)], [(8, False)], [(9, False)]]
    timesteps = envs.step({2: 5, 0: 1})
    assert [int(timestep.env_id) for timestep in timesteps] == [2, 0]
    assert timesteps[0].reward.tolist() == [5]
    assert envs.ready_obs.tolist() == [[0, 0, 1], [1, 0, 0], [2, 0, 1]]
    assert len(envs.step([1, 1, 1])) == 3
    assert envs.get_child_attr(1, "identity") == 1
    assert envs.observation_space.shape == (3,)
    with pytest.raises(AssertionError, match="Please first close"):
        envs.launch()
    envs.close()
    assert set(envs.env_states.values()) == {EnvState.VOID}
    for call in (envs.reset, lambda: envs.step([1])):
        with pytest.raises(AssertionError, match=r"Env supervisor has closed."):
            call()


@pytest.mark.covers("D-31/recv")
def test_without_blocking_answers_come_by_recv(supervise: Any, kind: Any) -> None:
    envs = supervise(kind, 2, length=2, auto_reset=False)
    envs.launch(block=False)
    count = 0
    while not envs.done:
        payload = envs.recv()
        count += 1
        if payload.method == "reset":
            assert payload.data.tolist() == [payload.proc_id, 0, 0]
        else:
            assert int(payload.data.env_id) == payload.proc_id
        if envs.env_states[payload.proc_id] is EnvState.RUN:
            envs.step({payload.proc_id: 3}, block=False)
    assert count == 2 * (1 + 2)


@pytest.mark.covers("D-31/recv")
@pytest.mark.covers("D-B17")
def test_recv_is_refused_while_no_env_executes_a_command(launched: Any) -> None:
    envs = launched()
    with pytest.raises(UsageError, match="no env executes a command"):
        envs.recv()


@pytest.mark.covers("D-31/recv")
@pytest.mark.covers("D-B17")
def test_recv_waits_as_long_as_an_env_is_at_work(launched: Any, monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    from stepmill.frontends.di_engine import env_lifecycle

    monkeypatch.setattr(env_lifecycle, "LOG_EVERY_S", 0.001)  # the original calls itself for each of its slices
    envs = launched(num_envs=1, gate=str(gate.path))
    envs.step({0: "gate"}, block=False)
    gate.wait_arrivals()
    sent = SendPayload(0, method="step", args=[2])
    envs.send(sent)  # waits for its turn
    late = envs.recv_all([sent], ignore_err=True, timeout=1.5)[0]
    assert isinstance(late.err, TimeoutError)
    gate.open()
    assert [envs.recv().data.obs.tolist() for _ in range(2)] == [[0, 0, 1], [0, 0, 2]]


def test_commands_to_one_env_are_done_in_their_order(launched: Any, kind: Any) -> None:
    envs = launched(kind, 1)
    envs.step({0: 4}, block=False)
    envs.reset({0: {"stat": "later"}}, block=False)
    envs.step({0: 5}, block=False)
    payloads = [envs.recv() for _ in range(3)]
    assert [payload.method for payload in payloads] == ["step", "reset", "step"]
    assert payloads[2].data.obs.tolist() == [0, 1, 1]
    kept = SendPayload(0, method="step", args=[1])
    other = SendPayload(0, method="step", args=[2])
    envs.send(other)
    envs.send(kept)
    assert envs.recv_all([kept])[0].data.reward.tolist() == [1]
    assert envs.recv().data.reward.tolist() == [2]


def test_the_end_of_an_episode_and_a_failed_step_reset_their_env(launched: Any, kind: Any) -> None:
    envs = launched(kind, 3, length=2, episode_num=9)
    timesteps = envs.step(["error", 1, "abnormal"])
    info = timesteps[0].info
    assert bool(info.abnormal)
    assert "fails on purpose" in str(info.err)
    assert bool(timesteps[2].info.abnormal)
    assert envs.ready_obs.tolist() == [[0, 1, 0], [1, 0, 1], [2, 1, 0]]
    timesteps = envs.step([1, 1, 1])
    assert bool(timesteps[1].done)
    assert envs.ready_obs.tolist() == [[0, 1, 1], [1, 1, 0], [2, 1, 1]]
    assert set(envs.env_states.values()) == {EnvState.RUN}


@pytest.mark.covers("D-31/recv")
def test_a_failed_step_comes_by_recv_unless_errors_are_passed_over(launched: Any) -> None:
    envs = launched(num_envs=1)
    envs.step({0: "error"}, block=False)
    payload = envs.recv()
    assert isinstance(payload.err, RuntimeError)
    assert envs.recv().method == "reset"
    envs.step({0: "error"}, block=False)
    assert envs.recv(ignore_err=True).method == "reset"


@pytest.mark.parametrize("retry_type", ["reset", "renew"])
def test_a_reset_that_fails_is_tried_again(launched: Any, kind: Any, retry_type: str) -> None:
    envs = launched(kind, 2, retry_type=retry_type, max_try=3, retry_waiting_time=0.01)
    serials = envs.serial
    envs.reset({0: {"stat": "even"}})
    assert (envs.serial[0] != serials[0]) is (retry_type == "renew")
    assert envs.serial[1] == serials[1]
    assert envs.env_states == {0: EnvState.RUN, 1: EnvState.RUN}


def test_an_env_that_waits_for_its_next_reset_holds_up_no_other(launched: Any, kind: Any) -> None:
    envs = launched(kind, 2, max_try=3, retry_waiting_time=HANG_GUARD_S * 10)
    envs.reset({0: {"stat": "error"}}, block=False)
    envs.step({1: 1}, block=False)
    assert envs.recv().proc_id == 1
    began = time.monotonic()
    waiting = SendPayload(0, method="reset", kwargs={})
    envs.send(waiting)
    late = envs.recv_all([waiting], ignore_err=True, timeout=0.2)
    assert isinstance(late[0].err, RecvTimeout)
    envs.step({1: 1})
    assert envs.env_states == {0: EnvState.ERROR, 1: EnvState.RUN}
    envs.close()
    assert time.monotonic() - began < HANG_GUARD_S


def test_a_reset_that_always_fails_closes_the_supervisor(supervise: Any, kind: Any) -> None:
    envs = supervise(kind, 2, max_retry=2)
    with pytest.raises(RuntimeError, match=r"Env 1 reset has exceeded max_try\(2\).*fails on purpose"):
        envs.launch({0: {}, 1: {"stat": "error"}})
    assert envs.closed
    envs.launch()
    assert envs.ready_obs_id == [0, 1]


def test_a_step_that_hangs_or_dies_costs_its_env_only(launched: Any) -> None:
    envs = launched(ChildType.PROCESS, 3, step_timeout=1.0)
    timesteps = envs.step(["sleep", "die", 1])
    assert isinstance(timesteps[0].info.err.item(), (EnvTimeout, TimeoutError))
    assert "SIGKILL" in str(timesteps[1].info.err)
    assert timesteps[2].obs.tolist() == [2, 0, 1]
    assert np.asarray(envs.ready_obs).tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 1]]


def test_the_error_in_a_timestep_keeps_no_pool_alive(supervise: Any) -> None:
    envs = EnvSupervisor(ChildType.PROCESS, ding_envs(2))
    envs.launch()
    pool = weakref.ref(envs._client.pool)
    timesteps = envs.step(["die", 1])
    error = timesteps[0].info.err.item()
    assert isinstance(error, WorkerDied)
    assert error.env_ids == (0,)
    envs.close()
    del envs, timesteps, error
    gc.collect()
    assert pool() is None


def test_a_thread_that_hangs_closes_the_supervisor(launched: Any, gate: Gate) -> None:
    envs = launched(ChildType.THREAD, 2, gate=str(gate.path), step_timeout=0.3)
    with pytest.raises(RuntimeError, match="a thread cannot be killed"), pytest.warns(RuntimeWarning):
        envs.step(["gate", 1])
    assert envs.closed


def test_unknown_settings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    EnvSupervisor(ChildType.THREAD, ding_envs(1), colour="red")
    assert "Unknown parameters on env supervisor: ['colour']" in caplog.text


@pytest.mark.covers("D-16")
def test_seeds_of_a_supervisor_are_checked(supervise: Any) -> None:
    envs = supervise()
    with pytest.raises(AssertionError, match=r"len\(seed\) 1 != env_num 2"):
        envs.seed([1])
    with pytest.raises(TypeError, match="Invalid seed arguments type"):
        envs.seed("x")
    envs.seed({1: 4})
    envs.enable_save_replay("videos")
    envs.launch()
    assert envs.seeds == [[], [(4, "not given")]]
    assert envs._env_seed == {0: None, 1: 4}  # DI-engine's tests read it
    assert envs.replay_path == ["videos", "videos"]
    envs.reset({0: {}})  # passed over: its replay is being saved
    assert [len(resets) for resets in envs.resets] == [1, 1]


def test_a_step_that_was_refused_leaves_its_env_usable(launched: Any) -> None:
    supervisor = launched(num_envs=1, length=1, auto_reset=False)
    supervisor.step({0: 1})
    with pytest.raises(UsageError, match="are over"):
        supervisor.step({0: 1})
    supervisor.reset({0: {}})
    assert supervisor.ready_obs_id == [0]


def test_hasattr_is_false_for_what_the_envs_lack(supervise: Any) -> None:
    supervisor = supervise(num_envs=1)
    assert not hasattr(supervisor, "nothing")  # it is closed
    supervisor.launch()
    assert [hasattr(supervisor, name) for name in ("nothing", "length")] == [False, True]
    with pytest.raises(AttributeError, match="nothing"):
        supervisor.get_child_attr(0, "nothing")


def test_an_env_that_does_not_exist_is_named_and_nothing_is_sent(launched: Any) -> None:
    supervisor = launched()
    for call in (supervisor.step, supervisor.reset):
        with pytest.raises(IndexError, match=r"there are no envs \[9\]"):
            call({0: {}, 9: {}})
    assert len(supervisor.step({0: 1})) == 1
