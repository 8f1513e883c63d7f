"""Restarted workers have the settings of the user before anything else, and no call waits for a restart that it does not need."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.pool.capsule import read_capsule
from stepmill.pool.events import BeginRestart, Remedy
from stepmill.testing.gates import Gate, wait_at
from tests.chaos import KILL, ChaosEnv
from tests.chaos.envs import make_fragile, make_gated
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.kills import kill_process
from tests.harness.pools import await_ready, await_restart, begun, kill_worker


class TunedEnv(ChaosEnv):
    """Shows in its observation's last number the level that was set when it was reset; refuses levels below 0."""

    def __init__(self, identity: int = 0) -> None:
        super().__init__(identity)
        self.level = 0
        self.is_strict = False
        self.options: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "level" and getattr(self, "refused", "") and Path(self.refused).exists():
            raise ValueError("no level for the second one")
        super().__setattr__(name, value)

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(**arguments)
        obs[3] = self.level
        self.options = arguments.get("options")
        return obs, info

    def refuse(self, path: str) -> None:
        self.refused = path


class TalkativeEnv(ChaosEnv):
    """Leaves a megabyte in each info."""

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *result, _ = super().step(action)
        return *result, {"page": b"x" * 2**20}  # type: ignore[return-value]


def make(env_fns: Any, **options: Any) -> stepmill.Pool:
    chosen = stepmill.PoolOptions(context="fork", **{"on_fault": "truncate", **options})
    return stepmill.Pool(env_fns, backend="process", num_workers=2, options=chosen)


@pytest.mark.covers("G-3/close")
@pytest.mark.parametrize("moment", ["building", "waiting"])
def test_close_breaks_a_restart_off_and_warns_of_nothing(moment: str, tmp_path: Path, gate: Gate) -> None:
    flag = tmp_path / "flag"
    pool = begun(make([partial(make_gated, flag, gate.path, env_id) for env_id in range(2)]))
    flag.touch()
    assert pool.step([KILL, 1]).truncated.tolist() == [True, False]
    if moment == "building":
        gate.wait_arrivals()
    begin = time.monotonic()

    pool.close()

    assert time.monotonic() - begin < HANG_GUARD_S


