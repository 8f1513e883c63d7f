"""What an env gets wrong is an error that names the env, the phase and the cause; the other envs lose nothing."""

from __future__ import annotations

import os
import threading
from functools import partial

import numpy as np
import pytest
from gymnasium import spaces

import stepmill
from stepmill.testing.envs import CountingEnv
from stepmill.testing.faulty import ERRORS, RaisingEnv
from stepmill.testing.gates import Gate, wait_at
from tests.harness.gym_envs import SampleEnv
from tests.harness.odd_outputs import BadOutputEnv
from tests.harness.pools import begun

# ---------------------------------------------------------------- envs that raise


def test_a_keyboard_interrupt_passes_through_the_serial_backend():
    pool = stepmill.Pool([CountingEnv, partial(RaisingEnv, "step", 1, "keyboard"), CountingEnv], backend="serial")
    pool.reset(seed=0)
    with pytest.raises(KeyboardInterrupt):
        pool.step([1, 2, 3])
    states = [state.name for state in pool.states]
    assert states[0] == "READY"
    assert states[1] == "FAULTED"
    assert 0 in pool.recv(min_envs=0).env_id.tolist()
    pool.reset(seed=0)
    assert pool.step([1, 2, 3]).reward.tolist() == [1.0, 2.0, 3.0]
    pool.close()


def test_a_faulted_env_must_be_reset_before_it_steps_again(pool_of):
    pool = begun(pool_of([partial(RaisingEnv, "step", 1), partial(CountingEnv, 1)]))
    with pytest.raises(stepmill.EnvError):
        pool.step([0, 0])
    pool.recv(1)
    with pytest.raises(stepmill.UsageError):  # a fault is raised once
        pool.recv(1)
    assert [state.name for state in pool.states] == ["FAULTED", "IDLE"]
    with pytest.raises(stepmill.UsageError, match=r"\[0\]"):
        pool.send([0], [0])
    pool.send([5], [1])
    assert pool.recv(1).reward.tolist() == [5.0]
    assert pool.reset(env_ids=[0], seed=0).obs.tolist() == [[0, 0, 0]]
    assert pool.step([6, 7]).reward.tolist() == [6.0, 7.0]


@pytest.mark.covers("G-4")
def test_faults_of_several_envs_are_all_reported(pool_of):
    pool = begun(pool_of([partial(RaisingEnv, "step", 1, identity=i) for i in range(4)]))
    told = []
    try:
        pool.step([0] * 4)
    except stepmill.EnvError as error:
        told += [error.env_id, *(other.env_id for other in error.others)]
    while len(told) < 4:
        with pytest.raises(stepmill.EnvError) as caught:
            pool.recv()
        told += [caught.value.env_id, *(other.env_id for other in caught.value.others)]
    assert sorted(told) == [0, 1, 2, 3]


def test_an_env_that_raises_in_close_does_not_stop_the_pool_from_closing(pool_of):
    bad = partial(RaisingEnv, "close", 1)
    pool = begun(pool_of([bad, partial(CountingEnv, 1), bad], num_workers=1))
    with pytest.warns(RuntimeWarning, match="env [02] raised .* in close") as caught:
        pool.close()
    assert len(caught) == 2
    pool.close()


def test_pools_keep_running_after_an_automatic_reset_raised(pool_of):
    pool = begun(pool_of([partial(RaisingEnv, "reset", 2, length=1), partial(CountingEnv, 1, 50)]))
    assert pool.step([0, 0]).terminated.tolist() == [True, False]
    with pytest.raises(stepmill.EnvError) as caught:
        pool.step([0, 0])
    assert caught.value.phase == "reset"
    assert pool.recv(1).env_id.tolist() == [1]
    pool.reset(env_ids=[0])
    assert pool.step([1, 2]).reward.tolist() == [1.0, 2.0]


# ---------------------------------------------------------------- envs that return invalid values


