"""Envs that are saved in the middle of their episodes go on, in other envs, exactly as they would have gone on."""

from __future__ import annotations

import dataclasses
import pickle
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import stepmill
from tests.harness.pools import begun, kill_worker, make_pool
from tests.harness.scripts import run_source

LOGGED: dict[str, Any] = {"on_fault": "replay", "seeding": "per_episode"}
SERIAL: dict[str, Any] = {"backend": "serial", **LOGGED}
BACKENDS = [("serial", {}), ("thread", {"num_workers": 3}), ("process", {"num_workers": 2})]


class Wanderer(gymnasium.Env[Any, Any]):
    """Episodes of 3 to 29 steps, whose results depend on each action, each random number, the options and the calls."""

    observation_space = spaces.Dict(place=spaces.Box(-1e9, 1e9, (2,), np.float64), name=spaces.Text(20))
    action_space = spaces.Discrete(100)
    bonus = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.integers(3, 30))
        self.place = float((options or {}).get("start", 0))
        return self._obs(), {"seed": seed}

    def _obs(self) -> Any:
        return {"place": np.array([self.place, self.t]), "name": f"step {self.t}"}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.place += action * self.np_random.random() + self.bonus
        info = {"action": int(action), "deep": {"path": np.arange(3) * self.t}}
        return self._obs(), self.place, self.t >= self.length, False, info

    def add(self, bonus: int) -> None:
        self.bonus += bonus


class Restless(Wanderer):
    """An env with a random generator that no seed reaches."""

    def step(self, action: Any) -> Any:
        return super().step(action + random.random())


def read_state(env: Any) -> Any:
    inner = env.unwrapped
    return inner.t, inner.length, inner.place, inner.bonus, inner.np_random.bit_generator.state


def set_state(env: Any, state: Any) -> None:
    inner = env.unwrapped
    inner.t, inner.length, inner.place, inner.bonus, inner.np_random.bit_generator.state = state


def record(values: Any) -> Any:
    """Return a batch as plain values that compare by their bits."""
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values.dtype.str, values.shape, values.tobytes()
    if isinstance(values, Mapping):
        return {name: record(each) for name, each in values.items()}
    if isinstance(values, (tuple, list, np.ndarray, stepmill.Batch)):
        return [record(each) for each in values]
    return repr(values)


def play(pool: stepmill.Pool, first: int, last: int) -> list[Any]:
    found = []
    for count in range(first, last):
        batch = pool.step(np.arange(pool.num_envs) + count % 7)
        found.append(record(batch))
        ended = np.flatnonzero(batch.terminated | batch.truncated).tolist()
        if ended and pool.options.autoreset_mode is stepmill.AutoresetMode.DISABLED:
            found.append(pool.reset(env_ids=ended).obs["place"].tolist())
    return found


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize(("backend", "workers"), BACKENDS)
def test_restored_envs_go_on_as_the_saved_ones(mode: Any, backend: Any, workers: Any, tmp_path: Path) -> None:
    others = {
        "serial": ("process", {"num_workers": 3}),
        "thread": ("serial", {}),
        "process": ("thread", {"num_workers": 1}),
    }
    other, other_workers = others[backend]
    path = tmp_path / "envs"
    with stepmill.Pool([Wanderer] * 4, backend=backend, autoreset_mode=mode, **LOGGED, **workers) as pool:
        pool.reset(seed=3, options=[{"start": env_id} for env_id in range(4)])
        newest = play(pool, 0, 41)
        saved = stepmill.save(pool, path)
        expected = play(pool, 41, 120)
    assert set(saved.how) <= {"log", "reset"}
    with stepmill.Pool([Wanderer] * 4, backend=other, autoreset_mode=mode, **LOGGED, **other_workers) as pool:
        batch = stepmill.restore(pool, path)
        if mode != "Disabled":
            assert record(batch) == newest[-1]
        assert play(pool, 41, 120) == expected


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_envs_with_spares_are_saved_with_the_order_of_the_spares(backend: Any) -> None:
    options: dict[str, Any] = {**LOGGED, "resets": {"spare_envs": 2}, "backend": backend}
    with stepmill.Pool([Wanderer] * 6, **options) as pool:
        pool.reset(seed=3)
        play(pool, 0, 41)
        saved = pickle.loads(pickle.dumps(stepmill.save(pool, None)))
        expected = play(pool, 41, 120)
        with pytest.raises(stepmill.UsageError, match="spares are saved all together"):
            stepmill.save(pool, None, env_ids=[0])
    with stepmill.Pool([Wanderer] * 6, **options, **({"num_workers": 3} if backend == "process" else {})) as pool:
        stepmill.restore(pool, saved)
        assert play(pool, 41, 120) == expected


