"""The front-end for ALF: how FastParallelEnvironment starts and ends, and what can be asked of its envs."""

from __future__ import annotations

import logging
import os
import threading
from functools import partial

import numpy as np
import pytest

import stepmill
from stepmill.frontends.alf import FastParallelEnvironment
from stepmill.testing.gates import Gate
from tests.harness import leaks
from tests.harness.alf_envs import FIRST, AlfCounter, GatedAlf, ProgressAlf, actions
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.scripts import run_source

# ---- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.covers("A-17", "A-B3")
def test_promises_are_kept_in_any_order_and_as_often_as_asked(env_of):
    env = env_of([AlfCounter] * 2)
    env.reset()
    promises = [env.envs[0].call("whoami", i, key=i) for i in range(3)]
    for i in (2, 0, 1, 2):
        assert promises[i]()[2:] == ((i,), {"key": i})


@pytest.mark.covers("A-17", "A-22")
def test_what_a_method_raises_is_raised_here_with_its_traceback(env_of):
    env = env_of([AlfCounter] * 2)
    promise = env.envs[1].call("complain")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nothing is right") as caught:
            promise()
        assert isinstance(caught.value, stepmill.EnvError)
        assert caught.value.env_id == 1
        assert "in complain" in caught.value.remote_traceback
    assert env.reset().step_type.tolist() == [FIRST, FIRST]


@pytest.mark.covers("A-18")
def test_attributes_are_those_of_the_env_there(env_of):
    env = env_of([AlfCounter] * 2)
    env.seed([0, 1])
    for i in range(2):
        wanted = np.random.RandomState(i).get_state()[1][-1]
        assert env.envs[i].rng.get_state()[1][-1] == wanted  # seed i has reached env i
    assert env.envs[1].made_with == 1
    with pytest.raises(AttributeError, match="no_such_thing"):
        env.envs[0].no_such_thing  # noqa: B018
    assert not hasattr(env.envs[0], "neither_this")


@pytest.mark.covers("A-17", "A-30")
def test_a_handle_steps_resets_and_closes_its_env_and_leaves_the_others_alone(env_of, tmp_path):
    env = env_of([partial(AlfCounter, folder=tmp_path)] * 2)
    env.reset()
    handle = env.envs[1]
    first, second = handle.step(np.float32(5), blocking=False), handle.call("whoami", 1)
    assert first().observation.tolist() == first().observation.tolist() == [1, 1, 1, 5]
    assert second()[2] == (1,)
    assert handle.call("step", np.float32(6))().observation.tolist() == [1, 1, 2, 6]
    assert env.step(actions(2)).observation[:, 2].tolist() == [1, 3]
    assert handle.reset().observation.tolist() == [1, 2, 0, 0]
    handle.close()
    assert (tmp_path / "closed").read_bytes() == b"."


@pytest.mark.covers("A-17")
def test_a_step_of_all_is_refused_while_one_env_is_stepped_alone(env_of):
    env = env_of([AlfCounter] * 2)
    env.reset()
    promise = env.envs[0].step(np.float32(1), blocking=False)
    with pytest.raises(stepmill.BusyEnvError):
        env.step(actions(2))
    promise()
    assert env.step(actions(2)).observation[:, 2].tolist() == [2, 1]


@pytest.mark.covers("A-19")
def test_seeds_are_one_per_env(env_of):
    env = env_of([AlfCounter] * 2)
    with pytest.raises(ValueError, match=r"Number of seeds should match the number of parallel_envs\."):
        env.seed([1, 2, 3])
    assert env.seed([3, 4]) == [30, 40]
    assert env.call_envs_with_same_args("draw") == [np.random.RandomState(s).uniform() for s in (3, 4)]


@pytest.mark.covers("A-24", "A-B10/calls")
def test_a_method_of_all_envs_is_called_at_the_same_time(env_of, gate):
    env = env_of([GatedAlf] * 2)
    opener = run_in_thread(lambda: (gate.wait_arrivals(2), gate.open(2)))  # both are in the method at once
    assert env.call_envs_with_same_args("meet", gate.path, key="x") == [(0, "x"), (1, "x")]
    opener.join()


@pytest.mark.covers("A-24")
def test_progress_is_seen_once_it_is_synced_and_not_before(env_of):
    env = env_of([ProgressAlf] * 3, num_workers=2)
    assert env.reset().observation.tolist() == [-1] * 3
    for i in range(3):
        env.sync_progress({"global_counter": i})
        assert env.step(actions(3)).observation.tolist() == [i] * 3
    time_step = env.step(actions(3))
    assert time_step.observation.tolist() == [2] * 3
    assert time_step.env_info == {}


