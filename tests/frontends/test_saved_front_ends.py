"""Each front-end that can be saved goes on elsewhere with the same steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from tests.contract.test_saving import LOGGED, Wanderer, record

make = partial(gymnasium.make, "CartPole-v1", max_episode_steps=20)
FIRST, LAST = 33, 90  # steps before the save, and in all
Play = Callable[[Any, Any, int, int], list[Any]]  # of a front-end, its newest results, and the numbers of the steps


def actions_of(step: int, num: int) -> Any:
    return np.array([(step * 7 + env_id * 3) % 5 % 2 for env_id in range(num)])


def play_vector_env(envs: Any, newest: Any, first: int, last: int) -> list[Any]:
    return [envs.step(actions_of(step, 3)) for step in range(first, last)]


def play_tianshou(envs: Any, newest: Any, first: int, last: int) -> list[Any]:
    found, ended = [], np.flatnonzero(newest[2] | newest[3])
    for step in range(first, last):
        if len(ended):
            found.append(envs.reset(ended))
        found.append(envs.step(actions_of(step, 3)))
        ended = np.flatnonzero(found[-1][2] | found[-1][3])
    return found


def play_parallel(env: Any, newest: Any, first: int, last: int) -> list[Any]:
    found = []
    for step in range(first, last):
        if env.agents:
            found.append(env.step({agent: (step + len(agent)) % 5 for agent in env.agents}))
        else:
            found.append(env.reset())
    return found


def play_agents(envs: Any, newest: Any, first: int, last: int) -> list[Any]:
    return [envs.step(np.arange(envs.num_envs) % 5) for step in range(first, last)]


def play_torchrl(env: Any, newest: Any, first: int, last: int) -> list[Any]:
    import torch

    found = []
    for step in range(first, last):
        action = torch.from_numpy(actions_of(step, 3))
        if env.action_spec.shape != (3,):
            action = torch.nn.functional.one_hot(action, 2)
        result, newest = env.step_and_maybe_reset(newest.set("action", action))
        found.append({str(key): value.numpy().copy() for key, value in result.items(True, True)})
    return found


def play_alf(env: Any, newest: Any, first: int, last: int) -> list[Any]:
    return [env.step(np.full((3, 7), step % 3, np.float32)) for step in range(first, last)]


def make_torchrl(name: str) -> Any:
    pytest.importorskip("torchrl")
    torchrl = pytest.importorskip("stepmill.frontends.torchrl")
    given = {"StepmillEnv": ([make] * 3,), "AsyncStepmillEnv": ([make] * 3,)}.get(name, (3, make))
    options = stepmill.PoolOptions(backend="process", num_workers=2, **LOGGED)
    return getattr(torchrl, name)(*given, options=options)


def make_vector_env() -> Any:
    return stepmill.VectorEnv([make] * 3, num_workers=2, **LOGGED)


def make_sb3() -> Any:
    pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.vec_env import VecMonitor

    from stepmill.frontends.sb3 import SB3VecEnv

    return VecMonitor(SB3VecEnv([make] * 3, num_workers=2, **LOGGED))


def make_tianshou() -> Any:
    pytest.importorskip("tianshou")
    from stepmill.frontends.tianshou import StepmillVectorEnv

    return StepmillVectorEnv([make] * 3, backend="process", num_workers=2, **LOGGED)


def make_pettingzoo(*, is_vector: bool) -> Any:
    pytest.importorskip("pettingzoo")
    from stepmill.frontends.pettingzoo import AgentVectorEnv, StepmillParallelEnv
    from tests.harness.envs_of_other_apis import Tag

    return AgentVectorEnv([Tag] * 2, **LOGGED) if is_vector else StepmillParallelEnv(Tag, **LOGGED)


def make_alf() -> Any:
    from stepmill.frontends.alf import FastParallelEnvironment
    from tests.harness.alf_envs import RandomAlf

    options = stepmill.PoolOptions(backend="process", **LOGGED)
    return FastParallelEnvironment([RandomAlf] * 3, as_tensors=False, options=options)


TORCHRL = ("StepmillEnv", "ParallelEnv", "AsyncStepmillEnv", "MultiThreadedEnv")
FRONT_ENDS: dict[str, tuple[Callable[[], Any], Play]] = {
    "VectorEnv": (make_vector_env, play_vector_env),
    "SB3VecEnv": (make_sb3, lambda *arguments: [each[:3] for each in play_vector_env(*arguments)]),
    "Tianshou": (make_tianshou, play_tianshou),
    "StepmillParallelEnv": (partial(make_pettingzoo, is_vector=False), play_parallel),
    "AgentVectorEnv": (partial(make_pettingzoo, is_vector=True), play_agents),
    **{name: (partial(make_torchrl, name), play_torchrl) for name in TORCHRL},
    "ALF": (make_alf, play_alf),
}


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_restored_front_end_takes_the_steps_of_the_saved_one(name: str) -> None:
    make_envs, play = FRONT_ENDS[name]
    envs = make_envs()
    if name == "SB3VecEnv":
        envs.seed(0)
    newest = envs.reset() if name in ("SB3VecEnv", "ALF") else envs.reset(seed=0)
    if name == "Tianshou":
        newest = envs.step(actions_of(0, 3))
    before = play(envs, newest, 1, FIRST)
    saved = stepmill.save(envs, None)
    other = make_envs()
    restored = stepmill.restore(other, saved)
    if name in TORCHRL:  # a root, as of a reset
        np.testing.assert_array_equal(restored["observation"].numpy(), saved.obs)
        newest = restored.clone()
    else:
        newest = before[-1]
        assert record(restored[: len(newest)]) == record(newest)
    expected = record(play(envs, newest, FIRST, LAST))
    assert record(play(other, restored, FIRST, LAST)) == expected
    for each in (envs, other):
        each.close()


def test_a_restored_async_pool_receives_what_the_saved_one_would_have_received() -> None:
    async def run(pool: stepmill.AsyncPool, history: list[Any], num: int) -> None:
        for _ in range(num):
            batch = (await pool.receive(3)).batch
            order = np.argsort(batch.env_id)
            history.append(record([batch.obs["place"][order], batch.reward[order], batch.terminated[order]]))
            ended = batch.terminated | batch.truncated
            if ended.any():
                pool.reset_async(env_ids=batch.env_id[ended].tolist())
            if not ended.all():
                pool.send(np.full(int((~ended).sum()), len(history) % 7), batch.env_id[~ended].tolist())

    async def main() -> None:
        async with stepmill.AsyncPool(Wanderer, 3, num_workers=2, **LOGGED) as pool:
            pool.reset_async(seed=5)
            history: list[Any] = []
            await run(pool, history, 20)
            saved = stepmill.save(pool, None)
            before = list(history)
            await run(pool, history, 30)
        async with stepmill.AsyncPool(Wanderer, 3, num_workers=1, **LOGGED) as pool:
            stepmill.restore(pool, saved)
            await run(pool, before, 30)
        assert before == history

    asyncio.run(main())


def test_torchrl_envs_with_asynchronous_tasks_are_saved_once_these_are_received() -> None:
    envs = make_torchrl("AsyncStepmillEnv")
    roots = envs.reset(seed=0)
    envs.async_step_send(envs.rand_action(roots)[:2], [0, 1])
    with pytest.raises(stepmill.BusyEnvError, match=r"Receive \[0, 1\] first"):
        stepmill.save(envs, None)
    envs.async_step_recv(2)
    saved = stepmill.save(envs, None)
    other = make_torchrl("AsyncStepmillEnv")
    stepmill.restore(other, saved)
    found = []
    for each in (envs, other):
        each.async_step_send(roots.clone().set("action", envs.full_action_spec["action"].one()), [0, 1, 2])
        results = each.async_step_recv(3)
        order = results["env_index"].argsort()
        found.append(record(results["next", "observation"][order].numpy()))
        each.close()
    assert found[0] == found[1]


def test_the_seeds_of_the_next_reset_and_infos_of_older_steps_are_saved_with_a_front_end() -> None:
    torchrl = pytest.importorskip("stepmill.frontends.torchrl")
    torch = pytest.importorskip("torch")
    specs = {"seed": pytest.importorskip("torchrl.data").Unbounded((), dtype=torch.int64)}

    def make_envs() -> Any:
        return torchrl.StepmillEnv([Flat] * 2, info_specs=specs, num_workers=1, **LOGGED)

    envs, other = make_envs(), make_envs()
    envs.set_seed(7)
    root = envs.reset()
    envs.step(root.set("action", envs.full_action_spec["action"].zero()))
    envs.set_seed(40)
    restored = stepmill.restore(other, stepmill.save(envs, None))
    assert restored["info", "seed"].tolist() == [7, 8]
    assert other.reset()["info", "seed"].tolist() == envs.reset()["info", "seed"].tolist() == [40, 41]
    for each in (envs, other):
        each.close()


class Flat(gymnasium.Env[Any, Any]):
    """Tells the seed of its reset in the info of the reset alone."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {"seed": seed}

    def step(self, action: Any) -> Any:
        return np.ones(1, np.float32), 0.0, False, False, {}