def test_the_newest_batch_of_saved_envs_has_the_infos_of_episodes_that_ended_and_of_spares_that_began() -> None:
    options: dict[str, Any] = {**SERIAL, "resets": {"spare_envs": 2}}
    with stepmill.Pool([Wanderer] * 6, **options) as pool, stepmill.Pool([Wanderer] * 6, **options) as other:
        pool.reset(seed=3)
        has_ended = has_begun = False
        for count in range(20):
            newest = play(pool, count, count + 1)[0]
            batch = stepmill.restore(other, stepmill.save(pool, None))
            assert record(batch) == newest
            has_ended |= bool(batch.terminated.any())
            has_begun |= "seed" in batch.info
        assert has_ended
        assert has_begun


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize(("backend", "workers"), BACKENDS)
def test_the_users_functions_save_envs_without_a_log(mode: Any, backend: Any, workers: Any) -> None:
    def make() -> Any:
        return gymnasium.wrappers.OrderEnforcing(Wanderer())

    state = (read_state, set_state)
    with stepmill.Pool([make] * 3, backend=backend, autoreset_mode=mode, **workers) as pool:
        pool.reset(seed=3)
        play(pool, 0, 41)
        pool.set_attr("bonus", [1, 2, 3])
        with pytest.raises(stepmill.UsageError, match=r"env 0 cannot be saved: .*on_fault='replay'.*or give state="):
            stepmill.save(pool, None)
        saved = stepmill.save(pool, None, state=state)
        assert saved.how == ("state",) * 3
        expected = play(pool, 41, 120)
    with stepmill.Pool([make] * 3, backend=backend, autoreset_mode=mode, **workers) as pool:
        with pytest.raises(stepmill.UsageError, match="saved with state="):
            stepmill.restore(pool, saved)
        stepmill.restore(pool, saved, state=state)
        assert play(pool, 41, 120) == expected


def _play_async(pool: stepmill.Pool, history: dict[int, list[Any]], num_rows: int) -> None:
    """Receive at least `num_rows` more results of each env, and give each env actions that depend on its own results alone."""
    wanted = {env_id: len(rows) + num_rows for env_id, rows in history.items()}
    while any(len(history[env_id]) < num for env_id, num in wanted.items()):
        batch = pool.recv(2)
        ids = [int(env_id) for env_id in batch.env_id]
        for row, env_id in enumerate(ids):
            history[env_id].append((*batch.obs["place"][row], batch.reward[row], batch.terminated[row]))
        pool.send(np.array([(7 * len(history[env_id]) + env_id) % 11 for env_id in ids]), ids)


@pytest.mark.parametrize(("backend", "workers"), BACKENDS)
def test_commands_under_way_calls_and_attributes_are_saved(backend: Any, workers: Any) -> None:
    before: dict[int, list[Any]] = {env_id: [] for env_id in range(5)}
    with stepmill.Pool([Wanderer] * 5, backend=backend, **LOGGED, **workers) as pool:
        pool.reset_async(seed=5)
        _play_async(pool, before, 15)
        pool.call("add", 3, env_ids=[1])
        pool.set_attr("bonus", 2, env_ids=[2])
        _play_async(pool, before, 13)
        saved = stepmill.save(pool, None)
        expected = {env_id: list(rows) for env_id, rows in before.items()}
        _play_async(pool, expected, 40)
    with stepmill.Pool([Wanderer] * 5, backend="process", num_workers=2, **LOGGED) as pool:
        stepmill.restore(pool, saved)
        _play_async(pool, before, 40)
        assert pool.get_attr("bonus", env_ids=[0, 1, 2]) == (0, 3, 2)
    for env_id, rows in expected.items():
        count = min(len(rows), len(before[env_id]))
        assert rows[:count] == before[env_id][:count]


def test_a_position_can_be_given_to_other_envs_and_to_many() -> None:
    with (
        stepmill.Pool([Wanderer] * 3, **SERIAL) as pool,
        stepmill.Pool([Wanderer] * 4, num_workers=2, **LOGGED) as other,
    ):
        pool.reset(seed=3)
        play(pool, 0, 8)
        saved = stepmill.save(pool, None, env_ids=[1])
        other.reset(seed=9)
        obs = stepmill.restore(other, saved, env_ids=[3, 0, 2])
        np.testing.assert_array_equal(obs["place"], np.repeat(saved.obs["place"], 3, axis=0))
        for action in range(5):
            rows = other.step(np.full(4, action)).obs["place"]
            np.testing.assert_array_equal(
                rows[[0, 2, 3]], np.repeat(pool.step(np.full(3, action)).obs["place"][1:2], 3, axis=0)
            )


