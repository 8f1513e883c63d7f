"""A pool that is not stepmill's, behind the proxy: its envs look to the learner like any others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import stepmill
from tests.harness.external_pools import Script
from tests.harness.pools import keep_closed

MakePool = Callable[..., stepmill.Pool]


@pytest.fixture
def external() -> Iterator[MakePool]:
    """Build pools over a Script; they are closed at the end."""
    yield from keep_closed(
        lambda script, num_envs=4, **options: stepmill.Pool([script] * num_envs, backend="envpool", **options)
    )


def test_rows_find_their_envs_in_whatever_order_the_pool_answers(external):
    pool = external(Script(length=9))
    pool.reset()
    batch = pool.step([10, 11, 12, 13])  # the pool answers 3, 2, 1, 0
    assert batch.obs[:, 0].tolist() == [0, 1, 2, 3]
    assert batch.reward.tolist() == [10, 11, 12, 13]
    assert batch.env_id.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("is_async", [False, True])
def test_any_subset_can_be_stepped_and_reset_at_the_same_time(external, is_async):
    pool = external(Script(length=9, is_async=is_async))
    pool.reset()
    pool.send([5, 6], env_ids=[3, 1])
    pool.reset_async(env_ids=[0])
    batch = pool.recv()
    assert sorted(zip(batch.env_id.tolist(), batch.reward.tolist(), batch.obs[:, 1].tolist(), strict=True)) == [
        (0, 0, 0),
        (1, 6, 1),
        (3, 5, 1),
    ]
    assert pool.states[2].name == "IDLE"


@pytest.mark.covers("X-14")
def test_a_reset_of_fewer_envs_than_a_batch_comes_back(external):
    pool = external(Script(is_async=True), batch_size=4)
    pool.reset()
    assert pool.reset(env_ids=[2]).env_id.tolist() == [2]


@pytest.mark.covers("X-14")
def test_resetting_twice_is_legal_and_receiving_nothing_is_refused(external):
    pool = external(Script())
    pool.reset_async()
    pool.reset_async()
    assert pool.recv().obs[:, 2].tolist() == [1, 1, 1, 1]
    with pytest.raises(stepmill.UsageError, match="nothing pending"):
        pool.recv()


@pytest.mark.covers("X-14")
def test_next_step_leaves_the_reset_to_the_pool_and_never_doubles_it(external):
    script = Script(length=2)
    pool = external(script)
    pool.reset()
    ends = [pool.step([1, 1, 1, 1]).terminated.tolist()[0] for _ in range(2)]
    assert ends == [False, True]
    batch = pool.step([7, 7, 7, 7])
    assert batch.obs[0].tolist() == [0, 0, 1]
    assert batch.reward.tolist() == [0, 0, 0, 0]
    pool.step([1, 1, 1, 1])
    pool.step([1, 1, 1, 1])
    assert pool.reset(env_ids=[0]).obs[0].tolist() == [0, 0, 2]  # asked for at the end: this is the reset
    assert pool.step([1, 1, 1, 1]).obs[:, 1:].tolist() == [[1, 2], [0, 2], [0, 2], [0, 2]]
    assert [kind for kind, _ in script.log].count("reset") == 2


def test_same_step_returns_the_next_episode_and_keeps_the_last_observation(external):
    pool = external(Script(length=2, info_bytes=4), autoreset_mode="SameStep")
    pool.reset()
    pool.step([1, 1, 1, 1])
    pool.reset(env_ids=[1])
    batch = pool.step([1, 2, 3, 4])
    assert batch.terminated.tolist() == [True, False, True, True]
    assert batch.reward.tolist() == [1, 2, 3, 4]
    assert batch.obs[:, 1:].tolist() == [[0, 1], [1, 1], [0, 1], [0, 1]]
    assert batch.info["final_obs"][0].tolist() == [0, 2, 0]
    assert batch.info["final_obs"][1] is None
    assert batch.info["final_info"]["time"].tolist() == [2, 0, 2, 2]
    assert batch.info["time"].tolist() == [0, 1, 0, 0]
    assert batch.info["episode"]["l"].tolist() == [2, 0, 2, 2]
    assert batch.info["episode"]["r"].tolist() == [2, 0, 4, 5]


def test_disabled_refuses_a_step_of_an_env_whose_episode_is_over(external):
    pool = external(Script(length=1), autoreset_mode="Disabled")
    pool.reset()
    pool.step([1, 1, 1, 1])
    with pytest.raises(stepmill.UsageError, match="are over and autoreset is DISABLED"):
        pool.step([1, 1, 1, 1])
    pool.reset(env_ids=[0, 1, 2, 3])
    assert pool.step([1, 1, 1, 1]).obs[:, 2].tolist() == [1, 1, 1, 1]


def test_envs_answer_one_by_one_where_the_pool_lets_them(external):
    pool = external(Script(length=9, is_async=True))
    pool.reset()
    pool.send([1, 2, 3, 4])
    first = pool.recv(2)
    rest = pool.recv(2)
    assert sorted([*first.env_id.tolist(), *rest.env_id.tolist()]) == [0, 1, 2, 3]
    assert pool.ready_ids == []


def test_infos_are_merged_by_env_however_large_they_are(external):
    pool = external(Script(length=9, info_bytes=5000))
    pool.reset()
    info = pool.step([0, 0, 0, 0]).info
    assert info["time"].tolist() == [1, 1, 1, 1]
    assert info["deep"]["blob"].shape == (4, 5000)
    assert info["deep"]["blob"][:, -1].tolist() == [0, 1, 2, 3]
    assert info["version"].tolist() == ["1"] * 4


def test_seeds_and_options_of_resets_reach_the_pool(external):
    pool = external(Script())
    assert pool.reset(seed=100).obs[:, 2].tolist() == [100, 101, 102, 103]
    with pytest.raises(stepmill.EnvError, match="no such options") as caught:
        pool.reset(options={"fail": True}, env_ids=[1, 2])
    assert {caught.value.env_id, *(other.env_id for other in caught.value.others)} == {1, 2}
    assert pool.reset(env_ids=[1, 2]).env_id.tolist() == [1, 2]


def test_what_the_pool_raises_in_send_is_the_fault_of_the_envs_sent(external):
    script = Script(length=9)
    pool = external(script)
    pool.reset()
    script.send_error = ValueError("which way is that?")
    pool.send([1, 1], env_ids=[0, 1])
    with pytest.raises(stepmill.EnvError, match=r"which way is that\?"):
        pool.recv(2)
    pool.send([1, 1], env_ids=[2, 3])
    assert pool.recv().env_id.tolist() == [2, 3]
    pool.reset(env_ids=[0, 1])
    assert pool.step([1, 1, 1, 1]).num_rows == 4


def test_what_the_pool_raises_in_recv_is_the_fault_of_all_at_work(external):
    script = Script(length=9)
    pool = external(script)
    pool.reset()
    script.recv_error = SystemExit("the pool has had enough")
    with pytest.raises(stepmill.EnvError, match="has had enough") as caught:
        pool.step([1, 1, 1, 1])
    assert len(caught.value.others) == 3
    pool.reset()
    assert pool.step([1, 1, 1, 1]).reward.tolist() == [1, 1, 1, 1]


def test_a_keyboard_interrupt_while_the_pool_is_waited_for_is_the_users(external):
    script = Script(length=9)
    pool = external(script)
    pool.reset()
    script.recv_error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        pool.step([1, 1, 1, 1])
    with pytest.warns(RuntimeWarning, match="this reset drops its result"):
        pool.reset()
    assert pool.step([1, 1, 1, 1]).reward.tolist() == [1, 1, 1, 1]


def test_an_observation_of_another_shape_is_a_bad_output(external):
    script = Script(length=9)
    pool = external(script)
    pool.reset()
    script.obs_shape = (4,)
    with pytest.raises(stepmill.BadOutput, match=r"shape|\(4,\)"):
        pool.step([1, 1, 1, 1])
    script.obs_shape = (3,)
    assert pool.reset().num_rows == 4


def test_faults_can_cut_the_episode_short_instead(external):
    script = Script(length=9)
    pool = external(script, on_fault="truncate")
    pool.reset()
    script.send_error = ValueError("no")
    batch = pool.step([1, 1, 1, 1])
    assert batch.truncated.all()
    assert batch.info["fault"]["kind"].tolist() == ["raised"] * 4
    assert pool.step([1, 1, 1, 1]).obs[:, 1].tolist() == [0, 0, 0, 0]


def test_calls_run_after_the_commands_that_were_sent_before(external):
    pool = external(Script(length=9, is_async=True))
    pool.reset()
    pool.send([1, 1, 1, 1])
    assert pool.call("time") == (1, 1, 1, 1)
    assert pool.render([2]) == ("picture of 2 at 1",)
    assert pool.get_attr("env_id", env_ids=[3]) == (3,)
    assert pool.recv().num_rows == 4


def test_closing_while_envs_are_at_work_waits_for_them(external):
    script = Script(length=9, is_async=True)
    pool = external(script)
    pool.reset()
    pool.send([1, 1, 1, 1])
    pool.close()
    assert script.is_closed


def test_an_external_backend_wants_one_maker_for_all_envs():
    with pytest.raises(stepmill.UsageError, match="EnvPoolTask"):
        stepmill.Pool([Script(), Script()], backend="envpool")
    with pytest.raises(stepmill.UsageError, match="EnvPoolTask"):
        stepmill.Pool([object] * 2, backend="envpool")


def test_large_observations_are_lent_and_never_written_again(external):
    pool = external(Script(length=99), num_envs=2048)
    pool.reset()
    kept = [pool.step(np.zeros(2048, np.int64)).obs for _ in range(3)]
    assert pool.stats().leased_slots == 3
    pool.step(np.zeros(2048, np.int64))
    assert [obs[7].tolist() for obs in kept] == [[7, 1, 0], [7, 2, 0], [7, 3, 0]]


def test_the_options_that_a_external_pool_cannot_keep_are_refused():
    with pytest.raises(stepmill.UsageError, match="num_workers: EnvPool has its own threads"):
        stepmill.Pool([Script()] * 2, backend="envpool", num_workers=2)
    with pytest.raises(stepmill.UsageError, match="seeding: EnvPool has its own threads"):
        stepmill.PoolOptions(backend="envpool", seeding="per_episode")
