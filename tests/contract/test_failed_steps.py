"""A step of a `VectorEnv` in which an env failed: that env is repaired alone, and the others lose no step."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import stepmill
from stepmill.frontends.gymnasium.errors import PendingCallError
from stepmill.testing.envs import CountingEnv
from stepmill.testing.faulty import DyingEnv, RaisingEnv
from stepmill.testing.gates import GATED_ACTION, GateEnv
from tests.harness.pools import begun

ONES = np.array([1, 1, 1, 1])
FIRST = {"reset_mask": [True, False, False, False]}


def _others(length: int = 50) -> list[partial[CountingEnv]]:
    return [partial(CountingEnv, i, length) for i in (1, 2, 3)]


@pytest.fixture
def failed(vector_env_of):
    """Four envs, of which env 0 has raised in the first step."""
    envs = begun(vector_env_of([partial(RaisingEnv, "step", 1), *_others()]))
    with pytest.raises(stepmill.EnvError):
        envs.step(ONES)
    return envs


@pytest.mark.covers("G-9")
def test_after_a_reset_of_the_env_that_raised_the_next_step_returns_the_results_of_the_others(vector_env_of):
    envs = begun(vector_env_of([partial(RaisingEnv, "step", 2), *_others()]))
    envs.step(np.array([1, 2, 3, 4]))
    with pytest.raises(stepmill.EnvError, match="env 0"):
        envs.step(np.array([5, 6, 7, 8]))
    obs, _ = envs.reset(options=FIRST)
    assert obs[:, 2].tolist() == [0, 1, 1, 1]  # steps of the episode: the others show what was returned of them
    obs, reward, *_ = envs.step(np.array([5, 60, 70, 80]))
    assert obs[:, 2].tolist() == [1, 2, 2, 2]
    assert reward.tolist() == [5, 6, 7, 8]  # of the actions that the others have taken
    obs, reward, *_ = envs.step(np.array([9, 10, 11, 12]))
    assert obs[:, 2].tolist() == [2, 3, 3, 3]
    assert reward.tolist() == [9, 10, 11, 12]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_infos_of_that_step_mark_the_actions_that_were_not_used(vector_env_of, is_async):
    envs = vector_env_of([partial(RaisingEnv, "step", 1), *_others()])

    def step():
        if not is_async:
            return envs.step(ONES)
        envs.step_async(ONES)
        return envs.step_wait()

    envs.reset(seed=0)
    with pytest.raises(stepmill.EnvError):
        step()
    envs.reset(options=FIRST)
    obs, *_, infos = step()
    assert obs[:, 2].tolist() == [1, 1, 1, 1]
    assert infos["kept"].tolist() == infos["_kept"].tolist() == [False, True, True, True]
    assert not step()[4].keys() & {"kept", "_kept"}


@pytest.mark.parametrize("options", [None, {"reset_mask": [True] * 4}])
def test_a_reset_of_all_keeps_no_result(failed, options):
    failed.reset(options=FIRST)
    failed.step_async(ONES)
    with pytest.raises(PendingCallError):
        failed.reset()
    failed.step_wait()
    failed.reset(options=options)
    obs, _, _, _, infos = failed.step(ONES)
    assert obs[:, 2].tolist() == [1, 1, 1, 1]
    assert not infos.keys() & {"kept", "_kept"}


@pytest.mark.parametrize("where", ["fork"])
def test_a_worker_that_died_takes_no_step_of_the_others_with_it(vector_env_of):
    envs = begun(vector_env_of([partial(DyingEnv, "step", 2), *_others()], num_workers=4))
    envs.step(ONES)
    with pytest.raises(stepmill.WorkerDied, match=r"\[0\]"):
        envs.step(ONES)
    envs.reset(options=FIRST)
    assert envs.step(ONES)[0][:, 2].tolist() == [1, 2, 2, 2]


def test_the_end_of_an_episode_that_came_with_the_fault_is_not_lost(vector_env_of):
    envs = begun(vector_env_of([partial(RaisingEnv, "step", 2), *_others(length=2)]))
    envs.step(ONES)
    with pytest.raises(stepmill.EnvError):
        envs.step(ONES)
    envs.reset(options=FIRST)
    _, _, terminated, truncated, _ = envs.step(ONES)
    assert (terminated | truncated).tolist() == [False, True, True, True]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_without_that_reset_names_the_env_and_what_to_call(failed, is_async):
    with pytest.raises(stepmill.UsageError, match=r"envs \[0\] have failed; .*reset_mask.* with reset\(\)") as caught:
        failed.step_async(ONES) if is_async else failed.step(ONES)
    assert "revive" not in str(caught.value)
    assert "recv" not in str(caught.value)
    failed.reset(seed=0)
    assert failed.step(ONES)[0][:, 2].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("where", ["fork"])
def test_a_step_that_was_interrupted_can_be_waited_for(vector_env_of, monkeypatch, gate):
    envs = begun(vector_env_of([partial(GateEnv, gate.path, i) for i in range(2)]))
    actions = np.array([GATED_ACTION, GATED_ACTION])
    interrupted = envs._port.step_wait

    def interrupt(timeout_s: float | None = None) -> object:
        monkeypatch.setattr(envs._port, "step_wait", interrupted)
        raise KeyboardInterrupt

    monkeypatch.setattr(envs._port, "step_wait", interrupt)
    envs.step_async(actions)
    with pytest.raises(KeyboardInterrupt):
        envs.step_wait()
    with pytest.raises(PendingCallError, match=r"step_wait\(\).*or reset\(\)"):
        envs.step(np.array([0, 0]))
    gate.open(2)
    assert envs.step_wait()[1].tolist() == [GATED_ACTION, GATED_ACTION]


def test_wrong_actions_are_refused_in_the_same_words_as_ever(failed):
    failed.reset(options=FIRST)
    with pytest.raises(stepmill.UsageError, match="action"):
        failed.step(np.array([1, 1]))
    assert failed.step(ONES)[0][:, 2].tolist() == [1, 1, 1, 1]
