"""Kernels may declare infos: numbers and arrays of numbers, which batches have as arrays under their names."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import stepmill
from stepmill.pool.infos import rows_of

pytest.importorskip("numba")

NUM_ENVS = 5
INFOS = np.dtype([("is_even", "?"), ("half", "f4"), ("last", "i8", (2,)), ("total", "f8")])


@stepmill.kernel(
    observation_space=spaces.Box(-np.inf, np.inf, (2,), np.float64),
    action_space=spaces.Discrete(3),
    state=np.dtype([("count", "i4"), ("total", "f8")]),
    infos=INFOS,
)
class counter:  # noqa: N801
    """Counts to a random number. A reset writes one of its infos."""

    def reset(state: Any, rng: Any, obs: Any, info: Any) -> None:
        state.count = 0
        state.total = rng.integers(3, 9)
        info.total = state.total
        obs[0] = state.count
        obs[1] = state.total

    def step(state: Any, action: Any, rng: Any, obs: Any, info: Any) -> tuple[float, bool, bool]:
        state.count += action
        info.is_even = state.count % 2 == 0
        info.half = state.count / 2
        info.last[0] = action
        info.last[1] = -state.count
        info.total = state.total
        obs[0] = state.count
        obs[1] = state.total
        return 1.0, state.count >= state.total, False


def _pool(backend: str, mode: str, **options: Any) -> stepmill.Pool:
    return stepmill.Pool([counter] * NUM_ENVS, backend=backend, autoreset_mode=mode, **options)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_infos_are_those_of_the_same_env_in_python(mode: str) -> None:
    actions = np.random.default_rng(0).integers(0, 3, (60, NUM_ENVS))
    with _pool("kernel", mode, num_workers=2) as ours, _pool("serial", mode) as theirs:
        batches = [(ours.reset(seed=3), theirs.reset(seed=3))]
        for action in actions:
            batches.append((ours.step(action), theirs.step(action)))
            over = batches[-1][0].terminated
            if mode == "Disabled" and over.any():
                ids = np.flatnonzero(over)
                batches.append((ours.reset(env_ids=ids), theirs.reset(env_ids=ids)))
        num_ends = 0
        for mine, yours in batches:
            np.testing.assert_array_equal(mine.obs, yours.obs)
            expected = dict(yours.info)
            for name in INFOS.names or ():
                np.testing.assert_array_equal(mine.info[name], expected[name], err_msg=name)
                assert mine.info[name].dtype == INFOS[name].base
            own = rows_of(yours.info)
            for rows in (range(mine.num_rows), range(0, mine.num_rows, 2)):
                np.testing.assert_equal(rows_of(mine.info, rows), [each for each in own if each[0] in rows])
            assert [type(info["is_even"]) for _, info in own if "is_even" in info] == [bool] * mine.num_rows
            finals = [info["final_info"] for _, info in rows_of(mine.info) if "final_info" in info]
            wanted = [info["final_info"] for _, info in rows_of(yours.info) if "final_info" in info]
            assert [_plain(info) for info in finals] == [_plain(info) for info in wanted]
            num_ends += len(finals)
        assert (num_ends > 5) == (mode == "SameStep")


def _plain(info: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in info.items()}


def _dtypes(info: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in dict(info).items():
        is_nested = isinstance(value, dict)
        found.update(_dtypes(value, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": value.dtype})
    return found


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("backend", ["kernel", "serial"])
def test_infos_have_the_types_that_they_have_in_gymnasiums_vector_env(backend: Any, mode: str) -> None:
    theirs = SyncVectorEnv([partial(counter, compiled=False)] * NUM_ENVS, autoreset_mode=AutoresetMode(mode))
    with stepmill.VectorEnv([counter] * NUM_ENVS, backend=backend, autoreset_mode=mode) as ours:
        batches = [(ours.reset(seed=3)[-1], theirs.reset(seed=3)[-1])]
        for _ in range(12):
            actions = np.full(NUM_ENVS, 2)
            batches.append((ours.step(actions)[-1], theirs.step(actions)[-1]))
        assert any("final_info" in theirs for _, theirs in batches) == (mode == "SameStep")
        for mine, yours in batches:
            found, wanted = _dtypes(mine), _dtypes(yours)
            assert wanted["is_even"] == np.bool_
            assert {name: wanted[name] for name in found} == found


def test_a_kernel_gives_the_same_infos_as_python_and_compiled() -> None:
    compiled, plain = counter(), counter(compiled=False)
    for env in (compiled, plain):
        env.reset(seed=5)
    for action in (1, 2, 0, 1):
        assert _plain(compiled.step(action)[4]) == _plain(plain.step(action)[4])


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([("name", "U3")], r"\['name'\] are not, or are names that pools use themselves"),
        ([("episode", "f8")], r"\['episode'\] are not"),
        ("f8", "must be 1 to 100 named numbers"),
        ([("inner", [("a", "f8")])], r"\['inner'\] are not"),
    ],
)
def test_infos_that_are_no_numbers_are_refused(infos: Any, message: str) -> None:
    make = stepmill.kernel(
        observation_space=counter.observation_space, action_space=counter.action_space, state=counter.state, infos=infos
    )
    with pytest.raises(stepmill.UsageError, match=message):
        make(type("odd", (), {"reset": counter.reset, "step": counter.step}))


def test_functions_without_an_argument_for_infos_are_refused() -> None:
    make = stepmill.kernel(
        observation_space=counter.observation_space, action_space=counter.action_space, state=counter.state
    )
    with pytest.raises(
        stepmill.UsageError, match=r"reset\(state, rng, obs, info\) .* must be reset\(state, rng, obs\)"
    ):
        make(type("odd", (), {"reset": counter.reset, "step": counter.step}))


@pytest.mark.parametrize(
    ("env_id", "arguments"),
    [("Taxi-v4", {}), ("FrozenLake-v1", {"success_rate": 0.6}), ("CliffWalkingSlippery-v1", {})],
)
def test_tables_say_how_likely_a_step_was_and_which_actions_have_an_effect(env_id: str, arguments: Any) -> None:
    ours, theirs = stepmill.kernels.find(env_id, **arguments)(), gymnasium.make(env_id, **arguments).unwrapped
    obs, info = ours.reset(seed=0)
    theirs.reset(seed=0)
    assert info["prob"] == 1.0
    for count in range(300):
        before, action = int(obs), count % int(theirs.action_space.n)
        obs, reward, terminated, _, info = ours.step(action)
        likely = [p for p, s, r, t in theirs.P[before][action] if (s, r, t) == (obs, reward, terminated)]
        assert info["prob"] in likely
        if env_id == "Taxi-v4":
            np.testing.assert_array_equal(info["action_mask"], theirs.action_mask(int(obs)))
            assert info["action_mask"].dtype == np.int8
        if terminated:
            obs, info = ours.reset()


def test_make_vec_has_the_infos_of_gymnasium() -> None:
    ours, theirs = stepmill.make_vec("Taxi-v4", 3, backend="kernel"), gymnasium.make_vec("Taxi-v4", 3)
    for envs in (ours, theirs):
        envs.reset(seed=0)
    mine, yours = ours.step(np.zeros(3, np.int64))[4], theirs.step(np.zeros(3, np.int64))[4]
    for name in ("prob", "action_mask"):
        assert (mine[name].shape, mine[name].dtype) == (yours[name].shape, yours[name].dtype)
    ours.close()
    theirs.close()