def test_the_seeds_that_sb3_has_set_for_the_next_reset_are_saved() -> None:
    pytest.importorskip("stable_baselines3")
    envs, other = make_sb3(), make_sb3()
    envs.seed(3)
    stepmill.restore(other, stepmill.save(envs, None))
    assert record(other.reset()) == record(envs.reset())
    for each in (envs, other):
        each.close()


def test_a_front_end_goes_on_from_positions_that_some_of_its_envs_are_given() -> None:
    envs, other = make_torchrl("StepmillEnv"), make_torchrl("StepmillEnv")
    play_torchrl(envs, envs.reset(seed=0), 0, 7)
    saved = stepmill.save(envs, None, env_ids=[1])
    root = other.fake_tensordict().exclude("next").set("action", envs.full_action_spec["action"].one())
    stepmill.restore(other, saved, env_ids=[0, 1, 2])
    expected = envs.step(root.clone())["next", "observation"][1]
    assert (other.step(root.clone())["next", "observation"] == expected).all()
    for each in (envs, other):
        each.close()


def test_a_rollout_goes_on_from_a_position_that_one_of_its_envs_is_given() -> None:
    with stepmill.Pool([make] * 2, num_workers=1, **LOGGED) as pool:
        rollout = stepmill.Rollout(pool, 4)
        rollout.reset(seed=0)
        rollout.collect(lambda obs, ids: np.zeros(2, np.int64))
        saved = stepmill.save(pool, None, env_ids=[1])
        rollout.collect(lambda obs, ids: np.zeros(2, np.int64))
        stepmill.restore(rollout, saved, env_ids=[0])
        seen: list[Any] = []

        def look(obs: Any, ids: Any) -> Any:
            seen.append(obs.copy())
            return np.zeros(2, np.int64)

        rollout.collect(look)
        np.testing.assert_array_equal(seen[0][0], saved.obs[0])