NAMED = {  # in the message of the error
    "wrong shape": r"count.*\(4,\)|\(4,\).*count",
    "lossy dtype": "count.*float64|float64.*count",
    "missing key": "extra",
    "array for dict": "dict",
    "dict for array": r"is a dict, but its space says shape \(3,\)",
    "none leaf": r"is a NoneType, but its space says shape \(3,\)",
    "four values": "4|four",
    "text reward": "reward",
    "array flag": "terminated",
    "list info": "info",
}


@pytest.mark.covers("G-11")
@pytest.mark.parametrize("where", ["thread"])  # the loop that looks at outputs is the same everywhere
@pytest.mark.parametrize("kind", BadOutputEnv.KINDS)
def test_an_invalid_output_is_refused_by_name_and_the_pool_goes_on(pool_of, kind):
    pool = pool_of([partial(BadOutputEnv, "wrong shape", at=99), partial(BadOutputEnv, kind, at=1, identity=1)])
    phase = "reset" if kind.startswith("reset") else "step"
    with pytest.raises(stepmill.BadOutput, match=f"(?s)env 1.*({NAMED.get(kind, '')})") as caught:
        pool.reset(seed=0), pool.step([0, 0])
    assert caught.value.env_id == 1
    assert caught.value.phase == phase
    assert pool.recv(1).env_id.tolist() == [0]
    pool.reset(seed=0)
    assert pool.step([3, 4]).reward.tolist() == [3.0, 4.0]


class _Huge:
    def __reduce__(self):
        raise MemoryError


class _HugeInfoEnv(CountingEnv):
    def step(self, action):
        return *super().step(action)[:4], {"huge": _Huge()}


@pytest.mark.parametrize("where", ["serial"])
def test_an_output_that_cannot_be_stored_is_reported_even_if_the_reason_has_no_text(pool_of):
    pool = begun(pool_of([_HugeInfoEnv]))
    with pytest.raises(stepmill.BadOutput, match="output of step: MemoryError; "):
        pool.step([0])


ZEROS = np.zeros(3, np.int64)
BAD_ENDS = {
    "shape": (ZEROS[:2], 1.0, {}),
    "dtype": (np.full(3, "x"), 1.0, {}),
    "reward": (ZEROS, ZEROS, {}),
    "info": (ZEROS, 1.0, None),
}


class BadEndEnv(CountingEnv):
    """Action 9 ends the episode with a value that is not allowed."""

    def __init__(self, bad, identity):
        super().__init__(identity)
        self._bad = bad

    def step(self, action):
        if action != 9:
            return super().step(action)
        obs, reward, info = BAD_ENDS[self._bad]
        return obs, reward, True, False, info


@pytest.mark.parametrize("bad", BAD_ENDS)
def test_an_invalid_output_that_ends_an_episode_is_not_followed_by_a_reset(pool_of, bad):
    pool = begun(pool_of([partial(BadEndEnv, bad, env_id) for env_id in range(2)], autoreset_mode="SameStep"))
    with pytest.raises(stepmill.BadOutput) as caught:
        pool.step([9, 1])
    assert caught.value.env_id == 0
    assert pool.recv().env_id.tolist() == [1]
    assert pool.get_attr("num_resets") == (1, 1)
    assert pool.reset(env_ids=[0]).obs.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("bad", BAD_ENDS)
def test_an_invalid_output_that_ends_an_episode_is_truncated_with_one_reset(pool_of, bad):
    env_fns = [partial(BadEndEnv, bad, env_id) for env_id in range(2)]
    pool = begun(pool_of(env_fns, autoreset_mode="SameStep", on_fault="truncate"))
    batch = pool.step([9, 1])
    assert (batch.truncated.tolist(), batch.obs.tolist()) == ([True, False], [[0, 1, 0], [1, 0, 1]])
    assert batch.info["final_info"]["fault"]["error"][0] == "BadOutput"
    assert pool.get_attr("num_resets") == (2, 1)


# ---------------------------------------------------------------- envs that cannot be built


