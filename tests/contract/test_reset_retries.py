"""A reset that fails is tried again as often, and in the process, that the options say; then the error gives the number of attempts."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepmill
from tests.chaos import ChaosEnv
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.kills import stop_process
from tests.harness.pools import await_ready, kill_worker

HOWS = ("raises", "dies", "hangs")


class FlakyEnv(ChaosEnv):
    """Fails in some of its resets. What it does it notes in a file, which outlives its process: one letter each.

    r a reset that succeeds, f one that fails, c close, n a new object. Observation: the seed last given is in info["seed"].
    """

    def __init__(self, notes: Path, identity: int = 0, failing: tuple[int, ...] = (1, 2), how: str = "raises") -> None:
        super().__init__(identity, length=3)
        self._notes, self._failing, self._how = notes, failing, how
        self._note("n")

    def _note(self, letter: str) -> None:
        with self._notes.open("a") as file:
            file.write(letter)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        text = self._notes.read_text()
        attempt = text.count("r") + text.count("f") + 1
        fails = attempt in self._failing
        self._note("f" if fails else "r")
        if fails and self._how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fails and self._how == "hangs":
            time.sleep(600)
        if fails:
            raise ValueError(f"no luck in attempt {attempt}")
        obs, info = super().reset(seed=seed)
        return obs, {**info, "seed": -1 if seed is None else seed, "options": str(options)}

    def close(self) -> None:
        self._note("c")


def make(
    where: str, tmp_path: Path, failing: tuple[int, ...], *, how: str = "raises", neighbours: int = 1, **options: Any
) -> tuple[stepmill.Pool, Path]:
    notes = tmp_path / "notes"
    workers = {} if where == "serial" else {"num_workers": 1}
    if where == "process":
        options["context"] = "fork"
    options["resets"] = {"retry_wait_s": 0.02, **options["resets"]}
    chosen = stepmill.PoolOptions(**options)
    fns: list[Any] = [partial(FlakyEnv, notes, 0, failing, how)]
    fns += [partial(ChaosEnv, 1 + each) for each in range(neighbours)]
    return stepmill.Pool(fns, backend=where, options=chosen, **workers), notes


def seeding_for(on_fault: str) -> dict[str, Any]:
    return {"on_fault": on_fault, "seeding": "per_episode"}


@pytest.mark.covers("D-18", "D-B19", "D-B9", "X-10")
@pytest.mark.parametrize("on_fault", ["raise", "truncate", "replay"])
@pytest.mark.parametrize("where", ["serial", "thread", "process"])
def test_the_same_process_tries_again_with_the_same_seed_and_closes_nothing(
    where: str, on_fault: str, tmp_path: Path
) -> None:
    pool, notes = make(where, tmp_path, (1, 2), resets={"retries": 2}, **seeding_for(on_fault))
    with pool:
        batch = pool.reset(seed=7, options={"a": 1})

        assert notes.read_text() == "nffr"
        assert batch.info["seed"][0] == 7
        assert batch.info["options"][0] == "{'a': 1}"
        assert pool.stats().workers[0].reset_retries == 2
        assert pool.step([1, 1]).obs[:, 2].tolist() == [1, 1]


@pytest.mark.covers("D-18")
@pytest.mark.parametrize("on_fault", ["raise", "truncate", "replay"])
@pytest.mark.parametrize("where", ["serial", "thread", "process"])
def test_the_error_says_how_often_it_was_tried_and_why_it_failed_last(
    where: str, on_fault: str, tmp_path: Path
) -> None:
    pool, notes = make(where, tmp_path, (1, 2, 3), resets={"retries": 2}, **seeding_for(on_fault))
    with pool:
        with pytest.raises(
            stepmill.EnvError, match=r"env 0 raised ValueError in reset: no luck in attempt 3; .* last of 3 attempts"
        ) as caught:
            pool.reset(seed=7)

        assert caught.value.phase == "reset"
        assert "no luck" in caught.value.remote_traceback
        assert notes.read_text() == "nfff"
        assert pool.states[0].name == "FAULTED"
        assert pool.reset(seed=8, env_ids=[0]).info["seed"].tolist() == [8]


@pytest.mark.covers("D-18")
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("where", ["serial", "thread", "process"])
def test_automatic_resets_are_tried_again_and_lose_nothing(where: str, mode: str, tmp_path: Path) -> None:
    options = {**seeding_for("raise"), "autoreset_mode": mode}
    pool, notes = make(where, tmp_path, (2, 3), resets={"retries": 2}, **options)
    with (
        pool,
        stepmill.Pool(
            [partial(ChaosEnv, env_id, 3) for env_id in range(2)],
            backend="serial",
            options=stepmill.PoolOptions(seeding="per_episode", autoreset_mode=mode),
        ) as calm,
    ):
        pool.reset(seed=0)
        calm.reset(seed=0)
        for step in range(8):
            ours, theirs = pool.step([1, 1]), calm.step([1, 1])
            assert np.array_equal(ours.obs[0], theirs.obs[0]), step
            assert ours.truncated[0] == theirs.truncated[0]
            assert ours.reward[0] == theirs.reward[0]
        assert notes.read_text().startswith("nrffr")


@pytest.mark.parametrize("where", ["thread", "process"])
def test_an_overlapped_reset_that_fails_is_tried_again_when_it_is_wanted(where: str, tmp_path: Path) -> None:
    pool, notes = make(where, tmp_path, (2,), resets={"retries": 1, "overlap": True}, **seeding_for("raise"))
    with pool:
        pool.reset(seed=0)
        for _ in range(3):
            pool.step([1, 1])
        while notes.read_text() != "nrf":
            os.sched_yield()

        assert pool.step([1, 1]).obs[0, 2] == 0
        assert notes.read_text() == "nrfr"


@pytest.mark.parametrize("how", ["raises", "dies"])
@pytest.mark.parametrize("on_fault", ["raise", "truncate", "replay"])
def test_an_attempt_that_fails_before_the_pool_looks_again_counts_like_any_other(
    on_fault: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**seeding_for(on_fault), "resets": {"retries": 2, "retry_in": "new"}}
    pool, notes = make("process", tmp_path, (1, 2), how=how, neighbours=0, **options)
    carry_out = pool._recovery.carry_out

    def carry_out_and_linger(decisions: Any) -> None:
        carry_out(decisions)
        while notes.read_text().replace("c", "") in ("nfn", "nfnf") and not pool._state.drain(acknowledge=False):
            os.sched_yield()

    monkeypatch.setattr(pool._recovery, "carry_out", carry_out_and_linger)
    with pool:
        batch = pool.reset(seed=7, options={"a": 1})

        assert notes.read_text().replace("c", "") == "nfnfnr"
        assert batch.truncated.tolist() == [False]
        assert batch.info["seed"][0] == 7


@pytest.mark.covers("D-18", "D-19", "D-B9", "X-10")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("on_fault", ["raise", "truncate", "replay"])
def test_a_new_process_tries_again_with_the_same_seed(on_fault: str, how: str, tmp_path: Path) -> None:
    options = {**seeding_for(on_fault), "reset_timeout_s": 0.2 if how == "hangs" else None}
    resets = {"retries": 2, "retry_in": "new"}
    pool, notes = make("process", tmp_path, (1, 2), how=how, neighbours=0, resets=resets, **options)
    with pool:
        batch = pool.reset(seed=7, options={"a": 1})

        assert notes.read_text().replace("c", "") == "nfnfnr"
        assert batch.info["seed"][0] == 7
        assert batch.info["options"][0] == "{'a': 1}"
        assert pool.step([1]).obs[:, 2].tolist() == [1]


@pytest.mark.covers("D-18", "D-19")
@pytest.mark.parametrize("how", ["raises", "dies"])
def test_new_processes_are_used_up_too(how: str, tmp_path: Path) -> None:
    pool, notes = make("process", tmp_path, (1, 2), how=how, resets={"retries": 1, "retry_in": "new"})
    with pool:
        with pytest.raises(stepmill.StepmillError, match="last of 2 attempts"):
            pool.reset(seed=7)

        assert notes.read_text().count("f") == 2
        assert pool.reset(seed=8).obs[:, 2].tolist() == [0, 0]


@pytest.mark.covers("G-5")
def test_the_neighbours_of_an_env_that_gets_a_new_process_are_cut_short_and_marked(tmp_path: Path) -> None:
    pool, _ = make("process", tmp_path, (2,), neighbours=2, resets={"retries": 1, "retry_in": "new"})
    with pool:
        pool.reset(seed=0)
        pool.step([1, 1, 1])
        pool.send([2], [2])
        await_ready(pool, 1)

        pool.reset(env_ids=[0])
        told = pool.recv(1)
        batch = pool.step([3, 3, 3])

        assert (told.env_id.tolist(), told.reward.tolist()) == ([2], [2.0])  # it was there before the death
        assert batch.truncated.tolist() == [False, True, True]
        assert batch.info["fault"]["kind"][1:].tolist() == ["neighbour", "neighbour"]
        assert pool.step([1, 1, 1]).obs[:, 2].tolist() == [2, 0, 0]


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_neighbours_reset_that_is_lost_with_the_old_process_is_repeated(how: str, tmp_path: Path) -> None:
    resets = {"retries": 1, "retry_in": "new"}
    pool, _ = make("process", tmp_path, (1,), how=how, reset_timeout_s=0.2 if how == "hangs" else None, resets=resets)
    with pool:
        pool.reset(seed=7)

        assert pool.step([1, 1]).obs[:, 2].tolist() == [1, 1]


@pytest.mark.parametrize(("how", "send_finds_it"), [("dies", False), ("dies", True), ("hangs", False)])
def test_a_neighbours_step_that_is_lost_with_the_old_process_ends_its_episode(
    how: str, send_finds_it: bool, tmp_path: Path
) -> None:
    resets = {"retries": 1, "retry_in": "new"}
    pool, _ = make("process", tmp_path, (2,), how=how, reset_timeout_s=0.2 if how == "hangs" else None, resets=resets)
    with pool:
        pool.reset(seed=7)
        pool.step([1, 1])
        pool.reset_async(env_ids=[0])
        while send_finds_it and not pool.stats().workers[0].is_dead:
            os.sched_yield()
        pool.send([1], [1])

        batch = pool.recv(2)

        assert batch.truncated.tolist() == [False, True]
        assert batch.info["fault"]["error"][1] == ("EnvTimeout" if how == "hangs" else "WorkerDied")
        assert pool.step([1, 1]).obs[:, 2].tolist() == [1, 0]


def test_a_step_whose_death_is_found_by_the_next_send_has_one_error(tmp_path: Path) -> None:
    pool, _ = make("process", tmp_path, (), resets={"retries": 1, "retry_in": "new"})
    with pool:
        pool.reset(seed=7)
        stop_process(pool.stats().workers[0].pid)
        pool.send([1], [0])
        kill_worker(pool)

        assert pool.send([1], [1]) == []

        with pytest.raises(stepmill.WorkerDied) as caught:
            pool.recv(1)
        assert caught.value.env_ids == (0, 1)
        assert caught.value.others == ()


def test_wrong_outputs_are_not_asked_for_again(tmp_path: Path) -> None:
    options = stepmill.PoolOptions(resets={"retries": 3, "retry_wait_s": 0.0})
    with stepmill.Pool([_ShapelessEnv], backend="serial", options=options) as pool:
        with pytest.raises(stepmill.BadOutput):
            pool.reset()
        assert pool.get_attr("resets") == (1,)


class _ShapelessEnv(ChaosEnv):
    resets = 0

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        self.resets += 1
        return np.zeros(7, np.int64), {}


@pytest.mark.parametrize("where", ["serial", "thread"])
def test_new_processes_are_refused_where_there_are_none(where: str) -> None:
    options = stepmill.PoolOptions(resets={"retries": 1, "retry_in": "new"})
    with pytest.raises(stepmill.UsageError, match=r"resets.retry_in='new' needs processes"):
        stepmill.Pool([ChaosEnv], backend=where, options=options)


def test_close_does_not_wait_for_a_retry(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    options = stepmill.PoolOptions(resets={"retries": 1, "retry_wait_s": 600.0})
    pool = stepmill.Pool([partial(FlakyEnv, notes, 0, (1,))], backend="process", options=options)
    pool.reset_async()
    while "f" not in notes.read_text():
        os.sched_yield()
    begin = time.monotonic()

    pool.close()

    assert time.monotonic() - begin < HANG_GUARD_S
