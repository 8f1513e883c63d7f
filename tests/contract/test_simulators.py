"""Envs of `stepmill.foreign` return what they return in a process of their own, and take the same calls."""

from __future__ import annotations

import ast
import io
import pickle
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

import stepmill
from stepmill.pool.start import worker_settings
from stepmill.simulators import other_side, process
from stepmill.simulators.env import make_space
from stepmill.spec.options import PoolOptions
from stepmill.testing.compare import find_difference
from tests.harness import simulator_envs
from tests.harness.gym_envs import TESTED_SPACES
from tests.harness.pools import begun, make_pool
from tests.harness.simulators import ENVS, OTHER_PYTHON


def foreign(name: str, **kwargs: Any) -> Any:
    return stepmill.foreign(f"{ENVS}:{name}", python=OTHER_PYTHON, **kwargs)


def cart_pole() -> Any:
    return stepmill.foreign("gymnasium:make", python=OTHER_PYTHON, id="CartPole-v1")


def test_the_other_side_has_the_syntax_of_python_3_6() -> None:
    text = Path(other_side.__file__).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text, feature_version=(3, 6))):
        if isinstance(node, ast.AnnAssign) and isinstance(
            node.value, ast.Tuple
        ):  # ast knows no version of `a: b = 1, 2`
            assert (ast.get_source_segment(text, node.value) or "").startswith("("), "Python 3.6 wants parentheses"


def test_the_variable_pythonhome_of_this_python_is_not_set_for_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/no/such/folder")
    command = [
        "sh",
        "-c",
        'test -z "${PYTHONHOME+set}" && exec "$0" "$@"',
        *OTHER_PYTHON,
    ]  # Python 3.6 reads an empty one, too
    env = stepmill.foreign(f"{ENVS}:Nothing", python=command)()
    env.close()


@pytest.mark.parametrize("name", TESTED_SPACES)
def test_a_space_arrives_as_it_was(name: str) -> None:
    space = TESTED_SPACES[name]
    other_side.load_numpy()
    described = other_side.describe_space(space, "observation_space")
    assert make_space(send(described)) == space
    space.seed(0)
    value = space.sample()
    assert find_difference(send(value), value) is None


def send(value: object) -> Any:
    """Return a value as it arrives at the other side."""
    return other_side.Decoder(io.BytesIO(other_side.Codec().dumps(value))).load()[0]


def test_a_large_space_arrives_through_shared_memory() -> None:
    env = foreign("Picture")()
    assert env.observation_space == simulator_envs.Picture().observation_space
    env.close()


