"""Ctrl-C in the middle of a call that receives results: every transition still arrives, and arrives once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill import pool as pool_package
from stepmill.pool.payloads import InfoMaker
from stepmill.pool.port import PoolPort
from stepmill.spec import batch as batch_module
from stepmill.spec.options import EnvState
from stepmill.testing.envs import CountingEnv
from stepmill.testing.faulty import RaisingEnv
from tests.harness.interrupts import LineInterrupt
from tests.harness.pools import await_ready, begun, counting_envs, kill_worker, make_pool

NUM_ENVS = 3
LENGTH = 3
FILES = (str(Path(pool_package.__file__).parent), batch_module.__file__)
RECEIVING = ("_collect", "step_fast", "wait_and_collect", "step_obs")  # these call native code that receives


class Books:
    """What each env showed last. Every result that is noted must be the successor of the one before."""

    def __init__(self, pool: stepmill.Pool) -> None:
        self.t = np.array([row[2] for row in pool.reset(seed=0).obs])
        self.num_told = 0

    def note(self, obs: Any, info: dict[str, Any] | None, env_ids: Any, *, is_reset: bool) -> None:
        for row, env_id in enumerate(env_ids):
            wanted = 0 if is_reset or self.t[env_id] == LENGTH else self.t[env_id] + 1
            assert obs[row][2] == wanted, f"env {env_id} went from step {self.t[env_id]} to {obs[row][2]}"
            if info is not None and wanted:
                assert info["t"][row] == wanted
            self.t[env_id] = wanted
            self.num_told += 1


Operation = Callable[[stepmill.Pool], tuple[Any, Any, Any]]
ALL = tuple(range(NUM_ENVS))
ACTIONS = np.ones(NUM_ENVS, np.int64)


def _of_batch(batch: stepmill.Batch) -> tuple[Any, Any, Any]:
    return batch.obs, batch.info, batch.env_id.tolist()


def _send_recv(pool: stepmill.Pool) -> tuple[Any, Any, Any]:
    pool.send(ACTIONS[:2], env_ids=[0, 2])
    return _of_batch(pool.recv(2))


def _send_recv_ids(pool: stepmill.Pool) -> tuple[Any, Any, Any]:
    pool.send(ACTIONS)
    return _of_batch(pool.recv(env_ids=ALL))


def _recv_ready(pool: stepmill.Pool) -> tuple[Any, Any, Any]:
    pool.send(ACTIONS)
    if pool.options.backend == "process":
        await_ready(pool, NUM_ENVS)
    return _of_batch(pool.recv(min_envs=0))


def _step_async(pool: stepmill.Pool) -> tuple[Any, Any, Any]:
    PoolPort(pool).step_async(ACTIONS)
    result = PoolPort(pool).step_wait()
    return result[0], result[4], ALL


def _step_fast(pool: stepmill.Pool) -> tuple[Any, Any, Any]:
    result = PoolPort(pool).step_fast(ACTIONS)
    return result[0], result[4], ALL


def _reset_rows(pool: stepmill.Pool) -> tuple[Any, Any, Any]:
    mask = np.array([True, False, True])
    obs, _ = PoolPort(pool).reset_rows(mask)
    return obs[mask], None, [0, 2]


STEPS: dict[str, Operation] = {
    "step": lambda pool: _of_batch(pool.step(ACTIONS)),
    "step_fast": _step_fast,
    "step_obs": lambda pool: (PoolPort(pool).step_obs(ACTIONS), None, ALL),
    "step_wait": _step_async,
    "recv": _send_recv,
    "recv(env_ids)": _send_recv_ids,
    "recv(min_envs=0)": _recv_ready,
}
RESETS: dict[str, Operation] = {"reset": lambda pool: _of_batch(pool.reset(env_ids=[0, 2])), "reset_rows": _reset_rows}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "log": {"on_fault": "replay", "seeding": "per_episode"},
    "spares": {"resets": {"spare_envs": 1}},
}


def _has_results(pool: stepmill.Pool) -> bool:
    return any(state in (EnvState.BUSY, EnvState.READY) for state in pool.states)


def _recv_all(pool: stepmill.Pool, books: Books, *, is_reset: bool) -> None:
    while _has_results(pool):
        books.note(*_of_batch(pool.recv()), is_reset=is_reset)


def _interrupt_everywhere(pool: stepmill.Pool, name: str, recover: Callable[..., None]) -> int:
    """Do the operation again and again, interrupted one place further each time, until it is not. Returns how often."""
    operation, is_reset = {**STEPS, **RESETS}[name], name in RESETS
    books = Books(pool)
    results: list[tuple[Any, Any, Any]] = []
    for place in range(1, 10_000):
        num_told = books.num_told
        if LineInterrupt(place, FILES, RECEIVING).call(lambda: results.append(operation(pool))):
            recover(pool, books, is_reset=is_reset)
        else:
            books.note(*results[0], is_reset=is_reset)
            return place
        assert books.num_told in (num_told, num_told + 2, num_told + NUM_ENVS)
        books.note(*STEPS["step"](pool), is_reset=False)  # whatever it was, the pool goes on
    raise AssertionError("the operation never ended")


@pytest.fixture(params=["serial", "fork"])
def where(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", [*STEPS, *RESETS])
def test_no_transition_is_lost_or_doubled_wherever_ctrl_c_arrives(pool_of, name, options):
    chosen = OPTIONS[options]
    envs = [partial(CountingEnv, i, LENGTH) for i in range(NUM_ENVS + chosen.get("resets", {}).get("spare_envs", 0))]
    with pool_of(envs, **chosen) as pool:
        assert _interrupt_everywhere(pool, name, _recv_all) > 10


def _step_wait(pool: stepmill.Pool, books: Books, *, is_reset: bool) -> None:
    if _has_results(pool):
        result = PoolPort(pool).step_wait()
        books.note(result[0], result[4], ALL, is_reset=is_reset)


def _reset_wait(pool: stepmill.Pool, books: Books, *, is_reset: bool) -> None:
    if _has_results(pool):
        obs, _ = PoolPort(pool).reset_wait()
        books.note(obs[[0, 2]], None, [0, 2], is_reset=is_reset)
    assert not _has_results(pool)


def _one_by_one(pool: stepmill.Pool, books: Books, *, is_reset: bool) -> None:
    while _has_results(pool):
        books.note(*_of_batch(pool.recv(1)), is_reset=is_reset)


@pytest.mark.parametrize(
    ("name", "recover"),
    [("step_wait", _step_wait), ("step_fast", _step_wait), ("step", _one_by_one), ("reset_rows", _reset_wait)],
)
def test_any_other_receiving_call_returns_what_ctrl_c_kept_back(pool_of, name, recover):
    with pool_of([partial(CountingEnv, i, LENGTH) for i in range(NUM_ENVS)]) as pool:
        assert _interrupt_everywhere(pool, name, recover) > 10


@pytest.fixture
def interrupts_infos(monkeypatch):
    """Call what receives a batch, and let Ctrl-C arrive while native code, which has received it, has Python make its info."""
    make = InfoMaker.make
    due: list[int] = []

    def make_info(*arguments: Any) -> Any:
        if due:
            signal.raise_signal(due.pop())
        return make(*arguments)

    def interrupt(receive: Callable[..., Any], *arguments: Any) -> None:
        due.append(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            receive(*arguments)

    monkeypatch.setattr(InfoMaker, "make", make_info)
    return interrupt


def test_a_batch_that_was_interrupted_is_ready_and_its_envs_refuse_actions(pool_of, interrupts_infos):
    with begun(pool_of([partial(CountingEnv, i, LENGTH) for i in range(NUM_ENVS)])) as pool:
        interrupts_infos(pool.step, [1, 2, 3])
        assert pool.states == [EnvState.READY] * 3
        assert pool.ready_ids == [0, 1, 2]
        with pytest.raises(stepmill.BusyEnvError, match=r"\[0, 1, 2\]"):
            pool.step([1, 1, 1])
        first = pool.recv(1)
        assert (first.reward.tolist(), first.info["t"].tolist()) == ([1], [1])
        with pytest.raises(stepmill.BusyEnvError, match=r"\[1, 2\]"):
            pool.send([1, 1, 1])
        pool.send([4], env_ids=[0])
        assert [pool.recv(1).reward.tolist() for _ in range(3)] == [[2], [3], [4]]
        with pytest.raises(stepmill.UsageError, match="nothing pending"):
            pool.recv()


def test_a_reset_drops_what_was_kept_back_of_its_envs_and_of_no_others(pool_of, interrupts_infos):
    with begun(pool_of([partial(CountingEnv, i, LENGTH) for i in range(NUM_ENVS)])) as pool:
        interrupts_infos(pool.step, [1, 2, 3])
        assert pool.reset(env_ids=[1]).obs.tolist() == [[1, 1, 0]]
        batch = pool.recv()
        assert (batch.env_id.tolist(), batch.reward.tolist()) == ([0, 2], [1, 3])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_what_infos_say_of_an_end_is_told_with_the_batch_that_was_interrupted(pool_of, interrupts_infos, mode):
    with begun(pool_of([partial(CountingEnv, i, 1) for i in range(2)], autoreset_mode=mode)) as pool:
        interrupts_infos(pool.step, [1, 2])
        batch = pool.recv(2)
        assert batch.terminated.all()
        assert batch.info["episode"]["r"].tolist() == [1, 2]
        if mode == "SameStep":
            assert [obs.tolist() for obs in batch.info["final_obs"]] == [[0, 0, 1], [1, 0, 1]]
            assert batch.info["final_info"]["t"].tolist() == [1, 1]


def test_the_cause_of_a_cut_is_told_with_the_batch_that_was_interrupted(pool_of, interrupts_infos):
    with begun(pool_of([RaisingEnv] * 2, on_fault="truncate")) as pool:
        interrupts_infos(pool.step, [0, 0])
        batch = pool.recv(2)
        assert batch.truncated.all()
        assert batch.info["fault"]["kind"].tolist() == ["raised", "raised"]


def test_an_env_whose_worker_dies_meanwhile_still_has_the_result_that_was_kept_back(interrupts_infos):
    with begun(make_pool("fork", counting_envs(2), on_fault="truncate")) as pool:
        interrupts_infos(pool.step, [1, 2])
        os.kill(pool.stats().workers[1].pid, signal.SIGKILL)
        batch = pool.recv(2)
        assert batch.reward.tolist() == [1, 2]
        assert not batch.truncated.any()
        batch = pool.step([3, 4])
        assert batch.truncated.tolist() == [False, True]


def test_an_env_that_is_replayed_meanwhile_still_has_the_result_that_was_kept_back(interrupts_infos):
    options = {"on_fault": "replay", "seeding": "per_episode", "autoreset_mode": "SameStep", "num_workers": 1}
    with begun(make_pool("fork", [partial(CountingEnv, 0, 9), partial(CountingEnv, 1, 2)], **options)) as pool:
        pool.step([1, 2])
        interrupts_infos(pool.step, [3, 4])
        assert pool.recv(env_ids=[0]).reward.tolist() == [3]
        kill_worker(pool)
        pool.send([5], env_ids=[0])
        assert pool.recv(env_ids=[0]).reward.tolist() == [5]
        assert pool.stats().workers[0].restarts == 1
        batch = pool.recv(env_ids=[1])
        assert (batch.reward.tolist(), batch.terminated.tolist()) == ([4], [True])
        assert batch.info["episode"]["r"].tolist() == [6]
        assert (batch.obs.tolist(), batch.info["final_obs"][0].tolist()) == ([[1, 0, 0]], [1, 0, 2])
        assert pool.step([1, 1]).obs.tolist() == [[0, 0, 4], [1, 0, 1]]


def test_step_wait_of_a_vector_env_returns_the_step_that_was_interrupted(vector_env_of, interrupts_infos):
    envs = begun(vector_env_of(counting_envs(2)))
    interrupts_infos(envs.step, [1, 2])
    assert envs.step_wait()[1].tolist() == [1, 2]
    envs.step_async([3, 4])
    interrupts_infos(envs.step_wait)
    assert envs.step_wait()[1].tolist() == [3, 4]
    with pytest.raises(stepmill.UsageError):
        envs.step_wait()


def test_a_reset_that_raises_the_error_of_an_interrupted_step_drops_no_result() -> None:
    num_tried = 0
    is_interrupted, line = True, 0
    while is_interrupted:
        line += 1
        with begun(make_pool("serial", [RaisingEnv, *counting_envs(2)])) as pool:
            try:
                is_interrupted = LineInterrupt(line, FILES).call(partial(pool.step, ACTIONS))
            except stepmill.EnvError:
                break
            if not pool._recovery.news.faults:
                continue
            num_tried += 1

            with pytest.raises(stepmill.EnvError):
                pool.reset(env_ids=[1])

            assert pool.recv(env_ids=[1]).obs[0][2] == 1
    assert num_tried > 0
