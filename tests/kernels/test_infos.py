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
from tests.harness.pools import begun

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

    def read_total(state: Any) -> float:
        return float(state.total)


def _pool(backend: str, mode: str, **options: Any) -> stepmill.Pool:
    return stepmill.Pool([counter] * NUM_ENVS, backend=backend, autoreset_mode=mode, **options)


def _values(info: Any) -> dict[str, Any]:
    """Return the merged info, with objects as lists of dicts."""
    return {name: value.tolist() for name, value in dict(info).items() if name in INFOS.names}


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


def test_an_info_that_a_reset_does_not_write_is_zero() -> None:
    with begun(_pool("kernel", "NextStep")) as pool:
        pool.step(np.full(NUM_ENVS, 1))
        info = pool.reset().info
        assert info["last"].tolist() == [[0, 0]] * NUM_ENVS
        assert info["half"].tolist() == [0.0] * NUM_ENVS
        assert (info["total"] >= 3.0).all()


def test_methods_and_fields_are_those_of_the_state() -> None:
    with _pool("kernel", "NextStep") as pool:
        info = pool.reset(seed=0).info
        assert pool.call("read_total") == tuple(info["total"].tolist())
        assert pool.get_attr("total") == tuple(info["total"].tolist())


def test_envs_that_are_stepped_one_by_one_have_their_own_infos() -> None:
    with begun(_pool("kernel", "NextStep")) as pool:
        pool.send(np.array([2, 1]), [3, 1])
        batch = pool.recv(2)
        given = dict(zip(batch.env_id.tolist(), batch.info["last"][:, 0].tolist(), strict=True))
        assert given == {3: 2, 1: 1}


def test_a_snapshot_goes_on_with_the_same_infos() -> None:
    with begun(_pool("kernel", "SameStep")) as pool:
        pool.step(np.full(NUM_ENVS, 1))
        snapshot = stepmill.save(pool, None)
        expected = [_values(pool.step(np.full(NUM_ENVS, 1)).info) for _ in range(10)]
        stepmill.restore(pool, snapshot)
        assert [_values(pool.step(np.full(NUM_ENVS, 1)).info) for _ in range(10)] == expected


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


@pytest.mark.parametrize("backend", ["kernel", "thread"])
def test_a_row_without_a_step_has_no_infos_of_the_step_before(backend: str) -> None:
    limits = {"num_episodes": 1, "on_fault": "truncate", "autoreset_mode": "Disabled"}
    with begun(stepmill.Pool([counter] * NUM_ENVS, backend=backend, **limits)) as pool:
        while not (pool.exhausted.any() and not pool.exhausted.all()):
            batch = pool.step([1] * NUM_ENVS)
        exhausted = pool.exhausted
        batch = pool.step([1] * NUM_ENVS)

        assert not batch.info["last"][exhausted].any()
        assert not batch.info["total"][exhausted].any()
        assert batch.info["last"][~exhausted].any()