@pytest.mark.covers("G-4", "G-14", "A-B8", "G-1/construct")
@pytest.mark.parametrize("error", ["value", "unpicklable", "exit", "odd", "mute", "memory"])
def test_constructors_that_raise_are_all_reported_with_their_envs(pool_of, error):
    bad = partial(RaisingEnv, "init", error=error)
    with pytest.raises(stepmill.EnvError) as caught:
        pool_of([CountingEnv, bad, CountingEnv, bad], num_workers=4)
    assert caught.value.env_id == 1
    assert [other.env_id for other in caught.value.others] == [3]
    assert caught.value.phase == "construct"
    assert caught.value.error_type.endswith(type(ERRORS[error]()).__name__)
    assert "_fail" in caught.value.remote_traceback


@pytest.mark.covers("G-13/compared")
@pytest.mark.parametrize(
    "other",
    [
        spaces.Box(0, 1, (3,)),
        spaces.Box(0, 1, (2,), np.float64),
        spaces.Discrete(3),
        spaces.Dict({"a": spaces.Box(0, 1, (2,))}),
        spaces.Text(4),
    ],
    ids=["shape", "dtype", "kind", "structure", "text"],
)
def test_envs_whose_spaces_differ_are_refused_by_name(pool_of, other):
    box, discrete = spaces.Box(0, 1, (2,)), spaces.Discrete(2)
    with pytest.raises(stepmill.StepmillError, match="2"):
        pool_of([partial(SampleEnv, box, discrete)] * 2 + [partial(SampleEnv, other, discrete)])
    with pytest.raises(stepmill.StepmillError, match="2"):
        pool_of([partial(SampleEnv, discrete, box)] * 2 + [partial(SampleEnv, discrete, other)])


@pytest.mark.parametrize("where", ["forkserver"])
def test_an_env_fn_that_cannot_be_pickled_is_refused_and_the_way_out_is_named(pool_of):
    lock = threading.Lock()
    with pytest.raises(stepmill.UsageError, match=r"env_fn of env 1 cannot be pickled.*context='fork'"):
        pool_of([CountingEnv, lambda: CountingEnv(lock.locked())])


@pytest.mark.parametrize("where", ["fork", "thread", "serial"])
def test_an_env_fn_that_is_inherited_need_not_be_pickled(pool_of):
    lock = threading.Lock()
    pool = pool_of([lambda: CountingEnv(int(lock.locked()))])
    assert pool.reset(seed=0).obs.tolist() == [[0, 0, 0]]


def _build_at(gate, identity):
    wait_at(gate)
    return CountingEnv(identity)


@pytest.mark.covers("G-14")
@pytest.mark.parametrize("where", ["thread", "fork", "forkserver"])
def test_envs_are_built_in_parallel(pool_of):
    def open_for_all() -> None:
        gate.wait_arrivals(4)  # all constructors are at work at the same time
        gate.open(4)

    with Gate() as gate:
        opener = threading.Thread(target=open_for_all)
        opener.start()
        pool = pool_of([partial(_build_at, gate.path, i) for i in range(4)], num_workers=4)
        opener.join()
    assert pool.reset(seed=0).obs[:, 0].tolist() == [0, 1, 2, 3]


class RecordedEnv(CountingEnv):
    """Writes the process that builds it to a file."""

    def __init__(self, path):
        super().__init__()
        with open(path, "a") as file:
            file.write(f"{os.getpid()}\n")


@pytest.mark.covers("G-13/builds")
def test_each_env_is_built_once_and_in_its_workers_process(where, pool_of, tmp_path):
    begun(pool_of([partial(RecordedEnv, tmp_path / "built")] * 4, num_workers=2))
    built = [int(line) for line in (tmp_path / "built").read_text().splitlines()]
    assert len(built) == 4
    assert (os.getpid() in built) is (where in ("serial", "thread"))


class OldReset(CountingEnv):
    def reset(self):
        return super().reset()[0]


def test_an_env_with_the_reset_of_old_gym_is_refused_with_gymnasiums_signature(pool_of):
    pool = pool_of([OldReset])
    with pytest.raises(stepmill.EnvError, match=r"have reset\(self, \*, seed=None, options=None\)"):
        pool.reset(seed=0)