def test_an_env_that_gives_other_results_is_named(tmp_path: Path) -> None:
    path = tmp_path / "envs"
    with stepmill.Pool([Wanderer, Restless], **SERIAL) as pool:
        pool.reset(seed=3)
        play(pool, 0, 2)
        stepmill.save(pool, path)
    text = "env 1 could not be restored: step 1 gave another result than before; with strict=False"
    with (
        stepmill.Pool([Wanderer, Restless], **SERIAL) as pool,
        pytest.warns(RuntimeWarning, match="env 1 is not replayable"),
        pytest.raises(stepmill.UsageError, match=text),
    ):
        stepmill.restore(pool, path)
    with stepmill.Pool([Wanderer, Restless], **SERIAL) as pool:
        with pytest.warns(RuntimeWarning, match="env 1 is not replayable"):
            stepmill.restore(pool, path, strict=False)
        batch = pool.step(np.array([1, 1]))
        assert batch.truncated.tolist() == [False, True]
        assert batch.info["fault"]["kind"][1] == "not_restored"


def test_envs_of_another_kind_are_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "envs"
    with stepmill.Pool([Wanderer] * 2, **SERIAL) as pool:
        pool.reset(seed=3)
        stepmill.save(pool, path)
        pool.send(np.array([1]), [0])
        with pytest.raises(stepmill.BusyEnvError, match=r"envs \[0\]"):
            stepmill.restore(pool, path)
    cartpole = partial(gymnasium.make, "CartPole-v1")
    for fns, options, match in (
        ([cartpole] * 2, LOGGED, "saved with observation="),
        ([Wanderer] * 2, {**LOGGED, "autoreset_mode": "Disabled"}, "saved with autoreset_mode='NextStep'"),
        ([Wanderer] * 2, {"seeding": "per_episode"}, "make the envs with on_fault='replay'"),
        ([Wanderer] * 3, LOGGED, "3 envs|got 3 env_ids|another number"),
    ):
        with stepmill.Pool(fns, backend="serial", **options) as pool:
            if len(fns) == 3:
                stepmill.restore(pool, path)
                assert pool.states[2] is stepmill.EnvState.NEEDS_RESET
                continue
            with pytest.raises(stepmill.UsageError, match=match):
                stepmill.restore(pool, path)
            assert set(pool.states) == {stepmill.EnvState.NEEDS_RESET}
    with pytest.raises(stepmill.UsageError, match="a int has no pool"):
        stepmill.save(5, None)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_the_newest_observations_are_those_of_the_replay(backend: Any) -> None:
    options = {**LOGGED, "backend": backend}
    with stepmill.Pool([Wanderer] * 3, **options) as pool, stepmill.Pool([Wanderer] * 3, **options) as other:
        pool.reset(seed=3)
        newest = [pool.step([1, 2, 3]) for _ in range(4)][-1]
        saved = stepmill.save(pool, None)
        changed = [{**each, "position": {**each["position"]}} for each in saved.envs]
        changed[1]["position"]["obs"] = bytes(len(changed[1]["position"]["obs"]))
        assert record(stepmill.restore(other, dataclasses.replace(saved, envs=tuple(changed)))) == record(newest)
        assert record(other.step([1, 2, 3])) == record(pool.step([1, 2, 3]))


@pytest.mark.parametrize(("name", "value"), [("unseeded", None), ("queued", [{"calls": 3.0, "settings": []}])])
def test_envs_can_be_reset_after_a_restore_that_failed(name: str, value: Any) -> None:
    options = {**SERIAL, "resets": {"spare_envs": 1}}
    with stepmill.Pool([Wanderer] * 3, **options) as pool, stepmill.Pool([Wanderer] * 3, **options) as other:
        pool.reset(seed=3)
        pool.step([1, 2])
        saved = stepmill.save(pool, None)
        forged = dataclasses.replace(saved, whole={**saved.whole, name: value})
        with pytest.raises(stepmill.UsageError, match="damaged"):
            stepmill.restore(other, forged)
        assert record(other.reset(seed=4)) == record(pool.reset(seed=4))