@pytest.mark.covers("A-B4")
def test_large_calls_both_ways_do_not_block_each_other(env_of):
    env = env_of([AlfCounter] * 2)
    payload = b"x" * (4 << 20)
    promises = [handle.call("whoami", payload) for handle in env.envs for _ in range(3)]
    assert all(promise()[2] == (payload,) for promise in promises)


# ---- start and end ----------------------------------------------------------------------------------------------------


@pytest.mark.covers("A-4", "A-B12", "A-27/log")
def test_all_envs_are_built_at_the_same_time(caplog):
    caplog.set_level(logging.INFO, logger="stepmill.frontends.alf")
    with Gate() as gate:
        opener = run_in_thread(lambda: (gate.wait_arrivals(3), gate.open(3)))
        with FastParallelEnvironment([partial(GatedAlf, make_gate=gate.path)] * 3, as_tensors=False) as env:
            opener.join()
            assert env.num_envs == 3
    assert caplog.messages == [
        "Forking all 3 processes.",
        "Waiting for all processes to start.",
        "All processes started.",
        "Closing all processes.",
    ]


@pytest.mark.covers("A-4")
def test_envs_are_built_one_after_the_other_if_that_is_asked_for(tmp_path):
    with Gate() as gate:
        seen = []

        def open_one_by_one():
            for _ in range(3):
                gate.wait_arrivals(1)
                seen.append(len((tmp_path / "made").read_bytes()) if (tmp_path / "made").exists() else 0)
                gate.open(1)

        opener = run_in_thread(open_one_by_one)
        constructors = [partial(GatedAlf, make_gate=gate.path, folder=tmp_path)] * 3
        with FastParallelEnvironment(constructors, start_serially=True, as_tensors=False):
            opener.join()
    assert seen == [0, 1, 2]  # each comes to the gate when the one before is made


def run_in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


@pytest.mark.covers("A-21", "A-B9")
def test_close_closes_every_env_and_may_be_repeated(tmp_path):
    with FastParallelEnvironment([partial(AlfCounter, folder=tmp_path)] * 2, as_tensors=False) as env:
        env.reset()
        pids = [pid for _, pid, *_ in env.call_envs_with_same_args("whoami")]
    env.close()
    assert (tmp_path / "closed").read_bytes() == b".."
    assert not leaks.wait_until_gone(pids, timeout_s=HANG_GUARD_S)
    with pytest.raises(stepmill.ClosedPoolError):
        env.step(actions(2))
    with pytest.raises(stepmill.ClosedPoolError):
        env.reset()


AT_EXIT = """
import sys
from functools import partial
from pathlib import Path
from stepmill.frontends.alf import FastParallelEnvironment
from tests.harness.alf_envs import AlfCounter
env = FastParallelEnvironment([partial(AlfCounter, folder=Path(sys.argv[1]))] * 2, as_tensors=False)
env.reset()
"""


@pytest.mark.covers("A-21")
def test_envs_are_closed_when_the_program_ends(tmp_path):
    done = run_source(AT_EXIT, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "closed").read_bytes() == b".."


@pytest.mark.covers("A-1", "A-25")
def test_threads_of_a_process_are_as_asked_for_and_other_start_methods_are_refused(env_of, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for asked, got in ((1, "1"), (3, "3"), (None, "7")):
        env = env_of([lambda env_id: AlfCounter(int(os.environ["OMP_NUM_THREADS"]))], torch_num_threads_per_env=asked)
        assert env.envs[0].made_with == int(got)
    with pytest.raises(AssertionError, match="Unrecognized start method 'thread'"):
        env_of([AlfCounter], start_method="thread")


@pytest.mark.covers("A-1")
def test_threads_and_start_method_may_be_given_by_position_as_in_alf():
    def threads_and_context(env_id):
        return AlfCounter(int(os.environ["OMP_NUM_THREADS"]))

    with FastParallelEnvironment([threads_and_context], False, False, True, 0, 3, "spawn", as_tensors=False) as env:
        assert env.envs[0].made_with == 3
    with pytest.raises(AssertionError, match="Unrecognized start method 'thread'"):
        FastParallelEnvironment([AlfCounter], False, False, True, 0, 1, "thread")
    with pytest.raises(TypeError, match=r"\('name',\) follow start_method"):
        FastParallelEnvironment([AlfCounter], False, False, True, 0, 1, "fork", "name")
    with pytest.raises(TypeError, match="start_method given by position and by name"):
        FastParallelEnvironment([AlfCounter], False, False, True, 0, 1, "fork", start_method="fork")
