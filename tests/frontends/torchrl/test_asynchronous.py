"""`AsyncStepmillEnv`: some envs at a time, with deadlines that lose nothing."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torchrl.envs.utils import check_env_specs

import stepmill
from stepmill.envs.envpool import EnvPoolTask
from stepmill.frontends.torchrl import AsyncStepmillEnv
from stepmill.frontends.torchrl.asynchronous import _TaskKind
from stepmill.testing import CountingEnv
from stepmill.testing.faulty import RaisingEnv
from stepmill.testing.gates import GATED_ACTION, Gate, GateEnv
from tests.frontends.torchrl.makers import BACKENDS, act, counting

pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")
make = partial(counting, cls=AsyncStepmillEnv)


def begin(env):
    env.async_reset_send()
    td = env.async_reset_recv(env.num_workers)  # in the order in which they came
    return td[torch.argsort(td["env_index"])]


@pytest.fixture
def gated():
    """Return two envs behind a gate, which waits at GATED_ACTION, and one that never waits; a thread each."""
    with ExitStack() as stack:
        gates = [stack.enter_context(Gate()) for _ in range(2)]
        fns = [
            *(partial(GateEnv, str(gate.path), identity=i, length=99) for i, gate in enumerate(gates)),
            partial(CountingEnv, 2, 99),
        ]
        env = AsyncStepmillEnv(fns, backend="thread", num_workers=3, categorical_action_encoding=True)
        yield env, gates
        env.close()


@pytest.mark.covers("T-12", "G-16/cases")
@pytest.mark.parametrize("where", BACKENDS)
def test_torchrls_own_checker_passes(made, where):
    env = made(make(3, 5, where))
    check_env_specs(env)
    assert env.num_envs == env.num_workers == 3


@pytest.mark.covers("T-12")
@pytest.mark.parametrize("where", BACKENDS)
def test_results_carry_what_was_sent_and_which_env_they_are_of(made, where):
    env = made(make(4, 9, where))
    td = begin(env)
    env.async_step_send(act(td[[3, 1]], 30, 10), env_index=[3, 1])
    result = env.async_step_recv(2)
    rows = sorted(
        zip(
            result["env_index"].tolist(),
            result["action"].tolist(),
            result["next", "reward"].flatten().tolist(),
            strict=True,
        )
    )
    assert rows == [(1, 10, 10.0), (3, 30, 30.0)]
    assert sorted(result["next", "observation"].tolist()) == [[1, 0, 1], [3, 0, 1]]
    env.async_step_send(act(td[2], 7), env_index=2)
    one = env.async_step_recv(env_index=2)
    assert one.batch_size == ()
    assert one["next", "observation"].tolist() == [2, 0, 1]


@pytest.mark.covers("T-12")
@pytest.mark.parametrize("where", BACKENDS)
def test_a_step_that_ends_an_episode_can_bring_the_next_one_along(made, where):
    env = made(make(2, 1, where))
    td = begin(env)
    env.async_step_and_maybe_reset_send(act(td, 1, 2))
    stepped, following = env.async_step_and_maybe_reset_recv(2)
    order = torch.argsort(stepped["env_index"])
    assert stepped["next", "observation"][order].tolist() == [[0, 0, 1], [1, 0, 1]]
    assert stepped["next", "done"][order].flatten().tolist() == [True, False]
    assert following["observation"][torch.argsort(following["env_index"])].tolist() == [[0, 1, 0], [1, 0, 1]]
    assert not following["done"].any()
    assert "begun" not in set(stepped["next"].keys())
    assert env.num_resets == [2, 1]


@pytest.mark.covers("X-2", "T-12")
def test_a_timeout_bounds_the_whole_call_and_loses_nothing(gated):
    env, gates = gated
    td = begin(env)
    env.async_step_send(act(td, GATED_ACTION, GATED_ACTION, 5))
    for gate in gates:
        gate.wait_arrivals()
    with pytest.raises(TimeoutError):
        env.async_step_recv(2, timeout=0.05)  # one of three is there
    with pytest.raises(TimeoutError):
        env.async_step_recv(3, timeout=0)
    first = env.async_step_recv(1, max_get=1, timeout=60)
    assert first["env_index"].tolist() == [2]
    assert first["next", "reward"].flatten().tolist() == [5]
    gates[0].open()
    assert env.async_step_recv(1)["env_index"].tolist() == [0]
    gates[1].open()
    assert env.async_step_recv(1)["env_index"].tolist() == [1]


@pytest.mark.covers("T-12")
@pytest.mark.parametrize(("most", "num"), [(None, 3), (2, 2)])
def test_a_call_with_a_timeout_waits_for_as_many_as_it_may_return(gated, monkeypatch, most, num):
    env, gates = gated
    td = begin(env)
    env.async_step_send(act(td, GATED_ACTION, GATED_ACTION, 5))
    for gate in gates:
        gate.wait_arrivals()
    receive = env._receive

    def open_and_receive(least, timeout_s):
        if env._done[_TaskKind.STEP] and least:  # it waits for more than the first, which does not pass a gate
            for gate in gates:
                gate.open()
        return receive(least, timeout_s)

    monkeypatch.setattr(env, "_receive", open_and_receive)
    assert len(env.async_step_recv(1, max_get=most, timeout=60)) == num


@pytest.mark.covers("T-12")
def test_min_and_max_say_how_many(gated):
    env, _ = gated
    td = begin(env)
    env.async_step_send(act(td, 1, 2, 3))
    first = env.async_step_recv(3, max_get=3)
    assert len(first) == 3
    env.async_step_send(act(td.exclude("env_index"), 1, 2, 3))
    two = env.async_step_recv(2, max_get=2)
    assert len(two) == 2
    assert len(env.async_step_recv()) == 1
    with pytest.raises(RuntimeError, match="Cannot await 1 step when only 0 are being stepped"):
        env.async_step_recv()
    with pytest.raises(stepmill.UsageError, match="min_get=2 must be 1 to max_get=1"):
        env.async_step_recv(2, max_get=1)
    with pytest.raises(stepmill.UsageError, match="min_get=0 must be 1 to max_get=None"):
        env.async_step_recv(0)
    with pytest.raises(stepmill.UsageError, match="timeout=-1 must be a number of seconds"):
        env.async_step_recv(1, timeout=-1)


@pytest.mark.covers("T-12")
def test_a_busy_env_refuses_a_second_task_until_its_result_is_taken(gated):
    env, gates = gated
    td = begin(env)
    env.async_step_send(act(td, GATED_ACTION, 1, 1))
    with pytest.raises(RuntimeError, match="Some envs are still processing a step") as caught:
        env.async_step_send(act(td[:1], 1), env_index=[0])
    assert isinstance(caught.value, stepmill.BusyEnvError)
    with pytest.raises(stepmill.BusyEnvError):
        env.async_reset_send(env_index=[1])
    with pytest.raises(stepmill.BusyEnvError):
        env.reset()
    gates[0].open()
    assert len(env.async_step_recv(3)) == 3
    assert env.reset()["observation"].shape == (3, 3)


@pytest.mark.covers("T-12")
def test_steps_and_resets_at_once_are_received_apart(made):
    env = made(make(3, 9))
    td = begin(env)
    env.async_step_send(act(td[:2], 4, 5), env_index=[0, 1])
    env.async_reset_send(env_index=2)
    assert env.async_reset_recv()["observation"].tolist() == [[2, 1, 0]]
    assert env.async_step_recv(2)["next", "reward"].flatten().tolist() == [4, 5]


@pytest.mark.covers("X-3")
def test_what_was_received_is_never_written_again(made):
    env = made(make(2, 99))
    td = begin(env)
    kept = []
    for _ in range(6):
        env.async_step_send(act(td.select("observation", "done"), 1, 1))
        kept.append(env.async_step_recv(2))
    assert [each["next", "observation"][0, 2].item() for each in kept] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("where", BACKENDS)
def test_an_env_that_raises_is_named_and_the_others_lose_nothing(made, where):
    env = made(AsyncStepmillEnv([RaisingEnv, CountingEnv], **BACKENDS[where], categorical_action_encoding=True))
    td = begin(env)
    env.async_step_send(act(td, 1, 8))
    with pytest.raises(stepmill.EnvError) as caught:
        env.async_step_recv(2)
    assert caught.value.env_id == 0
    assert env.async_step_recv(1)["next", "reward"].flatten().tolist() == [8]
    env.async_reset_send(env_index=[0])
    assert env.async_reset_recv()["env_index"].tolist() == [0]


@pytest.mark.covers("T-12", "T-B1")
def test_envpools_envs_answer_one_by_one(made):
    task = EnvPoolTask("CartPole-v1", {"num_threads": 2}, is_async=True, has_infos=False)
    env = made(AsyncStepmillEnv([task] * 6, backend="envpool", categorical_action_encoding=True))
    td = begin(env)
    env.async_step_send(act(td, 1, 0, 1, 0, 1, 0))
    seen = []
    while len(seen) < 6:
        seen += env.async_step_recv(1, max_get=2, timeout=60)["env_index"].tolist()
    assert sorted(seen) == list(range(6))


def test_arguments_that_make_no_sense_are_refused():
    with pytest.raises(stepmill.UsageError, match="min_get=3 must be 1 to the number of envs, 2"):
        make(2, min_get=3)
    with pytest.raises(stepmill.UsageError, match="asynchronous steps have no frame_skip"):
        make(2, frame_skip=2)
    env = make(2)
    td = begin(env)
    with pytest.raises(stepmill.UsageError, match="give a row for each"):
        env.async_step_send(act(td, 1, 1), env_index=[1])
    env.close()
    env.shutdown()