def test_front_ends_with_a_state_of_their_own_are_refused(made) -> None:
    from stepmill.frontends.multi_env import MultiEnv, create_subprocess_envs

    envs = made(MultiEnv(create_subprocess_envs([make])))
    with pytest.raises(stepmill.UsageError, match="a MultiEnv has no pool that can be saved"):
        stepmill.save(envs, None)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_what_is_saved_right_after_a_restore_is_what_was_restored(mode: Any) -> None:
    options: dict[str, Any] = {"autoreset_mode": mode, "num_workers": 2, **LOGGED}
    with (
        stepmill.Pool([Wanderer] * 4, **options) as pool,
        stepmill.Pool([Wanderer] * 4, **options) as second,
        stepmill.Pool([Wanderer] * 4, **options) as third,
    ):
        pool.reset(seed=3)
        num_ended = 0
        for step in range(40):
            newest = pool.step(np.arange(4) + step)
            num_ended += int(newest.terminated.sum())
            if step % 3:
                continue
            assert record(stepmill.restore(second, stepmill.save(pool, None))) == record(newest)
            assert record(stepmill.restore(third, stepmill.save(second, None))) == record(newest)
        assert num_ended
        for step in range(60):
            expected = record(pool.step(np.arange(4) + step))
            assert record(second.step(np.arange(4) + step)) == record(third.step(np.arange(4) + step)) == expected
