"""An exception in a call or in the rebuilding of an env leaves a crash capsule, and the call can be repeated from it."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import stepmill
from stepmill.observe.replay import Verdict, code_to_run, env_fn_of, replay
from stepmill.pool.capsule import read_capsule
from tests.chaos import ChaosEnv
from tests.chaos.envs import RAISE, make_fragile
from tests.harness.pools import begun, make_pool


class TouchyEnv(ChaosEnv):
    """Raises in calls once its clock is at 2."""

    def touch(self, gently: str, *, times: int = 1) -> str:
        if self._clock >= 2:
            raise LookupError(f"touched {gently} {times} times")
        return gently

    def render(self) -> Any:
        raise NotImplementedError("it cannot be seen")


def pool_in(folder: Path, where: str = "fork", **options: Any) -> stepmill.Pool:
    env_fns = [partial(TouchyEnv, env_id) for env_id in range(3)]
    return make_pool(where, env_fns, crash_dir=folder, seeding="per_episode", **options)


def test_options_with_numbers_as_keys_are_replayed(tmp_path: Path) -> None:
    with pool_in(tmp_path, "serial") as pool:
        pool.reset(seed=0, options=[{7: 1}] * 3)
        with pytest.raises(stepmill.EnvError):
            pool.step([RAISE, 1, 1])
    (path,) = tmp_path.iterdir()
    capsule = read_capsule(str(path), trust=True)
    assert replay(capsule, env_fn_of(capsule), in_process=True).verdict is Verdict.REPRODUCED


@pytest.mark.parametrize("where", ["serial", "thread", "fork"])
def test_a_call_that_raises_leaves_a_capsule_from_which_it_raises_again(where: str, tmp_path: Path) -> None:
    with begun(pool_in(tmp_path, where)) as pool:
        pool.step([1] * 3)
        assert pool.call("touch", "softly") == ("softly",) * 3
        pool.step([2] * 3)
        with pytest.raises(stepmill.EnvError) as caught:
            pool.call("touch", "softly", times=3, env_ids=[1])
        assert pool.step([1] * 3).obs[:, 2].tolist() == [3, 3, 3]  # a call breaks no episode

    (path,) = tmp_path.iterdir()
    assert caught.value.capsule == str(path)
    assert str(path) in str(caught.value)
    capsule = read_capsule(str(path), trust=True)
    assert (capsule.kind, capsule.phase, capsule.command, capsule.env_id) == ("raised", "call", "call", 1)
    assert (capsule.num_steps, capsule.is_whole) == (2, True)
    assert code_to_run(capsule, has_env=True) == ["call of the env: ('touch', ('softly',), {'times': 3})"]
    report = replay(capsule, env_fn_of(capsule), in_process=True)
    assert (report.verdict, report.steps, report.divergence) == (Verdict.REPRODUCED, 2, None)
    assert report.failure.error_type.endswith("LookupError")


def test_a_call_during_a_step_is_made_again_after_that_step(tmp_path: Path) -> None:
    with begun(pool_in(tmp_path)) as pool:
        pool.step([1] * 3)
        pool.send([1] * 3)
        with pytest.raises(stepmill.EnvError):
            pool.call("touch", "softly", env_ids=[1])
        pool.recv(3)

    (path,) = tmp_path.iterdir()
    capsule = read_capsule(str(path), trust=True)
    assert replay(capsule, env_fn_of(capsule), in_process=True).verdict is Verdict.REPRODUCED


def test_a_call_whose_result_is_asked_for_much_later_says_that_the_episode_is_missing(tmp_path: Path) -> None:
    with begun(pool_in(tmp_path)) as pool:
        pool.step([1] * 3)
        pool.step([1] * 3)
        future = pool.call_async("touch", "softly", env_ids=[1])
        pool.step([1] * 3)
        for _ in range(2):  # one capsule, however often it is asked for
            with pytest.raises(stepmill.EnvError):
                future.result()

    (path,) = tmp_path.iterdir()
    capsule = read_capsule(str(path), trust=True)
    assert not capsule.is_whole
    assert any("was stepped between the call" in note for note in capsule.notes)
    assert replay(capsule, env_fn_of(capsule), in_process=True).verdict is Verdict.NOT_REPLAYABLE


def test_rendering_that_raises_leaves_one_and_a_missing_attribute_none(tmp_path: Path) -> None:
    with begun(pool_in(tmp_path, "serial")) as pool:
        with pytest.raises(stepmill.EnvError):
            pool.get_attr("no_such_thing")
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(stepmill.EnvError):
            pool.render(env_ids=[2])

    (path,) = tmp_path.iterdir()
    capsule = read_capsule(str(path), trust=True)
    assert (capsule.phase, capsule.command, capsule.env_id) == ("render", "call", 2)
    assert replay(capsule, env_fn_of(capsule), in_process=True).verdict is Verdict.REPRODUCED


def test_an_env_that_cannot_be_rebuilt_leaves_a_capsule(tmp_path: Path) -> None:
    folder, flag = tmp_path / "crashes", tmp_path / "flag"
    env_fns = [partial(make_fragile, flag, env_id) for env_id in range(2)]
    with begun(make_pool("fork", env_fns, crash_dir=folder)) as pool:
        os.kill(pool.stats().workers[1].pid, signal.SIGKILL)
        with pytest.raises(stepmill.WorkerDied):
            pool.step([1, 1])
        flag.touch()
        with pytest.raises(stepmill.EnvError, match="no second one") as caught:
            pool.revive([1])

    capsule = read_capsule(str(caught.value.capsule))
    assert (capsule.phase, capsule.command, capsule.env_id, capsule.kind) == ("construct", "construct", 1, "raised")
