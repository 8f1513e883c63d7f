"""Envs whose results have no fixed size: Unity's, with agents that come and go."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.envs.unity import UnityEnv, players
from tests.harness.unity_envs import ScriptedBehaviors, ScriptedGroups

IMAGE = (84, 84, 3)


def alive(agents: Any) -> list[tuple[int, float]]:
    """Agents whose episodes go on, with what they see."""
    if isinstance(agents, tuple):
        agents = {**agents[0], "done": np.zeros(len(agents[0]["agent_id"]), np.bool_)}
    rows = np.flatnonzero(~agents["done"])
    return [(int(agents["agent_id"][row]), float(agents["obs"][0][row].flat[0])) for row in rows]


def gone(agents: Any) -> list[int]:
    ended = agents[1]["agent_id"] if isinstance(agents, tuple) else agents["agent_id"][agents["done"]]
    return [int(agent) for agent in ended]


@pytest.mark.covers("U-5", "G-18")
@pytest.mark.parametrize("script", [ScriptedBehaviors, ScriptedGroups])
def test_agents_come_and_go_through_a_pool(pool_of, script):
    pool = pool_of([lambda: UnityEnv(script({"walk": [[1, 2], [2], [3, 2, 1], []]}))] * 2)

    seen = [pool.reset().obs, *(pool.step([{}, {}]).obs for _ in range(3))]

    by_step = ([1, 2], [2], [3, 2, 1], [])
    assert [[alive(env["walk"]) for env in obs] for obs in seen] == [
        [[(each, each) for each in ids]] * 2 for ids in by_step
    ]
    assert [[gone(env["walk"]) for env in obs] for obs in seen] == [[[]] * 2, [[1]] * 2, [[]] * 2, [[3, 2, 1]] * 2]


@pytest.mark.covers("U-5", "G-18")
@pytest.mark.parametrize("script", [ScriptedBehaviors, ScriptedGroups])
def test_agents_of_several_envs_are_players_with_env_and_agent_id(pool_of, script):
    rows = [{"walk": [[1, 2], [2, 4]], "fly": [[9], [9]]}, {"walk": [[5], []]}]
    pool = pool_of([lambda script=script, each=each: UnityEnv(script(each, interrupts=[1])) for each in rows])
    pool.reset()
    seen = players(pool.step([{}, {}]), "walk")

    told = zip(
        *(column.tolist() for column in (seen.env_id, seen.agent_id, seen.alive, seen.terminated, seen.truncated)),
        strict=True,
    )
    assert sorted(told) == [
        (0, 1, False, False, True),
        (0, 2, True, False, False),
        (0, 4, True, False, False),
        (1, 5, False, True, False),
    ]
    assert seen.obs[0][:, 0].tolist() == seen.agent_id.tolist() == seen.reward.tolist()
    assert seen.slot[seen.alive].tolist() == [0, 1]
    assert len(seen) == 4
    with pytest.raises(KeyError, match="swim"):
        players(pool.step([{}, {}]), "swim")


def test_actions_reach_the_agents_of_their_behaviour(pool_of):
    pool = pool_of([lambda: UnityEnv(ScriptedBehaviors({"walk": [[1], [1]], "fly": [[7], [7]]}))])
    pool.reset()
    pool.step([{"walk": (np.ones((1, 2), np.float32), None), "fly": (None, None)}])

    assert pool.get_attr("actions")[0] == {"walk": ([[1.0, 1.0]], [[]])}


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_images_lie_in_the_slab_where_there_is_room(room):
    script = {"walk": [[1, 2]] * 3}
    env_fn = partial(_image_env, script, room)
    with stepmill.Pool(
        [env_fn], backend="process", num_workers=1, options=stepmill.PoolOptions(context="fork")
    ) as pool:
        pool.reset()
        obs = pool.step([{}]).obs[0]
        overflow = os.fstat(pool._runtime.slab.fds[2]).st_size

    assert obs["walk"][0]["obs"][0].shape == (2, *IMAGE)
    assert (overflow == 0) is (room > 0)


def _image_env(script: dict[str, list[list[int]]], room: int) -> UnityEnv:
    return UnityEnv(ScriptedBehaviors(script, shape=IMAGE), payload_bytes=room)


def test_an_env_of_neither_generation_is_refused():
    with pytest.raises(stepmill.UsageError, match="neither get_steps"):
        UnityEnv(object())