def test_envs_can_be_reset_after_a_function_that_sets_states_has_raised() -> None:
    def fail(env: Any, state: Any) -> None:
        raise OSError("no such state")

    with stepmill.Pool([Wanderer] * 2, **SERIAL) as pool:
        pool.reset(seed=3)
        saved = stepmill.save(pool, None, state=(read_state, set_state))
        with pytest.raises(stepmill.EnvError, match="no such state"):
            stepmill.restore(pool, saved, state=(read_state, fail))
        assert pool.reset(seed=3).reward.tolist() == [0, 0]


def _front_end(make: Callable[[], Any]) -> Any:
    envs = stepmill.VectorEnv([make] * 3, backend="process", num_workers=2, **LOGGED)
    return gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)


def test_a_vector_env_in_wrappers_goes_on_with_its_last_step_and_the_generators_of_its_spaces() -> None:
    make = partial(gymnasium.make, "CartPole-v1")
    envs = begun(_front_end(make))
    envs.action_space.seed(4)
    for _ in range(30):
        newest = envs.step(envs.action_space.sample())
    saved = stepmill.save(envs, None)
    expected = [envs.step(envs.action_space.sample())[0] for _ in range(40)]
    envs.close()
    envs = _front_end(make)
    obs, reward, terminated, truncated, _ = stepmill.restore(envs, saved)
    for found, wanted in zip((obs, reward, terminated, truncated), newest, strict=False):
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal([envs.env.step(envs.action_space.sample())[0] for _ in range(40)], expected)
    envs.close()


def test_a_rollout_goes_on_with_the_newest_observations() -> None:
    make = partial(gymnasium.make, "CartPole-v1")

    def policy(obs: Any, _: Any) -> Any:
        return (obs[:, 2] > 0).astype(np.int64)

    with stepmill.Pool([make] * 3, **SERIAL) as pool:
        rollout = stepmill.Rollout(pool, 16)
        rollout.reset(seed=1)
        rollout.collect(policy)
        saved = stepmill.save(rollout, None)
        expected = [rollout.collect(policy).obs.copy() for _ in range(3)]
    with stepmill.Pool([make] * 3, **SERIAL) as pool:
        rollout = stepmill.Rollout(pool, 16)
        stepmill.restore(rollout, saved)
        np.testing.assert_array_equal([rollout.collect(policy).obs.copy() for _ in range(3)], expected)


_PROGRAM = """
import os, signal, sys
import gymnasium, numpy as np, stepmill
path, last = sys.argv[1], int(sys.argv[2])
envs = stepmill.VectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4, num_workers=2, on_fault="replay", seeding="per_episode")
rng = np.random.default_rng(0)
actions = rng.integers(0, 2, (200, 4))
if os.path.exists(path):
    obs = stepmill.restore(envs, path)[0]
    first = int(open(path + ".step").read())
else:
    obs, _ = envs.reset(seed=0)
    first = 0
for step in range(first, 200):
    if step and step % 20 == 0:
        stepmill.save(envs, path)
        open(path + ".step", "w").write(str(step))
    if step == last:
        os.kill(os.getpid(), signal.SIGKILL)
    obs = envs.step(actions[step])[0]
print(obs.tobytes().hex())
"""


@pytest.mark.orphans
def test_a_program_that_is_killed_again_and_again_ends_with_the_same_numbers(tmp_path: Path) -> None:
    whole = run_source(_PROGRAM, str(tmp_path / "whole"), "-1")
    path = str(tmp_path / "envs")
    for last in (47, 99, 150):
        assert run_source(_PROGRAM, path, str(last)).returncode == -9
    assert run_source(_PROGRAM, path, "-1").stdout == whole.stdout != ""


def test_envs_with_a_fault_are_restored_and_their_dead_worker_is_started_again() -> None:
    options: dict[str, Any] = {"num_workers": 2, "restarts": {"max_restarts": 0}, **LOGGED}
    with make_pool("fork", [Wanderer] * 4, **options) as pool:
        pool.reset(seed=3)
        for _ in range(5):
            pool.step(np.arange(4))
        saved = stepmill.save(pool, None)
        expected = pool.step(np.arange(4))
        kill_worker(pool, 1)
        with pytest.raises(stepmill.WorkerDied):
            pool.step(np.arange(4))
        pool.recv(2)
        assert [state.name for state in pool.states] == ["IDLE", "IDLE", "FAULTED", "FAULTED"]

        stepmill.restore(pool, saved)

        assert record(pool.step(np.arange(4))) == record(expected)