def test_a_call_waits_for_the_restart_of_its_worker(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    with Gate() as gate, begun(make([partial(make_gated, flag, gate.path, env_id) for env_id in range(2)])) as pool:
        flag.touch()
        pool.step([KILL, 1])
        gate.wait_arrivals()

        future = pool.call_async("locate")
        gate.open()

        assert future.result() == (0, 1)
        assert pool.step([1, 1]).obs[:, 2].tolist() == [0, 2]


@pytest.mark.covers("G-5", "M-B3")
@pytest.mark.parametrize("on_fault", ["raise", "truncate"])
def test_what_was_set_is_set_again_before_the_first_reset(on_fault: str) -> None:
    with make([partial(TunedEnv, env_id) for env_id in range(4)], on_fault=on_fault) as pool:
        pool.set_attr("level", [5, 6, 7, 8])
        pool.reset(seed=0)
        if on_fault == "raise":
            with pytest.raises(stepmill.WorkerDied):
                pool.step([1, 1, KILL, 1])
            batch = pool.reset(env_ids=[2, 3])
        else:
            pool.step([1, 1, KILL, 1])
            batch = pool.step([1] * 4)

        assert batch.obs[-2:, 2:].tolist() == [[0, 7], [0, 8]]


@pytest.mark.parametrize("way", ["set_attr", "properties", "reset"])
def test_what_is_set_on_a_dead_worker_is_set_on_its_successor(way: str) -> None:
    with begun(make([partial(TunedEnv, env_id) for env_id in range(4)])) as pool:
        kill_process(pool.stats().workers[1].pid)

        if way == "reset":
            pool.reset(env_ids=[2], options={"level": 5}, persist_options=True)
        elif way == "set_attr":
            pool.set_attr("level", [5, 6, 7, 8])
        else:
            pool.properties.set("wind", [5, 6, 7, 8])

        while way != "reset" and not pool.stats().workers[1].is_dead:
            os.sched_yield()  # else the step may be the first to find it dead
        batch = pool.step([1] * 4)
        assert batch.truncated.tolist() == [False, False, way != "reset", True]
        assert batch.info["fault"]["kind"][3] == "neighbour"
        pool.step([1] * 4)
        if way == "set_attr":
            assert pool.get_attr("level") == (5, 6, 7, 8)
        elif way == "reset":
            assert pool.get_attr("options", env_ids=[2, 3]) == ({"level": 5}, None)
        else:
            assert pool.properties.get("wind") == (5, 6, 7, 8)


def raise_level(env: TunedEnv, value: int) -> None:
    env.unwrapped.level = value + 1


@pytest.mark.parametrize("on_fault", ["truncate", "replay"])
def test_what_a_function_has_set_is_set_again_on_rebuilt_envs(on_fault: str, tmp_path: Path) -> None:
    env_fns = [partial(TunedEnv, env_id) for env_id in range(2)]
    chosen = {
        "on_fault": on_fault,
        "seeding": "per_episode",
        "crash_dir": str(tmp_path),
        "restarts": {"max_restarts": 5},
    }
    with make(env_fns, **chosen) as pool:
        pool.set_attr(raise_level, [5, 6])
        pool.reset(seed=0)
        pool.set_attr(raise_level, 8, env_ids=[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the replay dies, too, which is reported
            pool.step([KILL, 1])
        pool.reset()

        assert pool.get_attr("level") == (6, 9)

        capsules = [read_capsule(str(path)) for path in tmp_path.iterdir()]
        assert capsules
        assert all(any("raise_level is not in the capsule" in note for note in capsule.notes) for capsule in capsules)


@pytest.mark.parametrize("on_fault", ["raise", "truncate", "replay"])
def test_what_could_not_be_sent_to_envs_is_not_set_on_rebuilt_envs(on_fault: str) -> None:
    env_fns = [partial(TunedEnv, env_id) for env_id in range(2)]
    with begun(make(env_fns, on_fault=on_fault, seeding="per_episode", restarts={"max_restarts": 5})) as pool:
        pool.set_attr("level", 5)
        for env_ids in ([0], None):
            with pytest.raises(stepmill.UsageError, match="cannot be pickled"):
                pool.set_attr("level", threading.Lock(), env_ids=env_ids)
        with pytest.raises(stepmill.UsageError, match="cannot be pickled"):
            pool.set_attr("level", [6, threading.Lock()])
        assert pool.get_attr("level") == (5, 5)
        pool.revive([0, 1], restart_living=True)
        pool.reset()

        assert pool.get_attr("level") == (5, 5)


def test_an_env_that_is_reset_after_all_repairs_has_its_attributes_under_replay_too() -> None:
    env_fns = [partial(TunedEnv, env_id) for env_id in range(2)]
    with make(env_fns, on_fault="replay", seeding="per_episode", restarts={"max_restarts": 0}) as pool:
        pool.set_attr("level", [5, 6])
        pool.reset(seed=0)
        with pytest.raises(stepmill.WorkerDied):
            pool.step([KILL, 1])
        pool.recv(1)

        assert pool.reset(env_ids=[0]).obs[0, 2:].tolist() == [0, 5]
        assert pool.step([1, 1]).truncated.tolist() == [False, False]


def test_the_reason_of_a_failed_restart_is_reported_however_late_it_is_asked_for(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    with make([partial(make_fragile, flag, env_id) for env_id in range(2)], restarts={"max_restarts": 2}) as pool:
        pool.reset(seed=0)
        flag.touch()
        assert pool.step([KILL, 1]).truncated.tolist() == [True, False]
        await_restart(pool, 0)  # it has given up

        with pytest.raises(stepmill.EnvError, match="no second one"):
            pool.step([1, 1])


def test_an_attribute_that_a_restarted_env_refuses_is_reported(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    env_fns = [partial(_refusing, str(flag), env_id) for env_id in range(2)]
    with make(env_fns, on_fault="raise") as pool:
        pool.set_attr("level", 3)
        pool.reset(seed=0)
        flag.touch()
        with pytest.raises(stepmill.WorkerDied):
            pool.step([KILL, 1])

        with pytest.raises(stepmill.EnvError, match="env 0 raised ValueError in restore: no level for the second one"):
            pool.reset(env_ids=[0])

        flag.unlink()
        assert pool.reset(env_ids=[0]).obs[:, 3].tolist() == [3]


def _refusing(path: str, env_id: int) -> TunedEnv:
    env = TunedEnv(env_id)
    env.refuse(path)
    return env


def test_the_large_infos_of_dead_workers_hold_no_memory() -> None:
    with begun(make([partial(TalkativeEnv, env_id) for env_id in range(2)], restarts={"max_restarts": 100})) as pool:
        memory = pool._runtime.slab.fds[2]  # of worker 0's results
        for _ in range(4):
            pool.step([1, 1])
            pool.step([KILL, 1])
            pool.step([1, 1])
        pool.step([1, 1])

        assert os.fstat(memory).st_blocks * 512 < 3 * 2**20


def test_a_large_info_that_was_published_outlives_its_worker() -> None:
    with begun(make([partial(TalkativeEnv, env_id) for env_id in range(2)])) as pool:
        pool.send([1, 1])
        await_ready(pool, 2)
        kill_worker(pool)
        restart = BeginRestart(0, 0, Remedy.RAISE, {})
        pool._recovery.workers.plan_restart(restart)
        pool._recovery.carry_out([restart])
        await_restart(pool, 0)

        assert len(pool.recv(2).info["page"][0]) == 2**20


@pytest.mark.covers("G-2")
def test_ctrl_c_while_a_replay_waits_for_a_restart_loses_nothing(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    options: dict[str, Any] = {"on_fault": "replay", "seeding": "per_episode", "restarts": {"max_restarts": 100}}
    with (
        Gate() as gate,
        make([partial(make_gated, flag, gate.path, env_id) for env_id in range(4)], **options) as pool,
        make([partial(ChaosEnv, env_id) for env_id in range(4)], **options) as calm,
    ):
        for each in (pool, calm):
            each.reset(seed=0)
            each.step([1] * 4)
        flag.touch()
        os.kill(pool.stats().workers[0].pid, signal.SIGKILL)

        interrupter = threading.Thread(target=_interrupt_at, args=(gate,))
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            pool.step([2] * 4)
        interrupter.join()
        gate.open(2)

        assert np.array_equal(pool.recv(4).obs, calm.step([2] * 4).obs)
        assert np.array_equal(pool.step([3] * 4).obs, calm.step([3] * 4).obs)


def _interrupt_at(gate: Gate) -> None:
    gate.wait_arrivals()
    os.kill(os.getpid(), signal.SIGINT)


class SlowOnceEnv(ChaosEnv):
    """Raises at its third step, and then waits at the gate in its next second step: in the middle of its replay."""

    def __init__(self, gate: Path, identity: int) -> None:
        super().__init__(identity)
        self._gate, self._num_steps = gate, 0

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        if self._num_steps == 3:
            raise ValueError("once")
        if self._num_steps == 5:
            wait_at(self._gate)
        return super().step(action)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_a_replay_that_was_interrupted_goes_on_with_the_next_wait(backend: str, gate: Gate) -> None:
    options = stepmill.PoolOptions(on_fault="replay", seeding="per_episode")
    fns = [partial(SlowOnceEnv, gate.path, 0), partial(ChaosEnv, 1)]
    with begun(stepmill.Pool(fns, backend=backend, num_workers=2, options=options)) as pool:
        pool.step([1, 1])
        pool.step([1, 1])
        interrupter = threading.Thread(target=_interrupt_at, args=(gate,))
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            pool.step([1, 1])
        interrupter.join()
        assert pool.states[0].name == "BUSY"
        gate.open()

        assert pool.recv(2).obs[:, 2].tolist() == [3, 3]
        assert pool.step([1, 1]).obs[:, 2].tolist() == [4, 4]
