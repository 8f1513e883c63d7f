"""Agents that come and go: slots, capacity, and one row per agent that is present."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from gymnasium import spaces

import stepmill
from stepmill.envs.ragged import AgentSlots, RaggedEnv
from tests.harness.agents import Agents
from tests.harness.envs_of_other_apis import StackedAgents, Tag
from tests.harness.pools import begun, counting_envs


class Crowd(RaggedEnv):
    """Agent n comes at step n and ends at step n + stay, by turns terminated and truncated. Its actions are its rewards."""

    single_observation_space = spaces.Dict({"id": spaces.Box(0, 1000, (2,), np.float32)})
    single_action_space = spaces.Discrete(100)

    def __init__(self, capacity: int = 3, stay: int = 2, *, is_open: bool = True, num: int = 1000) -> None:
        self.capacity, self.stay, self.is_open, self.num = capacity, stay, is_open, num
        self.t = 0
        self.heard: list[dict[int, int]] = []

    def see(self):
        there = [n for n in range(max(self.t - self.stay, 0), self.t + 1) if n < self.num]
        return {n: {"id": np.full(2, n, np.float32)} for n in there}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.see(), {}

    def step(self, actions):
        self.heard.append({agent: int(action) for agent, action in actions.items()})
        self.t += 1
        leaves = self.t - self.stay
        terminated = {leaves: True} if leaves in self.see() and leaves % 2 == 0 else {}
        truncated = {leaves: True} if leaves in self.see() and leaves % 2 else {}
        return (
            self.see(),
            {agent: float(action) for agent, action in actions.items()},
            terminated,
            truncated,
            {"t": self.t},
        )


@pytest.mark.covers("G-18", "U-5")
def test_agents_keep_their_slots_while_they_are_there(pool_of):
    pool = pool_of([Crowd] * 2)
    first = pool.reset(seed=0)
    assert first.info["agent_id"].tolist() == [[0, -1, -1]] * 2
    assert first.alive.tolist() == [[True, False, False]] * 2
    seats = [pool.step(np.full((2, 3), 7)).info["agent_id"][0].tolist() for _ in range(4)]
    assert seats == [[0, 1, -1], [0, 1, 2], [3, 1, 2], [3, 4, 2]]
    assert pool.get_attr("heard")[1] == [{0: 7}, {0: 7, 1: 7}, {1: 7, 2: 7}, {3: 7, 2: 7}]


@pytest.mark.covers("G-18", "U-5")
def test_players_are_the_rows_of_the_agents_that_are_present(pool_of):
    pool = begun(pool_of([Crowd] * 3))
    pool.step(np.zeros((3, 3), int))
    pool.send(np.array([[5, 6, 0], [8, 9, 0]]), [2, 0])
    players = pool.recv(2).players
    order = np.lexsort((players.agent_id, players.env_id))
    assert players.env_id[order].tolist() == [0, 0, 0, 2, 2, 2]
    assert players.agent_id[order].tolist() == [0, 1, 2] * 2
    assert players.obs["id"][order][:, 0].tolist() == [0, 1, 2] * 2
    assert players.reward[order].tolist() == [8, 9, 0, 5, 6, 0]
    assert players.terminated[order].tolist() == [True, False, False] * 2
    assert players.alive[order].tolist() == [False, True, True] * 2
    assert len(players) == 6


def test_actions_find_their_agents_by_row_and_slot(pool_of):
    pool = pool_of([Crowd] * 2)
    batch = pool.reset(seed=0)
    for _ in range(3):
        players = batch.players
        actions = np.zeros((2, 3), int)
        actions[players.row, players.slot] = 10 * players.env_id + players.agent_id
        batch = pool.step(actions)
    assert pool.get_attr("heard") == tuple(
        [{0: 10 * env}, {0: 10 * env, 1: 10 * env + 1}, {1: 10 * env + 1, 2: 10 * env + 2}] for env in range(2)
    )


def test_more_agents_than_the_capacity_are_refused_by_number(pool_of):
    pool = begun(pool_of([partial(Crowd, 2), partial(Crowd, 2, 1)]))
    pool.step(np.zeros((2, 2), int))
    with pytest.raises(stepmill.EnvError, match="3 agents are present at once, but the env's capacity is 2") as caught:
        pool.step(np.zeros((2, 2), int))
    assert caught.value.env_id == 0
    assert pool.recv().env_id.tolist() == [1]


def test_an_episode_may_be_over_when_the_last_agent_has_gone(pool_of):
    pool = begun(pool_of([partial(Crowd, 3, 1, is_open=False, num=2)]))
    one = pool.step([[1, 1, 1]])
    assert one.terminated.tolist() == [[True, False, False]]
    assert "episode" not in one.info
    two = pool.step([[1, 1, 1]])
    assert not two.alive.any()
    assert two.info["episode"]["l"].tolist() == [2]
    assert pool.step([[1, 1, 1]]).info["agent_id"].tolist() == [[0, -1, -1]]


def test_agents_with_fixed_slots_are_players_too(pool_of):
    pool = begun(pool_of([lambda: StackedAgents(Tag(3))] * 2))
    pool.step(np.ones((2, 3), int))
    pool.step(np.ones((2, 3), int))
    players = pool.step(np.ones((2, 3), int)).players
    assert players.agent_id.tolist() == [1, 2, 1, 2]
    assert players.truncated.tolist() == [True, False] * 2
    assert players.obs["own"].shape == (4, 2)


def test_an_env_without_agents_has_no_players(pool_of):
    pool = pool_of(counting_envs(2))
    with pytest.raises(stepmill.UsageError, match="these envs have no agents"):
        _ = pool.reset().players


def test_observations_without_a_dimension_for_agents_have_no_players(pool_of):
    pool = pool_of([Tag] * 2)
    with pytest.raises(stepmill.UsageError, match="no dimension for agents"):
        _ = pool.reset().players


def test_a_batch_without_agents_has_no_rows(pool_of):
    pool = pool_of([Agents] * 2)
    pool.reset()
    for _ in range(3):
        batch = pool.step(np.ones((2, 3), int))
    assert batch.players.terminated.tolist() == [True, True]
    assert len(pool.recv(min_envs=0).players) == 0


def test_a_free_slot_goes_to_the_next_agent_that_comes():
    slots = AgentSlots(3)
    assert slots.assign([7, 3]) == {7: 0, 3: 1}
    assert slots.assign([3, 9, 8]) == {9: 0, 3: 1, 8: 2}
    assert slots.assign([]) == {}
    assert slots.agents.tolist() == [-1, -1, -1]
    with pytest.raises(stepmill.UsageError, match="must be 0 or more"):
        slots.assign([-1])


def test_a_reward_for_an_absent_agent_is_the_envs_fault(pool_of):
    class Forgetful(Crowd):
        def step(self, actions):
            obs, rewards, *rest = super().step(actions)
            return (obs, {**rewards, 77: 1.0}, *rest)

    pool = pool_of([Forgetful])
    pool.reset()
    with pytest.raises(stepmill.EnvError, match="agent 77 has a reward or a flag but no observation"):
        pool.step([[0, 0, 0]])