@pytest.mark.parametrize("where", ["serial", "fork"])
def test_an_env_of_gymnasium_returns_the_same_in_another_python(where: str) -> None:
    actions = np.random.default_rng(0).integers(0, 2, (60, 2))
    results: list[list[Any]] = []
    for env_fn in (lambda: gymnasium.make("CartPole-v1"), cart_pole()):
        with make_pool(where, [env_fn] * 2, seeding="per_episode") as pool:
            batches = [pool.reset(seed=3), *(pool.step(row) for row in actions)]
            results.append([(each.obs, each.reward, each.terminated, each.truncated) for each in batches])
            assert pool.spec.observation.shape == (4,)  # type: ignore[union-attr]
    for ours, theirs in zip(*results, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


def test_an_evaluation_is_that_of_the_env_in_this_process() -> None:
    def policy(obs: NDArray[Any]) -> NDArray[Any]:
        return (obs @ np.array([0.1, 0.5, 1.0, 1.0]) > 0.1).astype(np.int64)

    runs = [(cart_pole(), 1), (cart_pole(), 3), ("CartPole-v1", 3)]
    played = [stepmill.evaluate(policy, env, seeds=range(2), num_envs=n, backend="serial") for env, n in runs]
    returns = [[(each.seed, each.episode_return, each.length) for each in result.episodes] for result in played]
    assert returns[0] == returns[1] == returns[2]


def test_a_recycled_worker_has_a_new_simulator_and_the_same_episodes() -> None:
    rows: dict[bool, list[Any]] = {}
    for recycles in (False, True):
        restarts = {"recycle_after_episodes": 1} if recycles else {}
        options: dict[str, Any] = {"restarts": restarts, "seeding": "per_episode"}
        with make_pool("fork", [foreign("Walk", length=2)], **options) as pool:
            rows[recycles] = [pool.reset(seed=1).obs[0]]
            pids = set()
            for _ in range(12):
                pids.add(pool.call("pid")[0])
                rows[recycles].append(pool.step(["move"]).obs[0])
        assert (len(pids) > 1) == recycles
    np.testing.assert_array_equal(rows[False], rows[True])


def test_old_gyms_four_values_seed_and_render_are_found_out() -> None:
    with make_pool("serial", [foreign("OldWalk")], autoreset_mode="Disabled") as pool:
        pool.reset(seed=[7])
        assert pool.get_attr("seeds") == ([7],)
        first, second = pool.step([False]), pool.step([False])
        assert (first.terminated.tolist(), second.terminated.tolist()) == ([False], [True])
        assert second.obs[0].tolist() == [2, 2]  # type: ignore[index]
        pool.reset()
        pool.step([False])
        last = pool.step([True])
        assert (last.terminated.tolist(), last.truncated.tolist()) == ([False], [True])
        assert pool.render()[0].shape == (2, 2, 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize("area_bytes", [1 << 26, 1 << 12])
def test_infos_arrive_with_arrays_and_keys_of_any_kind(monkeypatch: pytest.MonkeyPatch, area_bytes: int) -> None:
    monkeypatch.setattr(process, "_AREA_BYTES", area_bytes)
    env = foreign("Walk", start=np.arange(3, dtype=np.float32))()
    assert env.reset(seed=1, options={"level": (1, 2)})[1] == {"seed": 1, "options": {"level": (1, 2)}}
    here = simulator_envs.Walk(start=np.arange(3, dtype=np.float32))
    here.reset(seed=1)
    assert find_difference(env.step("tell_much"), here.step("tell_much")) is None
    env.close()


@pytest.mark.parametrize("where", ["serial", "thread", "fork"])
def test_calls_attributes_and_pictures_are_those_of_the_env(where: str) -> None:
    with begun(make_pool(where, [foreign("Walk")] * 2)) as pool:
        assert pool.call("mark", 5, times=2) == ([5, 5], [5, 5])
        pool.set_attr("speed", [2.0, 4.0])
        assert pool.get_attr("speed") == (2.0, 4.0)
        assert pool.call(lambda env: env.length) == (10, 10)
        assert [picture[0, 0, 0] for picture in pool.render()] == [2, 2]  # type: ignore[index]
        with pytest.raises(AttributeError, match="has no attribute 'no_such'"):
            pool.get_attr("no_such")
        with pytest.raises(TypeError, match=r"the result\['parts'\]\[0\] is a builtins.object"):
            pool.get_attr("engine")
        with pytest.raises(TypeError, match=r"the argument\[0\] is a builtins.object, which cannot be sent"):
            pool.call("mark", object())


def test_the_env_function_can_be_pickled() -> None:
    env_fn = foreign("Nothing")
    assert pickle.loads(pickle.dumps(env_fn)) == env_fn


@pytest.mark.parametrize(
    ("make", "python", "kwargs", "reason"),
    [
        ("no_function", "python", {}, "'module:function' or 'path/file.py:function'"),
        ("a:b c", "python", {}, "'module:function' or 'path/file.py:function'"),
        ("a:b", [], {}, "the path of an interpreter, or a command as a list"),
        ("a:b", "python", {"level": {"map": object()}}, r"kwargs\['level'\]\['map'\] is a builtins.object"),
    ],
)
def test_wrong_arguments_are_refused_at_once(make: str, python: Any, kwargs: Any, reason: str) -> None:
    with pytest.raises(stepmill.UsageError, match=reason):
        stepmill.foreign(make, python=python, **kwargs)


def test_names_with_an_underscore_are_those_of_the_env_there() -> None:
    with stepmill.VectorEnv([cart_pole()] * 2) as envs:
        assert envs.call("_max_episode_steps") == (500, 500)  # LeRobot's evaluation asks for it
        envs.set_attr("_max_episode_steps", [7, 8])
        assert envs.get_attr("_max_episode_steps") == (7, 8)
        with pytest.raises(AttributeError, match="_no_such"):
            envs.get_attr("_no_such")


class _Poller:
    """Has an event at the poll of a number, and remembers the timeouts of all."""

    def __init__(self, event_at: int) -> None:
        self.timeouts: list[float | None] = []
        self._event_at = event_at

    def poll(self, timeout_ms: float | None) -> list[tuple[int, int]]:
        self.timeouts.append(timeout_ms)
        return [(0, 1)] if len(self.timeouts) >= self._event_at or timeout_ms is None else []


def test_a_wait_after_a_short_one_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_side, "_LOST_S", 3600.0)  # also on a busy machine
    waiter = other_side.Waiter({})
    waiter.spin_s = 3600.0
    for sleeps, event_at in ((1, 3), (0, 5), (0, 9)):
        waiter.poller = poller = _Poller(event_at)
        assert waiter.wait() == [(0, 1)]
        assert poller.timeouts.count(None) == sleeps


def test_a_wait_sleeps_for_a_while_after_others_needed_its_core(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1.0]
    monkeypatch.setattr(other_side.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(other_side.os, "sched_yield", lambda: now_s.__setitem__(0, now_s[0] + 0.003))
    waiter = other_side.Waiter({})
    waiter.spin_s = 3600.0

    def num_polls() -> int:
        waiter.poller = poller = _Poller(100)
        assert waiter.wait() == [(0, 1)]
        return len(poller.timeouts)

    assert num_polls() == 1  # it sleeps, as after any start
    for pause_s in (0.005, 0.01, 0.02):
        assert num_polls() == 2  # until the core is lost
        now_s[0] += 0.9 * pause_s
        assert num_polls() == 1
        now_s[0] += 0.2 * pause_s


def test_only_a_process_with_a_core_of_its_own_waits_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepmill._native.yields_fairly", lambda: True)
    for cores, options, expected_s in (
        (1, PoolOptions(backend="serial"), 0.0),
        (2, PoolOptions(backend="serial"), 2e-3),
        (2, PoolOptions(backend="serial", tuning={"spin_us": 0}), 0.0),
        (2, PoolOptions(backend="process", num_workers=1), 0.0),
        (3, PoolOptions(backend="process", num_workers=1), 2e-3),
        (8, PoolOptions(backend="process"), 0.0),
        (8, PoolOptions(backend="thread", num_workers=3), 2e-3),
    ):
        monkeypatch.setattr("stepmill._native.usable_cores", lambda cores=cores: cores)
        assert worker_settings(options).limits_of_envs().spin_s == pytest.approx(expected_s)
