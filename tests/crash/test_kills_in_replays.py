"""Workers that die while their envs are replayed, and while logged calls are repeated: no result is wrong, none is stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.mortal_envs import CheckingLearner, kill_at_random, make_pool, plan_lives
from tests.harness.effort import every_second
from tests.harness.pools import kill_unnoticed

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NUM_STEPS = 5  # before the first death


def advance(learner: CheckingLearner, num_steps: int, *, has_calls: bool = False) -> None:
    for step in range(num_steps):
        learner.step_all(step + 1)
        if has_calls and step % 2:
            for env_id in range(learner.pool.num_envs):
                learner.call(env_id)


@pytest.mark.covers("G-5")
@pytest.mark.parametrize(
    ("envs_per_worker", "is_pending"),
    [
        (1, True),
        (2, False),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "end", range(NUM_STEPS + 3)
)  # in the reset, in each replayed step, in the learner's own, and later
def test_a_worker_may_die_again_at_any_command_of_a_replay(
    end: int, is_pending: bool, envs_per_worker: int, tmp_path: Path
) -> None:
    num_envs = 2 * envs_per_worker
    with make_pool(tmp_path, num_envs, 2) as pool:
        learner = CheckingLearner(pool)
        advance(learner, NUM_STEPS)
        plan_lives(tmp_path, 0, [end])
        if is_pending:
            kill_unnoticed(pool)
            learner.step_all(7)
        else:
            kill_unnoticed(pool)
            learner.call(num_envs - 1)  # not of the dead worker, which stays unnoticed
        advance(learner, 4)

        assert learner.counts["cut"] == 0
        assert (tmp_path / "kills").stat().st_size == 1


@pytest.mark.parametrize("num_deaths", [1, 2])
@pytest.mark.parametrize("envs_per_worker", [1, 2])
def test_a_worker_that_dies_in_a_repeated_call_when_its_replay_has_been_played_is_replaced(
    envs_per_worker: int, num_deaths: int, tmp_path: Path
) -> None:
    num_steps, num_calls = 4, 2  # the last call comes after the last result
    with make_pool(tmp_path, envs_per_worker, 1) as pool:
        learner = CheckingLearner(pool)
        advance(learner, num_steps, has_calls=True)
        plan_lives(tmp_path, 0, [num_steps + num_calls] * num_deaths)
        kill_unnoticed(pool)

        advance(learner, 3)

        assert learner.counts["cut"] == 0
        assert (tmp_path / "kills").stat().st_size == num_deaths


@pytest.mark.parametrize(
    ("end", "envs_per_worker"), every_second(range(NUM_STEPS + 4), [1, 2])
)  # two calls are among the commands
def test_a_worker_may_die_again_while_logged_calls_are_repeated(end: int, envs_per_worker: int, tmp_path: Path) -> None:
    num_envs = 2 * envs_per_worker
    with make_pool(tmp_path, num_envs, 2) as pool:
        learner = CheckingLearner(pool)
        advance(learner, NUM_STEPS, has_calls=True)
        plan_lives(tmp_path, envs_per_worker - 1, [end])
        kill_unnoticed(pool)
        advance(learner, 4, has_calls=True)

        assert learner.counts["cut"] == 0
        assert (tmp_path / "kills").stat().st_size == 1


@pytest.mark.parametrize(
    ("ends", "has_calls"), every_second([[2, 4], [4, 2], [0, 1], [3, 3], [5, 6, 5]], [False, True])
)
def test_an_episode_that_is_killed_again_and_again_is_replayed_or_cut_short_where_the_learner_was(
    ends: list[int], has_calls: bool, tmp_path: Path
) -> None:
    with make_pool(tmp_path, 4, 2) as pool:
        learner = CheckingLearner(pool)
        advance(learner, NUM_STEPS, has_calls=has_calls)
        plan_lives(tmp_path, 0, ends)
        kill_unnoticed(pool)
        advance(learner, 6, has_calls=has_calls)

        assert (tmp_path / "kills").stat().st_size == len(ends)


@pytest.mark.parametrize("is_pending", [True, False])
@pytest.mark.parametrize(("ends", "num_cut"), [([1, 2, 3, 4], 0), ([4, 3, 2, 1], 0), ([3, 3, 3, 3], 1)])
def test_only_deaths_at_the_same_step_of_a_replay_end_the_episode(
    ends: list[int], num_cut: int, is_pending: bool, tmp_path: Path
) -> None:
    with make_pool(tmp_path, 2, 2) as pool:
        learner = CheckingLearner(pool)
        advance(learner, NUM_STEPS)
        plan_lives(tmp_path, 0, ends)
        kill_unnoticed(pool)
        if not is_pending:
            learner.call(0)
        advance(learner, 1)

        assert learner.counts["cut"] == num_cut


def test_calls_of_an_episode_that_was_cut_short_are_repeated_before_the_next_one_begins(tmp_path: Path) -> None:
    with make_pool(tmp_path, 2, 2) as pool:
        learner = CheckingLearner(pool)
        advance(learner, NUM_STEPS, has_calls=True)
        num_commands = 1 + NUM_STEPS + NUM_STEPS // 2
        plan_lives(tmp_path, 0, [num_commands] * 3)  # the same step fails until it is given up
        kill_unnoticed(pool)
        learner.step_all(7)
        kill_unnoticed(pool)
        learner.step_all(8)  # begins an episode
        learner.step_all(9)

        assert learner.counts["cut"] == learner.counts["first"] == 1


CONFIGURATIONS = every_second([1, 2], [False, True])


@pytest.mark.parametrize(("envs_per_worker", "has_calls"), CONFIGURATIONS)
def test_every_result_is_right_while_workers_are_killed_at_random(
    envs_per_worker: int, has_calls: bool, tmp_path: Path
) -> None:
    counts = kill_at_random(tmp_path, 30, 1, envs_per_worker=envs_per_worker, has_calls=has_calls)

    assert counts["next"] > 10 * counts["cut"], counts


@pytest.mark.soak
@pytest.mark.parametrize(("envs_per_worker", "has_calls"), CONFIGURATIONS)
def test_every_result_is_right_while_two_thousand_workers_are_killed(
    envs_per_worker: int, has_calls: bool, tmp_path: Path
) -> None:
    counts = kill_at_random(
        tmp_path, 500, 2, envs_per_worker=envs_per_worker, has_calls=has_calls, has_large_infos=True
    )

    assert counts["kills"] >= 500
