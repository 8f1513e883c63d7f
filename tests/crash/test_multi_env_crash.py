"""The front-end for actorcritic when envs raise, die, hang or are interrupted: the fixed side of its black-box set."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest

import stepmill
from stepmill.frontends.multi_env import MultiEnv, SubprocessEnv, create_subprocess_envs
from stepmill.pool.workers import WorkerSupervisor
from stepmill.testing.gates import Gate
from tests.harness import leaks
from tests.harness.hangs import DEADLINE_S, HANG_GUARD_S
from tests.harness.plain_envs import NeverMade, OldEnv, OldEnvDeafToClose
from tests.harness.scripts import start_script

FORK = stepmill.PoolOptions(context="fork")


@pytest.fixture
def envs_of():
    made = []

    def make(*env_fns, **options):
        options.setdefault("context", "fork")
        made.append(create_subprocess_envs(env_fns, options=stepmill.PoolOptions(**options)))
        return made[-1]

    yield make
    for env in (env for envs in made for env in envs):
        env.close()


def kill(env):
    pid = env.call("where")
    os.kill(pid, signal.SIGKILL)
    assert not leaks.wait_until_gone([pid], timeout_s=HANG_GUARD_S)


class DiesOnceInItsConstructor(OldEnv):
    def __init__(self, flag):
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__()


@pytest.mark.covers("M-6/initialize", "M-14/initialize")
def test_a_process_that_dies_while_the_env_is_built_is_replaced(tmp_path):
    env = SubprocessEnv(
        partial(DiesOnceInItsConstructor, tmp_path / "flag"), options=stepmill.PoolOptions(context="fork")
    )
    env.start()
    env.initialize()
    assert env.reset()["t"] == 0
    env.close()


@pytest.mark.covers("M-6/initialize", "M-B4")
def test_a_process_that_always_dies_while_the_env_is_built_is_reported_at_last():
    env = SubprocessEnv(_die, options=stepmill.PoolOptions(context="fork", restarts={"max_restarts": 1}))
    env.start()
    with pytest.raises(stepmill.WorkerDied, match="SIGKILL"):
        env.initialize()
    env.close()


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.covers("M-6/render", "M-14/render")
def test_a_death_in_render_is_raised_and_the_next_step_tells_the_end_of_the_episode(envs_of):
    (env,) = envs_of(DiesInRender)
    env.reset()
    with pytest.raises(stepmill.WorkerDied):
        env.render()
    _, _, terminal, info = env.step(1)
    assert terminal
    assert info["worker_restarted"]
    assert env.step(1)[2] is False


class DiesInRender(OldEnv):
    def render(self, mode="human"):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.covers("M-6/step", "M-B3")
def test_an_env_killed_between_steps_is_reported_as_truncated_and_goes_on(envs_of):
    multi_env = MultiEnv(envs_of(OldEnv, partial(OldEnv, 1)))
    multi_env.reset()
    multi_env.step([1, 1])
    kill(multi_env.envs[1])
    observations, rewards, terminals, infos = multi_env.step([5, 6])
    assert (rewards, terminals) == ([5, 0.0], [False, True])
    assert observations[1]["t"] == 1  # the last one that there was
    assert infos[0] == {"t": 2}
    assert infos[1]["worker_restarted"] is True
    assert infos[1]["TimeLimit.truncated"] is True
    assert "SIGKILL" in infos[1]["fault"]["message"]
    observations, rewards, terminals, _ = multi_env.step([7, 8])
    assert [obs["t"] for obs in observations] == [3, 0]  # a fresh episode in a new process, seen from its beginning
    assert (rewards, terminals) == ([7, 0.0], [True, False])


@pytest.mark.covers("M-6/reset")
def test_an_env_killed_before_a_reset_is_rebuilt_for_it(envs_of):
    env, _ = envs_of(OldEnv, OldEnv)
    env.reset()
    pid = env.call("where")
    kill(env)
    assert env.reset(level=2)["told"] == ({"level": 2}, None)
    assert env.call("where") != pid
    assert env.step(3)[1] == 3


@pytest.mark.covers("M-6/step", "M-B3")
def test_a_single_env_that_dies_in_a_step_ends_its_episode_and_begins_another(envs_of):
    (env,) = envs_of(OldEnv)
    env.reset()
    env.step(1)
    obs, reward, is_over, info = env.step("kill")
    assert (obs["t"], reward, is_over, info["worker_restarted"]) == (1, 0.0, True, True)
    obs, reward, is_over, info = env.step(2)  # without a reset, which was the user's to do
    assert (obs["t"], reward, is_over, info) == (0, 0.0, False, {})
    assert env.step(2)[0]["t"] == 1


@pytest.mark.covers("M-B4")
def test_an_action_that_kills_its_worker_is_given_once_and_the_crash_is_reported_with_cause_and_index(
    envs_of, tmp_path
):
    multi_env = MultiEnv(envs_of(OldEnv, partial(OldEnv, 1, folder=tmp_path), restarts={"max_restarts": 1}))
    multi_env.reset()
    _, _, terminals, infos = multi_env.step([1, "exit"])
    assert terminals == [False, True]
    assert "exit code 7" in infos[1]["fault"]["message"]
    assert (tmp_path / "steps").read_bytes() == b"."
    multi_env.step([1, 1])
    with pytest.raises(stepmill.WorkerDied, match=r"exit code 7; its envs \[1\]") as caught:
        multi_env.step([1, "exit"])  # no restart is left
    assert caught.value.env_ids == (1,)
    assert multi_env.partial_results[1] == [1, None]


@pytest.mark.covers("M-B4")
def test_restarts_wait_longer_each_time(envs_of, monkeypatch):
    # On a busy machine, a worker may serve for as long as its start took, and the waits then start again from zero.
    monkeypatch.setattr(WorkerSupervisor, "_has_worked", lambda *_: False)
    env = envs_of(OldEnv, restarts={"max_restarts": 3})[0]
    env.reset()
    start = time.monotonic()
    for _ in range(3):
        assert env.step("exit")[2]
        env.reset()
    assert time.monotonic() - start > 0.1 + 0.2  # what the second and the third restart waited
    with pytest.raises(stepmill.WorkerDied):
        env.step("exit")


@pytest.mark.covers("M-B5")
def test_all_constructors_that_raise_are_reported_in_one_error():
    with pytest.raises(stepmill.EnvError) as caught:
        create_subprocess_envs([OldEnv, partial(NeverMade, 1), partial(NeverMade, 2)], options=FORK)
    error = caught.value
    assert (error.env_id, error.phase, error.error_type) == (1, "construct", "OSError")
    assert "no licence for 1" in str(error)
    assert "no licence for 2" in str(error)
    env = SubprocessEnv(partial(NeverMade, 5), options=FORK)
    env.start()
    for _ in range(2):
        with pytest.raises(stepmill.EnvError, match="no licence for 5"):
            env.initialize()
    env.close()


@pytest.mark.covers("M-B6")
def test_what_an_env_raises_is_raised_here_and_is_no_crash(envs_of):
    multi_env = MultiEnv(envs_of(OldEnv, partial(OldEnv, 1)))
    multi_env.reset()
    pids = [env.call("where") for env in multi_env.envs]
    with pytest.raises(stepmill.EnvError, match="no such action") as caught:
        multi_env.step([4, "raise"])
    assert (caught.value.env_id, caught.value.error_type) == (1, "KeyError")
    assert "plain_envs.py" in caught.value.remote_traceback
    assert multi_env.partial_results[1] == [4, None]  # the other env has stepped, and nothing of it is lost
    assert multi_env.reset(env_ids=[1])[0]["t"] == 0
    assert multi_env.step([5, 6])[1] == [5, 6]
    assert [env.call("where") for env in multi_env.envs] == pids


@pytest.mark.covers("M-B4", "M-B6")
def test_an_error_names_the_env_by_its_place_wherever_it_lives():
    alone = [SubprocessEnv(partial(OldEnv, i), options=FORK) for i in range(2)]
    for env in alone:
        env.start()
    for env in alone:
        env.initialize()
    with MultiEnv(alone) as multi_env:
        multi_env.reset()
        with pytest.raises(stepmill.EnvError, match="env 1 of this MultiEnv") as caught:
            multi_env.step([1, "raise"])
        assert caught.value.env_id == 1
        assert multi_env.partial_results[1] == [1, None]
        with pytest.raises(stepmill.UsageError):
            multi_env.step([2, 2])  # env 1 was not reset; env 0 steps all the same, and is received
        assert multi_env.partial_results[1] == [2, None]
        assert multi_env.reset(env_ids=[1])[0]["t"] == 0
        assert multi_env.step([3, 3])[1] == [3, 3]


@pytest.mark.covers("M-B8")
def test_a_step_that_takes_too_long_is_ended_and_reported(envs_of, gate):
    multi_env = MultiEnv(envs_of(OldEnv, partial(OldEnv, 1, gate=gate.path), step_timeout_s=DEADLINE_S))
    multi_env.reset()
    start = time.monotonic()
    _, _, terminals, infos = multi_env.step([1, "wait"])
    assert time.monotonic() - start < HANG_GUARD_S
    assert terminals == [False, True]
    assert infos[1]["fault"]["kind"] == "timed_out"


@pytest.mark.covers("M-10", "M-B7/bounded")
def test_close_is_bounded_when_an_env_does_not_close(gate):
    fns = [partial(OldEnvDeafToClose, i, gate=gate.path) for i in range(2)]
    multi_env = MultiEnv(create_subprocess_envs(fns, options=FORK))
    multi_env.reset()
    start = time.monotonic()
    with pytest.warns(RuntimeWarning, match="it was killed"):
        multi_env.close()
    assert time.monotonic() - start < HANG_GUARD_S


class OldEnvBreakingAtClose(OldEnv):
    """Raises when it is closed."""

    def close(self) -> None:
        raise RuntimeError("the simulator is gone")


@pytest.mark.covers("M-B7/tells")
def test_an_exception_of_an_envs_close_is_a_warning_that_names_it():
    multi_env = MultiEnv(create_subprocess_envs([OldEnvBreakingAtClose], options=FORK))
    multi_env.reset()
    with pytest.warns(RuntimeWarning, match="the simulator is gone"):
        multi_env.close()


@pytest.mark.covers("M-12", "M-15/close", "M-B7/tells")
def test_an_exception_of_close_of_one_of_several_envs_is_a_warning(envs_of):
    first, second = envs_of(OldEnvBreakingAtClose, OldEnv)
    with pytest.warns(RuntimeWarning, match="the simulator is gone"):
        first.close()
    assert second.reset()["t"] == 0


@pytest.mark.covers("M-B7/bounded")
def test_close_of_one_of_several_envs_is_bounded(gate):
    first, second = create_subprocess_envs([partial(OldEnvDeafToClose, gate=gate.path), OldEnv], options=FORK)
    start = time.monotonic()
    with pytest.warns(RuntimeWarning, match="close"):
        first.close()
    assert time.monotonic() - start < HANG_GUARD_S
    assert second.reset()["t"] == 0
    with pytest.warns(RuntimeWarning, match="it was killed"):
        second.close()


INTERRUPTED = """
import os
import sys
os.setpgid(0, 0)
from functools import partial
import stepmill
from stepmill.frontends.multi_env import MultiEnv, create_subprocess_envs
from tests.harness.plain_envs import OldEnv

if __name__ == "__main__":
    folder, gate = sys.argv[1:3]
    from pathlib import Path
    fns = [partial(OldEnv, i, folder=Path(folder), gate=Path(gate)) for i in range(2)]
    multi_env = MultiEnv(create_subprocess_envs(fns, options=stepmill.PoolOptions(context="fork")))
    multi_env.reset()
    try:
        multi_env.step(["wait", "wait"])
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.covers("M-B1", "M-10")
def test_ctrl_c_ends_everything_and_restarts_nothing(tmp_path):
    # Warnings are no errors here: the pool warns of the envs that stand at the gate when it closes at the end.
    with Gate() as gate, start_script(INTERRUPTED, str(tmp_path), str(gate.path), interpreter=()) as program:
        gate.wait_arrivals(2)
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does: the learner and every child
        out, errors = program.communicate(timeout=HANG_GUARD_S)
    assert out == "interrupted\n"
    assert "Traceback" not in errors
    assert program.returncode == 0
    assert (tmp_path / "resets").read_bytes() == b".."  # those of the first reset, and no other
